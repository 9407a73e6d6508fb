"""S11: two different items never share an identity, and nobody outside the fleet can compute one.

CVE-2025-46722. Every part of a digest is in `tests/core/test_digest.py`; that a URL is none, in the tests of fetching.
"""

from __future__ import annotations

import io
import zlib
from hashlib import sha256

import pytest
from blake3 import blake3
from PIL import Image

from semel.core import Digest, Key, digest, frame

KEY = Key(bytes(range(32)))


def ours(media: bytes, key: Key = KEY, **more: str) -> Digest:
    return digest(media, key=key, modality="image", fingerprint="f", **more)  # type: ignore[arg-type]


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("left", "right"),
    [((b"ab", b"c"), (b"a", b"bc")), ((b"", b"x"), (b"x", b"")), ((b"x",), (b"x", b"")), ((b"a\0b",), (b"a", b"b"))],
)
def test_parts_that_read_the_same_when_joined_differ_when_framed(
    left: tuple[bytes, ...], right: tuple[bytes, ...]
) -> None:
    assert any(sha256(glue.join(left)).digest() == sha256(glue.join(right)).digest() for glue in (b"", b"\0"))
    assert b"".join(frame(left)) != b"".join(frame(right))


def test_among_a_hundred_thousand_items_short_hashes_collide_and_ours_do_not() -> None:
    items = [number.to_bytes(4, "big") for number in range(100_000)]
    thirty_bits = {int.from_bytes(sha256(item).digest()[:4], "big") >> 2 for item in items}
    assert len(thirty_bits) < len(items)
    assert len({zlib.adler32(item) for item in items}) < len(items)
    assert len({ours(item) for item in items[:20_000]}) == 20_000
    assert len(ours(b"")) * 8 == 256


def test_who_has_the_media_but_not_the_key_cannot_name_the_item() -> None:
    """With a naive hash everybody can ask whether a picture has been seen here."""
    media = b"a picture that somebody else has"
    guesses = {blake3(media).digest(), blake3(media, key=bytes(32)).digest(), sha256(media).digest()}
    naive = blake3(media).digest()
    assert naive in guesses
    assert ours(media) not in guesses
    assert ours(media) != ours(media, Key(bytes(32)))


def test_palettes_that_are_read_as_indices_collide_and_as_files_do_not() -> None:
    red, blue = (Image.new("P", (4, 4)) for _ in range(2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    assert sha256(red.tobytes()).digest() == sha256(blue.tobytes()).digest()
    assert ours(encoded(red)) != ours(encoded(blue))
