"""Connections to media servers: only to checked addresses (threats S3).

A name is resolved once per connection. The resulting addresses are checked, and the socket connects to exactly those:
there is no second lookup in which they could change. Hosts that are addresses never reach a resolver; the policy has
checked them with the URL. Two more checks do not depend on any of this: a socket is created only for an address that
some host may have, and nothing is sent before the connection's peer is an address that this host may have.
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

from semel.fairness.limits import outlasting
from semel.media.fetch.address import Address, parse_address
from semel.media.fetch.policy import AddressScope, MediaPolicy, unreachable

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

__all__ = ["CheckedConnector", "CheckedResolver", "Lookup", "NoAddress", "look_up"]

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the addresses of a name, in the order in which to try them."""

_DNS_TTL_S: Final = 10


class NoAddress(OSError):
    """A name has no permitted address. Does not reveal whether it has others."""


async def look_up(host: str, threads: Executor | None = None) -> Sequence[str]:
    """Return the addresses of a name from the machine's own resolver; uses one of these threads meanwhile."""
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    found = await asyncio.get_running_loop().run_in_executor(threads, ask)
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]


class CheckedResolver(AbstractResolver):
    """Resolves names to addresses that the policy permits."""

    def __init__(self, policy: MediaPolicy, lookup: Lookup = look_up) -> None:
        self._policy = policy
        self._lookup = lookup

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        """Return the permitted numeric addresses; raises `NoAddress` if there is none.

        The lookup continues after its fetch has ended, and holds that fetch's permit: the thread is still in use.
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
        """Does nothing: there are no resources."""


class CheckedConnector(TCPConnector):
    """A connection pool under a policy. It belongs to the event loop in which it is created."""

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
        """Return a new or reused connection whose peer has been checked."""
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
