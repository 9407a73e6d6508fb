"""S11: two different items never share an identity, and nobody outside the fleet can compute one.

CVE-2025-46722. Every part of a digest is in `tests/core/test_digest.py`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from blake3 import blake3
from PIL import Image

from semel.cache import LruCache
from semel.core import Digest, Key, Tenant, digest, frame
from semel.render import ChatRenderer, ChatRequest, ParsedRequest, Pipeline
from tests.media.origin import Origin, origin, reaching, reply
from tests.render.drawn import FEATURE_BYTES, Drawing, image_part

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


# A URL is never an identity: an item is called by its bytes, whatever it was fetched from.


@pytest.fixture
async def server() -> AsyncIterator[Origin]:
    async with origin() as made:
        yield made


@pytest.fixture
async def pipeline(server: Origin, parts_renderer: ChatRenderer) -> AsyncIterator[Pipeline]:
    drawing = Drawing(parts_renderer, LruCache(8 * FEATURE_BYTES))
    async with reaching(server, cache_bytes=1 << 20) as fetching:
        yield replace(drawing.pipeline, fetch=fetching.fetch)


def asking(*parts: dict[str, Any]) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": list(parts)}])


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def digests(draft: ParsedRequest) -> list[bytes]:
    return [item.digest for item in draft.items]


async def test_the_same_bytes_are_the_same_item_from_any_url_and_from_a_data_url(
    server: Origin, pipeline: Pipeline
) -> None:
    server["/a"] = server["/b"] = b"7"
    server["/c"] = reply(b"", 302, location="/a")
    parts = [url_part(server.url(path)) for path in ("/a", "/b", "/c", "/a?x=1")]
    found = digests(await pipeline.read_chat(asking(*parts, image_part(7))))
    assert len(set(found)) == 1
    assert len((await pipeline.chat(asking(*parts, image_part(7)))).features) == 1


async def test_other_bytes_under_the_same_url_are_another_item(server: Origin, pipeline: Pipeline) -> None:
    server["/a"] = b"1"
    first = digests(await pipeline.read_chat(asking(url_part(server.url("/a")))))
    server["/a"] = b"2"
    second = digests(await pipeline.read_chat(asking(url_part(server.url("/a")))))
    assert first != second
    assert naive_identity(server.url("/a")) == naive_identity(server.url("/a"))  # the control cannot tell them apart


async def test_what_is_kept_of_a_url_is_no_identity_either(server: Origin, pipeline: Pipeline) -> None:
    """While its server lets us keep it, the old bytes are the item; both tenants have digests of their own."""
    server["/a"] = reply(b"1", cache_control="max-age=60")
    part = url_part(server.url("/a"))
    alice, bob = Tenant("alice"), Tenant("bob")
    first = digests(await pipeline.read_chat(asking(part), alice))
    server["/a"] = reply(b"2", cache_control="max-age=60")
    assert digests(await pipeline.read_chat(asking(part), alice)) == first
    assert digests(await pipeline.read_chat(asking(image_part(1)), alice)) == first
    assert digests(await pipeline.read_chat(asking(part), bob)) == digests(
        await pipeline.read_chat(asking(image_part(2)), bob)
    )


def naive_identity(url: str) -> str:
    """As it is often done: the URL stands for what is behind it."""
    return url.lower()
