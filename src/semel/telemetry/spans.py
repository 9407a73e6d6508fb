"""Spans: a piece of work for a request, with its time and its parent.

A span wraps a span of OpenTelemetry's API. Without a collector that is the API's own no-op span, and all of semel
shares one (`NO_SPAN`). With a collector it is one of the SDK's (`otlp`). A span contains sizes, counts and codes. It
never contains a digest, a URL, a prompt, a key, or the text of an error, which may contain any of these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace import Span as ApiSpan

from semel.core import Trace

__all__ = ["NO_SPAN", "Span", "SpanKind", "Value"]

Value = str | int | float | Sequence[str]
SpanKind = Literal["server", "internal"]

_MAX_STATE_CHARS: Final = 512


class Span:
    """A piece of work, from its creation to its end. After the end it ignores every call."""

    __slots__ = ("_context", "_failed", "_span", "_sums", "_tracer")

    def __init__(self, span: ApiSpan, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._context = set_span_in_context(span, Context())
        self._sums: dict[str, int] = {}
        self._failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether the span is recorded; if not, callers need not compute attributes."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """The id of its trace, in hexadecimal; empty without one."""
        context = self._span.get_span_context()
        return format_trace_id(context.trace_id) if context.is_valid else ""

    @property
    def trace(self) -> Trace | None:
        """The trace context for work elsewhere, recorded or not; None without a trace."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return None
        ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
        state = context.trace_state.to_header()
        return Trace(f"00-{ids}-{context.trace_flags:02x}", state if len(state) <= _MAX_STATE_CHARS else "")

    def rename(self, name: str) -> None:
        """Change its name."""
        if self._span.is_recording():
            self._span.update_name(name)

    def note(self, name: str, value: Value) -> None:
        """Set an attribute."""
        if self._span.is_recording():
            self._span.set_attribute(name, value)

    def add(self, name: str, amount: int) -> None:
        """Add to a numeric attribute."""
        if self._span.is_recording():
            self._sums[name] = self._sums.get(name, 0) + amount
            self._span.set_attribute(name, self._sums[name])

    def event(self, name: str) -> None:
        """Record an event that happens now."""
        if self._span.is_recording():
            self._span.add_event(name)

    def child(self, name: str, seconds: float, notes: Mapping[str, Value] | None = None) -> None:
        """Add a child span that ends now and took this long."""
        if self._span.is_recording():
            now = time.time_ns()
            begin = now - int(seconds * 1e9)
            self._tracer.start_span(name, self._context, attributes=notes, start_time=begin).end(now)

    def fail(self, code: str) -> None:
        """Mark it as failed with this code; the first of several codes counts."""
        if self._span.is_recording() and not self._failed:
            self._failed = True
            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """End it now."""
        if self._span.is_recording():
            self._span.end()


NO_SPAN: Final = Span(INVALID_SPAN, NoOpTracer())
"""Not recorded, and part of no trace."""
