"""Kinds of image files that a client may send, and damaged ones."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

__all__ = ["damaged_files", "image_files", "photo"]

_ORIENTATION: Final = 0x0112


def photo(seed: int = 0, width: int = 90, height: int = 60, mode: str = "RGB") -> Image.Image:
    """Blocks of random colours, which no rotation and no conversion leaves as they are."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 10, width // 10, 4), dtype=np.uint8)
    return Image.fromarray(blocks, "RGBA").resize((width, height), Image.Resampling.NEAREST).convert(mode)


def _file(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    return exif


def image_files() -> Mapping[str, bytes]:
    """Twenty kinds."""
    deep = Image.fromarray(np.random.default_rng(3).integers(0, 1 << 16, (60, 90), dtype=np.uint16))
    palette = photo(5).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    return {
        "jpeg": _file(photo(1), "JPEG"),
        "jpeg, turned": _file(photo(2), "JPEG", exif=_turned(6)),
        "jpeg, broken exif": _file(photo(3), "JPEG", exif=b"Exif\0\0II*\0broken"),
        "jpeg, grey": _file(photo(4, mode="L"), "JPEG"),
        "jpeg, cmyk": _file(photo(5, mode="CMYK"), "JPEG"),
        "png": _file(photo(6), "PNG"),
        "png, turned": _file(photo(7), "PNG", exif=_turned(8)),
        "png, rgba": _file(photo(8, mode="RGBA"), "PNG"),
        "png, grey and alpha": _file(photo(9, mode="LA"), "PNG"),
        "png, palette": _file(palette, "PNG"),
        "png, transparent palette": _file(palette, "PNG", transparency=3),
        "png, 1 bit": _file(photo(12, mode="1"), "PNG"),
        "png, 16 bits": _file(deep, "PNG"),
        "gif, animated": _file(photo(14), "GIF", save_all=True, append_images=[photo(15)]),
        "webp": _file(photo(16), "WEBP"),
        "webp, rgba": _file(photo(17, mode="RGBA"), "WEBP", lossless=True),
        "tiff": _file(photo(18), "TIFF"),
        "tiff, turned": _file(photo(19), "TIFF", exif=_turned(3)),
        "bmp": _file(photo(20), "BMP"),
        "avif": _file(photo(21), "AVIF"),
    }


def damaged_files() -> Mapping[str, bytes]:
    """Files that vLLM refuses."""
    jpeg, png = _file(photo(1), "JPEG"), _file(photo(2), "PNG")
    return {
        "half a jpeg": jpeg[: len(jpeg) // 2],
        "half a png": png[: len(png) // 2],
        "text": b"no image at all",
        "nothing": b"",
    }
