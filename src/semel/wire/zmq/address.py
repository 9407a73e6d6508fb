"""Addresses of workers, and which clients may connect (threats S17).

An `ipc://` address is in a directory of mode 0700 that belongs to the process's user: the kernel excludes other users,
at both ends. `tcp://` always uses CURVE: both ends derive their keys from the fleet key, so no other key must be
distributed. A client without the fleet key has neither the worker's public key nor a secret that the worker accepts.
CURVE makes new keys for every connection: the fleet key alone does not decrypt recorded traffic. Anything else is a
`ConfigError`.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import zmq
from zmq.utils import z85

from semel.core import Key
from semel.errors import ConfigError
from semel.wire.proof import curve_secret

__all__ = ["ZAP_ENDPOINT", "SocketFile", "admit", "memory_path", "secure_client", "secure_server"]

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
"""The endpoint at which a zmq context asks whether a client may connect."""

_MAX_PATH_BYTES: Final = 107  # sun_path of a Unix socket, less its final zero
_PRIVATE: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a bound `ipc://` socket, which zmq never removes."""

    path: Path | None
    """None for an address without a file."""

    inode: int = 0

    @classmethod
    def at(cls, address: str) -> Self:
        """The file of a newly bound address."""
        scheme, _, name = address.partition("://")
        return cls(Path(name), Path(name).stat().st_ino) if scheme == "ipc" else cls(None)

    def remove(self) -> None:
        """Remove the file, unless it already belongs to a successor."""
        with suppress(FileNotFoundError):
            if self.path is not None and self.path.stat().st_ino == self.inode:
                self.path.unlink()


def memory_path(address: str) -> Path | None:
    """The socket for shared memory of a worker at this address; None if frontends may be on other hosts."""
    scheme, _, name = address.partition("://")
    path = f"{name}.memory"
    return Path(path) if scheme == "ipc" and len(path.encode()) <= _MAX_PATH_BYTES else None


def secure_server(server: zmq.Socket[bytes], address: str, key: Key) -> None:
    """Configure a socket before it binds to an address."""
    match address.partition("://"):
        case "ipc", _, path:
            _own(_directory(path))
            _check_free(path)
        case "tcp", _, place:
            server.ipv6 = place.startswith("[")
            server.curve_server = True
            server.curve_secretkey = curve_secret(key, "worker")
            server.zap_domain = b"semel"
            server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        case _:
            raise _unknown(address)


def secure_client(client: zmq.Socket[bytes], address: str, key: Key) -> None:
    """Configure a socket before it connects to an address."""
    match address.partition("://"):
        case "ipc", _, path:
            _own(_directory(path))
        case "tcp", _, place:
            client.ipv6 = place.startswith("[")
            client.curve_serverkey = _public(curve_secret(key, "worker"))
            client.curve_secretkey = curve_secret(key, "frontend")
            client.curve_publickey = _public(curve_secret(key, "frontend"))
        case _:
            raise _unknown(address)


def admit(request: list[bytes], key: Key) -> list[bytes]:
    """The reply to a ZAP 1.0 request about a client: only the frontends' own public key is accepted."""
    version, request_id, *rest = request
    public = z85.decode(_public(curve_secret(key, "frontend")))
    known = len(rest) == 5 and rest[3] == b"CURVE" and hmac.compare_digest(rest[4], public)
    status = [b"200", b"OK"] if known else [b"400", b"not a key of this fleet"]
    return [version, request_id, *status, b"", b""]


def _unknown(address: str) -> ConfigError:
    return ConfigError(f"a worker listens on ipc:///DIRECTORY/NAME or tcp://HOST:PORT, not on {address!r}")


def _directory(path: str) -> Path:
    if not path.startswith("/") or len(path.encode()) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"ipc://{path} must be an absolute path of at most {_MAX_PATH_BYTES} bytes: choose a shorter directory"
        )
    return Path(path).parent


def _own(directory: Path) -> None:
    """Restrict the directory to this user; refuse one that others can enter."""
    try:
        directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the socket directory {directory}: {error.strerror}; name another") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{directory} is not a directory of this user: name another for the socket")
    if stat.S_IMODE(found.st_mode) & _PRIVATE:
        raise ConfigError(f"others can enter the socket directory {directory}; `chmod 700 {directory}`")


def _check_free(path: str) -> None:
    """Require that no live worker has this socket file: zmq would replace it without warning."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"another worker listens on ipc://{path}: stop it, or name another address")


def _public(secret: bytes) -> bytes:
    """The public key of an X25519 secret, in zmq's encoding."""
    return zmq.curve_public(z85.encode(secret))
