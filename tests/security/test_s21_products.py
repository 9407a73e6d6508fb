"""S21: valid but dear. What a request multiplies is bounded as a product, and nobody goes first who may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from semel.cache import LruCache
from semel.core import Keyring
from semel.errors import InvalidRequest
from semel.frontend.api.openai.requests import CompletionRequest
from semel.frontend.service import FrontendState
from semel.render import ChatRenderer
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing

KEYS = {"acme": "a-key-that-acme-sends", "globex": "a-key-that-globex-sends"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("prompts", "answers", "refused"), [(256, 1, False), (2, 128, False), (3, 128, True), (256, 128, True)]
)
def test_prompts_times_answers_have_one_bound(prompts: int, answers: int, refused: bool) -> None:
    body: dict[str, Any] = {"prompt": ["hi"] * prompts, "n": answers}
    if refused:
        with pytest.raises(InvalidRequest, match=f"{prompts * answers:,} sequences; the limit is 256"):
            CompletionRequest.model_validate(body)
    else:
        CompletionRequest.model_validate(body)


def test_mutant_each_alone_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.frontend.api.openai.requests._MAX_SEQUENCES", 256 * 128)
    assert CompletionRequest.model_validate({"prompt": ["hi"] * 256, "n": 128}).n == 128


@pytest.fixture
async def app(folder: Path, parts_renderer: ChatRenderer) -> AsyncIterator[Rig]:
    keys = Keyring(KEYS.items())
    async with rig(folder, Drawing(parts_renderer, LruCache(1 << 20)).pipeline, keys=keys) as app:
        app.service.priority_tenants = frozenset({"acme"})
        yield app


async def statuses(app: Rig, tenant: str) -> list[int]:
    """What a tenant's requests with a priority are answered with."""
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "priority": -5},
        COMPLETIONS: {"prompt": "hi", "priority": -5},
        "/inference/v1/generate": {"token_ids": [65, 66], "sampling_params": {"max_tokens": 1}, "priority": -5},
    }
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    answers = [await app.post(path, body, **headers) for path, body in bodies.items()]
    return [answer.status_code for answer in answers]


async def test_only_a_tenant_that_the_operator_names_may_go_first(app: Rig) -> None:
    assert await statuses(app, "acme") == [200, 200, 200]
    assert await statuses(app, "globex") == [400, 400, 400]
    plain = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await app.post(CHAT, plain, authorization=f"Bearer {KEYS['globex']}")).status_code == 200


async def test_mutant_without_the_check_every_tenant_goes_first(app: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontendState, "check_priority", lambda *_: None)
    assert await statuses(app, "globex") == [200, 200, 200]
