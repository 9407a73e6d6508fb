"""A client that speaks ASGI itself: bodies that come slowly, lie about their length, end early or never.

It keeps nothing of what it sends, so that what is left in memory is the application's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

DEADLINE_S = 30


@dataclass
class Exchange:
    """One request, and what has come back of its answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first part of the answer's body."""

    leave: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it, and the client has gone."""

    @property
    def code(self) -> str:
        """The code of the error that was answered."""
        return str(json.loads(bytes(self.body))["error"]["code"])

    @property
    def message(self) -> str:
        """The message of the error that was answered."""
        return str(json.loads(bytes(self.body))["error"]["message"])

    async def run(
        self,
        app: ASGIApp,
        path: str,
        chunks: AsyncIterable[bytes],
        headers: dict[str, str] | None = None,
        *,
        ends: bool = True,
    ) -> None:
        """Send a request in these chunks, which are all of it if it `ends`, and read the answer to its end."""
        scope = _scope(path, headers or {})
        parts = aiter(chunks)

        async def receive() -> MutableMapping[str, Any]:
            async for chunk in parts:
                return {"type": "http.request", "body": chunk, "more_body": True}
            if ends and not ended:
                ended.append(True)
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        ended: list[bool] = []
        async with asyncio.timeout(DEADLINE_S):
            await app(scope, receive, self._take)

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.body += message["body"]
            self.began.set()


async def stream_of(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The chunks, one after the other."""
    for chunk in chunks:
        yield chunk


def _scope(path: str, headers: dict[str, str]) -> dict[str, Any]:
    named = {"content-type": "application/json", **{name.lower(): value for name, value in headers.items()}}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("frontend", 80),
    }
