"""The real `openai` client with semel's transport, against a small server: what is sent, and what the caller sees."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from semel.lab.testing.references import ReferenceServer, Rejection, expanded, serve_references
from semel.openai import AsyncTransport, Memory, Transport, client
from semel.openai.dialect import ChatCompletions
from semel.openai.exchange import Exchange
from tests.openai_client.agents import Agent, agent, image, picture, user

FORMS = pytest.mark.parametrize(
    ("is_async", "options"),
    [
        pytest.param(is_async, options, id=f"{'async' if is_async else 'sync'}-{name}")
        for is_async in (False, True)
        for name, options in (("whole", {}), ("stream", {"stream": True}))
    ],
)
BOTH = pytest.mark.parametrize("is_async", [False, True])


@pytest.fixture
def server() -> Iterator[ReferenceServer]:
    with serve_references(ReferenceServer(text="one two three")) as made:
        yield made


def sent(messages: list[Any]) -> Any:
    """What a server has to make of messages, in its spelling."""
    return expanded({"messages": json.loads(json.dumps(messages))}, {})[0]["messages"]


def converse(one: Agent, turns: int, **options: Any) -> list[Any]:
    """A conversation in which each turn adds a picture."""
    messages: list[Any] = []
    for _ in range(turns):
        messages.append(user(image(picture())))
        (*_, last) = one.ask(messages, **options)
        assert last["choices"]
        messages.append({"role": "assistant", "content": "one two three"})
    return messages[:-1]


@FORMS
def test_each_picture_is_sent_once(server: ReferenceServer, is_async: bool, options: dict[str, Any]) -> None:
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        messages = converse(one, 8, **options)
    assert server.expanded[-1]["messages"] == sent(messages)
    assert [json.dumps(body).count(";base64,") for body in server.bodies] == [1] * 8
    assert [json.dumps(body).count('"file_id"') for body in server.bodies] == [*range(8)]
    whole = sum(len(json.dumps(body)) for body in server.expanded)
    assert server.received_bytes < 0.4 * whole


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": False}},
        {"extra_body": {"return_media_ids": True}},
        {"extra_body": {"return_media_ids": False}},
        {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"return_media_ids": True}},
    ],
)
def test_the_caller_sees_what_it_would_have_seen(
    server: ReferenceServer, is_async: bool, options: dict[str, Any]
) -> None:
    messages = [user(image(picture())), user(image(picture()))]
    with agent(server.url, is_async=is_async, memory=None) as plain:
        expected = plain.ask(messages, **options)
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        for _ in range(3):
            assert one.ask(messages, **options) == expected
    asked = dict(options.get("extra_body", {})).get("return_media_ids")
    assert ("media_ids" in expected[-1]) is bool(asked)


def test_mutant_an_answer_that_is_not_cleaned_is_seen(server: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatCompletions, "answer", lambda _self, _body, answer: answer)
    for options in ({}, {"stream": True}):
        with agent(server.url, is_async=False, memory=Memory()) as one:
            assert "media_ids" in one.ask([user(image(picture()))], **options)[-1]


@FORMS
def test_what_a_server_forgot_is_sent_again(server: ReferenceServer, is_async: bool, options: dict[str, Any]) -> None:
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        messages = converse(one, 3, **options)
        server.forget()
        server.bodies.clear()
        expected = one.ask(messages, **options)
        assert [json.dumps(body).count('"file_id"') for body in server.bodies] == [3, 0]
        server.bodies.clear()
        assert one.ask(messages, **options) == expected
        assert [json.dumps(body).count('"file_id"') for body in server.bodies] == [3]
    assert server.expanded[-1]["messages"] == sent(messages)


def test_mutant_a_client_that_does_not_repair_shows_the_error_to_its_caller(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(server.url, is_async=False, memory=Memory()) as one:
        messages = converse(one, 2)
        server.forget()
        monkeypatch.setattr(Exchange, "repair", lambda *_: False)
        with pytest.raises(openai.NotFoundError, match="unknown_media"):
            one.ask(messages)


@FORMS
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_server_that_returns_no_ids_is_left_alone_after_its_first_answer(
    server: ReferenceServer, is_async: bool, options: dict[str, Any], is_strict: bool
) -> None:
    server.returns_ids, server.is_strict = False, is_strict
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        messages = converse(one, 3, **options)
        server.bodies.clear()
        found = one.ask(messages, **options)
    with agent(server.url, is_async=is_async, memory=None) as plain:
        assert found == plain.ask(messages, **options)
    assert server.bodies[0] == server.bodies[1]
    assert server.expanded[-1]["messages"] == messages
    assert len(server.bodies) == 2


@BOTH
def test_an_error_of_the_caller_is_the_callers(server: ReferenceServer, is_async: bool) -> None:
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        messages = converse(one, 2)
        refusals = {400: openai.BadRequestError, 404: openai.NotFoundError, 422: openai.UnprocessableEntityError}
        for status, kind in refusals.items():
            server.faults = [Rejection(status, "no_such_thing")] * 2
            with pytest.raises(kind, match="no_such_thing"):
                one.ask(messages)
            server.faults.clear()
        server.bodies.clear()
        one.ask(messages)
        assert [json.dumps(body).count('"file_id"') for body in server.bodies] == [2], "the ids are still good"


@BOTH
@pytest.mark.parametrize("code", ["media_store_unavailable", "no_media_store"])
def test_a_store_that_is_gone_costs_bytes_and_no_answer(server: ReferenceServer, is_async: bool, code: str) -> None:
    with agent(server.url, is_async=is_async, memory=Memory()) as one:
        messages = converse(one, 2)
        server.faults = [Rejection(503, code)]
        server.bodies.clear()
        assert one.ask(messages)[0]["choices"]
    assert [json.dumps(body).count('"file_id"') for body in server.bodies] == [2, 0]
    assert "return_media_ids" not in server.bodies[-1]


@BOTH
def test_ids_are_good_for_one_server_and_one_key(server: ReferenceServer, is_async: bool) -> None:
    memory, messages = Memory(), [user(image(picture()))]
    with serve_references() as another:
        for url, key in ((server.url, "a"), (server.url, "b"), (another.url, "a")):
            with agent(url, is_async=is_async, memory=memory, key=key) as one:
                one.ask(messages)
                one.ask(messages)
        assert len(memory) == 3
        sizes = [json.dumps(body).count('"file_id"') for body in (*server.bodies, *another.bodies)]
        assert sizes == [0, 1] * 3, "nobody was sent an id of somebody else"
    assert not any(b"data:" in digest for _, digest in memory._ids)


def test_the_memory_is_bounded_and_has_no_media(server: ReferenceServer) -> None:
    memory = Memory(max_ids=4)
    with agent(server.url, is_async=False, memory=memory) as one:
        one.ask([user(image(picture()))])
        tracemalloc.start()
        for _ in range(8):
            one.ask([user(image(picture(100_000)))])
        server.bodies.clear()
        server.expanded.clear()
        server.forget()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(memory) == 4
    assert kept < 500_000


@pytest.mark.parametrize("is_async", [False, True])
def test_other_requests_pass_untouched(is_async: bool) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"media_ids": ["file-1"]})

    async def later() -> AsyncIterator[bytes]:
        yield data

    data = json.dumps({"messages": [user(image(picture()))]}).encode()
    as_json, chat = {"content-type": "application/json"}, "http://x/v1/chat/completions"
    requests = [
        httpx.Request("POST", "http://x/v1/completions", content=data, headers=as_json),
        httpx.Request("POST", chat, content=data, headers={"content-type": "text/plain"}),
        httpx.Request("POST", chat, content=data, headers={**as_json, "content-encoding": "gzip"}),
        httpx.Request("PUT", chat, content=data, headers=as_json),
        httpx.Request("POST", chat, content=later() if is_async else iter([data]), headers=as_json),
        httpx.Request("POST", chat, content=b"{" + data, headers=as_json),
        httpx.Request("POST", chat, content=b"[]", headers=as_json),
        httpx.Request("POST", chat, json={"messages": "none"}),
        httpx.Request("POST", chat, json={"messages": [user(image("http://y/a.png")), user(image(picture(10)))]}),
        httpx.Request("POST", chat, json={"messages": [user({**image(picture()), "uuid": "name"})]}),
    ]
    for request in requests:
        if is_async:
            response = asyncio.run(AsyncTransport(httpx.MockTransport(handle)).handle_async_request(request))
        else:
            response = Transport(httpx.MockTransport(handle)).handle_request(request)
        assert seen.pop() is request
        assert response.json() == {"media_ids": ["file-1"]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_that_come_compressed_are_read_and_cleaned(is_stream: bool) -> None:
    answer = json.dumps({"choices": [{"index": 0}], "media_ids": ["file-1"]})
    content, kind = (f"data: {answer}\n\n", "text/event-stream") if is_stream else (answer, "application/json")
    headers = {"content-type": kind, "content-encoding": "gzip", "x-request-id": "7"}
    memory = Memory()
    inner = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=gzip.compress(content.encode())))
    with httpx.Client(transport=Transport(inner, memory)) as asking:
        response = asking.send(stream_request(stream=is_stream))
    assert json.loads(response.text.removeprefix("data: ")) == {"choices": [{"index": 0}]}
    assert response.headers["x-request-id"] == "7"
    assert "content-encoding" not in response.headers
    assert len(memory) == 1


class _Events(httpx.SyncByteStream):
    """Events of which each is there only after the one before was read."""

    def __init__(self) -> None:
        self.made = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for number in range(5):
            self.made += 1
            yield f'data: {{"choices":[{{"index":0}}],"n":{number}}}\n\n'.encode()

    def close(self) -> None:
        self.is_closed = True


def stream_request(*, stream: bool = True) -> httpx.Request:
    body = {"messages": [user(image(picture()))], "stream": stream}
    return httpx.Request("POST", "http://x/v1/chat/completions", json=body)


def test_events_pass_as_they_come_and_an_early_end_closes_the_connection() -> None:
    events = _Events()
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    inner = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=events))
    response = Transport(inner).handle_request(stream_request())
    for number, chunk in enumerate(response.iter_bytes(), start=1):
        assert (events.made, chunk.count(b"data:")) == (number, 1)
        if number == 3:
            break
    response.close()
    assert events.is_closed


def test_a_stream_that_is_left_early_teaches_nothing_and_harms_nothing(server: ReferenceServer) -> None:
    messages: Any = [user(image(picture()))]
    with openai.OpenAI(base_url=server.url, api_key="k", http_client=client()) as asking:
        for _ in range(2):
            with asking.chat.completions.create(model="m", messages=messages, stream=True) as stream:
                next(iter(stream))
        answer = asking.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "one two three"


def test_proxies_of_the_environment_and_options_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with client() as made, httpx.Client() as plain:
        assert made._mounts.keys() == plain._mounts.keys()
        assert all(isinstance(one, Transport) for one in made._mounts.values() if one is not None)
        assert made.follow_redirects
        assert made.timeout.read == 600
    with client(timeout=3) as made:
        assert made.timeout.read == 3


def test_clients_of_httpx2_are_made_too(server: ReferenceServer) -> None:
    library = pytest.importorskip("httpx2")
    anthropic = pytest.importorskip("anthropic")
    anthropic.Anthropic(api_key="k", http_client=client(library=library)).close()
    with agent(server.url, is_async=False, memory=Memory(), library=library) as one:
        converse(one, 3, stream=True)
    with agent(server.url, is_async=True, memory=Memory(), library=library) as one:
        messages = converse(one, 3, stream=True)
    assert json.dumps(server.bodies[-1]).count('"file_id"') == 2
    assert server.expanded[-1]["messages"] == sent(messages)


def test_importing_it_needs_httpx_and_what_semel_always_needs() -> None:
    program = "import sys, semel.openai; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found = set(done.stdout.split())
    assert "httpx" in found
    assert not {"aiohttp", "backports", "openai", "pydantic", "starlette", "torch", "uvicorn", "zmq"} & found
