"""The item cache against vLLM's own receiving half of it, without an engine: the two must never be apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.aio import at_once
from semel.core import Digest, Feature, FeatureInfo, Item, Layout, Modality, Tensor
from semel.engine.vllm.requests import intake
from semel.engine.vllm.requests.item_cache import Admission, ItemCache
from semel.engine.vllm.requests.item_delivery import ItemDelivery
from semel.errors import FeatureMissing

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CAPACITY = 12
SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 6, 12, 13, 40)
"""The bytes of the items: two of them are larger than the cache."""


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(Digest.size, "big"))


def feature_of(number: int) -> Feature:
    tensor = Tensor("uint8", (SIZES[number],), memoryview(bytes(SIZES[number])))
    return Feature("image", {"pixels": tensor}, Layout((1, number + 2)))


@dataclass(frozen=True)
class Ask:
    """A request: its items, those among them that come without features, and its `n`.

    Some may be delivered before it, so many at a time.
    """

    numbers: tuple[int, ...]
    withheld: frozenset[int] = frozenset()
    n: int = 1
    batch: int = 0


class Replay:
    """What a watcher makes of what it is told."""

    def __init__(self) -> None:
        self.held: dict[Digest, FeatureInfo] = {}

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        assert digest not in self.held
        self.held[digest] = holding

    def drop(self, digest: Digest) -> None:
        del self.held[digest]


class Halves:
    """vLLM's two caches: the one that semel fills, and the one of an engine core that gets what is sent."""

    def __init__(self) -> None:
        from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache

        self.sender = LruKeyReplicatedSenderCache(model_config())
        self.core = LruKeyReplicatedReceiverCache(model_config())
        self.items = ItemCache(SimpleNamespace(mm_processor_cache=self.sender))
        self.replay = Replay()
        self.items.watch(self.replay)

    def ask(self, ask: Ask) -> None:
        delivered: set[Digest] = set()
        fresh = [number_of(digest) for digest in self.due(ask)] if ask.batch else []
        for start in range(0, len(fresh), ask.batch or 1):
            delivered.update(self.submit(Ask(tuple(fresh[start : start + ask.batch]))).fresh)
        self.submit(ask, delivered)

    def due(self, ask: Ask) -> list[Digest]:
        """What goes first of a request with several answers."""
        unused: Any = None
        features = {digest_of(one): feature_of(one) for one in ask.numbers if one not in ask.withheld}
        prompt = SimpleNamespace(items=[Item("image", digest_of(one)) for one in ask.numbers])
        submission: Any = SimpleNamespace(prompt=prompt, features=features)
        return at_once(ItemDelivery(unused, unused, self.items, unused).due(submission, features, answers=2))

    def submit(self, ask: Ask, delivered: AbstractSet[Digest] = frozenset()) -> Admission:
        data: dict[Modality, list[Any]] = {
            "image": [None if number in ask.withheld else built(number) for number in ask.numbers]
        }
        features = {digest_of(number): feature_of(number) for number in ask.numbers if number not in ask.withheld}
        items = [Item("image", digest_of(number)) for number in ask.numbers]
        counted = {item.digest for item in items}
        self.sender.make_stats(delta=True)
        admission = at_once(self.items.admission(items, data, features, counted, delivered))
        vllms = self.sender.make_stats(delta=True)
        if not delivered:
            assert (admission.queries, admission.hits) == (vllms.total, vllms.hits), "as vLLM itself counts"
        assert {*admission.fresh, *admission.referred} == {digest_of(number) for number in ask.numbers}
        for _ in range(ask.n):  # every sequence is a request of its own to the engine core
            shown = [
                SimpleNamespace(mm_hash=digest_of(number).hex(), data=item)
                for number, item in zip(ask.numbers, data["image"], strict=True)
            ]
            resolved: Any = self.core.get_and_update_features(shown)
            assert [one.data["pixels"].data.numel() for one in resolved] == [SIZES[number] for number in ask.numbers]
        return admission

    def check(self) -> None:
        """Both halves, what semel knows and what it told are the same."""
        order = list(self.core._cache.order)
        assert list(self.sender._cache.order) == order
        assert sorted(digest.hex() for digest in self.items) == sorted(order)
        assert {digest.hex() for digest in self.replay.held} == set(order)
        assert self.items.nbytes == self.core._cache.currsize <= self.items.capacity == CAPACITY
        assert len(self.items) == len(order)
        for digest, holding in self.replay.held.items():
            number = int.from_bytes(digest, "big")
            assert self.items.holding(digest) == holding == FeatureInfo.of(feature_of(number))


def model_config() -> Any:
    """As much of vLLM's as its item caches read."""
    config = SimpleNamespace(mm_processor_cache_gb=CAPACITY / 2**30)
    return SimpleNamespace(get_multimodal_config=lambda: config)


def built(number: int) -> Any:
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    data = torch.zeros(SIZES[number], dtype=torch.uint8)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=data, field=MultiModalBatchedField())})


def asks() -> st.SearchStrategy[Ask]:
    number = st.integers(0, len(SIZES) - 1)
    numbers = st.lists(number, min_size=1, max_size=9).map(tuple)
    return st.builds(Ask, numbers, st.frozensets(number), st.integers(1, 3), st.integers(0, 3))


@settings(deadline=None, max_examples=600)
@given(st.lists(st.one_of(asks(), st.just("clear")), max_size=30))
@example([Ask((6,)), Ask((6, 7, 8), n=2), Ask((6, 7, 8), frozenset({7, 8}))])
def test_both_halves_hold_the_same_in_the_same_order_whatever_is_asked_D2(steps: list[Any]) -> None:
    halves = Halves()
    for step in steps:
        if step == "clear":
            halves.items.clear()
            halves.core.clear_cache()
        else:
            ask_as_a_worker_does(halves, step)
        halves.check()


def ask_as_a_worker_does(halves: Halves, ask: Ask) -> None:
    """With what is withheld, and where that is missing once more with it."""
    before = list(halves.core._cache.order)
    try:
        halves.ask(ask)
        assert_only_what_fits_was_referred_to(before, ask)
    except FeatureMissing as error:
        assert ask.batch or list(halves.sender._cache.order) == before  # refused without a trace
        withheld = {digest_of(number) for number in ask.withheld & set(ask.numbers)}
        absent = {digest for digest in withheld if digest.hex() not in before}
        assert set(error.digests) == (absent or withheld)
        assert absent or needed(before, ask) > CAPACITY
        withheld_now = ask.withheld - {number_of(digest) for digest in error.digests}
        ask_as_a_worker_does(halves, Ask(ask.numbers, withheld_now, ask.n, ask.batch))


def test_mutant_a_delivery_that_does_not_look_at_what_its_request_refers_to_pushes_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is full, and the request names its oldest item: with the right one that item stays."""
    steps = [Ask((0,)), Ask((8,)), Ask((7,)), Ask((0, 6), frozenset({0}), n=2, batch=1)]
    right, wrong = Halves(), Halves()
    for step in steps:
        right.ask(step)
        right.check()
    monkeypatch.setattr(Halves, "due", lambda _, ask: [digest_of(6)] if ask.withheld else [])
    with pytest.raises(FeatureMissing):
        for step in steps:
            wrong.ask(step)


def assert_only_what_fits_was_referred_to(before: list[str], ask: Ask) -> None:
    withheld = ask.withheld & set(ask.numbers)
    assert all(digest_of(number).hex() in before for number in withheld)
    assert not withheld or needed(before, ask) <= CAPACITY or all(digest_of(n).hex() in before for n in ask.numbers)


def needed(before: list[str], ask: Ask) -> int:
    """The bytes that all of a request's items take that can be held at all."""
    return sum(SIZES[number] for number in set(ask.numbers) if SIZES[number] <= CAPACITY)


def number_of(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def test_what_was_delivered_for_a_request_is_counted_once_D8() -> None:
    """The wrong implementation counted it as a hit when the request came."""
    halves = Halves()
    halves.ask(Ask((0, 1, 2), n=2, batch=2))
    halves.ask(Ask((0, 1), batch=2))
    stats = halves.sender.make_stats()
    assert (stats.hits, stats.total) == (2, 5)


def test_an_admission_that_is_broken_off_leaves_nothing_that_the_engine_core_lacks_D2() -> None:
    halves = Halves()
    halves.ask(Ask((0,)))
    asked = [Item("image", digest_of(number)) for number in (0, 2, 4)]
    features = {digest_of(number): feature_of(number) for number in (2, 4)}
    admitting = halves.items.admission(asked, {"image": [None, built(2), built(4)]}, features)
    while digest_of(2) not in halves.items:
        next(admitting)
    admitting.close()
    assert list(halves.items) == [digest_of(0)]
    halves.check()


def test_evictions_are_counted_and_nothing_else_is_D8() -> None:
    halves = Halves()
    for numbers in [(8,), (8, 7), (6,), (9,)]:  # 6, then 5 beside it, then 4 for 6, then 12 for both
        halves.ask(Ask(numbers))
    assert halves.items.evictions == 3
    halves.items.clear()
    assert halves.items.evictions == 3
    assert halves.replay.held == {}
    assert halves.items.nbytes == 0


def test_what_the_engine_core_names_as_lost_is_told_and_otherwise_all_that_was_referred_to_D3() -> None:
    halves = Halves()
    halves.ask(Ask((0, 2, 4)))
    asked = [digest_of(number) for number in (0, 2, 4)]
    halves.sender.invalidate(asked[1].hex())  # as vLLM does with what its engine core names
    assert halves.items.lost(asked) == (asked[1],)
    assert set(halves.replay.held) == {asked[0], asked[2]}
    assert halves.items.lost([asked[0], asked[2]]) == (asked[0], asked[2])
    assert halves.replay.held == {}


def test_a_watcher_that_comes_late_is_told_what_is_held_D2() -> None:
    halves = Halves()
    halves.ask(Ask((0, 2, 4)))
    late = Replay()
    halves.items.watch(late)
    assert late.held == halves.replay.held
    halves.ask(Ask((9,)))
    assert late.held == halves.replay.held == {digest_of(9): FeatureInfo.of(feature_of(9))}


@pytest.mark.parametrize("kind", ["off", "not mirrored"])
def test_without_a_mirror_nothing_is_held_and_every_feature_is_needed_D4(kind: str) -> None:
    from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache

    cache = None if kind == "off" else MultiModalProcessorOnlyCache(model_config())
    items = ItemCache(SimpleNamespace(mm_processor_cache=cache))
    replay = Replay()
    items.watch(replay)
    asked, item = [Item("image", digest_of(0))], built(0)
    for _ in range(2):
        data: dict[Modality, list[Any]] = {"image": [item]}
        assert items.admit(asked, data, {digest_of(0): feature_of(0)}) == Admission((digest_of(0),))
        assert data["image"] == [item]
    assert (items.capacity, items.nbytes, len(items), list(items)) == (0, 0, 0, [])
    assert digest_of(0) not in items
    with pytest.raises(FeatureMissing):
        items.admit(asked, {"image": [None]}, {})
    items.take_back(Admission((digest_of(0),)))
    items.clear()
    assert replay.held == {}
    told = "the engine's item cache is off" if kind == "off" else "(MultiModalProcessorOnlyCache) holds is not known"
    assert told in items.refusal


@pytest.mark.parametrize("broken", [RuntimeError("the engine core is gone"), asyncio.CancelledError()])
async def test_items_that_the_engine_core_did_not_get_are_forgotten_also_if_their_abort_fails(
    broken: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: as long as nothing fails they are held."""
    halves = Halves()
    data: dict[Modality, list[Any]] = {"image": [built(0)]}
    admission = halves.items.admit([Item("image", digest_of(0))], data, {digest_of(0): feature_of(0)})
    adding = [None, RuntimeError("refused")]

    async def add(*_: object) -> None:
        if (error := adding.pop(0)) is not None:
            raise error

    async def abort(_: str) -> None:
        raise broken

    monkeypatch.setattr(intake, "add_validated", add)
    monkeypatch.setattr(intake, "pause_after_large", lambda *_: None)
    unused: Any = None
    taking = intake.RequestIntake(SimpleNamespace(abort=abort), halves.items, unused, unused, asyncio.Lock())
    request = SimpleNamespace(request_id="r")
    await taking._added_with(admission, request, None, {})
    assert digest_of(0) in halves.items
    with pytest.raises(type(broken)):
        await taking._added_with(admission, request, None, {})
    assert digest_of(0) not in halves.items


def test_only_what_is_counted_here_counts_and_an_injected_item_is_taken_D8() -> None:
    halves = Halves()
    items = [Item("image", digest_of(number)) for number in (0, 1, 0)]
    features = {digest_of(number): feature_of(number) for number in (0, 1)}
    for counted, expected in (([0], (2, 1)), ([1], (1, 1)), ([], (0, 0)), ([0, 1], (3, 3))):
        data: dict[Modality, list[Any]] = {"image": [built(0), built(1), built(0)]}
        admission = halves.items.admit(items, data, features, {digest_of(number) for number in counted})
        assert (admission.queries, admission.hits) == expected
    assert halves.items.refusal == ""


def test_the_shm_cache_counts_as_vllm_does_and_says_why_nothing_can_be_injected_D8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it holds is not told, so frontends could not refer to it. Control: the mirrored kind takes items."""
    from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache

    monkeypatch.setenv("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", f"semel-test-{os.getpid()}")
    config = SimpleNamespace(mm_processor_cache_gb=2**20 / 2**30, mm_shm_cache_max_object_size_mb=1)
    sender = ShmObjectStoreSenderCache(
        SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            model_config=SimpleNamespace(get_multimodal_config=lambda: config),
        )
    )
    try:
        items = ItemCache(SimpleNamespace(mm_processor_cache=sender))
        assert items.capacity == 0
        assert "--mm-processor-cache-type shm" in items.refusal
        assert "lru" in items.refusal
        for expected in ((1, 0), (1, 1)):
            data: dict[Modality, list[Any]] = {"image": [built(4)]}
            asked = [Item("image", digest_of(4))]
            admission = items.admit(asked, data, {digest_of(4): feature_of(4)}, {digest_of(4)})
            vllms = sender.make_stats(delta=True)
            assert (admission.queries, admission.hits) == expected == (vllms.total, vllms.hits)
    finally:
        sender.close()
    assert Halves().items.refusal == ""


def test_a_mirror_that_is_not_as_semel_knows_it_is_left_alone_with_a_warning_D4(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = Halves().sender
    sender._cache = dict(sender._cache)
    items = ItemCache(SimpleNamespace(mm_processor_cache=sender))
    assert items.capacity == 0
    assert "_on_remove, maxsize" in caplog.text
