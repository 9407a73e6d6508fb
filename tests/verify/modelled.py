"""A server that answers by what it sees, with a fault planted on demand: the edges that no real server shows.

Its tokens are a hash of its prompt and of the pixels, so that whatever changes an item changes the answer. The claims
of `semel verify` are made by real engines (`test_planted.py`); here is what it says of each fault.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from aiohttp import web
from PIL import Image

from semel.telemetry.metrics import POOL_PROCESSED

Fault = Literal[
    "option", "planes", "values", "lost", "order", "refused", "slow", "again", "noise", "text", "broken", "mute"
]


@dataclass
class Modelled:
    """One server."""

    fault: Fault | None = None
    image_s: float = 0.0
    takes: tuple[str, ...] = ("image",)
    processed: int = 0
    _known: set[bytes] = field(default_factory=set)
    _asked: int = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL, as long as the block runs."""
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post("/v1/chat/completions", self._chat), web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fault == "mute" and body.get("logprobs"):
            return web.json_response({"error": {"message": "Requested 5 logprobs, at most 3 of /a"}}, status=400)
        items = [part for message in body["messages"] for part in _items(message["content"])]
        if refused := [part["type"] for part in items if part["type"].removesuffix("_url") not in self.takes]:
            if self.fault == "broken":
                return web.json_response({"error": {"message": "internal"}}, status=500)
            message = f"At most 0 {refused[0]}(s) may be provided in /home/user/prompt"
            return web.json_response({"error": {"message": message}}, status=400)
        if items:
            await asyncio.sleep(self.image_s * (20 if self.fault == "slow" else 1))
        self._asked += 1
        for part in items:
            self._process(part["image_url"]["url"].encode())
        if self.fault == "refused" and len(items) > 2:
            return web.json_response({"error": {"message": "no"}}, status=503)
        return web.json_response(
            reply_body([_decoded(part["image_url"]["url"]) for part in items], self.fault, self._asked)
        )

    def _process(self, url: bytes) -> None:
        self.processed += self.fault == "again" or url not in self._known
        self._known.add(url)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = f"# TYPE {POOL_PROCESSED.name} counter\n{POOL_PROCESSED.name} {self.processed}\n"
        return web.Response(text=text)


def reply_body(images: list[Any], fault: Fault | None = None, asked: int = 0) -> dict[str, Any]:
    """The answer to images, in OpenAI's shape with vLLM's token ids."""
    if fault == "lost":
        images = images[:1]
    if fault == "order":
        images = images[::-1]
    prompt = [1, 2, 3]
    seen = hashlib.sha256(b"text" if fault == "text" else b"")
    for pixels in images:
        height, width, _ = pixels.shape
        count = (height // 28) * (width // 28)
        prompt += [7] * (min(count, 40) if fault == "option" else count) + [8]
        changed = pixels[:, :, ::-1] if fault == "planes" else 255 - pixels if fault == "values" else pixels
        seen.update(np.ascontiguousarray(changed[::4, ::4]).tobytes())
    seen.update(json.dumps(prompt).encode())
    if fault == "noise":
        seen.update(str(asked).encode())
    tokens = list(seen.digest()[:8])
    content = [{"token": str(one), "logprob": -one / 256, "top_logprobs": []} for one in tokens]
    return {
        "prompt_token_ids": prompt,
        "usage": {"prompt_tokens": len(prompt)},
        "choices": [{"token_ids": tokens, "logprobs": {"content": content}}],
    }


def _items(content: Any) -> list[dict[str, Any]]:
    return [] if isinstance(content, str) else [part for part in content if part["type"] != "text"]


@lru_cache(64)
def _decoded(url: str) -> Any:
    data = base64.b64decode(url.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
