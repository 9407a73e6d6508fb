"""Fetching as it is often written: the controls that the attacks of these tests beat."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from semel.media.fetch.connector import Lookup


class _Plain(AbstractResolver):
    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:  # noqa: ARG002
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)
            for address in await self._lookup(host)
        ]

    async def close(self) -> None:
        pass


async def naive_fetch(
    url: str, *, hosts: Collection[str] | None = None, lookup: Lookup | None = None, forbidden: Collection[str] = ()
) -> bytes:
    """Check the host that `urllib` sees, and its address, then hand the string to a client that follows redirects."""
    host = urlsplit(url).hostname or ""
    if hosts is not None and host not in hosts:
        raise PermissionError(f"{host} is not allowed")
    if {host, *(await lookup(host) if lookup is not None else ())} & set(forbidden):
        raise PermissionError(f"the address of {host} is not allowed")
    connector = aiohttp.TCPConnector(resolver=None if lookup is None else _Plain(lookup), use_dns_cache=False)
    async with asyncio.timeout(10), aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return await response.read()
