"""Spans: OpenTelemetry's own. Here is what its API lacks: sums, the first failure, the trace context for a message.

Without a collector every span is the API's `INVALID_SPAN`, which does nothing. With one it is the SDK's (`otlp`). It
contains sizes, counts and codes, and never a digest, a URL, a prompt, a key, or the text of an error, which may contain
any of these. The SDK logs a warning if a span is used after its end: what may outlast it asks `is_recording`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, StatusCode, Tracer, format_span_id, format_trace_id

from semel.core import Trace
from semel.telemetry.meter import Sample

__all__ = ["NO_TRACING", "Tracing", "add_to_span", "fail_span", "span_trace", "span_trace_id"]

_MAX_STATE_CHARS: Final = 512


class Tracing:
    """Starts spans. This one records nothing; `OtlpTracing` sends its spans to a collector."""

    tracer: Tracer = NoOpTracer()

    def begin(self, name: str, parent: Mapping[str, str]) -> Span:  # noqa: ARG002
        """Start a server's span now, as a child of the span in the W3C headers of `parent`, if there is one."""
        return INVALID_SPAN

    def samples(self) -> Iterator[Sample]:
        """Metrics of tracing itself."""
        return iter(())

    async def close(self) -> None:
        """Send the remaining spans, within a short time."""


NO_TRACING: Final = Tracing()


def span_trace_id(span: Span) -> str:
    """Return the id of a span's trace, in hexadecimal; empty without one."""
    context = span.get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""


def span_trace(span: Span) -> Trace | None:
    """Return the trace context for work elsewhere, whether the span is recorded or not; None without a trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
    state = context.trace_state.to_header()
    return Trace(f"00-{ids}-{context.trace_flags:02x}", state if len(state) <= _MAX_STATE_CHARS else "")


def add_to_span(span: Span, name: str, amount: int) -> None:
    """Add to a numeric attribute."""
    if span.is_recording():
        span.set_attribute(name, getattr(span, "attributes", {}).get(name, 0) + amount)


def fail_span(span: Span, code: str) -> None:
    """Mark a span as failed with this code; the first of several codes counts."""
    if span.is_recording() and getattr(getattr(span, "status", None), "status_code", None) is not StatusCode.ERROR:
        span.set_attribute("error.type", code)
        span.set_status(StatusCode.ERROR)
