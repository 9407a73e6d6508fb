"""Work in slices, and work that is not broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from semel.aio import at_once, in_slices, to_the_end


def counting(to: int, turns: list[int]) -> Generator[None, None, int]:
    try:
        for number in range(to):
            turns.append(number)
            yield
    finally:
        turns.append(-1)
    return to


async def test_others_have_their_turn_between_two_slices_and_never_without_slices() -> None:
    turns: list[int] = []
    seen: list[int] = []

    async def other() -> None:
        while not turns or turns[-1] != -1:
            seen.append(len(turns))
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    assert await in_slices(counting(50, turns), slice_s=0.0) == 50
    await watching
    assert len(set(seen)) > 40
    assert at_once(counting(50, [])) == 50


async def test_who_is_cancelled_between_two_slices_ends_the_work() -> None:
    turns: list[int] = []
    working = asyncio.create_task(in_slices(counting(1_000, turns), slice_s=0.0))
    for _ in range(3):
        await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert turns[-1] == -1
    assert len(turns) < 100


async def test_work_goes_on_to_its_end_however_often_its_caller_is_cancelled() -> None:
    """The control is broken off."""
    done: list[str] = []
    goes_on = asyncio.Event()

    async def work(name: str) -> None:
        await goes_on.wait()
        done.append(name)

    async def plainly() -> None:
        await work("control")

    whole, control = asyncio.create_task(to_the_end(work("whole"))), asyncio.create_task(plainly())
    for _ in range(3):
        await asyncio.sleep(0)
        whole.cancel()
        control.cancel()
    goes_on.set()
    for task in (whole, control):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == ["whole"]


async def test_its_result_and_its_error_reach_the_caller() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("no")

    async def answer() -> int:
        return 7

    assert await to_the_end(answer()) == 7
    with pytest.raises(KeyError):
        await to_the_end(fail())
    failing = asyncio.create_task(to_the_end(fail()))
    await asyncio.sleep(0)
    failing.cancel()
    with pytest.raises(KeyError):  # rather than the cancellation: something is wrong
        await failing
