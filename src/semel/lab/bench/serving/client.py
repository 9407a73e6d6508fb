"""The one client of both sides: raw HTTP, a persistent connection, timed from first byte sent to last received.

It sends bytes and returns bytes: the time excludes making a body and parsing a response.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Final, Self

import aiohttp

from semel.errors import ServiceError

__all__ = ["CHAT", "GENERATE", "RENDER", "RESPONSES", "Answer", "Client"]

CHAT: Final = "/v1/chat/completions"
RENDER: Final = "/v1/chat/completions/render"
RESPONSES: Final = "/v1/responses"
GENERATE: Final = "/inference/v1/generate"

_LARGE: Final = 1 << 20
"""Over it aiohttp wants to send a body in pieces."""

_TIMEOUT_S: Final = 120.0
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The response, and how long it took."""

    status: int
    body: bytes
    seconds: float


class Client:
    """The client of one server."""

    def __init__(self, url: str, *, connections: int = 1, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._connections = connections
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            headers=None if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:
        """Post a body; return the response, whatever its status."""
        assert self._session is not None
        headers = _JSON | {"Accept": accept}
        data = io.BytesIO(body) if len(body) > _LARGE else body
        began = perf_counter()
        async with self._session.post(f"{self.url}{path}", data=data, headers=headers) as response:
            body = await response.read()
        return Answer(response.status, body, perf_counter() - began)

    async def must(self, path: str, body: bytes, *, accept: str = "*/*") -> Answer:
        """Post a body; fail if the status is not a success."""
        answer = await self.ask(path, body, accept=accept)
        if answer.status != 200:
            raise ServiceError(f"{self.url}{path} answers {answer.status}: {answer.body[:500]!r}")
        return answer

    async def leave(self, path: str, body: bytes) -> None:
        """Post a body, and disconnect at the first bytes of the response."""
        assert self._session is not None
        async with self._session.post(f"{self.url}{path}", data=body, headers=_JSON) as response:
            await response.content.readany()
            response.close()

    async def read(self, path: str) -> str:
        """Get a path."""
        assert self._session is not None
        async with self._session.get(f"{self.url}{path}") as response:
            return await response.text()

    def wider(self, connections: int) -> Client:
        """Another client of the same server, with more connections."""
        return Client(self.url, connections=connections, api_key=self._api_key)

    async def is_up(self, path: str) -> bool:
        """Return whether the server answers at a path."""
        assert self._session is not None
        try:
            async with asyncio.timeout(5), self._session.get(f"{self.url}{path}") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
