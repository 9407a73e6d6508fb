"""How a process ends: once in good order, twice at once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from semel.shutdown import ShutdownSignal


async def test_the_first_signal_asks_and_the_second_ends_what_is_still_done() -> None:
    stopping, gone = ShutdownSignal(), asyncio.Event()

    async def drain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    stopping.ask()
    assert await stopping.wait()
    ending = asyncio.create_task(stopping.unless_forced(drain()))
    await asyncio.sleep(0)
    assert not ending.done()
    stopping.ask()
    async with asyncio.timeout(10):
        await ending
    assert gone.is_set()


async def test_what_ends_by_itself_was_not_asked_to() -> None:
    async def work() -> None:
        return

    async with asyncio.timeout(10):
        assert not await ShutdownSignal().wait(asyncio.create_task(work()))


async def test_a_fault_while_ending_is_told() -> None:
    async def drain() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await ShutdownSignal().unless_forced(drain())


async def test_it_hears_the_signals_of_its_process() -> None:
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    stopping = ShutdownSignal.listening()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await stopping.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, before)
