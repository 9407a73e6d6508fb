"""S21: valid but dear. One tenant's sequences do not stand before everybody else's in the engine's queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from semel.fairness.turns import EngineWindow
from tests.waiting import until
from tests.worker.test_turns import SEQUENCES, WINDOW, Shop, shop

DEAR = 256
"""Sequences."""


async def steps_of(made: Shop, task: asyncio.Task[int], number: int = 1) -> int:
    """The engine's steps until it has answered so many requests of globex; its last answer may take its time."""
    steps = 0
    while not is_generated(made, number):
        made.engine.advance()
        steps += 1
        for _ in range(3):
            await asyncio.sleep(0.001)
    await until(task.done)
    return steps


def is_generated(made: Shop, number: int) -> bool:
    """Whether the engine has got so many requests of globex, and has no token of theirs left to generate."""
    arrived = {one for one in made.engine.arrivals if one.startswith("globex-")}
    return len(arrived) == number and not any(one.left for one in made.engine.streams if one.request_id in arrived)


async def wait_of_another(folder: Path, window: EngineWindow | None, **dear: int) -> tuple[int, int]:
    """The steps that a tenant's 16 tokens take behind 256 sequences of another; and how many of these are left."""
    async with shop(folder, window, is_stepping=False) as made:
        sent = made.start("acme", DEAR // dear.get("n", 1), **dear)
        await until(lambda: made.waiting + len(made.engine.streams) == len(sent))
        (other,) = made.start("globex", 1, max_tokens=16)
        await until(lambda: made.waiting + len(made.engine.streams) == len(sent) + 1)
        steps = await steps_of(made, other)
        left = sum(not task.done() for task in sent)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        return steps, left


@pytest.mark.parametrize("dear", [{}, {"n": 4}, {"n": 7}])
async def test_a_tenant_s_first_request_is_answered_before_the_last_of_another_s_256_S21(
    tmp_path: Path, dear: dict[str, int]
) -> None:
    steps, left = await wait_of_another(tmp_path, WINDOW, max_tokens=40, **dear)
    assert steps <= 16 + 40 + 4  # one answer of the other's may have to end first, and messages take a moment
    assert left >= 0.8 * DEAR // dear.get("n", 1)


async def test_mutant_in_order_of_arrival_it_waits_for_all_of_them(tmp_path: Path) -> None:
    steps, left = await wait_of_another(tmp_path, None, max_tokens=10)
    assert steps > DEAR * 10 // SEQUENCES
    assert left == 0


async def test_while_both_send_a_short_request_does_not_wait_for_the_end_of_a_long_one_S21(tmp_path: Path) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        assert await asyncio.gather(*made.start("globex", 1, max_tokens=1), steps_of_first(made)) == [1, 1]
        sent = made.start("acme", DEAR, max_tokens=100_000)
        await until(lambda: made.waiting == DEAR - WINDOW.common_places)
        for number in range(2, 7):
            await until(lambda: made.waiting + len(made.engine.streams) == DEAR)
            (other,) = made.start("globex", 1, max_tokens=16)
            await until(lambda: made.waiting + len(made.engine.streams) == DEAR + 1)
            assert await steps_of(made, other, number) <= 16 + 4
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)


async def steps_of_first(made: Shop) -> int:
    await until(lambda: bool(made.engine.streams))
    made.engine.advance()
    return 1
