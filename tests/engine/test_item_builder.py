"""The turns of the thread that builds items: one with many lets others in, and single ones keep their order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from semel import aio
from semel.engine.vllm.requests import item_builder
from semel.engine.vllm.requests.item_builder import ItemBuilder

LONGER_THAN_A_TURN_S = 0.008


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ItemBuilder]:
    """One whose items are their own names, and take longer than a turn."""

    def build_item(feature: str, *_: object) -> str:
        time.sleep(LONGER_THAN_A_TURN_S)
        return feature

    monkeypatch.setattr(item_builder, "check_prompt", lambda *_: None)
    monkeypatch.setattr(item_builder, "check_shapes", lambda *_: (None for _ in range(1)))
    monkeypatch.setattr(item_builder, "new_features", lambda submission: submission.features)
    monkeypatch.setattr(item_builder, "build_item", build_item)
    monkeypatch.setattr(item_builder, "engine_input", lambda _, items: list(items))
    unused: Any = None
    made = ItemBuilder(unused, unused, unused)
    yield made
    made.close()


async def built(builder: ItemBuilder, *sizes: int) -> list[int]:
    """The numbers of the submissions with so many items, in the order in which they were built."""
    done: list[int] = []

    async def build(number: int, size: int) -> None:
        features = {f"{number}.{item}": "feature" for item in range(size)}
        submission: Any = SimpleNamespace(features=features, prompt=SimpleNamespace(items=tuple(features)))
        result = await builder.build(submission)
        assert list(result.items) == result.prompt == list(features)
        done.append(number)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number, size in enumerate(sizes):
            group.create_task(build(number, size))
    return done


async def test_single_items_keep_their_order_and_pass_by_many(
    builder: ItemBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await built(builder, *[1] * 12) == list(range(12))
    assert await built(builder, 9, 1, 1) == [1, 2, 0]
    monkeypatch.setattr(item_builder, "build_item", lambda *_: "feature")
    monkeypatch.setattr(aio, "time", SimpleNamespace(monotonic=Random(1).random))  # of a late machine
    assert await built(builder, *[1] * 64) == list(range(64))


async def test_mutant_a_turn_more_for_every_long_one_lets_a_later_one_pass(
    builder: ItemBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ItemBuilder._build_some
    turns: dict[int, int] = {}

    def again(self: ItemBuilder, features: deque[Any], items: dict[Any, Any]) -> None:
        """The first submission's item is built in its second turn."""
        if turns.setdefault(id(items), len(turns)) or len(turns) > 1:
            some(self, features, items)

    monkeypatch.setattr(ItemBuilder, "_build_some", again)
    assert await built(builder, *[1] * 3) != [0, 1, 2]
