"""Media by URL over the real routes: the same answer as by data URL, and refusals in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.media.fetch.fetch import Fetcher
from tests.frontend.rig import MAX_IMAGES, Rig, rig
from tests.media.origin import Names, Origin, fetcher, origin, reply
from tests.render.drawn import Drawing, image_part

CHAT = "/v1/chat/completions"
RENDER = f"{CHAT}/render"


@asynccontextmanager
async def fetching_rig(folder: Path, drawing: Drawing, fetching: Fetcher) -> AsyncIterator[Rig]:
    async with rig(folder, replace(drawing.pipeline, fetch=fetching.fetch)) as made:
        made.meter.watch(fetching.samples)
        yield made


@pytest.fixture
async def server() -> AsyncIterator[Origin]:
    async with origin() as made:
        yield made


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing, server: Origin) -> AsyncIterator[Rig]:
    names = Names(evil_example=[["127.0.0.1"]], cat_example=[["127.0.0.1"]])
    rules = (f"127.0.0.1:{server.port}", f"cat.example:{server.port}", f"*:{server.port}")
    async with (
        fetcher(*rules, lookup=names, cache_bytes=1 << 20) as fetching,
        fetching_rig(tmp_path, drawing, fetching) as made,
    ):
        yield made


def body(*urls: str, kind: str = "image_url", **fields: Any) -> dict[str, Any]:
    parts = [{"type": kind, kind: {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], **fields}


def embedded(*numbers: int) -> dict[str, Any]:
    parts = [*map(image_part, numbers), {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": parts}]}


async def error(app: Rig, path: str, sent: dict[str, Any]) -> tuple[int, str, str]:
    response = await app.post(path, sent)
    told = response.json()["error"]
    assert told["type"] == "invalid_request_error"
    return response.status_code, told["code"], told["message"]


async def test_an_image_by_url_is_the_same_item_and_gets_the_same_answer_as_by_data_url_S11(
    app: Rig, server: Origin, drawing: Drawing
) -> None:
    server["/a"], server["/b"] = b"3", b"4"
    urls = server.url("/a"), server.url("/b", "cat.example"), server.url("/a")
    by_url, by_data = await app.ok(RENDER, body(*urls)), await app.ok(RENDER, embedded(3, 4, 3))
    assert by_url["features"] == by_data["features"]
    assert by_url["token_ids"] == by_data["token_ids"]
    answers = [await app.ok(CHAT, {**sent, "return_token_ids": True}) for sent in (body(*urls), embedded(3, 4, 3))]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["prompt_token_ids"] == by_url["token_ids"]
    assert sorted(drawing.processed) == [3, 3, 4, 4]  # once to be shown, once to be executed
    assert server.targets.count("/a") == 2  # one request names it twice


async def test_inspecting_fetches_and_moves_neither_the_main_cache_nor_that_of_responses_E1(
    app: Rig, server: Origin, drawing: Drawing
) -> None:
    server["/a"] = reply(b"5", cache_control="max-age=60")
    before = drawing.seen(), app.metrics("semel_media_cache"), app.metrics("semel_mm_cache")
    for path in (RENDER, "/tokenize", RENDER):
        await app.ok(path, body(server.url("/a")))
    assert (drawing.seen(), app.metrics("semel_media_cache"), app.metrics("semel_mm_cache")) == before
    assert len(server.seen) == 3
    await app.ok(CHAT, body(server.url("/a")))
    await app.ok(CHAT, body(server.url("/a")))
    assert len(server.seen) == 4
    assert app.metrics("semel_media_cache_hits") == {"semel_media_cache_hits_total": "1.0"}


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
@pytest.mark.parametrize(
    ("url", "flag"),
    [
        ("https://elsewhere.example/a.png?signature=secret", "--allowed-media-domains"),
        ("http://evil.example:{port}/", "--allowed-media-networks"),
        ("http://none.example:{port}/", "--allowed-media-networks"),
        ("http://169.254.169.254:{port}/latest/meta-data/", "--allowed-media-networks"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
async def test_a_url_that_may_not_be_fetched_is_refused_with_its_place_code_and_flag_S1(
    app: Rig, server: Origin, drawing: Drawing, path: str, url: str, flag: str
) -> None:
    status, code, message = await error(app, path, body(url.format(port=server.port)))
    assert (status, code) == (400, "media_url_not_allowed")
    assert message.startswith("messages[0].content[0]: ")
    assert flag in message
    assert not any(word in message for word in ("secret", "127.0.0.1", "passwd"))
    assert not server.connections
    assert not drawing.processed


async def test_a_url_that_cannot_be_fetched_is_the_client_s_fault_and_names_the_place(app: Rig, server: Origin) -> None:
    server["/a"] = b"1"
    server["/large"] = b"x" * 100_000
    status, code, message = await error(app, CHAT, body(server.url("/a"), server.url("/none?key=secret")))
    assert (status, code) == (400, "media_unavailable")
    assert message == "messages[0].content[1]: its server answers with status 404"
    status, code, message = await error(app, CHAT, body(server.url("/large")))
    assert (status, code) == (413, "media_too_large")
    assert "--max-media-bytes" in message
    status, code, message = await error(app, CHAT, body("https://user@cat.example/"))
    assert (status, code) == (400, "invalid_request")
    assert message.startswith("messages[0].content[0]: ")


async def test_too_many_items_are_refused_before_one_of_them_is_fetched_S18(app: Rig, server: Origin) -> None:
    sent = body(*(server.url(f"/{number}") for number in range(MAX_IMAGES + 1)))
    for path in (CHAT, RENDER, "/tokenize"):
        status, message = await app.refused(path, sent)
        assert (status, "--limit-mm-per-prompt" in message) == (400, True)
    status, message = await app.refused(CHAT, body(server.url("/a"), kind="video_url"))
    assert "takes no videos" in message
    assert not server.connections


async def test_what_is_fetched_is_in_the_request_s_account_S18(app: Rig, server: Origin) -> None:
    server["/a"] = b"0" * 3_000
    app.service.budget = Budget(BudgetLimits(max_request_bytes=2_000, max_bytes=2_000))
    status, code, message = await error(app, CHAT, body(server.url("/a")))
    assert (status, code) == (413, "media_too_large")
    assert "--max-request-media-bytes" in message
    assert app.service.budget.in_flight == 0
