"""Small media for warm-up and self-tests: files as a client would send them, created without a codec where possible."""

from __future__ import annotations

import io
import math
import struct
import wave
import zlib
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from semel.core import Media, Modality

__all__ = ["SAMPLES", "image_file", "png_chunk", "sample_clip", "sample_image", "sample_video", "video_file"]

_SIDE: Final = 1_024
_RATE: Final = 16_000
_PITCH_HZ: Final = 440.0


def sample_image(number: int = 0) -> Media:
    """Return a colour gradient of 1024×1024 pixels as a PNG file; it differs for each one-byte number."""
    return image_file(_SIDE, _SIDE, number)


def image_file(width: int, height: int, number: int = 0) -> Media:
    """Return a colour gradient of any size as a PNG file."""
    row = bytes(value for x in range(width) for value in (x // 4 % 256, number, 255 - x // 4 % 256))
    pixels = b"".join(b"\0" + row for _ in range(height))  # each row begins with its filter type: none
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, not interlaced
    chunks = png_chunk(b"IHDR", head), png_chunk(b"IDAT", zlib.compress(pixels)), png_chunk(b"IEND", b"")
    return Media("image", b"\x89PNG\r\n\x1a\n" + b"".join(chunks), "image/png")


def sample_clip(number: int = 0, *, seconds: float = 1.0) -> Media:
    """Return a tone as a WAV file; it differs for each number."""
    step = 2 * math.pi * (_PITCH_HZ + number) / _RATE
    samples = array("h", (int(8_192 * math.sin(step * index)) for index in range(int(seconds * _RATE))))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, _RATE, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    return Media("audio", buffer.getvalue(), "audio/wav")


def sample_video(number: int = 0) -> Media:
    """Return two seconds of a moving gradient as an MP4 file, which is stored, since making one takes a codec."""
    del number
    return Media("video", Path(__file__).with_name("sample.mp4").read_bytes(), "video/mp4")


def video_file(frames: int, width: int, height: int) -> Media:
    """Return a moving gradient of any size, four frames a second, as an MP4 file."""
    import av
    import numpy as np

    ramp = np.add.outer(np.arange(height), np.arange(width))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.stack([ramp + 8 * number, 2 * ramp, 0 * ramp + 16 * number], axis=-1).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return Media("video", buffer.getvalue(), "video/mp4")


SAMPLES: Final[Mapping[Modality, Callable[[int], Media]]] = {
    "audio": sample_clip,
    "image": sample_image,
    "video": sample_video,
}
"""By modality."""


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
