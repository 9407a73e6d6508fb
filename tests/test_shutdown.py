"""How a process ends: once in good order, twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from semel.shutdown import ShutdownSignal

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@pytest.fixture
async def signals() -> AsyncIterator[None]:
    """What this process does with signals is as before in the end."""
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in HEARD}
    yield
    for number, handler in before.items():
        loop.remove_signal_handler(number)
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", HEARD)
async def test_it_hears_the_signals_of_its_process(number: signal.Signals) -> None:
    """SIGHUP once ended a process at once: no draining, and the key of a run stayed on the disk."""
    signal.signal(number, signal.SIG_DFL)  # these tests may run under `nohup`
    stopping = ShutdownSignal.listening()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(10):
        assert await stopping.wait()


@pytest.mark.usefixtures("signals")
async def test_who_was_started_with_nohup_stays_when_its_terminal_goes() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping = ShutdownSignal.listening()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.05)
    assert not stopping.is_requested
