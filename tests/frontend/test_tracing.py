"""A request's spans over frontend and worker, and its id: in the answer, and in every line of the log."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from semel.core import Feature, Media
from semel.processing.pool.job import FeatureJob, Job
from semel.telemetry.logs import JsonLines
from semel.telemetry.request_context import RequestContext, entered
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing, image_part
from tests.telemetry.spans import Traced, parent_id, span_id, trace_id

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = {"parse", "digest", "layout", "process", "render", "send", "first_token"}
CHAT = "/v1/chat/completions"


def chat(*numbers: int, **more: object) -> dict[str, Any]:
    content = [*map(image_part, numbers), {"type": "text", "text": "a secret question"}]
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.fixture
def spans() -> Traced:
    return Traced()


@pytest.fixture
async def traced(tmp_path: Path, drawing: Drawing, spans: Traced) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, engine_bytes=1 << 20, tracing=spans.tracing) as made:
        yield made


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The log as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    root = logging.getLogger("semel")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def told(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_trace_goes_from_the_client_over_the_frontend_to_the_worker(
    traced: Rig, spans: Traced, stream: bool
) -> None:
    answer = await traced.post(CHAT, chat(1, 2, stream=stream, max_tokens=7), traceparent=CLIENT)
    assert answer.status_code == 200
    kept = await spans.sent()
    root, worker = kept.one(f"POST {CHAT}"), kept.one("generate")
    assert {trace_id(span) for span in kept.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert f"{parent_id(root):016x}" == "b7ad6b7169203331"
    assert parent_id(worker) == span_id(root)
    assert {span.name for span in kept.spans if parent_id(span) == span_id(root)} == {*STAGES, "generate"}
    assert traced.engine.last is not None
    assert traced.engine.last.trace is not None
    assert traced.engine.last.trace.parent[36:52] == f"{span_id(worker):016x}", (
        "the engine's own spans are the worker's"
    )
    assert [event.name for event in worker.events] == ["accepted", "first_token"]
    for span in (root, worker):
        assert span.attributes is not None
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.model"] == "tiny"
        assert span.attributes["gen_ai.request.max_tokens"] == 7
        assert span.attributes["gen_ai.usage.output_tokens"] == 4
        assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert span.attributes["semel.items"] == 2
    assert root.attributes is not None
    assert (root.attributes["http.route"], root.attributes["http.response.status_code"]) == (CHAT, 200)


async def test_spans_and_lines_tell_no_digest_no_media_no_prompt_and_no_key(
    traced: Rig, spans: Traced, lines: io.StringIO
) -> None:
    await traced.post(CHAT, chat(77), authorization="Bearer a-secret-key")
    await traced.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "nonsense", "x": "a secret"}]}]})
    item = next(iter(traced.engine.last.prompt.items)) if traced.engine.last else None
    assert item is not None
    kept = await spans.sent()
    text = "".join(span.to_json() for span in kept.spans) + lines.getvalue()
    assert "semel.request.id" in text
    for secret in (item.digest.hex()[:12], "secret", base64.b64encode(b"77").decode(), "data:"):
        assert secret not in text


@pytest.mark.parametrize("parent", ["", "nonsense", CLIENT.replace("b7ad6b7169203331", "0" * 16), CLIENT + "x" * 9_000])
async def test_a_traceparent_that_makes_no_sense_begins_a_trace_of_our_own(
    traced: Rig, spans: Traced, parent: str
) -> None:
    assert (await traced.post(CHAT, chat(1), traceparent=parent)).status_code == 200
    root = (await spans.sent()).one(f"POST {CHAT}")
    assert root.parent is None


async def test_what_fails_in_the_worker_is_told_in_both_spans_by_its_code_alone_S7(traced: Rig, spans: Traced) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("a secret")

    traced.engine.submit = fail  # type: ignore[method-assign,assignment]
    assert (await traced.post("/v1/completions", {"prompt": "x"})).status_code == 500
    kept = await spans.sent()
    for span in (kept.one("generate"), kept.one("POST /v1/completions")):
        assert span.attributes is not None
        assert span.attributes["error.type"] == "internal_error"
        assert not span.status.is_ok
        assert "secret" not in span.to_json()


async def test_every_answer_has_the_id_that_its_lines_have(app: Rig, lines: io.StringIO) -> None:
    answer = await app.post(CHAT, chat(1))
    name = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"chatcmpl-{name}"
    assert app.engine.last is not None
    assert app.engine.last.request_id == name, "the worker's lines have it as well"
    (line,) = told(lines)
    assert (line["logger"], line["request_id"]) == ("semel.access", name)
    assert (line["method"], line["route"], line["status"]) == ("POST", CHAT, 200)
    assert line["seconds"] > 0
    assert (line["client"], line["tenant"]) == ("127.0.0.1", None)
    assert line["message"].endswith(" s for 127.0.0.1")


async def test_a_clients_id_is_answered_and_told_beside_our_own(app: Rig, lines: io.StringIO) -> None:
    answers = [await app.post(CHAT, chat(1), **{"X-Request-Id": "mine"}) for _ in range(2)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    first, second = told(lines)
    assert first["client_request_id"] == second["client_request_id"] == "mine"
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize("bad", ["x" * 129, "a\x1b[2Jb", ""])
async def test_a_clients_id_that_is_too_long_or_not_printable_is_not_taken(app: Rig, bad: str) -> None:
    answer = await app.client.post(CHAT, json=chat(1), headers={b"x-request-id": bad.encode("latin-1")})
    assert answer.headers["x-request-id"] not in (bad, "")


async def test_what_fails_strangely_is_told_with_its_request_and_answered_with_its_id_S7(
    app: Rig, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(app.service.__class__, "serving", fail)
    answer = await app.post(CHAT, chat(1))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    strange, access = told(lines)
    assert "RuntimeError: a secret" in strange["exception"]
    assert strange["request_id"] == access["request_id"] == answer.headers["x-request-id"]
    assert access["status"] == 500
    assert app.metrics("semel_requests_total")[f'semel_requests_total{{route="{CHAT}",status="500"}}'] == "1.0"


async def test_a_workers_lines_have_the_request_that_they_are_about(app: Rig, lines: io.StringIO) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("no")

    app.engine.submit = fail  # type: ignore[method-assign,assignment]
    answer = await app.post(CHAT, chat(1))
    (line,) = [line for line in told(lines) if line["logger"] == "semel.worker.worker" and "exception" in line]
    assert line["request_id"] == answer.headers["x-request-id"]


async def test_an_item_is_in_the_trace_of_who_asked_for_it_whoever_hands_it_to_a_process(spans: Traced) -> None:
    """The pool hands out the next item while it handles another's: the control does so without the item's context."""
    mine, theirs = (spans.tracing.begin(name, {}) for name in ("mine", "theirs"))
    tracer = spans.tracing.tracer

    async def work(job: Job[Feature]) -> None:
        job.trace(job.queued_at + 0.5)

    with entered(RequestContext("mine", span=mine, tracer=tracer)):
        job = FeatureJob(0, Media("image", b"123"), b"")
    with entered(RequestContext("theirs", span=theirs, tracer=tracer)):
        await asyncio.create_task(work(job), context=job.context)
        await asyncio.create_task(work(job))
    mine.end()
    theirs.end()
    kept = await spans.sent()

    def items_of(root: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in kept.named("process item") if parent_id(span) == span_id(root)]

    (ours,), (naive,) = items_of(kept.one("mine")), items_of(kept.one("theirs"))
    assert ours.attributes == naive.attributes
    assert ours.attributes == {
        "semel.item.work": "making",
        "semel.item.modality": "image",
        "semel.item.bytes": 3,
        "semel.pool.wait_seconds": 0.5,
    }
