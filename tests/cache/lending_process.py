"""One end of lending in a process of its own: `python -m tests.cache.lending_process PART PATH`.

`keep` listens, reads leases from its standard input, one per line, borrows each and never lets go. `lend` lends one
feature and says which.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from semel.cache import Borrower, Lease, Lender, SharedCache
from tests.cache.examples import digest_of, feature_of

NBYTES = 6_000


def to_line(lease: Lease, number: int) -> bytes:
    fields = {"id": lease.id, "segment": lease.segment.hex(), "offset": lease.offset, "nbytes": lease.nbytes}
    return json.dumps(fields | {"number": number}).encode() + b"\n"


def from_line(line: bytes) -> tuple[Lease, int]:
    fields = json.loads(line)
    lease = Lease(fields["id"], bytes.fromhex(fields["segment"]), fields["offset"], fields["nbytes"])
    return lease, fields["number"]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def keep(path: Path) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    kept: list[memoryview] = []
    async with Borrower(path) as borrowers:
        say("ready")
        while line := await lines.readline():
            kept.append(borrowers.borrow(from_line(line)[0]))
            say("kept")


async def lend(path: Path) -> None:
    cache = SharedCache.create(1 << 20)
    cache.put(digest_of(1), feature_of(1, NBYTES))
    lender = await Lender.connect(path, cache)
    lease = lender.lend(digest_of(1))
    assert lease is not None
    say(to_line(lease, 1).decode().strip())
    await lender.wait_closed()


async def main(part: str, path: Path) -> None:
    async with asyncio.timeout(90):
        await (lend(path) if part == "lend" else keep(path))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
