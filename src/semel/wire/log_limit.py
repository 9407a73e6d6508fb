"""How often a log may say the same thing. Pure, the time is passed in."""

from __future__ import annotations

__all__ = ["LogLimit"]


class LogLimit:
    """At most one line in a time, for each kind of line. Kinds are few and known."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def take(self, kind: str, now: float) -> int | None:
        """The number of lines that were not written since the last one, if one may be written now; None if not."""
        if kind in self._last and now < self._last[kind] + self._every_s:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return None
        self._last[kind] = now
        return self._unsaid.pop(kind, 0)
