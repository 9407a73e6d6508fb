"""The probes, by name: stored files of every format, mode, depth, orientation and codec, and media for the processor.

The files are shipped as bytes (`scripts/probe_media.py` made them), since an encoder of another version would write
others. What the model's processor is given is computed with whole numbers, so that it is the same everywhere.
"""

from __future__ import annotations

import io
import struct
import tarfile
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from semel.core import Media, Modality
from semel.media.decode.warmup_media import png_chunk, sample_video

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FEATURE_PROBES", "catalogue_id", "probe_names", "stored_media"]

_ARCHIVE: Final = Path(__file__).with_name("media.tar.xz")
_RATE: Final = 16_000
_MODALITIES: Final[Mapping[str, Modality]] = {"audio": "audio", "video": "video"}
_SIZES: Final = ((64, 64), (224, 224), (336, 336), (90, 60), (60, 90), (321, 123), (640, 480), (480, 640), (700, 500))
_LENGTHS_MS: Final = (100, 1_000, 2_500, 7_000)
_FILMS: Final = ("video mp4 x264 yuv420p", "video webm vpx-vp9 yuv420p", "video mp4 turned by 90")


def stored_media() -> Iterator[tuple[str, Media]]:
    """Yield the stored files in the catalogue's order: about a megabyte in all."""
    with tarfile.open(_ARCHIVE, "r:xz") as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None, f"{entry.name} of the probes is no file"
            yield entry.name, Media(_MODALITIES.get(entry.name.partition(" ")[0], "image"), file.read())


@cache
def probe_names() -> tuple[str, ...]:
    """Return the names of all probes, in the order of their results."""
    return (*(name for name, _ in stored_media()), *FEATURE_PROBES)


@cache
def catalogue_id() -> str:
    """Of these probes: other names or other media make another one."""
    hasher = blake3(_ARCHIVE.read_bytes())
    hasher.update("\n".join(FEATURE_PROBES).encode())
    return hasher.hexdigest(length=8)


def _image(width: int, height: int) -> Media:
    """Return an image with smooth and rough parts as a PNG file."""
    import numpy as np

    y, x = np.mgrid[0:height, 0:width]
    rough = (x * x * 7 + y * y * 13 + x * y * 5) % 251
    rows = np.stack([(x * 2 + y) % 256, np.where(x * 2 < width, rough, y % 256), (rough + x) % 256], axis=-1)
    packed = np.concatenate([np.zeros((height, 1), np.uint8), rows.astype(np.uint8).reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(packed.tobytes(), 1)), (b"IEND", b"")
    return Media("image", b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts), "image/png")


def _clip(length_ms: int) -> Media:
    """Return two triangle waves and noise as a WAV file."""
    import numpy as np

    number = np.arange(_RATE * length_ms // 1_000)
    noise = (number * number * 31 + number * 17) % 401 - 200
    samples = 40 * _triangle(number, 73) + 25 * _triangle(number, 19) + noise
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, _RATE, len(samples), "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return Media("audio", buffer.getvalue(), "audio/wav")


def _triangle(number: np.ndarray, period: int) -> np.ndarray:
    wave_: np.ndarray = abs(number % period * 2 - period) * 200 // period - 100
    return wave_


@cache
def _films() -> Mapping[str, Media]:
    return {name: media for name, media in stored_media() if name in _FILMS}


def _film(name: str) -> Media:
    return _films()[name]


FEATURE_PROBES: Final[Mapping[str, tuple[Modality, Callable[[], Media]]]] = {
    **{f"feature of an image of {w}x{h}": ("image", partial(_image, w, h)) for w, h in _SIZES},
    **{f"feature of a clip of {ms} ms": ("audio", partial(_clip, ms)) for ms in _LENGTHS_MS},
    **{f"feature of '{name}'": ("video", partial(_film, name)) for name in _FILMS},
    "feature of a video of 2 s": ("video", sample_video),
}
"""What the model's own processor is given, by name; what it does not take is left out."""
