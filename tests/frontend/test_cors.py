"""Web pages of other origins may call the API if the operator says so, read errors too, and ask without a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.middleware import Middleware

from semel.core import Keyring
from semel.errors import ConfigError
from semel.frontend import app as application
from semel.frontend.app import create_app
from semel.frontend.limits import CorsSettings
from semel.frontend.routes.openapi import DocumentedApp
from tests.frontend.rig import Rig

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "chat_id": "1"}
KEYS = Keyring([("acme", "a-client-s-key-0123456789")])
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-custom",
}


@asynccontextmanager
async def client(app: Rig, cors: CorsSettings, keys: Keyring | None = None) -> AsyncIterator[httpx.AsyncClient]:
    made = create_app(app.service, app.meter, keys, cors=cors)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://frontend") as sending:
        yield sending


async def test_by_default_no_page_of_another_origin_may_call(app: Rig) -> None:
    async with client(app, CorsSettings()) as sending:
        reply = await sending.post(CHAT, json=BODY, headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
        assert (await sending.options(CHAT, headers=PREFLIGHT)).status_code == 405


async def test_a_browser_asks_without_a_key_and_is_told_what_the_page_may_send(app: Rig) -> None:
    async with client(app, CorsSettings(allowed_origins=(PAGE,)), KEYS) as sending:
        reply = await sending.options(CHAT, headers=PREFLIGHT)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert "x-custom" in reply.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reply.headers
        other = await sending.options(CHAT, headers={**PREFLIGHT, "Origin": "https://evil.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)


async def test_a_page_can_read_answers_and_errors_and_their_headers(app: Rig) -> None:
    async with client(app, CorsSettings(allowed_origins=(PAGE,)), KEYS) as sending:
        headers = {"Origin": PAGE, "Authorization": "Bearer a-client-s-key-0123456789"}
        answers = {
            200: await sending.post(CHAT, json=BODY, headers=headers),
            400: await sending.post(CHAT, json={}, headers=headers),
            401: await sending.post(CHAT, json=BODY, headers={"Origin": PAGE}),
            404: await sending.post("/v1/nothing", json=BODY, headers=headers),
        }
        for status, reply in answers.items():
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "x-semel-ignored-fields" in answers[200].headers["access-control-expose-headers"]


async def test_mutant_inside_the_authentication_a_browser_s_question_needs_a_key(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Middleware] = []

    def inside(routes: Any, *, middleware: list[Middleware], **options: Any) -> Any:
        made.extend(middleware)
        return documented(routes, middleware=[*middleware[1:], middleware[0]], **options)

    documented = DocumentedApp
    monkeypatch.setattr(application, "DocumentedApp", inside)
    async with client(app, CorsSettings(allowed_origins=(PAGE,)), KEYS) as sending:
        assert (await sending.options(CHAT, headers=PREFLIGHT)).status_code == 401
    assert made


def test_values_are_repeated_or_a_json_list_as_with_vllm() -> None:
    assert CorsSettings(allowed_origins=("https://a", '["https://b", "https://c"]')).allowed_origins == (
        *("https://a", "https://b", "https://c"),
    )
    assert CorsSettings().allowed_methods == CorsSettings().allowed_headers == ("*",)
    for wrong in ('["a"', "[1]"):
        with pytest.raises(ConfigError, match="--allowed-origins"):
            CorsSettings(allowed_origins=(wrong,))
