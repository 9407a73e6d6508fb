"""What a pool process may say, even one that a decoder's fault has taken over: its pool reads it or refuses it.

The first record is a frame's header, the second its message, the third its payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Final

import msgspec

import semel.errors
from semel.core import Assembly, Target
from semel.errors import ProtocolError, SemelError
from semel.media import DecodeLimits
from semel.processing.pool.pipe import (
    HEADER_BYTES,
    Answer,
    Assemble,
    Assembled,
    Description,
    Failed,
    Load,
    Made,
    Offer,
    Order,
    Ready,
    Send,
    Work,
    decode_answer,
    decode_order,
    encode,
    read_header,
    to_error,
    to_feature,
    to_made,
    to_payload,
)
from semel.processing.pool.prompts import decode_prompt, encode_prompt, payload_of_assembly, to_assembly
from tests.wire.examples import feature_of_rows
from tools.fuzz.mutation import edited, edited_records
from tools.fuzz.oracle import bounded, expect
from tools.fuzz.records import join, split

_MAX: Final = 4_096
_BOUND_BYTES: Final = 1 << 20
_WORDS: Final = (
    *("load", "work", "send", "ready", "offer", "made", "failed", "type", "item", "tensors", "mask", "error"),
    *("image", "audio", "video", "float32", "bool", "int64", "token_ids", "is_written", "shape", b"", b"\x01\x00"),
    *(name for name in semel.errors.__all__ if name[0].isupper()),
    *([], {}, ["a", "float32", [2, 4]], ["a", "bool", [0, 1 << 62]], ["a", "int64", [-1, -8]]),
)


def run(data: bytes) -> None:
    header, body, payload = [*split(data), b"", b"", b""][:3]
    with bounded(_BOUND_BYTES):
        with suppress(ProtocolError):
            _, payload_bytes = read_header(header.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES], max_payload_bytes=_MAX)
            expect(payload_bytes <= _MAX, f"a payload of {payload_bytes:,} bytes would be read")
        with suppress(ProtocolError):
            if isinstance(decode_order(body), Assemble):
                decode_prompt(payload)
        with suppress(ProtocolError):
            _take(decode_answer(body, payload_bytes=len(payload)), payload)


def _take(answer: Answer, payload: bytes) -> None:
    """What a pool makes of an answer."""
    match answer:
        case Failed():
            expect(isinstance(to_error(answer), SemelError), f"{answer!r} is no error of ours")
        case Made(is_written=False):
            feature = to_feature(answer, memoryview(payload))
            expect(len(feature.tensors) == len(answer.tensors), f"{answer!r} names a tensor twice")
            for head, start, end in answer.spans():
                expect(bytes(feature.tensors[head.name].data) == payload[start:end], f"{head!r} has other bytes")
        case Assembled():
            assembly = to_assembly(answer, memoryview(payload))
            expect(len(assembly.token_ids) == answer.tokens, f"{answer!r} has {len(assembly.token_ids)} tokens")
        case Ready(description=description):
            for modality in description.placeholders:
                description.insertion(modality, 1)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Edit the message as the tree that it is."""
    records = split(data)
    if len(records) < 2 or random.random() < 0.1:
        return join(edited_records(records, random))
    try:
        tree = msgspec.msgpack.decode(records[1])
        records[1] = msgspec.msgpack.encode(edited(tree, random, _WORDS))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
        return None
    return join(records)


def seeds() -> Mapping[str, bytes]:
    """Every order and answer."""
    feature = feature_of_rows(2)
    made = to_made(1, feature)
    payload = b"".join(to_payload(made, feature))
    messages: list[Order | Answer] = [
        Load("model", Target("float32"), DecodeLimits(), 30.0, 1 << 30),
        Work(1, "image", "image/png", {"max_pixels": 1_024}),
        Send(),
        Ready(Description("f", {"image": "<|image_pad|>"}, False, {"image": "<image {index}>"})),
        Offer(1, len(payload)),
        Failed("MediaUndecodable", "the image does not decode"),
    ]
    alone = {type(message).__name__.lower(): _framed(message) for message in messages}
    assembly = Assembly([1, 2, 3], [(1, 0), (0, 2)])
    assembled = _framed(Assembled(1, 3, 2), payload_of_assembly(assembly))
    prompt = encode_prompt([1, 7, 2], [("image", feature.layout), ("image", feature.layout)])
    return alone | {"made": _framed(made, payload), "assembled": assembled, "assemble": _framed(Assemble(1), prompt)}


def _framed(message: Order | Answer, payload: bytes = b"") -> bytes:
    frame = encode(message, len(payload))
    return join([frame[:HEADER_BYTES], frame[HEADER_BYTES:], payload])
