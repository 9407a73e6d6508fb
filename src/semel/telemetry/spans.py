"""A span: what was done for a request, when, and inside of what.

It stands over a span of OpenTelemetry's API. Where nobody looks that is the API's own span that does nothing, and all
of semel has one and the same (`NO_SPAN`); where a collector is named, one of the SDK's (`otlp`). A span tells sizes,
counts and codes. It never tells a digest, a URL, a prompt, a key, or the text of an error, which may have any of these
in it.
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
    """A piece of work, from the moment it is made to its end. After that it takes nothing more, and says nothing."""

    __slots__ = ("_context", "_failed", "_span", "_sums", "_tracer")

    def __init__(self, span: ApiSpan, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._context = set_span_in_context(span, Context())
        self._sums: dict[str, int] = {}
        self._failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it; if not, nothing need be put together for it."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, in hexadecimal digits; empty if to none."""
        context = self._span.get_span_context()
        return format_trace_id(context.trace_id) if context.is_valid else ""

    @property
    def trace(self) -> Trace | None:
        """What makes work elsewhere a part of it, recorded or not; None if it belongs to no trace."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return None
        ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
        state = context.trace_state.to_header()
        return Trace(f"00-{ids}-{context.trace_flags:02x}", state if len(state) <= _MAX_STATE_CHARS else "")

    def rename(self, name: str) -> None:
        """Call it so from now on."""
        if self._span.is_recording():
            self._span.update_name(name)

    def note(self, name: str, value: Value) -> None:
        """Tell something of it."""
        if self._span.is_recording():
            self._span.set_attribute(name, value)

    def add(self, name: str, amount: int) -> None:
        """Tell a number of it that grows."""
        if self._span.is_recording():
            self._sums[name] = self._sums.get(name, 0) + amount
            self._span.set_attribute(name, self._sums[name])

    def event(self, name: str) -> None:
        """Something has happened, now."""
        if self._span.is_recording():
            self._span.add_event(name)

    def child(self, name: str, seconds: float, notes: Mapping[str, Value] | None = None) -> None:
        """A part of it that ends now and took so long."""
        if self._span.is_recording():
            now = time.time_ns()
            begin = now - int(seconds * 1e9)
            self._tracer.start_span(name, self._context, attributes=notes, start_time=begin).end(now)

    def fail(self, code: str) -> None:
        """It comes to nothing, for a reason with this code; of several, the first."""
        if self._span.is_recording() and not self._failed:
            self._failed = True
            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """It ends, now."""
        if self._span.is_recording():
            self._span.end()


NO_SPAN: Final = Span(INVALID_SPAN, NoOpTracer())
"""Is not recorded, and belongs to no trace."""
