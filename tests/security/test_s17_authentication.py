"""S17: one guard over every route but the probes, and what a key's tenant can see of another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.compose.metrics_port import log_missing_metrics_port
from semel.core import Keyring
from semel.frontend.limits import RefusalLimits
from semel.frontend.middleware import authentication
from semel.frontend.middleware.authentication import Authentication
from semel.frontend.middleware.request_context import RequestContextMiddleware
from semel.lab.bench.ports import free_port
from semel.settings.frontend import ServingSettings
from semel.telemetry import Meter
from semel.telemetry.logs import ACCESS_LOGGER
from semel.telemetry.request_context import current_tenant
from semel.telemetry.spans import NO_TRACING
from semel.web.server import HttpServer
from tests.frontend.rig import Rig, rig
from tests.frontend.test_intents import body_of
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.security.worlds import ACME, KEYS, UMBRA
from tests.waiting import until

OPEN = {"/health", "/ping", "/ready"}


@pytest.fixture
async def guarded(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES, keys=KEYS) as made:
        made.service.refusals = RefusalLimits(per_s=0)  # or refusals would wait
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes_of(app: ASGIApp) -> list[tuple[str, str]]:
    """Every route of the application."""
    found = []
    for route in app.routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        found += [(method, route.path) for method in route.methods or ()]
    return found


class _GuardOfV1:
    """The naive guard, as systems have shipped it: what is not under /v1 is taken to be harmless."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["path"].startswith("/v1") and headers.get(b"authorization") != f"Bearer {self._key}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


async def statuses(app: ASGIApp, headers: dict[str, str], routes: list[tuple[str, str]]) -> dict[str, int]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        return {
            path: (await client.request(method, path, headers=headers, json={})).status_code for method, path in routes
        }


async def test_a_naive_guard_leaves_routes_open(tmp_path: Path, drawing: Drawing) -> None:
    async with rig(tmp_path, drawing.pipeline) as bare:
        answers = await statuses(_GuardOfV1(bare.app, ACME), {}, routes_of(bare.app))
    assert {path for path, status in answers.items() if status != 401} >= {"/tokenize", "/detokenize", "/metrics"}


@pytest.mark.parametrize(
    "headers", [{}, bearer(""), bearer(ACME[:-1]), {"authorization": ACME}, {"x-api-key": ACME[:-1]}]
)
async def test_without_a_key_no_route_but_the_probes_answers(guarded: Rig, headers: dict[str, str]) -> None:
    answers = await statuses(guarded.app, headers, routes_of(guarded.app))
    assert {path for path, status in answers.items() if status != 401} == OPEN
    assert guarded.engine.submissions == 0


@pytest.mark.parametrize("path", ["/nothing", "/health/", "//health", "/HEALTH", "/v1/%2e%2e/health", "/ready%2f"])
async def test_a_path_that_only_looks_like_a_probe_needs_a_key(guarded: Rig, path: str) -> None:
    reply = await guarded.client.get(path)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": ACME}, 200),
        ({"x-api-key": ACME, **bearer(UMBRA)}, 200),
        ({"x-api-key": ACME, **bearer(ACME[:-1])}, 401),
        ({"x-api-key": ACME, "authorization": ""}, 401),
        ({"x-api-key": f"Bearer {ACME}"}, 401),
    ],
)
async def test_a_key_comes_as_anthropic_s_clients_send_it_unless_there_is_authorization(
    guarded: Rig, headers: dict[str, str], status: int
) -> None:
    assert (await guarded.client.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("path", "headers", "says"),
    [
        ("/metrics", bearer(ACME), "--metrics-port"),
        ("/metrics", {}, "--metrics-port"),
        ("/v1/models", {}, "this needs `Authorization: Bearer KEY`"),
        ("/v1/models", {"authorization": ACME}, "this needs `Authorization: Bearer KEY`"),
        ("/v1/models", bearer(ACME[:-1]), "this key is unknown"),
        ("/v1/models", {"x-api-key": "x" * 20}, "this key is unknown"),
    ],
)
async def test_a_refusal_says_what_is_missing(guarded: Rig, path: str, headers: dict[str, str], says: str) -> None:
    reply = await guarded.client.get(path, headers=headers)
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (401, True), reply.text


@pytest.mark.parametrize(
    ("keys", "port", "lines"), [([("acme", ACME)], None, 1), ([("acme", ACME)], 9_100, 0), ([], None, 0)]
)
def test_a_start_with_keys_says_that_metrics_need_a_port_of_their_own(
    caplog: pytest.LogCaptureFixture, keys: list[tuple[str, str]], port: int | None, lines: int
) -> None:
    caplog.set_level("INFO")
    log_missing_metrics_port(ServingSettings(metrics_port=port), Keyring(keys))
    assert [record.levelname for record in caplog.records if "--metrics-port" in record.message] == ["INFO"] * lines


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/v1/files/file-1", "/v1/files/{file_id}"),
        ("GET", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/.env", "unknown"),
    ],
)
async def test_the_log_and_the_counter_of_a_refused_key_have_the_route_that_was_tried(
    guarded: Rig, caplog: pytest.LogCaptureFixture, method: str, path: str, route: str
) -> None:
    caplog.set_level("INFO", ACCESS_LOGGER)
    await guarded.client.request(method, path, headers=bearer(ACME[:-1]))
    assert caplog.messages[-1].startswith(f"{method} {route} 401 in ")
    assert f'route="{route}",status="401"' in guarded.meter.render().decode()


async def test_a_tenant_cannot_reach_anothers_items_through_its_salt_S12(guarded: Rig, drawing: Drawing) -> None:
    for key, salt in ((ACME, None), (UMBRA, "acme"), (UMBRA, ACME), (UMBRA, "\0acme\n"), (UMBRA, "")):
        body = body_of("/v1/chat/completions", 1) | ({} if salt is None else {"cache_salt": salt})
        reply = await guarded.client.post("/v1/chat/completions", json=body, headers=bearer(key))
        assert reply.status_code == 200
    assert drawing.processed == [1] * 5
    assert len(guarded.engine.salts) == 5  # nor the prefixes that the engine keeps


async def answer_to(port: int, head: bytes, within_s: float) -> bytes:
    """The status line that answers a head whose body is never sent; nothing if none comes soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        await writer.drain()
        async with asyncio.timeout(within_s):
            return await reader.readline()
    except TimeoutError:
        return b""
    finally:
        writer.transport.abort()


async def check_keys_over_the_socket(app: ASGIApp, *, within_s: float = 10.0) -> None:
    """The shipped server at a real port: without a key no route answers but the probes, and no body is waited for."""
    port = free_port()
    server = HttpServer(app, "127.0.0.1", port)
    async with server.running():
        await until(lambda: server._server.started)
        for method, path in routes_of(app):
            for key in ("", f"Authorization: Bearer {ACME[:-1]}\r\n"):
                body = "" if method == "GET" else "Content-Type: application/json\r\nContent-Length: 1073741824\r\n"
                head = f"{method} {path} HTTP/1.1\r\nHost: h\r\n{key}{body}\r\n".encode()
                status = (await answer_to(port, head, within_s)).split(b" ")[1:2]
                assert status == ([b"200"] if path in OPEN else [b"401"]), f"{method} {path}: {status}"
        good = f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {ACME}\r\n\r\n"
        assert b" 200 " in await answer_to(port, good.encode(), within_s)


async def test_over_a_socket_no_route_but_the_probes_answers_or_reads_a_body_without_a_key(guarded: Rig) -> None:
    await check_keys_over_the_socket(guarded.app)


GUARD = Authentication.__call__


async def reads_the_body_first(self: Authentication, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["method"] == "POST":
        while (await receive()).get("more_body"):
            pass
    await GUARD(self, scope, receive, send)


async def leaves_inspections_open(self: Authentication, scope: Scope, receive: Receive, send: Send) -> None:
    await (self._app(scope, receive, send) if scope["path"] == "/tokenize" else GUARD(self, scope, receive, send))


async def takes_a_beginning(self: Authentication, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    if ACME.encode().startswith(headers.get(b"authorization", b"?").removeprefix(b"Bearer ")):
        scope.setdefault("state", {})["tenant"] = "acme"
        await self._app(scope, receive, send)
    else:
        await GUARD(self, scope, receive, send)


async def lets_everybody_in(self: Authentication, scope: Scope, receive: Receive, send: Send) -> None:
    await self._app(scope, receive, send)


GUARD_MUTANTS = {
    mutant.__name__: mutant
    for mutant in (reads_the_body_first, leaves_inspections_open, takes_a_beginning, lets_everybody_in)
}


@pytest.mark.parametrize("mutant", GUARD_MUTANTS.values(), ids=GUARD_MUTANTS)
async def test_a_mutant_guard_is_found_over_a_socket(
    guarded: Rig, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(Authentication, "__call__", mutant)
    with pytest.raises(AssertionError):
        await check_keys_over_the_socket(guarded.app, within_s=0.5)


async def check_the_context_has_the_tenant() -> None:
    both_there = asyncio.Barrier(2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(30):
            await both_there.wait()
        await PlainTextResponse(await asyncio.to_thread(current_tenant))(scope, receive, send)

    guarded = RequestContextMiddleware(Authentication(app, KEYS), NO_TRACING, Meter(), log_requests=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
        answers = await asyncio.gather(*(client.get("/v1/models", headers=bearer(key)) for key in (ACME, UMBRA)))
    assert [answer.text for answer in answers] == ["acme", "umbra"]
    assert current_tenant() == ""


async def test_what_works_for_a_request_knows_its_tenant_also_in_a_thread_S17() -> None:
    await check_the_context_has_the_tenant()


async def test_mutant_a_guard_that_tells_the_routes_only_is_found_S17(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "entered_as", nullcontext)
    with pytest.raises(AssertionError):
        await check_the_context_has_the_tenant()
