"""Drives a load, many requests at a time, and tallies what came of it. A client that can leave at any byte."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from semel.errors import WorkerLost
from tools.fleet.plan import TOKENS, Ask, Chat, Kind, body_of

REQUEST_S = 120.0
PROGRESS_S = 2.0
WRONG = "answered"
CUT_OFF = "cut off"

Reference = dict[Chat, Any]
"""What every chat was answered when nothing else was asked."""


@dataclass(slots=True)
class Tally:
    """What came of a load."""

    good: int = 0
    refused: int = 0
    aborted: int = 0

    failures: list[str] = field(default_factory=list)
    """Good requests without the right answer, and others that were not refused or begun as they should."""

    lost: list[str] = field(default_factory=list)
    """Requests whose frontend was killed while it answered them, and streams that had begun when their worker was."""

    latencies_s: list[float] = field(default_factory=list)
    """Of the good ones, from their first byte to the last of the answer."""

    seconds: float = 0.0

    @property
    def answered(self) -> int:
        return self.good + self.refused + self.aborted + len(self.failures) + len(self.lost)

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0


class Driver:
    """Asks what is planned.

    `gone` are the addresses of frontends that have been killed: nobody answers there. A worker that is killed may cut
    off streams that had begun, with the right tokens and the right error, and nothing else.
    """

    def __init__(
        self,
        urls: Sequence[str],
        images: Sequence[bytes],
        reference: Reference,
        *,
        at_a_time: int,
        compared: Callable[[Any], Any] | None = None,
    ) -> None:
        """`compared` is what has to be the same of an answer; everything unless it is given."""
        self._compared = compared or essence
        self.tally = Tally()
        self.gone: set[str] = set()
        self.killed_workers = 0
        self._urls = list(urls)
        self._images = images
        self._reference = reference
        self._room = asyncio.Semaphore(at_a_time)
        self._changed = asyncio.Condition()

    async def run(self, asks: Sequence[Ask], *, progress: bool = False) -> Tally:
        """Ask all of it."""
        began = time.monotonic()
        telling = asyncio.create_task(self._tell(len(asks), began)) if progress else None
        try:
            async with asyncio.TaskGroup() as group:
                for ask in asks:
                    await self._room.acquire()
                    group.create_task(self._one(ask))
        finally:
            if telling is not None:
                telling.cancel()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    async def until_answered(self, count: int) -> None:
        """Wait until so many requests have come to an end."""
        async with asyncio.timeout(REQUEST_S), self._changed:
            await self._changed.wait_for(lambda: self.tally.answered >= count)

    async def _one(self, ask: Ask) -> None:
        url = self._urls[ask.frontend % len(self._urls)]
        killed_before = self.killed_workers
        try:
            async with asyncio.timeout(REQUEST_S):
                fault = await self._ask(url, ask)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            self._room.release()
        if fault is not None:
            told = f"{ask.kind.value}, images {ask.chat}, {url}: {fault}"
            cut_off = url in self.gone or (self.killed_workers > killed_before and fault.startswith(CUT_OFF))
            lost = cut_off and not fault.startswith(WRONG)  # nobody who is killed may answer wrongly before
            (self.tally.lost if lost else self.tally.failures).append(told)
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, url: str, ask: Ask) -> str | None:
        """What went wrong, if anything did."""
        body = body_of(ask, self._images)
        began = time.monotonic()
        match ask.kind:
            case Kind.GOOD:
                status, answer = await exchange(url, body)
                if status != 200:
                    return f"status {status}: {answer!r}"
                if (given := self._compared(answer)) != (expected := self._reference[ask.chat]):
                    return f"{WRONG} {given}, alone {expected}"
                self._count_good(began)
            case Kind.STREAMED:
                given, error = await exchange_stream(url, body)
                if (fault := fault_of(given, error, self._reference[ask.chat])) is not None:
                    return fault
                self._count_good(began)
            case Kind.REFUSED:
                status, answer = await exchange(url, body)
                if status != 400:
                    return f"status {status} instead of 400: {answer!r}"
                self.tally.refused += 1
            case Kind.LEFT_EARLY | Kind.LEFT_AT_ONCE:
                if (fault := await leave(url, body, with_first_event=ask.kind is Kind.LEFT_EARLY)) is not None:
                    return fault
                self.tally.aborted += 1
        return None

    def _count_good(self, began: float) -> None:
        self.tally.good += 1
        self.tally.latencies_s.append(time.monotonic() - began)

    async def _tell(self, requests: int, began: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            tally = self.tally
            rate = tally.answered / (time.monotonic() - began)
            line = f"{tally.answered:,} of {requests:,}, {rate:.0f}/s, {len(tally.failures)} failed"
            sys.stderr.write(f"{line}\n")


async def ask_alone(
    urls: Sequence[str],
    chats: Sequence[Chat],
    images: Sequence[bytes],
    *,
    tokens: int = TOKENS,
    compared: Callable[[Any], Any] | None = None,
) -> Reference:
    """The answer to every chat, one after another."""
    reference: Reference = {}
    for index, chat in enumerate(chats):
        status, answer = await exchange(urls[index % len(urls)], body_of(Ask(chat, 0, tokens=tokens), images))
        assert status == 200, f"images {chat} alone: status {status}, {answer!r}"
        reference[chat] = (compared or essence)(answer)
    return reference


async def exchange(url: str, body: bytes) -> tuple[int, Any]:
    """Send a chat; the status and the body of the answer."""
    reader, writer = await _send(url, body)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    finally:
        await _close(writer)
    status = int(head.split(b" ", 2)[1])
    return status, json.loads(rest) if rest.startswith(b"{") else rest


async def exchange_stream(url: str, body: bytes) -> tuple[Any, Any]:
    """Send a chat that is streamed; the essence of what came of it, and the error that ended it."""
    reader, writer = await _send(url, body)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    finally:
        await _close(writer)
    token_ids: list[int] = []
    text, error = "", None
    likely: list[list[tuple[str, float]]] = []
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        return (token_ids, text, likely), rest
    for line in rest.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        error = event.get("error") or error
        for choice in event.get("choices", ()):
            token_ids += choice.get("token_ids") or ()
            text += choice["delta"].get("content") or ""
            likely += _likely(choice)
    return (token_ids, text, likely), error if error or b"data: [DONE]" in rest else "it has no end"


def fault_of(given: Any, error: Any, expected: Any) -> str | None:
    """What is wrong with a stream: all of it must be as expected, or the beginning if it was cut off."""
    token_ids, text, _ = given
    if error is None:
        return None if given == expected else f"{WRONG} {given}, alone {expected}"
    if token_ids != expected[0][: len(token_ids)] or not expected[1].startswith(text):
        return f"{WRONG} {given} and then {error!r}, alone {expected}"
    is_loss = isinstance(error, dict) and error.get("code") == WorkerLost.code
    return f"{CUT_OFF if is_loss and token_ids else 'ended'} after {len(token_ids)} tokens: {error!r}"


async def leave(url: str, body: bytes, *, with_first_event: bool) -> str | None:
    """Send a chat and go away, at once or with the first event of the stream; what came instead of one."""
    reader, writer = await _send(url, body)
    try:
        if not with_first_event:
            return None
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            return f"no stream: {(head + await reader.read())!r}"
        first = await reader.readuntil(b"\n\n")
        return f"no stream: {first!r}" if b'"error"' in first else None
    finally:
        writer.transport.abort()


def essence(answer: Any) -> Any:
    """What has to be the same whenever it is asked: token ids, text, and the most likely tokens at every place."""
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["message"]["content"], _likely(choice)


def token_ids(answer: Any) -> Any:
    """What of it an engine without a model repeats; its words have the time in them."""
    (choice,) = answer["choices"]
    return choice["token_ids"]


def _likely(choice: Any) -> list[list[tuple[str, float]]]:
    steps = (choice.get("logprobs") or {}).get("content") or ()
    return [[(entry["token"], entry["logprob"]) for entry in step["top_logprobs"]] for step in steps]


async def _send(url: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return
