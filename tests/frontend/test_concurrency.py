"""The door of a frontend: how many requests are inside, how long one may stay, what happens when it closes (S18)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semel.core import Keyring, Output
from semel.errors import Busy, ConfigError, DeadlineExceeded, NotReady
from semel.fairness.shares import Claims
from semel.frontend.budget import Budget
from semel.frontend.http.body import unless_disconnected
from semel.frontend.http.sse import EventFormat, EventStream, event
from semel.frontend.limits import BudgetLimits
from semel.frontend.middleware.concurrency import ConcurrencyLimit, ConcurrencyLimits, Place, RequestLimiter
from semel.frontend.middleware.refusal_rate import AbortThrottle, RefusalLimits
from semel.frontend.middleware.request_context import RequestContextMiddleware
from semel.telemetry import Meter
from semel.telemetry.metrics import REFUSALS, REQUESTS_IN_FLIGHT
from semel.telemetry.spans import NO_TRACING
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig, rig, stalled_first_tokens
from tests.render.drawn import Drawing
from tests.waiting import until
from tests.web.test_server import served

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()


class Stalled:
    """A stream that says one thing and then nothing, for ever."""

    def __init__(self) -> None:
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[Output]:
        yield Output(0, "one", (1,))
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed += 1


class Streaming:
    """An application that streams, each answer from a stream of its own that stalls."""

    def __init__(self, form: EventFormat | None = None) -> None:
        self.streams: list[Stalled] = []
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams.append(stream := Stalled())

        async def events() -> AsyncIterator[bytes]:
            async for output in stream:
                yield event({"text": output.text})

        await EventStream([stream], events(), self._form)(scope, receive, send)


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that never answers."""
    await asyncio.Event().wait()


async def half(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that stops in the middle of a body of JSON."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})
    await asyncio.Event().wait()


def door(app: ASGIApp, limits: ConcurrencyLimits) -> tuple[ConcurrencyLimit, RequestLimiter, Meter]:
    gate, meter = RequestLimiter(limits), Meter()
    return ConcurrencyLimit(app, gate, meter, lambda _: 0.0, AbortThrottle(RefusalLimits)), gate, meter


def refusals(meter: Meter, code: str) -> float | None:
    return meter.registry.get_sample_value(REFUSALS.name, {"code": code})


async def begin(app: ASGIApp, path: str = CHAT, **headers: str) -> tuple[Exchange, asyncio.Task[None]]:
    """A request whose answer has begun."""
    exchange = Exchange()
    task = asyncio.create_task(exchange.run(app, path, stream_of([BODY]), headers))
    await asyncio.wait_for(exchange.began.wait(), 30)
    return exchange, task


async def end(exchange: Exchange, task: asyncio.Task[None]) -> None:
    exchange.leave.set()
    await task


async def test_streams_that_stay_open_are_bounded_S18() -> None:
    app, gate, meter = door(Streaming(), ConcurrencyLimits(max_requests=3))
    held = [await begin(app) for _ in range(3)]
    refused, task = await begin(app)
    await task
    assert (refused.status, refused.code) == (429, "too_many_requests")
    assert refused.headers["retry-after"] in {"1", "2"}, "scattered"
    assert "connection" not in refused.headers
    assert "--max-requests" in refused.message
    assert refusals(meter, "too_many_requests") == 1
    await end(*held[0])
    assert gate.requests == 2
    again = await begin(app)
    assert again[0].status == 200
    for one in (*held[1:], again):
        await end(*one)
    assert gate.requests == 0


async def test_a_naive_frontend_bounds_only_requests_whose_answers_have_not_begun_S18() -> None:
    """The control: an answer that has begun waits for nothing, so a budget of waiting requests lets any number in."""
    app = Streaming()
    held = [await begin(app) for _ in range(50)]
    assert {exchange.status for exchange, _ in held} == {200}
    for one in held:
        await end(*one)


async def test_a_tenant_s_streams_leave_room_for_another_tenant_S18(tmp_path: Path, drawing: Drawing) -> None:
    keys = Keyring([("acme", "acme-0123456789abcdef"), ("umbra", "umbra-0123456789abcdef")])
    async with rig(tmp_path, drawing.pipeline, keys=keys) as made:
        made.service.limiter.limits = ConcurrencyLimits(max_tenant_requests=1)
        place = made.service.limiter.enter("acme")
        body = json.loads(BODY)
        refused = await made.post(CHAT, body, authorization="Bearer acme-0123456789abcdef")
        assert refused.status_code == 429
        assert "--max-tenant-requests" in refused.json()["error"]["message"]
        assert (await made.post(CHAT, body, authorization="Bearer umbra-0123456789abcdef")).status_code == 200
        made.service.limiter.leave(place)
        assert (await made.post(CHAT, body, authorization="Bearer acme-0123456789abcdef")).status_code == 200
        assert made.service.limiter.requests == 0


async def test_probes_and_metrics_pass_when_nobody_else_does(app: Rig) -> None:
    app.service.limiter.limits = ConcurrencyLimits(max_requests=1)
    app.service.limiter.enter("")
    assert (await app.post(CHAT, json.loads(BODY))).status_code == 429
    for path in ("/health", "/ready", "/metrics"):
        assert (await app.client.get(path)).status_code == 200
    assert app.metrics(REQUESTS_IN_FLIGHT.name) == {REQUESTS_IN_FLIGHT.name: "1.0"}


async def test_a_frontend_that_drains_is_not_ready_refuses_and_answers_what_it_took(app: Rig) -> None:
    app.engine.pause_s = 0.2
    inside = asyncio.create_task(app.post(CHAT, json.loads(BODY)))
    await until(lambda: app.service.limiter.requests == 1)
    app.service.drain("the frontend is shutting down")
    app.service.suspend("the worker is shutting down")  # what the fleet does meanwhile changes nothing
    ready = await app.client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the frontend is shutting down")
    assert (await app.client.get("/health")).status_code == 200
    refused = await app.post(CHAT, json.loads(BODY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] in {"1", "2"}, "scattered"
    assert refused.headers["connection"] == "close"
    assert await app.service.limiter.until_empty(30)
    assert (await inside).status_code == 200


async def test_waiting_for_an_empty_gate_has_an_end() -> None:
    gate = RequestLimiter()
    place = gate.enter("")
    assert not await gate.until_empty(0.01)
    gate.leave(place)
    assert await gate.until_empty(0.01)


async def test_a_request_that_takes_too_long_is_answered_with_504() -> None:
    app, gate, meter = door(silent, ConcurrencyLimits(max_request_s=0.02))
    late, task = await begin(app)
    await task
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert "--request-timeout-s" in late.message
    assert refusals(meter, "deadline_exceeded") == 1
    assert gate.requests == 0


async def test_a_stream_that_takes_too_long_ends_with_the_error_and_is_aborted() -> None:
    streaming = Streaming()
    app, gate, meter = door(streaming, ConcurrencyLimits(max_request_s=0.05))
    late, task = await begin(app)
    await task
    assert late.status == 200
    first, error, done = [line for line in bytes(late.body).split(b"\n\n") if line]
    assert first == b'data: {"text":"one"}'
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
    assert done == b"data: [DONE]"
    assert [stream.closed for stream in streaming.streams] == [1]
    assert (gate.requests, refusals(meter, "deadline_exceeded")) == (0, 1)


async def test_half_an_answer_of_another_kind_is_cut_and_not_finished_as_if_it_were_whole() -> None:
    app, gate, _ = door(half, ConcurrencyLimits(max_request_s=0.02))
    late = Exchange()
    with pytest.raises(DeadlineExceeded, match="--request-timeout-s"):
        await late.run(app, CHAT, stream_of([BODY]))
    assert bytes(late.body) == b"{"
    assert gate.requests == 0


async def test_who_reads_it_sees_that_it_is_cut_and_nobody_is_surprised(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app, _, meter = door(half, ConcurrencyLimits(max_request_s=0.05))
    async with (
        served(RequestContextMiddleware(app, NO_TRACING, meter, log_requests=False)) as made,
        httpx.AsyncClient(timeout=30) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await client.post(f"http://127.0.0.1:{made.port}{CHAT}", content=BODY)
    assert refusals(meter, "deadline_exceeded") == 1
    assert "an answer was cut off" in caplog.text
    assert "do not expect" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_deadline_that_passes_after_the_last_byte_of_an_answer_is_nobody_s_concern(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def closing(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("ok")(scope, receive, send)
        await asyncio.Event().wait()

    app, gate, meter = door(closing, ConcurrencyLimits(max_request_s=0.05))
    async with (
        served(RequestContextMiddleware(app, NO_TRACING, meter, log_requests=False)) as made,
        httpx.AsyncClient(timeout=30) as client,
    ):
        for _ in range(2):
            response = await client.post(f"http://127.0.0.1:{made.port}{CHAT}", content=BODY)
            assert response.text == "ok"
            await until(lambda: gate.requests == 0)
    assert refusals(meter, "deadline_exceeded") is None
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_end_that_was_not_sent_in_time_is_none() -> None:
    stuck = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await stuck.wait()

    app, _, _ = door(Response("ok"), ConcurrencyLimits(max_request_s=0.02))
    with pytest.raises(DeadlineExceeded):
        await app({"type": "http", "path": CHAT, "method": "POST", "headers": []}, asyncio.Event().wait, send)  # type: ignore[arg-type]


async def test_a_timeout_of_the_application_itself_is_no_deadline_of_ours() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError("of its own")

    app, gate, meter = door(failing, ConcurrencyLimits(max_request_s=60))
    with pytest.raises(TimeoutError, match="of its own"):
        await Exchange().run(app, CHAT, stream_of([BODY]))
    assert (gate.requests, refusals(meter, "deadline_exceeded")) == (0, None)


async def test_a_drain_that_ends_cuts_streams_off_with_an_error_event_and_the_rest_with_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    form = EventFormat(error=lambda error: f"event: error\ndata: {type(error).__name__}\n\n".encode(), done=b"")
    applications: dict[str, ASGIApp] = {
        "/chat": Streaming(),
        "/other": Streaming(form),
        "/silent": silent,
        "/half": half,
    }

    begun: set[str] = set()

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            await send(message)
            if message.get("body"):
                begun.add(scope["path"])

        await applications[scope["path"]](scope, receive, noting)

    app, gate, meter = door(route, ConcurrencyLimits())
    context = RequestContextMiddleware(app, NO_TRACING, meter, log_requests=True)
    async with served(context) as made, httpx.AsyncClient(base_url=f"http://127.0.0.1:{made.port}") as client:
        asked = [asyncio.create_task(client.post(path, content=BODY, timeout=30)) for path in applications]
        await until(lambda: gate.requests == len(asked))
        await until(lambda: begun == applications.keys() - {"/silent"})
        gate.close("the frontend is shutting down")
        gate.cut_off(NotReady("the frontend is shutting down: send it again"))
        assert await gate.until_empty(10)
        chat, other, refused, cut = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(chat, httpx.Response)
    assert isinstance(other, httpx.Response)
    assert isinstance(refused, httpx.Response)
    first, error, done = [line for line in chat.text.split("\n\n") if line]
    assert (first, done) == ('data: {"text":"one"}', "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "not_ready"
    assert other.text.endswith("event: error\ndata: NotReady\n\n")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert isinstance(cut, httpx.RemoteProtocolError), "half a body has no valid end"
    assert refusals(meter, "not_ready") == len(asked)
    assert "Traceback" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name == "semel.access"]
    assert sorted(" cut off," in line for line in lines) == [False, True, True, True], lines


async def test_what_has_been_answered_is_not_cut_off() -> None:
    left = asyncio.Event()

    async def closing(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("ok")(scope, receive, send)
        left.set()
        await asyncio.Event().wait()

    app, gate, meter = door(closing, ConcurrencyLimits())
    late, task = await begin(app)
    await left.wait()
    gate.cut_off(NotReady("the frontend is shutting down"))
    await task
    assert (late.status, bytes(late.body), refusals(meter, "not_ready")) == (200, b"ok", None)


def test_no_request_at_all_is_no_limit_but_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--max-requests"):
        ConcurrencyLimits(max_requests=0)


class Greedy(Claims[Place]):
    """The wrong implementation: first come, first served."""

    def to_revoke(self, tenant: str, amount: int) -> Sequence[Place] | None:  # noqa: ARG002
        return () if self.shares.fits(amount) else None


async def beside_waiting_requests(made: Rig) -> tuple[int, list[httpx.Response]]:
    """Four requests of a tenant have all places and wait. What another tenant's gets, and what ended of the four."""
    made.service.limiter.limits = ConcurrencyLimits(max_requests=4)
    with stalled_first_tokens():
        waiting = [asyncio.create_task(made.post(CHAT, json.loads(BODY), authorization=ACME)) for _ in range(4)]
        await until(lambda: made.engine.submissions == 4)
    answer = await made.post(CHAT, json.loads(BODY), authorization=UMBRA)
    ended = [task.result() for task in waiting if task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: made.service.limiter.requests == 0)
    assert (made.service.budget.in_flight, made.service.budget.requests) == (0, 0)
    return answer.status_code, ended


ACME, UMBRA = "Bearer acme-0123456789abcdef", "Bearer umbra-0123456789abcdef"
TENANTS = Keyring([("acme", "acme-0123456789abcdef"), ("umbra", "umbra-0123456789abcdef")])


async def test_a_request_that_has_not_begun_yields_to_another_tenant_s_S21(tmp_path: Path, drawing: Drawing) -> None:
    async with rig(tmp_path, drawing.pipeline, keys=TENANTS) as made:
        status, (ended,) = await beside_waiting_requests(made)
        assert status == 200
        assert (ended.status_code, ended.json()["error"]["code"]) == (429, "too_many_requests")
        assert "each has an equal share of the 4 requests in flight" in ended.json()["error"]["message"]
        assert "--max-requests" in ended.json()["error"]["message"]
        assert made.service.limiter.called_back == {"acme": 1}
        name = 'semel_requests_called_back_total{code="too_many_requests"}'
        assert made.metrics("semel_requests_called_back_total") == {name: "1.0"}


async def test_a_stream_that_is_called_back_just_as_it_begins_is_refused_as_any_other_S21(
    tmp_path: Path, drawing: Drawing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path, drawing.pipeline, keys=TENANTS) as made:
        made.service.budget = budget = Budget(BudgetLimits(max_requests=2))

        async def yielding(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
            response = await unless_disconnected(request, work)
            accounts.append(budget.open("umbra"))
            return response

        monkeypatch.setattr("semel.frontend.routes.call.unless_disconnected", yielding)
        accounts = [budget.open("acme")]
        answer = await made.post(CHAT, {**json.loads(BODY), "stream": True}, authorization=ACME)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        assert answer.headers["retry-after"] in {"1", "2"}, "scattered"
        assert refusals(made.meter, "too_many_requests") == 1
        assert budget.by_tenant() == {"acme": (0, 1), "umbra": (0, 1)}
        assert made.service.limiter.requests == 0
    assert "do not expect" not in caplog.text


async def test_mutant_first_come_first_served_the_other_tenant_gets_no_place(
    tmp_path: Path, drawing: Drawing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.frontend.middleware.concurrency.Claims", Greedy)
    async with rig(tmp_path, drawing.pipeline, keys=TENANTS) as made:
        assert await beside_waiting_requests(made) == (429, [])


def test_streams_that_have_begun_stay_and_the_next_place_is_another_tenant_s_S21() -> None:
    clock = [0.0]
    gate = RequestLimiter(ConcurrencyLimits(max_requests=4), now=lambda: clock[0])
    places = [gate.enter("a") for _ in range(4)]  # in no scope in which they could be called back
    with pytest.raises(Busy, match="4 requests are in flight already"):
        gate.enter("b")
    gate.leave(places.pop())
    with pytest.raises(Busy, match="another tenant waits for a place"):
        gate.enter("a")  # it has three, its share is two
    others = [gate.enter("b")]
    gate.leave(places.pop())
    places.append(gate.enter("a"))  # nobody was refused meanwhile: alone or not, what is free is used
    with pytest.raises(Busy):
        gate.enter("b")
    gate.leave(places.pop())
    clock[0] += 61  # it has not come again in the time that it was told
    places.append(gate.enter("a"))
    for place in (*places, *others):
        gate.leave(place)
    assert gate.requests == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 40)), max_size=80))
def test_whatever_tenants_do_a_refusal_has_its_reason_and_nothing_is_lost_S21(
    moves: list[tuple[str, bool, int]],
) -> None:
    """None of them can be called back: they are refused if it is full, or if they have a third and another waits."""
    clock = [0.0]
    gate = RequestLimiter(ConcurrencyLimits(max_requests=6), now=lambda: clock[0])
    places: list[Place] = []
    refused: dict[str, float] = {}
    for tenant, enters, passed_s in moves:
        clock[0] += passed_s
        count = sum(place.tenant == tenant for place in places)
        if enters:
            try:
                places.append(gate.enter(tenant))
            except Busy:
                is_full = len(places) == 6
                waiting = [other for other, when in refused.items() if other != tenant and clock[0] - when <= 60]
                assert is_full or (count >= 2 and waiting)
                if is_full:
                    refused[tenant] = clock[0]
        elif count:
            place = next(place for place in places if place.tenant == tenant)
            places.remove(place)
            gate.leave(place)
        assert gate.requests == len(places) <= 6
