"""The client of `semel bench streams`: many open streams over real sockets. It checks every token of each.

Run as a process of its own, `python -m semel.lab.bench.stream_client URL MODEL STREAMS TOKENS RATE`, it prints the line
"open" when every stream has begun, and one JSON object at its end. It parses as little as possible, so that the
measurement is the frontend's: it finds words by their marks (`semel.lab.testing.pacing.word`).
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

__all__ = ["StreamReader", "Tally", "main", "run"]

_WORD: Final = re.compile(rb'"content":" (\d+)@(\d+)"')
_END: Final = b"data: [DONE]"
_LONGEST: Final = 64
"""The maximum length of a match: the reader keeps this many bytes, because a match may continue in the next chunk."""

_AT_ONCE: Final = 64
"""Maximum number of streams that open at the same time."""

_OPEN_S: Final = 20.0
_PATIENCE_S: Final = 60.0


@dataclass(slots=True)
class Tally:
    """The results of all streams together."""

    opened: int = 0
    complete: int = 0
    """Streams that had every token, in order, and their end."""

    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    """The delay of every token from the engine to this process."""


class StreamReader(asyncio.Protocol):
    """One request over one connection."""

    def __init__(self, request: bytes, tokens: int, tally: Tally) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tokens = tokens
        self._tally = tally
        self._next = 0
        self._rest = b""
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Find the words in a chunk of the response."""
        now = time.monotonic_ns() / 1e9
        data, tally = self._rest + data, self._tally
        end = 0
        for found in _WORD.finditer(data):
            if int(found[1]) != self._next:
                tally.faults.append(f"word {int(found[1])} came where {self._next} was due")
            self._next += 1
            tally.tokens += 1
            tally.delays_s.append(now - int(found[2]) / 1e6)
            end = found.end()
        if not self.begun.done():
            if not data.startswith(b"HTTP/1.1 200"):
                tally.faults.append(f"refused: {data[:300]!r}")
                self._transport.close()
                return
            self.begun.set_result(None)
            tally.opened += 1
        if not self._done and _END in data:
            self._done = True
            tally.complete += self._next == self._tokens
            self._transport.close()
        self._rest = data[max(end, len(data) - _LONGEST) :]

    def connection_lost(self, _: Exception | None) -> None:
        """End the wait for this stream."""
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_result(None)


def _request(host: str, model: str, tokens: int) -> bytes:
    chat = {"model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": tokens, "stream": True}
    body = json.dumps(chat).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _open(address: Sequence[str], request: bytes, tokens: int, tally: Tally) -> StreamReader:
    host, port = address
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: StreamReader(request, tokens, tally), host, int(port)
    )
    async with asyncio.timeout(_OPEN_S):
        await stream.begun
    return stream


async def run(url: str, model: str, streams: int, tokens: int, rate: float) -> Tally:
    """Open the streams, and read them to their ends."""
    where = urlsplit(url).netloc
    address, request, tally = where.split(":"), _request(where, model, tokens), Tally()
    opened: list[StreamReader] = []
    async with asyncio.timeout(tokens / rate + _PATIENCE_S):
        while len(opened) < streams:
            some = range(min(_AT_ONCE, streams - len(opened)))
            opened += await asyncio.gather(*(_open(address, request, tokens, tally) for _ in some))
        sys.stdout.write("open\n")
        sys.stdout.flush()
        await asyncio.gather(*(stream.ended for stream in opened))
    return tally


def main(url: str, model: str, streams: str, tokens: str, rate: str) -> None:
    """The entry point of the process."""
    import uvloop

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tally = uvloop.run(run(url, model, int(streams), int(tokens), float(rate)))
    delays = sorted(tally.delays_s) or [0.0]
    summary = {
        "opened": tally.opened,
        "complete": tally.complete,
        "tokens": tally.tokens,
        "faults": tally.faults[:20],
        "delay_p50_s": delays[len(delays) // 2],
        "delay_p99_s": delays[int(len(delays) * 0.99)],
        "delay_max_s": delays[-1],
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
