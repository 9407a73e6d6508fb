"""A pool of processes that decode and preprocess, so that the process which serves does neither.

Its rules: a process works on one item at a time; tenants take turns, and so do the requests of one tenant, so that
nobody with many or expensive items keeps the others waiting or takes all slots of the queue; what goes wrong with a
process (it dies, hangs, breaks the protocol) costs the item that it works on and no other, and an item that does it
again is not tried again. A caller that goes away costs nothing either: the answer to its item is read and
dropped, so that frames never get out of step. `ProcessSet` starts and replaces the processes. Nothing here imports
torch, transformers or numpy.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self, TypeVar

from semel.cache import SharedCache
from semel.core import Assembly, Feature, Layout, Media, Modality, Target
from semel.errors import MediaTooLarge, MediaUndecodable, NotReady, ProtocolError, SemelError, ServiceError
from semel.fairness.queue import FairQueue, WaitingTenant
from semel.fairness.retry import RetryQueue
from semel.media import DecodeLimits, Pieces
from semel.media.decode.limits import ProcessingLimits
from semel.processing.folder import read_config
from semel.processing.pool.fork_server import ForkServer
from semel.processing.pool.job import AssemblyJob, CutJob, FeatureJob, Job, LayoutJob, OfferLimits, PagesJob, Spend
from semel.processing.pool.pipe import (
    Answer,
    Assemble,
    CountPages,
    Cut,
    Description,
    Drop,
    Failed,
    Load,
    Made,
    Offer,
    Send,
    encode,
    encode_work,
)
from semel.processing.pool.process import END_TIMEOUT_S, PoolProcess
from semel.processing.pool.processes import CRASHES, ProcessSet
from semel.processing.pool.prompts import encode_prompt
from semel.processing.pool.quarantine import Quarantine
from semel.processing.pool.staging import Staging
from semel.processing.pool.text import DetokenizeJob, TokenizeJob
from semel.processing.processor import ProcessorKind
from semel.processing.sandbox import LAYERS

__all__ = ["Pool"]

_LIMITS: Final = ProcessingLimits()

_STOPPED_S: Final = 0.05
"""A process that has used less CPU time than this until its deadline was stopped: that is no item's fault."""

_COPY_THREADS: Final = 4
"""A copy waits for nobody, so a few threads do for any number of processes."""

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Pool:
    """Processes that make features of media, each with the processor of one model folder. Made by `start`."""

    def __init__(
        self,
        processes: ProcessSet,
        max_waiting: int,
        memory: SharedCache | None = None,
        offers: OfferLimits | None = None,
    ) -> None:
        self.processes = processes
        self.decoded = 0
        """Media that a process was given to decode: for a feature, a layout or pieces."""
        self.processed = 0
        """Features made, including those whose caller had gone."""
        self.failed = 0
        """Items that ended in an error, the service's fault or not."""
        self.assembled = 0
        """Prompts that were assembled."""
        self._load = processes.load
        self._retries = RetryQueue()
        self._memory = memory
        self._offers = offers or OfferLimits()
        self._items = count()
        self._waiting: FairQueue[Job[Any]] = FairQueue(max_waiting)
        self._retried: set[Job[Any]] = set()
        """Items whose first process was lost."""

        self._deadly = Quarantine()
        self._copies = ThreadPoolExecutor(_COPY_THREADS, "semel-staging")
        self._closed = False

    @classmethod
    async def start(
        cls,
        folder: Path,
        target: Target,
        *,
        processes: int = 1,
        spares: int = 1,
        limits: DecodeLimits | None = None,
        timeout_s: float = _LIMITS.timeout_s,
        max_memory_bytes: int = _LIMITS.max_memory_bytes,
        max_waiting: int = 1_024,
        memory: SharedCache | None = None,
        offers: OfferLimits | None = None,
        processor: ProcessorKind = "auto",
        prepared: Sequence[PoolProcess] = (),
        fork_server: ForkServer | None = None,
        probes: bool = False,
        requires_sandbox: bool = False,
    ) -> Self:
        """Start the processes and wait until each has loaded its processor; the spare ones follow by themselves.

        `processes` work at once, with one thread each: as many as there are cores use all of them. `spares` more are
        loaded and wait until one of those ends: without any, its place is empty for the seconds that loading takes.
        `timeout_s` is for one item, from the moment a process takes it on; `max_memory_bytes` is for one process, on
        top of what it has once it is loaded; `max_waiting` bounds the items that no process has taken on: once
        all places are taken, a tenant within its share gets the place of one that has more than that. Features are
        copied into `memory`, while it has room; its `put` then holds them where they lie. Features over the limits of
        `offers` are refused before there is room for them.
        `requires_sandbox`: whether to refuse to start where the kernel lacks a layer of the processes' sandbox.
        `probes`: whether the processes run the probes, for a fingerprint that can be compared with a worker's.
        `prepared` are processes of the same memory that were spawned ahead, and `fork_server` is where they came from:
        it has imported its libraries by now.
        """
        read_config(folder)  # what is no model folder is reported at once, not once torch is loaded
        load = Load(
            str(folder),
            target,
            limits or DecodeLimits(),
            timeout_s,
            max_memory_bytes,
            processor,
            probes,
            requires_sandbox,
            None if offers is None else offers.max_tokens,
        )
        kept = ProcessSet(load, processes, stages=memory is not None, prepared=prepared, fork_server=fork_server)
        pool = cls(kept, max_waiting, memory, offers)
        await kept.start(spares, on_change=pool._dispatch)
        return pool

    @property
    def description(self) -> Description:
        """The processor that every process of the pool has loaded."""
        return self.processes.description

    @property
    def _offer_limits(self) -> OfferLimits:
        """An encoder's positions are none of the prompt's."""
        return replace(self._offers, max_tokens=None) if self.description.encoder_decoder else self._offers

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are ready or at work; fewer than were asked for while one is being replaced."""
        return tuple(child.pid for child in self.processes.children if child.running)

    @property
    def spare_pids(self) -> tuple[int, ...]:
        """The processes that are ready to take the place of one of those."""
        return tuple(spare.pid for spare in self.processes.spares if spare.running)

    @property
    def sandboxed(self) -> Mapping[str, int]:
        """Return how many of the processes that are ready or at work have each layer of the sandbox around them."""
        running = [child.sandbox.active for child in self.processes.children if child.running]
        return {layer: sum(layer in active for active in running) for layer in LAYERS}

    @property
    def replaced(self) -> int:
        """Processes that took the place of one that had ended."""
        return self.processes.replaced

    @property
    def refusal(self) -> str:
        """Return why no item is taken; empty if items are."""
        return "this frontend is shutting down; send the request again" if self._closed else self.processes.failure

    @property
    def busy(self) -> int:
        """Return how many processes work on an item."""
        return sum(child.running and not child.free for child in self.processes.children)

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many items wait for a process, by tenant."""
        places = self._waiting.places
        return {tenant: places[tenant] for tenant in places}

    async def process(
        self,
        media: Media,
        options: Mapping[str, object] | None = None,
        *,
        group: Hashable | None = None,
        tenant: str = "",
        apart: bool = False,
        spend: Spend | None = None,
    ) -> Feature:
        """Return the feature of one item; `options` are the request's `mm_processor_kwargs`.

        Items of one `group`, a request, are begun in the order in which they came; the groups of a `tenant` take turns,
        an item each, and so do tenants. Without a group the item is one of its own. An item that ends its process is
        refused to its tenant only. What is made `apart` takes no room in the pool's memory, so that nothing is evicted
        for it. `spend` is called with the size of a feature that has no room there, before it is stored, and raises if
        it is not allowed.
        """
        self._admit(media)
        item = next(self._items)
        options = options or {}
        order = encode_work(item, media, options)
        return await self._wait_for(FeatureJob(item, media, order, tenant, options, group, apart, spend))

    async def lay_out(
        self,
        media: Media,
        options: Mapping[str, object] | None = None,
        *,
        group: Hashable | None = None,
        tenant: str = "",
    ) -> Layout:
        """Return the layout that the item's feature would have; nothing is made, and only the decode is counted."""
        self._admit(media)
        item = next(self._items)
        options = options or {}
        order = encode_work(item, media, options, only_layout=True)
        return await self._wait_for(LayoutJob(item, media, order, tenant, options, group))

    async def count_pages(self, media: Media, *, group: Hashable | None = None, tenant: str = "") -> int:
        """Return the number of pages of a document, of which none is rendered."""
        self._admit(media)
        item = next(self._items)
        order = encode(CountPages(item), len(media.data))
        return await self._wait_for(PagesJob(item, media, order, tenant, group=group))

    async def cut(self, media: Media, spend: Spend, *, tenant: str = "") -> Pieces:
        """Return a clip in pieces that the model's encoder takes.

        Pieces are samples, far more bytes than what they were decoded from. So `spend` gets their number before they
        are taken, and raises if they may not be.
        """
        self._admit(media)
        item = next(self._items)
        order = encode(Cut(item), len(media.data))
        return await self._wait_for(CutJob(item, media, order, tenant, spend=spend))

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, tenant: str = ""
    ) -> list[list[int]]:
        """The token ids of each text, by the engine's tokenizer; texts take a turn as an item of `tenant` does."""
        self._admit_text()
        job = TokenizeJob.of(next(self._items), texts, tenant, add_special_tokens=add_special_tokens)
        return await self._wait_for(job)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, tenant: str = "") -> str:
        """Return the text of tokens, by the engine's tokenizer; `tenant` is as for `tokenize`."""
        self._admit_text()
        job = DetokenizeJob.of(next(self._items), token_ids, tenant, skip_special_tokens=skip_special_tokens)
        return await self._wait_for(job)

    async def assemble(
        self,
        token_ids: Sequence[int],
        items: Sequence[tuple[Modality, Layout]],
        *,
        group: Hashable | None = None,
        tenant: str = "",
    ) -> Assembly:
        """Return a prompt with these items, at least one, by the rules of the model's processor.

        `group` and `tenant` are as for `process`: a prompt takes a turn as an item does.
        """
        prompt = Media(items[0][0], encode_prompt(token_ids, items))
        self._admit(prompt)
        item = next(self._items)
        order = encode(Assemble(item), len(prompt.data))
        return await self._wait_for(AssemblyJob(item, prompt, order, tenant, group=group))

    def forget_warm_up(self) -> None:
        """Count from zero again, and give back memory: what was made so far, by a warm-up, is nobody's request."""
        self.decoded = self.processed = self.failed = self.assembled = 0
        for child in self.processes.children:
            if child.free and child.staging is not None:
                child.staging.forget()

    async def close(self) -> None:
        """End all processes; items that are not done fail. Closing twice does no harm."""
        self._closed = True
        self._give_up()
        await self.processes.close()
        self._copies.shutdown(wait=False)

    async def _wait_for(self, job: Job[_T]) -> _T:
        if self._waiting.is_full:
            self._make_place(job.tenant)
        self._waiting.add(job.tenant, job if job.group is None else job.group, job)
        if self._waiting.about > 1:
            self.processes.lend_spare()
        self._dispatch()
        try:
            return await job.made
        finally:
            self._waiting.discard(job.tenant, job)
            self._retried.discard(job)

    def _admit_text(self) -> None:
        if refusal := self.refusal:
            raise NotReady(refusal)

    def _admit(self, media: Media) -> None:
        if refusal := self.refusal:
            raise NotReady(refusal)
        if len(media.data) > self._load.max_memory_bytes:
            raise MediaTooLarge(
                f"the {media.modality} has {len(media.data):,} bytes; "
                f"a preprocessing process may use {self._load.max_memory_bytes:,} (--max-processing-memory-gb)"
            )

    def _make_place(self, tenant: str) -> None:
        """Let another item yield its place in a full queue, or refuse the one that has come."""
        if (job := self._waiting.yielding(tenant)) is None:
            raise self._is_full(tenant)
        job.fail(self._is_full(job.tenant))
        self._waiting.discard(job.tenant, job)

    def _is_full(self, tenant: str) -> NotReady:
        return NotReady(
            f"{len(self._waiting):,} items wait for preprocessing already; try again later",
            retry_after_s=self._retries.after_s(tenant),
        )

    def _give_up(self) -> None:
        """Fail the items that wait."""
        for job in self._waiting:
            job.fail(NotReady(self.refusal))
        self._waiting.clear()

    def _dispatch(self) -> None:
        """Give items that wait to processes that do not work. If there is none and none can start, give them up."""
        if self.refusal:
            self._give_up()
        for child in self.processes.children:
            if not self._waiting:
                return
            if not child.free:
                continue
            if child.quiet:
                if (tenant := self._waiting.next_for(len(self.processes.children))) is None:
                    return
                job = self._waiting.take(tenant)
                tenant.running += 1
                self._retries.free()
                child.work = asyncio.create_task(self._work(child, job, tenant), context=job.context)
            else:  # it died while it had nothing to do: that is no item's fault
                child.work = asyncio.create_task(child.end(within_s=END_TIMEOUT_S))
            child.work.add_done_callback(lambda _: self._dispatch())

    async def _work(self, child: PoolProcess, job: Job[_T], tenant: WaitingTenant[Job[Any]]) -> None:
        began, cpu_s = perf_counter(), child.cpu_s
        goes_on = is_lost = False
        try:
            made = await self._make(child, job)
        except _ProcessLost as lost:
            is_lost = True
            # The pipe of a dead process keeps its error, and that would keep the item's feature until it is collected.
            traceback.clear_frames(lost.__traceback__)
            if not (goes_on := self._try_again(job)):
                self.failed += isinstance(job, FeatureJob)
                job.fail(lost.error)
        except SemelError as error:
            self.failed += isinstance(job, FeatureJob)
            job.fail(error)
        else:
            self.processed += isinstance(made, Feature)
            self.assembled += isinstance(made, Assembly)
            await self._deadly.clear(job.media, job.options, job.tenant)
            job.succeed(made)
        finally:
            if not goes_on:
                job.fail(ServiceError("preprocessing failed; the log of this frontend says why"))
            job.trace(began)
            # What a process that has ended had used is not known.
            used_s = child.cpu_s - cpu_s if child.running else perf_counter() - began
            tenant.running -= 1
            tenant.used += max(0.0, used_s)
            if not (child.running or is_lost):
                tenant.lost += 1
                child.on_replaced = partial(self._restore, tenant)

    def _restore(self, tenant: WaitingTenant[Job[Any]]) -> None:
        """Let a tenant have the turns again that it had not while a process was missing that its item had ended."""
        tenant.lost -= 1
        self._dispatch()

    def _try_again(self, job: Job[Any]) -> bool:
        """Let an item wait once more, for another process; whether it does."""
        if job in self._retried or job.made.done() or self._waiting.is_full:
            return False
        self._retried.add(job)
        self._waiting.add(job.tenant, job if job.group is None else job.group, job)
        return True

    async def _make(self, child: PoolProcess, job: Job[_T]) -> _T:
        """Return what a process makes of an item; a process that does not do its part is ended."""
        if (refusal := await self._deadly.refusal(job.media, job.options, job.tenant)) is not None:
            raise refusal
        self.decoded += job.decodes
        cpu_s = child.cpu_s
        is_offered = False
        try:
            async with asyncio.timeout(self._load.timeout_s):
                await self._prepare_staging(child, job)
                answer, payload = await child.ask(job.order, job.media.data, max_payload_bytes=job.max_answer_bytes)
                if (offer := job.offer_of(answer)) is not None:
                    is_offered = True
                    answer, payload = await self._accept(child, job, offer, answer)
            if isinstance(answer, Failed) and answer.last:  # until it has ended, it must not get the next item
                await child.end(within_s=END_TIMEOUT_S)
            return job.read(answer, payload)
        except TimeoutError:
            is_stopped = child.cpu_s - cpu_s < _STOPPED_S
            await child.end(within_s=0)
            if is_stopped:
                error = NotReady(f"the process that worked on {job.subject} stood still; send the request again")
                raise (error if is_offered else _ProcessLost(error)) from None
            raise await self._late(job) from None
        except (EOFError, OSError):
            was_stuck = await child.end(within_s=END_TIMEOUT_S)
            status = await child.wait()
            died = await self._died(job, status)
            raise (_ProcessLost(died) if status == -signal.SIGKILL and not was_stuck else died) from None
        except ProtocolError as error:
            logger.exception("pool process %d broke the protocol and is ended", child.pid)
            await child.end(within_s=0)
            raise ServiceError("preprocessing failed; the log of this frontend says why") from error
        finally:
            if job.decodes and child.running and child.staging is not None:
                await child.staging.trim(self._copies)

    async def _prepare_staging(self, child: PoolProcess, job: Job[Any]) -> None:
        if child.staging is not None:
            await child.staging.forget_others(job.tenant, self._copies)
            if job.decodes:
                child.staging.expect(job.tenant)

    async def _accept(
        self, child: PoolProcess, job: Job[Any], offer: Offer, answer: Answer
    ) -> tuple[Answer, memoryview]:
        """Take what a process offers, if it is admitted: the answer, and its payload."""
        staging = child.staging if job.is_staged else None
        if staging is None or not 0 < offer.nbytes <= staging.size:
            return await self._accept_sent(child, job, offer, answer)
        if isinstance(answer, Offer):
            await _unless_refused(child, partial(job.admit, offer, self._offer_limits))
            answer, _ = await child.ask(encode(Send()), max_message_bytes=offer.max_message_bytes)
            offer.check_answer(answer)
        else:
            job.admit(offer, self._offer_limits)
        if not isinstance(answer, Made) or not answer.is_written:
            raise job.unexpected(answer)
        return answer, await self._copy_staged(staging, job, answer.tensor_bytes)

    async def _accept_sent(
        self, child: PoolProcess, job: Job[Any], offer: Offer, answer: Answer
    ) -> tuple[Answer, memoryview]:
        """Take what comes through the pipe, which is paid for before it is sent."""
        if not isinstance(answer, Offer):
            raise job.unexpected(answer)
        await _unless_refused(child, partial(job.admit, offer, self._offer_limits))
        await _unless_refused(child, partial(job.pay, offer.nbytes))
        answer, payload = await child.ask(
            encode(Send()), max_payload_bytes=offer.nbytes, max_message_bytes=offer.max_message_bytes
        )
        offer.check_answer(answer)
        if isinstance(answer, Made) and answer.is_written:
            raise job.unexpected(answer)
        return answer, payload

    async def _copy_staged(self, staging: Staging, job: Job[Any], nbytes: int) -> memoryview:
        """Copy what a process has staged into the segment, which only this process writes, or next to it."""
        room = None if self._memory is None or job.apart else self._memory.reserve(nbytes, tenant=job.tenant)
        if self._memory is None or room is None:
            job.pay(nbytes)
            view = memoryview(bytearray(nbytes))
            await staging.copy_to(view, self._copies)
        else:
            view = room.view()[:nbytes]  # holds on to the range
            await staging.copy_to(view, self._copies, partial(self._memory.segment.populate, room.offset + nbytes))
        return view

    async def _late(self, job: Job[Any]) -> MediaTooLarge:
        # The client's fault and not ours: clients send again what failed with 5xx, and it would hang again.
        error = MediaTooLarge(
            f"preprocessing {job.subject} takes longer than the limit of {self._load.timeout_s:g} s "
            f"(--max-processing-s); send a smaller one"
        )
        await self._deadly.suspect(job.media, job.options, error, job.tenant)
        return error

    async def _died(self, job: Job[Any], status: int) -> MediaUndecodable | ServiceError:
        logger.warning("a pool process died with status %d over %r", status, job.media)
        refusal = MediaUndecodable(f"{job.subject} crashes the process that decodes it; send it in another format")
        if status in CRASHES:
            await self._deadly.quarantine(job.media, job.options, refusal, job.tenant)
            return refusal
        if status != -signal.SIGKILL:  # so the kernel ends whom it has no memory for: often not who took it
            await self._deadly.suspect(job.media, job.options, refusal, job.tenant)
        return ServiceError(f"the preprocessing process that worked on {job.subject} died; send the request again")


class _ProcessLost(Exception):
    """A process that was killed, or stopped before it offered anything: another one may do its work."""

    def __init__(self, error: SemelError) -> None:
        self.error = error


async def _unless_refused(child: PoolProcess, check: Callable[[], None]) -> None:
    """Let a process drop what it offers, and raise, if a check refuses it."""
    try:
        check()
    except SemelError:
        await child.ask(encode(Drop()))
        raise
