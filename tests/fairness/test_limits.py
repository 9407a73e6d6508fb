"""Permits: they last as long as what was begun under them. The amounts of a limit are in `test_machine.py` (S18)."""

from __future__ import annotations

import asyncio

from semel.fairness.limits import KeyedLimit, outlasting


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
