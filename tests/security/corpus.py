"""Small valid files of every format that is accepted, made with the encoders that are here."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from PIL import Image

from semel.core import Media, Modality, Page
from tools.fuzz.pdf import seeds

_RATE: Final = 16_000
_CLIPS: Final = (
    ("wav", "pcm_s16le"),
    ("wav", "pcm_f32le"),
    ("wav", "pcm_mulaw"),
    ("wav", "adpcm_ms"),
    ("aiff", "pcm_s16be"),
    ("caf", "pcm_s16le"),
    ("flac", "flac"),
    ("ogg", "libopus"),
    ("ogg", "vorbis"),
    ("mp3", "libmp3lame"),
    ("adts", "aac"),
    ("ipod", "aac"),
    ("mov", "alac"),
    ("matroska", "libopus"),
    ("webm", "libopus"),
)
_VIDEOS: Final = (
    ("mp4", "libx264"),
    ("mp4", "libx265"),
    ("mp4", "mpeg4"),
    ("mov", "libx264"),
    ("mov", "prores"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libx264"),
    ("matroska", "mjpeg"),
    ("avi", "mpeg4"),
    ("avi", "mjpeg"),
    ("mpeg", "mpeg2video"),
    ("mpeg", "mpeg1video"),
)
_PIXELS: Final = {"mjpeg": "yuvj420p", "prores": "yuv422p10le"}


@dataclass(frozen=True, slots=True)
class Specimen:
    """A valid file and what is in it."""

    name: str
    media: Media


def specimens() -> list[Specimen]:
    """One of each kind; the same in every run."""
    kinds: tuple[tuple[Modality, Iterator[tuple[str, bytes]]], ...] = (
        ("image", _images()),
        ("audio", _clips()),
        ("video", _videos()),
    )
    return [Specimen(name, Media(modality, data)) for modality, files in kinds for name, data in files]


def documents() -> list[Specimen]:
    """Documents, of which a page is an image."""
    return [Specimen(f"pdf {name}", Media("image", data, page=Page(1, 36))) for name, data in seeds().items()]


def encode_image(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_clip(samples: np.ndarray, container: str, codec: str, *, rate: int = _RATE) -> bytes:
    """A clip as a file; samples are float, of the shape (channels, samples)."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}.get(len(samples), f"{len(samples)}c")
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        if codec == "vorbis":
            stream.codec_context.options = {"strict": "experimental"}
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32), format="fltp", layout=layout)
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    return buffer.getvalue()


def encode_video(frames: np.ndarray, container: str = "mp4", codec: str = "libx264", *, fps: int = 6) -> bytes:
    """A video as a file; frames are RGB, of the shape (frames, height, width, 3)."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        rate = 25 if container == "mpeg" else fps
        stream = file.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = _PIXELS.get(codec, "yuv420p")
        if codec == "libx265":
            stream.codec_context.options = {"x265-params": "log-level=none"}
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def _images() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).resize((60, 44))
    alpha = rgb.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(rgb.size))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = [rgb.rotate(angle) for angle in (90, 180)]
    yield "jpeg", encode_image(rgb, "JPEG", exif=exif)
    yield "jpeg progressive", encode_image(rgb, "JPEG", progressive=True)
    yield "jpeg grey", encode_image(rgb.convert("L"), "JPEG")
    yield "jpeg cmyk", encode_image(rgb.convert("CMYK"), "JPEG")
    yield "mpo", encode_image(rgb, "MPO", save_all=True, append_images=turned)
    yield "png", encode_image(rgb, exif=exif)
    yield "png rgba", encode_image(alpha)
    yield "png palette", encode_image(rgb.quantize(16), transparency=3)
    yield "png 16 bit", encode_image(Image.fromarray(rng.integers(0, 65_536, (44, 60), dtype=np.uint16)))
    yield "apng", encode_image(alpha, save_all=True, append_images=turned)
    yield "gif", encode_image(rgb.quantize(32), "GIF", save_all=True, append_images=[t.quantize(32) for t in turned])
    yield "webp", encode_image(alpha, "WEBP", exif=exif)
    yield "webp lossless", encode_image(rgb, "WEBP", lossless=True)
    yield "webp animated", encode_image(rgb, "WEBP", save_all=True, append_images=turned)
    yield "bmp", encode_image(rgb, "BMP")
    yield "bmp palette", encode_image(rgb.quantize(256), "BMP")
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        yield f"tiff {compression}", encode_image(rgb, "TIFF", compression=compression, exif=exif)
    pages = [page.copy() for page in turned]  # an image remembers how it was saved last
    yield "tiff pages", encode_image(rgb, "TIFF", save_all=True, append_images=pages)


def _clips() -> Iterator[tuple[str, bytes]]:
    time = np.arange(_RATE // 4) / _RATE
    samples = np.stack([0.3 * np.sin(2 * np.pi * 440 * time), 0.2 * np.sin(2 * np.pi * 220 * time)])
    for container, codec in _CLIPS:
        rate = 48_000 if codec == "libopus" else _RATE
        yield f"{container} {codec}", encode_clip(samples, container, codec, rate=rate)
    yield "wav mono", encode_clip(samples[:1, :1_000], "wav", "pcm_s16le", rate=8_000)


def _videos() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    frames = blocks.repeat(16, axis=1).repeat(16, axis=2)
    for container, codec in _VIDEOS:
        yield f"{container} {codec}", encode_video(frames, container, codec)
