"""Spans: what they tell, that they are bounded, and that without a collector there is nothing of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import INVALID_SPAN

from semel.core import Trace
from semel.errors import ConfigError, InvalidRequest, ServiceError
from semel.telemetry.otlp import OtlpTracing
from semel.telemetry.request_context import (
    RequestContext,
    current_span,
    entered,
    own_id,
    record_child,
    tell_fault,
    traced,
)
from semel.telemetry.spans import add_to_span, fail_span, span_trace, span_trace_id
from semel.telemetry.tracing import Collector, check_installed
from tests.telemetry.spans import DEADLINE_S, Kept, Stuck, Traced, parent_id, span_id, trace_id
from tests.waiting import until

PARENT = Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "rojo=1")


def dropped(tracing: OtlpTracing) -> dict[str, float]:
    return {labels[0]: value for _, value, labels in tracing.samples()}


def test_without_a_collector_neither_the_sdk_nor_an_exporter_is_imported() -> None:
    """The control imports what a collector would need."""
    program = (
        "import sys, semel.compose, semel.frontend.app, semel.worker.worker\n"
        "from semel.telemetry.spans import span_trace\n"
        "from semel.telemetry.tracing import start_tracing\n"
        "assert span_trace(start_tracing(None, 'semel').begin('x', {})) is None\n"
        "show = lambda: print(*(m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exp'))))\n"
        "show()\nimport semel.telemetry.otlp\nshow()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    off, on = done.stdout.splitlines()
    assert not off.split()
    assert "opentelemetry.sdk.trace" in on.split()


def test_the_span_that_does_nothing_keeps_nothing_of_any_request() -> None:
    with entered(RequestContext("r", span=INVALID_SPAN)):
        add_to_span(INVALID_SPAN, "tokens", 2)
        fail_span(INVALID_SPAN, "internal_error")
        record_child("parse", 0.25, {"n": 1})
    assert not vars(INVALID_SPAN).keys() - {"_context"}
    assert (INVALID_SPAN.is_recording(), span_trace(INVALID_SPAN), span_trace_id(INVALID_SPAN)) == (False, None, "")


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "semel.telemetry.otlp", None)
    check_installed(None)
    with pytest.raises(ConfigError, match=r"pip install 'semel\[otel\]'"):
        check_installed(Collector.of("http://127.0.0.1:4318"))


@pytest.mark.parametrize(
    ("endpoint", "protocol", "expected"),
    [
        ("http://c:4318/v1/traces", None, Collector("http://c:4318/v1/traces", "http/protobuf")),
        ("http://c:4318", None, Collector("http://c:4318/v1/traces", "http/protobuf")),
        ("https://c/otel/v1/traces", None, Collector("https://c/otel/v1/traces", "http/protobuf")),
        ("grpc://c:4317", None, Collector("grpc://c:4317", "grpc")),
        ("http://c:4317", "grpc", Collector("http://c:4317", "grpc")),
    ],
)
def test_a_collector_is_spoken_to_by_http_unless_it_is_told_otherwise(
    endpoint: str, protocol: str | None, expected: Collector
) -> None:
    assert Collector.of(endpoint, protocol) == expected


@pytest.mark.parametrize(
    ("endpoint", "protocol"), [("c:4318", None), ("file:///c", None), ("", None), ("http://c", "http/json")]
)
def test_a_collector_that_cannot_be_spoken_to_is_refused(endpoint: str, protocol: str | None) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" if protocol else "not of the form"):
        Collector.of(endpoint, protocol)


async def test_a_span_goes_on_with_its_clients_trace_and_its_parts_belong_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans = Traced()
    span = spans.tracing.begin("POST", PARENT.headers)
    with entered(RequestContext("r", span=span, tracer=spans.tracing.tracer)):
        record_child("parse", 0.25, {"n": 1})
        add_to_span(span, "tokens", 2)
        add_to_span(span, "tokens", 3)
        span.add_event("first_token")
        span.update_name("POST /v1/x")
        span.end()
        add_to_span(span, "late", 1)  # neither an error nor a line in the log
        record_child("late", 0.1)
        for error in (InvalidRequest("no"), ServiceError("no")):
            tell_fault(error)
    assert not caplog.messages
    kept = await spans.sent()
    whole, part = kept.one("POST /v1/x"), kept.one("parse")
    assert trace_id(whole) == trace_id(part) == "0af7651916cd43dd8448eb211c80319c"
    assert f"{parent_id(whole):016x}" == "b7ad6b7169203331"
    assert parent_id(part) == span_id(whole)
    assert part.start_time is not None
    assert part.end_time is not None
    assert part.end_time - part.start_time == pytest.approx(0.25e9, abs=1_000)
    assert whole.attributes == {"tokens": 5}
    assert [event.name for event in whole.events] == ["first_token"]
    assert span_trace_id(span) == trace_id(whole)
    assert span_trace(span) == Trace(f"00-{trace_id(whole)}-{span_id(whole):016x}-01", "rojo=1")


async def test_a_trace_that_its_client_does_not_record_is_not_recorded_here_either_but_handed_on() -> None:
    spans = Traced()
    span = spans.tracing.begin("POST", {"traceparent": PARENT.parent[:-2] + "00"})
    with entered(RequestContext("r", span=span, tracer=spans.tracing.tracer)):
        record_child("parse", 0.1)
    span.end()
    trace = span_trace(span)
    assert not span.is_recording()
    assert trace is not None
    assert trace.parent.endswith("-00")
    assert trace.parent[:36] == PARENT.parent[:36]
    assert (await spans.sent()).spans == []


async def test_the_first_failure_counts_and_a_clients_fault_is_none() -> None:
    spans = Traced()
    for error in (InvalidRequest("no"), ServiceError("no")):
        span = spans.tracing.begin(error.code, {})
        with entered(RequestContext("r", span=span)):
            tell_fault(error)
        fail_span(span, "500") if error.status >= 500 else None
        span.end()
    kept = await spans.sent()
    theirs, ours = kept.one(InvalidRequest.code), kept.one(ServiceError.code)
    assert theirs.status.is_unset
    assert not ours.status.is_ok
    assert (theirs.attributes, ours.attributes) == (
        {"error.type": InvalidRequest.code},
        {"error.type": ServiceError.code},
    )


async def test_spans_over_the_bound_are_dropped_and_counted_S18() -> None:
    """The control is the SDK's own processor: it drops as well, and nobody can see how many."""
    stuck = Stuck()
    tracing = OtlpTracing.sending(stuck, "tests", max_waiting=600)  # a batch of the SDK has 512
    for _ in range(512):
        tracing.begin("x", {}).end()
    await asyncio.to_thread(stuck.began.wait, DEADLINE_S)
    for _ in range(700):
        tracing.begin("x", {}).end()
    assert dropped(tracing) == {"queue_full": 100, "not_delivered": 0}
    stuck.let_go.set()
    await tracing.close(DEADLINE_S)
    assert dropped(tracing) == {"queue_full": 100, "not_delivered": 1_112}
    assert not hasattr(BatchSpanProcessor(Kept()), "dropped")


@pytest.mark.alone
async def test_closing_waits_for_a_collector_that_does_not_answer_only_as_long_as_it_may() -> None:
    stuck = Stuck()
    tracing = OtlpTracing.sending(stuck, "tests")
    tracing.begin("x", {}).end()
    began = time.monotonic()
    await tracing.close(0.1)
    assert time.monotonic() - began < 5  # the SDK alone takes 30
    await asyncio.to_thread(stuck.began.wait, DEADLINE_S)
    stuck.let_go.set()


async def test_the_request_in_hand_is_that_of_the_task_and_of_what_it_starts() -> None:
    async def look() -> str:
        await asyncio.sleep(0)
        return own_id()

    async def handle(name: str) -> tuple[str, str]:
        with entered(RequestContext(name)):
            return own_id(), await asyncio.create_task(look())

    first, second = await asyncio.gather(handle("a"), handle("b"))
    assert (first, second) == (("a", "a"), ("b", "b"))
    assert own_id() not in ("a", "b")
    assert current_span() is INVALID_SPAN


async def test_stages_are_told_to_both_the_metrics_and_the_span() -> None:
    spans, told = Traced(), list[tuple[float, str]]()
    span = spans.tracing.begin("POST", {})
    tell = traced(lambda seconds, stage: told.append((seconds, stage)))
    with entered(RequestContext("a", span=span, tracer=spans.tracing.tracer)):
        tell(0.5, "render")
    tell(0.5, "send")  # in nobody's name
    span.end()
    kept = await spans.sent()
    assert told == [(0.5, "render"), (0.5, "send")]
    assert parent_id(kept.one("render")) == span_id(kept.one("POST"))
    assert not kept.named("send")


def test_the_service_is_named_by_the_environment_or_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, expected in (("", "semel-worker"), ("mine", "mine")):
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
        tracing = OtlpTracing.sending(Kept(), "semel-worker")
        assert tracing._provider.resource.attributes["service.name"] == expected
        asyncio.run(tracing.close())


async def test_an_exporter_that_raises_loses_its_batch_and_no_more() -> None:
    class Broken(Kept):
        def export(self, spans: object) -> SpanExportResult:
            raise OSError(f"no {spans}")

    tracing = OtlpTracing.sending(Broken(), "tests")
    tracing.begin("x", {}).end()
    await tracing.close(DEADLINE_S)
    await until(lambda: dropped(tracing) == {"queue_full": 0, "not_delivered": 1})
