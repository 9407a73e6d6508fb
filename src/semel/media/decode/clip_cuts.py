"""Cuts clips that are longer than an encoder accepts into pieces, at quiet points.

A clip is decoded once, here. Every piece is a file of its own with the unmodified samples, so it decodes to exactly
these samples again. The cuts are the same as vLLM's: at the quietest tenth of the last second that a piece may have. No
sample is repeated and none is lost. The work grows with the length of the clip, which `DecodeLimits.max_audio_s`
bounds, and so does the number of pieces (threats S5, S16).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from semel.media.decode.audio import decode_audio
from semel.media.decode.limits import DecodeLimits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Pieces", "cut_audio", "find_cuts", "wav_of"]

_SEARCH_S: Final = 1
_WINDOWS_PER_S: Final = 10
_FLOATS: Final = 3
_SAMPLE_BYTES: Final = 4
_HEAD: Final = struct.Struct("<4sI4s4sIHHIIHH4sI")


@dataclass(frozen=True, slots=True)
class Pieces:
    """A clip at the model's sampling rate, as consecutive files."""

    samples: int
    """Number of samples of the whole clip."""

    sampling_rate: int
    files: Sequence[bytes | memoryview]

    @property
    def seconds(self) -> float:
        """Length of the whole clip."""
        return self.samples / self.sampling_rate

    @property
    def lengths_s(self) -> Iterator[float]:
        """Length of each piece."""
        return ((len(file) - _HEAD.size) / _SAMPLE_BYTES / self.sampling_rate for file in self.files)


def cut_audio(data: bytes, limits: DecodeLimits, *, sampling_rate: int, max_s: int) -> Pieces:
    """Cut a clip into pieces of at most `max_s` seconds; a clip that is not longer is one piece."""
    samples = decode_audio(data, limits, sampling_rate=sampling_rate)
    ends = [*find_cuts(samples, sampling_rate=sampling_rate, max_s=max_s), samples.size]
    files = [wav_of(samples[begin:end], sampling_rate) for begin, end in zip([0, *ends], ends, strict=False)]
    return Pieces(samples.size, sampling_rate, files)


def find_cuts(samples: np.ndarray, *, sampling_rate: int, max_s: int) -> Iterator[int]:
    """The ends of all pieces of a clip except the last."""
    longest, search = sampling_rate * max_s, sampling_rate * _SEARCH_S
    begin = 0
    while begin + longest < samples.size:
        place = begin + longest - search
        quiet = place + _quietest(samples[place : begin + longest], sampling_rate // _WINDOWS_PER_S)
        begin = quiet if quiet > begin else begin + longest
        yield begin


def _quietest(samples: np.ndarray, window: int) -> int:
    """Start of the window with the least energy. Skips the last window, as vLLM does."""
    count = (samples.size - 1) // window
    if not count:
        return 0
    # Energies as roots, as vLLM compares them: of two that are then equal, the first one counts.
    energies = (samples[: count * window].reshape(count, window) ** 2).mean(axis=1) ** 0.5
    return int(energies.argmin()) * window


def wav_of(samples: np.ndarray, sampling_rate: int) -> bytes:
    """Return a WAV file with these samples, one channel of float32."""
    data = samples.astype("<f4").tobytes()
    head = _HEAD.pack(
        *(b"RIFF", _HEAD.size - 8 + len(data), b"WAVE", b"fmt ", 16),
        *(_FLOATS, 1, sampling_rate, sampling_rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES),
        *(b"data", len(data)),
    )
    return head + data
