"""S28: a compressed body is refused before a byte of it is read; nothing is collected that no account has."""

from __future__ import annotations

import gzip

import pytest
from starlette.requests import Request
from starlette.types import Message

from semel.errors import UnsupportedEncoding
from semel.frontend.budget import Budget
from semel.frontend.http.body import read_bytes
from semel.frontend.limits import BodyLimits
from tests.frontend.rig import Rig
from tests.frontend.test_limits import ask, sent


@pytest.mark.parametrize("written", ["gzip", "zstd", "br", "deflate", "GZIP", "gzip, identity", "x" * 2_000])
async def test_a_compressed_body_is_415_with_what_is_taken(app: Rig, written: str) -> None:
    exchange = await sent(app, gzip.compress(ask()), **{"content-encoding": written})
    assert (exchange.status, exchange.code) == (415, "unsupported_encoding")
    assert exchange.headers["accept-encoding"] == "identity"
    assert len(exchange.message) < 400


@pytest.mark.parametrize("written", ["identity", "", " Identity "])
async def test_no_compression_may_be_named(app: Rig, written: str) -> None:
    assert (await sent(app, ask(), **{"content-encoding": written})).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_no_byte_of_a_compressed_body_is_collected(encoding: str) -> None:
    """With `identity` as the control: there the body is read, and charged as it comes."""
    received: list[Message] = []

    async def receive() -> Message:
        received.append({"type": "http.request", "body": bytes(1_000), "more_body": len(received) < 3})
        return received[-1]

    request = Request({"type": "http", "headers": [(b"content-encoding", encoding.encode())]}, receive)
    with Budget().open() as account:
        if encoding == "gzip":
            with pytest.raises(UnsupportedEncoding):
                await read_bytes(request, BodyLimits(), account)
        else:
            await read_bytes(request, BodyLimits(), account)
        assert (len(received), account.charged) == ((0, 0) if encoding == "gzip" else (4, 4_000))
