"""Injection: features that an outside framework preprocessed, into the engine's own item cache.

Each item is decided by itself: one that is wrong, or that the engine fails on, never stops the others, and none of them
ever touches a request. What a digest stands for cannot be checked here; who may inject is decided at the admin address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from semel.core import Contract, Digest, Feature, Modality
from semel.errors import EngineDead, FeatureRejected
from semel.interchange.injection import Outcome
from semel.interchange.safetensors import Empty, Entry, Faulty, FeatureEntry

__all__ = ["Count", "Injectable", "inject"]

_ITEM_S: Final = 60.0

Count = Callable[[Modality, bool], None]
"""Counts one query of the worker's tier: of which modality, and whether it was a hit."""

logger = logging.getLogger(__name__)


class Injectable(Protocol):
    """The part of an engine that injection needs."""

    @property
    def contract(self) -> Contract:
        """The engine's contract; `cache_bytes` is the size of its item cache, 0 if it is off."""
        ...

    @property
    def injection_refusal(self) -> str:
        """Why its item cache takes nothing; empty if it does."""
        ...

    def holds(self, digest: Digest) -> bool:
        """Return whether the engine's item cache has it."""
        ...

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Put it into the item cache: False if it is there already or does not fit; raises `FeatureRejected`."""
        ...


async def inject(engine: Injectable, entries: Sequence[Entry], count: Count, *, peer: str) -> list[Outcome]:
    """Return what became of each entry, in order. `peer` is who sent them, for the log; raises `EngineDead` only."""
    outcomes: list[Outcome] = []
    for entry in entries:
        outcomes.append(await _outcome(engine, entry, count))
        await asyncio.sleep(0)  # 32,768 items that are held would keep requests waiting
    tally = Counter(outcome.status for outcome in outcomes)
    logger.info(
        "%s injected %d items with %s bytes: %d stored, %d held, %d skipped, %d refused",
        peer,
        len(entries),
        f"{sum(entry.feature.nbytes for entry in entries if isinstance(entry, FeatureEntry)):,}",
        *(tally[status] for status in ("stored", "held", "skipped", "refused")),
    )
    return outcomes


async def _outcome(engine: Injectable, entry: Entry, count: Count) -> Outcome:
    match entry:
        case Faulty(name, reason):
            return Outcome(name, "refused", reason)
        case Empty(digest):
            return Outcome(digest.hex(), "skipped", "it has no tensors")
        case FeatureEntry(digest, feature) if engine.injection_refusal:
            return Outcome(digest.hex(), "skipped", engine.injection_refusal)
        case FeatureEntry(digest, feature):
            try:
                outcome = await _store(engine, digest, feature)
            except FeatureRejected as error:
                return Outcome(digest.hex(), "refused", str(error))
            if outcome.status in ("held", "stored"):
                count(feature.modality, outcome.status == "held")
            return outcome


async def _store(engine: Injectable, digest: Digest, feature: Feature) -> Outcome:
    """Check the feature first: a wrong one is refused even if its digest is held."""
    name = digest.hex()
    engine.contract.check(feature)
    if engine.holds(digest):
        return Outcome(name, "held")
    limit = engine.contract.cache_bytes
    if feature.nbytes > limit:
        return Outcome(name, "skipped", f"it has {feature.nbytes:,} bytes, the engine's item cache holds {limit:,}")
    try:
        async with asyncio.timeout(_ITEM_S):
            stored = await engine.inject(digest, feature)
    except FeatureRejected:
        raise
    except EngineDead as error:
        logger.warning("nothing can be injected: %s", error)
        raise
    except Exception as error:  # noqa: BLE001 - whatever the engine does with one item must not stop the others
        logger.warning("the engine failed on the injected item %s: %r", name, error)
        return Outcome(name, "refused", "the engine failed on it; the worker's log says why")
    if stored:
        return Outcome(name, "stored")
    if engine.holds(digest):  # a request brought it meanwhile
        return Outcome(name, "held")
    return Outcome(name, "skipped", "it does not fit into the engine's item cache")
