"""`semel.openai` with the real `openai` and `anthropic` packages on `/v1/responses` and `/v1/messages`: what is sent.

The server is a frontend's application at a port. Under semel's transport a log keeps each body with its status.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anthropic
import httpx2
import openai
import pytest

from semel.frontend.http import errors
from semel.frontend.routes import messages as messages_routes
from semel.lab.testing.engine import EchoEngine
from semel.openai import Memory, async_client, client, transport
from semel.openai.exchange import Exchange
from semel.render import ChatRenderer
from tests.frontend.agents import KEY, OTHER_KEY, Agents, agents
from tests.security.worlds import share_everything

Api = Literal["responses", "messages"]
Body = dict[str, Any]
Log = list[tuple[int, bytes]]
TURNS = 50
BOTH = pytest.mark.parametrize("api", ["responses", "messages"])
FORMS = pytest.mark.parametrize(("is_async", "stream"), [(False, False), (False, True), (True, False), (True, True)])
REFERENCES = {
    "responses": r'{"type":"input_image","detail":"auto","file_id":"file-[^"]+"}',
    "messages": r'{"type":"image","source":{"type":"file","file_id":"file-[^"]+"}}',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> Iterator[Agents]:
    def engine(contract: Any) -> EchoEngine:
        return EchoEngine(replace(contract, max_items={"image": TURNS}, max_tokens=1 << 16))

    with agents(tmp_path_factory.mktemp("once"), parts_renderer, make_engine=engine) as made:
        yield made


class Wire(httpx2.HTTPTransport):
    log: Log

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        self.log.append((response.status_code, request.content))
        return response


class AsyncWire(httpx2.AsyncHTTPTransport):
    log: Log

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        self.log.append((response.status_code, request.content))
        return response


@dataclass
class Caller:
    """A user of a real client, with semel's transport unless it has no memory."""

    server: Agents
    api: Api
    is_async: bool = False
    stream: bool = False
    memory: Memory | None = field(default_factory=Memory)
    key: str = KEY
    log: Log = field(default_factory=list)

    def ask(self, items: list[Body]) -> list[Body]:
        """The answer, or the events of the stream, as the caller sees them."""
        return asyncio.run(self._ask_async(items)) if self.is_async else self._ask(items)

    def _ask(self, items: list[Body]) -> list[Body]:
        make = httpx2.Client if self.memory is None else client
        with self._client(openai.OpenAI, anthropic.Anthropic, make, Wire()) as made:
            found = self._create(made, items)
            return [_timeless(one.model_dump(exclude_unset=True)) for one in (found if self.stream else [found])]

    async def _ask_async(self, items: list[Body]) -> list[Body]:
        make = httpx2.AsyncClient if self.memory is None else async_client
        async with self._client(openai.AsyncOpenAI, anthropic.AsyncAnthropic, make, AsyncWire()) as made:
            found = await self._create(made, items)
            events = [one async for one in found] if self.stream else [found]
            return [_timeless(one.model_dump(exclude_unset=True)) for one in events]

    def _client(self, for_openai: Any, for_anthropic: Any, make: Callable[..., Any], wire: Any) -> Any:
        wire.log = self.log
        options = {} if self.memory is None else {"memory": self.memory, "library": httpx2}
        named: Body = {"api_key": self.key, "max_retries": 0, "http_client": make(transport=wire, **options)}
        if self.api == "responses":
            return for_openai(base_url=f"{self.server.url}/v1", **named)
        return for_anthropic(base_url=self.server.url, **named)

    def _create(self, made: Any, items: list[Body]) -> Any:
        named: Body = {"model": "tiny", "stream": self.stream, "extra_headers": {"x-request-id": "one"}}
        if self.api == "responses":
            return made.responses.create(input=items, **named)
        return made.messages.create(messages=items, max_tokens=8, **named)

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.log]

    @property
    def references(self) -> list[int]:
        """How many each request had."""
        return [body.count(b'"file_id":"file-') for _, body in self.log]

    def items(self) -> Any:
        """The images that the engine has got of the last request."""
        return self.server.submission.prompt.items


def _timeless(answer: Body) -> Body:
    fields = {name: value for name, value in answer.items() if name not in ("completed_at", "created_at")}
    return {**fields, "response": _timeless(fields["response"])} if "response" in fields else fields


def image(api: Api, number: int, size: int = 3_000) -> Body:
    data = base64.b64encode(b"%d" % number + b"\n" * size).decode()
    if api == "responses":
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def conversation(api: Api, turns: int, size: int = 3_000) -> list[Body]:
    """Each turn has an image: the first in a message, the others in what a tool returned."""
    made: list[Body] = [{"role": "user", "content": [image(api, 0, size)]}]
    for number in range(1, turns):
        name, seen = f"c{number}", [image(api, number, size)]
        if api == "responses":
            made.append({"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"})
            made.append({"type": "function_call_output", "call_id": name, "output": seen})
        else:
            call = {"type": "tool_use", "id": name, "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": name, "content": seen, "is_error": False}
            made.append({"role": "assistant", "content": [call]})
            made.append({"role": "user", "content": [result, {"type": "text", "text": "é?"}]})
    return made


def forget(server: Agents) -> None:
    """As if the frontend had started again."""
    assert server.rig is not None
    server.rig.service.serving().pipeline.files.names._memories.clear()


def share_of_bytes(server: Agents, api: Api, *, stream: bool, turns: int = TURNS) -> float:
    """The bytes that an agent sends, over those of its conversations: each turn has an image of 40 KB in base64."""
    caller, whole = Caller(server, api, stream=stream), 0
    for number in range(1, turns + 1):
        caller.ask(items := conversation(api, number, 30_000))
        assert len(caller.items()) == number
        whole += len(json.dumps(items, separators=(",", ":")))
    assert caller.statuses == [200] * turns
    return sum(len(body) for _, body in caller.log) / whole


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_fifty_turns_sends_a_twentieth_of_the_bytes(server: Agents, api: Api, stream: bool) -> None:
    assert share_of_bytes(server, api, stream=stream) <= 0.05


@BOTH
def test_mutant_that_names_nothing_sends_all_bytes(server: Agents, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "known", lambda *_: {})
    assert share_of_bytes(server, api, stream=False, turns=9) >= 1


@BOTH
@FORMS
def test_a_server_that_forgot_is_sent_all_again_and_the_caller_sees_nothing(
    server: Agents, api: Api, is_async: bool, stream: bool
) -> None:
    caller = Caller(server, api, is_async, stream)
    for turns in (1, 2, 3):
        seen = caller.ask(conversation(api, turns))
    expected = caller.items()
    forget(server)
    for _ in range(2):
        assert caller.ask(conversation(api, 3)) == seen
        assert caller.items() == expected
    assert caller.statuses == [200, 200, 200, 404, 200, 200]
    assert caller.references == [0, 1, 2, 3, 0, 3]


def _never_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "repair", lambda *_: False)


def _no_codes(patch: pytest.MonkeyPatch) -> None:
    """Errors of Messages as Anthropic has them: with the type alone."""
    patch.setattr(errors, "messages_error_body", lambda message, **_: {"type": "error", "error": {"message": message}})


@pytest.mark.parametrize(
    ("api", "mutant"), [("responses", _never_again), ("messages", _never_again), ("messages", _no_codes)]
)
def test_mutant_that_does_not_see_what_is_unknown_shows_the_error(
    server: Agents, api: Api, mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(server, api)
    caller.ask(conversation(api, 2))
    forget(server)
    mutant(monkeypatch)
    with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
        caller.ask(conversation(api, 2))


@BOTH
@FORMS
def test_nothing_but_the_media_is_changed_and_the_caller_sees_what_it_would_have_seen(
    server: Agents, api: Api, is_async: bool, stream: bool
) -> None:
    items, plain = conversation(api, 3), Caller(server, api, is_async, stream, memory=None)
    expected, caller = plain.ask(items), Caller(server, api, is_async, stream)
    assert caller.ask(items) == caller.ask(items) == expected
    first, second = (body.replace(b',"return_media_ids":true', b"").decode() for _, body in caller.log)
    assert first == plain.log[0][1].decode()
    parts = iter([json.dumps(image(api, number), separators=(",", ":")) for number in range(3)])
    assert re.sub(REFERENCES[api], lambda _: next(parts), second) == first


def test_images_before_and_in_the_result_of_a_tool_are_not_exchanged(
    server: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the chat, results come first. The control returns the ids in that order."""
    first, second, third = (image("messages", number) for number in range(3))
    content = [first, {"type": "tool_result", "tool_use_id": "c", "content": [second]}, third]
    seen = []
    for _ in range(2):
        caller = Caller(server, "messages")
        for _ in range(2):
            caller.ask([{"role": "user", "content": content}])
            seen.append(caller.items())
        assert caller.references == [0, 3]
        monkeypatch.setattr(messages_routes, "sorted", list, raising=False)
    assert seen[0] == seen[1] == seen[2] != seen[3]


@BOTH
def test_tenants_do_not_share_what_they_sent_S12(server: Agents, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes the ids of one for those of the other is told that they are unknown."""
    monkeypatch.setattr(transport, "_server", lambda _: b"one for all")
    for statuses in ([404, 200], [200]):
        forget(server)
        memory = Memory()
        for key in (KEY, OTHER_KEY):
            (caller := Caller(server, api, memory=memory, key=key)).ask(conversation(api, 2))
        assert caller.statuses == statuses
        share_everything(monkeypatch)  # the control
