"""Sockets that share the time of an iteration of the loop: nobody waits for all of them, and they take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import zmq

from semel.wire.codec import Frames
from semel.wire.zmq.loop import LoopSocket, ReadBudget
from tests.waiting import until

SOCKETS = 8
MESSAGES = 12


class Reader:
    """Sockets with messages that wait to be read; each takes a second of a clock that only they move."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], budget: Callable[[Reader], ReadBudget | None]) -> None:
        self.now = 0.0
        self.read: list[int] = []
        self.iterations: list[int] = []
        """How many messages were read in each iteration of the loop."""

        self.most_waiting = 0
        self._sockets = []
        self._senders = []
        self._budget = shared = budget(self)
        for number in range(SOCKETS):
            receiver, sender = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            receiver.bind(f"inproc://{id(self)}.{number}")
            sender.connect(f"inproc://{id(self)}.{number}")
            for _ in range(MESSAGES):
                sender.send(b"%d" % number)
            self._senders.append(sender)
            self._sockets.append(LoopSocket(receiver, self._on_message, shared))
        self._count()

    async def finish(self) -> None:
        await until(lambda: len(self.read) == SOCKETS * MESSAGES)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for sender in self._senders:
            sender.close(0)

    def _on_message(self, frames: Frames) -> None:
        self.read.append(int(bytes(frames[0])))
        self.now += 1.0

    def _count(self) -> None:
        self.iterations.append(len(self.read) - sum(self.iterations))
        if self._budget is not None:
            for socket in self._sockets:
                socket._read()  # as a loop that tells again and again what is not read yet
            self.most_waiting = max(self.most_waiting, len(self._budget._waiting))
        if len(self.read) < SOCKETS * MESSAGES:
            asyncio.get_running_loop().call_soon(self._count)


def _shared(reader: Reader) -> ReadBudget:
    return ReadBudget(4.5, lambda: reader.now)


def _each(reader: Reader) -> None:
    """No budget: every socket reads what it can."""


class Queue(ReadBudget):
    """Mutant: who has waited goes on until it has read all."""

    def wait(self, read: Callable[[], None]) -> None:
        self._waiting.appendleft(read)


async def read_all(budget: Callable[[Reader], ReadBudget | None]) -> Reader:
    with zmq.Context() as context:
        reader = Reader(context, budget)
        try:
            await reader.finish()
        finally:
            reader.close()
    return reader


@pytest.mark.parametrize("budget", [_shared, _each], ids=["shipped", "control"])
async def test_an_iteration_reads_no_more_than_its_time_allows(
    budget: Callable[[Reader], ReadBudget | None],
) -> None:
    """Control: without a budget all sockets are read in one iteration."""
    reader = await read_all(budget)
    assert (max(reader.iterations) <= 2 * 5) == (budget is _shared)
    assert reader.most_waiting <= SOCKETS, "nobody waits twice"
    assert sorted(reader.read) == sorted(list(range(SOCKETS)) * MESSAGES)


@pytest.mark.parametrize("kind", [ReadBudget, Queue], ids=["shipped", "mutant"])
async def test_those_who_wait_take_turns(kind: type[ReadBudget]) -> None:
    """All have been read from before any has been read from for long."""
    reader = await read_all(lambda reader: kind(4.5, lambda: reader.now))
    first = max(reader.read.index(number) for number in range(SOCKETS))
    assert (first < 3 * SOCKETS) == (kind is ReadBudget)
