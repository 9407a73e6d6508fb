"""Circuit breaker for a store that fails. Pure: the clock is passed in.

Closed, it lets every call through. After some failures in a row it opens, for 1 s; then one call at a time is let
through as a trial. A trial that fails opens it for twice as long, up to a minute. One that succeeds closes it. How long
it was open is forgotten only when as many calls have succeeded after that: a store may answer pings, and nothing else.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Breaker"]

_FAILURES: Final = 3
_FIRST_WAIT_S: Final = 1.0
_MAX_WAIT_S: Final = 60.0


class Breaker:
    """One thread at a time may call it."""

    __slots__ = ("_backoff_s", "_epoch", "_failures", "_is_trial", "_opened_until", "_successes", "_wait_s")

    def __init__(self) -> None:
        self._failures = 0
        self._wait_s = 0.0
        """For how long it is open; 0 if it is closed."""
        self._backoff_s = 0.0
        """How long it was open the last time; 0 once that is forgotten."""
        self._successes = 0
        """Since it was closed."""
        self._opened_until = 0.0
        self._is_trial = False
        self._epoch = 0
        """Changes whenever the state does: what a call of another state came to says nothing about this one."""

    @property
    def is_closed(self) -> bool:
        """True if the store is taken to be up."""
        return not self._wait_s

    def begin(self, now: float) -> int | None:
        """Ask for leave to make a call. Returns a permit for `end`, or None if there must be no call."""
        if self._wait_s:
            if self._is_trial or now < self._opened_until:
                return None
            self._is_trial = True
            self._epoch += 1
        return self._epoch

    def end(self, permit: int, now: float, *, is_ok: bool) -> None:
        """Say what a call came to. Every permit must end."""
        if permit != self._epoch:
            return
        if is_ok:
            self._failures = 0
            if self._wait_s:
                self._wait_s, self._successes = 0.0, 0
                self._change()
            else:
                self._successes += 1
                if self._successes >= _FAILURES:
                    self._backoff_s = 0.0
            return
        self._failures += 1
        if self._wait_s or self._failures >= _FAILURES:
            self._wait_s = self._backoff_s = min(max(2 * self._backoff_s, _FIRST_WAIT_S), _MAX_WAIT_S)
            self._opened_until = now + self._wait_s
            self._change()

    def _change(self) -> None:
        self._failures = 0
        self._is_trial = False
        self._epoch += 1
