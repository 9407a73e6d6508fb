"""Staging: what a pool process has written is copied into the segment of features, and stays as it was copied (S23)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress

import pytest

from semel.cache import SharedCache, Window, with_small_copies
from semel.cache.shared.segment import Segment
from semel.core import Feature, Layout, Media, Tensor
from semel.errors import MediaTooLarge, MediaUndecodable
from semel.processing.pool.job import FeatureJob, OfferLimits
from semel.processing.pool.pipe import Failed, Made, Offer, Send, TensorHead, Tokenize, Tokens, Work
from semel.processing.pool.staging import Staging
from tests.processing.scripted_pool import ONE_TOKEN, Peer, scripted_pool

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
    await staging.copy_to(room.view()[:nbytes], threads)
    copied = room.view()[:nbytes].tobytes()
    theirs.view(0, nbytes)[:] = b"x" * nbytes
    assert room.view()[:nbytes].tobytes() == copied == bytes(range(250)) * (nbytes // 250) + bytes(nbytes % 250)
    assert before.view().tobytes() == bytes(64)
    room.release()
    before.release()
    theirs.close()
    staging.close()
    cache.close()


async def test_a_large_feature_leaves_no_memory_behind_and_a_small_one_its_pages(threads: Executor) -> None:
    source = Segment(48 * MIB)
    for nbytes, kept in ((8 * MIB, 8 * MIB), (40 * MIB, 0)):
        source.memory[:nbytes] = b"x" * nbytes
        await Staging(source).trim(threads)
        assert resident_bytes(source) == kept
    source.close()


def made_of(item: int, nbytes: int) -> Made:
    return Made(item, "image", (TensorHead("pixels", "uint8", (nbytes,)),), ONE_TOKEN, is_written=True)


@pytest.mark.parametrize("kind", ["feature", "layout", "failed layout", "failed", "refused", "small by its own word"])
async def test_a_process_keeps_little_staging_memory_after_any_item_S21(kind: str) -> None:
    """Patches are written there while an item is made: also for a layout, and for what fails in the end."""
    nbytes = 40 * MIB

    async def serve(peer: Peer) -> None:
        assert peer.memory is not None
        order, _ = await peer.receive()
        assert isinstance(order, Work)
        peer.memory.view(0, nbytes)[:] = b"x" * nbytes
        if kind.startswith("failed"):
            await peer.send(Failed("MediaUndecodable", "broken"))
        elif order.only_layout:
            await peer.send(Offer(order.item, 0, 1))
            await peer.receive()
            await peer.send(Made(order.item, "image", (), ONE_TOKEN))
        else:
            await peer.send(made_of(order.item, 1 if kind == "small by its own word" else nbytes))
        await peer.receive()

    cache = SharedCache.create(MIB)
    limits = OfferLimits(max_bytes=MIB if kind == "refused" else 64 * MIB)
    try:
        async with scripted_pool(serve, memory=cache, offers=limits) as pool:
            ask = pool.lay_out if "layout" in kind else pool.process
            with suppress(MediaUndecodable, MediaTooLarge):
                await ask(Media("image", b"1"))
            (child,) = pool.processes.children
            assert child.running and child.staging is not None
            assert os.fstat(child.staging.fileno()).st_blocks * 512 <= 32 * MIB
    finally:
        cache.close()


@pytest.mark.parametrize("is_offered", [False, True])
@pytest.mark.parametrize("has_room", [True, False])
async def test_what_was_staged_is_taken_with_an_offer_and_without_S23(is_offered: bool, has_room: bool) -> None:
    """A process offers what takes a long message to describe; without room, the copy is the request's own."""
    spent, nbytes = list[int](), MIB + 1

    async def serve(peer: Peer) -> None:
        assert peer.memory is not None
        order, data = await peer.receive()
        assert isinstance(order, Work)
        peer.memory.view(0, nbytes)[:] = data * nbytes
        made = Made(order.item, "image", (TensorHead("pixels", "uint8", (nbytes,)),), ONE_TOKEN, is_written=True)
        if is_offered:
            await peer.send(made.offer)
            assert isinstance((await peer.receive())[0], Send)
        await peer.send(made)
        await peer.receive()

    cache = SharedCache.create(4 * MIB if has_room else MIB)
    try:
        async with scripted_pool(serve, memory=cache) as pool:
            feature = await pool.process(Media("image", b"1"), spend=spent.append)
            assert feature.tensors["pixels"].data.tobytes() == b"1" * nbytes
            assert (cache.occupied > 0, spent) == ((True, []) if has_room else (False, [nbytes]))
            del feature
    finally:
        cache.close()


async def check_a_process_finds_nothing_of_another_tenant() -> None:
    """What a process has in its staging memory when an order arrives: what its last feature was, or nothing."""
    nbytes, found = 2 * MIB, list[bytes]()

    async def serve(peer: Peer) -> None:
        assert peer.memory is not None
        while True:
            order, data = await peer.receive()
            found.append(peer.memory.view(nbytes - 1, 1).tobytes())
            if isinstance(order, Tokenize):
                await peer.send(Tokens(order.item, 1, 0), 4)
                continue
            assert isinstance(order, Work)
            peer.memory.view(0, nbytes)[:] = data * nbytes
            head = TensorHead("pixels", "uint8", (nbytes,))
            await peer.send(Made(order.item, "image", (head,), ONE_TOKEN, is_written=True))

    cache = SharedCache.create(64 * MIB)
    try:
        async with scripted_pool(serve, memory=cache) as pool:
            features = [await pool.process(Media("image", data), tenant="acme") for data in (b"1", b"2")]
            await pool.tokenize(["x"], tenant="acme")
            await pool.tokenize(["x"], tenant="umbra")
            features.append(await pool.process(Media("image", b"3"), tenant="umbra"))
            features.append(await pool.process(Media("image", b"4"), tenant="acme"))
            assert [feature.tensors["pixels"].data[-1:].tobytes() for feature in features] == [b"1", b"2", b"3", b"4"]
            del features
    finally:
        cache.close()
    assert found[:3] == [b"\0", b"1", b"2"], "for the same tenant nothing is done"
    assert found[3:] == [b"\0"] * 3


async def test_a_process_finds_nothing_of_another_tenant_in_its_staging_memory_S23() -> None:
    await check_a_process_finds_nothing_of_another_tenant()


async def test_mutant_staging_memory_that_is_left_as_it_is_has_the_last_tenant_s_feature_S23(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leave(*_: object) -> None:
        pass

    monkeypatch.setattr(Staging, "forget_others", leave)
    with pytest.raises(AssertionError):
        await check_a_process_finds_nothing_of_another_tenant()


def feature_over(memory: memoryview) -> Feature:
    tensors = {"grid": Tensor("int64", (3,), memory[:24]), "pixels": Tensor("float32", (4,), memory[64:80])}
    return Feature("image", tensors, Layout((7,)))


def check_a_grid_is_what_was_checked(feature: Feature, memory: bytearray) -> None:
    """Its lender flips bytes between the check and the use."""
    checked = feature.tensors["grid"].data.tobytes()
    memory[:24] = b"\xff" * 24
    assert feature.tensors["grid"].data.tobytes() == checked


async def test_an_item_that_a_second_process_makes_is_paid_once_S21() -> None:
    """The wrong implementation charges each try; a second one that is larger costs the difference."""
    charged: list[int] = []
    job = FeatureJob(0, Media("image", b"123"), b"", spend=charged.append)
    for nbytes in (100, 100, 130):
        job.pay(nbytes)
    assert charged == [100, 30]


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
