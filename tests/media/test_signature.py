"""What kind of media a file is, by its first bytes."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from semel.media.decode import image
from semel.media.signature import SIGNATURE_BYTES, kind_of


@pytest.mark.parametrize("kind", image.FORMATS)
def test_every_format_of_images_that_is_decoded_is_known(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    assert kind_of(file.getvalue()[:SIGNATURE_BYTES]) == "image"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"RIFF\0\0\0\0WAVE", "audio"),
        (b"fLaC\0\0\0\x22", "audio"),
        (b"OggS\0\2", "audio"),
        (b"ID3\4\0", "audio"),
        (b"\xff\xfb\x90\x00", "audio"),
        (b"\xff\xf1\x50\x80", "audio"),
        (b"FORM\0\0\0\0AIFF", "audio"),
        (b"\0\0\0\x20ftypM4A ", "audio"),
        (b"\0\0\0\x20ftypisom", "video"),
        (b"\x1aE\xdf\xa3", "video"),
        (b"RIFF\0\0\0\0AVI ", "video"),
        (b"RIFF\0\0\0\0ACON", None),
        (b"%PDF-1.7", "document"),
        (b"", None),
        (b"{}", None),
    ],
)
def test_files_are_known_by_their_first_bytes(head: bytes, kind: str | None) -> None:
    assert kind_of(head) == kind
