"""Spans that were sent, for tests: kept in this process, or held up on their way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from semel.telemetry.otlp import OtlpTracing

DEADLINE_S = 20.0


class Kept(SpanExporter):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


class Stuck(SpanExporter):
    """Is at its first batch until it is let go, and then fails."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        self.began.set()
        self.let_go.wait(DEADLINE_S)
        return SpanExportResult.FAILURE


class Traced:
    """A tracing whose spans can be looked at once it is closed."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.tracing = OtlpTracing.sending(self.kept, "tests")

    async def sent(self) -> Kept:
        """All that were made; none are made after that."""
        await self.tracing.close(DEADLINE_S)
        return self.kept


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"
