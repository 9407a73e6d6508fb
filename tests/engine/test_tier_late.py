"""The embedding tier over vLLM's own copies, with a device whose copies end late and in any order (`late_device`).

A GPU is what is missing. The same engine core over a device whose copies are over at once is the suite without it: that
one does not find what is planted here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from semel.core import Digest, Item, Key, Placeholder, Prompt, Submission, Timeline
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.sealed import SealedStore
from semel.encoder.transfers import Saved
from semel.engine import Engine
from semel.engine.vllm.tier.copies import DeviceCopies
from semel.engine.vllm.tier.page import TierPage
from semel.worker.embedding_sync import EmbeddingSync
from tests.embeddings.redis import running_redis
from tests.engine.late_device import LateWorker, as_rank
from tests.engine.tiered import BLOCK_BYTES, NBYTES, ROWS, Make, Tiered, create, identifier, random_requests

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


class PublishedEarly(DeviceCopies):
    """A mutant: an output is there when its copy has begun."""

    def report(self, step: Any) -> Any:
        self._done.saved += [
            Saved(one, self._saving[one][0]) for one in self._saving if self._steps[one] == step.number
        ]
        return super().report(step)


class ReusedEarly(DeviceCopies):
    """A mutant: a buffer was read when its copy has begun."""

    def load(self, step: Any, encoder_cache: Any) -> None:
        super().load(step, encoder_cache)
        self._done.loaded += [load.transfer for load in step.loads.values()]


class LostCompletion(DeviceCopies):
    """A mutant: looks for copies that have ended in steps that begin some, as is enough on a CPU."""

    def report(self, step: Any) -> Any:
        found = super().report(step)
        return found if step.number else None


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Iterator[Make]:
    opened: list[Any] = []

    def made(kind: type[DeviceCopies] = DeviceCopies, *, is_late: bool = True, **options: Any) -> Tiered:
        def device(vllm_config: Any, rank: int) -> DeviceCopies:
            vllm_config.parallel_config.rank = rank
            with as_rank(rank):
                worker = LateWorker(vllm_config, is_late=is_late, seed=rank)
            copies = kind.over(worker, vllm_config, BLOCK_BYTES)
            opened.append(copies)
            return copies

        return create(tiny)(fleet=True, device=device, **options)

    yield made
    for one in opened:
        one.close()


def storm(tiered: Tiered, *, loses: float = 0.0) -> list[str]:
    """Random requests, some of them aborted, to their ends; what was wrong, and what is left in somebody's hands."""
    from vllm.v1.request import RequestStatus

    rng = random.Random(1)
    tiered.loses = lambda: rng.random() < loses

    wrong: list[str] = []

    def interfere() -> None:
        wrong.extend(tiered.published())
        if tiered.scheduler.requests and rng.random() < 0.15:
            name = rng.choice(list(tiered.scheduler.requests))
            tiered.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    try:
        wrong += tiered.run(random_requests(0), interfere)
        tiered.loses = lambda: False
        wrong += tiered.run([([99], 0), ([98], 0)]) + tiered.settle()  # whose reports end whatever is still open
    except RuntimeError as error:
        return [*wrong, str(error)]
    assert tiered.host is not None
    tiered.host.review()
    host_cache = tiered.scheduler.ec_connector.books.host_cache
    left = {"staged": tiered.host.staged_blocks, "reserved": host_cache.reserved, "pinned": host_cache.pinned}
    return wrong + [f"{name}: {blocks} blocks" for name, blocks in left.items() if blocks]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("loses", [0.0, 0.1])
def test_copies_that_end_late_and_in_any_order_are_waited_for(
    make: Make, ranks: int, is_async: bool, loses: float
) -> None:
    tiered = make(ranks=ranks, is_async=is_async)
    assert storm(tiered, loses=loses) == []
    totals = tiered.totals
    assert min(totals.tier_loads, totals.tier_saves, totals.tier_prefetched, totals.tier_evictions) > 0
    assert tiered.scheduler.ec_connector.books.transfers.counts.lost == 0 or loses


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("mutant", "found"),
    [(PublishedEarly, "published: "), (ReusedEarly, "had yet to read"), (LostCompletion, "reserved: ")],
)
def test_what_does_not_wait_is_found_with_late_copies_and_not_without(
    make: Make, mutant: type[DeviceCopies], found: str, is_async: bool
) -> None:
    assert storm(make(mutant, is_late=False, ranks=2, is_async=is_async)) == [], "the control: nothing is late"
    assert found in " ".join(storm(make(mutant, ranks=2, is_async=is_async)))


@dataclass
class Stepped:
    """In the place of an engine: its scheduler and its copies, stepped to the end of each request."""

    tiered: Tiered

    async def submit(self, submission: Submission) -> None:
        items = [int(item.digest.hex(), 16) for item in submission.prompt.items]
        self.tiered.add(submission.request_id, items, submission.prefetched_outputs, max_new_tokens=1)
        while self.tiered.scheduler.requests:
            assert self.tiered.step() == []
        assert self.tiered.settle() == []


async def test_what_was_published_is_not_encoded_after_a_restart_wherever_the_engine_copies(
    make: Make, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Over a real Redis. The third one copies as on a CPU: it reads the same names, under the same seals."""
    key, count = Key(bytes(range(32))), 4
    encodes, keys = [], []
    with running_redis(tmp_path, is_unix=True) as redis:
        for tiered in (make(), make(), create(tiny)(fleet=True)):
            assert tiered.host is not None
            tiered.add("warm", [99], max_new_tokens=1)  # what an engine makes is known by its first output
            assert tiered.step() + tiered.settle() == []
            tiered.scheduler.reset_encoder_cache()
            tiered.host.begin()
            tiered.host.identity, tiered.host.probe = b"identity", b"probe"
            nodes = Nodes([Node("redis", redis.store())])
            stores = partial(SealedStore, key, nodes=nodes, ttl_s=3_600)
            engine = cast("Engine", Stepped(tiered))
            sync = EmbeddingSync(engine, tiered.host, stores, fetch_s=30, publish_after=1, ttl_s=3_600)
            await sync.drain(30)  # which finds the store
            for number in range(count):
                items = (Item("image", Digest(bytes.fromhex(identifier(number)))),)
                prompt = Prompt((0,) * (2 + ROWS), Timeline.decoder([Placeholder(1, ROWS)]), items)
                await sync.submit(Submission(f"request {number}", prompt, {}, {}))
            await sync.drain(30)
            encodes.append(tiered.encodes - 1)
            keys.append(sorted(redis.all_keys()))
            nodes.close()
            await sync.close()
    assert encodes == [count, 0, 0]
    assert len(keys[0]) == 1 + 2 * count, "the probe, and a manifest and a chunk of each"
    assert keys[1:] == [keys[0]] * 2


def test_the_memory_is_found_by_what_the_engine_says_and_keeps_no_name(make: Make) -> None:
    tiered = make(ranks=2)
    assert tiered.host is not None
    path = Path(tiered.copies[0]._worker._region._mmap_path)
    assert path.exists()
    tiered.add("a", [0], max_new_tokens=1)
    assert tiered.step() == []
    assert not path.exists(), "every worker process has mapped it"
    assert [bool(one._saving) for one in tiered.copies] == [True, False], "vLLM's rule: the first of all ranks saves"
    staged = tiered.fetch(1)
    assert staged is not None
    ((first, count),) = staged.prefetched.extents
    memory = tiered.copies[1]._worker._region._mmap_obj
    assert memory[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES] == b"".join(staged.buffers), "it is one memory"


def test_memory_of_an_engine_that_has_ended_or_of_another_one_is_not_mapped(make: Make, tmp_path: Path) -> None:
    page = TierPage.create()
    with pytest.raises(OSError, match="no worker process"):
        page.open_region(NBYTES)
    for name in ("before", "now"):  # an engine that starts again says it again
        with (tmp_path / name).open("wb+") as file:
            file.truncate(NBYTES)
            page.announce(file.fileno())
            os.close(page.open_region(NBYTES))
            with pytest.raises(OSError, match="is not the memory"):
                page.open_region(NBYTES + 1)
            number = file.fileno()
        with pytest.raises(FileNotFoundError):
            page.open_region(NBYTES)
        with (tmp_path / "another").open("wb+") as other:
            other.truncate(NBYTES)
            assert other.fileno() == number
            with pytest.raises(OSError, match="is not the memory"):
                page.open_region(NBYTES)


def test_an_engine_goes_on_stepping_until_it_has_heard_of_every_copy_and_no_longer(make: Make) -> None:
    tiered = make()
    tiered.add("a", [0], max_new_tokens=1)
    while tiered.scheduler.requests:
        assert tiered.step() == []
    connector = tiered.scheduler.ec_connector
    assert connector.has_pending_push_work()
    assert tiered.settle() == []
    assert tiered.totals.tier_saves == 1
    worker = tiered.copies[0]._worker
    worker.poll = lambda: None  # a device that never ends a copy
    tiered.add("b", [1], max_new_tokens=1)
    while tiered.scheduler.requests:
        assert tiered.step() == []
    tiered.settle()
    assert tiered.totals.tier_saves == 1
    assert not connector.has_pending_push_work()
    del worker.poll
