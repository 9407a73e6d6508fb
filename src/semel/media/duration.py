"""Length of a clip from its file header: nothing is decoded (threats S6).

It supports the formats whose header states the length exactly: WAV with plain samples, and FLAC, both at the model's
sampling rate. Only a resampler knows how many samples it makes. A false header is believed: its author receives a wrong
length, and no advantage over others.
"""

from __future__ import annotations

from typing import Final

__all__ = ["clip_seconds"]

_PLAIN: Final = frozenset({0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE})
"""WAV formats with a fixed size per sample: PCM, float, A-law, µ-law, and their extensible form."""

_MAX_CHUNKS: Final = 64


def clip_seconds(data: bytes, *, sampling_rate: int) -> float | None:
    """Length in seconds of a clip at this rate; None at another rate, or if the header does not state it."""
    found: tuple[int, int] | None = None
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        found = _wav_samples(data)
    elif data[:4] == b"fLaC":
        found = _flac_samples(data)
    if found is None or found[1] != sampling_rate:
        return None
    return found[0] / sampling_rate


def _wav_samples(data: bytes) -> tuple[int, int] | None:
    """Number of samples, and their rate."""
    rate = frame_bytes = 0
    place = 12
    for _ in range(_MAX_CHUNKS):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8
        if name == b"fmt " and int.from_bytes(data[place : place + 2], "little") in _PLAIN:
            rate = int.from_bytes(data[place + 4 : place + 8], "little")
            frame_bytes = int.from_bytes(data[place + 12 : place + 14], "little")
        if name == b"data":
            if not rate or not frame_bytes:
                return None
            # A writer that streams a file does not know its size, and writes 0 or the largest number.
            left = max(len(data) - place, 0)
            return min(size or left, left) // frame_bytes, rate
        place += size + size % 2
    return None


def _flac_samples(data: bytes) -> tuple[int, int] | None:
    """From STREAMINFO, the first block: 20 bits of rate, 3 of channels, 5 of depth, 36 of samples."""
    if len(data) < 26 or data[4] & 0x7F:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return (samples, rate) if rate and samples else None
