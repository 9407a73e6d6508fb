"""Decoding: media bytes to the one canonical form that processors get.

What a model sees is what a person sees (threats S13): images are upright (EXIF applied), opaque (alpha and tRNS over
white) and RGB, the first frame of an animation; sound is the mean of its channels. Limits are checked on what the file
says of itself, before anything is allocated, and of a clip again while it comes out (S5). A format that is not listed
is not opened (S6). The text of a decoder's error goes to the log, never into ours (S7).
"""

from __future__ import annotations

import io
import logging
import struct
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from semel.errors import MediaDegenerate, MediaTooLarge, MediaUndecodable

if TYPE_CHECKING:
    import av
    import numpy as np
    from PIL import Image

__all__ = ["CANON", "DecodeLimits", "decode_audio", "decode_image"]

CANON: Final = 1
"""The version of the canonical form; part of every fingerprint, so that changing it never mixes features."""

_IMAGE_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_AUDIO_FORMATS: Final = ("aac", "aiff", "caf", "flac", "matroska", "mov", "mp3", "mp4", "ogg", "wav", "webm")
_BACKGROUND: Final = (255, 255, 255, 255)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a piece of media may decode to."""

    max_image_pixels: int = 178_956_970
    """Width × height of an image; the default is where Pillow itself refuses a decompression bomb."""

    min_image_side: int = 2
    """Shortest side of an image in pixels. One-pixel images have killed engines (threats S8)."""

    max_audio_s: float = 3_600.0
    """Length of a clip in seconds."""

    max_video_s: float = 3_600.0
    """Length of a video in seconds: every frame up to the last one that is looked at has to be decoded."""

    max_video_pixels: int = 400_000_000
    """Pixels of all the frames of a video that are looked at; each takes 3 bytes while it is processed."""


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """An image as RGB pixels, upright and opaque."""
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
        _check_image_size(image.size, limits)
        image.load()
        return _opaque(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError:
        raise MediaTooLarge(f"the image has more pixels than the limit of {limits.max_image_pixels:,}") from None
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        logger.info("an image of %d bytes does not decode: %r", len(data), error)
        raise MediaUndecodable(
            f"the image ({len(data):,} bytes) does not decode; send a complete {', '.join(_IMAGE_FORMATS)} file"
        ) from None


def _check_image_size(size: tuple[int, int], limits: DecodeLimits) -> None:
    width, height = size
    if min(size) < limits.min_image_side:
        raise MediaDegenerate(f"the image is {width}×{height}; each side needs {limits.min_image_side} pixels")
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"the image is {width}×{height}, {width * height:,} pixels; the limit is {limits.max_image_pixels:,}"
        )


def _opaque(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, _BACKGROUND)
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground.convert("RGB")


def decode_audio(data: bytes, limits: DecodeLimits, *, sampling_rate: int) -> np.ndarray:
    """A clip as mono float32 samples at a sampling rate."""
    import av
    import numpy as np

    try:
        # FFmpeg would also open playlists, which name other files: only containers that hold sound themselves are read.
        options = {"format_whitelist": ",".join(_AUDIO_FORMATS), "protocol_whitelist": ""}
        with av.open(io.BytesIO(data), mode="r", container_options=options) as container:
            samples = _read_mono(container, limits, sampling_rate)
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        logger.info("a clip of %d bytes does not decode: %r", len(data), error)
        raise MediaUndecodable(f"the clip ({len(data):,} bytes) does not decode; send a complete audio file") from None
    if not samples.size:
        raise MediaDegenerate("the clip has no samples")
    if not np.isfinite(samples).all():
        raise MediaDegenerate("the clip has samples that are no numbers")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _read_mono(container: av.container.InputContainer, limits: DecodeLimits, sampling_rate: int) -> np.ndarray:
    import av
    import numpy as np

    stream = container.streams.audio[0]
    if stream.duration is not None and stream.time_base is not None:
        _check_audio_length(float(stream.duration * stream.time_base), limits)
    to_float = av.AudioResampler(format="fltp")
    to_rate = av.AudioResampler(format="fltp", layout="mono", rate=sampling_rate)
    chunks: list[np.ndarray] = []
    length_s = 0.0
    for source in chain(container.decode(stream), (None,)):  # one frame at a time: the limit holds while it decodes
        for frame in to_float.resample(source):
            length_s += frame.samples / frame.sample_rate
            _check_audio_length(length_s, limits)
            mono = frame.to_ndarray().mean(axis=0, keepdims=True)
            if frame.sample_rate == sampling_rate:
                chunks.append(mono[0])
                continue
            mono_frame = av.AudioFrame.from_ndarray(mono, format="fltp", layout="mono")
            mono_frame.sample_rate = frame.sample_rate
            chunks += [part.to_ndarray()[0] for part in to_rate.resample(mono_frame)]
    return np.concatenate(chunks) if chunks else np.empty(0, np.float32)


def _check_audio_length(length_s: float, limits: DecodeLimits) -> None:
    if length_s > limits.max_audio_s:
        raise MediaTooLarge(f"the clip is longer than the limit of {limits.max_audio_s:g} s")
