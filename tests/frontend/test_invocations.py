"""SageMaker's routes: the body decides whether it is a chat or a completion."""

from __future__ import annotations

from typing import Any

import pytest

from semel.core import Keyring
from semel.frontend.app import create_app
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig
from tests.render.drawn import image_part

CHAT = {"messages": [{"role": "user", "content": ["hello", image_part(3)]}], "max_tokens": 2}
PROMPT = {"prompt": "hello", "max_tokens": 2}
ROUTES = [(CHAT, "/v1/chat/completions"), (PROMPT, "/v1/completions")]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize(("body", "route"), ROUTES)
async def test_an_invocation_is_answered_as_the_route_would(app: Rig, body: dict[str, Any], route: str) -> None:
    assert plain(await app.ok("/invocations", body)) == plain(await app.ok(route, body))
    streamed = await app.post("/invocations", {**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_what_is_neither_is_refused_with_what_is_missing(app: Rig) -> None:
    assert await app.refused("/invocations", {"inputs": "hello"}) == (400, "prompt: is missing; send it")
    status, message = await app.refused("/invocations", {**CHAT, "n": 0})
    assert (status, message) == (400, "n: must be at least 1")


async def test_a_container_is_probed_without_a_key(app: Rig) -> None:
    made = create_app(app.service, app.meter, Keyring([("acme", "a-client-s-key-0123456789")]))
    exchange = Exchange()
    await exchange.run(made, "/ping", stream_of([]))
    assert exchange.status == 200
    exchange = Exchange()
    await exchange.run(made, "/invocations", stream_of([b"{}"]))
    assert exchange.status == 401
