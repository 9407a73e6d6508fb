"""Frames: the form of a message on a socket, and the checks of a frame before its content is used.

The first frame is epoch and sequence, 8 bytes each, little endian, followed by the message in msgpack. Tensor bytes are
separate frames after it: encoding passes their memoryviews through without a copy. The message lists its buffers, so a
missing, surplus or wrongly sized frame is refused (threats S10). There is no pickle, and no type outside the union of
the direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct as Packing
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from semel.core import Digest
from semel.errors import ProtocolError
from semel.wire.limits import MAX_TENSORS, Limits
from semel.wire.messages import Chunk, FrontendMessage, Message, Payload, WorkerMessage
from semel.wire.translation import sizes_of

__all__ = [
    "FROM_FRONTEND",
    "FROM_WORKER",
    "MAX_FRAMES",
    "Buffer",
    "Envelope",
    "Frames",
    "decode",
    "encode",
    "pack",
    "size_of",
]

Buffer = bytes | memoryview
Frames = list[Buffer]
"""One message to send."""

MAX_FRAMES: Final = 1 + MAX_TENSORS

_M = TypeVar("_M")
_PREFIX: Final = Packing("<QQ")


@dataclass(frozen=True, slots=True)
class Envelope(Generic[_M]):
    """A received message, with its position in its session."""

    epoch: int
    sequence: int
    message: _M
    buffers: tuple[memoryview, ...]
    nbytes: int
    """Size of all its frames."""


def pack(message: Message, limits: Limits) -> bytes:
    """Return the message in msgpack, without its position in a session and without its buffers."""
    try:
        body = _ENCODER.encode(message)
    except OverflowError as error:
        raise ProtocolError(f"{type(message).__name__} has a whole number of more than 64 bits") from error
    if len(body) > limits.max_control_bytes - _PREFIX.size:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body):,} bytes, a message may have {limits.max_control_bytes:,}"
        )
    return body


def encode(epoch: int, sequence: int, body: bytes, buffers: Sequence[memoryview] = ()) -> Frames:
    """Return the frames of a packed message. Buffers are not copied: the frames contain the same objects."""
    return [_PREFIX.pack(epoch, sequence) + body, *buffers]


def size_of(body: bytes) -> int:
    """Size on the socket of a packed message without buffers."""
    return _PREFIX.size + len(body)


def decode(frames: Sequence[Buffer], decoder: Decoder[_M], limits: Limits) -> Envelope[_M]:
    """Decode the message in these frames; a `ProtocolError` states what is wrong with them."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, this one has {len(frames)}")
    head = memoryview(frames[0])
    buffers = tuple([memoryview(frame) for frame in frames[1:]]) if len(frames) > 1 else ()
    if not _PREFIX.size < head.nbytes <= limits.max_control_bytes:
        raise ProtocolError(
            f"a message has {_PREFIX.size} to {limits.max_control_bytes:,} bytes, this one has {head.nbytes:,}"
        )
    epoch, sequence = _PREFIX.unpack_from(head)
    try:
        message = decoder.decode(head[_PREFIX.size :])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"message {sequence} cannot be read: {error}") from error
    sizes = [buffer.nbytes for buffer in buffers]
    _check_buffers(message, sizes, limits)
    return Envelope(epoch, sequence, message, buffers, head.nbytes + sum(sizes))


def _check_buffers(message: object, found: list[int], limits: Limits) -> None:
    """Compare the received buffers with those that the message lists."""
    match message:
        case Payload():
            announced = _payload_sizes(message, limits)
        case Chunk(nbytes=nbytes):
            if not 0 < nbytes <= limits.chunk_bytes:
                raise ProtocolError(f"a chunk has 1 to {limits.chunk_bytes:,} bytes, this one has {nbytes:,}")
            announced = [nbytes]
        case _:
            announced = []
    if found != announced:
        raise ProtocolError(f"{type(message).__name__} announces buffers of {announced} bytes, {found} came")


def _payload_sizes(payload: Payload, limits: Limits) -> list[int]:
    sizes = sizes_of(payload)
    if (total := sum(sizes)) > limits.max_feature_bytes:
        raise ProtocolError(f"a feature has at most {limits.max_feature_bytes:,} bytes, this one has {total:,}")
    return sizes if total <= limits.inline_bytes else []


def _encode_value(value: object) -> object:
    """Convert a value that msgspec does not support."""
    match value:
        case Digest():
            return bytes(value)
        case Mapping():
            return dict(value)
        case _:
            raise TypeError(f"{type(value).__name__} cannot travel; only JSON values and bytes can")


def _decode_value(expected: type, value: Any) -> object:
    if expected is Digest and isinstance(value, bytes):
        return Digest(value)
    if expected is object:  # the options in a contract
        return value
    raise ValueError(f"{type(value).__name__} is no {expected.__name__}")


_ENCODER: Final = Encoder(enc_hook=_encode_value)

FROM_FRONTEND: Final[Decoder[FrontendMessage]] = Decoder(FrontendMessage, dec_hook=_decode_value)
FROM_WORKER: Final[Decoder[WorkerMessage]] = Decoder(WorkerMessage, dec_hook=_decode_value)
