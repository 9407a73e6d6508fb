"""Audio decoding: one channel, the mean of all channels, as float32 samples at the model's sampling rate.

Rate, channels and length are checked against the file's header, and on every decoded frame before the next one is
decoded: a few bytes can be hours of silence (threats S5). Only the mean of each frame is retained. Players differ in
how they mix channels; the mean hides none of them (S13).
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Final

from semel.errors import MediaDegenerate, MediaTooLarge, MediaUndecodable
from semel.media.decode.container import check_codec, open_container
from semel.media.decode.limits import DecodeLimits

if TYPE_CHECKING:
    import av
    import numpy as np

__all__ = ["decode_audio"]

_FORMATS: Final = ("aac", "aiff", "caf", "flac", "matroska", "mov", "mp3", "mp4", "ogg", "wav", "webm")
_PCM: Final = tuple(
    f"pcm_{kind}"
    for kind in (
        *("alaw", "mulaw", "s8", "u8", "s16be", "s16le", "s24be", "s24le", "s32be", "s32le", "s64be", "s64le"),
        *("f32be", "f32le", "f64be", "f64le", "u16be", "u16le", "u24be", "u24le", "u32be", "u32le"),
    )
)
_CODECS: Final = (
    *("aac", "adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms", "alac", "flac", "libopus", "libvorbis", "mp2", "mp2float"),
    *("mp3", "mp3float", "opus", "vorbis", *_PCM),
)
_MIN_RATE: Final = 1_000
_MAX_RATE: Final = 384_000
_MAX_VALUE: Final = 1_000.0  # full scale is 1; values far above it give infinities in a spectrogram
_NAME: Final = "clip"


def decode_audio(data: bytes, limits: DecodeLimits, *, sampling_rate: int) -> np.ndarray:
    """Decode a clip to mono float32 samples at a sampling rate."""
    import numpy as np

    with open_container(
        data, name=_NAME, formats=_FORMATS, codecs=_CODECS, max_pixels=limits.max_image_pixels
    ) as container:
        samples = _read_mono(container, limits, sampling_rate)
    if not samples.size:
        raise MediaDegenerate("the clip has no samples")
    if not np.abs(samples, out=np.empty_like(samples)).max() <= _MAX_VALUE:  # also rejects NaN
        raise MediaDegenerate("the clip has samples that are no numbers, or far beyond full scale")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _read_mono(container: av.container.InputContainer, limits: DecodeLimits, sampling_rate: int) -> np.ndarray:
    import av
    import numpy as np

    stream = container.streams.audio[0]
    check_codec(stream, _CODECS, name=_NAME, instead="AAC, FLAC, MP3, Opus, Vorbis or PCM")
    if stream.duration is not None and stream.time_base is not None:
        _check_length(float(stream.duration * stream.time_base), limits)
    _check_form(stream.rate, stream.channels, limits)
    stream.codec_context.thread_count = 1
    to_float = av.AudioResampler(format="flt")
    to_rate = av.AudioResampler(format="fltp", layout="mono", rate=sampling_rate)
    chunks: list[np.ndarray] = []
    came, rate = 0, 0
    for source in chain(container.decode(stream), (None,)):  # one frame at a time: the limit applies during decoding
        if source is not None:
            _check_form(source.sample_rate, source.layout.nb_channels, limits)
        for frame in to_float.resample(source):
            came, rate = came + frame.samples, rate or frame.sample_rate
            if frame.sample_rate != rate:
                raise MediaUndecodable("the clip changes its sampling rate on the way; send it with one")
            _check_length(came / rate, limits)
            mono = _mean(frame)
            if rate == sampling_rate:
                chunks.append(mono[0])
                continue
            mono_frame = av.AudioFrame.from_ndarray(mono, format="fltp", layout="mono")
            mono_frame.sample_rate = rate
            chunks += [part.to_ndarray()[0] for part in to_rate.resample(mono_frame)]
    chunks += [part.to_ndarray()[0] for part in to_rate.resample(None)]  # the resampler's last millisecond
    samples: np.ndarray = np.concatenate([*chunks, np.empty(0, np.float32)])
    return samples[: math.ceil(came * sampling_rate / (rate or 1))]  # the resampler's padding comes after it


def _mean(frame: av.AudioFrame) -> np.ndarray:
    """Return the mean of a frame's channels, with shape (1, samples).

    For a frame with one plane per channel, PyAV searches for the end of the planes. FFmpeg does not mark it if there
    are more than eight planes, and PyAV then reads the memory after them. So frames are packed here: all channels in
    one plane.
    """
    import numpy as np

    packed = frame.to_ndarray().reshape(frame.samples, frame.layout.nb_channels)
    mean: np.ndarray = np.ascontiguousarray(packed.T).mean(axis=0, keepdims=True)
    return mean


def _check_form(rate: int, channels: int, limits: DecodeLimits) -> None:
    """Check that the rate is in a range that bounds the samples per second and the resampling ratio."""
    if rate < _MIN_RATE:
        raise MediaDegenerate(f"the clip has {rate:,} samples a second; it needs {_MIN_RATE:,}")
    if rate > _MAX_RATE:
        raise MediaTooLarge(f"the clip has {rate:,} samples a second; the limit is {_MAX_RATE:,}")
    if channels > limits.max_audio_channels:
        raise MediaTooLarge(
            f"the clip has {channels:,} channels; the limit is {limits.max_audio_channels:,} (--max-audio-channels)"
        )


def _check_length(length_s: float, limits: DecodeLimits) -> None:
    if length_s > limits.max_audio_s:
        raise MediaTooLarge(f"the clip is longer than the limit of {limits.max_audio_s:g} s (--max-audio-s)")
