"""A client that means harm, the requests that it makes, and the constants of servers that are attacked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from PIL import Image

__all__ = [
    "BUDGET_BYTES",
    "CHAT",
    "EMBEDDINGS",
    "KEYS",
    "MIB",
    "Attack",
    "Attacker",
    "chat",
    "image",
    "png_of",
    "png_url",
    "schema",
    "text",
]

MIB: Final = 1 << 20
CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
BUDGET_BYTES: Final = 256 * MIB
"""Of the server under attack, for all its requests together."""

KEYS: Final = {"mallory": "mallory-0123456789abcdef", "alice": "alice-0123456789abcdef"}


@dataclass
class Attacker:
    """A client with a key that sends until it is stopped."""

    url: str
    key: str
    upstream: str
    """A server of the attacker's that images can be fetched from."""

    answers: Counter[str] = field(default_factory=Counter)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all is prepared, and it sends."""

    @contextlib.asynccontextmanager
    async def client(self, connections: int = 1, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """An HTTP client with the attacker's key, or another one."""
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=connections)
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, limits=limits) as client:
            yield client

    async def flood(
        self, clients: int, body: Callable[[int], object], path: str = CHAT, *, pause_s: float = 0.0
    ) -> None:
        """Send one request after the other, with so many clients at a time."""
        self.begun.set()
        async with self.client(clients) as client:

            async def one(number: int) -> None:
                while True:
                    content = body(number)
                    content = content if isinstance(content, bytes) else json.dumps(content).encode()
                    await self.count(client.post(path, content=content))
                    number += clients
                    await asyncio.sleep(pause_s)

            await asyncio.gather(*(one(number) for number in range(clients)))

    async def count(self, asking: Awaitable[httpx.Response]) -> None:
        """Wait for an answer, and count it by its status, or by the error in its stream."""
        try:
            reply = await asking
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1
            await asyncio.sleep(0.1)
        else:
            failed = reply.status_code == 200 and b'"engine_failed"' in reply.content
            self.answers["engine_failed" if failed else str(reply.status_code)] += 1

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection, for what no HTTP client would send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, method: str, path: str, *fields: str, key: str = "") -> bytes:
        """Return the head of a request, with the attacker's key or another."""
        lines = (f"{method} {path} HTTP/1.1", "Host: h", f"Authorization: Bearer {key or self.key}", *fields, "", "")
        return "\r\n".join(lines).encode()

    async def status(self, reader: asyncio.StreamReader) -> str:
        """Read the status of an answer, and count it."""
        line = await reader.readline()
        status = line.split(b" ")[1].decode() if line else "cut off"
        self.answers[status] += 1
        return status


Attack = Callable[[Attacker], Awaitable[None]]


def chat(*parts: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 16, "temperature": 0.0, **fields}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(number: int, side: int = 28) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png_url(png_of(number, side))}}


def png_of(number: int, side: int = 28) -> bytes:
    """Return an image that no other number has."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (number % 256, number // 256 % 256, number // 65_536)).save(file, "PNG")
    return file.getvalue()


def png_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def schema(content: Mapping[str, object]) -> dict[str, object]:
    """Return a response format."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": content}}
