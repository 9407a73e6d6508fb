"""Transfer of features: cut into pieces at one end, reassembled at the other.

Small features are sent whole. Large ones are sent in chunks that alternate, so that a small feature never waits for the
end of a large one. Both ends enforce the same bounds on open features; the receiver allocates memory for a feature only
after its payload was found to be within them (threats S10). The bytes are copied once, on arrival, so that every tensor
begins at an aligned address.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from semel.core import Digest, Feature
from semel.errors import MediaTooLarge
from semel.wire.codec import pack
from semel.wire.events import Arrived, Violation
from semel.wire.limits import MAX_TENSORS, Limits
from semel.wire.messages import Chunk, Payload
from semel.wire.translation import sizes_of, to_feature, to_payload

__all__ = ["Inbound", "Outbound", "Piece"]

_MAPPED_BYTES: Final = 1 << 20


class Piece(NamedTuple):
    """A packed message of a feature, with its buffers."""

    body: bytes
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the window that it uses."""
        return len(self.body) + sum(buffer.nbytes for buffer in self.buffers)


@dataclass(slots=True)
class _Sending:
    transfer: int
    nbytes: int
    rest: Iterator[Piece]
    ready: Piece | None = None
    """The next piece; None until it is needed."""

    begun: bool = False


class Outbound:
    """The features that a session has to send."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[_Sending] = deque()
        self._open: deque[_Sending] = deque()
        self._open_bytes = 0
        self._count = 0

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self._waiting or self._open)

    def add(self, digest: Digest, feature: Feature) -> int:
        """Queue a feature. Returns the number of its transfer."""
        if feature.nbytes > self._limits.max_feature_bytes or len(feature.tensors) > MAX_TENSORS:
            raise MediaTooLarge(
                f"{feature!r} has {feature.nbytes:,} bytes in {len(feature.tensors)} tensors; at most "
                f"{self._limits.max_feature_bytes:,} bytes in {MAX_TENSORS} can be sent to a worker"
            )
        self._count += 1
        pieces = _cut(self._count, digest, feature, self._limits)
        self._waiting.append(_Sending(self._count, feature.nbytes, pieces))
        return self._count

    def withdraw(self, transfer: int) -> bool:
        """Stop sending a feature. Returns whether the peer has received a part of it, but not all."""
        for sending in (*self._waiting, *self._open):
            if sending.transfer == transfer:
                self._remove(sending)
                return sending.begun
        return False

    def take(self, room: int) -> Piece | None:
        """Return the next piece, if there is one of at most `room` bytes. Open features alternate."""
        self._admit()
        if not self._open:
            return None
        sending = self._open[0]
        piece = sending.ready
        if piece is None or piece.nbytes > room:
            return None
        sending.begun = True
        sending.ready = next(sending.rest, None)
        self._open.rotate(-1)
        if sending.ready is None:
            self._remove(sending)
        return piece

    def _admit(self) -> None:
        """Start features while the bounds on open features allow it."""
        while (
            self._waiting
            and len(self._open) < self._limits.max_open_features
            and self._open_bytes + self._waiting[0].nbytes <= self._limits.max_open_bytes
        ):
            sending = self._waiting.popleft()
            sending.ready = next(sending.rest)
            self._open.append(sending)
            self._open_bytes += sending.nbytes

    def _remove(self, sending: _Sending) -> None:
        if sending in self._waiting:
            self._waiting.remove(sending)
            return
        self._open.remove(sending)
        self._open_bytes -= sending.nbytes


@dataclass(slots=True)
class _Assembly:
    payload: Payload
    buffers: list[memoryview]
    missing: int
    tensor: int = 0
    offset: int = 0
    """Start of the next chunk."""


class Inbound:
    """The features that a session receives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[int, _Assembly] = {}
        self._open_bytes = 0
        self._last = 0

    def begin(self, payload: Payload, buffers: tuple[memoryview, ...]) -> Arrived | None:
        """Start receiving a feature; returns it at once if its bytes came with the payload."""
        if payload.transfer <= self._last:
            raise Violation("order", f"transfer {payload.transfer} began after transfer {self._last}")
        self._last = payload.transfer
        sizes = sizes_of(payload)
        if (total := sum(sizes)) <= self._limits.inline_bytes:
            return Arrived(payload.digest, to_feature(payload, [_copied(buffer) for buffer in buffers]))
        if len(self._open) >= self._limits.max_open_features or self._open_bytes + total > self._limits.max_open_bytes:
            raise Violation(
                "overrun",
                f"transfer {payload.transfer} of {total:,} bytes is one too many: {len(self._open)} with "
                f"{self._open_bytes:,} bytes are open",
            )
        self._open[payload.transfer] = assembly = _Assembly(payload, [_allocated(size) for size in sizes], total)
        self._open_bytes += total
        _skip_empty(assembly)
        return None

    def extend(self, chunk: Chunk, data: memoryview) -> Arrived | None:
        """Store a chunk; returns the feature with its last chunk."""
        assembly = self._open.get(chunk.transfer)
        if assembly is None or (chunk.tensor, chunk.offset) != (assembly.tensor, assembly.offset):
            raise Violation("order", f"{chunk!r} is not what comes next")
        target = assembly.buffers[assembly.tensor]
        if chunk.offset + chunk.nbytes > target.nbytes:
            raise Violation("order", f"{chunk!r} goes past its tensor's {target.nbytes:,} bytes")
        target[chunk.offset : chunk.offset + chunk.nbytes] = data.cast("B")
        assembly.offset += chunk.nbytes
        assembly.missing -= chunk.nbytes
        if assembly.missing:
            _skip_empty(assembly)
            return None
        self.withdraw(chunk.transfer)
        feature = to_feature(assembly.payload, [buffer.toreadonly() for buffer in assembly.buffers])
        return Arrived(assembly.payload.digest, feature)

    def withdraw(self, transfer: int) -> None:
        """Drop an incomplete feature."""
        assembly = self._open.pop(transfer, None)
        if assembly is None:
            raise Violation("order", f"transfer {transfer} is not open")
        self._open_bytes -= sum(buffer.nbytes for buffer in assembly.buffers)


def _cut(transfer: int, digest: Digest, feature: Feature, limits: Limits) -> Iterator[Piece]:
    """Cut a feature into pieces. Their buffers are the feature's own memory."""
    body = pack(to_payload(transfer, digest, feature), limits)
    tensors = [_flat(tensor.data) for tensor in feature.tensors.values()]
    if feature.nbytes <= limits.inline_bytes:
        yield Piece(body, tuple(tensors))
        return
    yield Piece(body, ())
    for index, data in enumerate(tensors):
        for offset in range(0, data.nbytes, limits.chunk_bytes):
            part = data[offset : offset + limits.chunk_bytes]
            yield Piece(pack(Chunk(transfer, index, offset, part.nbytes), limits), (part,))


def _flat(data: memoryview) -> memoryview:
    """Return the same memory as bytes."""
    if data.format == "B" and data.ndim == 1:
        return data
    return data.cast("B") if data.nbytes else memoryview(b"")


def _skip_empty(assembly: _Assembly) -> None:
    """Advance to the tensor of the next chunk."""
    while assembly.offset == assembly.buffers[assembly.tensor].nbytes:
        assembly.tensor += 1
        assembly.offset = 0


def _copied(data: memoryview) -> memoryview:
    return memoryview(bytearray(data)).toreadonly()


def _allocated(nbytes: int) -> memoryview:
    """Allocate memory to fill. It must not block the loop for long, so large memory is mapped, in huge pages.

    For 256 MB a bytearray takes 126 ms to create. Small pages take 140 ms to fill and 12 to free, huge pages 45 and 1.
    """
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)
