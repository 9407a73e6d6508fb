"""A gate for writes: many together, or one alone, in the order in which they come."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from semel.errors import MediaStoreUnavailable
from semel.store.write_gate import WriteGate


async def through(gate: AbstractAsyncContextManager[None], name: str, log: list[str], let: asyncio.Event) -> None:
    async with gate:
        log.append(name)
        await let.wait()
        log.append(f"{name} ends")


async def turns() -> None:
    """Let everybody go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_alone_waits_for_those_before_it_and_those_after_it_wait_for_it() -> None:
    gate, log = WriteGate(), list[str]()
    lets = [asyncio.Event() for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        group.create_task(through(gate.together(), "a", log, lets[0]))
        group.create_task(through(gate.together(), "b", log, lets[1]))
        await turns()
        group.create_task(through(gate.alone(), "alone", log, lets[2]))
        await turns()
        group.create_task(through(gate.together(), "c", log, lets[3]))
        for let in lets:
            await turns()
            let.set()
    assert log == ["a", "b", "a ends", "b ends", "alone", "alone ends", "c", "c ends"]


async def test_who_leaves_while_it_waits_or_fails_inside_holds_nobody_up() -> None:
    gate, log, let = WriteGate(), list[str](), asyncio.Event()
    first = asyncio.create_task(through(gate.together(), "a", log, let))
    await turns()
    waiting = [asyncio.create_task(through(kind(), "x", log, let)) for kind in (gate.alone, gate.alone, gate.together)]
    await turns()
    for task in (*waiting, first):
        task.cancel()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    let.set()
    await through(gate.alone(), "b", log, let)
    await through(gate.together(), "c", log, let)
    assert log == ["a", "b", "b ends", "c", "c ends"]


async def test_a_wait_that_is_too_long_is_an_answer() -> None:
    gate, log, let = WriteGate(0.01), list[str](), asyncio.Event()
    async with gate.alone():
        with pytest.raises(MediaStoreUnavailable, match="is being cleared; try again"):
            await through(gate.together(), "a", log, let)
    let.set()
    await through(gate.together(), "a", log, let)
    assert log == ["a", "a ends"]
