"""Bodies of 37 MB come over a socket, and the event loop of the frontend serves others meanwhile.

Each figure is the longest gap between two turns of the loop, in the best of several rounds: other processes of the
machine only make gaps longer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from semel.cache import LruCache
from semel.compose.interpreter import tune_interpreter
from semel.core import Feature, Media
from semel.frontend.http.body import parse
from semel.frontend.routes import call
from semel.render import ChatRenderer
from semel.web.server import ConnectionLimits
from tests.frontend.rig import Rig, rig
from tests.interpreter import restored_interpreter
from tests.render.drawn import Drawing, drawn
from tests.web.test_server import Served

pytestmark = [pytest.mark.slow, pytest.mark.alone]

LOG = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
MB = 1_000_000
ROUNDS = 20
MUTANT_ROUNDS = 3
TICK_S = 0.001
MAX_GAP_MS = 25
"""On a quiet machine it is under 10."""

MAX_TEXT_GAP_MS = 60
"""A text is parsed whole, 8 MB in 20 to 30 ms, and with the interpreter's lock."""


def chat(*parts: Mapping[str, Any]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}).encode()


def image(encoded_bytes: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(os.urandom(encoded_bytes // 4 * 3)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(chars: int) -> dict[str, Any]:
    return {"type": "text", "text": "word\n" * (chars // 5)}


def as_responses(*parts: Mapping[str, Any]) -> bytes:
    content = [{"type": "input_image", "image_url": part["image_url"]["url"]} for part in parts]
    return json.dumps({"input": [{"role": "user", "content": content}], "max_output_tokens": 1}).encode()


def as_messages(*parts: Mapping[str, Any]) -> bytes:
    data = [part["image_url"]["url"].partition(",")[2] for part in parts]
    sources = [{"type": "base64", "media_type": "image/png", "data": one} for one in data]
    content = [{"type": "image", "source": source} for source in sources]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


BODIES: Mapping[str, Callable[[], bytes]] = {
    "one image": lambda: chat(image(37 * MB)),
    "60 images": lambda: chat(*(image(617_000) for _ in range(60))),
    "escaped slashes": lambda: chat(image(37 * MB)).replace(b"/", rb"\/"),
    "60 images in Responses": lambda: as_responses(*(image(617_000) for _ in range(60))),
    "60 images in Messages": lambda: as_messages(*(image(617_000) for _ in range(60))),
    "a text": lambda: chat(text(6 * MB)),  # just under the limit of a body besides its media
}


@dataclass
class Loop:
    """The event loop of an application at a port, and its longest gap."""

    port: int
    gap_s: float = 0.0

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self.gap_s, last = max(self.gap_s, now - last - TICK_S), now

    async def longest_gap_ms(self, body: Path, route: str, rounds: int = ROUNDS) -> tuple[float, set[int]]:
        """The longest gap while a client sends a body, in the best of the rounds, and the statuses of the answers."""
        arguments = (str(self.port), route, str(body), str(rounds))
        command = [sys.executable, "-m", "tests.frontend.sender", *arguments]
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert client.stdout is not None
        ticking = asyncio.create_task(self.tick())
        gaps, statuses = [], set()
        try:
            async with asyncio.timeout(120):
                async for line in client.stdout:
                    statuses.add(int(line))
                    gaps.append(self.gap_s * 1e3)
                    self.gap_s = 0.0
                await client.wait()
        finally:
            ticking.cancel()
            with suppress(ProcessLookupError):
                client.kill()
        return min(gaps), statuses


@asynccontextmanager
async def served(folder: Path, renderer: ChatRenderer) -> AsyncIterator[Loop]:
    drawing = Drawing(renderer, LruCache(0))

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return drawn(replace(media, data=b"7"))

    async with rig(folder, replace(drawing.pipeline, process=process)) as app:
        allow_images(app, 64)
        made = Served(app.app, ConnectionLimits())
        with restored_interpreter():
            tune_interpreter()  # as a frontend does once it is ready
            async with made.server.running():
                yield Loop(made.port)


def allow_images(app: Rig, count: int) -> None:
    serving = app.service.serving()
    app.service.begin(replace(serving, contract=replace(serving.contract, max_items={"image": count})))


def route_of(name: str) -> str:
    return next((f"/v1/{api.lower()}" for api in ("Responses", "Messages") if name.endswith(api)), CHAT)


async def gap_ms(folder: Path, renderer: ChatRenderer, name: str, rounds: int = ROUNDS) -> float:
    (path := folder / "body").write_bytes(BODIES[name]())
    async with served(folder, renderer) as app:
        longest, statuses = await app.longest_gap_ms(path, route_of(name), rounds)
    assert statuses == ({400} if name == "a text" else {200})
    LOG.info("%s: the longest gap of the loop was %.1f ms", name, longest)
    return longest


@pytest.mark.parametrize("name", BODIES)
async def test_large_bodies_do_not_keep_the_event_loop(tmp_path: Path, parts_renderer: ChatRenderer, name: str) -> None:
    limit_ms = MAX_TEXT_GAP_MS if name == "a text" else MAX_GAP_MS
    assert await gap_ms(tmp_path, parts_renderer, name) <= limit_ms


async def on_the_loop(body: bytearray, kind: TypeAdapter[Any], *_: object) -> Any:
    return parse(body, kind)


async def in_a_thread(body: bytearray, kind: TypeAdapter[Any], *_: object) -> Any:
    return await asyncio.to_thread(parse, body, kind)


@pytest.mark.parametrize("mutant", [on_the_loop, in_a_thread])
async def test_mutant_a_body_that_is_parsed_whole_keeps_the_event_loop_even_from_a_thread(
    tmp_path: Path,
    parts_renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[..., Awaitable[Any]],
) -> None:
    monkeypatch.setattr(call, "parse_body", mutant)
    assert await gap_ms(tmp_path, parts_renderer, "one image", rounds=MUTANT_ROUNDS) > MAX_GAP_MS
