"""What a store of encoder outputs may answer, also a hostile one: it is read exactly, or refused.

The first record says what was asked for, and in what pieces the answer comes; the second is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from semel.embeddings.protocol import StoreDown, StoreError
from semel.embeddings.replies import Refusal, Replies
from semel.embeddings.seal import Header
from tools.fuzz.mutation import edited_records
from tools.fuzz.oracle import bounded, check_message, expect
from tools.fuzz.records import join, split

_BOUND_BYTES: Final = 1 << 18
_MAX_SMALL: Final = 100
_WORDS: Final = (
    *(b"+OK\r\n", b"$-1\r\n", b"$5\r\n", b"\r\n", b":1\r\n", b"-OOM x\r\n", b"*1\r\n", b"$536870912\r\n", b"-1"),
)


class _End(StoreDown):
    """There are no more bytes."""


class _Answer:
    """Bytes that come in pieces of one size."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data = data
        self.step = step
        self.position = 0

    def receive(self, target: memoryview) -> int:
        piece = self.data[self.position : self.position + min(self.step, target.nbytes)]
        if not piece:
            raise _End
        target[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def run(data: bytes) -> None:
    asked, said = [*split(data), b"", b""][:2]
    header = Header.unpack(said)
    expect(header is None or header.pack() == said, "a header is read that was not written so")
    step = 1 + (asked[0] if asked else 0)
    for read in _READERS:
        answer = _Answer(said, step)
        replies = Replies(answer.receive)
        canonical = b""
        with bounded(_BOUND_BYTES):
            try:
                for _ in range(4):
                    canonical += read(replies)
            except Refusal as refusal:
                check_message(refusal.error())
                expect(isinstance(refusal.error(), StoreError), "a refusal is no error of ours")
            except StoreError as error:
                check_message(error)
        expect(said.startswith(canonical), f"{said!r} is read as {canonical!r}")


def _read_word(replies: Replies) -> bytes:
    replies.simple(b"OK")
    return b"+OK\r\n"


def _read_stored(replies: Replies) -> bytes:
    return b"+OK\r\n" if replies.is_stored() else b"$-1\r\n"


def _read_count(replies: Replies) -> bytes:
    return b":%d\r\n" % replies.count()


def _read_value(replies: Replies) -> bytes:
    length = replies.length()
    if length is None:
        return b"$-1\r\n"
    value = bytearray(min(length, _MAX_SMALL))
    replies.fill(memoryview(value))
    if length > _MAX_SMALL:
        replies.skip(length - _MAX_SMALL)
        raise _End  # what was skipped cannot be compared
    replies.end()
    return b"$%d\r\n%b\r\n" % (length, bytes(value))


_READERS: Final[tuple[Callable[[Replies], bytes], ...]] = (_read_word, _read_stored, _read_count, _read_value)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Put a word of the protocol somewhere into the answer."""
    records = split(data)
    if len(records) < 2 or random.random() < 0.3:
        return join(edited_records(records, random))
    at = random.randint(0, len(records[1]))
    until = random.choice([at, random.randint(at, len(records[1]))])
    records[1] = records[1][:at] + random.choice(_WORDS) + records[1][until:]
    return join(records)


def seeds() -> Mapping[str, bytes]:
    """Every kind of answer."""
    answers = {
        "stored": b"+OK\r\n$-1\r\n+OK\r\n",
        "values": b"$5\r\nhello\r\n$-1\r\n$0\r\n\r\n:12\r\n",
        "full": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        "header": Header((16, 32, "torch.float32"), bytes(range(16))).pack(),
    }
    return {name: join([b"\x03", answer]) for name, answer in answers.items()}
