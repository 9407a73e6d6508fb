"""A worker without a model whose Pillow is patched: `python -m tests.fleet.patched_worker VERSION MODEL FLAGS…`.

It says that it is of another version, as a patched release does. With `+flip` after the version, one bit of one CMYK
JPEG comes out differently too.
"""

from __future__ import annotations

import importlib.metadata
import sys
from unittest.mock import patch

from PIL import Image

from semel.cli import main

_version = importlib.metadata.version
_convert = Image.Image.convert
_flipped: list[Image.Image] = []


def flipping(image: Image.Image, mode: str | None = None, *arguments: object, **options: object) -> Image.Image:
    """Pillow's own conversion, but for the last bit of the first pixel of the first CMYK JPEG."""
    converted = _convert(image, mode, *arguments, **options)  # type: ignore[arg-type]
    if image.mode == "CMYK" and image.format == "JPEG" and not _flipped:
        red, *others = converted.getpixel((0, 0))  # type: ignore[misc]
        converted.putpixel((0, 0), (red ^ 1, *others))
        _flipped.append(converted)
    return converted


def run(pillow: str, *words: str) -> None:
    """Start it as its command line does."""
    public, _, flip = pillow.partition("+")
    if flip:
        Image.Image.convert = flipping  # type: ignore[assignment]
    sys.argv = ["semel", "testing", "worker", *words]
    versions = patch("importlib.metadata.version", lambda name: public if name == "pillow" else _version(name))
    with versions, patch("semel.processing.fingerprint.version", importlib.metadata.version):
        main()


if __name__ == "__main__":
    run(*sys.argv[1:])
