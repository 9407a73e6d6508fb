"""One item cache with two writers, vLLM's own route and semel's, without an engine.

vLLM's route is played in its steps: it looks what is cached, puts its items in when they are made, and sends later or
never. Whatever comes in between, semel's part of the mirror is in the engine core, and watchers know it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo, Item
from semel.engine.vllm.compat import shared_item_cache
from semel.errors import FeatureMissing
from tests.engine.test_item_cache_mirror import SIZES, Ask, Halves, Replay, built, digest_of, feature_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

UPDATES = ["where it stands in the prompt"]


@dataclass
class Render:
    """A prompt on vLLM's own route."""

    numbers: tuple[int, ...]
    cached: list[bool] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)

    def names(self) -> list[str]:
        return [f"vllm-{number}" for number in self.numbers]


class Shared(Halves):
    """Both halves of vLLM's item cache, and a client that sends to the engine core."""

    def __init__(self, *, is_shared: bool = True) -> None:
        super().__init__()
        self.client = SimpleNamespace(add_request_async=self.receive)
        self.missed: list[str] = []
        if is_shared:
            self.items.share(SimpleNamespace(engine_core=self.client))

    async def receive(self, request: Any) -> None:
        """As the engine core does; what it misses is dropped from the mirror, as vLLM does."""
        from vllm.multimodal.cache.base import MultiModalCacheMissError

        try:
            self.core.get_and_update_features(request.mm_features)
        except MultiModalCacheMissError as error:
            self.missed += error.mm_hashes
            for name in error.mm_hashes:
                self.sender.invalidate(name)

    async def send(self, features: list[Any]) -> None:
        await self.client.add_request_async(SimpleNamespace(mm_features=features))

    async def ask_semel(self, ask: Ask) -> None:
        """As a worker does: what is missing is asked for, and comes."""
        for withheld in (ask.withheld, frozenset[int]()):
            data: dict[Any, list[Any]] = {"image": [None if one in withheld else built(one) for one in ask.numbers]}
            features = {digest_of(one): feature_of(one) for one in ask.numbers if one not in withheld}
            try:
                self.items.admit([Item("image", digest_of(one)) for one in ask.numbers], data, features)
            except FeatureMissing:
                continue
            names = [digest_of(one).hex() for one in ask.numbers]
            await self.send(list(map(feature, names, data["image"])))
            break

    def look(self, render: Render) -> None:
        render.cached = [self.sender.is_cached_item(name) for name in render.names()]

    def merge(self, render: Render) -> None:
        """As vLLM's processor does with the items that it has made."""
        for name in render.names():
            self.sender.touch_sender_cache_item(name)
        for number, name, is_cached in zip(render.numbers, render.names(), render.cached, strict=True):
            item, updates = self.sender.get_and_update_item(None if is_cached else (built(number), UPDATES), name)
            assert updates == UPDATES
            render.features.append(feature(name, item))

    async def step(self, action: str, render: Render) -> None:
        match action:
            case "look":
                self.look(render)
            case "merge":
                self.merge(render)
            case "send":
                await self.send(render.features)

    def check_semel(self) -> None:
        """What semel believes and has announced is in the engine core."""
        assert {digest.hex() for digest in self.items} <= set(self.core._cache)
        assert self.replay.held.keys() == set(self.items)
        assert not [name for name in self.missed if not name.startswith("vllm-")]


def feature(name: str, data: Any) -> Any:
    return SimpleNamespace(mm_hash=name, identifier=name, data=data)


@dataclass(frozen=True)
class Plan:
    """Requests of both routes in one order: those of vLLM's take several turns, and one may never be sent."""

    renders: tuple[tuple[tuple[int, ...], bool], ...]
    turns: tuple[int | Ask, ...]
    """A request of semel's, or the next step of a prompt by its number."""


async def play(plan: Plan, *, is_shared: bool = True) -> Shared:
    shared = Shared(is_shared=is_shared)
    steps: list[Iterator[tuple[str, Render]]] = []
    for numbers, is_sent in plan.renders:
        render = Render(numbers)
        steps.append(iter([("look", render), ("merge", render), *([("send", render)] if is_sent else [])]))
    for turn in plan.turns:
        if isinstance(turn, Ask):
            await shared.ask_semel(turn)
        elif steps and (next_step := next(steps[turn % len(steps)], None)) is not None:
            await shared.step(*next_step)
        shared.check_semel()
    return shared


def plans() -> st.SearchStrategy[Plan]:
    number = st.integers(0, len(SIZES) - 1)
    numbers = st.lists(number, min_size=1, max_size=4, unique=True).map(tuple)
    renders = st.lists(st.tuples(numbers, st.booleans()), max_size=8).map(tuple)
    asks = st.builds(Ask, numbers, st.frozensets(number))
    return st.builds(Plan, renders, st.lists(st.one_of(st.integers(0, 7), asks), max_size=40).map(tuple))


OVERTAKEN = Plan((((8,), True),), (0, 0, Ask((7,)), 0, Ask((0, 1)), Ask((7,), frozenset({7}))))
"""A prompt of vLLM's (6 bytes) is rendered, a request of semel's (5) overtakes it; of 12 bytes one has to go then."""

GONE = Plan((((6,), True), ((6, 7), True)), (0, 0, 0, 1, Ask((9,)), 1, 1))
"""Of a prompt that vLLM's route renders, semel's request pushes out what was cached."""

BY_NAME = Plan((((6,), True), ((7,), False), ((6, 0), True)), (0, 0, 0, 1, 1, 2, Ask((8,)), 2, 2, Ask((6,))))
"""As before, and the engine core still has it: an item that goes by name takes room there."""


@settings(deadline=None, max_examples=400)
@given(plans())
@example(OVERTAKEN)
@example(GONE)
@example(BY_NAME)
def test_what_semel_announces_is_in_the_engine_core_whatever_vllms_own_route_does(plan: Plan) -> None:
    asyncio.run(play(plan))


async def test_control_without_one_order_the_mirror_names_what_the_engine_core_has_evicted() -> None:
    with pytest.raises(AssertionError):
        await play(OVERTAKEN, is_shared=False)


async def test_an_item_that_goes_while_its_prompt_is_rendered_is_a_miss_and_no_failure() -> None:
    shared = await play(GONE)
    assert shared.missed == ["vllm-6"]  # vLLM makes the request again, or its client does
    with pytest.raises(AssertionError, match="Expected a cached item"):  # the control: vLLM's own assertion, a 500
        await play(GONE, is_shared=False)


async def test_an_item_whose_client_left_before_it_was_sent_travels_with_the_next_request() -> None:
    left = Plan((((6,), False), ((6,), True), ((6,), True)), (0, 0, 1, 1, 1, 2, 2, 2))
    shared = await play(left)
    assert shared.missed == []
    assert shared.sender.is_cached_item("vllm-6")
    assert (await play(left, is_shared=False)).missed == ["vllm-6"]  # the control: vLLM's client gets a 500


async def test_the_items_that_were_removed_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_item_cache, "_MAX_REMOVED", 2)
    shared = Shared()
    for number in (6, 7, 6, 8):
        shared.sender.get_and_update_item((built(number), UPDATES), f"vllm-{number}")
        shared.sender.invalidate(f"vllm-{number}")
    assert shared.sender.get_and_update_item(None, "vllm-6") == (None, UPDATES)
    with pytest.raises(AssertionError, match="Expected a cached item"):
        shared.sender.get_and_update_item(None, "vllm-7")


class OnLoop(Replay):
    """A watcher that has to be called on the event loop, as a worker's publisher."""

    def drop(self, digest: Digest) -> None:
        asyncio.get_running_loop()
        super().drop(digest)


def in_thread(work: Callable[[], Any]) -> None:
    """Do it in another thread, while the event loop waits."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result(60)


@contextmanager
def holding(number: int, *, is_shared: bool = True) -> Iterator[tuple[Shared, OnLoop]]:
    shared, watcher = Shared(is_shared=is_shared), OnLoop()
    shared.items.watch(watcher)
    shared.items.admit(*asked(number))
    yield shared, watcher


def asked(number: int) -> tuple[list[Item], dict[Any, list[Any]], dict[Digest, Any]]:
    """One item, with its data and its feature."""
    return [Item("image", digest_of(number))], {"image": [built(number)]}, {digest_of(number): feature_of(number)}


def evict(shared: Shared) -> None:
    """Take the whole cache, as vLLM's renderer does in its thread."""
    shared.sender.get_and_update_item((built(9), UPDATES), "vllm-9")


async def test_an_eviction_in_vllms_thread_is_announced_on_the_event_loop() -> None:
    with holding(0) as (shared, watcher):
        in_thread(lambda: evict(shared))
        assert digest_of(0) not in shared.items  # known at once, announced in the loop's next turn
        await asyncio.sleep(0)
        assert watcher.held == {}
    with holding(0, is_shared=False) as (shared, _), pytest.raises(RuntimeError, match="no running event loop"):
        in_thread(lambda: evict(shared))  # the control


async def test_an_item_that_comes_back_before_its_eviction_was_announced_is_announced_in_order() -> None:
    with holding(0) as (shared, watcher):
        in_thread(lambda: evict(shared))
        shared.items.admit(*asked(0))
        assert watcher.held == {digest_of(0): FeatureInfo.of(feature_of(0))}
        late = Replay()
        shared.items.watch(late)
        await asyncio.sleep(0)
        assert watcher.held == late.held == {digest_of(0): FeatureInfo.of(feature_of(0))}


async def test_vllms_thread_waits_while_an_admission_is_made_in_slices() -> None:
    shared, locked = Shared(), list[bool]()

    def look() -> None:
        is_free = shared.items._lock.acquire(blocking=False)
        locked.append(not is_free)
        if is_free:
            shared.items._lock.release()

    for _ in shared.items.admission(*asked(0)):
        in_thread(look)
    assert locked
    assert all(locked)
    in_thread(look)
    assert not locked[-1]
