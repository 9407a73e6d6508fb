"""A pool of processes that decode and preprocess, so that the process which serves does neither.

Its rules: a process works on one item at a time; items wait in the order in which they came; what goes wrong with a
process (it dies, hangs, breaks the protocol) costs the item that it works on and no other, and it is replaced while the
rest goes on. A caller that goes away costs nothing either: the answer to its item is read and dropped, so that frames
never get out of step. Nothing here imports torch, transformers or numpy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Self

from semel.cache import Reservation, SharedCache
from semel.core import Feature, Media, Target
from semel.errors import ConfigError, InvalidRequest, MediaTooLarge, NotReady, ProtocolError, SemelError, ServiceError
from semel.media import DecodeLimits
from semel.processing.folder import read_config
from semel.processing.pipe import (
    Answer,
    Description,
    Failed,
    Load,
    Made,
    Offer,
    Send,
    Work,
    Write,
    encode,
    error_of,
    feature_of,
)
from semel.processing.process import PoolProcess

__all__ = ["Pool"]

_END_TIMEOUT_S: Final = 5.0
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """An item on its way; what comes of it is dropped if its caller has gone."""

    item: int
    media: Media
    order: bytes
    made: asyncio.Future[Feature]

    def read(self, answer: Answer, payload: memoryview, room: Reservation | None) -> Feature:
        """The feature that a process answered with, or the error; `room` is where it was told to write."""
        if isinstance(answer, Failed):
            raise error_of(answer)
        if not isinstance(answer, Made) or answer.item != self.item or answer.is_written != (room is not None):
            raise ProtocolError(f"a pool process answered item {self.item} with {type(answer).__name__}")
        return feature_of(answer, payload if room is None else room.view()[: answer.tensor_bytes])

    def succeed(self, feature: Feature) -> None:
        if not self.made.done():
            self.made.set_result(feature)

    def fail(self, error: SemelError) -> None:
        if not self.made.done():
            self.made.set_exception(error)
            self.made.exception()  # seen: no complaint if the caller is cancelled before it wakes up


class Pool:
    """Processes that make features of media, each with the processor of one model folder. Made by `start`."""

    def __init__(self, load: Load, max_waiting: int, memory: SharedCache | None = None) -> None:
        self.processed = 0
        """Features made, including those whose caller had gone."""
        self.failed = 0
        """Items that ended in an error, whoever was at fault."""
        self.replaced = 0
        """Processes that took the place of one that had ended."""
        self._load = load
        self._max_waiting = max_waiting
        self._memory = memory
        self._items = count()
        self._waiting: OrderedDict[int, _Job] = OrderedDict()
        self._children: list[PoolProcess] = []
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
        limits: DecodeLimits | None = None,
        timeout_s: float = 30.0,
        max_memory_bytes: int = 4 << 30,
        max_waiting: int = 1_024,
        memory: SharedCache | None = None,
    ) -> Self:
        """Start the processes and wait until each has loaded its processor.

        `timeout_s` is for one item, from the moment a process takes it on; `max_memory_bytes` is for one process, on
        top of what it has once it is loaded; `max_waiting` bounds the items that no process has taken on. Into
        `memory` processes write their features, while it has room; its `put` then holds them where they lie.
        """
        read_config(folder)  # what is no model folder is told at once, not once torch is loaded
        load = Load(str(folder), target, limits or DecodeLimits(), timeout_s, max_memory_bytes)
        pool = cls(load, max_waiting, memory)
        try:
            async with asyncio.TaskGroup() as starts:
                for _ in range(processes):
                    starts.create_task(pool._add_child())
        except ExceptionGroup as group:
            await pool.close()
            raise group.exceptions[0] from None
        except BaseException:
            await pool.close()
            raise
        pool._keepers = [asyncio.create_task(pool._keep(child)) for child in pool._children]
        return pool

    @property
    def description(self) -> Description:
        """The processor that every process of the pool has loaded."""
        assert self._description is not None, "a pool that has started has a description"
        return self._description

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are ready or at work; fewer than were asked for while one is being replaced."""
        return tuple(child.pid for child in self._children if child.running)

    async def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        """The feature of one item; `options` are the request's `mm_processor_kwargs`."""
        self._admit(media)
        item = next(self._items)
        job = _Job(item, media, _encode_work(item, media, options or {}), asyncio.get_running_loop().create_future())
        self._waiting[item] = job
        self._dispatch()
        try:
            return await job.made
        finally:
            self._waiting.pop(item, None)

    async def close(self) -> None:
        """End all processes; items that are not done fail. Closing twice does no harm."""
        self._refuse("this frontend is shutting down; send the request again")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.end(within_s=_END_TIMEOUT_S) for child in self._children))
        await asyncio.gather(*(child.release() for child in self._children))
        self._children.clear()

    def _admit(self, media: Media) -> None:
        if self._refusal is not None:
            raise NotReady(self._refusal)
        if len(self._waiting) >= self._max_waiting:
            raise NotReady(f"{len(self._waiting):,} items wait for preprocessing already; try again later")
        if len(media.data) > self._load.max_memory_bytes:
            raise MediaTooLarge(
                f"the {media.modality} has {len(media.data):,} bytes; "
                f"a preprocessing process may use {self._load.max_memory_bytes:,}"
            )

    def _refuse(self, reason: str) -> None:
        """Take no more items, and give up those that wait."""
        self._refusal = reason
        for job in self._waiting.values():
            job.fail(NotReady(reason))
        self._waiting.clear()

    def _dispatch(self) -> None:
        """Give items that wait to processes that do not work."""
        for child in self._children:
            if not self._waiting:
                return
            if child.free:
                _, job = self._waiting.popitem(last=False)
                child.work = asyncio.create_task(self._work(child, job))
                child.work.add_done_callback(lambda _: self._dispatch())

    async def _work(self, child: PoolProcess, job: _Job) -> None:
        if not child.quiet:  # it died while it had nothing to do: that is no item's fault
            self._waiting[job.item] = job
            self._waiting.move_to_end(job.item, last=False)
            await child.end(within_s=_END_TIMEOUT_S)
            return
        try:
            feature = await self._feature(child, job)
        except SemelError as error:
            self.failed += 1
            job.fail(error)
        else:
            self.processed += 1
            job.succeed(feature)
        finally:
            job.fail(ServiceError("preprocessing failed; the log of this frontend says why"))

    async def _feature(self, child: PoolProcess, job: _Job) -> Feature:
        """What a process makes of an item; a process that does not do its part is ended."""
        room: Reservation | None = None  # given back, if at all, only when the process has answered or has ended
        try:
            async with asyncio.timeout(self._load.timeout_s):
                answer, payload = await child.ask(job.order, job.media.data)
                if isinstance(answer, Offer):
                    room = None if self._memory is None else self._memory.reserve(answer.nbytes)
                    order = Send() if room is None else Write(room.offset)
                    answer, payload = await child.ask(encode(order))
            return job.read(answer, payload, room)
        except TimeoutError:
            await child.end(within_s=0)
            # The client's fault and not ours: clients send again what failed with 5xx, and it would hang again.
            raise MediaTooLarge(
                f"preprocessing the {job.media.modality} takes longer than the limit of {self._load.timeout_s:g} s; "
                f"send a smaller one"
            ) from None
        except (EOFError, OSError):
            await child.end(within_s=_END_TIMEOUT_S)
            raise ServiceError(
                f"the preprocessing process that worked on the {job.media.modality} died; send the request again"
            ) from None
        except ProtocolError as error:
            logger.exception("pool process %d broke the protocol and is ended", child.pid)
            await child.end(within_s=0)
            raise ServiceError("preprocessing failed; the log of this frontend says why") from error

    async def _keep(self, child: PoolProcess) -> None:
        """Replace a process whenever it ends."""
        while True:
            status = await child.wait()
            await child.release()
            self._children.remove(child)
            logger.warning("pool process %d ended with status %d; starting another", child.pid, status)
            child = await self._replacement()
            self.replaced += 1
            self._refusal = None
            self._dispatch()

    async def _replacement(self) -> PoolProcess:
        pause_s = _MIN_RETRY_S
        while True:
            try:
                return await self._add_child()
            except SemelError as error:
                logger.error("a pool process cannot be replaced, next try in %g s: %s", pause_s, error)  # noqa: TRY400
            if not self._children:
                self._refuse("no preprocessing process can be started; the log of this frontend says why")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _add_child(self) -> PoolProcess:
        memory = None if self._memory is None else self._memory.fileno()
        child, description = await PoolProcess.start(self._load, memory)
        self._children.append(child)
        self._description = self._description or description
        if description.fingerprint != self._description.fingerprint:
            self._children.remove(child)
            await child.end(within_s=0)
            await child.release()
            raise ConfigError(
                f"processes of one pool loaded different processors from {self._load.folder}; "
                f"restart semel after changing a model folder"
            )
        return child


def _encode_work(item: int, media: Media, options: Mapping[str, object]) -> bytes:
    try:
        return encode(Work(item, media.modality, media.mime, options), len(media.data))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidRequest("mm_processor_kwargs need JSON values, nested moderately, of 64 bits at most") from None
