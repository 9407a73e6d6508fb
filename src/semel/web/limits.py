"""The limits of connections. Values only; the server enforces them (threats S18, S19, S25)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semel.core.flag import GIB, KIB, Group, flag

__all__ = ["ConnectionLimits"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections: their number, the time without progress, and the sizes of a head."""

    GROUP: ClassVar[Group] = "Connections"

    max_connections: int = flag(
        8_192,
        help="Maximum number of connections of clients. Beyond it, those without a request are closed for new ones; if "
        "there are none, only /health, /ready and /metrics are answered, the rest with 503. The open files that the "
        "system allows, less 256, are a limit too.",
        min=1,
    )
    max_address_connections: int = flag(
        4_096,
        help="The same for each client address (IPv6: each /64 network), proxies of --forwarded-allow-ips excepted; 0 "
        "sets no separate limit.",
        min=0,
    )
    first_s: float = flag(
        10.0,
        "first-request-s",
        help="Seconds until a connection without a first request is closed, TLS handshake included.",
        unit="seconds",
        min=0.001,
    )
    """At most `idle_s`."""

    idle_s: float = flag(
        75.0,
        "keep-alive-s",
        help="Seconds until an idle connection is closed. The start of a new request keeps it open, stray bytes do "
        "not.",
        unit="seconds",
        min=0.001,
    )
    """The time until a request begins, after a response. The unread rest of an answered request is discarded meanwhile.
    """

    headers_s: float = 120.0
    """The maximum time for the headers of a request; after it the response is 408."""

    stall_s: float = 120.0
    """The maximum time for which a client may leave 64 KB of a response unread, or any part of the last response. After
    it the connection is closed.
    """

    head_bytes: int = flag(
        64 * KIB,
        "max-head-bytes",
        help="Maximum size of a request line with its headers; larger ones are answered with 431.",
        unit="bytes",
        min=1024,
    )
    head_fields: int = flag(
        100, "max-head-fields", help="Maximum number of headers of a request; more are answered with 431.", min=16
    )
    """Both limits include trailers, and apply while the head is still incomplete (threats S19)."""

    pipelined: int = 16
    """The most requests that a client may send ahead of the responses; with more the connection is closed."""

    unread_bytes: int = GIB
    """The most bytes of an answered request that are discarded; beyond it the connection is closed."""
