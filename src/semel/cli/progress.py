"""The progress of a start: a line for each stage, with its seconds, and what is being waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

__all__ = ["Progress"]

_LAST_STAGE: Final = "loading the model's processor"

logger = logging.getLogger("semel.cli.serve")


class Progress:
    """The stage of a start, shown at a terminal in one line that changes, else as lines of the log."""

    def __init__(self, update: Callable[[str], None] | None, clock: Callable[[], float] = monotonic) -> None:
        """`update` changes the line at a terminal."""
        self._update = update
        self._clock = clock
        self._began = self._stage_began = clock()
        self._stage = ""

    def show(self, stage: str, reason: str) -> None:
        """Show a stage; at the last one, `reason` says what the frontend waits for."""
        now = self._clock()
        kind, known = stage.partition(":")[0], self._stage.partition(":")[0]
        if kind != known:
            if self._stage:
                logger.info("%s took %.1f s", known, now - self._stage_began)
            elif self._update is None:
                logger.info("%s", kind)
            self._stage_began = now
        self._stage = stage
        if self._update is not None:
            detail = f" ({reason})" if reason and stage == _LAST_STAGE else ""
            self._update(f"{stage}{detail} · {now - self._began:.0f} s")
