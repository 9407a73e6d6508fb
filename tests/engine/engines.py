"""Engines as `semel worker` starts them, one at a time, shared by all tests that name the same start.

A start takes half a minute, and CI has a budget of them (`tests/budget.py`). Tests that share one are a group
(`tests/groups.py`): they follow one another in one process, whichever files they are in.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semel.compose import compose_pipeline
from semel.core import Key
from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.engine import VllmEngine
from semel.engine.vllm.plugins.encoder_metrics import EncoderPage, EncoderTotals
from semel.engine.vllm.tier.config import TierConfig
from semel.engine.vllm.tier.page import TierPage
from semel.engine.vllm.tier.shared_file import create_file, descriptor_path
from semel.processing.processor import ProcessorKind
from tests.engine.parity import Rig

__all__ = ["COMMON", "Engines", "ShippedRig", "Start", "running_as_worker"]

COMMON: Final = ("--enforce-eager", "--dtype", "float32", "--seed", "0", "--disable-log-stats")


@dataclass(frozen=True)
class Start:
    """A model of `semel.lab.testing.models`, and what follows it on the command line of `semel worker`."""

    model: str
    flags: tuple[str, ...]
    encoder_planning: bool = False
    processor: ProcessorKind = "auto"
    common: tuple[str, ...] = COMMON
    """What stands before its flags."""
    tier_bytes: int = 0
    """Host memory for encoder outputs."""
    staging_bytes: int = 0
    """How much of it is for those that are fetched."""
    has_own_memory: bool = False
    """True if the engine makes the memory, as on a GPU."""

    def tier(self, region: str) -> TierConfig | None:
        """The memory, in this file."""
        if not self.staging_bytes:
            return TierConfig(self.tier_bytes, region) if self.tier_bytes else None
        memory = None if self.has_own_memory else region
        return TierConfig(self.tier_bytes, memory, page=TierPage.create().path, staging=self.staging_bytes)


@dataclass(frozen=True)
class ShippedRig(Rig):
    """An engine with semel's parts inside, and the page that its encoder cache writes."""

    page: EncoderPage

    async def totals(self) -> EncoderTotals:
        """What the encoder cache counted so far; the engine core steps between two calls to it."""
        await self.llm.is_sleeping()
        await self.llm.is_sleeping()
        return self.page.read().get(0, EncoderTotals())


@asynccontextmanager
async def running_as_worker(start: Start, folder: Path) -> AsyncIterator[ShippedRig]:
    """The engine of `semel worker`: its flags, its encoder cache, its scheduler and its lazy transfer."""
    page, region = EncoderPage.create(), create_file("semel-tier")
    arguments = parse_engine_flags(
        str(folder),
        [*start.common, *start.flags],
        encoder_planning=start.encoder_planning,
        embedding_tier=start.tier(descriptor_path(region)),
        metrics=page.path,
    )
    engine = VllmEngine.start(arguments, processor=start.processor)
    try:
        target = engine.contract.target
        pipeline = compose_pipeline(folder, target, Key(bytes(32)), processor=start.processor)
        yield ShippedRig(engine, pipeline, folder, page)
    finally:
        await engine.close()
        page.close()
        os.close(region)


class Engines:
    """At most one engine that runs: it ends when another one is wanted."""

    def __init__(self, model: Callable[[str], Path]) -> None:
        self._model = model
        self._stack = AsyncExitStack()
        self._running: tuple[Start, ShippedRig] | None = None

    async def of(self, start: Start) -> ShippedRig:
        """The engine of this start: the one that runs, if it is the same."""
        if self._running is None or self._running[0] != start:
            await self.close()
            rig = await self._stack.enter_async_context(running_as_worker(start, self._model(start.model)))
            self._running = start, rig
        _, rig = self._running
        return rig

    async def close(self) -> None:
        """End the one that runs."""
        self._running = None
        await self._stack.aclose()
