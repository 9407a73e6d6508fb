"""Image decoding: upright, opaque, 8-bit RGB, and only the first image of a file.

A model sees what a person sees (threats S13): EXIF orientation is applied and no other, transparency becomes white, and
16 bits become the upper 8. Sizes are checked against the file's header before anything is allocated (S5); frames after
the first are never decoded. Formats that are not listed are not opened (S6). The text of a decoder's error goes to the
log, never into semel's messages (S7).
"""

from __future__ import annotations

import io
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from semel.errors import MediaError, MediaTooLarge, MediaUndecodable
from semel.media.decode.limits import DecodeLimits

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["FORMATS", "decode_image", "size_from_header"]

FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_WHITE: Final = (255, 255, 255, 255)
_WIDE_MODES: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})
_WIDEST_MODES: Final = frozenset({"I", "F"})
_GREY_STEPS: Final[Mapping[object, int]] = {"L;2": 85, "L;4": 17}
"""Distance between the greys of a 2-bit and a 4-bit PNG after conversion to 8 bits."""

_TURNS: Final[Mapping[object, str]] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The transformation for each EXIF orientation."""

_SWAPPING: Final = frozenset({"TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"})
"""The transformations after which the width is the height."""

_METADATA: Final = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif", "Raw profile type xmp")
_TOLERATED: Final = (KeyError, SyntaxError, TypeError, ValueError, struct.error)
"""The errors that Pillow ignores in a JPEG's EXIF."""

_MAX_SCANS: Final = 100
"""Maximum number of scans of a JPEG. Encoders write ten, and each costs as much as the whole image."""

_ENDS: Final = (b"\xff\xd9", b"IEND\xaeB`\x82")
"""The last bytes of a whole JPEG and of a whole PNG."""

_SCAN: Final = b"\xff\xda"
_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # a marker that is followed by a length, or the end

logger = logging.getLogger(__name__)


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """Decode an image to RGB pixels, upright and opaque."""
    from PIL import Image

    try:
        with _pillow_limit(limits.max_image_pixels):
            if (canvas := _webp_canvas(data)) is not None:
                limits.check_size(*canvas, name="image")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            limits.check_size(*image.size, name="image")
            _check_scans(data)
            _load(image)
            return _opaque(_upright(image))
    except (MediaError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaTooLarge(
            f"the image has more pixels than the limit of {limits.max_image_pixels:,} (--max-image-pixels)"
        ) from None
    except Exception as error:  # noqa: BLE001 - a damaged file makes Pillow raise anything
        if "out of memory" in str(error):  # Pillow's text, in an OSError, if its decoders run out of memory
            raise MemoryError from None
        logger.info("an image of %d bytes does not decode: %r", len(data), error)
        raise MediaUndecodable(
            f"the image ({len(data):,} bytes) does not decode; send a complete {', '.join(FORMATS)} file"
        ) from None


def size_from_header(data: bytes, limits: DecodeLimits) -> tuple[int, int] | None:
    """Return the width and height of what `decode_image` returns, without decoding; None if only decoding tells.

    A header promises pixels that may not be there. So only a file that ends as its format does is believed. Damage
    within it shows when it is decoded.
    """
    from PIL import Image

    try:
        if not _is_whole(data):
            return None
        with _pillow_limit(limits.max_image_pixels):
            if (canvas := _webp_canvas(data)) is not None:
                limits.check_size(*canvas, name="image")
            image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
            limits.check_size(*image.size, name="image")
            _check_scans(data)
            is_turned_behind = b"eXIf" in data and "exif" not in image.info  # a PNG may say so after its pixels
            if image.mode in _WIDEST_MODES or is_turned_behind:
                return None
            width, height = image.size
            return (height, width) if _turn_of(image) in _SWAPPING else (width, height)
    except Exception:  # noqa: BLE001 - decoding says what is wrong
        return None


def _is_whole(data: bytes) -> bool:
    if data[:4] == b"RIFF":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return data.endswith(_ENDS)


@contextmanager
def _pillow_limit(max_pixels: int) -> Iterator[None]:
    """Set Pillow's own limit to this one: its GIF reader allocates while it opens a file, before the size is known
    here."""
    from PIL import Image

    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """The size of a WebP file from its first chunk: the decoder allocates all of it, twice, when it opens the file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        sides = int.from_bytes(data[21:25], "little")
        return 1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _check_scans(data: bytes) -> None:
    """Refuse a JPEG whose many scans make the decoder process the whole image again and again."""
    if not data.startswith(b"\xff\xd8") or data.count(_SCAN) <= _MAX_SCANS:  # most files end here
        return
    scans, found = 0, _MARKER.search(data, 2)
    while found is not None and found[0] != b"\xff\xd9":
        if found[0] == _SCAN and (scans := scans + 1) > _MAX_SCANS:
            raise MediaTooLarge(f"the image has more scans than the limit of {_MAX_SCANS}; save it with fewer")
        length = int.from_bytes(data[found.end() : found.end() + 2])
        found = _MARKER.search(data, found.end() + length)


def _load(image: Image.Image) -> None:
    """Decode the pixels. The transparent colour is the one stated before decoding, converted to 8 bits."""
    tile = next(iter(getattr(image, "tile", ())), None)
    raw_mode = None if tile is None else tile.args
    transparency = image.info.get("transparency")
    image.info.pop("xmp", None)  # Pillow rotates a TIFF while it loads, and obeys XMP too
    image.load()
    if raw_mode in _GREY_STEPS and isinstance(transparency, int):
        transparency *= _GREY_STEPS[raw_mode]
    elif raw_mode == "RGB;16B" and isinstance(transparency, tuple):
        transparency = tuple(value >> 8 for value in transparency)
    image.info.pop("transparency", None)
    if transparency is not None:
        image.info["transparency"] = transparency


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, if it is readable. A TIFF was rotated when it was loaded.

    Does not use Pillow's `exif_transpose`, which obeys XMP, or a text in a PNG, if EXIF has no orientation. Viewers and
    browsers do not.
    """
    from PIL import Image

    turn = _turn_of(image)
    upright = image if turn is None else image.transpose(Image.Transpose[turn])
    for name in _METADATA:  # later readers of the image must not rotate it again
        upright.info.pop(name, None)
    with suppress(*_TOLERATED):
        upright.getexif().clear()
    return upright


def _turn_of(image: Image.Image) -> str | None:
    """Return the transformation that the EXIF orientation asks for; None if it is unreadable."""
    from PIL import ExifTags, Image

    exif = Image.Exif()
    with suppress(*_TOLERATED):
        exif.load(image.info.get("exif", b""))
    return _TURNS.get(exif.get(ExifTags.Base.Orientation))


def _opaque(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _WIDE_MODES:
        return _narrow(image)
    if image.mode in _WIDEST_MODES:
        raise MediaUndecodable("the image has samples of 32 bits, which viewers show differently; save it with 8 bits")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, _WHITE)
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground.convert("RGB")


def _narrow(image: Image.Image) -> Image.Image:
    """Reduce 16-bit greys to their upper 8 bits; Pillow would turn all but the darkest white."""
    import numpy as np
    from PIL import Image

    samples = np.asarray(image)
    greys = (samples >> 8).astype(np.uint8)
    if isinstance(transparent := image.info.get("transparency"), int):
        greys[samples == transparent] = 255
    return Image.fromarray(greys).convert("RGB")
