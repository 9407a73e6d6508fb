"""Encoder outputs between an engine's host memory and the fleet's store.

What a request needs and this host lacks is fetched before the request is submitted, for a bounded time: what has not
come by then is encoded. What this engine has encoded is published in the background, once it was shown often enough,
and when the worker drains. So nothing inside the engine waits for a network, and no request fails for want of the
store.

The store is used only while this engine's encoder is the fleet's: their probes are compared first, and new weights end
it for good. After a reset that keeps the weights everything has another name, so nothing from before is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from semel.aio import in_slices
from semel.core import Digest, Form, Prompt, Submission, form_bytes
from semel.embeddings.protocol import StoreError
from semel.embeddings.publishing import Publishing
from semel.embeddings.sealed import Fetched, SealedStore
from semel.engine import Engine, Stream
from semel.engine.protocol import StagedOutput, Tier
from semel.engine.tier_events import Gone, Overrun, Reset, Saved
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["EmbeddingSync"]

_FETCHES: Final = 4
"""Calls of the store at a time for requests. One more publishes."""

_MAX_ITEMS: Final = 64
"""Encoder outputs that are fetched for one request; it encodes the rest."""

_LOOK_S: Final = 0.02
"""Seconds between two looks for something to publish."""

_AGAIN_S: Final = 1.0
"""Seconds before a store that failed is tried again, at least."""

_BELIEVED_SHARE: Final = 0.5
"""Of the time after which the store forgets an output: for so long it is taken to be there."""

_LOST: Final = frozenset({"miss", "sealed_wrong", "shape_wrong"})
"""Outcomes of a fetch that say that the store does not have an output, or does not have it any more."""

_PROBE_S: Final = 5.0
_PUBLISH_S: Final = 10.0

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class EmbeddingSync:
    """The sync of one engine with the fleet's store. Its methods are called on the worker's event loop."""

    def __init__(
        self,
        engine: Engine,
        tier: Tier,
        store: Callable[[bytes], SealedStore],
        *,
        fetch_s: float,
        publish_after: int,
        ttl_s: float,
    ) -> None:
        """`store` makes the store of an encoder with this identity, which keeps an output for `ttl_s`."""
        self._engine = engine
        self._tier = tier
        self._store_of = store
        self._fetch_s = fetch_s
        self._publishing = Publishing(publish_after, believed_s=_BELIEVED_SHARE * ttl_s)
        self._fetching = ThreadPoolExecutor(_FETCHES, "embedding-fetch")
        self._writing = ThreadPoolExecutor(1, "embedding-publish")
        self._store: SealedStore | None = None
        """The store, while it is used."""
        self._epoch = -1
        """That of the store's names."""
        self._refusal = ""
        """Why the store is not used, and will not be."""
        self._has_warned = False
        self._again_at = 0.0
        """The earliest time at which a store that failed is asked again."""
        self._turn = asyncio.Lock()
        """One publication at a time: that of a worker which drains waits for the one under way."""
        self._is_draining = False
        self._postponed: list[Digest] = []
        """Outputs that could not be published while the worker drains, for another try."""
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._publications: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def submit(self, submission: Submission) -> Stream:
        """Submit to the engine, with what the store has of the request's encoder outputs."""
        staged = await self._fetch(submission)
        prefetched_outputs = tuple(one.prefetched for one in staged)
        return await self._engine.submit(
            replace(submission, prefetched_outputs=prefetched_outputs) if prefetched_outputs else submission
        )

    async def run(self) -> None:
        """Publish, for ever."""
        while True:
            try:
                await self._revive()
                if not await self._publish_next():
                    await asyncio.sleep(_LOOK_S)
            except Exception:  # an edge: what is published is nobody's request
                logger.exception("publishing encoder outputs failed")
                await asyncio.sleep(_AGAIN_S)

    async def drain(self, within_s: float) -> None:
        """Publish the whole host cache before the worker ends, and its memory with it; a failing store has so long."""
        self._review()
        self._publishing.drain(time.monotonic())
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while await self._publish_all():
                    await asyncio.sleep(_LOOK_S)
                    await self._revive()

    async def close(self) -> None:
        """Wait for calls of the store that are under way. The owner of its nodes closes them first."""
        for threads in (self._fetching, self._writing):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    def samples(self) -> Iterator[Sample]:
        """Yield samples of its metrics."""
        yield metrics.EMBEDDING_STORE_UP, float(self._store is not None and self._store.is_up), ()
        for outcome, count in self._outcomes.items():
            yield metrics.EMBEDDING_FETCHES, count, (outcome,)
        yield metrics.EMBEDDING_PUBLISHED, self._publications["published"], ()
        for outcome, count in self._publications.items():
            if outcome != "published":
                yield metrics.EMBEDDING_NOT_PUBLISHED, count, (outcome,)
        for operation, count in self._calls.items():
            yield metrics.EMBEDDING_STORE_CALLS, count, (operation,)
            yield metrics.EMBEDDING_STORE_SECONDS, self._seconds[operation], (operation,)

    async def _fetch(self, submission: Submission) -> list[StagedOutput]:
        """Memory with what the store has of the request's items, which this host lacks."""
        self._review()
        wanted = await in_slices(self._lacking(submission.prompt))
        store = self._store
        if store is None or not wanted or submission.sampling.get("n") not in (None, 1) or submission.pools:
            return []
        if not store.is_up:  # it is tried again in the background, not by one that waits for its answer
            self._outcomes["down"] += len(wanted)
            return []
        fetch = _Fetch(self._tier, self._epoch)
        call = partial(store.fetch, wanted, fetch.stage, time.monotonic() + self._fetch_s)
        timed = partial(self._timed, "fetch", call)
        running = asyncio.get_running_loop().run_in_executor(self._fetching, timed)
        try:
            done, _ = await asyncio.wait({running}, timeout=self._fetch_s)
        except BaseException:
            running.add_done_callback(fetch.abandon)
            raise
        if not done:
            self._outcomes["late"] += len(wanted)
            running.add_done_callback(fetch.abandon)
            return []
        if (error := running.exception()) is not None:  # no fault of a store: nobody's request fails for it
            logger.error("fetching encoder outputs failed", exc_info=error)
            fetch.abandon(running)
            return []
        found = running.result()
        self._outcomes.update(one.outcome for one in found)
        for one in found:
            if one.outcome in _LOST:
                self._publishing.lost(one.digest, time.monotonic())
        return fetch.hits(found)

    def _lacking(self, prompt: Prompt) -> Generator[None, None, dict[Digest, int]]:
        """Find the first items of a prompt that this host lacks, with their embeddings. Counts all of them."""
        seen: set[Digest] = set()
        wanted: dict[Digest, int] = {}
        for item, place in zip(prompt.items, prompt.timeline, strict=True):
            if item.digest not in seen:
                seen.add(item.digest)
                self._publishing.show(item.digest, time.monotonic())
                if len(wanted) < _MAX_ITEMS and not self._tier.holds(item.digest):
                    wanted[item.digest] = place.num_embeds
            yield
        return wanted

    async def _revive(self) -> None:
        """Ask nodes that are down whether they answer again, in the time that a request would wait for each."""
        if self._store is not None and not self._store.is_whole and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + _AGAIN_S
            await self._call(self._writing, "ping", partial(self._store.revive, self._fetch_s))

    async def _publish_all(self) -> bool:
        """Publish what there is to publish, each once. Returns whether it is worth while to try again."""
        while await self._publish_next():
            pass
        postponed, self._postponed = self._postponed, []
        for digest in postponed:
            self._publishing.lost(digest, time.monotonic())
        return self._publishing.has_ready and not self._refusal

    async def _publish_next(self) -> bool:
        """Publish an output, if there is one to publish."""
        async with self._turn:
            self._review()
            store = await self._usable_store()
            if store is None or not store.is_up:  # what waits goes on waiting
                return False
            if (digest := self._publishing.take(time.monotonic())) is None:
                return False
            outcome = "changed"
            try:
                outcome = await self._publish(store, digest)
            finally:
                self._publishing.done(digest, outcome in ("published", "already_there"), time.monotonic())
                self._publications[outcome] += 1
            if self._is_draining and outcome in ("down", "late"):
                self._postponed.append(digest)
            return True

    async def _publish(self, store: SealedStore, digest: Digest) -> str:
        cached_output = self._tier.cached_output(digest)
        if cached_output is None:
            return "changed"
        deadline = time.monotonic() + _PUBLISH_S
        call = partial(
            store.publish, digest, cached_output.form, cached_output.buffers, cached_output.is_intact, deadline
        )
        return await self._call(self._writing, "publish", call)

    async def _usable_store(self) -> SealedStore | None:
        """Return the store, if this encoder's probe is the fleet's. Asks it for that when there is none yet."""
        if self._store is not None or self._refusal or time.monotonic() < self._again_at:
            return self._store
        identity, probe = self._tier.identity, self._tier.probe
        if identity is None or probe is None:
            what = "is not identified" if identity is None else "has made nothing of the probe"
            self._refuse(f"the engine's encoder {what}; a line before this one says why")
            return None
        epoch = self._tier.epoch
        store = self._store_of(identity + epoch.to_bytes(8, "little"))
        try:
            call = partial(store.compare_probe, probe, time.monotonic() + _PROBE_S)
            fleets = await self._call(self._writing, "probe", call)
        except StoreError as error:
            self._again_at = time.monotonic() + _AGAIN_S
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the embedding store is not used yet, and is tried again: %s", error)
            return None
        if fleets != probe:
            self._refuse(f"its probe is {probe.hex()[:16]}, the fleet's is {fleets.hex()[:16]}: the encoders differ")
            return None
        if epoch == self._tier.epoch:
            self._store, self._epoch = store, epoch
            logger.info("the embedding store is used")
        return self._store

    def _review(self) -> None:
        """Read the events of the host tier since the last look."""
        for event in self._tier.review():
            match event:
                case Saved(digest=digest, form=form):
                    self._publishing.saved(digest, form_bytes(form), time.monotonic())
                case Gone(digest=digest):
                    self._publishing.gone(digest)
                case Reset() | Overrun():
                    self._publishing.forget_all()
        if refusal := "the engine has new weights" if self._tier.has_new_weights else self._tier.refusal:
            self._refuse(refusal)
        elif self._store is not None and self._epoch != self._tier.epoch:
            self._store = None  # until the next publication asks for one under new names

    def _refuse(self, reason: str) -> None:
        self._store = None
        if not self._refusal:
            self._refusal = reason
            logger.error("this worker does not use the embedding store: %s", reason)

    async def _call(self, threads: ThreadPoolExecutor, operation: str, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(self._timed, operation, call))

    def _timed(self, operation: str, call: Callable[[], _Result]) -> _Result:
        began = time.perf_counter()
        try:
            return call()
        finally:
            with self._lock:
                self._calls[operation] += 1
                self._seconds[operation] += time.perf_counter() - began


class _Fetch:
    """The memory that one fetch reserves, from a thread."""

    def __init__(self, tier: Tier, epoch: int) -> None:
        self._tier = tier
        self._epoch = epoch
        self._staged: dict[Digest, StagedOutput] = {}

    def stage(self, digest: Digest, form: Form) -> list[memoryview] | None:
        """Reserve memory for an output."""
        staged = self._tier.stage(digest, form)
        if staged is None:
            return None
        self._staged[digest] = staged
        return list(staged.buffers) if staged.epoch == self._epoch else None

    def hits(self, found: Sequence[Fetched]) -> list[StagedOutput]:
        """Return what has come, whole and verified. The rest of the memory is let go."""
        whole = {one.digest for one in found if one.outcome == "hit"}
        for digest in self._staged.keys() - whole:
            self._tier.release(self._staged[digest])
        return [staged for digest, staged in self._staged.items() if digest in whole]

    def abandon(self, _: asyncio.Future[list[Fetched]]) -> None:
        """Free everything: nobody waits for it any more, and no thread writes."""
        for staged in self._staged.values():
            self._tier.release(staged)
