"""Small media for warm-up: files as a client would send them, created without a codec."""

from __future__ import annotations

import io
import math
import struct
import wave
import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import Final

from semel.core import Media, Modality

__all__ = ["SAMPLES", "sample_clip", "sample_image"]

_SIDE: Final = 1_024
_RATE: Final = 16_000
_PITCH_HZ: Final = 440.0


def sample_image(number: int = 0) -> Media:
    """A colour gradient of 1024×1024 pixels as a PNG file; it differs for each one-byte number."""
    row = bytes(value for x in range(_SIDE) for value in (x // 4, number, 255 - x // 4))
    pixels = b"".join(b"\0" + row for _ in range(_SIDE))  # each row begins with its filter type: none
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)  # 8 bits, RGB, not interlaced
    chunks = _chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(pixels)), _chunk(b"IEND", b"")
    return Media("image", b"\x89PNG\r\n\x1a\n" + b"".join(chunks), "image/png")


def sample_clip(number: int = 0) -> Media:
    """One second of a tone as a WAV file; it differs for each number."""
    step = 2 * math.pi * (_PITCH_HZ + number) / _RATE
    samples = array("h", (int(8_192 * math.sin(step * index)) for index in range(_RATE)))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, _RATE, _RATE, "NONE", ""))
        file.writeframes(samples.tobytes())
    return Media("audio", buffer.getvalue(), "audio/wav")


SAMPLES: Final[Mapping[Modality, Callable[[int], Media]]] = {"audio": sample_clip, "image": sample_image}
"""By modality. Modalities that requests cannot contain yet have none."""


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
