"""Connections to where media is: to addresses that were checked, and to no others (threats S3).

A name is resolved once for a connection. What comes out is checked, and the socket gets those numbers: there is no
second lookup in which they could change. Hosts that are addresses themselves never come to a resolver; the policy has
judged them with the URL. Two more checks do not depend on any of that: a socket is only made for an address that some
host may have, and nothing is sent before the peer of the connection is one that this host may have.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import ClientRequest, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult

from semel.media.fetch.address import Address, parse_address
from semel.media.fetch.keyed_limit import outlasting
from semel.media.fetch.policy import AddressScope, MediaPolicy, unreachable

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

__all__ = ["CheckedConnector", "CheckedResolver", "Lookup", "NoAddress", "look_up"]

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Gives the addresses of a name, in the order in which to try them."""

_DNS_TTL_S: Final = 10


class NoAddress(OSError):
    """A name has no address that may be reached; whether it has others is not told."""


async def look_up(host: str, threads: Executor | None = None) -> Sequence[str]:
    """The addresses that the machine's own resolver gives for a name; it takes one of these threads meanwhile."""
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    found = await asyncio.get_running_loop().run_in_executor(threads, ask)
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]


class CheckedResolver(AbstractResolver):
    """Resolves names to the addresses that the policy lets them have."""

    def __init__(self, policy: MediaPolicy, lookup: Lookup = look_up) -> None:
        self._policy = policy
        self._lookup = lookup

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        """The addresses as numbers; raises `NoAddress` if none is left.

        It goes on when the fetch that began it has gone, and so does that fetch's turn: the thread is still taken.
        """
        try:
            with outlasting():
                found = await self._lookup(host)
        except OSError:
            found = ()
        reach = self._policy.reach(host, port)
        addresses = [address for text in found if (address := parse_address(text)) is not None]
        results = [_result(host, port, address) for address in addresses if reach.covers(address)]
        results = [result for result in results if family in (socket.AF_UNSPEC, result["family"])]
        if not results:
            raise NoAddress(f"{host}: none of its {len(found)} addresses may be reached")
        return results

    async def close(self) -> None:
        """Nothing is held."""


class CheckedConnector(TCPConnector):
    """A pool of connections under a policy. It belongs to the event loop in which it is made."""

    def __init__(
        self, policy: MediaPolicy, lookup: Lookup = look_up, *, connections: int, connections_per_host: int
    ) -> None:
        self._policy = policy
        super().__init__(
            resolver=CheckedResolver(policy, lookup),
            socket_factory=partial(_open_socket, policy.widest_reach),
            limit=connections,
            limit_per_host=connections_per_host,
            ttl_dns_cache=_DNS_TTL_S,
        )

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:  # noqa: ASYNC109
        """A connection, new or used before, whose peer has been looked at."""
        connection = await super().connect(req, traces, timeout)
        peer = connection.transport.get_extra_info("peername") if connection.transport is not None else None
        address = parse_address(peer[0]) if peer else None
        host, port = req.url.raw_host, req.url.port
        if address is None or host is None or port is None or not self._policy.reach(host, port).covers(address):
            connection.close()
            raise unreachable()
        return connection


def _open_socket(reach: AddressScope, target: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, sockaddr = target
    address = parse_address(sockaddr[0])
    if address is None or not reach.covers(address):
        raise PermissionError(errno.EACCES, "an address that the policy lets no host have")
    return socket.socket(family, kind, protocol)


def _result(host: str, port: int, address: Address) -> ResolveResult:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=str(address), port=port, family=family, proto=0, flags=flags)
