"""S21: while others ask, one tenant has no more than a share of a frontend's bytes and places. Over a real socket.

The rules of the budget are in `tests/frontend/test_budget_shares.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.cache import LruCache
from semel.core import Feature, Keyring, Media
from semel.fairness.shares import Claims
from semel.frontend.budget import Account, Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.render import ChatRenderer
from tests.frontend.rig import Rig, rig
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import FEATURE_BYTES, Drawing, chat, drawn
from tests.waiting import until
from tests.web.test_server import served

__all__ = ["folder", "parts_renderer"]

KEYS = {"acme": "acme-0123456789abcdef", "globex": "globex-0123456789abcdef"}
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "?"}]}
LIMITS = BudgetLimits(max_request_bytes=1 << 20, max_bytes=4 << 20, max_requests=16)
STALLED_BYTES = (1 << 20) - 4_096


class Greedy(Claims[Account]):
    """The wrong implementation: first come, first served."""

    def to_revoke(self, tenant: str, amount: int) -> Sequence[Account] | None:  # noqa: ARG002
        return () if self.shares.fits(amount) else None


@dataclass
class Frontend:
    """A frontend on a socket, with two tenants."""

    app: Rig
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def budget(self) -> Budget:
        return self.app.service.budget

    async def post(self, tenant: str, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as client:
            return await client.post(path, json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"})

    async def stall(self, tenant: str, nbytes: int) -> asyncio.StreamReader:
        """Send most of a body, and then nothing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS[tenant]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {nbytes + 1}\r\n\r\n"
        )
        writer.write(head.encode() + b" " * nbytes)
        await writer.drain()
        self.writers.append(writer)
        return reader

    def leave(self) -> None:
        for writer in self.writers:
            writer.close()


@asynccontextmanager
async def frontend(folder: Path, renderer: ChatRenderer, limits: BudgetLimits = LIMITS) -> AsyncIterator[Frontend]:
    async with AsyncExitStack() as stack:
        pipeline = Drawing(renderer, LruCache(8 * FEATURE_BYTES)).pipeline
        app = await stack.enter_async_context(rig(folder, pipeline, keys=Keyring(KEYS.items())))
        app.service.budget = Budget(limits)
        app.service.refusals = RefusalLimits(per_s=0)
        server = await stack.enter_async_context(served(app.app))
        made = Frontend(app, server.port)
        stack.callback(made.leave)
        yield made


async def error_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        line = next(one for one in head.lower().split(b"\r\n") if one.startswith(b"content-length"))
        body = await reader.readexactly(int(line.partition(b":")[2]))
    error: dict[str, Any] = json.loads(body)["error"]
    return head.lower(), error


async def fill_with_bodies(one: Frontend) -> list[asyncio.StreamReader]:
    """Four stalled bodies of a tenant fill the budget."""
    readers = [await one.stall("acme", STALLED_BYTES) for _ in range(4)]
    await until(lambda: one.budget.in_flight == 4 * STALLED_BYTES)
    return readers


async def test_beside_four_stalled_bodies_of_a_tenant_another_s_chat_is_answered(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    picture = {"messages": list(chat(1).messages), "user": "x" * 100_000}
    async with frontend(folder, parts_renderer) as one:
        readers = await fill_with_bodies(one)
        answer = await one.post("globex", picture)
        assert answer.status_code == 200, answer.text
        head, error = await error_of(readers[-1])  # the newest
        assert head.startswith(b"http/1.1 429 ")
        assert b"retry-after: " in head
        assert error["code"] == "too_many_bytes"
        assert "while other tenants ask, each has an equal share" in error["message"]
        assert one.budget.called_back == {("too_many_bytes", "acme"): 1}
        assert one.budget.by_tenant() == {"acme": (3 * STALLED_BYTES, 3)}  # the other three are left alone
        called_back = {'semel_requests_called_back_total{code="too_many_bytes"}': "1.0"}
        assert one.app.metrics("semel_requests_called_back_total") == called_back
        assert one.app.metrics("semel_tenant") == {}, "only if the operator wants them"
        one.app.service.metrics_per_tenant = True
        samples = {name: float(value) for name, value in one.app.metrics("semel_tenant").items()}
        assert samples == {
            'semel_tenant_media_in_flight_bytes{tenant="acme"}': 3 * STALLED_BYTES,
            'semel_tenant_requests_waiting{tenant="acme"}': 3,
            'semel_tenant_requests_called_back_total{tenant="acme"}': 1,
        }


async def test_mutant_first_come_first_served_the_other_s_chat_is_refused(
    folder: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.frontend.budget.Claims", Greedy)
    async with frontend(folder, parts_renderer) as one:
        await fill_with_bodies(one)
        answer = await one.post("globex", {**BODY, "user": "x" * 100_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bytes")


@pytest.mark.parametrize("feature_bytes", [1 << 20, LIMITS.max_bytes + 1])
async def test_features_that_have_no_room_in_shared_memory_are_charged_until_they_are_sent(
    folder: Path, parts_renderer: ChatRenderer, feature_bytes: int
) -> None:
    charged: list[int] = []

    async def process(
        media: Media, _: Mapping[str, object], *, spend: Callable[[int], None] | None = None, **__: object
    ) -> Feature:
        assert spend is not None
        spend(feature_bytes)
        charged.append(app.service.budget.in_flight)
        return drawn(media)

    pipeline = replace(Drawing(parts_renderer, LruCache(8 * FEATURE_BYTES)).pipeline, process=process)
    async with rig(folder, pipeline) as app:
        app.service.budget = Budget(LIMITS)
        answer = await app.post(CHAT, {"messages": list(chat(1, 2).messages)})
        assert app.service.budget.in_flight == 0
    if feature_bytes > LIMITS.max_bytes:
        assert (answer.status_code, charged) == (413, [])
        assert "--feature-cache-gb" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert max(charged) > 2 * feature_bytes
