"""The image decoder on any bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Final

from PIL import Image

from semel.errors import RequestError
from semel.media import DecodeLimits, decode_image
from tools.fuzz.oracle import check_decoders_message, expect

LIMITS: Final = DecodeLimits(max_image_pixels=1 << 16)
_ORIENTATION: Final = 0x0112


def run(data: bytes) -> None:
    check(data, lambda given: decode_image(given, LIMITS))


def check(data: bytes, decode: Callable[[bytes], Image.Image]) -> None:
    """Whatever the bytes, there is an image in canonical form, or an error of the client's."""
    try:
        image = decode(data)
    except RequestError as error:
        check_decoders_message(error)
        return
    width, height = image.size
    expect(image.mode == "RGB" and "transparency" not in image.info, f"{image.mode} is not opaque RGB (S13)")
    expect(image.getexif().get(_ORIENTATION, 1) == 1, "the image is not upright (S13)")
    expect(min(image.size) >= LIMITS.min_image_side, f"{image.size} is too small (S8)")
    expect(width * height <= LIMITS.max_image_pixels, f"{image.size} is too large (S5)")
    expect(len(image.tobytes()) == 3 * width * height, "there are other than 3 bytes for a pixel")


def seeds() -> Mapping[str, bytes]:
    """Files of every accepted format, small, and with what has misled decoders: EXIF, palettes, alpha, many frames."""
    ground = Image.linear_gradient("L").resize((9, 7))
    rgb = Image.merge("RGB", (ground, ground.transpose(Image.Transpose.ROTATE_180), ground))
    rgba = Image.merge("RGBA", (*rgb.split(), ground))
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    palette = rgb.quantize(4)
    frames = [rgb, rgb.rotate(90, expand=False)]
    return {
        "bmp": _saved(rgb, "BMP"),
        "bmp-palette": _saved(palette, "BMP"),
        "gif": _saved(palette, "GIF", transparency=1),
        "gif-frames": _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "jpeg": _saved(rgb, "JPEG", quality=30, exif=exif),
        "jpeg-progressive": _saved(rgb, "JPEG", quality=30, progressive=True),
        "jpeg-cmyk": _saved(rgb.convert("CMYK"), "JPEG", quality=30),
        "png": _saved(rgb, "PNG", exif=exif),
        "png-16": _saved(ground.convert("I;16"), "PNG"),
        "png-alpha": _saved(rgba, "PNG"),
        "png-palette": _saved(palette, "PNG", transparency=b"\x00\x80\xff"),
        "png-trns": _saved(rgb, "PNG", transparency=(1, 2, 3)),
        "png-frames": _saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "tiff": _saved(rgb, "TIFF", exif=exif),
        "tiff-lzw": _saved(rgba, "TIFF", compression="tiff_lzw"),
        "tiff-group4": _saved(ground.convert("1"), "TIFF", compression="group4"),
        "webp": _saved(rgb, "WEBP", quality=10, exif=exif),
        "webp-lossless": _saved(rgba, "WEBP", lossless=True),
        "webp-frames": _saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
    }


def _saved(image: Image.Image, format_: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()
