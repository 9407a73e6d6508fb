"""The audio decoder on any bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Final

import av
import numpy as np

from semel.errors import RequestError
from semel.media import DecodeLimits, decode_audio
from tools.fuzz.oracle import check_decoders_message, expect

_LIMITS: Final = DecodeLimits(max_audio_s=2.0)
_RATE: Final = 16_000
_FLAC_PADDING: Final = (b"\x81\x00\x20\x00" + bytes(8_192), b"\x81\x00\x00\x00")
"""What FFmpeg leaves room for in every file, and an empty block in its place."""

_MARGIN_SAMPLES: Final = 4_096
"""What a resampler may add at the end of a clip of the greatest length."""


def run(data: bytes) -> None:
    """Whatever the bytes, there are samples in canonical form, or an error of the client's."""
    try:
        samples = decode_audio(data, _LIMITS, sampling_rate=_RATE)
    except RequestError as error:
        check_decoders_message(error)
        return
    except av.error.MemoryError:
        return  # FFmpeg's word for a size that it refuses; a pool process answers it with 413
    expect(samples.dtype == np.float32 and samples.ndim == 1, f"{samples.dtype}{samples.shape} is not mono (S13)")
    expect(samples.size > 0, "there are no samples (S8)")
    expect(samples.size <= _LIMITS.max_audio_s * _RATE + _MARGIN_SAMPLES, f"there are {samples.size:,} samples (S5)")
    expect(bool(np.isfinite(samples).all()), "a sample is no number (S8)")


def seeds() -> Mapping[str, bytes]:
    """A few hundredths of a second in every accepted container."""
    return {
        "aac": _clip("adts", "aac", 16_000),
        "aiff": _clip("aiff", "pcm_s16be", 8_000),
        "caf": _clip("caf", "pcm_s16le", 8_000),
        "flac": _clip("flac", "flac", 16_000, layout="stereo").replace(*_FLAC_PADDING),
        "m4a": _clip("mp4", "aac", 16_000),
        "matroska": _clip("matroska", "flac", 8_000),
        "mp3": _clip("mp3", "libmp3lame", 16_000),
        "ogg-opus": _clip("ogg", "libopus", 48_000, layout="stereo"),
        "wav": _clip("wav", "pcm_s16le", 8_000),
        "wav-float": _clip("wav", "pcm_f32le", 8_000, layout="stereo"),
        "wav-8": _clip("wav", "pcm_u8", 16_000),
        "webm": _clip("webm", "libopus", 48_000),
    }


def _clip(format_: str, codec: str, rate: int, *, layout: str = "mono") -> bytes:
    buffer = io.BytesIO()
    channels = 2 if layout == "stereo" else 1
    wave = np.sin(np.arange(rate // 50) / 5).astype(np.float32)
    with av.open(buffer, "w", format=format_) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.stack([wave] * channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        for part in av.AudioResampler(stream.format, layout, rate, stream.frame_size or None).resample(frame):
            file.mux(stream.encode(part))
        file.mux(stream.encode())
    return buffer.getvalue()
