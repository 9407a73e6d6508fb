"""Spans: what was done for a request, when, and inside of what. Off unless a collector is named.

Here is what the rest of semel sees. Without a collector every span is one and the same that does nothing, and
OpenTelemetry is not imported; with one, `otlp` does the work. A span tells sizes, counts and codes. It never tells a
digest, a URL, a prompt, a key, or the text of an error, which may have any of these in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

from semel.core import Trace
from semel.errors import ConfigError
from semel.telemetry.meter import Sample

__all__ = [
    "NO_SPAN",
    "NO_TRACING",
    "Collector",
    "Span",
    "SpanKind",
    "Tracing",
    "Value",
    "check_installed",
    "start_tracing",
]

Value = str | int | float | Sequence[str]
SpanKind = Literal["server", "internal"]
_Transport = Literal["http/protobuf", "grpc"]

_PATH: Final = "/v1/traces"
_INSTALL: Final = "pip install 'semel[otel]'"


class Span(Protocol):
    """A piece of work, from the moment it is made to its end. After that nothing more is taken."""

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it; if not, nothing need be put together for it."""
        ...

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, in hexadecimal digits; empty if to none."""
        ...

    @property
    def trace(self) -> Trace | None:
        """What makes work elsewhere a part of it."""
        ...

    def rename(self, name: str) -> None:
        """Call it so from now on."""
        ...

    def note(self, name: str, value: Value) -> None:
        """Tell something of it."""
        ...

    def add(self, name: str, amount: int) -> None:
        """Tell a number of it that grows."""
        ...

    def event(self, name: str) -> None:
        """Something has happened, now."""
        ...

    def child(self, name: str, seconds: float, notes: Mapping[str, Value] | None = None) -> None:
        """A part of it that ends now and took so long."""
        ...

    def fail(self, code: str) -> None:
        """It comes to nothing, for a reason with this code; of several, the first."""
        ...

    def end(self) -> None:
        """It ends, now."""
        ...


class Tracing(Protocol):
    """Makes spans, and sends them to a collector."""

    def begin(self, name: str, kind: SpanKind, parent: Mapping[str, str]) -> Span:
        """A span that begins now: part of the one that W3C's headers in `parent` name, if they name one."""
        ...

    def samples(self) -> Iterator[Sample]:
        """What there is to see of it."""
        ...

    async def close(self) -> None:
        """Send what is left, but not for longer than a moment."""
        ...


class _NoSpan:
    """Is not recorded."""

    __slots__ = ()
    is_recorded = False
    trace_id = ""
    trace = None

    def rename(self, name: str) -> None:
        """Nothing."""

    def note(self, name: str, value: Value) -> None:
        """Nothing."""

    def add(self, name: str, amount: int) -> None:
        """Nothing."""

    def event(self, name: str) -> None:
        """Nothing."""

    def child(self, name: str, seconds: float, notes: Mapping[str, Value] | None = None) -> None:
        """Nothing."""

    def fail(self, code: str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class _NoTracing:
    """Records nothing."""

    __slots__ = ()

    def begin(self, name: str, kind: SpanKind, parent: Mapping[str, str]) -> Span:  # noqa: ARG002
        """The span that does nothing."""
        return NO_SPAN

    def samples(self) -> Iterator[Sample]:
        """Nothing."""
        return iter(())

    async def close(self) -> None:
        """Nothing."""


NO_SPAN: Final[Span] = _NoSpan()
NO_TRACING: Final[Tracing] = _NoTracing()


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans are sent, and how."""

    endpoint: str
    protocol: _Transport

    @classmethod
    def of(cls, endpoint: str, protocol: str | None = None) -> Collector:
        """The collector at a URL; the protocol is HTTP's, unless one is named or the URL begins with grpc://."""
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
    """Refuse a collector that nothing could be sent to, before anything else takes its time."""
    if collector is None:
        return
    try:
        import_module("semel.telemetry.otlp")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, and there is no {error.name}: {_INSTALL}"
        ) from None


def start_tracing(collector: Collector | None, service: str) -> Tracing:
    """Send spans to a collector from now on, under the service's name unless OTEL_SERVICE_NAME gives another."""
    if collector is None:
        return NO_TRACING
    check_installed(collector)
    from semel.telemetry.otlp import OtlpTracing

    return OtlpTracing.start(collector, service)
