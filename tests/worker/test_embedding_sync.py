"""What a worker fetches from the fleet's store, and what it publishes there.

The host's memory and the page beside it are those of an engine; the test writes what the engine core would. The store
is one in memory, which can fail in every way; `scripts/faults` has real engines and a real Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest

from semel.aio import in_slices
from semel.core import Digest, Form, Item, Key, Placeholder, PrefetchedOutput, Prompt, Submission, Timeline
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.protocol import StoreDown
from semel.embeddings.publishing import Publishing
from semel.embeddings.sealed import Fetched, SealedStore
from semel.engine import Engine
from semel.engine.vllm.tier.host import HostTier
from semel.engine.vllm.tier.page import TierPage
from semel.engine.vllm.tier.prefetch_params import Staging
from semel.engine.vllm.tier.shared_file import create_file, descriptor_path
from semel.lab.testing.embedding_store import MemoryBlobs
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.worker import embedding_sync as module
from semel.worker.embedding_sync import EmbeddingSync

BLOCK_BYTES = 64
HOST_CACHE, STAGED = 32, 32
"""Blocks of either part of the memory."""

KEY = Key(bytes(range(32)))
FORM: Form = (8, 16, "torch.float32")
NBYTES = 8 * 16 * 4
FETCH_S = 0.3
SOON_S = 10.0
PICTURE, OTHER = Digest(b"p" * 32), Digest(b"q" * 32)


@dataclass
class Sink:
    """An engine that takes everything, and knows what it was given."""

    submissions: list[Submission] = field(default_factory=list)

    async def submit(self, submission: Submission) -> None:
        self.submissions.append(submission)

    @property
    def prefetched_outputs(self) -> tuple[PrefetchedOutput, ...]:
        """Of the last submission."""
        return self.submissions[-1].prefetched_outputs


class Host:
    """A worker's host: memory for encoder outputs, the engine core's side of it, and the keeper."""

    def __init__(
        self,
        *blobs: MemoryBlobs,
        publish_after: int = 2,
        probe: bytes = b"probe",
        ttl_s: int = 3_600,
        fetch_s: float = SOON_S,
    ) -> None:
        self.engine, self.page = Sink(), TierPage.create()
        region = create_file("test-region")
        os.ftruncate(region, BLOCK_BYTES * (HOST_CACHE + STAGED))
        staging = Staging(HOST_CACHE, STAGED, BLOCK_BYTES)
        self.tier = HostTier.open(descriptor_path(region), BLOCK_BYTES * (HOST_CACHE + STAGED), staging, self.page)
        self.tier.identity, self.tier.probe = b"identity", probe
        self.nodes = Nodes([Node(f"memory-{index}", one) for index, one in enumerate(blobs)])
        self.sync = EmbeddingSync(
            cast("Engine", self.engine),
            self.tier,
            lambda identity: SealedStore(KEY, identity, self.nodes, ttl_s),
            fetch_s=fetch_s,
            publish_after=publish_after,
            ttl_s=ttl_s,
        )
        self._transfers = 0

    def save(self, digest: Digest, content: bytes, first: int = 0) -> None:
        """What the engine core does when an output is encoded."""
        self._transfers += 1
        self.tier._memory[first * BLOCK_BYTES : first * BLOCK_BYTES + NBYTES] = content
        self.page.saved(digest, self._transfers, ((first, NBYTES // BLOCK_BYTES),), FORM)

    async def ask(self, *digests: Digest, rows: int = FORM[0], **sampling: Any) -> tuple[bytes, ...]:
        """Submit a request with these items. What came for it from the store."""
        places = [Placeholder(1 + index * rows, rows) for index in range(len(digests))]
        items = tuple(Item("image", digest) for digest in digests)
        prompt = Prompt((0,) * (2 + rows * len(digests)), Timeline.decoder(places), items)
        await self.sync.submit(Submission("r", prompt, {}, sampling))
        contents = []
        for prefetched in self.engine.prefetched_outputs:
            spans = [self.tier._memory[f * BLOCK_BYTES : (f + n) * BLOCK_BYTES] for f, n in prefetched.extents]
            contents.append(b"".join(spans)[:NBYTES])
        return tuple(contents)

    def total(self, metric: Metric, *labels: str) -> float:
        return sum(value for one, value, have in self.sync.samples() if one is metric and have[: len(labels)] == labels)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, dict(self.sync._publications)
            await asyncio.sleep(0.005)

    async def until_published(self, count: int) -> None:
        await self.until(lambda: self.total(metrics.EMBEDDING_PUBLISHED) >= count)

    async def until_up(self) -> None:
        await self.until(lambda: self.total(metrics.EMBEDDING_STORE_UP) == 1)


@asynccontextmanager
async def running(host: Host) -> AsyncIterator[Host]:
    task = asyncio.create_task(host.sync.run())
    try:
        yield host
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await host.sync.close()


def content(seed: int) -> bytes:
    return bytes((seed + index) % 256 for index in range(NBYTES))


@asynccontextmanager
async def published(blobs: MemoryBlobs, digest: Digest = PICTURE) -> AsyncIterator[None]:
    """Another worker of the fleet has published an output, and is gone."""
    async with running(Host(blobs, publish_after=1)) as first:
        await first.ask(digest)
        first.save(digest, content(1 if digest == PICTURE else 2))
        await first.until_published(1)
    yield


async def test_what_one_worker_has_shown_twice_comes_to_another_with_its_first_request() -> None:
    blobs = MemoryBlobs()
    async with running(Host(blobs)) as first:
        await first.ask(PICTURE)
        first.save(PICTURE, content(1))
        first.save(OTHER, content(2), first=8)
        await first.until_up()
        assert first.total(metrics.EMBEDDING_PUBLISHED) == 0, "it was shown once"
        await first.ask(PICTURE)
        await first.until_published(1)
        async with running(Host(blobs)) as second:
            await second.until_up()
            assert await second.ask(PICTURE, OTHER) == (content(1),)
            assert [one.form for one in second.engine.prefetched_outputs] == [FORM]
            assert second.total(metrics.EMBEDDING_FETCHES, "hit") == 1
            assert second.total(metrics.EMBEDDING_FETCHES, "miss") == 1
            second.page.use(second.engine.prefetched_outputs[0].lease)
            second.tier.submit(second.engine.prefetched_outputs)
            second.page.finish(second.engine.prefetched_outputs[0].lease)
            await second.until(lambda: second.tier.staged_blocks == 0)


async def test_what_is_in_the_host_cache_is_not_fetched() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        host.save(PICTURE, content(1))
        assert await host.ask(PICTURE) == ()
        assert host.total(metrics.EMBEDDING_FETCHES) == 0


async def test_several_sequences_of_one_request_are_encoded() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        assert await host.ask(PICTURE, n=2) == ()
        assert await host.ask(PICTURE, n=1) == (content(1),)


async def check_nothing_stays_of_a_late_fetch() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs, fetch_s=FETCH_S)) as host:
        await host.until_up()
        slow = threading_delay(blobs, "get_into", 2 * FETCH_S)
        began = time.monotonic()
        assert await host.ask(PICTURE) == ()
        assert time.monotonic() - began < SOON_S / 2
        assert host.total(metrics.EMBEDDING_FETCHES, "late") == 1
        slow()
        await host.until(lambda: host.tier.staged_blocks == 0)


def threading_delay(blobs: MemoryBlobs, name: str, seconds: float) -> Callable[[], None]:
    """Let an operation take longer than its deadline says, as a thread does that gets no processor."""
    operation = getattr(blobs, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return operation(*arguments[:-1], time.monotonic() + SOON_S)

    setattr(blobs, name, slow)
    return lambda: setattr(blobs, name, operation)


async def test_what_comes_too_late_is_encoded_and_its_memory_is_free_again() -> None:
    await check_nothing_stays_of_a_late_fetch()


async def test_a_mutant_that_keeps_the_memory_of_a_late_fetch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Fetch, "abandon", lambda *_: None)
    monkeypatch.setattr(f"{__name__}.SOON_S", 2.0)
    with pytest.raises(AssertionError):
        await check_nothing_stays_of_a_late_fetch()


async def test_a_request_that_is_given_up_while_it_waits_leaves_no_memory_behind() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        threading_delay(blobs, "get_into", FETCH_S / 2)
        asking = asyncio.create_task(host.ask(PICTURE))
        await host.until(lambda: host.tier.staged_blocks > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert not host.engine.submissions
        await host.until(lambda: host.tier.staged_blocks == 0)


async def test_a_store_that_is_gone_is_not_waited_for_after_three_requests_and_used_again_when_it_is_back() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        blobs.is_down = True
        for _ in range(3):
            assert await host.ask(PICTURE) == ()
        calls = blobs.calls.count("get_many")
        for _ in range(20):
            assert await host.ask(PICTURE) == ()
        assert blobs.calls.count("get_many") == calls, "no request asks a store that is down"
        assert host.total(metrics.EMBEDDING_FETCHES, "down") == 23
        assert host.total(metrics.EMBEDDING_STORE_UP) == 0
        blobs.is_down = False
        await host.until_up()
        assert await host.ask(PICTURE) == (content(1),)


async def is_revived() -> bool:
    """Whether one of two nodes that was down is used again without a request that asks it."""
    blobs = [MemoryBlobs(), MemoryBlobs()]
    async with running(Host(*blobs)) as host:
        await host.until_up()
        (node,) = (one for one in host.nodes if one.blobs is blobs[1])
        blobs[1].is_down = True
        for _ in range(3):
            with contextlib.suppress(StoreDown), node.attempt() as opened:
                opened.ping(time.monotonic() + SOON_S)
        assert not node.is_up
        assert host.nodes.is_up
        blobs[1].is_down = False
        with contextlib.suppress(AssertionError):
            await host.until(lambda: node.is_up)
        return node.is_up


async def test_one_node_of_several_that_was_down_is_tried_again_beside_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a worker that only looks whether any node is up leaves it to a request that waits."""
    assert await is_revived()
    monkeypatch.setattr(SealedStore, "is_whole", SealedStore.is_up)
    monkeypatch.setattr(f"{__name__}.SOON_S", 2.5)
    assert not await is_revived()


async def is_up_after_a_crowd() -> bool:
    """Whether the store is used after more requests have waited for threads than have got one in time."""
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs, fetch_s=FETCH_S)) as host:
        await host.until_up()
        get_into: Any = blobs.get_into
        free = threading.Event()

        def wait(*arguments: Any) -> Any:
            free.wait(SOON_S)
            return get_into(*arguments[:-1], time.monotonic() + SOON_S)

        setattr(blobs, "get_into", wait)  # noqa: B010
        await asyncio.gather(*(host.ask(PICTURE) for _ in range(module._FETCHES + 8)))
        assert host.total(metrics.EMBEDDING_FETCHES, "late") == module._FETCHES + 8
        free.set()
        await host.until(lambda: host.total(metrics.EMBEDDING_STORE_CALLS, "fetch") == module._FETCHES + 8)
        await host.until(lambda: host.tier.staged_blocks == 0)
        return host.total(metrics.EMBEDDING_STORE_UP) == 1


async def test_requests_that_wait_for_each_other_do_not_take_the_store_to_be_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a node that is asked though no time is left is taken to be down."""
    assert await is_up_after_a_crowd()
    monkeypatch.setattr(SealedStore, "_fetch_from", ask_whatever_the_time)
    assert not await is_up_after_a_crowd()


def ask_whatever_the_time(_: object, node: Node, group: Sequence[Any], stage: object, deadline: float) -> list[Fetched]:
    """A mutant: a call without time asks the node, too, and its failure counts."""
    with contextlib.suppress(StoreDown), node.attempt() as blobs:
        blobs.get_many([], 0, deadline)
        blobs.get_into([], [], lambda _: None, deadline)
    return [Fetched(one.digest, "late") for one in group]


async def test_a_worker_whose_encoder_makes_something_else_of_the_probe_leaves_the_store_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs, probe=b"another", publish_after=1)) as host:
        with caplog.at_level(logging.ERROR):
            await host.until(lambda: "the encoders differ" in caplog.text)
        before = dict(blobs.values)
        assert await host.ask(PICTURE) == ()
        host.save(OTHER, content(3))
        await host.ask(OTHER)
        await asyncio.sleep(5 * module._LOOK_S)
        assert blobs.values == before


async def test_new_weights_end_it_and_a_reset_gives_everything_another_name() -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        assert await host.ask(PICTURE) == (content(1),)
        host.page.reset(new_weights=False)
        await host.until(lambda: host.sync._epoch == 1)
        assert await host.ask(PICTURE) == ()
        assert host.total(metrics.EMBEDDING_FETCHES, "miss") == 1
        host.page.reset(new_weights=True)
        assert await host.ask(PICTURE) == ()
        assert host.total(metrics.EMBEDDING_STORE_UP) == 0
        assert host.total(metrics.EMBEDDING_FETCHES) == 2, "the store is not asked any more"


async def test_a_tier_that_was_found_wrong_ends_it_at_once_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()
        host.tier.refusal = "the self-test's image came back with other bytes"
        assert await host.ask(PICTURE) == ()
        assert host.total(metrics.EMBEDDING_STORE_UP) == host.total(metrics.EMBEDDING_FETCHES) == 0
    assert "does not use the embedding store: the self-test's image came back" in caplog.text


async def test_what_changes_while_it_is_published_is_not_published() -> None:
    blobs = MemoryBlobs()
    async with running(Host(blobs, publish_after=1)) as host:
        await host.until_up()
        put = blobs.put

        def evicting(*arguments: Any) -> None:
            put(*arguments)
            host.page.gone(PICTURE, 1)

        setattr(blobs, "put", evicting)  # noqa: B010
        await host.ask(PICTURE)
        host.save(PICTURE, content(1))
        await host.until(lambda: host.total(metrics.EMBEDDING_NOT_PUBLISHED, "changed") == 1)
        assert host.total(metrics.EMBEDDING_PUBLISHED) == 0


async def manifests_after_a_loss(how: str) -> int:
    """A worker has published an output, the store has lost it, and the worker has encoded it again."""
    blobs = MemoryBlobs()
    async with running(Host(blobs, publish_after=1)) as host:
        await host.until_up()
        await host.ask(PICTURE)
        host.save(PICTURE, content(1))
        await host.until_published(1)
        (manifest,) = (key for key in blobs.values if len(key) == len(b"semel:e1:") + 64)
        if how == "evicted":
            blobs.values.clear()
        else:
            blobs.set_raw({manifest: b"something else"})
        host.page.gone(PICTURE, 1)
        assert await host.ask(PICTURE) == ()
        host.save(PICTURE, content(1))
        with contextlib.suppress(AssertionError):
            await host.until_published(2)
        return sum(key == manifest for key in blobs.values)


@pytest.mark.parametrize("how", ["evicted", "overwritten"])
async def test_what_the_store_has_lost_is_published_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Control: a worker that does not hear of the loss publishes an output once in its life."""
    assert await manifests_after_a_loss(how) == 1
    monkeypatch.setattr(Publishing, "lost", lambda *_: None)
    monkeypatch.setattr(f"{__name__}.SOON_S", 1.0)
    assert await manifests_after_a_loss(how) == 0


async def published_after_an_outage(monkeypatch: pytest.MonkeyPatch, *, looks_first: bool) -> float:
    """Four outputs come to be published while the store is down; how many of them it has when it was back."""
    blobs = MemoryBlobs()
    async with running(Host(blobs, publish_after=1)) as host:
        await host.until_up()
        blobs.is_down = True
        for _ in range(3):
            await host.ask(Digest(b"x" * 32))
        assert not host.nodes.is_up
        if not looks_first:
            monkeypatch.setattr(SealedStore, "is_up", True)
        for number in range(4):
            digest = Digest(bytes([number]) * 32)
            await host.ask(digest)
            host.save(digest, content(number), first=8 * number)
        await asyncio.sleep(10 * module._LOOK_S)
        blobs.is_down = False
        with contextlib.suppress(AssertionError):
            await host.until_published(4)
        return host.total(metrics.EMBEDDING_PUBLISHED)


async def test_what_waits_while_the_store_is_down_is_published_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a worker that does not look first gives all of it up."""
    assert await published_after_an_outage(monkeypatch, looks_first=True) == 4
    monkeypatch.setattr(f"{__name__}.SOON_S", 3.0)
    assert await published_after_an_outage(monkeypatch, looks_first=False) == 0


async def drain_once(sync: EmbeddingSync, within_s: float) -> None:
    """A mutant: what fails is given up."""
    sync._review()
    sync._publishing.drain(time.monotonic())
    async with asyncio.timeout(within_s):
        while await sync._publish_next():
            pass


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(("drain", "count"), [(EmbeddingSync.drain, 4), (drain_once, 0)])
async def test_a_worker_that_drains_waits_for_a_store_that_comes_back(
    drain: Callable[[EmbeddingSync, float], Awaitable[None]], count: int, is_beside: bool
) -> None:
    blobs = MemoryBlobs()
    host = Host(blobs, publish_after=100)
    async with running(host) if is_beside else contextlib.nullcontext():
        assert await host.sync._usable_store() is not None
        for number in range(4):
            digest = Digest(bytes([number]) * 32)
            await host.ask(digest)
            host.save(digest, content(number), first=8 * number)
        blobs.is_down = True
        asyncio.get_running_loop().call_later(0.3, setattr, blobs, "is_down", False)
        await drain(host.sync, SOON_S)
        assert host.total(metrics.EMBEDDING_PUBLISHED) == count
    await host.sync.close()


@pytest.mark.parametrize("fault", ["down", "full", "refused"])
async def test_a_worker_that_drains_waits_no_longer_than_it_may_and_only_for_a_store_that_may_come_back(
    fault: str,
) -> None:
    blobs = MemoryBlobs()
    host = Host(blobs, publish_after=100)
    assert await host.sync._usable_store() is not None
    await host.ask(PICTURE)
    host.save(PICTURE, content(1))
    blobs.is_down = fault == "down"
    blobs.capacity_bytes = 0 if fault == "full" else None
    if fault == "refused":
        host.page.reset(new_weights=True)
    began = time.monotonic()
    await host.sync.drain(0.5 if fault == "down" else 60.0)
    took = time.monotonic() - began
    assert took >= 0.5 if fault == "down" else took < SOON_S
    assert host.total(metrics.EMBEDDING_PUBLISHED) == 0
    await host.sync.close()


async def turns_of_others(monkeypatch: pytest.MonkeyPatch, slice_s: float) -> int:
    """How often another task has its turn while a request with 4,096 items is looked through."""
    monkeypatch.setattr(module, "in_slices", partial(in_slices, slice_s=slice_s))
    host, turns = Host(MemoryBlobs()), 0

    async def tick() -> None:
        nonlocal turns
        while not host.engine.submissions:
            await asyncio.sleep(0)
            turns += 1

    digests = [Digest(number.to_bytes(32, "big")) for number in range(4_096)]
    ticking = asyncio.create_task(tick())
    await host.ask(*digests, rows=1)
    await ticking
    await host.sync.close()
    return turns


async def test_others_have_their_turn_while_many_items_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: in one slice they have none."""
    assert await turns_of_others(monkeypatch, slice_s=1e-6) > 100
    assert await turns_of_others(monkeypatch, slice_s=1e6) < 10


async def test_a_fetch_that_fails_in_a_way_that_nobody_expects_fails_no_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = MemoryBlobs()
    async with published(blobs), running(Host(blobs)) as host:
        await host.until_up()

        def get_into(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(blobs, "get_into", get_into)
        assert await host.ask(PICTURE) == ()
        assert "fetching encoder outputs failed" in caplog.text
        await host.until(lambda: host.tier.staged_blocks == 0)


async def test_a_worker_that_drains_waits_for_the_publication_under_way() -> None:
    blobs = MemoryBlobs()
    async with running(Host(blobs, publish_after=1)) as host:
        await host.until_up()
        threading_delay(blobs, "put", 0.2)
        await host.ask(PICTURE)
        host.save(PICTURE, content(1))
        await host.until(lambda: bool(host.sync._publishing._in_progress))
        await host.sync.drain(SOON_S)
        assert host.total(metrics.EMBEDDING_PUBLISHED) == 1
