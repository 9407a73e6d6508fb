"""Turns: so many at a time for each key, in order, and nothing is kept of a key that nobody uses (S18)."""

from __future__ import annotations

import asyncio

from semel.media.fetch.keyed_limit import KeyedLimit, outlasting


async def test_a_key_has_so_many_turns_and_others_have_their_own_S18() -> None:
    turns: KeyedLimit[str] = KeyedLimit(2)
    order: list[str] = []

    async def wait(name: str) -> None:
        with await turns.take("a"):
            order.append(name)

    with await turns.take("a"), await turns.take("a"):
        waiting = [asyncio.create_task(wait(name)) for name in ("first", "second", "third")]
        async with asyncio.timeout(5):
            with await turns.take("b"):
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

    turn = await turns.take("a")
    with turn.current():
        lasting = asyncio.create_task(last())
        await begun.wait()
    following = asyncio.create_task(turns.take("a"))
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

    with (await turns.take("a")).current():
        task = asyncio.create_task(late())
    with await turns.take("a"):
        await task
        assert len(turns) == 1
    assert len(turns) == 0
