"""A process for grammars whose start is cancelled, as that of the spare when a worker cannot listen meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest

from semel.engine.vllm.grammars import process
from semel.engine.vllm.grammars.child import Setup


async def test_a_start_that_is_cancelled_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        await asyncio.Event().wait()

    pair = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    monkeypatch.setattr(process, "start_program", start)
    starting = asyncio.create_task(process.GrammarProcess.start(Setup("", True, 1, 1, 1, 1, 1, 1, 1)))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [one.fileno() for one in pair] == [-1, -1]
