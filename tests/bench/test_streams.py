"""`semel bench streams`, with fewer streams than it is made for: what holds on any machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from semel.lab.bench.stream_client import StreamReader, Tally
from semel.lab.testing.pacing import word

STREAMS = 300


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_every_stream_gets_every_token_in_order() -> None:
    command = [str(Path(sys.executable).parent / "semel"), "bench", "streams", "--json"]
    command += ["--streams", str(STREAMS), "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["streams with every token, in order"]["value"] == STREAMS, done.stderr[-2_000:]
    assert checks["tokens out of order, streams refused"]["value"] == 0
    assert 0 < checks["memory of the frontend for a stream"]["value"] < 100
    # Of a busy machine lags say more than of the frontend, what it works for a token does not.
    assert 0 < checks["work of the frontend for a token"]["value"] < 400
    assert done.returncode == int(not all(check["ok"] for check in checks.values()))


class Closed(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def event(number: int) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % word(number).encode()


async def tally_of(*pieces: bytes, tokens: int) -> Tally:
    tally = Tally()
    reader, transport = StreamReader(b"", tokens, tally), Closed()
    reader.connection_made(transport)
    for piece in pieces:
        reader.data_received(piece)
    reader.connection_lost(None)
    return tally


async def test_the_client_counts_words_wherever_pieces_end() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(map(event, range(5))) + b"data: [DONE]\n\n"
    for size in (7, 64, 1_000):
        starts = range(20, len(answer), size)
        tally = await tally_of(answer[:20], *(answer[start : start + size] for start in starts), tokens=5)
        assert (tally.tokens, tally.complete, tally.faults) == (5, 1, [])


async def test_the_client_sees_what_is_missing_out_of_order_or_refused() -> None:
    head, end = b"HTTP/1.1 200 OK\r\n\r\n", b"data: [DONE]\n\n"
    assert (await tally_of(head, event(0), event(2), end, tokens=3)).faults == ["word 2 came where 1 was due"]
    assert (await tally_of(head, event(0), end, tokens=2)).complete == 0
    assert (await tally_of(b"HTTP/1.1 429 Too Many\r\n\r\n", tokens=2)).opened == 0
