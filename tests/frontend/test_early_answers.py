"""Answers that need nothing of a body, to clients that send all of it before they read (over real sockets)."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from semel.core import Keyring
from semel.frontend.http.body import BodyLimits
from semel.frontend.middleware.concurrency import ConcurrencyLimits
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing
from tests.web.test_server import served

CHAT = "/v1/chat/completions"
BODY_BYTES = 8 << 20
WITHIN_S = 30.0
KEYS = Keyring([("acme", "acme-0123456789abcdef")])

Sent = tuple[int, bytes, str | None]
"""The status, the body, and when to try again."""


def by_httpx(port: int, path: str) -> Sent:
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", content=bytes(BODY_BYTES), timeout=WITHIN_S)
    return answer.status_code, answer.content, answer.headers.get("retry-after")


def by_the_standard_library(port: int, path: str) -> Sent:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    connection.request("POST", path, bytes(BODY_BYTES))
    answer = connection.getresponse()
    told = answer.status, answer.read(), answer.headers.get("retry-after")
    connection.close()
    return told


def fill(app: Rig) -> None:
    app.service.limiter.limits = ConcurrencyLimits(max_requests=1)
    app.service.limiter.enter("")


def drain(app: Rig) -> None:
    app.service.drain("the frontend is shutting down")


def narrow(app: Rig) -> None:
    app.service.body = BodyLimits(max_bytes=1_000)


def leave(app: Rig) -> None:
    """Change nothing."""


@asynccontextmanager
async def made(folder: Path, drawing: Drawing, *, has_keys: bool) -> AsyncIterator[tuple[Rig, int]]:
    async with rig(folder, drawing.pipeline, keys=KEYS if has_keys else None) as app, served(app.app) as server:
        yield app, server.port


@pytest.mark.parametrize("send", [by_httpx, by_the_standard_library])
@pytest.mark.parametrize(
    ("change", "path", "has_keys", "told"),
    [
        (fill, CHAT, False, (429, "too_many_requests", "1 or 2")),
        (drain, CHAT, False, (503, "not_ready", "1 or 2")),
        (narrow, CHAT, False, (413, "media_too_large", None)),
        (leave, CHAT, True, (401, "invalid_api_key", None)),
        (leave, "/v1/moderations", False, (404, "not_supported", None)),
        (leave, "/nowhere", False, (404, "invalid_request", None)),
    ],
)
async def test_a_client_with_a_large_body_can_read_why_it_is_refused(
    tmp_path: Path,
    drawing: Drawing,
    send: Callable[[int, str], Sent],
    change: Callable[[Rig], None],
    path: str,
    has_keys: bool,
    told: tuple[int, str, str | None],
) -> None:
    async with made(tmp_path, drawing, has_keys=has_keys) as (app, port):
        change(app)
        status, body, retry = await asyncio.wait_for(asyncio.to_thread(send, port, path), WITHIN_S)
        assert (status, json.loads(body)["error"]["code"], retry and "1 or 2") == told, "scattered"
        assert retry in {None, "1", "2"}
