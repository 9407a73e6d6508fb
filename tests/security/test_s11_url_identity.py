"""S11: a URL is never an identity. What an item is called is decided by its bytes, whatever it was fetched from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from semel.cache import LruCache
from semel.core import Tenant
from semel.render import ChatRenderer, ChatRequest, ParsedRequest, Pipeline
from tests.media.origin import Origin, origin, reaching, reply
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import FEATURE_BYTES, Drawing, image_part

__all__ = ["folder", "parts_renderer"]


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
