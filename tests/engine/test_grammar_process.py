"""A process for grammars that does not start: the worker ends meanwhile, or the system has none left."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from semel.engine.vllm.grammars import process
from semel.engine.vllm.grammars.child import Setup
from semel.engine.vllm.grammars.process import GrammarProcess
from semel.errors import NotReady


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_process_that_does_not_start_leaves_no_socket(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a worker cannot listen at its address while the spare process starts."""
    sockets: list[socket.socket] = []
    begun, make_pair = asyncio.Event(), socket.socketpair

    def recorded_pair() -> tuple[socket.socket, socket.socket]:
        sockets.extend(made := make_pair())
        return made

    async def start(*_: object) -> None:
        begun.set()
        if is_cancelled:
            await asyncio.Event().wait()
        raise OSError(errno.EAGAIN, "no process left")

    monkeypatch.setattr(socket, "socketpair", recorded_pair)
    monkeypatch.setattr(process, "start_program", start)
    starting = asyncio.create_task(GrammarProcess.start(Setup("", True, 1, 1, 1, 1, 1, 1, 1)))
    await begun.wait()
    if is_cancelled:
        starting.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else NotReady):
        await starting
    assert [one.fileno() for one in sockets] == [-1, -1]
