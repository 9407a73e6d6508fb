"""Tracing with OpenTelemetry: its SDK creates spans, and its exporters send them in batches, from their own thread.

Imported only if a collector is configured. The provider is semel's own, not the process's: the engine has its own.
Nothing here delays a request: a span that finds the queue full is dropped and counted, and so is one that cannot be
delivered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final, Self

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from semel.errors import ConfigError
from semel.telemetry import metrics
from semel.telemetry.meter import Sample
from semel.telemetry.spans import Tracing

__all__ = ["OtlpTracing", "exporter_to"]

_MAX_WAITING: Final = 8_192
"""Maximum number of spans that wait to be sent: about a kilobyte each."""

_CLOSE_S: Final = 1.5
_CELL: Final = "semel.cell"


class OtlpTracing(Tracing):
    """Sends spans to a collector. Made by `sending`."""

    def __init__(self, provider: TracerProvider, batches: _Batches) -> None:
        self._provider = provider
        self._batches = batches
        self.tracer = provider.get_tracer("semel", version("semel"))
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sending(
        cls, exporter: SpanExporter, service: str, *, cell: str | None = None, max_waiting: int = _MAX_WAITING
    ) -> Self:
        """Send through an exporter, with at most `max_waiting` spans waiting."""
        try:
            batches = _Batches(_Counted(exporter), max_waiting)
            provider = TracerProvider(resource=_resource(service, cell), shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(
                f"OpenTelemetry refuses its settings: {error}; look at OTEL_* in the environment"
            ) from None
        provider.add_span_processor(batches)
        return cls(provider, batches)

    def begin(self, name: str, parent: Mapping[str, str]) -> Span:
        """Start a server's span now."""
        return self.tracer.start_span(name, self._propagator.extract(parent, Context()), SpanKind.SERVER)

    def samples(self) -> Iterator[Sample]:
        """Metrics of tracing itself."""
        yield metrics.SPANS_DROPPED, self._batches.dropped, ("queue_full",)
        yield metrics.SPANS_DROPPED, self._batches.exporter.lost, ("not_delivered",)

    async def close(self, within_s: float = _CLOSE_S) -> None:
        """Send the remaining spans, within this time. Closing twice is harmless."""
        # A thread that does not delay the exit: without an answer from the collector, the SDK takes half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="semel-spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, within_s)


class _Counted(SpanExporter):
    """Counts the spans that leave the queue, and those that cannot be delivered. Runs in the batch thread only."""

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
    """The SDK's processor, except that spans above its bound are counted and dropped."""

    def __init__(self, exporter: _Counted, max_waiting: int) -> None:
        super().__init__(exporter, max_queue_size=max_waiting)
        self.exporter = exporter
        self.dropped = 0
        self._max_waiting = max_waiting
        self._ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span; always called by the serving thread."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._ended - self.exporter.exported >= self._max_waiting:
            self.dropped += 1
        else:
            self._ended += 1
            super().on_end(span)


def _resource(service: str, cell: str | None) -> Resource:
    own = {SERVICE_VERSION: version("semel")} | ({} if cell is None else {_CELL: cell})
    found = Resource.create(own)
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # no name is set
        found = found.merge(Resource({SERVICE_NAME: service}))
    return found


def exporter_to(endpoint: str, protocol: str) -> SpanExporter:
    """Return an exporter to a collector. The SDK reads headers, certificates and the like from its OTEL_* variables."""
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError:
            raise ConfigError(
                "spans by grpc need opentelemetry-exporter-otlp-proto-grpc: install it, or name the collector's HTTP "
                "endpoint, http://HOST:4318/v1/traces"
            ) from None
        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)
