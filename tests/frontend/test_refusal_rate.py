"""Refusals and aborts: at once while they are few, and only so many a second once they are not (S18, S31)."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.core import Keyring, Submission
from semel.errors import Busy
from semel.frontend.middleware import refusal_rate
from semel.frontend.middleware.concurrency import ConcurrencyLimit, RequestLimiter
from semel.frontend.middleware.refusal_rate import AbortThrottle, RefusalLimits, RefusalThrottle
from semel.frontend.service import FrontendState
from semel.lab.testing.engine import EchoStream
from semel.telemetry import Meter
from semel.web.disconnect import DISCONNECT
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing
from tests.waiting import until
from tests.web.test_server import served

LIMITS = RefusalLimits(per_s=8.0, burst=16, max_wait_s=2.0)
MIB = 1024**2
CHAT = "/v1/chat/completions"
KEYS = {"mallory": "mallory-0123456789abcdef", "alice": "alice-0123456789abcdef"}
BODY = {"messages": [{"role": "user", "content": "?"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_answered_at_once_and_what_follows_waits_for_its_turn() -> None:
    pace = RefusalThrottle(LIMITS, Clock())
    assert [pace.wait_s() for _ in range(16)] == [0.0] * 16
    assert [pace.wait_s() for _ in range(3)] == [0.125, 0.25, 0.375]


@given(st.integers(1, 60), st.integers(1, 400))
def test_clients_that_wait_for_their_answers_are_refused_no_faster_than_the_pace(clients: int, seconds: int) -> None:
    """Each sends its next request the moment it is answered; without a pace that is as fast as the processor goes."""
    clock = Clock()
    pace = RefusalThrottle(LIMITS, clock)
    due = [clock.now] * clients
    refused, end = 0, clock.now + seconds / 10
    while (at := min(due)) < end and refused < 5_000:
        clock.now = at
        due[due.index(at)] = at + pace.wait_s() + 1e-6
        refused += 1
    slowest = max(LIMITS.per_s, clients / LIMITS.max_wait_s)
    assert refused <= LIMITS.burst + slowest * seconds / 10 + clients + 1


async def test_a_refusal_that_waits_holds_nothing_of_its_request(app: Rig) -> None:
    app.service.refusals = RefusalLimits(per_s=1.0, burst=0, max_wait_s=0.5)
    gc.collect()
    tracemalloc.start()
    exchange = Exchange()
    sending = exchange.run(app.app, "/v1/chat/completions", stream_of(b" " * MIB for _ in range(3)))
    refused = asyncio.create_task(sending)
    while not app.metrics("semel_refusals_total"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not refused.done()
    assert held < MIB < peak
    assert app.service.budget.in_flight == 0
    await refused
    assert exchange.status == 400


def test_after_a_burst_of_aborts_a_tenant_s_next_request_waits_and_nobody_else_s() -> None:
    clock = Clock()
    aborts = AbortThrottle(lambda: LIMITS, clock)
    for number in range(20):
        assert (aborts.wait_s("mallory"), aborts.wait_s("alice")) == (max(number - 16, 0) / 8, 0.0)
        aborts.end("mallory", seconds=0.9)
    assert aborts.wait_s("mallory") == 0.5
    clock.now += 0.5
    assert aborts.wait_s("mallory") == 0.0


def test_who_waits_a_second_before_it_leaves_is_not_slowed_down_nor_is_a_tenant_alone() -> None:
    """Without API keys all are one tenant, which is alone."""
    clock = Clock()
    aborts = AbortThrottle(lambda: LIMITS, clock)
    for _ in range(100):
        aborts.end("alice", seconds=1.0)
        aborts.end("mallory", seconds=0.0)
    assert aborts.wait_s("mallory") == 0.0
    assert aborts.wait_s("alice") == 0.0
    assert aborts.wait_s("mallory") > 0.0, "now there are two"
    clock.now += 601.0
    for _ in range(100):
        aborts.end("mallory", seconds=0.0)
    assert aborts.wait_s("mallory") == 0.0


@given(st.integers(1, 16), st.integers(1, 400))
def test_clients_that_abort_at_once_are_admitted_no_faster_than_the_rate(clients: int, seconds: int) -> None:
    """Each sends its next request as soon as it has left the last one."""
    clock = Clock()
    aborts = AbortThrottle(lambda: LIMITS, clock)
    aborts.wait_s("alice")
    due = [clock.now] * clients
    admitted, end = 0, clock.now + seconds / 10
    waiting = [True] * clients
    while (at := min(due)) < end and admitted < 5_000:
        clock.now, client = at, due.index(at)
        if waiting[client]:
            due[client] = at + aborts.wait_s("mallory") + 1e-6
        else:
            aborts.end("mallory", seconds=0.01)
            admitted += 1
        waiting[client] = not waiting[client]
    assert admitted <= LIMITS.burst + LIMITS.per_s * seconds / 10 + clients + 1


class Open(AbortThrottle):
    """The control: aborts are free."""

    def end(self, tenant: str, seconds: float) -> None: ...


@pytest.fixture
async def two(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, keys=Keyring(KEYS.items())) as made:
        made.service.refusals = RefusalLimits(per_s=1.0, burst=4, max_wait_s=60.0)
        yield made


async def sent(port: int, path: str, tenant: str, data: bytes = b"") -> asyncio.StreamWriter:
    """A connection with a request that nobody waits for."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS[tenant]}"
    head += f"\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return writer


@pytest.mark.parametrize("is_open", [False, True])
async def test_over_a_socket_aborts_delay_their_tenant_and_then_reach_no_engine(
    two: Rig, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Control: where aborts are free they reach it, and nobody is delayed."""
    if is_open:
        monkeypatch.setattr(AbortThrottle, "end", Open.end)
    monkeypatch.setattr(refusal_rate, "_MAX_ABORT_S", 60.0)  # however busy the machine is
    two.engine.pause_s = 60.0
    reached: list[str] = []
    waits: list[tuple[str, float]] = []
    submit, shipped_wait_s = two.engine.submit, AbortThrottle.wait_s

    async def count(submission: Submission) -> EchoStream:
        reached.append(submission.request_id)
        return await submit(submission)

    def wait_s(throttle: AbortThrottle, tenant: str) -> float:
        waits.append((tenant, shipped_wait_s(throttle, tenant)))
        return waits[-1][1]

    def left() -> float:
        counts = two.metrics("semel_requests_total")
        return sum(float(value) for name, value in counts.items() if 'status="499"' in name)

    monkeypatch.setattr(two.engine, "submit", count)
    monkeypatch.setattr(AbortThrottle, "wait_s", wait_s)
    async with served(two.app) as server:

        async def asked(tenant: str) -> float:
            """How long a request has to wait."""
            waits.clear()
            writer = await sent(server.port, "/v1/models", tenant)
            await until(lambda: bool(waits))
            writer.transport.abort()
            return dict(waits)[tenant]

        async def abort(clients: int) -> int:
            """Send chats, and leave when each has reached the engine or is delayed; the number of the former."""
            before = left()
            reached.clear()
            waits.clear()
            writers = [await sent(server.port, CHAT, "mallory", json.dumps(BODY).encode()) for _ in range(clients)]
            await until(lambda: len(reached) + sum(delay > 0 for _, delay in waits) == clients)
            for writer in writers:
                writer.transport.abort()
            await until(lambda: left() >= before + clients)
            return len(reached)

        assert await asked("alice") == 0
        assert await abort(30) == 30
        assert await abort(10) == (10 if is_open else 0)
        assert await asked("alice") == 0
        assert (await asked("mallory") > 10) == (not is_open)


class Leaving:
    """A client that leaves the moment its refusal begins to wait."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def watched(self, app: ASGIApp) -> ASGIApp:
        """The application behind a server that calls back."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"] = {DISCONNECT: {"watch": self.calls.append}}
            await app(scope, receive, send)

        return serve

    def wait_s(self, _: str) -> float:
        assert self.calls
        for call in self.calls:
            call()
        return 0.0


async def test_a_client_that_leaves_while_its_refusal_waits_has_aborted_nothing(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused: that has been counted."""
    aborted: list[str] = []

    def end(_: AbortThrottle, tenant: str, seconds: float) -> None:
        aborted.append(tenant)

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        raise Busy("called back")

    async def left(scope: Scope, receive: Receive, send: Send) -> None:
        leaving.wait_s("")

    monkeypatch.setattr(AbortThrottle, "end", end)
    leaving = Leaving()
    monkeypatch.setattr(FrontendState, "refusal_wait_s", lambda _, tenant: leaving.wait_s(tenant))
    await Exchange().run(leaving.watched(app.app), CHAT, stream_of([b"no JSON"]))
    assert aborted == []
    for inner, expected in ((busy, []), (left, [""])):
        leaving = Leaving()
        limit = ConcurrencyLimit(inner, RequestLimiter(), Meter(), leaving.wait_s, AbortThrottle(lambda: LIMITS))
        await Exchange().run(leaving.watched(limit), CHAT, stream_of([b"{}"]))
        assert aborted == expected


def app_of(admitted: list[bytes]) -> ASGIApp:
    """Keeps the bodies of what is admitted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        admitted.append(await Request(scope, receive).body())
        await Response()(scope, receive, send)

    return app


async def test_a_client_that_leaves_while_its_tenant_is_delayed_is_let_go_at_once() -> None:
    """Else a thousand aborts a second are thousands of requests that wait, and are served for nobody."""
    aborts, admitted = AbortThrottle(lambda: LIMITS), list[bytes]()
    limiter, meter = RequestLimiter(), Meter()
    app = ConcurrencyLimit(app_of(admitted), limiter, meter, lambda _: 0.0, aborts)
    aborts.wait_s("alice")
    for _ in range(40):
        aborts.end("", seconds=0.0)
    assert aborts.wait_s("") > 1
    leaving, staying = Exchange(), Exchange()
    left = asyncio.create_task(leaving.run(app, CHAT, stream_of([b"{}"])))
    stayed = asyncio.create_task(staying.run(app, CHAT, stream_of([b"{}"])))
    await asyncio.sleep(0.01)
    leaving.leave.set()
    done, _ = await asyncio.wait({left, stayed}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {left}
    assert (leaving.status, admitted, stayed.done()) == (499, [], False)
    await stayed
    assert (staying.status, admitted) == (200, [b"{}"])
