"""Frames: how a message looks on a socket, and the checks that a frame passes before anything is made of it.

The first frame is epoch and sequence, 8 bytes each, little endian, and then the message in msgpack. Tensor bytes are
frames of their own behind it: on encoding they pass through as the memoryviews that they are. Which buffers a message
has is in the message, so a frame that is missing, surplus or of another size is refused (threats S10). There is no
pickle, and no type that is not in the union of the direction.
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
"""One message on its way."""

MAX_FRAMES: Final = 1 + MAX_TENSORS

_M = TypeVar("_M")
_PREFIX: Final = Packing("<QQ")


@dataclass(frozen=True, slots=True)
class Envelope(Generic[_M]):
    """A message that came, with its place in its session."""

    epoch: int
    sequence: int
    message: _M
    buffers: tuple[memoryview, ...]
    nbytes: int
    """Of all its frames."""


def pack(message: Message, limits: Limits) -> bytes:
    """The message in msgpack, without its place in a session and without its buffers."""
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
    """The frames of a packed message. Buffers are not copied: they are the very objects that were given."""
    return [_PREFIX.pack(epoch, sequence) + body, *buffers]


def size_of(body: bytes) -> int:
    """The bytes of a packed message without buffers on the socket."""
    return _PREFIX.size + len(body)


def decode(frames: Sequence[Buffer], decoder: Decoder[_M], limits: Limits) -> Envelope[_M]:
    """The message in these frames; a `ProtocolError` says what is wrong with them."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, this one has {len(frames)}")
    head, buffers = memoryview(frames[0]), tuple(memoryview(frame) for frame in frames[1:])
    if not _PREFIX.size < head.nbytes <= limits.max_control_bytes:
        raise ProtocolError(
            f"a message has {_PREFIX.size} to {limits.max_control_bytes:,} bytes, this one has {head.nbytes:,}"
        )
    epoch, sequence = _PREFIX.unpack_from(head)
    try:
        message = decoder.decode(head[_PREFIX.size :])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"message {sequence} cannot be read: {error}") from error
    _check_buffers(message, [buffer.nbytes for buffer in buffers], limits)
    return Envelope(epoch, sequence, message, buffers, head.nbytes + sum(buffer.nbytes for buffer in buffers))


def _check_buffers(message: object, found: list[int], limits: Limits) -> None:
    """Hold the buffers that came against those that the message announces."""
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
    """What msgspec does not know, as something it does."""
    match value:
        case Digest():
            return bytes(value)
        case Mapping():
            return dict(value)
        case _:
            raise TypeError(f"{type(value).__name__} cannot travel; only JSON values and bytes can")


def _decode_value(expected: type, value: Any) -> object:
    if expected is object:  # the options in a contract
        return value
    if expected is Digest and isinstance(value, bytes):
        return Digest(value)
    raise ValueError(f"{type(value).__name__} is no {expected.__name__}")


_ENCODER: Final = Encoder(enc_hook=_encode_value)

FROM_FRONTEND: Final[Decoder[FrontendMessage]] = Decoder(FrontendMessage, dec_hook=_decode_value)
FROM_WORKER: Final[Decoder[WorkerMessage]] = Decoder(WorkerMessage, dec_hook=_decode_value)
