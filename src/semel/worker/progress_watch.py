"""Watch over an engine that may hang (threats S22)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from semel.engine import Engine

__all__ = ["until_hung"]

_LOOK_S: Final = 0.5
"""Seconds between two looks at the engine's progress: well within the largest gap of its clock."""

logger = logging.getLogger(__name__)


async def until_hung(engine: Engine, progress_s: float) -> str:
    """Wait until an engine is busy for longer without a step, kill it, and say why. With 0 that never happens.

    What keeps this loop from looking is not the engine's fault.
    """
    progress = engine.progress
    while not progress.is_hung(progress_s):
        await asyncio.sleep(_LOOK_S)
        progress.clock.tick()
    logger.error(
        "engine_hung: no step for %.1f s with requests under way (--engine-progress-s %g; its longest step took "
        "%.1f s, this was to be step %d): the engine is killed, and the worker ends",
        progress.waited_s,
        progress_s,
        progress.longest_s,
        progress.steps + 1,
    )
    engine.kill()
    return f"engine_hung: the engine has made no step for {progress.waited_s:.0f} s; it is being replaced"
