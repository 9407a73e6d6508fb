"""Slots or bytes at once for each key: in order, within the limit, and nothing is kept of a key that has none (S18)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.fairness.limits import KeyedLimit, _Line, outlasting
from tests.effort import examples

LIMIT = 10


class Leaky(KeyedLimit[str]):
    """The wrong implementation: who goes in the moment of its turn keeps its bytes."""

    async def take(self, key: str, amount: int = 1) -> None:
        line = self._lines.setdefault(key, _Line())
        line.waiting[turn := asyncio.get_running_loop().create_future()] = amount
        self._serve(key, line)
        await turn


class Overtaking(KeyedLimit[str]):
    """The wrong implementation: whatever fits goes first."""

    def _serve(self, key: str, line: _Line) -> None:
        line.waiting = dict(sorted(line.waiting.items(), key=lambda one: one[1]))
        super()._serve(key, line)


async def test_a_key_waits_for_its_own_bytes_and_not_for_those_of_others() -> None:
    limit = KeyedLimit[str](LIMIT)
    await limit.take("a", 6)
    waiting = asyncio.create_task(limit.take("a", 5))
    async with asyncio.timeout(5):
        await limit.take("b", LIMIT)
        await limit.take("a", 0)  # what holds nothing waits for nobody
    assert not waiting.done()
    limit.release("a", 6)
    await waiting
    assert (limit["a"], limit["b"], len(limit)) == (5, LIMIT, 2)
    limit.release("a", 5)
    limit.release("b", LIMIT)
    assert len(limit) == 0


async def test_what_is_larger_than_the_limit_is_alone() -> None:
    limit = KeyedLimit[str](LIMIT)
    await limit.take("a", 5 * LIMIT)
    waiting = asyncio.create_task(limit.take("a", 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    limit.release("a", 5 * LIMIT)
    await waiting


async def order_of(kind: Callable[[int], KeyedLimit[str]]) -> list[int]:
    limit, order = kind(LIMIT), list[int]()
    await limit.take("a", 6)

    async def wait(nbytes: int) -> None:
        await limit.take("a", nbytes)
        order.append(nbytes)

    waiting = [asyncio.create_task(wait(nbytes)) for nbytes in (8, 2)]
    for _ in range(3):
        await asyncio.sleep(0)
    limit.release("a", 6)
    await asyncio.gather(*waiting)
    return order


async def test_a_large_one_is_not_overtaken_by_small_ones() -> None:
    assert await order_of(KeyedLimit[str]) == [8, 2]


async def test_mutant_small_ones_go_first() -> None:
    assert await order_of(Overtaking) == [2, 8]


async def left_by_one_that_goes_in_the_moment_of_its_turn(limit: KeyedLimit[str]) -> int:
    await limit.take("a", LIMIT)
    waiting = asyncio.create_task(limit.take("a", LIMIT))
    await asyncio.sleep(0)
    limit.release("a", LIMIT)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    return limit["a"]


async def test_who_goes_in_the_moment_of_its_turn_leaves_nothing() -> None:
    limit = KeyedLimit[str](LIMIT)
    assert await left_by_one_that_goes_in_the_moment_of_its_turn(limit) == 0
    assert len(limit) == 0


async def test_mutant_bytes_that_nobody_releases_are_left() -> None:
    assert await left_by_one_that_goes_in_the_moment_of_its_turn(Leaky(LIMIT)) == LIMIT


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("take", "take", "cancel", "release")), st.integers(0, 12)), max_size=40))
async def test_in_any_order_no_more_is_out_than_allowed_and_in_the_end_nothing(moves: list[tuple[str, int]]) -> None:
    limit, tasks = KeyedLimit[str](LIMIT), dict[asyncio.Task[None], int]()
    for move, number in moves:
        if move == "take":
            tasks[asyncio.create_task(limit.take("a", number))] = number
        elif tasks:
            task = list(tasks)[number % len(tasks)]
            if move == "cancel":
                task.cancel()
            elif task.done() and not task.cancelled():
                limit.release("a", tasks.pop(task))
        if number % 2:
            await asyncio.sleep(0)
        assert limit["a"] <= LIMIT or limit["a"] in tasks.values(), "beside one that has to be alone"
    while tasks:
        await asyncio.sleep(0)
        for task in [task for task in tasks if task.done()]:
            nbytes = tasks.pop(task)
            if not task.cancelled():
                limit.release("a", nbytes)
    assert len(limit) == 0


# Permits


async def test_a_key_has_so_many_turns_and_others_have_their_own_S18() -> None:
    turns: KeyedLimit[str] = KeyedLimit(2)
    order: list[str] = []

    async def wait(name: str) -> None:
        with await turns.permit("a"):
            order.append(name)

    with await turns.permit("a"), await turns.permit("a"):
        waiting = [asyncio.create_task(wait(name)) for name in ("first", "second", "third")]
        async with asyncio.timeout(5):
            with await turns.permit("b"):
                assert order == []
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        assert len(turns) == 1
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["first", "third"]
    assert len(turns) == 0


async def test_a_turn_lasts_until_what_was_begun_in_it_has_ended() -> None:
    turns: KeyedLimit[str] = KeyedLimit(1)
    begun, go = asyncio.Event(), asyncio.Event()

    async def last() -> None:
        with outlasting():
            begun.set()
            await go.wait()

    turn = await turns.permit("a")
    with turn.current():
        lasting = asyncio.create_task(last())
        await begun.wait()
    following = asyncio.create_task(turns.permit("a"))
    await asyncio.sleep(0)
    assert not following.done()
    go.set()
    await lasting
    assert turn.is_over
    with await following:
        assert len(turns) == 1
    assert len(turns) == 0


async def test_what_begins_after_its_turn_does_not_end_it_twice() -> None:
    turns: KeyedLimit[str] = KeyedLimit(1)

    async def late() -> None:
        with outlasting():
            pass

    with (await turns.permit("a")).current():
        task = asyncio.create_task(late())
    with await turns.permit("a"):
        await task
        assert len(turns) == 1
    assert len(turns) == 0
