"""Many streams at once: an engine's step brings a token for each of them, and nobody else has to wait for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from semel.fleet import worker as remote
from semel.fleet.worker import RemoteWorker
from semel.wire.messages import Delta
from semel.wire.zmq import FrontendLink

STREAMS = 2_000


class Step:
    """A link over which one step of an engine comes: a token for each of many requests, all there already."""

    address = "ipc:///nowhere"

    def __init__(self) -> None:
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for number in range(STREAMS):
            self.taken += 1
            yield Delta(str(number), 0, "word", (1,))


async def turns_of_others(link: Step) -> int:
    """How often the event loop came to something else while a step was taken in."""
    turns = 0
    loop = asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        if link.taken < STREAMS:
            turns += 1
            loop.call_soon(turn)

    loop.call_soon(turn)
    async with asyncio.timeout(30):
        await RemoteWorker(cast("FrontendLink", link)).run()
    assert link.taken == STREAMS
    return turns


async def test_others_have_their_turns_while_a_step_of_many_tokens_is_taken_in() -> None:
    assert await turns_of_others(Step()) >= 20


async def test_a_naive_reader_takes_in_the_whole_step_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: as long as there is something to read, awaiting it gives nobody a turn."""
    monkeypatch.setattr(remote, "_TURN", STREAMS + 1)
    assert await turns_of_others(Step()) <= 1
