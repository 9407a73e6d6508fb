"""The API server of Kubernetes over HTTPS, as a pod reaches it: with the token of its service account.

Kubernetes replaces the token every hour and the certificates now and then, so both files are read for each call. All
that comes is bounded: a page of a list, an event, and how long nothing may come.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import aiohttp
import msgspec

from semel.errors import excerpt
from semel.fleet.endpoint_slices import ServicePort
from semel.fleet.slice_watch import ApiError, ApiStatus, Expired

__all__ = ["KubernetesApi"]

_PAGE_SLICES: Final = 100
_MAX_PAGE_BYTES: Final = 32 << 20
_MAX_EVENT_BYTES: Final = 4 << 20  # an object of Kubernetes has 1.5 MiB at most in its store
_MAX_TOKEN_BYTES: Final = 64 << 10
_MAX_FAULT_BYTES: Final = 64 << 10
_CONNECT_S: Final = 10.0
_LIST_S: Final = 30.0
_WATCH_S: Final = 120  # the server ends a watch then; if nothing comes for some seconds more, the connection is dead
_SLACK_S: Final = 15.0
_OK: Final = 200
_GONE: Final = 410


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """The address of the API server, and our credentials."""

    url: str
    token_file: Path
    ca_file: Path | None  # of its certificate's authority; without it, those of the system
    watch_s: int = _WATCH_S
    slack_s: float = _SLACK_S

    async def page(self, service: ServicePort, position: str) -> bytes:
        """Return a part of the list of slices."""
        query = {"limit": str(_PAGE_SLICES), **({"continue": position} if position else {})}
        async with self._answer(service, query, _LIST_S) as answer:
            return await _body(answer, _MAX_PAGE_BYTES)

    async def changes(self, service: ServicePort, version: str) -> AsyncIterator[bytes]:
        """Yield the events of a watch."""
        watch_s = max(1, round(self.watch_s * random.uniform(0.75, 1)))  # or all frontends would ask again at once
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(watch_s),
        }
        async with self._answer(service, query, watch_s + self.slack_s) as answer:
            async for line in _lines(answer, _MAX_EVENT_BYTES):
                yield line

    @asynccontextmanager
    async def _answer(
        self, service: ServicePort, query: dict[str, str], total_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open the answer to a call, if it is 200; every other end is an `ApiError`."""
        url = f"{self.url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
        query["labelSelector"] = f"kubernetes.io/service-name={service.service}"
        times = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S, sock_read=total_s)
        try:
            token, context = await asyncio.to_thread(self._credentials)
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            connector = aiohttp.TCPConnector(ssl=context)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=times) as session,
                session.get(url, params=query, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status != _OK:
                    await _refuse(answer)
                yield answer
        except ApiError:
            raise
        except (aiohttp.ClientError, OSError, UnicodeError, ValueError) as error:  # a timeout is an OSError
            raise ApiError(f"{self.url} cannot be asked: {excerpt(str(error) or type(error).__name__)}") from None

    def _credentials(self) -> tuple[str, ssl.SSLContext]:
        with self.token_file.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        return token, ssl.create_default_context(cafile=self.ca_file)


async def _body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ApiError(f"an answer of the API server is over {max_bytes:,} bytes")
    return bytes(body)


async def _lines(answer: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for piece in answer.content.iter_any():
        *lines, last = piece.split(b"\n")
        for line in lines:
            rest += line
            if rest.strip():
                yield bytes(rest)
            rest.clear()
        rest += last
        if len(rest) > max_bytes:
            raise ApiError(f"an event of the API server is over {max_bytes:,} bytes")
    if rest.strip():
        raise ApiError("the API server ended in the middle of an event")


async def _refuse(answer: aiohttp.ClientResponse) -> NoReturn:
    body: Any = await _body(answer, _MAX_FAULT_BYTES)
    try:
        why = msgspec.json.decode(body, type=ApiStatus).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        why = ""
    kind = Expired if answer.status == _GONE else ApiError
    raise kind(f"the API server answers {answer.status}: {excerpt(why) or answer.reason}")
