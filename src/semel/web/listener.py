"""The listening side of a server: every connection gets a place before anything is made for it (threats S25).

uvicorn leaves that to the event loop, which counts nothing, and tells of a connection with TLS only after its
handshake. Here the place is taken when a connection is accepted, and the handshake has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Final

from semel.errors import ConfigError
from semel.web.admission import Admission, Place
from semel.web.limits import ConnectionLimits
from semel.web.peers import network_of, plain_address

__all__ = ["RESERVE", "Listener", "admission_of", "bind"]

RESERVE: Final = 32
"""Connections beyond the limit, on which probes are answered."""

_OWN_FILES: Final = 256
"""Open files that a process has besides its clients' connections: the reserve, workers, fetching, pipes, libraries."""

_MIN_CONNECTIONS: Final = 16
_BURST: Final = 64
_TURNS: Final = 5
"""Turns of the event loop after which the first bytes of an accepted connection, if there are any, have been read: it
is begun, made, watched, polled and read.
"""

_RETRY_S: Final = 0.1
_OF_THE_PORT: Final = frozenset({errno.EADDRINUSE, errno.EACCES})
_CLOSE_S: Final = 5.0
"""Seconds in which a client has to answer the end of TLS."""

logger = logging.getLogger(__name__)

NewConnection = Callable[[Place], asyncio.Protocol]


def bind(host: str, port: int, port_flag: str = "--port", host_flag: str = "--host") -> socket.socket:
    """Bind a socket to this address. A `ConfigError` names the flag that has to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, so that asyncio too sends small pieces at once: it leaves sockets of protocol 0 as they are.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"cannot serve at {host}:{port}: {_reason(error, port_flag, host_flag)}") from None
    return bound


def _reason(error: OSError | OverflowError, port_flag: str, host_flag: str) -> str:
    if isinstance(error, OverflowError):
        return f"{port_flag} must be from 0 to 65535"
    if error.errno in _OF_THE_PORT:
        return f"{error.strerror}; choose another with {port_flag}"
    return f"{error.strerror}; choose an address of this machine with {host_flag}"


def admission_of(limits: ConnectionLimits) -> Admission:
    """Return the admission of a server with these limits, in a process with as many open files as it has now."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.max_connections
    if files != resource.RLIM_INFINITY and files - _OWN_FILES < most:
        most = max(files - _OWN_FILES, min(_MIN_CONNECTIONS, most))
        logger.warning(
            "%d connections are taken at a time, not the %d of --max-connections: this process may have %d open files; "
            "raise it with `ulimit -n`, or LimitNOFILE of systemd",
            most,
            limits.max_connections,
            files,
        )
    return Admission(most, reserve=RESERVE, max_per_address=limits.max_address_connections)


class Listener:
    """Accepts the connections of one socket."""

    def __init__(
        self,
        listening: socket.socket,
        admission: Admission,
        *,
        first_s: float,
        proxies: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._admission = admission
        self._first_s = first_s
        self._proxies = tuple(map(ip_network, proxies))
        self.tls = tls
        """Serves the next connections; those that there are keep what they began with."""

        self._opening: set[asyncio.Task[None]] = set()

    async def accept(self, new_connection: NewConnection) -> None:
        """Accept until cancelled."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        is_failing = False
        # Not `sock_accept`, which would tell the system about the socket anew for each connection.
        loop.add_reader(self._socket, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                try:
                    await self._accept_burst(new_connection)
                    is_failing = False
                except OSError as error:  # a client that has gone meanwhile; or no descriptors, whatever has them
                    if not is_failing:
                        logger.warning("cannot accept connections: %s", error.strerror)
                    is_failing = True
                    # What waits would wake the event loop again and again.
                    loop.remove_reader(self._socket)
                    await asyncio.sleep(_RETRY_S)
                    loop.add_reader(self._socket, ready.set)
        finally:
            loop.remove_reader(self._socket)

    async def _accept_burst(self, new_connection: NewConnection) -> None:
        """Accept what waits, as many as others can wait for."""
        for _ in range(_BURST):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            accepted.setblocking(False)
            if self._admission.is_full:
                try:
                    await self._read_pending()
                except asyncio.CancelledError:
                    accepted.close()
                    raise
            self._open(accepted, str(address[0]), new_connection)

    async def close(self) -> None:
        """End the handshakes that are under way."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    async def _read_pending(self) -> None:
        """Let requests be read that have arrived: their connections are not to be taken for silent ones."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def _open(self, accepted: socket.socket, host: str, new_connection: NewConnection) -> None:
        place = self._admission.open(network_of(host), is_proxy=self._is_proxy(host))
        place.on_eviction = lambda: _shut(accepted)
        task = asyncio.create_task(self._connect(accepted, place, new_connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket, place: Place, new_connection: NewConnection) -> None:
        loop = asyncio.get_running_loop()
        tls, made = self.tls, False

        def connection() -> asyncio.Protocol:
            nonlocal made
            made = True
            return new_connection(place)

        patience = {} if tls is None else {"ssl_handshake_timeout": self._first_s, "ssl_shutdown_timeout": _CLOSE_S}
        try:
            await loop.connect_accepted_socket(connection, accepted, ssl=tls, **patience)
        except (OSError, asyncio.CancelledError):
            place.give_up("handshake")
        except Exception:  # the edge of the process: any error ends one connection only
            place.give_up("handshake")
            logger.exception("a connection failed in a way that we do not expect")
        finally:
            if not made:
                accepted.close()

    def _is_proxy(self, host: str) -> bool:
        if not self._proxies:
            return False
        address = ip_address(plain_address(host))
        return any(address in network for network in self._proxies)


def _shut(accepted: socket.socket) -> None:
    """Let the transport of a connection, whatever it waits for, see its end."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
