"""What a request may have is checked before anything is made of it, and let go as soon as it is not needed (S18)."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.core import Feature, Media, Output, Submission
from semel.core.flag import flags_of
from semel.engine import Stream
from semel.frontend.api.openai.requests import ChatCompletionRequest
from semel.frontend.budget import Budget
from semel.frontend.http.body import BodyLimits
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes import completions
from semel.frontend.routes.call import Call
from semel.frontend.routes.chat import BegunChat
from semel.frontend.routes.chat import begin_chat as begin_without_it
from semel.settings.frontend import ServingSettings
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import MAX_IMAGES, Rig, rig
from tests.render.drawn import Drawing, chat, drawn
from tests.waiting import until

CHAT = "/v1/chat/completions"
MIB = 1024**2


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render"])
async def test_too_many_items_are_refused_before_one_of_them_is_processed_S18(
    app: Rig, drawing: Drawing, path: str
) -> None:
    response = await app.post(path, {"messages": list(chat(*range(MAX_IMAGES + 1)).messages)})
    assert response.status_code == 400
    assert "--limit-mm-per-prompt" in response.json()["error"]["message"]
    assert drawing.processed == []


def ask(image_bytes: int = 0, **fields: object) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(bytes(image_bytes)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}] if image_bytes else []
    return json.dumps(
        {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], **fields}
    ).encode()


async def sent(app: Rig, *chunks: bytes, **headers: str) -> Exchange:
    exchange = Exchange()
    exchange.leave.clear()
    await exchange.run(app.app, CHAT, stream_of(chunks), headers)
    return exchange


async def test_an_announced_length_over_the_limit_is_refused_before_a_byte_is_read(app: Rig) -> None:
    app.service.body = BodyLimits(max_bytes=1_000)

    def unread() -> Iterator[bytes]:
        yield pytest.fail("the body was read")

    exchange = Exchange()
    await exchange.run(app.app, CHAT, stream_of(unread()), {"content-length": "1001"})
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-body-bytes" in exchange.message


async def test_a_length_that_lies_or_is_no_number_is_not_trusted(app: Rig) -> None:
    app.service.body = BodyLimits(max_bytes=1_000)
    for announced in ("10", "-1", "1e3", ""):
        exchange = await sent(app, b"x" * 600, b"x" * 600, **{"content-length": announced})
        assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert app.service.budget.in_flight == 0


async def test_what_a_request_brings_counts_decoded_as_well(app: Rig) -> None:
    app.service.budget = Budget(BudgetLimits(max_request_bytes=100_000, max_bytes=1_000_000))
    exchange = await sent(app, ask(60_000))
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-request-media-bytes" in exchange.message
    assert app.service.budget.in_flight == 0


async def test_requests_that_wait_are_bounded(app: Rig) -> None:
    app.service.budget = Budget(BudgetLimits(max_requests=1))
    with app.service.budget.open():
        exchange = await sent(app, ask())
        assert (exchange.status, exchange.code) == (429, "too_many_requests")
        assert "--max-waiting-requests" in exchange.message
    assert (await app.post(CHAT, json.loads(ask()))).status_code == 200


async def test_a_body_that_takes_too_long_is_given_up_and_what_came_of_it_let_go(app: Rig) -> None:
    app.service.body = BodyLimits(max_s=0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"messages": '
        await asyncio.Event().wait()

    exchange = Exchange()
    await exchange.run(app.app, CHAT, slow())
    assert (exchange.status, exchange.code) == (408, "request_timeout")
    assert "--max-body-s" in exchange.message
    assert (app.service.budget.in_flight, app.service.budget.requests) == (0, 0)


@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
async def test_json_that_nests_deeply_is_refused_as_the_clients_fault(app: Rig, brackets: tuple[str, str]) -> None:
    for depth in (129, 10_000, 1_000_000):
        opening, closing = brackets
        content = f'"tools": [{{"type": {opening * depth}1{closing * depth}}}]'
        exchange = await sent(app, ask()[:-1] + f", {content}}}".encode())
        assert exchange.status in (400, 413), exchange.body
        assert "internal" not in exchange.message


async def test_json_of_very_many_values_is_refused_before_it_is_parsed(app: Rig) -> None:
    app.service.body = BodyLimits(max_values=1_000)
    for value in ("{}", "[]", "1", '""', "[[[[[[[[[["):
        exchange = await sent(app, b'{"messages": [' + f"{value},".encode() * 1_000)
        assert (exchange.status, exchange.code) == (413, "media_too_large")
        assert "--max-body-values" in exchange.message


async def test_the_json_of_a_body_has_a_limit_of_its_own_and_media_do_not_count_to_it(app: Rig) -> None:
    app.service.body = BodyLimits(max_text_bytes=1_000)
    exchange = await sent(app, ask() + b" " * 1_000)
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-body-text-bytes" in exchange.message
    assert app.service.budget.in_flight == 0


def test_the_page_on_limits_has_every_limit_that_is_a_flag_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api" / "limits.md").read_text()
    limits = [one for one in flags_of(ServingSettings) if one.key.startswith(("max_", "min_"))]
    assert limits
    for one in limits:
        (row,) = [line for line in page.splitlines() if line.startswith("|") and f"| `{one.spelling}` |" in line]
        assert f"| {one.default:.15g} |" in row, one.spelling


class _Gated:
    """An answer that goes on when it is told to."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.first, self.rest = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Output]:
        gates = iter([self.first, self.rest])
        async for output in self._stream:
            if (gate := next(gates, None)) is not None:
                await gate.wait()
            yield output

    async def close(self) -> None:
        await self._stream.close()


@pytest.mark.parametrize(("naive", "stream"), [(True, False), (False, False), (False, True)])
async def test_an_answer_that_is_generated_holds_nothing_of_what_its_request_brought(
    tmp_path: Path, drawing: Drawing, monkeypatch: pytest.MonkeyPatch, naive: bool, stream: bool
) -> None:
    """The naive route keeps what was asked until it has answered, base64 and all."""
    if naive:
        kept: list[ChatCompletionRequest] = []

        async def begin_chat(call: Call, request: ChatCompletionRequest) -> BegunChat:
            kept.append(request)
            return await begin_without_it(call, request)

        monkeypatch.setattr(completions, "begin_chat", begin_chat)

    async def process(media: Media, _: Mapping[str, object], **__: object) -> Feature:
        return drawn(Media(media.modality, b"1"))

    async with rig(tmp_path, replace(drawing.pipeline, process=process)) as app:
        gated: list[_Gated] = []
        submit = app.engine.submit

        async def submit_gated(submission: Submission) -> Any:
            gated.append(_Gated(await submit(submission)))
            return gated[-1]

        app.engine.submit = submit_gated  # type: ignore[method-assign]
        await sent_gated(app, gated, 3_000, stream, lets_go=False)  # what is loaded by a first request stays
        gated.clear()
        before, generating = await sent_gated(app, gated, 6 * MIB, stream, lets_go=not naive)
        assert (before > 7 * MIB, generating > 7 * MIB) == (naive, naive)


async def memory_below(limit: int, lets_go: bool) -> None:
    if lets_go:
        await until(lambda: tracemalloc.get_traced_memory()[0] < limit)
    else:
        for _ in range(100):
            await asyncio.sleep(0)


async def sent_gated(
    app: Rig, gated: list[_Gated], image_bytes: int, stream: bool, *, lets_go: bool
) -> tuple[int, int]:
    """What is in memory of a request when its worker has taken it, and when its answer has begun.

    A frontend that lets go of a request does so however busy the machine is, so it is waited for.
    """
    budget = app.service.budget

    async def chunks() -> AsyncIterator[bytes]:
        head, tail = ask(3, stream=stream).split(base64.b64encode(bytes(3)))
        yield head
        for _ in range(image_bytes // 3_000):
            yield b"A" * 4_000
        yield tail

    gc.collect()
    tracemalloc.start()
    try:
        exchange = Exchange()
        running = asyncio.create_task(exchange.run(app.app, CHAT, chunks()))
        async with asyncio.timeout(60):
            await until(lambda: bool(gated) and budget.in_flight <= image_bytes)
            await memory_below(image_bytes + MIB, lets_go)  # the media, and not their base64
            held, _ = tracemalloc.get_traced_memory()
            assert budget.in_flight == image_bytes // 3_000 * 3_000
            gated[0].first.set()
            await memory_below(MIB, lets_go)
            generating, _ = tracemalloc.get_traced_memory()
            await until(lambda: not (stream and budget.in_flight))
            gated[0].rest.set()
            await running
    finally:
        tracemalloc.stop()
    assert exchange.status == 200
    return held, generating
