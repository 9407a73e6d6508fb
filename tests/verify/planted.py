"""Stands before a real semel and plants a fault on the way: what `semel verify` has to find with real engines."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import numpy as np
from aiohttp import web
from PIL import Image

PlantedFault = Literal["option", "planes", "lost", "slow"]

_SLOW_S: Final = 0.4
_FEW_PIXELS: Final = 28 * 28 * 16


@dataclass(frozen=True, slots=True)
class Planted:
    """A proxy with one fault, or with none."""

    url: str
    """Of the real semel."""

    fault: PlantedFault | None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its own URL, as long as the block runs."""
        async with aiohttp.ClientSession() as session:
            app = web.Application(client_max_size=1 << 28)

            async def forward(request: web.Request) -> web.Response:
                body = await self._changed(await request.read())
                url = f"{self.url}{request.path}"
                headers = {"Content-Type": "application/json"}
                async with session.request(request.method, url, data=body or None, headers=headers) as response:
                    return web.Response(body=await response.read(), status=response.status)

            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _changed(self, body: bytes) -> bytes:
        if not body or self.fault is None:
            return body
        chat = json.loads(body)
        content = chat["messages"][0]["content"]
        items = [] if isinstance(content, str) else [part for part in content if part["type"] == "image_url"]
        match self.fault:
            case "option" if items:
                chat["mm_processor_kwargs"] = {"max_pixels": _FEW_PIXELS}
            case "planes":
                for part in items:
                    part["image_url"]["url"] = _swapped(part["image_url"]["url"])
            case "lost" if len(items) > 1:
                content.remove(items[1])
            case "slow" if items:
                await asyncio.sleep(_SLOW_S)
        return json.dumps(chat).encode()


def _swapped(url: str) -> str:
    image: Any = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(np.asarray(image)[:, :, ::-1])).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
