"""Tracing: creates spans and sends them to a collector. Off unless a collector is configured.

Without a collector, all spans are one object that does nothing, and neither OpenTelemetry's SDK nor an exporter is
imported. With one, `otlp` does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal
from urllib.parse import urlsplit

from semel.errors import ConfigError
from semel.telemetry.spans import NO_TRACING, Tracing

__all__ = ["Collector", "check_installed", "start_tracing"]

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
    from semel.telemetry.otlp import OtlpTracing, exporter_to

    return OtlpTracing.sending(exporter_to(collector.endpoint, collector.protocol), service, cell=cell)
