"""S16: putting a prompt together costs time in proportion to its items, at 32,768 of them too (CVE-2025-46560).

That the result is the same as the obvious way's, and the same law for the wire and for files, stands in
`tests/render/test_expand.py`, `tests/interchange/test_safetensors.py` and `tests/core/test_prompt.py`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from semel.core import Digest, Item, Layout
from semel.render.tokens.expand import expand

pytestmark = [pytest.mark.slow, pytest.mark.alone]

IMAGE = 7
LAYOUT = Layout((5, 6, 6, 5))
ITEM = Item("image", Digest(bytes(32)))


def naive(token_ids: Sequence[int]) -> list[int]:
    """One placeholder after the other is looked for from the start, and replaced in a new list."""
    whole = list(token_ids)
    while IMAGE in whole:
        place = whole.index(IMAGE)
        whole = [*whole[:place], *LAYOUT.token_ids, *whole[place + 1 :]]
    return whole


def ours(token_ids: Sequence[int]) -> list[int]:
    count = token_ids.count(IMAGE)
    prompt = expand(token_ids, placeholder_ids={IMAGE: "image"}, items=[ITEM] * count, layouts=[LAYOUT] * count)
    return list(prompt.token_ids)


def growth(work: Callable[[Sequence[int]], list[int]], items: int, rounds: int) -> float:
    """How many times longer it takes for twice the items, by processor time, pair by pair."""

    def seconds(count: int) -> float:
        token_ids = [1, IMAGE, 2] * count
        started = time.process_time()
        assert len(work(token_ids)) == count * 6
        return time.process_time() - started

    gc.disable()
    try:
        return median(seconds(2 * items) / seconds(items) for _ in range(rounds))
    finally:
        gc.enable()


def test_the_naive_way_takes_four_times_as_long_for_twice_the_items_and_ours_twice() -> None:
    assert naive([1, IMAGE, 2, IMAGE]) == ours([1, IMAGE, 2, IMAGE])
    assert growth(naive, 512, rounds=5) > 3
    assert growth(ours, 16_384, rounds=7) < 2.4
