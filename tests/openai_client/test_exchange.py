"""References without I/O: what a server makes of them is what the caller sent; events may be cut anywhere."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.lab.testing.references import ReferenceServer, Rejection, expanded
from semel.openai import Memory
from semel.openai import dialect as dialects
from semel.openai.dialect import CHAT_COMPLETIONS, MESSAGES, RESPONSES, Dialect, EventDialect
from semel.openai.exchange import EventReader, Exchange
from tests.openai_client.agents import image, picture, user

LONG = "A" * 1_100
"""What makes media long enough to be worth an id."""

NAMES = st.text("abc", max_size=2)
URLS = st.one_of(
    st.builds(lambda name: f"data:image/png;base64,{LONG}{name}", NAMES),
    st.builds(lambda name: f"data:image/png;base64,{name}", NAMES),
    st.builds(lambda name: f"http://host/{name}", NAMES),
)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5)),
    st.builds(lambda url, kind: {"type": kind, kind: {"url": url}}, URLS, st.sampled_from(["image_url", "video_url"])),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": url, "extra": [1]}, URLS),
    st.builds(lambda url: {"image_url": {"url": url}}, URLS),
    st.builds(
        lambda name, form: {"type": "input_audio", "input_audio": {"data": LONG + name, "format": form}},
        NAMES,
        st.sampled_from(["wav", "mp3"]),
    ),
    st.just("a text"),
)
CONVERSATIONS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "tool", "system"]),
        st.one_of(st.text(max_size=3), st.none(), st.lists(PARTS, max_size=4)),
    ),
    max_size=4,
)
STEPS = st.lists(st.one_of(CONVERSATIONS, st.sampled_from(["forget", "none"])), max_size=8)


def run(steps: list[Any], memory: Memory, *, cache_salt: str | None = None) -> list[tuple[Any, Any]]:
    """Send conversations to a server that forgets now and then. What it made of each, and what was sent."""
    server, found = ReferenceServer(), []
    for step in steps:
        if isinstance(step, str):
            server.forget() if step == "forget" else None
            continue
        body = {"model": "m", "messages": step} | ({"cache_salt": cache_salt} if cache_salt else {})
        exchange = Exchange.of(CHAT_COMPLETIONS, memory, b"server", json.dumps(body).encode())
        if exchange is None:
            continue
        for _ in range(3):
            try:
                answer = server.answer(json.loads(exchange.content()), "owner")
            except Rejection as error:
                assert exchange.repair(error.status, json.dumps({"error": {"code": error.code}}).encode())
                continue
            seen = json.loads(exchange.read(json.dumps(answer).encode()))
            assert "media_ids" not in seen
            found.append((server.expanded[-1]["messages"], expanded(body, {})[0]["messages"]))
            break
        else:
            pytest.fail("it was sent four times")
    return found


@settings(deadline=None)
@given(STEPS, st.integers(1, 8))
def test_what_a_server_makes_of_references_is_what_the_caller_sent(steps: list[Any], max_ids: int) -> None:
    before = copy.deepcopy(steps)
    for made, meant in run(steps, Memory(max_ids=max_ids)):
        assert made == meant
    assert steps == before


@pytest.mark.parametrize("kept", [["x"], [0, 1, 2]])
def test_mutant_a_digest_of_less_than_the_media_is_found(kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the content, or with its beginning only, a picture stands for another."""
    whole = dialects._digest
    monkeypatch.setattr(dialects, "_digest", lambda *texts: whole(*(text[: len(kept) * 100] for text in texts)))
    steps = [[user(image(f"data:image/png;base64,{LONG}{name}"))] for name in "ab"]
    (_, (made, meant)) = run(steps, Memory())
    assert made != meant


URL = f"data:image/png;base64,{LONG}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": LONG}
ID = {"file_id": "file-1"}
PLACES: dict[str, tuple[Dialect, dict[str, Any], dict[str, Any]]] = {
    "a file in a chat": (
        CHAT_COMPLETIONS,
        {"file": {"file_data": URL, "filename": "a"}},
        {"file": {**ID, "filename": "a"}},
    ),
    "Anthropic's image in a chat": (
        CHAT_COMPLETIONS,
        {"type": "image", "source": SOURCE},
        {"type": "image_url", "image_url": ID},
    ),
    "an image of Responses": (RESPONSES, {"type": "input_image", "image_url": URL}, {"type": "input_image", **ID}),
    "a file of Responses": (RESPONSES, {"type": "input_file", "file_data": URL}, {"type": "input_file", **ID}),
    "audio of Responses": (
        RESPONSES,
        {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}},
        {"type": "audio_url", "audio_url": ID},
    ),
    "an image of Messages": (
        MESSAGES,
        {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "file", **ID}, "cache_control": {"type": "ephemeral"}},
    ),
    "a document of Messages": (
        MESSAGES,
        {"type": "document", "source": SOURCE, "title": "t"},
        {"type": "document", "source": {"type": "file", **ID}, "title": "t"},
    ),
    "a text of Messages": (MESSAGES, text := {"type": "document", "source": {"type": "text", "data": LONG}}, text),
    "a named one": (CHAT_COMPLETIONS, named := {**image(URL), "uuid": "name"}, named),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_part_is_named_in_the_shape_of_its_api(place: str) -> None:
    """Also in the result of a tool, one level deeper; what lies deeper is nobody's, and stays."""
    dialect, part, expected = PLACES[place]
    items = "input" if dialect is RESPONSES else "messages"

    def body(one: Any) -> dict[str, Any]:
        result = {"type": "tool_result", "content": [one, {"type": "tool_result", "content": [part]}]}
        return {items: [{"role": "user", "content": [one, result, "text"]}, "no item"], "cache_salt": "s"}

    digests = dialect.digests(body(part))
    assert len(digests) == 2
    made = dialect.request(body(part), ["file-1" if digest else None for digest in digests])
    assert made == {**body(expected), "return_media_ids": True}


def test_media_of_one_salt_do_not_stand_for_those_of_another() -> None:
    body = {"messages": [user(image(picture()))]}
    digests = {CHAT_COMPLETIONS.digests({**body, **more}) for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})}
    assert len(digests) == 3


def test_ids_that_are_not_as_many_as_the_media_are_not_used() -> None:
    memory, body = Memory(), {"messages": [user(image(picture()))]}
    exchange = Exchange.of(CHAT_COMPLETIONS, memory, b"s", json.dumps(body).encode())
    assert exchange is not None
    exchange.read(json.dumps({"media_ids": ["file-1", "file-2"]}).encode())
    assert (len(memory), memory.returns_ids(b"s")) == (0, True)


def test_a_server_that_has_returned_ids_is_not_left_for_an_answer_without() -> None:
    memory = Memory()
    memory.learn(b"s", [b"d"], ["file-1"])
    memory.leave(b"s")
    assert memory.returns_ids(b"s")
    memory.leave(b"other")
    assert memory.returns_ids(b"other") is False


EVENTS = [
    b": a comment\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"\\n\\n"}}],"usage":null}\n\n',
    b'event: x\r\ndata: {"choices":[{"index":0}]}\r\n\r\n',
    b'data:{"choices":[{"index":1}],"usage":null,"media_ids":["file-9"]}\r\r',
    b'data: {"choices":[],"usage":{"total_tokens":2},"media_ids":["file-9"]}\n\n',
    b'data: {"usage": broken\n\n',
    b"data: [DONE]\n\n",
    b"an end without one",
]
SEEN = [
    b": a comment\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"\\n\\n"}}]}\n\n',
    b'event: x\r\ndata: {"choices":[{"index":0}]}\r\n\r\n',
    b'data:{"choices":[{"index":1}]}\r\r',
    b'data: {"usage": broken\n\n',
    b"data: [DONE]\n\n",
    b"an end without one",
]


def stream_exchange(memory: Memory, **options: Any) -> Exchange:
    body = {"messages": [user(image(picture()))], "stream": True, **options}
    made = Exchange.of(CHAT_COMPLETIONS, memory, b"s", json.dumps(body).encode())
    assert made is not None
    return made


@settings(deadline=None)
@given(st.lists(st.integers(0, sum(map(len, EVENTS))), max_size=12))
def test_events_may_be_cut_anywhere(places: list[int]) -> None:
    memory, data = Memory(), b"".join(EVENTS)
    reader = EventReader(stream_exchange(memory))
    ends = [0, *sorted(places), len(data)]
    seen = b"".join(reader.feed(data[start:end]) for start, end in pairwise(ends)) + reader.end()
    assert seen == b"".join(SEEN)
    assert len(memory) == 1


def test_a_caller_that_wants_usage_and_ids_sees_every_byte() -> None:
    options = {"stream_options": {"include_usage": True}, "return_media_ids": True}
    reader = EventReader(stream_exchange(Memory(), **options))
    assert b"".join(map(reader.feed, EVENTS)) + reader.end() == b"".join(EVENTS)


def test_a_stream_without_ids_says_that_the_server_returns_none_only_at_its_end() -> None:
    memory = Memory()
    reader = EventReader(stream_exchange(memory))
    reader.feed(EVENTS[2])
    assert memory.returns_ids(b"s") is None
    reader.feed(b"data: [DONE]\n\n")
    assert memory.returns_ids(b"s") is False


@pytest.mark.parametrize(
    ("dialect", "part", "events"),
    [
        (RESPONSES, {"type": "input_image", "image_url": URL}, ["response.created", "response.completed"]),
        (MESSAGES, {"type": "image", "source": SOURCE}, ["ping", "message_start"]),
    ],
)
@pytest.mark.parametrize("ids", [["file-1"], None])
def test_one_event_tells_whether_a_stream_has_ids(
    dialect: EventDialect, part: Any, events: list[str], ids: list[str] | None
) -> None:
    memory, body = Memory(), {"stream": True, dialect.items: [{"role": "user", "content": [part]}]}
    exchange = Exchange.of(dialect, memory, b"server", json.dumps(body).encode())
    assert exchange is not None
    reader, seen = EventReader(exchange), b""
    for kind in events:
        has_ids = {"media_ids": ids} if ids and kind == events[-1] else {}
        event = {"type": kind, dialect.inner: {"id": "r", "usage": None, **has_ids}}
        assert memory.returns_ids(b"server") is None
        seen += reader.feed(f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode())
    assert (memory.returns_ids(b"server"), seen.count(b"data: "), b"media_ids" in seen) == (bool(ids), 2, False)


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    reader = EventReader(stream_exchange(Memory()))
    seen = sum(len(reader.feed(b"x" * (1 << 20))) for _ in range(20)) + len(reader.end())
    assert seen == 20 << 20
    assert not reader.feed(b"") and not reader._rest
