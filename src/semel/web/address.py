"""Binds a server's socket. An error names the flag that has to change."""

from __future__ import annotations

import errno
import socket
from typing import Final

from semel.errors import ConfigError

__all__ = ["bind"]

_OF_THE_PORT: Final = frozenset({errno.EADDRINUSE, errno.EACCES})


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
