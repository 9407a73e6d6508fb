"""Clips made for tests: sweeps with pauses, somewhat like speech, in the formats that clients record."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Final

import numpy as np

FORMATS: Final[Mapping[str, tuple[str, str, int]]] = {
    "wav": ("wav", "pcm_s16le", 16_000),
    "wav-44k": ("wav", "pcm_s16le", 44_100),
    "wav-8k": ("wav", "pcm_s16le", 8_000),
    "flac": ("flac", "flac", 16_000),
    "flac-48k": ("flac", "flac", 48_000),
    "mp3": ("mp3", "libmp3lame", 16_000),
    "mp3-44k": ("mp3", "libmp3lame", 44_100),
    "m4a": ("mp4", "aac", 16_000),
    "m4a-44k": ("mp4", "aac", 44_100),
    "aac": ("adts", "aac", 16_000),
    "ogg-vorbis": ("ogg", "vorbis", 16_000),
    "ogg-opus": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
}
"""By name: container, codec, and sampling rate in Hz."""


def spoken(rng: np.random.Generator, seconds: float, rate: int = 16_000) -> np.ndarray:
    """Sweeps of 0.2 to 1.5 s with noise and pauses between them, of which some are silent."""
    parts: list[np.ndarray] = []
    left = int(seconds * rate)
    while left > 0:
        length = min(left, int(rng.uniform(0.2, 1.5) * rate))
        time = np.arange(length) / rate
        sweep = np.sin(2 * np.pi * (rng.uniform(100, 600) + rng.uniform(-100, 900) * time) * time)
        loud = 0.0 if rng.random() < 0.2 else rng.uniform(0.05, 0.5)
        parts.append(loud * (sweep + rng.normal(0, 0.1, length)))
        left -= length
    samples: np.ndarray = np.concatenate(parts).clip(-1, 1).astype(np.float32)
    return samples


def recorded(samples: np.ndarray, kind: str) -> bytes:
    """The samples, which are at the rate of the format, as a file of it; several channels are rows."""
    import av

    container, codec, rate = FORMATS[kind]
    if codec == "vorbis":
        return _with_libsndfile(samples, rate)
    planes = np.ascontiguousarray(np.atleast_2d(samples), dtype=np.float32)
    layout = {1: "mono", 2: "stereo"}[len(planes)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate = rate
        stream.codec_context.open()
        fitting = av.AudioResampler(stream.format.name, layout, rate, stream.codec_context.frame_size or None)
        for part in (*fitting.resample(frame), *fitting.resample(None)):
            file.mux(stream.encode(part))
        file.mux(stream.encode())
    return buffer.getvalue()


def _with_libsndfile(samples: np.ndarray, rate: int) -> bytes:
    """FFmpeg's own encoder of Vorbis is not there or not good, as its authors say."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.atleast_2d(samples).T, rate, format="OGG", subtype="VORBIS")
    return buffer.getvalue()
