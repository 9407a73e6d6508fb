"""Links that share the time of an iteration of the loop: nobody waits for all of them, and they take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import zmq

from semel.wire.codec import Frames
from semel.wire.zmq.loop import Alarm, LoopBudget, LoopSocket
from tests.waiting import until

SOCKETS = 8
MESSAGES = 12


class Reader:
    """Sockets with messages that wait to be read; each takes a second of a clock that only they move."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], budget: Callable[[Reader], LoopBudget | None]) -> None:
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


def _shared(reader: Reader) -> LoopBudget:
    return LoopBudget(4.5, lambda: reader.now)


def _each(reader: Reader) -> None:
    """No budget: every socket reads what it can."""


class Queue(LoopBudget):
    """Mutant: who has waited goes on until it has read all."""

    def wait(self, read: Callable[[], None]) -> None:
        self._waiting.appendleft(read)


async def read_all(budget: Callable[[Reader], LoopBudget | None]) -> Reader:
    with zmq.Context() as context:
        reader = Reader(context, budget)
        try:
            await reader.finish()
        finally:
            reader.close()
    return reader


@pytest.mark.parametrize("budget", [_shared, _each], ids=["shipped", "control"])
async def test_an_iteration_reads_no_more_than_its_time_allows(
    budget: Callable[[Reader], LoopBudget | None],
) -> None:
    """Control: without a budget all sockets are read in one iteration."""
    reader = await read_all(budget)
    assert (max(reader.iterations) <= 2 * 5) == (budget is _shared)
    assert reader.most_waiting <= SOCKETS, "nobody waits twice"
    assert sorted(reader.read) == sorted(list(range(SOCKETS)) * MESSAGES)


@pytest.mark.parametrize("kind", [LoopBudget, Queue], ids=["shipped", "mutant"])
async def test_those_who_wait_take_turns(kind: type[LoopBudget]) -> None:
    """All have been read from before any has been read from for long."""
    reader = await read_all(lambda reader: kind(4.5, lambda: reader.now))
    first = max(reader.read.index(number) for number in range(SOCKETS))
    assert (first < 3 * SOCKETS) == (kind is LoopBudget)


class Rings:
    """Alarms that are due at once; hearing one takes a second of a clock that only they move."""

    def __init__(self, *, has_budget: bool, cancelled: int = 0) -> None:
        self.now = 0.0
        self._cancelled = cancelled
        self.each: list[int] = []
        """How many were heard in each iteration of the loop."""

        self._budget = LoopBudget(4.5, lambda: self.now) if has_budget else None
        self._loop = asyncio.get_running_loop()
        self.alarms = [Alarm(self._hear, self._budget) for _ in range(SOCKETS * MESSAGES)]
        for alarm in self.alarms:
            alarm.set(self._loop.time())
        self._count()

    async def finish(self, rings: int) -> None:
        await until(lambda: sum(self.each) >= rings)
        for _ in range(3):
            await asyncio.sleep(0)
        assert sum(self.each) == rings

    def _hear(self) -> None:
        self.now += 1.0
        if self.now == SOCKETS:  # by now the others wait
            for alarm in self.alarms[len(self.alarms) - self._cancelled :]:
                alarm.cancel()
        self.each[-1] += 1

    def _count(self) -> None:
        self.each.append(0)
        if len(self.each) < 10_000:
            self._loop.call_soon(self._count)


@pytest.mark.parametrize("has_budget", [True, False], ids=["shipped", "control"])
async def test_alarms_that_are_due_together_share_the_time_of_an_iteration(has_budget: bool) -> None:
    rings = Rings(has_budget=has_budget)
    await rings.finish(len(rings.alarms))
    assert (max(rings.each) <= 2 * 5) == has_budget


async def test_an_alarm_that_is_cancelled_while_it_waits_does_not_ring() -> None:
    rings = Rings(has_budget=True, cancelled=3)
    await rings.finish(len(rings.alarms) - 3)


class Unwatched(LoopSocket):
    """Mutant: it is watched again only if its turn went well."""

    def _take_turn(self) -> None:
        self.is_waiting = False
        self._read()
        if not self.is_waiting:
            self._watch()


@pytest.mark.parametrize("kind", [LoopSocket, Unwatched], ids=["shipped", "mutant"])
async def test_a_socket_whose_turn_raises_is_watched_again(kind: type[LoopSocket]) -> None:
    def raise_it(_: Frames) -> None:
        raise ValueError("a fault of ours")

    with zmq.Context() as context, context.socket(zmq.PAIR) as receiver, context.socket(zmq.PAIR) as sender:
        receiver.bind(f"inproc://{id(sender)}")
        sender.connect(f"inproc://{id(sender)}")
        socket = kind(receiver, raise_it, LoopBudget())
        socket.is_waiting = True
        socket._unwatch()
        sender.send(b"one")
        with pytest.raises(ValueError, match="ours"):
            socket._take_turn()
        assert socket._is_watched == (kind is LoopSocket)
        socket.close()
