"""The clock that files expire by: the machine's, unless it has just jumped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["FileClock"]

_JUMP_S: Final = 3_600.0
_PATIENCE_S: Final = 60.0


class FileClock:
    """Seconds since the epoch. A wall clock that jumps by more than an hour is believed after a minute.

    Until then time goes on from before the jump, as the monotonic clock does: a clock that is wrong for a moment
    deletes nothing. A machine that was asleep has jumped too.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()
        """From the monotonic clock to the time that is believed."""
        self._jump: tuple[float, float] | None = None
        """The offset after a jump, and when it was first seen."""

    def __call__(self) -> float:
        """Return the time."""
        now_s = self._monotonic()
        offset_s = self._wall() - now_s
        if abs(offset_s - self._offset_s) <= _JUMP_S:
            self._jump = None
        elif self._jump is None or abs(offset_s - self._jump[0]) > _JUMP_S:
            self._jump = offset_s, now_s
        if self._jump is None or now_s - self._jump[1] >= _PATIENCE_S:
            self._offset_s, self._jump = offset_s, None
        return now_s + self._offset_s
