"""The lag of an event loop: how long due callbacks wait. It is measured from inside; nothing else shows it."""

from __future__ import annotations

import asyncio
from typing import Final

from semel.telemetry import metrics
from semel.telemetry.meter import Meter

__all__ = ["LoopLag"]

_EVERY_S: Final = 0.05


class LoopLag:
    """Measures twenty times a second how late a timer of the running loop fires."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._wait()

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + _EVERY_S
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._meter.observe(metrics.LOOP_LAG_SECONDS, max(0.0, self._loop.time() - self._due))
        self._wait()
