"""A collector of spans: OTLP over HTTP, on a real socket, in a thread of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Sent:
    """A span as it came."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]


@dataclass
class SpanCollector:
    """What has come so far."""

    url: str
    spans: list[Sent] = field(default_factory=list)

    def of(self, trace_id: str) -> list[Sent]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def collecting() -> Iterator[SpanCollector]:
    """A collector that listens at a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.spans += _spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = SpanCollector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(5)


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Sent]:
    for resource in request.resource_spans:
        names = {one.key: one.value.string_value for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Sent(
                    names.get("service.name", ""),
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {one.key: str(one.value) for one in span.attributes},
                )
