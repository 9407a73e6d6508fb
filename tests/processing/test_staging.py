"""Staging: what a pool process has written is copied into the segment of features, and stays as it was copied (S23)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from semel.cache import SharedCache, Window, with_small_copies
from semel.cache.shared.segment import Segment
from semel.core import Feature, Layout, Tensor
from semel.processing.pool.staging import Staging

MIB = 1 << 20


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def resident_bytes(segment: Segment) -> int:
    return os.fstat(segment.fileno()).st_blocks * 512


@pytest.mark.parametrize("nbytes", [100, MIB, MIB + 1, 40 * MIB])
async def test_what_was_staged_is_in_the_segment_and_stays_as_it_was_copied_S23(nbytes: int, threads: Executor) -> None:
    cache, source = SharedCache.create(64 * MIB), Segment(48 * MIB)
    staging, theirs = Staging(source), Window.attach(source.fileno(), writable=True)
    before = cache.reserve(64)
    room = cache.reserve(nbytes)
    assert before is not None
    assert room is not None
    theirs.view(0, nbytes)[:] = bytes(range(250)) * (nbytes // 250) + bytes(nbytes % 250)
    await staging.copy_to(room, nbytes, cache.segment, threads)
    copied = room.view()[:nbytes].tobytes()
    theirs.view(0, nbytes)[:] = b"x" * nbytes
    assert room.view()[:nbytes].tobytes() == copied == bytes(range(250)) * (nbytes // 250) + bytes(nbytes % 250)
    assert before.view().tobytes() == bytes(64)
    room.release()
    before.release()
    theirs.close()
    staging.close()
    cache.close()


async def test_no_more_is_copied_than_there_is_room_for_S23(threads: Executor) -> None:
    """A process may say that it has written more than it offered."""
    cache, source = SharedCache.create(MIB), Segment(MIB)
    first, second = cache.reserve(64), cache.reserve(64)
    assert first is not None
    assert second is not None
    source.memory[:4_096] = b"x" * 4_096
    await Staging(source).copy_to(first, 4_096, cache.segment, threads)
    assert (first.view().tobytes(), second.view().tobytes()) == (b"x" * 64, bytes(64))
    first.release()
    second.release()
    source.close()
    cache.close()


async def test_a_large_feature_leaves_no_memory_behind_and_a_small_one_its_pages(threads: Executor) -> None:
    cache, source = SharedCache.create(64 * MIB), Segment(48 * MIB)
    for nbytes, kept in ((8 * MIB, 8 * MIB), (40 * MIB, 0)):
        room = cache.reserve(nbytes)
        assert room is not None
        source.memory[:nbytes] = b"x" * nbytes
        await Staging(source).copy_to(room, nbytes, cache.segment, threads)
        assert resident_bytes(source) == kept
        room.release()
    source.close()
    cache.close()


def feature_over(memory: memoryview) -> Feature:
    tensors = {"grid": Tensor("int64", (3,), memory[:24]), "pixels": Tensor("float32", (4,), memory[64:80])}
    return Feature("image", tensors, Layout((7,)))


def check_a_grid_is_what_was_checked(feature: Feature, memory: bytearray) -> None:
    """Its lender flips bytes between the check and the use."""
    checked = feature.tensors["grid"].data.tobytes()
    memory[:24] = b"\xff" * 24
    assert feature.tensors["grid"].data.tobytes() == checked


def test_grids_cannot_be_changed_after_they_were_checked_S9() -> None:
    memory = bytearray(80)
    feature = with_small_copies(feature_over(memoryview(memory)))
    check_a_grid_is_what_was_checked(feature, memory)
    memory[64:80] = b"x" * 16
    assert feature.tensors["pixels"].data.tobytes() == b"x" * 16, "pixels are read where they lie"


def test_mutant_a_feature_that_is_only_borrowed_changes_under_its_reader_S9() -> None:
    memory = bytearray(80)
    with pytest.raises(AssertionError):
        check_a_grid_is_what_was_checked(feature_over(memoryview(memory)), memory)
