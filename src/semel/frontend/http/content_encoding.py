"""Compressed request bodies: gzip and zstd, decompressed in slices within bounds (threats S18). No I/O.

A body is one gzip member or one zstd frame. Its compressed bytes are fed in batches. Each slice that comes out is
small, so that it takes a few milliseconds at most. Who reads a body charges what `feed` returns before the first slice
is made, and each slice before it is kept. The ratio of what came out to what went in is bounded: a bomb is refused
after little work, whatever the limit of a body is.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

from backports import zstd
from starlette.datastructures import Headers

from semel.errors import InvalidRequest, MediaTooLarge, UnsupportedEncoding, excerpt
from semel.telemetry.meter import Sample
from semel.telemetry.metrics import BODY_DECODED_BYTES, BODY_RECEIVED_BYTES

__all__ = ["BATCH_BYTES", "IDENTITY", "BodyDecoder", "BodyTraffic", "content_encoding"]

IDENTITY: Final = "identity"
_GZIP: Final = "gzip"
_ZSTD: Final = "zstd"
_NAMES: Final = {"": IDENTITY, IDENTITY: IDENTITY, _GZIP: _GZIP, "x-gzip": _GZIP, _ZSTD: _ZSTD}

BATCH_BYTES: Final = 256 * 1024
"""So many compressed bytes are collected before they are decompressed: a hop to a thread costs 0.2 ms."""

_SLICE_BYTES: Final = 256 * 1024
_INPUT_BYTES: Final = 64 * 1024
_LIGHT_BYTES: Final = 16 * 1024
"""So many compressed bytes are decompressed on the event loop, and four times as many come out: 1 ms, 5 at worst."""

_BUFFER_BYTES: Final = 1 << 20
"""A batch with the chunk that filled it, and a slice."""

_FREE_BYTES: Final = 1 << 20
"""The ratio of a body that is smaller is not limited: a short text may repeat itself."""

_GZIP_STATE_BYTES: Final = 64 * 1024
_ZSTD_STATE_BYTES: Final = 512 * 1024
_MAX_WINDOW_LOG: Final = 23
"""8 MiB, the most that a zstd frame in HTTP may need (RFC 9659)."""

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES: Final = 18
"""The longest head of a zstd frame."""


def content_encoding(headers: Headers) -> str:
    """How the body of a request is compressed: `gzip`, `zstd` or `identity`. Any other way is refused, and several."""
    written = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if (name := _NAMES.get(written)) is None:
        raise UnsupportedEncoding(
            f"Content-Encoding: {excerpt(written)} is not taken; send one of {UnsupportedEncoding.accepted}, or none"
        )
    return name


class _Decompressor(Protocol):
    """What `compression.zstd` calls a decompressor. It gives `max_length` bytes at most and keeps the rest."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class BodyDecoder:
    """Decompresses one body. Used by one thread at a time."""

    def __init__(self, encoding: str, *, max_ratio: float) -> None:
        self._encoding = encoding
        self._max_ratio = max_ratio
        self._decompressor: _Decompressor | None = None
        self._input = memoryview(b"")
        self._is_new = False
        """Whether no slice was made of the batch yet."""

        self.received = 0
        """The compressed bytes of all batches."""

        self.decoded = 0
        """The bytes of all slices."""

    def feed(self, batch: bytes | bytearray) -> int:
        """Take the next batch, once the last one `is_empty`. Returns the memory to charge before its first slice."""
        assert self.is_empty
        self._input, self._is_new = memoryview(batch), True
        is_first, self.received = not self.received, self.received + len(batch)
        return self._working_bytes(bytes(batch[:_HEAD_BYTES])) if is_first else 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing more comes of the batch."""
        return not self._input and (self._decompressor is None or self._decompressor.needs_input or self._is_at_end)

    @property
    def is_light(self) -> bool:
        """Whether the next slice may be made on the event loop: only the first of a small batch."""
        return self._is_new and len(self._input) <= _LIGHT_BYTES

    def slice(self) -> bytes:
        """Decompress some of the batch."""
        decompressor = self._decompressor = self._decompressor or self._open()
        most, self._is_new = 4 * _LIGHT_BYTES if self.is_light else _SLICE_BYTES, False
        data = b""
        if decompressor.needs_input:
            data, self._input = bytes(self._input[:_INPUT_BYTES]), self._input[_INPUT_BYTES:]
        try:
            decoded = decompressor.decompress(data, most)
        except (zlib.error, zstd.ZstdError):
            raise self._corrupt("its bytes are not valid") from None
        self.decoded += len(decoded)
        self._check_ratio()
        if self._is_at_end and (self._input or decompressor.unused_data):
            raise self._corrupt("bytes follow after its end; send one member or frame")
        return decoded

    def finish(self) -> None:
        """The body has ended; refuse it if its compressed form has not."""
        if not self._is_at_end:
            raise self._corrupt("it ends too early")

    def _open(self) -> _Decompressor:
        if self._encoding == _GZIP:
            return _Gzip()
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})

    def _working_bytes(self, head: bytes) -> int:
        if self._encoding == _GZIP:
            return _BUFFER_BYTES + _GZIP_STATE_BYTES
        if not head.startswith(_ZSTD_MAGIC[: len(head)]):  # the library may read older formats, with other windows
            raise self._corrupt("its bytes are not valid")
        return _BUFFER_BYTES + _ZSTD_STATE_BYTES + _window_bytes(head)

    @property
    def _is_at_end(self) -> bool:
        return self._decompressor is not None and self._decompressor.eof

    def _check_ratio(self) -> None:
        if self.decoded > _FREE_BYTES and self.decoded > self._max_ratio * self.received:
            raise MediaTooLarge(
                f"the body is compressed by more than {self._max_ratio:g} to 1: compress it less, or raise it with "
                "--max-body-ratio"
            )

    def _corrupt(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"the body is no {self._encoding} as its Content-Encoding says: {reason}")


class BodyTraffic:
    """Counts the bytes of bodies that were read to their end, as they came and decompressed, by encoding."""

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()

    def count(self, encoding: str, received: int, decoded: int) -> None:
        """Add a body."""
        self._received[encoding] += received
        self._decoded[encoding] += decoded

    def samples(self) -> Iterator[Sample]:
        """The counters, for a meter."""
        for encoding in self._received:
            yield BODY_RECEIVED_BYTES, self._received[encoding], (encoding,)
            yield BODY_DECODED_BYTES, self._decoded[encoding], (encoding,)


class _Gzip:
    """One gzip member, with the interface of a zstd decompressor."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        decoded = self._member.decompress(data or self._member.unconsumed_tail, max_length)
        self.needs_input = len(decoded) < max_length  # a full slice may leave some inside, without any input left
        return decoded


def _window_bytes(head: bytes) -> int:
    """The window of a zstd frame that begins so (RFC 8878, 3.1.1.1). It is refused if it is too large."""
    if len(head) < len(_ZSTD_MAGIC) + 2:
        return 0  # it ends too early
    descriptor = head[4]
    if descriptor & 0x20:  # a single segment: its window is its size
        start = 5 + (0, 1, 2, 4)[descriptor & 3]
        field = head[start : start + (1, 2, 4, 8)[descriptor >> 6]]
        window = int.from_bytes(field, "little") + (256 if descriptor >> 6 == 1 else 0)
    else:
        base = 1 << (10 + (head[5] >> 3))
        window = base + base // 8 * (head[5] & 7)
    if window > 1 << _MAX_WINDOW_LOG:
        raise InvalidRequest(
            f"the zstd frame needs a window of {window:,} bytes; the most is {1 << _MAX_WINDOW_LOG:,}: compress it at "
            "a level under 20, and not in long mode"
        )
    return window
