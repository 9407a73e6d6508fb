"""Log lines that strangers or a fault could repeat without end: one a second, with the number of those left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["SampledLog"]

_EVERY_S: Final = 1.0


class SampledLog:
    """A kind of log line, at most one a second."""

    def __init__(self, logger: logging.Logger, level: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock
        self._next_s = 0.0
        self._left_out = 0

    def log(self, message: str, *values: object, **options: object) -> None:
        """Log the line, or count it."""
        if (now_s := self._clock()) < self._next_s:
            self._left_out += 1
            return
        self._next_s = now_s + _EVERY_S
        left_out, self._left_out = self._left_out, 0
        if left_out:
            message, values = message + " (and %d more like it)", (*values, left_out)
        self._logger.log(self._level, message, *values, **options)  # type: ignore[arg-type]
