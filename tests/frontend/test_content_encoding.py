"""Compressed bodies are read as plain ones, within the same limits; bombs are refused after little work (S18)."""

from __future__ import annotations

import base64
import gzip
import json
import os
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from semel.errors import SemelError
from semel.frontend.budget import Account, Budget
from semel.frontend.http import body as bodies
from semel.frontend.http import content_encoding
from semel.frontend.http.body import read_bytes
from semel.frontend.http.content_encoding import BodyDecoder
from semel.frontend.limits import BodyLimits, BudgetLimits
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig
from tests.frontend.test_limits import CHAT, MIB, ask, sent

COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
BOTH = pytest.mark.parametrize("encoding", COMPRESS)
LIMIT = 5_000


def request(chunks: Sequence[bytes], encoding: str | None) -> Request:
    """A request whose body comes in these chunks."""
    messages: Iterator[Message] = iter(
        [*({"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks), {"type": "http.request"}]
    )

    async def receive() -> Message:
        return next(messages)

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    return Request({"type": "http", "headers": headers}, receive)


async def outcome(chunks: Sequence[bytes], encoding: str | None, limits: BodyLimits) -> bytes | str:
    """The body that is read, or the code of the error; all that was charged but the body is released."""
    budget = Budget()
    with budget.open() as account:
        try:
            body = bytes(await read_bytes(request(chunks, encoding), limits, account))
        except SemelError as error:
            return str(getattr(error, "code", error))
        assert (account.charged, budget.in_flight) == (len(body), len(body))
        return body


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The data in chunks that end at these places."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


TEXTS = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=40), st.integers(1, 2_000)),
    st.builds(os.urandom, st.integers(0, 2 * LIMIT)),
)


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10**6), max_size=6), st.sampled_from(list(COMPRESS)), st.integers(1, 3_000))
async def test_any_body_in_any_chunks_is_read_as_the_plain_one(
    data: bytes, places: list[int], encoding: str, batch: int
) -> None:
    limits = BodyLimits(max_bytes=LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BATCH_BYTES", batch)
        patch.setattr(content_encoding, "_SLICE_BYTES", 512)
        patch.setattr(content_encoding, "_INPUT_BYTES", 300)
        found = await outcome(cut(COMPRESS[encoding](data), places), encoding, limits)
    assert found == await outcome([data], None, limits)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(list(COMPRESS)), st.data())
async def test_what_is_cut_off_or_goes_on_is_refused(data: bytes, encoding: str, draw: st.DataObject) -> None:
    whole = COMPRESS[encoding](data)
    short = whole[: draw.draw(st.integers(0, len(whole) - 1))]
    for wrong in (short, whole + b"x", whole + whole):
        assert await outcome([wrong], encoding, BodyLimits()) == "invalid_request"


@settings(deadline=None)
@given(st.binary(max_size=2_000), st.sampled_from(list(COMPRESS)))
async def test_noise_is_refused_as_the_clients_fault(noise: bytes, encoding: str) -> None:
    assert await outcome([noise], encoding, BodyLimits()) == "invalid_request"


async def test_mutant_a_decoder_that_takes_its_input_as_complete_loses_what_is_left_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytes(3 * MIB)

    def decompress(self: content_encoding._Gzip, part: bytes, max_length: int) -> bytes:
        return self._member.decompress(part, max_length)  # and `needs_input` stays true

    compressed = gzip.compress(data)
    assert await outcome([compressed], "gzip", BodyLimits(max_ratio=10_000)) == data
    monkeypatch.setattr(content_encoding._Gzip, "decompress", decompress)
    assert await outcome([compressed], "gzip", BodyLimits(max_ratio=10_000)) != data


@BOTH
@pytest.mark.parametrize("written", ["{}", "{}", " {} "])
async def test_a_chat_may_be_compressed(app: Rig, encoding: str, written: str) -> None:
    plain = ask(6_000)
    exchange = await sent(app, COMPRESS[encoding](plain), **{"content-encoding": written.format(encoding.upper())})
    assert exchange.status == (await sent(app, plain)).status
    assert app.service.budget.in_flight == 0
    compressed = len(COMPRESS[encoding](plain))
    assert app.metrics("semel_body_") == {
        f'semel_body_received_bytes_total{{encoding="{encoding}"}}': f"{compressed:.1f}",
        f'semel_body_decoded_bytes_total{{encoding="{encoding}"}}': f"{len(plain):.1f}",
        'semel_body_received_bytes_total{encoding="identity"}': f"{len(plain):.1f}",
        'semel_body_decoded_bytes_total{encoding="identity"}': f"{len(plain):.1f}",
    }


@pytest.mark.parametrize("written", ["br", "deflate", "gzip, zstd", "gzip, gzip", "zstd, identity", "x" * 2_000])
async def test_other_encodings_are_415_with_those_that_are_taken(app: Rig, written: str) -> None:
    exchange = await sent(app, ask(), **{"content-encoding": written})
    assert (exchange.status, exchange.code) == (415, "unsupported_encoding")
    assert exchange.headers["accept-encoding"] == "gzip, zstd"
    assert "gzip, zstd" in exchange.message
    assert len(exchange.message) < 400


async def test_no_compression_may_be_named(app: Rig) -> None:
    for written in ("identity", ""):
        assert (await sent(app, ask(), **{"content-encoding": written})).status == 200


def bomb(encoding: str, size: int) -> bytes:
    """Nothing, compressed as far as the format goes."""
    if encoding == "zstd":
        return bytes(zstd.compress(bytes(size)))
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()


@BOTH
async def test_a_bomb_is_refused_by_its_ratio_after_little_work_and_little_memory_S18(app: Rig, encoding: str) -> None:
    packed = bomb(encoding, 200 * MIB)
    tracemalloc.start()
    began = time.thread_time()
    exchange = await sent(app, packed, **{"content-encoding": encoding})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-body-ratio" in exchange.message
    assert peak < 100 * len(packed) + 4 * MIB
    assert time.thread_time() - began < 1, "the event loop worked"
    assert app.service.budget.in_flight == 0


@BOTH
async def test_mutant_without_the_ratio_a_bomb_is_decompressed_up_to_the_limit_of_a_body(
    app: Rig, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.service.body = BodyLimits(max_bytes=32 * MIB)
    monkeypatch.setattr(BodyDecoder, "_check_ratio", lambda _: None)
    exchange = await sent(app, bomb(encoding, 64 * MIB), **{"content-encoding": encoding})
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-body-bytes" in exchange.message


@BOTH
async def test_the_ratio_is_a_limit_of_large_bodies_that_can_be_raised(encoding: str) -> None:
    for size, ratio, refused in ((MIB, 1, False), (2 * MIB, 100, True), (2 * MIB, 40_000, False)):
        found = await outcome([bomb(encoding, size)], encoding, BodyLimits(max_ratio=ratio))
        assert (found == "media_too_large") is refused


@BOTH
async def test_limits_count_what_a_body_becomes(app: Rig, encoding: str) -> None:
    app.service.body = BodyLimits(max_bytes=100_000, max_values=1_000)
    for data, flag in ((ask(100_000), "--max-body-bytes"), (b"[" * 1_001, "--max-body-values")):
        exchange = await sent(app, COMPRESS[encoding](data), **{"content-encoding": encoding})
        assert (exchange.status, exchange.code) == (413, "media_too_large")
        assert flag in exchange.message


@BOTH
async def test_compressed_bytes_that_become_nothing_are_bounded_too(encoding: str) -> None:
    # Empty blocks: stored ones of deflate, raw ones of zstd behind the head of a frame without a size.
    head, block = {
        "gzip": (gzip.compress(b"")[:10], b"\0\0\0\xff\xff"),
        "zstd": (b"\x28\xb5\x2f\xfd\0\x50", b"\0\0\0"),
    }[encoding]
    nothing = head + block * 100_000
    assert await outcome([nothing], encoding, BodyLimits()) == "invalid_request", "it ends too early"
    assert await outcome([nothing], encoding, BodyLimits(max_bytes=200_000)) == "media_too_large"


@BOTH
async def test_an_announced_length_over_the_limit_is_refused_before_a_byte_is_read(app: Rig, encoding: str) -> None:
    app.service.body = BodyLimits(max_bytes=1_000)

    def unread() -> Iterator[bytes]:
        yield pytest.fail("the body was read")

    exchange = Exchange()
    await exchange.run(app.app, CHAT, stream_of(unread()), {"content-length": "1200", "content-encoding": encoding})
    assert (exchange.status, exchange.code) == (413, "media_too_large")


def frame(window: bytes, *, descriptor: int = 0) -> bytes:
    """The beginning of a zstd frame that needs a window."""
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window


@pytest.mark.parametrize(
    "head",
    [frame(bytes([14 << 3])), frame(bytes([31 << 3 | 7])), frame(struct.pack("<Q", 1 << 40), descriptor=0xE0)],
)
async def test_a_zstd_window_over_8_mib_is_refused_before_it_is_allocated(head: bytes) -> None:
    with Budget().open() as account, pytest.raises(SemelError, match="window") as raised:
        await read_bytes(request([head + bytes(20)], "zstd"), BodyLimits(), account)
    assert getattr(raised.value, "status", 0) == 400


async def test_what_decompressing_needs_is_charged_before_it_is_allocated() -> None:
    data = os.urandom(2 * MIB)
    windows = zstd.compress(data, options={zstd.CompressionParameter.window_log: 23})
    streamed = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 23})
    without_size = streamed.compress(data) + streamed.flush()
    for compressed, least in ((windows, 2 * MIB), (without_size, 8 * MIB)):
        assert await charged_at_first_slice(compressed) > least
        budget = Budget(BudgetLimits(max_request_bytes=6 * MIB, max_bytes=6 * MIB))
        with budget.open() as account:
            if least < 6 * MIB:
                assert await read_bytes(request([compressed], "zstd"), BodyLimits(), account) == data
                continue
            with pytest.raises(SemelError, match="--max-media-bytes-in-flight"):
                await read_bytes(request([compressed], "zstd"), BodyLimits(), account)
        assert budget.in_flight == 0


async def charged_at_first_slice(compressed: bytes) -> int:
    """What is in flight when the first slice is made."""
    budget, found = Budget(), list[int]()
    made = BodyDecoder.slice

    def watched(self: BodyDecoder) -> bytes:
        found.append(budget.in_flight)
        return made(self)

    with pytest.MonkeyPatch.context() as patch, budget.open() as account:
        patch.setattr(BodyDecoder, "slice", watched)
        await read_bytes(request([compressed], "zstd"), BodyLimits(), account)
    return found[0]


@BOTH
async def test_only_a_little_is_decompressed_on_the_event_loop(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lights: list[tuple[bool, int]] = []
    made = BodyDecoder.slice

    def watched(self: BodyDecoder) -> bytes:
        is_light = self.is_light
        piece = made(self)
        lights.append((is_light, len(piece)))
        return piece

    monkeypatch.setattr(BodyDecoder, "slice", watched)
    small = json.dumps({"text": "word " * 400}).encode()
    assert await outcome([COMPRESS[encoding](small)], encoding, BodyLimits()) == small
    assert [light for light, _ in lights] == [True]
    lights.clear()
    assert await outcome([bomb(encoding, MIB)], encoding, BodyLimits()) == bytes(MIB)
    assert [light for light, _ in lights[:2]] == [True, False]
    assert lights[0][1] <= 65_536
    assert not any(light for light, _ in lights[1:])
    assert max(size for _, size in lights) <= 262_144


async def longest_slice_ms(encoding: str, size: int) -> float:
    """The most processor time that one slice of a body took of the event loop's thread."""
    data = base64.b64encode(os.urandom(size))
    compressed = gzip.compress(data, 1) if encoding == "gzip" else zstd.compress(data)
    slices, loop_thread, made = [0.0], threading.get_ident(), BodyDecoder.slice

    def timed(self: BodyDecoder) -> bytes:
        began = time.thread_time()
        try:
            return made(self)
        finally:
            if threading.get_ident() == loop_thread:
                slices.append(time.thread_time() - began)

    with pytest.MonkeyPatch.context() as patch, Budget().open() as account:
        patch.setattr(BodyDecoder, "slice", timed)
        assert await read_bytes(request([compressed], encoding), BodyLimits(), account) == data
    return max(slices) * 1e3


@BOTH
@pytest.mark.parametrize("size", [8_000, 12_000_000])
async def test_decompressing_takes_no_10_ms_of_the_event_loop(encoding: str, size: int) -> None:
    longest = await longest_slice_ms(encoding, size)
    assert (longest == 0) is (size > 8_000)
    assert longest < 10


@BOTH
async def test_mutant_a_body_that_is_decompressed_on_the_event_loop_takes_more(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyDecoder, "is_light", True)
    for name in ("_INPUT_BYTES", "_LIGHT_BYTES"):
        monkeypatch.setattr(content_encoding, name, 64 * MIB)
    assert await longest_slice_ms(encoding, 12_000_000) > 10


async def test_an_account_that_is_closed_meanwhile_keeps_nothing() -> None:
    budget = Budget()
    account: Account = budget.open()
    compressed = zstd.compress(os.urandom(MIB))

    def chunks() -> Iterator[bytes]:
        yield compressed[: MIB // 2]
        account.close()
        yield compressed[MIB // 2 :]

    await read_bytes(request(list(chunks()), "zstd"), BodyLimits(), account)
    assert budget.in_flight == 0
