"""The embedding tier as the embedding process sees it: blocks to fetch into, outputs to publish. No engine, no vLLM."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading

import pytest

from semel.core import Digest, Form, PrefetchedOutput
from semel.engine.protocol import StagedOutput
from semel.engine.tier_events import Gone, Overrun, Reset, Saved
from semel.engine.vllm.tier.host import HostTier
from semel.engine.vllm.tier.page import LEASE_SLOTS, TierPage
from semel.engine.vllm.tier.prefetch_params import Staging, prefetch_params
from semel.engine.vllm.tier.shared_file import create_file, descriptor_path

BLOCK_BYTES = 64
HOST_CACHE, STAGING = 16, 8
X, Y = Digest(b"x" * 32), Digest(b"y" * 32)
FORM: Form = (3, 16, "torch.float32")
"""Three blocks."""

pytestmark = pytest.mark.timeout(60)


class Rig:
    """A tier, and the engine core's hand on its page."""

    def __init__(self) -> None:
        descriptor = create_file("test-tier")
        nbytes = (HOST_CACHE + STAGING) * BLOCK_BYTES
        os.ftruncate(descriptor, nbytes)
        self.memory = mmap.mmap(descriptor, nbytes)
        self.page = TierPage.create()
        self.staging = Staging(HOST_CACHE, STAGING, BLOCK_BYTES)
        self.tier = HostTier.open(descriptor_path(descriptor), nbytes, self.staging, TierPage.open(self.page.path))

    def stage(self, digest: Digest = X, form: Form = FORM) -> StagedOutput:
        staged = self.tier.stage(digest, form)
        assert staged is not None
        return staged


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_written_into_a_staged_output_is_where_the_engine_reads_it(rig: Rig) -> None:
    staged = rig.stage(form=(5, 9, "torch.float32"))  # 180 bytes in three blocks
    assert sum(len(buffer) for buffer in staged.buffers) == 180
    for buffer in staged.buffers:
        buffer[:] = b"\x07" * len(buffer)
    ((first, count),) = staged.prefetched.extents
    assert first >= HOST_CACHE
    assert first + count <= HOST_CACHE + STAGING
    assert rig.memory[first * BLOCK_BYTES : first * BLOCK_BYTES + 180] == b"\x07" * 180
    assert sum(rig.memory[:]) == 7 * 180


def test_there_is_no_more_room_than_there_is(rig: Rig) -> None:
    staged = [rig.stage(), rig.stage()]
    assert rig.tier.stage(X, FORM) is None
    assert rig.tier.stage(X, (2, 16, "torch.float32")) is not None
    rig.tier.release(staged[0])
    rig.tier.release(staged[0])
    assert rig.tier.staged_blocks == 5
    assert rig.stage().prefetched.lease != staged[0].prefetched.lease


@pytest.mark.parametrize("form", [(0, 16, "torch.float32"), (1, -1, "torch.float32"), (1, 1, "torch.int8")])
def test_no_output_has_such_a_form(rig: Rig, form: Form) -> None:
    assert rig.tier.stage(X, form) is None


def test_what_was_submitted_is_taken_back_when_the_page_says_so_and_not_before(rig: Rig) -> None:
    staged = rig.stage()
    rig.tier.submit([staged.prefetched])
    rig.tier.release(staged)
    rig.tier.review()
    assert rig.tier.staged_blocks == 3
    rig.page.finish(staged.prefetched.lease + LEASE_SLOTS)  # another generation
    rig.tier.review()
    assert rig.tier.staged_blocks == 3
    rig.page.finish(staged.prefetched.lease)
    rig.tier.review()
    assert rig.tier.staged_blocks == 0


async def test_what_the_engine_never_got_is_taken_back_when_the_engine_has_heard_everything(rig: Rig) -> None:
    heard = asyncio.Event()
    rig.tier.fence = heard.wait
    lost, loading = rig.stage(X), rig.stage(Y, (1, 16, "torch.float32"))
    rig.tier.submit([lost.prefetched, loading.prefetched])
    rig.page.use(loading.prefetched.lease)
    rig.tier.end([lost.prefetched, loading.prefetched])
    await asyncio.sleep(0)
    assert rig.tier.staged_blocks == 4, "the engine may still get it"
    heard.set()
    await rig.tier.settled()
    assert rig.tier.staged_blocks == 1, "a step loads the other one"
    rig.page.finish(loading.prefetched.lease)
    rig.tier.review()
    assert rig.tier.staged_blocks == 0


async def test_a_dead_engine_keeps_its_blocks(rig: Rig) -> None:
    async def dead() -> None:
        raise RuntimeError("dead")

    rig.tier.fence = dead
    staged = rig.stage()
    rig.tier.submit([staged.prefetched])
    rig.tier.end([staged.prefetched])
    await rig.tier.settled()
    assert rig.tier.staged_blocks == 3


def test_what_is_in_the_host_cache_is_read_and_is_intact_until_it_is_gone(rig: Rig) -> None:
    rig.memory[: 4 * BLOCK_BYTES] = b"\x09" * 4 * BLOCK_BYTES
    rig.page.saved(X, 1, ((0, 2), (3, 1)), FORM)
    assert not rig.tier.holds(X)
    assert rig.tier.review() == [Saved(X, 1, ((0, 2), (3, 1)), FORM)]
    assert rig.tier.holds(X)
    cached_output = rig.tier.cached_output(X)
    assert cached_output is not None
    assert cached_output.form == FORM
    assert b"".join(cached_output.buffers) == b"\x09" * 192
    with pytest.raises(TypeError):
        cached_output.buffers[0][0] = 1
    assert cached_output.is_intact()
    rig.page.gone(X, 1)
    assert not cached_output.is_intact(), "also before anybody has reviewed that"
    assert rig.tier.review() == [Gone(X, 1)]
    assert not rig.tier.holds(X)


@pytest.mark.parametrize("event", ["saved again", "reset", "overrun"])
def test_what_was_replaced_forgotten_or_perhaps_so_is_not_intact(rig: Rig, event: str) -> None:
    rig.page.saved(X, 1, ((0, 3),), FORM)
    cached_output = rig.tier.cached_output(X)
    assert cached_output is not None
    if event == "saved again":
        rig.page.gone(X, 1)
        rig.page.saved(X, 2, ((0, 3),), FORM)
    elif event == "reset":
        rig.page.reset(new_weights=False)
    else:
        for _ in range(5_000):
            rig.page.gone(Y, 7)
    assert not cached_output.is_intact()
    assert rig.tier.holds(X) is (event == "saved again")


def test_that_another_copy_of_the_digest_is_gone_changes_nothing(rig: Rig) -> None:
    rig.page.saved(X, 2, ((0, 3),), FORM)
    cached_output = rig.tier.cached_output(X)
    rig.page.gone(X, 1)
    assert cached_output is not None
    assert cached_output.is_intact()


def test_events_that_nobody_reviews_do_not_pile_up(rig: Rig) -> None:
    rig.page.saved(X, 1, ((0, 3),), FORM)
    cached_output = rig.tier.cached_output(X)
    assert cached_output is not None
    for number in range(20):
        for _ in range(1_000):
            rig.page.gone(Y, number)
        assert cached_output.is_intact()
    events = rig.tier.review()
    assert len(events) < 17_000
    assert events[:2] == [Overrun(), Saved(X, 1, ((0, 3),), FORM)]


def test_epochs_count_from_when_the_engine_was_warm_and_are_in_what_is_staged(rig: Rig) -> None:
    rig.page.reset(new_weights=False)
    rig.tier.begin()
    assert (rig.tier.epoch, rig.tier.has_new_weights) == (0, False)
    staged = rig.stage()
    assert (staged.epoch, staged.prefetched.epoch) == (0, 1)
    rig.page.reset(new_weights=True)
    assert (rig.tier.epoch, rig.tier.has_new_weights, rig.stage().epoch) == (1, True, 1)
    assert [event for event in rig.tier.review() if isinstance(event, Reset)] == [Reset(False), Reset(True)]


def test_new_weights_are_known_before_the_engine_core_hears_of_them(rig: Rig) -> None:
    rig.tier.note_new_weights()
    assert rig.tier.has_new_weights
    assert not rig.page.has_new_weights


def test_threads_stage_release_and_look_at_the_same_time(rig: Rig) -> None:
    rig.page.saved(X, 1, ((0, 3),), FORM)
    cached_output = rig.tier.cached_output(X)
    assert cached_output is not None
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                staged = rig.tier.stage(X, FORM)
                assert cached_output.is_intact()
                rig.tier.review()
                if staged is not None:
                    rig.tier.release(staged)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failures, rig.tier.staged_blocks) == ([], 0)


PREFETCHED = PrefetchedOutput(LEASE_SLOTS, X, ((16, 2), (20, 1)), FORM, 4)


def test_prefetched_outputs_travel_with_a_request() -> None:
    import msgspec

    params = msgspec.msgpack.decode(msgspec.msgpack.encode(prefetch_params([PREFETCHED])))
    assert Staging(HOST_CACHE, STAGING, BLOCK_BYTES).parse(params) == (PREFETCHED,)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 3),
        (0, "1024"),
        (0, True),
        (0, 1 << 70),
        (1, "no hex"),
        (1, "00"),
        (1, 7),
        (2, []),
        (2, [[15, 3]]),
        (2, [[16, 9]]),
        (2, [[16, 2]]),
        (2, [[16, 0], [17, 3]]),
        (2, [[-1, 3]]),
        (2, [[16, 3, 1]]),
        (2, 5),
        (3, [4, 16, "torch.float32"]),
        (3, [3, 16, "torch.int8"]),
        (3, [3, 16, 4]),
        (3, [0, 16, "torch.float32"]),
        (3, None),
        (4, -1),
        (4, None),
    ],
)
def test_a_prefetched_output_of_which_a_part_is_wrong_is_none(place: int, value: object) -> None:
    staging = Staging(HOST_CACHE, STAGING, BLOCK_BYTES)
    params = prefetch_params([PREFETCHED])
    assert staging.parse(params)  # the control
    params["arrivals"][0][place] = value
    with pytest.raises(ValueError, match=r"."):
        staging.parse(params)


@pytest.mark.parametrize("params", [None, {}, [], {"arrivals": None}, {"arrivals": 5}, {"arrivals": [], "more": 1}])
def test_parameters_of_others_are_none(params: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Staging(HOST_CACHE, STAGING, BLOCK_BYTES).parse(params)


def test_a_digest_or_lease_that_comes_twice_is_refused() -> None:
    staging = Staging(HOST_CACHE, STAGING, BLOCK_BYTES)
    other = PrefetchedOutput(LEASE_SLOTS + 1, X, ((16, 3),), FORM)
    with pytest.raises(ValueError, match="twice"):
        staging.parse(prefetch_params([PREFETCHED, other]))
    with pytest.raises(ValueError, match="twice"):
        staging.parse(prefetch_params([PREFETCHED, PrefetchedOutput(LEASE_SLOTS, Y, ((16, 3),), FORM)]))
