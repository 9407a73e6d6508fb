"""How a worker deals with many frontends."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core.flag import flag

__all__ = ["SessionSettings"]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """A worker's sessions."""

    news_s: float = flag(
        0.25,
        "announce-interval-s",
        help="Seconds between two messages in which a worker tells a frontend how busy its engine is and what that has "
        "cached; at most 0.02 with up to 4 frontends. A frontend whose request it concerns hears of it at once.",
        group="Worker",
        unit="seconds",
        min=0,
    )
    max_frontends: int = flag(
        4096, help="Frontends that a worker takes; the next one is told that there are too many.", group="Worker", min=1
    )
