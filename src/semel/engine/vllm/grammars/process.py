"""The worker's side of `child`: starts it, sends it grammars, and reads what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from typing import Final, Self

import msgspec

from semel.engine.vllm.grammars.child import HEADER, PING, REPLY, Job, Outcome, Setup
from semel.errors import NotReady
from semel.processing.pool.command import start as start_program

__all__ = ["GrammarProcess"]

_MODULE: Final = "semel.engine.vllm.grammars.child"
_START_S: Final = 120.0
_GRACE_S: Final = 10.0
"""Seconds beyond its limits after which the process of a job counts as lost."""

_PING_INTERVAL_S: Final = 1.0
_PING_TIMEOUT_S: Final = 4.0
_MAX_MISSED_PINGS: Final = 2
"""One may be late because this process was: of two, the second one had an event loop that ran."""

_LOST: Final = "grammars cannot be compiled at the moment; the worker's log says why: send the request again"

logger = logging.getLogger(__name__)


class GrammarProcess:
    """A process that compiles grammars on trial. Made by `start`, ended by `close`."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, setup: Setup
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._patience_s = setup.wall_s + _GRACE_S
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Outcome, int]]] = {}
        self._reading = asyncio.create_task(self._read())
        self._pinging: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, setup: Setup) -> Self:
        """Start one, and wait until it has read the tokenizer."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await start_program(_MODULE, [theirs.fileno()], ())
            except BaseException as error:  # also if the worker ends meanwhile
                ours.close()
                if isinstance(error, OSError):
                    raise NotReady(_LOST) from error
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        started = cls(process, reader, writer, setup)
        try:
            await started._send(0, setup, _START_S)
        except BaseException:
            await started.close()
            raise
        started._pinging = asyncio.create_task(started._ping())
        return started

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """True if it answers no more."""
        return self._reading.done() or self._writer.is_closing()

    async def compile(self, kind: str, text: str) -> tuple[Outcome, int]:
        """Compile a grammar on trial; what became of it, and how many bytes it takes at most if it was compiled."""
        number = next(self._numbers)
        return await self._send(number, Job(number, kind, text), self._patience_s)

    async def close(self) -> None:
        """End it, and all that it compiles."""
        self._end()
        await self._process.wait()
        await asyncio.gather(self._reading, *filter(None, [self._pinging]), return_exceptions=True)

    async def _send(self, number: int, message: Setup | Job, within_s: float) -> tuple[Outcome, int]:
        outcome: asyncio.Future[tuple[Outcome, int]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = outcome
        body = msgspec.msgpack.encode(message)
        try:
            if self.is_lost:
                raise NotReady(_LOST)
            self._writer.write(HEADER.pack(len(body)) + body)
            async with asyncio.timeout(within_s):
                await self._writer.drain()
                return await outcome
        except (OSError, RuntimeError, TimeoutError) as error:  # uvloop raises RuntimeError for a closed writer
            self._writer.close()
            raise NotReady(_LOST) from error
        finally:
            self._waiting.pop(number, None)

    async def _ping(self) -> None:
        """End the process when it answers no more: it may be stopped, and its pipe stays open."""
        missed = 0
        while missed < _MAX_MISSED_PINGS:
            await asyncio.sleep(_PING_INTERVAL_S)
            try:
                async with asyncio.timeout(_PING_TIMEOUT_S):
                    await self.compile(PING, "")
                missed = 0
            except TimeoutError:
                missed += 1
            except NotReady:
                return
        logger.warning("the process that compiles grammars does not answer: it is ended, and another one takes over")
        self._end()

    async def _read(self) -> None:
        try:
            while True:
                number, outcome, bits = REPLY.unpack(await self._reader.readexactly(REPLY.size))
                if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result((Outcome(outcome), (1 << bits) - 1))
        except (EOFError, OSError):
            pass
        finally:
            self._end()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(NotReady(_LOST))

    def _end(self) -> None:
        if self._pinging is not None and self._pinging is not asyncio.current_task():
            self._pinging.cancel()
        self._writer.close()
        if self._process.returncode is not None:
            return  # what it forked ends by itself, and the id may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
