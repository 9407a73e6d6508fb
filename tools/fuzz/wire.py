"""A peer that says anything: a session gives events or a reset, and the frontend or worker behind it reads no nonsense.

The first record says who listens (bit 0: a frontend) and whether the session is open (bit 1). A message is a record,
its first byte the number of its buffers (bits 0 and 1), which are the records behind it; epoch and sequence are put
before it as they are due, unless bit 7 says that it has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final, get_args

import msgspec

from semel.core import FeatureInfo
from semel.errors import PromptTooLong, ProtocolError
from semel.ledger import Announcement
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, Frames, decode, encode, pack
from semel.wire.events import Admitted, Event, Opened, Reset
from semel.wire.messages import Accepted, Delta, Lend, Message, Status, Submit, WorkerMessage
from semel.wire.session import Session
from semel.wire.translation import sizes_of, to_announcement, to_layout, to_lease, to_prompt, to_status
from tests.wire import examples
from tests.wire.examples import LAYOUT, SMALL, digest_of, feature_of_rows, frontend_session, submit, worker_session
from tools.fuzz.mutation import edited, edited_records
from tools.fuzz.oracle import Finding, bounded, expect
from tools.fuzz.records import join, split

_GOLDEN: Final = max((Path(examples.__file__).parent / "golden").iterdir(), key=lambda path: int(path.name[1:]))
_TO_FRONTEND: Final = frozenset(kind.__name__.lower() for kind in get_args(WorkerMessage))
_PREFIX_BYTES: Final = 16
_FRONTEND: Final = 1
_OPEN: Final = 2
_BUFFERS: Final = 3
_OWN_PREFIX: Final = 128
_MAX_TOKENS: Final = 1_024
_BOUND_BYTES: Final = 1 << 20
"""What a session with small limits may allocate for a message of a few kilobytes."""

_MAX_ANNOUNCED_TOKENS: Final = 1 << 23
"""Of all layouts in one announcement: as many as a ledger keeps."""

_WORDS: Final[tuple[Any, ...]] = (
    *("image", "audio", "video", "float32", "int64", "bool", "closed", "r1", "pixel_values"),
    *(bytes(32), b"\x01" * 32, bytes(16), bytes(4), b"\x01\0\0\0\xff\xff\x0f\0"),
    *(1, 2, 3, 4, 5, 10, 11, 12, 21, 22, 23, 24, 25, 26, 27, 40, 41, 42, 43, 44, 45, 46, 47, 48),
    *([], {}, [[]], ["a", "float32", [2, 4]]),
)


def run(data: bytes) -> None:
    first, *rest = split(data) or [b""]
    flags = first[0] if first else 0
    frontend = bool(flags & _FRONTEND)
    session, peer = _sessions(frontend=frontend, is_open=bool(flags & _OPEN))
    for frames in _messages(rest, peer._epoch, peer._sequence_out):
        _receive(session, frames)
    _check_outgoing(session, frontend=frontend)


def opens(data: bytes) -> bool:
    """Whether the peer of an input proves itself."""
    first, *rest = split(data)
    session, _ = _sessions(frontend=bool(first[0] & _FRONTEND), is_open=False)
    events = (event for frames in _messages(rest, 0, 0) for event in session.receive(frames, 0.0))
    return any(isinstance(event, Admitted | Opened) for event in events)


def _receive(session: Session, frames: Frames) -> None:
    ended = session.has_ended
    with bounded(_BOUND_BYTES):
        events = session.receive(frames, 0.0)
    expect(not (ended and events), f"{events} came after the end")
    for event in events:
        _read(event)
    resets = [event for event in events if isinstance(event, Reset)]
    expect(not resets or (session.has_ended and events[-1] is resets[0]), f"{events} go on after a reset")


def _sessions(*, frontend: bool, is_open: bool) -> tuple[Session, Session]:
    """Who listens, and an honest peer of it, with the handshake behind them if they are open."""
    ends = frontend_session(), worker_session()
    while is_open and not all(end.is_open for end in ends):
        for sender, receiver in (ends, ends[::-1]):
            for frames in sender.outgoing(0.0):
                receiver.receive(frames, 0.0)
    return ends if frontend else ends[::-1]


def _messages(records: list[bytes], epoch: int, sequence: int) -> Iterator[Frames]:
    pending = iter(records)
    for record in pending:
        flags, body = (record[0], record[1:]) if record else (0, b"")
        buffers = [memoryview(buffer) for _, buffer in zip(range(flags & _BUFFERS), pending, strict=False)]
        yield [body, *buffers] if flags & _OWN_PREFIX else encode(epoch, sequence, body, buffers)
        sequence += 1


def _read(event: Event) -> None:
    """What the owner of a session makes of an event."""
    try:
        match event:
            case Submit():
                to_prompt(event, lambda _: LAYOUT, max_tokens=_MAX_TOKENS)
            case Status():
                layouts = {holding.layout for holding in to_announcement(event).holdings.values()}
                total = sum(map(len, layouts))
                expect(total <= _MAX_ANNOUNCED_TOKENS, f"an announcement becomes {total:,} tokens (S10)")
            case Lend():
                to_lease(event)
                to_layout(event)
                sizes_of(event)
    except (ProtocolError, PromptTooLong):
        pass


def _check_outgoing(session: Session, *, frontend: bool) -> None:
    """Whatever it was told, what it says can be read, and comes out as it went in."""
    for frames in session.outgoing(0.0):
        try:
            message = _message(frames, frontend=frontend)
        except ProtocolError as error:
            raise Finding(f"a session says what cannot be read: {error}") from error
        expect(pack(message, SMALL) == bytes(frames[0])[_PREFIX_BYTES:], f"{message!r} comes out changed")


def _message(frames: Frames, *, frontend: bool) -> Message:
    if frontend:
        return decode(frames, FROM_FRONTEND, SMALL).message
    return decode(frames, FROM_WORKER, SMALL).message


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit one message as the tree that it is, or the order of messages."""
    records = split(data)
    if len(records) < 2 or random.random() < 0.2:
        return join(edited_records(records, random))
    at = random.randrange(1, len(records))
    flags, body = records[at][:1], records[at][1:]
    try:
        tree = msgspec.msgpack.decode(body)
        records[at] = flags + msgspec.msgpack.encode(edited(tree, random, _WORDS))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
        return None
    return join(records)


def seeds() -> Mapping[str, bytes]:
    """Every message of the protocol alone, and what honest peers say, from the handshake on."""
    alone = {}
    for path in sorted(_GOLDEN.iterdir()):
        head, *buffers = (bytes.fromhex(line) for line in path.read_text().splitlines())
        to_frontend = path.stem in _TO_FRONTEND
        alone[path.stem] = join([bytes([_OPEN | to_frontend]), bytes([len(buffers)]) + head[_PREFIX_BYTES:], *buffers])
    return alone | {f"{name}-all": _recorded(frontend=name == "frontend") for name in ("frontend", "worker")}


def _recorded(*, frontend: bool) -> bytes:
    """What one end hears of a whole conversation, the handshake too."""
    ends = frontend_session(), worker_session()
    heard: list[bytes] = []
    for turn in range(4):
        if turn == 3:
            _talk(*ends)
        for sender, receiver in (ends, ends[::-1]):
            for head, *buffers in sender.outgoing(0.0):
                receiver.receive([head, *buffers], 0.0)
                if (receiver is ends[0]) == frontend:
                    heard += [bytes([_OWN_PREFIX | len(buffers)]) + head, *map(bytes, buffers)]
    return join([bytes([_FRONTEND if frontend else 0]), *heard])


def _talk(frontend: Session, worker: Session) -> None:
    frontend.send(submit())
    frontend.send_feature(digest_of(1), feature_of_rows(3))
    frontend.send_feature(digest_of(2), feature_of_rows(20))
    worker.send(Accepted("r1"))
    worker.send(Delta("r1", 0, "text", (1, 2)))
    worker.send(to_status(Announcement(None, 0, holdings={digest_of(1): FeatureInfo.of(feature_of_rows(3))}), 1, 0))
