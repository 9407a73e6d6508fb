"""Three bugs that are known, so that a test shows that the harness finds such: the naive ways of what semel does."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import suppress

from PIL import Image

from semel.errors import MediaUndecodable
from tools.fuzz import image

_VALUE = re.compile(r"\s*([^\s,]*)\s*(?:,|$)")
"""Blanks can be split in as many ways as there are, and are, if what follows them does not fit."""


def naive_read(data: bytes) -> bytes:
    """A frame whose length is believed: five steps that no blind search takes together."""
    if len(data) < 8 or data[:1] != b"s":
        raise ValueError("no frame")
    if data[1:2] != b"m":
        raise ValueError("no frame of ours")
    if data[2] != 2:
        raise ValueError("another version")
    if data[3] & 0xF0 != 0x50:
        raise ValueError("no payload")
    body = data[8:]
    length = int.from_bytes(data[4:8], "little")
    if length > 1 << 16:
        raise ValueError("too long")
    return bytes(body[index] for index in range(length))


def run_codec(data: bytes) -> None:
    with suppress(ValueError):
        naive_read(data)


def naive_image(data: bytes) -> Image.Image:
    """What most people write: the one error that the manual names is mapped, and nothing is limited."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except OSError:
        raise MediaUndecodable("the image does not decode") from None


def run_image(data: bytes) -> None:
    image.check(data, naive_image)


def run_header(data: bytes) -> None:
    _, equals, value = data.decode("latin-1").partition("=")
    if equals and value[:1].isspace():
        _VALUE.match(value)


def seeds() -> Mapping[str, bytes]:
    """A frame of another kind; a field of a header; the images."""
    return {"frame": b"a frame?", "field": b"max-age= 60 s", **image.seeds()}
