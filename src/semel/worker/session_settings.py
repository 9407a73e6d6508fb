"""Settings of a worker's sessions with frontends."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core.flag import flag

__all__ = ["SessionSettings"]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """A worker's sessions."""

    announce_interval_s: float = flag(
        0.25,
        "announce-interval-s",
        help="Seconds between two messages in which a worker reports its load and its cache changes to a "
        "frontend; at most 0.02 with up to 4 frontends. The frontend that sent a request is notified at "
        "once.",
        group="Fleet",
        unit="seconds",
        min=0,
    )
    max_frontends: int = flag(
        4096, help="Maximum number of frontends that a worker accepts; further ones are refused.", group="Fleet", min=1
    )
