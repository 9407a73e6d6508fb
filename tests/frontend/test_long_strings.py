"""A body without its long strings is parsed to what the whole body is parsed to, and refused with the same words."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from semel.core import Media
from semel.errors import InvalidRequest, MediaTooLarge, SemelError
from semel.frontend.api.openai.requests import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from semel.frontend.http import body as body_module
from semel.frontend.http import long_strings
from semel.frontend.http.body import parse, parse_body
from semel.frontend.http.long_strings import cut_long_strings
from semel.frontend.limits import BodyLimits
from semel.render import Attachment, Conversation
from semel.render.media.part_source import put_media
from semel.render.media.source import LongString

CHAT: TypeAdapter[Any] = TypeAdapter(ChatCompletionRequest)
KINDS: tuple[TypeAdapter[Any], ...] = (CHAT, CHAT, TypeAdapter(CompletionRequest), TypeAdapter(TokenizeRequest))
LIMITS = BodyLimits()
SHORT = 24
"""The length of a long string here, so that hypothesis can write some."""

Parse = Callable[[bytearray, TypeAdapter[Any]], Any]


@pytest.fixture
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        yield


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(long_strings, "MIN_CHARS", SHORT)
    patch.setattr(long_strings, "_PIECE", 8)
    patch.setattr(body_module, "_SMALL_BYTES", SHORT)


# Bodies, as bytes of JSON or of what is nearly JSON

ENCODED = st.binary(min_size=12, max_size=60).map(base64.b64encode)
HEADS = st.sampled_from(
    (
        b"data:video/jpeg;base64,",
        b"data:Video/JPEG;base64,aaaa,",
        b"data:image/png;base64,",
        b"DATA:image\\/png;base64,",
        b"data:audio/wav;base64,",
        b"data:,",
        b"data:;base64",
        b"",
    )
)
ESCAPES = (b"\\/", b"\\\\/", b"\\\\", b'\\"', b"\\n", b"\\u0041", b"\\ud83d\\ude00", b"\\ud83d", b"\\x", b"\\")
SPOILT = st.sampled_from((*ESCAPES, b"/", b"\n", b"\0", b"\x7f", b"\xff", "é".encode(), b"-_", b"=", b" ", b",", b"[{"))


@st.composite
def long_string(draw: st.DrawFn) -> bytes:
    """A string that can be cut, or nearly."""
    content = draw(HEADS) + draw(ENCODED)
    if draw(st.booleans()):
        content = content.replace(b"/", b"\\/")
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(SPOILT) + content[place:]
    return b'"' + content + b'"'


NUMBERS = st.sampled_from((b"0", b"-1.5e3", b"null", b"true", b"NaN", b"1" * 30, b"[" + b"1, " * 12 + b"1]", b" " * 40))
WORDS = st.sampled_from(("url", "text", "type", "image_url", "input_audio", "data", "é", "model", "role", "content"))
STRINGS = WORDS.map(json.dumps).map(str.encode) | long_string()


def objects(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    pairs = st.tuples(STRINGS, values).map(b": ".join)
    return st.lists(pairs, max_size=4).map(lambda all_pairs: b"{" + b", ".join(all_pairs) + b"}")


VALUES = st.recursive(
    STRINGS | NUMBERS,
    lambda values: (
        objects(values) | st.lists(values, max_size=4).map(lambda all_values: b"[%s]" % b",".join(all_values))
    ),
    max_leaves=6,
)


def part(kind: bytes, name: bytes) -> st.SearchStrategy[bytes]:
    """A part with the string in its place, sometimes twice, sometimes beside something else."""
    values = long_string() | long_string().map(b'{"url": %s}'.__mod__) | VALUES
    extra = (
        st.sampled_from((b"", b', "x": 1'))
        | VALUES.map(b', "x": %s'.__mod__)
        | values.map((b', "%s": ' % name).__add__)
    )
    return st.tuples(values, extra).map(lambda both: b'{"type": "%s", "%s": %s%s}' % (kind, name, *both))


PARTS = st.one_of(
    part(b"image_url", b"image_url"),
    part(b"input_image", b"image_url"),
    part(b"video_url", b"video_url"),
    part(b"audio_url", b"audio_url"),
    part(b"text", b"text"),
    part(b"text", b"image_url"),
    long_string().map(b'{"type": "input_audio", "input_audio": {"data": %s, "format": "wav"}}'.__mod__),
    long_string().map(b'{"type": "input_audio", "input_audio": %s}'.__mod__),
    long_string().map(b'{"image_url": %s}'.__mod__),
    VALUES,
)
CONTENTS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: b"[" + b", ".join(parts) + b"]")
MESSAGES = st.one_of(
    CONTENTS.map(b'{"role": "user", "content": %s}'.__mod__),
    long_string().map(b'{"role": "user", "content": %s}'.__mod__),
    long_string().map(b'{"role": %s, "content": "?"}'.__mod__),
    long_string().map(
        b'{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}'.__mod__
    ),
    VALUES,
)
FIELDS = st.one_of(
    st.sampled_from((b"", b"", b"", b', "n": 2', b', "n": "no"', b', "unknown": 1', b', "suffix": "x"')),
    st.tuples(st.sampled_from((b"model", b"metadata", b"messages", b"prompt", b"stop")), VALUES).map(
        lambda pair: b', "%s": %s' % pair
    ),
    long_string().map(b', "tools": [{"type": "function", "function": {"name": "f", "description": %s}}]'.__mod__),
)
CHATS = st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), FIELDS).map(
    lambda both: b'{"messages": [%s]%s}' % (b", ".join(both[0]), both[1])
)


ORDINARY = st.one_of(
    long_string().map(b'{"type": "image_url", "image_url": {"url": %s}}'.__mod__),
    long_string().map(b'{"type": "input_audio", "input_audio": {"data": %s, "format": "wav"}}'.__mod__),
    st.just(b'{"type": "text", "text": "?"}'),
)
ORDINARY_CHATS = st.lists(ORDINARY, min_size=1, max_size=3).map(
    lambda parts: b'{"messages": [{"role": "user", "content": [%s]}]}' % b", ".join(parts)
)


@st.composite
def bodies(draw: st.DrawFn) -> bytearray:
    body = draw(st.one_of(ORDINARY_CHATS, CHATS, VALUES, STRINGS.map(b'{"prompt": %s}'.__mod__)))
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        place = draw(st.integers(0, len(body)))
        spoilt = draw(SPOILT | st.sampled_from((b'"', b"", b"}", b'""')))
        body = body[:place] + spoilt + body[place + draw(st.integers(0, 2)) :]
    return bytearray(body)


# What a parser makes of them, written out

QUICK = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def outcome(parse_: Parse, body: bytearray, kind: TypeAdapter[Any]) -> list[str]:
    """The request and its conversation, or the error of either."""
    seen: list[str] = []
    try:
        parsed = parse_(body, kind)
        seen.append(repr(plain(vars(parsed))))
        seen.append(repr(Conversation.parse(parsed.messages)) if hasattr(parsed, "messages") else "no chat")
    except SemelError as error:
        seen.append(f"{type(error).__name__}: {error}, {vars(error)}")
    return seen


def plain(value: Any) -> Any:
    if isinstance(value, LongString):
        return value[:]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def parse_now(body: bytearray, kind: TypeAdapter[Any]) -> Any:
    return asyncio.run(parse_body(body, kind, LIMITS))


def compare(body: bytearray, kind: TypeAdapter[Any]) -> None:
    assert outcome(parse_now, body, kind) == outcome(parse, body, kind)


@pytest.mark.slow
def test_many_of_these_bodies_are_parsed_without_their_long_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: what is always parsed whole cannot differ."""
    shorten(monkeypatch)
    cuts: Counter[bool] = Counter()

    @settings(QUICK, max_examples=200, phases=[Phase.generate], database=None, derandomize=True)
    @given(body=bodies())
    def count(body: bytearray) -> None:
        parsed = asyncio.run(body_module._parse_without_long_strings(body, CHAT, LIMITS))
        cuts[parsed is not None] += 1

    count()
    assert cuts[True] >= 10, cuts


@QUICK
@given(body=bodies(), kind=st.sampled_from(KINDS))
@pytest.mark.usefixtures("short")
def test_a_body_is_parsed_to_the_same_as_before_and_refused_with_the_same_words(
    body: bytearray, kind: TypeAdapter[Any]
) -> None:
    compare(body, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@settings(QUICK, max_examples=1_000)
@given(body=bodies(), kind=st.sampled_from(KINDS))
def test_thousands_of_bodies_are_parsed_to_the_same_as_before(body: bytearray, kind: TypeAdapter[Any]) -> None:
    compare(body, kind)


def everything_is_base64(data: memoryview) -> bool:
    return bytes(data).isascii()


def no_token_is_missed(messages: list[dict[str, Any]], strings: dict[str, LongString]) -> int:
    put_media(messages, strings)
    return len(strings)


def image_of(content: bytes) -> bytearray:
    part_ = b'{"type": "image_url", "image_url": "data:image/png;base64,%s"}' % content
    return bytearray(b'{"messages": [{"role": "user", "content": [%s]}]}' % part_)


PLAIN = b"AAAA" * 8
MUTANTS = (
    (long_strings, "_is_base64", everything_is_base64, image_of(PLAIN + b"\n" + PLAIN)),
    (long_strings, "_HEAD", re.compile(rb"data:[^,]{0,512},"), image_of(PLAIN).replace(b"png", b"p\1g")),
    (long_strings, "_OTHER_ESCAPE", re.compile(rb"\\[^/n]"), image_of(PLAIN + b"\\nAAA" + PLAIN)),
    (body_module, "put_media", no_token_is_missed, image_of(PLAIN).replace(b'"image_url"', b'"text"')),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[name for _, name, _, _ in MUTANTS])
@pytest.mark.usefixtures("short")
def test_mutant_each_check_of_a_cut_is_needed(
    mutant: tuple[object, str, object, bytearray], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, wrong, body = mutant
    compare(body, CHAT)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        compare(body, CHAT)


# Strings of the length that they have in production


def chat_of(content: str, place: str = '{"type": "image_url", "image_url": {"url": %s}}') -> bytearray:
    return bytearray(b'{"messages": [{"role": "user", "content": [%s]}]}' % (place % json.dumps(content)).encode())


URL = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 4_096).decode()


@pytest.mark.parametrize("slash", [b"/", b"\\/"])
async def test_the_media_of_a_chat_are_cut_out_and_decoded_from_the_bodys_bytes(slash: bytes) -> None:
    body = bytearray(chat_of(URL).replace(b"/", slash))
    cut = cut_long_strings(body, "abc")
    assert len(cut.rest) < 100
    assert [string[:] for string in cut.strings.values()] == [URL]
    parsed = await parse_body(body, CHAT, LIMITS)
    assert isinstance(parsed.messages[0]["content"][0]["image_url"]["url"], LongString)
    (part_,) = Conversation.parse(parsed.messages).messages[0].parts
    assert part_ == Attachment(Media("image", bytes(range(256)) * 4_096, "image/png"))


@pytest.mark.parametrize("field", ["image_url", "text", "unknown"])
async def test_what_is_parsed_whole_is_bounded_and_the_base64_of_media_is_not(field: str) -> None:
    limits = BodyLimits(max_text_bytes=300_000)
    assert len(URL) > 4 * limits.max_text_bytes
    body = chat_of(URL, '{"type": "%s", "%s": %%s}' % (field, field))  # noqa: UP031 - it has braces
    if field == "image_url":
        assert len((await parse_body(body, CHAT, limits)).messages) == 1
        broken = body.replace(b'"messages"', b'"temperature": "warm", "messages"')
        with pytest.raises(InvalidRequest, match="temperature"):
            await parse_body(broken, CHAT, limits)
        return
    with pytest.raises(MediaTooLarge, match="--max-body-text-bytes"):
        await parse_body(body, CHAT, limits)
    assert await parse_body(body, CHAT, LIMITS)  # the control: within the limit it is parsed whole


async def test_long_texts_without_base64_are_bounded_whatever_their_length() -> None:
    for size in (1_000, 400_000):
        body = chat_of("é" * size, '{"type": "text", "text": %s}')
        assert await parse_body(body, CHAT, BodyLimits(max_text_bytes=len(body)))
        with pytest.raises(MediaTooLarge, match="--max-body-text-bytes"):
            await parse_body(body, CHAT, BodyLimits(max_text_bytes=len(body) - 1))


def test_an_image_that_is_a_client_s_token_is_not_replaced() -> None:
    first, second = '{"type": "image_url", "image_url": %s}', '{"type": "image_url", "image_url": "abcx0"}'
    body = chat_of(URL, f"{second}, {first}")
    parsed = asyncio.run(parse_body(body, CHAT, LIMITS))  # the nonce is random: a client cannot know it
    assert parsed.messages[0]["content"][0]["image_url"] == "abcx0"
