"""Two frontends as they are shipped, one worker, one bucket of moto's server, which is no claim about a cloud."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.render.media.names import MediaNames
from semel.store.settings import MediaStoreSettings
from semel.store.store import ObjectMediaStore
from tests.frontend.shipped import DrawnPool, Frontend, Shipped, shipped
from tests.render.conftest import folder
from tests.store.s3 import BUCKET, S3_VARIABLES, s3_process
from tests.waiting import until

__all__ = ["folder"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHAT, FILES = "/v1/chat/completions", "/v1/files"
PNG = b"\x89PNG\r\n\x1a\n"
TIMEOUT_S = 20.0
"""Of the store. What is killed refuses connections, which is no question of time."""


def image(number: int) -> bytes:
    return PNG + str(number).encode()


def chat(image_url: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": image_url}, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}


def inline(number: int) -> dict[str, Any]:
    return chat({"url": f"data:image/png;base64,{base64.b64encode(image(number)).decode()}"})


async def upload(frontend: Frontend, number: int) -> httpx.Response:
    files = {"file": (f"{number}.png", image(number))}
    return await frontend.client.post(FILES, files=files, data={"purpose": "vision"})


async def stored(frontend: Frontend, number: int) -> dict[str, Any]:
    """A chat with an image that is uploaded there."""
    reply = await upload(frontend, number)
    assert reply.status_code == 200, reply.text
    return chat({"file_id": reply.json()["id"]})


async def status_of(frontend: Frontend, body: dict[str, Any]) -> int:
    return (await frontend.client.post(CHAT, json=body)).status_code


async def items_of(fleet: Shipped, frontend: Frontend, body: dict[str, Any]) -> Any:
    assert await status_of(frontend, body) == 200
    assert fleet.engine.last is not None
    return fleet.engine.last.prompt.items


@asynccontextmanager
async def two_frontends(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Shipped, subprocess.Popen[bytes]]]:
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    with s3_process(home) as (endpoint, process):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        bucket = MediaStoreSettings(location=f"s3://{BUCKET}/media", timeout_s=TIMEOUT_S)
        async with shipped(home, model, DrawnPool(), DrawnPool(), media_store=bucket) as fleet:
            stores = [frontend.service.media_store for frontend in fleet.frontends]
            await until(lambda: all(isinstance(one, ObjectMediaStore) and one._is_ready for one in stores))
            yield fleet, process


async def test_what_is_uploaded_at_one_frontend_is_used_at_the_other(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_frontends(tmp_path, folder, monkeypatch) as (fleet, _):
        one, other = fleet.frontends
        by_reference = await stored(one, 1)
        items = await items_of(fleet, other, by_reference)
        await until(lambda: all(one.remote.holding(item.digest) is not None for item in items))
        assert await items_of(fleet, one, inline(1)) == items
        assert one.pool.processed + other.pool.processed == 1
        file_id = by_reference["messages"][0]["content"][0]["image_url"]["file_id"]
        assert (await other.client.get(f"{FILES}/{file_id}/content")).content == image(1)
        assert (await other.client.delete(f"{FILES}/{file_id}")).status_code == 200
        assert (await one.client.get(f"{FILES}/{file_id}")).status_code == 404


async def test_a_bucket_that_is_killed_costs_those_who_need_it_and_nobody_else(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_frontends(tmp_path, folder, monkeypatch) as (fleet, process):
        at_worker, unread = await stored(fleet.frontends[0], 1), await stored(fleet.frontends[0], 2)
        for frontend in fleet.frontends:
            items = await items_of(fleet, frontend, at_worker)
            await until(lambda: all(frontend.remote.holding(item.digest) is not None for item in items))  # noqa: B023
        seen: list[int] = []
        is_over = asyncio.Event()

        async def talk(frontend: Frontend, body: dict[str, Any]) -> None:
            while not is_over.is_set():
                seen.append(await status_of(frontend, body))

        async with asyncio.TaskGroup() as talking:
            for frontend in fleet.frontends:
                for body in (inline(3), at_worker):
                    talking.create_task(talk(frontend, body))
            await until(lambda: len(seen) >= 20)
            process.kill()
            await asyncio.to_thread(process.wait, 30)
            before = len(seen)
            await until(lambda: len(seen) >= before + 40)
            is_over.set()
        assert set(seen) == {200}
        for frontend in fleet.frontends:
            await check_costs(frontend, at_worker, unread)
            assert await status_of(frontend, inline(4)) == 200
        monkeypatch.setattr(MediaNames, "digest", lambda *_: None)  # the control: what is read every time is gone
        assert await status_of(fleet.frontends[0], at_worker) == 503


async def check_costs(frontend: Frontend, at_worker: dict[str, Any], unread: dict[str, Any]) -> None:
    """What needs the store is 503, and says so. What the worker has is the same with it and without."""
    replies = [
        await frontend.client.post(CHAT, json=unread),
        await frontend.client.post(CHAT, json={**at_worker, "cache_salt": "another"}),
        await upload(frontend, 5),
    ]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, "media_store_unavailable")
        assert "the media store" in error["message"]
        assert int(reply.headers["retry-after"]) >= 1
    assert (await frontend.client.get("/ready")).status_code == 200
    assert frontend.service.budget.in_flight == 0
