"""Spans by OpenTelemetry: made by its SDK, and sent by its exporters in batches, from a thread of theirs.

Imported only where a collector is named. The provider is ours, not the process's: the engine has its own. Nothing here
makes a request wait: a span that finds the queue full is dropped and counted, and so is one that cannot be delivered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from semel.core import Trace
from semel.errors import ConfigError
from semel.telemetry.meter import Sample
from semel.telemetry.metrics import SPANS_DROPPED
from semel.telemetry.tracing import Collector, SpanKind, Value

__all__ = ["OtlpSpan", "OtlpTracing"]

_MAX_WAITING: Final = 8_192
"""Spans that wait to be sent: about a kilobyte each."""

_CLOSE_S: Final = 1.5
_MAX_STATE_CHARS: Final = 512
_KINDS: Final[Mapping[SpanKind, trace.SpanKind]] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
}


class OtlpSpan:
    """A span of OpenTelemetry's."""

    __slots__ = ("_context", "_failed", "_span", "_sums", "_tracer")

    def __init__(self, span: trace.Span, tracer: trace.Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, Context())
        self._sums: dict[str, int] = {}
        self._failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def trace(self) -> Trace:
        """What makes work elsewhere a part of it."""
        context = self._span.get_span_context()
        ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
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
        self._sums[name] = self._sums.get(name, 0) + amount
        self.note(name, self._sums[name])

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
        """It comes to nothing: the first code tells why."""
        if self._span.is_recording() and not self._failed:
            self._failed = True
            self._span.set_attribute("error.type", code)
            self._span.set_status(trace.StatusCode.ERROR)

    def end(self) -> None:
        """It ends, now."""
        if self._span.is_recording():
            self._span.end()


class OtlpTracing:
    """Spans, sent to a collector. Made by `start`."""

    def __init__(self, provider: TracerProvider, batches: _Batches) -> None:
        self._provider = provider
        self._batches = batches
        self._tracer = provider.get_tracer("semel", version("semel"))
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def start(cls, collector: Collector, service: str) -> Self:
        """Send to a collector from now on. Headers, certificates and the like are the SDK's, by its OTEL_* names."""
        return cls.sending(_exporter(collector), service)

    @classmethod
    def sending(cls, exporter: SpanExporter, service: str, *, max_waiting: int = _MAX_WAITING) -> Self:
        """Send by an exporter, with so many spans waiting at most."""
        try:
            batches = _Batches(_Counted(exporter), max_waiting)
            provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(
                f"OpenTelemetry refuses its settings: {error}; look at OTEL_* in the environment"
            ) from None
        provider.add_span_processor(batches)
        return cls(provider, batches)

    @property
    def resource(self) -> Mapping[str, object]:
        """What every span says of this process."""
        return self._provider.resource.attributes

    def begin(self, name: str, kind: SpanKind, parent: Mapping[str, str]) -> OtlpSpan:
        """A span that begins now."""
        context = self._propagator.extract(parent, Context())
        return OtlpSpan(self._tracer.start_span(name, context, _KINDS[kind]), self._tracer)

    def samples(self) -> Iterator[Sample]:
        """What there is to see of it."""
        yield SPANS_DROPPED, self._batches.dropped, ("queue_full",)
        yield SPANS_DROPPED, self._batches.exporter.lost, ("not_delivered",)

    async def close(self, within_s: float = _CLOSE_S) -> None:
        """Send what is left, but not for longer than this. Closing twice does no harm."""
        # A thread that nobody waits for at exit: a collector that does not answer takes the SDK half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="semel-spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, within_s)


class _Counted(SpanExporter):
    """Counts what it takes off the queue, and what of it cannot be delivered. All in the thread of the batches."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.exported = 0
        self.lost = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self.exported += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()


class _Batches(BatchSpanProcessor):
    """The SDK's own, but for what is over its bound: that is counted, and goes no further."""

    def __init__(self, exporter: _Counted, max_waiting: int) -> None:
        super().__init__(exporter, max_queue_size=max_waiting)
        self.exporter = exporter
        self.dropped = 0
        self._max_waiting = max_waiting
        self._ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Let a span wait to be sent; always called by the thread that serves."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._ended - self.exporter.exported >= self._max_waiting:
            self.dropped += 1
        else:
            self._ended += 1
            super().on_end(span)


def _resource(service: str) -> Resource:
    found = Resource.create({SERVICE_VERSION: version("semel")})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # nobody has named it
        found = found.merge(Resource({SERVICE_NAME: service}))
    return found


def _exporter(collector: Collector) -> SpanExporter:
    if collector.protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError:
            raise ConfigError(
                "spans by grpc need opentelemetry-exporter-otlp-proto-grpc: install it, or name the collector's HTTP "
                "endpoint, http://HOST:4318/v1/traces"
            ) from None
        return GrpcExporter(endpoint=collector.endpoint, insecure=not collector.endpoint.startswith("https"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=collector.endpoint)
