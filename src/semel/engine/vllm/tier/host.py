"""The embedding tier as the process sees it that embeds the engine: blocks to fetch into, and outputs to publish.

One region of the host's memory is mapped by this process and by vLLM's worker processes: first the host cache, which
the engine core fills and empties, then the staging part, of which only this process gives out blocks. Blocks are given
out under leases. A lease has a slot in `TierPage` and a generation, so that the page can say of each that it is done,
also long before anybody looks.

Who frees what: `release`, while an output was not submitted; the page, when the engine core had the request. Between
the two are requests that the engine core never got, or refused before its scheduler saw them. So when a request ends
other than well, this process asks the engine core something harmless, which it answers in order: whatever lease is
then neither used nor done will not be.

All of it may be called from any thread: one lock, held for microseconds. Buffers are read and written without it. What
was read of the host cache counts only if `is_intact` says so afterwards: that something is gone is written before its
blocks are written again.

On a GPU vLLM's own copies make the region. The worker process that saves says on the page where it has it; this process
maps it before the engine has a request, and whether or not it still has a name (`TierPage.open_region`).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Self

from semel.core import Digest, Form, PrefetchedOutput, form_bytes
from semel.encoder.extents import FreeExtents
from semel.engine.protocol import CachedOutput, StagedOutput
from semel.engine.tier_events import Gone, Overrun, Reset, Saved, TierEvent
from semel.engine.vllm.tier.config import TierConfig, has_tier, tier_block_bytes
from semel.engine.vllm.tier.page import LEASE_SLOTS, TierPage, lease_slot
from semel.engine.vllm.tier.prefetch_params import Staging
from semel.engine.vllm.tier.shared_file import open_file

__all__ = ["HostTier"]

_MAX_PENDING: Final = 16_384
"""Events that are kept for `review`."""

_LOOKS: Final = 200
_LOOK_S: Final = 0.005

Extents = tuple[tuple[int, int], ...]

logger = logging.getLogger(__name__)


class HostTier:
    """See `semel.engine.protocol.Tier`."""

    def __init__(self, memory: mmap.mmap, staging: Staging, page: TierPage) -> None:
        self.refusal = ""
        """Why nothing may be fetched for the engine or published of it, set by whoever finds out; empty if it may."""
        self.identity: bytes | None = None
        self.probe: bytes | None = None
        self.fence: Callable[[], Awaitable[object]] | None = None
        """Asks the engine core something that it answers after everything that it was sent before."""
        self.identify: Callable[[], bytes | None] = _unknown
        """Finds the identity; takes as long as it takes to read the encoder's weights."""
        self._memory = memoryview(memory)
        self._staging = staging
        self._page = page
        self._lock = threading.Lock()
        self._free = FreeExtents(staging.blocks)
        self._slots = list(range(LEASE_SLOTS))
        self._generations = [0] * LEASE_SLOTS
        self._open: dict[int, Extents] = {}
        self._submitted: set[int] = set()
        self._host_cache: dict[Digest, Saved] = {}
        self._position = 0
        self._pending: list[TierEvent] = []
        self._first_epoch = 0
        self._has_new_weights = False
        self._recovering: set[asyncio.Task[None]] = set()
        self._is_late = False
        """True if the engine's copies may end after the step that began them."""

    @classmethod
    def from_config(cls, vllm_config: Any) -> Self | None:
        """Return the tier of a running engine; None if it has none, or nobody wanted to see it."""
        from vllm.platforms import current_platform

        if not has_tier(vllm_config):
            return None
        config = TierConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if config.page is None:
            return None
        block_bytes = tier_block_bytes(vllm_config.model_config)
        nbytes = config.nbytes // block_bytes * block_bytes
        region = config.region if current_platform.is_cpu() else None
        try:
            return cls.open(region, nbytes, config.locate_staging(block_bytes), TierPage.open(config.page))
        except OSError as error:
            logger.warning("encoder outputs are not shared between workers: %s", error)
            return None

    @classmethod
    def open(cls, region: str | None, nbytes: int, staging: Staging, page: TierPage) -> Self:
        """Map a region that is there: this file, or the one that the engine has announced."""
        descriptor = page.open_region(nbytes) if region is None else open_file(region, "the embedding tier")
        try:
            tier = cls(mmap.mmap(descriptor, nbytes), staging, page)
        finally:
            os.close(descriptor)
        tier._is_late = region is None
        return tier

    @property
    def epoch(self) -> int:
        """Number of resets since the engine was warm."""
        return self._page.epoch - self._first_epoch

    @property
    def has_new_weights(self) -> bool:
        """True if weights were changed in place."""
        return self._has_new_weights or self._page.has_new_weights

    def note_new_weights(self) -> None:
        """Take note that weights are about to change: the engine core hears of it with its next step only."""
        self._has_new_weights = True

    @property
    def staged_blocks(self) -> int:
        """Blocks that are given out."""
        return self._staging.blocks - self._free.free

    def begin(self) -> None:
        """Count resets from now on: the engine is warm."""
        self._first_epoch = self._page.epoch

    def stage(self, digest: Digest, form: Form) -> StagedOutput | None:
        """Reserve blocks for an output of this form; None if there is no room."""
        try:
            nbytes = form_bytes(form)
        except ValueError:
            return None
        blocks = -(-nbytes // self._staging.block_bytes)
        with self._lock:
            if blocks > self._free.free or not self._slots:
                return None
            slot = self._slots.pop()
            self._generations[slot] += 1
            lease = self._generations[slot] * LEASE_SLOTS + slot
            first = self._staging.first
            extents = tuple((first + start, count) for start, count in self._free.take(blocks))
            self._open[lease] = extents
            epoch = self._page.epoch
        prefetched = PrefetchedOutput(lease, digest, extents, form, epoch)
        return StagedOutput(prefetched, epoch - self._first_epoch, self._buffers(extents, nbytes))

    def release(self, staged: StagedOutput) -> None:
        """Let go of blocks that were not submitted. Twice does no harm."""
        lease = staged.prefetched.lease
        with self._lock:
            if lease not in self._submitted:
                self._close(lease)

    def submit(self, prefetched_outputs: Iterable[PrefetchedOutput]) -> None:
        """Give outputs to the engine."""
        with self._lock:
            self._submitted.update(one.lease for one in prefetched_outputs if one.lease in self._open)

    def end(self, prefetched_outputs: Iterable[PrefetchedOutput]) -> None:
        """Take the blocks of a request back that has ended in some way, or never began. Needs a running event loop."""
        with self._lock:
            self._collect()
            leases = [one.lease for one in prefetched_outputs if one.lease in self._submitted]
        if leases and self.fence is not None:
            task = asyncio.get_running_loop().create_task(self._recover(leases))
            self._recovering.add(task)
            task.add_done_callback(self._recovering.discard)

    def review(self) -> Sequence[TierEvent]:
        """Take blocks back that the engine is done with. Returns what has happened since the last call."""
        with self._lock:
            self._collect()
            self._poll()
            events, self._pending = self._pending, []
        return events

    def holds(self, digest: Digest) -> bool:
        """Return whether the host cache has an output, as far as is known."""
        with self._lock:
            return digest in self._host_cache

    def cached_output(self, digest: Digest) -> CachedOutput | None:
        """Return an output in the host cache, to be read."""
        with self._lock:
            self._poll()
            record = self._host_cache.get(digest)
        if record is None:
            return None
        buffers = self._buffers(record.extents, form_bytes(record.form))
        intact = partial(self._is_in_host_cache, record)
        return CachedOutput(record.form, tuple(buffer.toreadonly() for buffer in buffers), intact)

    async def saved_output(self, digest: Digest) -> CachedOutput | None:
        """Return an output that was just encoded, as soon as its copy has ended: on a GPU that is after the answer."""
        for _ in range(_LOOKS if self._is_late else 0):
            if (found := self.cached_output(digest)) is not None:
                return found
            await asyncio.sleep(_LOOK_S)
        return self.cached_output(digest)

    async def settled(self) -> None:
        """Wait until nothing is being recovered."""
        await asyncio.gather(*self._recovering)

    def _is_in_host_cache(self, record: Saved) -> bool:
        with self._lock:
            self._poll()
            return self._host_cache.get(record.digest) == record

    async def _recover(self, leases: Sequence[int]) -> None:
        """Take back what the engine core has never seen, once it has seen everything that was sent to it."""
        assert self.fence is not None
        try:
            await self.fence()
        except Exception:  # a dead engine: its blocks end with this process
            logger.debug("the engine does not answer", exc_info=True)
            return
        with self._lock:
            self._collect()
            for lease in leases:
                if lease in self._submitted and not self._page.is_used(lease):
                    self._close(lease)

    def _collect(self) -> None:
        """Take back what the page calls done."""
        for lease in [lease for lease in self._submitted if self._page.is_done(lease)]:
            self._close(lease)

    def _close(self, lease: int) -> None:
        extents = self._open.pop(lease, None)
        self._submitted.discard(lease)
        if extents is not None:
            self._free.give_back([(first - self._staging.first, count) for first, count in extents])
            self._slots.append(lease_slot(lease))

    def _poll(self) -> None:
        """Read the page's events."""
        events, self._position = self._page.read(self._position)
        for event in events:
            match event:
                case Saved():
                    self._host_cache[event.digest] = event
                case Gone():
                    known = self._host_cache.get(event.digest)
                    if known is not None and known.transfer == event.transfer:
                        del self._host_cache[event.digest]
                case Reset() | Overrun():
                    self._host_cache.clear()
        self._pending += events
        if len(self._pending) > _MAX_PENDING:
            self._pending = [Overrun(), *self._host_cache.values()]

    def _buffers(self, extents: Extents, nbytes: int) -> tuple[memoryview, ...]:
        buffers = []
        for first, count in extents:
            used = min(nbytes, count * self._staging.block_bytes)
            start = first * self._staging.block_bytes
            buffers.append(self._memory[start : start + used])
            nbytes -= used
        return tuple(buffers)


def _unknown() -> None:
    """Nobody knows what the encoder is."""
