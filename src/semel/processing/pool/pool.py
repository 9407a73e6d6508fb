"""A pool of processes that decode and preprocess, so that the process which serves does neither.

Its rules: a process works on one item at a time; requests take turns, so that one with many items does not keep the
others waiting; what goes wrong with a process (it dies, hangs, breaks the protocol) costs the item that it works on and
no other, and an item that does it again is not tried again. A spare process, loaded, takes the place of one that ended
at once, and another spare is started while the rest goes on. A caller that goes away costs nothing either: the answer
to its item is read and dropped, so that frames never get out of step. Nothing here imports torch, transformers or
numpy.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self, TypeVar

from semel.cache import Reservation, SharedCache
from semel.core import Feature, Layout, Media, RetryQueue, Target
from semel.errors import (
    ConfigError,
    MediaTooLarge,
    MediaUndecodable,
    NotReady,
    ProtocolError,
    SemelError,
    ServiceError,
)
from semel.media import DecodeLimits, Pieces
from semel.media.decode.limits import ProcessingLimits
from semel.processing.folder import read_config
from semel.processing.pool.job import CutJob, FeatureJob, Job, LayoutJob, OfferLimits, Spend
from semel.processing.pool.pipe import (
    Cut,
    Description,
    Drop,
    Failed,
    Load,
    Offer,
    Send,
    Write,
    encode,
    encode_work,
)
from semel.processing.pool.process import PoolProcess
from semel.processing.pool.quarantine import Quarantine
from semel.processing.pool.queue import FairQueue
from semel.processing.processor import ProcessorKind

__all__ = ["MAX_MEMORY_BYTES", "TIMEOUT_S", "Pool"]

MAX_MEMORY_BYTES: Final = ProcessingLimits().max_memory_bytes
"""What a process may use, on top of what it has once it is loaded."""

TIMEOUT_S: Final = ProcessingLimits().timeout_s
"""What one item may take, from the moment a process takes it on."""

_CRASHES: Final = {
    -getattr(signal, name) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
}
_END_TIMEOUT_S: Final = 5.0
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 30.0

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Pool:
    """Processes that make features of media, each with the processor of one model folder. Made by `start`."""

    def __init__(
        self,
        load: Load,
        processes: int,
        max_waiting: int,
        memory: SharedCache | None = None,
        offers: OfferLimits | None = None,
    ) -> None:
        self.processed = 0
        """Features made, including those whose caller had gone."""
        self.failed = 0
        """Items that ended in an error, whoever was at fault."""
        self.replaced = 0
        """Processes that took the place of one that had ended."""
        self._load = load
        self._processes = processes
        self._max_waiting = max_waiting
        self._retries = RetryQueue()
        self._memory = memory
        self._offers = offers or OfferLimits()
        self._items = count()
        self._waiting: FairQueue[Job[Any]] = FairQueue()
        self._deadly = Quarantine()
        self._children: list[PoolProcess] = []
        self._spares: list[PoolProcess] = []  # loaded, and given nothing to do until they take a child's place
        self._prepared: list[PoolProcess] = []  # spawned before it was known what to load
        self._keepers: list[asyncio.Task[None]] = []
        self._description: Description | None = None
        self._refusal: str | None = None  # why no item is taken, if none is

    @classmethod
    async def start(
        cls,
        folder: Path,
        target: Target,
        *,
        processes: int = 1,
        spares: int = 1,
        limits: DecodeLimits | None = None,
        timeout_s: float = TIMEOUT_S,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        max_waiting: int = 1_024,
        memory: SharedCache | None = None,
        offers: OfferLimits | None = None,
        processor: ProcessorKind = "auto",
        prepared: Sequence[PoolProcess] = (),
    ) -> Self:
        """Start the processes and wait until each has loaded its processor; the spare ones follow by themselves.

        `processes` work at once, with one thread each: as many as there are cores use all of them. `spares` more are
        loaded and wait until one of those ends: without any, its place is empty for the seconds that loading takes.
        `timeout_s` is for one item, from the moment a process takes it on; `max_memory_bytes` is for one process, on
        top of what it has once it is loaded; `max_waiting` bounds the items that no process has taken on. Into
        `memory` processes write their features, while it has room; its `put` then holds them where they lie. Features
        over the limits of `offers` are refused before there is room for them.
        `prepared` are processes of the same memory that were spawned ahead: they have imported their libraries by now.
        """
        read_config(folder)  # what is no model folder is told at once, not once torch is loaded
        load = Load(str(folder), target, limits or DecodeLimits(), timeout_s, max_memory_bytes, processor)
        pool = cls(load, processes, max_waiting, memory, offers)
        pool._prepared = list(prepared)
        try:
            async with asyncio.TaskGroup() as starts:
                for _ in range(processes):
                    starts.create_task(pool._add_process())
        except ExceptionGroup as group:
            await pool.close()
            raise group.exceptions[0] from None
        except BaseException:
            await pool.close()
            raise
        pool._keepers = [asyncio.create_task(pool._keep(child)) for child in pool._children]
        pool._keepers += [asyncio.create_task(pool._keep_spare()) for _ in range(spares)]
        return pool

    @property
    def description(self) -> Description:
        """The processor that every process of the pool has loaded."""
        assert self._description is not None, "a pool that has started has a description"
        return self._description

    @property
    def _offer_limits(self) -> OfferLimits:
        """An encoder's positions are none of the prompt's."""
        return replace(self._offers, max_tokens=None) if self.description.encoder_decoder else self._offers

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are ready or at work; fewer than were asked for while one is being replaced."""
        return tuple(child.pid for child in self._children if child.running)

    @property
    def spare_pids(self) -> tuple[int, ...]:
        """The processes that are ready to take the place of one of those."""
        return tuple(spare.pid for spare in self._spares if spare.running)

    @property
    def refusal(self) -> str:
        """Why no item is taken; empty if items are."""
        return self._refusal or ""

    async def process(
        self,
        media: Media,
        options: Mapping[str, object] | None = None,
        *,
        group: Hashable | None = None,
        tenant: str = "",
        apart: bool = False,
    ) -> Feature:
        """The feature of one item; `options` are the request's `mm_processor_kwargs`.

        Items of one `group`, a request, are begun in the order in which they came; groups take turns, an item each.
        Without a group the item is one of its own. An item that ends its process is refused to its `tenant` only. What
        is made `apart` takes no room in the pool's memory, so that nothing is evicted for it.
        """
        self._admit(media)
        item = next(self._items)
        options = options or {}
        order = encode_work(item, media, options)
        made: asyncio.Future[Feature] = asyncio.get_running_loop().create_future()
        return await self._wait_for(
            FeatureJob(item, made if group is None else group, media, options, order, made, apart, tenant=tenant)
        )

    async def lay_out(
        self,
        media: Media,
        options: Mapping[str, object] | None = None,
        *,
        group: Hashable | None = None,
        tenant: str = "",
    ) -> Layout:
        """The layout that the item's feature would have; nothing is made and nothing is counted."""
        self._admit(media)
        item = next(self._items)
        options = options or {}
        order = encode_work(item, media, options, only_layout=True)
        made: asyncio.Future[Layout] = asyncio.get_running_loop().create_future()
        return await self._wait_for(
            LayoutJob(item, made if group is None else group, media, options, order, made, tenant=tenant)
        )

    async def cut(self, media: Media, spend: Spend, *, tenant: str = "") -> Pieces:
        """A clip in pieces that the model's encoder takes.

        Pieces are samples, far more bytes than what they were decoded from. So `spend` is told how many before they
        are taken, and raises if they may not be.
        """
        self._admit(media)
        item = next(self._items)
        made: asyncio.Future[Pieces] = asyncio.get_running_loop().create_future()
        order = encode(Cut(item), len(media.data))
        return await self._wait_for(CutJob(item, made, media, {}, order, made, apart=True, spend=spend, tenant=tenant))

    def forget_counts(self) -> None:
        """Count from zero again: what was made so far, by a warm-up, is nobody's request."""
        self.processed = self.failed = 0

    async def close(self) -> None:
        """End all processes; items that are not done fail. Closing twice does no harm."""
        self._refuse("this frontend is shutting down; send the request again")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        processes = (*self._children, *self._spares, *self._prepared)
        await asyncio.gather(*(process.end(within_s=_END_TIMEOUT_S) for process in processes))
        await asyncio.gather(*(process.release() for process in processes))
        self._children.clear()
        self._spares.clear()
        self._prepared.clear()

    async def _wait_for(self, job: Job[_T]) -> _T:
        self._waiting.add(job.group, job)
        self._dispatch()
        try:
            return await job.made
        finally:
            self._retries.free()
            self._waiting.discard(job.group, job)

    def _admit(self, media: Media) -> None:
        if self._refusal is not None:
            raise NotReady(self._refusal)
        if len(self._waiting) >= self._max_waiting:
            raise NotReady(
                f"{len(self._waiting):,} items wait for preprocessing already; try again later",
                retry_after_s=self._retries.after_s(""),
            )
        if len(media.data) > self._load.max_memory_bytes:
            raise MediaTooLarge(
                f"the {media.modality} has {len(media.data):,} bytes; "
                f"a preprocessing process may use {self._load.max_memory_bytes:,} (--max-processing-memory-gb)"
            )

    def _refuse(self, reason: str) -> None:
        """Take no more items, and give up those that wait."""
        self._refusal = reason
        for job in self._waiting:
            job.fail(NotReady(reason))
        self._waiting.clear()

    def _dispatch(self) -> None:
        """Give items that wait to processes that do not work."""
        for child in self._children:
            if not self._waiting:
                return
            if child.free:
                job = self._waiting.take()
                child.work = asyncio.create_task(self._work(child, job), context=job.context)
                child.work.add_done_callback(lambda _: self._dispatch())

    async def _work(self, child: PoolProcess, job: Job[_T]) -> None:
        if not child.quiet:  # it died while it had nothing to do: that is no item's fault
            self._put_back(job)
            await child.end(within_s=_END_TIMEOUT_S)
            return
        began = perf_counter()
        try:
            made = await self._make(child, job)
        except SemelError as error:
            self.failed += isinstance(job, FeatureJob)
            job.fail(error)
        else:
            self.processed += isinstance(made, Feature)
            self._deadly.clear(job.media, job.options, job.tenant)
            job.succeed(made)
        finally:
            job.fail(ServiceError("preprocessing failed; the log of this frontend says why"))
            job.trace(began)

    def _put_back(self, job: Job[Any]) -> None:
        if self._refusal is not None:
            job.fail(NotReady(self._refusal))
        elif not job.made.done():
            self._waiting.put_back(job.group, job)
            self._dispatch()

    async def _make(self, child: PoolProcess, job: Job[_T]) -> _T:
        """What a process makes of an item; a process that does not do its part is ended."""
        if (refusal := self._deadly.refusal(job.media, job.options, job.tenant)) is not None:
            raise refusal
        room: Reservation | None = None  # given back, if at all, only when the process has answered or has ended
        try:
            async with asyncio.timeout(self._load.timeout_s):
                answer, payload = await child.ask(job.order, job.media.data)
                if isinstance(answer, Offer):
                    await _admit_offer(child, job, answer, self._offer_limits)
                    room = None if self._memory is None or job.apart else self._memory.reserve(answer.nbytes)
                    order = Send() if room is None else Write(room.offset)
                    answer, payload = await child.ask(encode(order))
            if isinstance(answer, Failed) and answer.last:  # until it has ended, it must not get the next item
                await child.end(within_s=_END_TIMEOUT_S)
            return job.read(answer, payload, room)
        except TimeoutError:
            await child.end(within_s=0)
            raise self._late(job) from None
        except (EOFError, OSError):
            await child.end(within_s=_END_TIMEOUT_S)
            raise self._died(job, await child.wait()) from None
        except ProtocolError as error:
            logger.exception("pool process %d broke the protocol and is ended", child.pid)
            await child.end(within_s=0)
            raise ServiceError("preprocessing failed; the log of this frontend says why") from error

    def _late(self, job: Job[Any]) -> MediaTooLarge:
        # The client's fault and not ours: clients send again what failed with 5xx, and it would hang again.
        error = MediaTooLarge(
            f"preprocessing the {job.media.modality} takes longer than the limit of {self._load.timeout_s:g} s "
            f"(--max-processing-s); send a smaller one"
        )
        self._deadly.suspect(job.media, job.options, error, job.tenant)
        return error

    def _died(self, job: Job[Any], status: int) -> MediaUndecodable | ServiceError:
        modality = job.media.modality
        logger.warning("a pool process died with status %d over %r", status, job.media)
        refusal = MediaUndecodable(f"the {modality} crashes the process that decodes it; send it in another format")
        if status in _CRASHES:
            self._deadly.condemn(job.media, job.options, refusal, job.tenant)
            return refusal
        if status != -signal.SIGKILL:  # so the kernel ends whom it has no memory for: often not who took it
            self._deadly.suspect(job.media, job.options, refusal, job.tenant)
        return ServiceError(f"the preprocessing process that worked on the {modality} died; send the request again")

    async def _keep(self, process: PoolProcess) -> None:
        """Let others take the place of a process whenever it ends."""
        while True:
            status = await process.wait()
            self._part_with(process)
            logger.warning("pool process %d ended with status %d; starting another", process.pid, status)
            await process.release()
            process = await self._another()

    async def _keep_spare(self) -> None:
        await self._keep(await self._another())

    def _part_with(self, process: PoolProcess) -> None:
        """Let a spare take the place of a process that has ended, if there is one."""
        if process in self._spares:
            self._spares.remove(process)
            return
        self._children.remove(process)
        if self._spares:
            self._children.append(self._spares.pop(0))
            self.replaced += 1
            self._dispatch()

    async def _another(self) -> PoolProcess:
        """Start a process, however often it takes; it works if one is missing, and is a spare if none is."""
        pause_s = _MIN_RETRY_S
        while True:
            try:
                process = await self._add_process()
            except Exception as error:  # noqa: BLE001 - whatever it was, nobody else would try again
                logger.error("a pool process cannot be started, next try in %g s: %s", pause_s, error)  # noqa: TRY400
            else:
                self.replaced += process in self._children
                self._refusal = None
                self._dispatch()
                return process
            if not self._children:
                self._refuse("no preprocessing process can be started; the log of this frontend says why")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _take_prepared(self) -> PoolProcess | None:
        while self._prepared:
            if (process := self._prepared.pop()).running:
                return process
        return None

    async def _add_process(self) -> PoolProcess:
        memory = None if self._memory is None else self._memory.fileno()
        # Once there are others that work, it must not take the processors from them.
        process = self._take_prepared()
        if process is None:
            limit = self._load.max_memory_bytes
            process = await PoolProcess.spawn(limit, memory, in_background=bool(self._children))
        description = await process.load(self._load)
        self._description = self._description or description
        if description.fingerprint != self._description.fingerprint:
            await process.end(within_s=0)
            await process.release()
            raise ConfigError(
                f"processes of one pool loaded different processors from {self._load.folder}; "
                f"restart semel after changing a model folder"
            )
        (self._children if len(self._children) < self._processes else self._spares).append(process)
        return process


async def _admit_offer(child: PoolProcess, job: Job[Any], offer: Offer, limits: OfferLimits) -> None:
    """Let a process keep what it offers, and raise, if the request may not hold it."""
    try:
        job.admit(offer, limits)
    except SemelError:
        await child.ask(encode(Drop()))
        raise
