"""Transport keys that are rotated while a process runs: read again when their file changes, and used at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from semel.compose.reloading import ReloadedFiles
from semel.key_files import TransportSource
from semel.telemetry import Meter
from semel.wire.keys import TransportKeys

__all__ = ["follow_keys"]

logger = logging.getLogger(__name__)


async def follow_keys(source: TransportSource, use: Callable[[TransportKeys], None], meter: Meter) -> None:
    """Have keys used whenever their file has others; returns at once if they never change."""
    if source.file is None:
        return

    def take(keys: TransportKeys) -> None:
        if keys != source.keys:
            use(keys)
            source.keys = keys
            numbers = ", ".join(str(one.number) for one in keys.generations)
            logger.info("transport keys of generation %s are accepted", numbers)

    await ReloadedFiles("transport_keys", [source.file], source.load, take, meter).run()
