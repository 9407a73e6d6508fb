"""The embedding tier over vLLM's own copies, with a device whose copies end late and in any order (`late_device`).

A GPU is what is missing. The same engine core over a device whose copies are over at once is the suite without it: that
one does not find what is planted here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.encoder.transfers import Saved
from semel.engine.vllm.tier.copies import DeviceCopies
from semel.engine.vllm.tier.page import TierPage
from tests.engine.late_device import LateWorker, as_rank
from tests.engine.tiered import BLOCK_BYTES, NBYTES, Make, Tiered, create, random_requests

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
