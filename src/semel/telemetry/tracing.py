"""Tracing: creates spans and sends them to a collector. Off unless a collector is configured.

Without a collector, all spans are one object that does nothing, and neither OpenTelemetry's SDK nor an exporter is
imported. With one, `otlp` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal
from urllib.parse import urlsplit

from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, StatusCode, Tracer, format_span_id, format_trace_id

from semel.core import Trace
from semel.errors import ConfigError
from semel.telemetry.meter import Sample

__all__ = [
    "NO_TRACING",
    "Collector",
    "Tracing",
    "add_to_span",
    "check_installed",
    "fail_span",
    "span_trace",
    "span_trace_id",
    "start_tracing",
]

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


_Transport = Literal["http/protobuf", "grpc"]

_PATH: Final = "/v1/traces"
_INSTALL: Final = "pip install 'semel[otel]'"


@dataclass(frozen=True, slots=True)
class Collector:
    """The address of a collector, and its protocol."""

    endpoint: str
    protocol: _Transport

    @classmethod
    def of(cls, endpoint: str, protocol: str | None = None) -> Collector:
        """Return the collector at a URL. The protocol is HTTP unless one is named or the URL begins with grpc://."""
        url = urlsplit(endpoint)
        spoken = protocol or ("grpc" if url.scheme == "grpc" else "http/protobuf")
        if spoken not in ("grpc", "http/protobuf"):
            raise ConfigError(
                f"spans cannot be sent by {spoken!r}: set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL to http/protobuf or grpc"
            )
        if not url.hostname or url.scheme not in (("grpc", "http", "https") if spoken == "grpc" else ("http", "https")):
            raise ConfigError(f"--otlp-traces-endpoint: {endpoint!r} is not of the form http://HOST:4318{_PATH}")
        if spoken == "grpc":
            return cls(endpoint, "grpc")
        return cls(url._replace(path=_PATH).geturl() if url.path in ("", "/") else endpoint, "http/protobuf")


def check_installed(collector: Collector | None) -> None:
    """Refuse a collector that this installation cannot send to, before any slow start-up work."""
    if collector is None:
        return
    try:
        import_module("semel.telemetry.otlp")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry's SDK, and there is no {error.name}: {_INSTALL}"
        ) from None


def start_tracing(collector: Collector | None, service: str, cell: str | None = None) -> Tracing:
    """Send spans to a collector, under the service's name unless OTEL_SERVICE_NAME sets another, and with its cell."""
    if collector is None:
        return NO_TRACING
    check_installed(collector)
    from semel.telemetry.otlp import OtlpTracing

    return OtlpTracing.start(collector.endpoint, collector.protocol, service, cell)
