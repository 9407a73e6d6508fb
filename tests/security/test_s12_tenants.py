"""S12: what one tenant has sent cannot be felt by another, on any route, in any cache (CVE-2025-46570).

Tenants by API key, over every route, are in `test_s17_authentication.py`; here the same by the request's own salt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from semel.cache import LruCache
from semel.core import Tenant
from semel.render import ChatRenderer, Pipeline
from tests.frontend.rig import Rig, rig
from tests.frontend.test_intents import TAKES_ITEMS, body_of
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import FEATURE_BYTES, Drawing

__all__ = ["folder", "parts_renderer"]

CHAT = "/v1/chat/completions"


@pytest.fixture
def drawing(parts_renderer: ChatRenderer) -> Drawing:
    return Drawing(parts_renderer, LruCache(64 * FEATURE_BYTES))


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES) as made:
        yield made


def salted(path: str, salt: str | None) -> dict[str, Any]:
    return body_of(path, 1) | ({} if salt is None else {"cache_salt": salt})


def hits(app: Rig) -> float:
    return sum(map(float, app.metrics("semel_mm_cache_hits_total").values()))


async def test_a_naive_identity_tells_one_tenant_what_another_has_sent(
    app: Rig, drawing: Drawing, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Pipeline._identity

    def naive(self: Pipeline, modality: Any, options: Any, tenant: Tenant | None) -> Any:
        return real(self, modality, options, None)

    monkeypatch.setattr(Pipeline, "_identity", naive)
    for salt in ("mine", "yours"):
        await app.ok(CHAT, salted(CHAT, salt))
    assert drawing.processed == [1]
    assert hits(app) > 0


@pytest.mark.parametrize("path", sorted(TAKES_ITEMS))
async def test_nothing_that_another_tenant_sent_is_a_hit(app: Rig, drawing: Drawing, path: str) -> None:
    for salt in ("mine", "yours", None, "", "mine "):
        before = hits(app), len(drawing.processed)
        await app.ok(path, salted(path, salt))
        assert (hits(app), len(drawing.processed)) == (before[0], before[1] + 1)
