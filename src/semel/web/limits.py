"""What a connection may do. Values only; the server keeps to them (threats S18, S19)."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core.flag import GIB, KIB, flag

__all__ = ["ConnectionLimits"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a connection may do nothing, or nothing that is of use."""

    idle_s: float = flag(
        75.0,
        "keep-alive-s",
        help="Seconds until an idle connection is closed. The start of a new request keeps it open, stray bytes do "
        "not.",
        group="Limits",
        unit="seconds",
        min=0.001,
    )
    """Until a request begins: the first one, or the next after an answer. What is still to come of the last one when it
    has been answered is thrown away meanwhile."""

    headers_s: float = 120.0
    """The longest that the headers of a request may take to come; over it the answer is 408."""

    stall_s: float = 120.0
    """The longest that a client may leave 64 KB unread of an answer, or any of the last one; over it the connection is
    given up."""

    head_bytes: int = flag(
        64 * KIB,
        "max-head-bytes",
        help="Maximum size of a request line with its headers; larger ones are answered with 431.",
        group="Limits",
        unit="bytes",
        min=1024,
    )
    head_fields: int = flag(
        100,
        "max-head-fields",
        help="Maximum number of headers of a request; more are answered with 431.",
        group="Limits",
        min=16,
    )
    """Both count trailers too, and hold while a head is still incomplete (threats S19)."""

    unread_bytes: int = GIB
    """The most that is thrown away of a request that has been answered; over it the connection is closed."""
