"""A server that has no descriptors left waits for some, and does not spin meanwhile."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from semel.web.admission import Admission
from semel.web.listener import Listener
from tests.waiting import until

PAUSES = 3


async def wakeups_while_there_are_no_descriptors(monkeypatch: pytest.MonkeyPatch, *, stops_reading: bool) -> int:
    """How often the event loop is woken by a connection that cannot be accepted, until it was tried some times."""
    loop = asyncio.get_running_loop()
    wakeups, tries = 0, 0
    add_reader, remove_reader = loop.add_reader, loop.remove_reader

    def counted(where: Any, ready: Callable[[], None]) -> None:
        def wake() -> None:
            nonlocal wakeups
            wakeups += 1
            ready()

        add_reader(where, wake)

    async def fail(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Listener, "_accept_burst", fail)
    monkeypatch.setattr(loop, "add_reader", counted)
    if not stops_reading:
        monkeypatch.setattr(loop, "remove_reader", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Listener(server, Admission(16, reserve=1, max_per_address=16), first_s=1)
        accepting = asyncio.create_task(listener.accept(lambda _: asyncio.Protocol()))
        with socket.create_connection(server.getsockname()):
            await until(lambda: tries >= PAUSES)
            accepting.cancel()
            await asyncio.wait({accepting})
        remove_reader(server)
    return wakeups


async def test_without_descriptors_a_listener_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await wakeups_while_there_are_no_descriptors(monkeypatch, stops_reading=True) <= 2 * PAUSES


async def test_control_a_reader_that_stays_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await wakeups_while_there_are_no_descriptors(monkeypatch, stops_reading=False) > 10 * PAUSES
