"""One end of lending in a process of its own: `python -m tests.cache.lending_process PART PATH`.

`borrow` listens, reads leases from its standard input, one per line, and says for each whether the bytes under it were
right all the time; `keep` borrows and never lets go. `lend` lends one feature and says which.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from semel.cache import Borrower, Lease, Lender, SharedCache
from tests.cache.examples import content, digest_of, feature_of

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


async def check(view: memoryview, number: int, delay_s: float) -> bool:
    expected = content(number, 0, NBYTES)
    good = view[:NBYTES] == expected
    await asyncio.sleep(delay_s)
    return good and view[:NBYTES] == expected


async def borrow(path: Path, *, keeps: bool) -> None:
    draw = random.Random(2)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    checks: list[asyncio.Task[bool]] = []
    kept: list[memoryview] = []
    async with Borrower(path) as borrowers:
        say("ready")
        while line := await lines.readline():
            lease, number = from_line(line)
            view = borrowers.borrow(lease)
            if keeps:
                kept.append(view)
                say("kept")
            else:
                checks.append(asyncio.create_task(check(view, number, draw.random() / 100)))
            del view
        good = await asyncio.gather(*checks)
        say(json.dumps({"right": sum(good), "of": len(good)}))


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
        await (lend(path) if part == "lend" else borrow(path, keeps=part == "keep"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
