"""Addresses of workers, and which clients may connect (threats S17).

An `ipc://` address is in a directory of mode 0700 that belongs to the process's user: the kernel excludes other users,
at both ends. `tcp://` always uses CURVE, with a pair for each role (`semel.wire.keys`). A stranger has neither the
workers' public key nor a secret that a worker accepts; a frontend has no secret to be a worker with, unless both are
derived from one fleet key. CURVE makes new keys for every connection: what was recorded cannot be decrypted later.
Anything else is a `ConfigError`.

A socket of a worker has one secret. During a rotation two of them listen at the same port (`SO_REUSEPORT`), and the
kernel hands a new connection to either. A frontend that meets the wrong one tries again.
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
from semel.wire.keys import DERIVED, Generation, TransportKeys
from semel.wire.proof import Role, curve_secret

__all__ = [
    "ZAP_ENDPOINT",
    "SocketFile",
    "admit",
    "check_directory",
    "memory_path",
    "public_key",
    "secure_client",
    "secure_server",
    "transport_keys",
]

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
"""The endpoint at which a zmq context asks whether a client may connect."""

_BACKLOG: Final = 128
_DOMAIN: Final = b"semel."
"""Before the id of the generation whose keys a socket takes."""

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
        """Return the file of a newly bound address."""
        scheme, _, name = address.partition("://")
        return cls(Path(name), Path(name).stat().st_ino) if scheme == "ipc" else cls(None)

    def remove(self) -> None:
        """Remove the file, unless it already belongs to a successor."""
        with suppress(FileNotFoundError):
            if self.path is not None and self.path.stat().st_ino == self.inode:
                self.path.unlink()


def memory_path(address: str) -> Path | None:
    """Return the socket for shared memory of a worker at this address; None if frontends may be on other hosts."""
    scheme, _, name = address.partition("://")
    path = f"{name}.memory"
    return Path(path) if scheme == "ipc" and len(path.encode()) <= _MAX_PATH_BYTES else None


def check_directory(address: str) -> None:
    """Refuse an `ipc://` address whose directory is there and not this user's alone. Makes none."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc" and os.path.lexists(directory := _directory(path)):
        _check_private(directory)


def transport_keys(key: Key | TransportKeys, role: Role) -> TransportKeys:
    """Return the keys of a role; those that come of a fleet key, if it is one."""
    if isinstance(key, TransportKeys):
        if key.role != role:
            raise ConfigError(f"these are the transport keys of a {key.role}, and this is a {role}: give it its own")
        return key
    peer: Role = "worker" if role == "frontend" else "frontend"
    theirs = public_key(curve_secret(key, peer))
    return TransportKeys(role, (Generation(DERIVED, curve_secret(key, role), theirs, key),))


def secure_server(
    server: zmq.Socket[bytes], address: str, generation: Generation, *, beside_another: bool = False
) -> None:
    """Configure a socket before it binds to an address, which it may share with that of another generation."""
    match address.partition("://"):
        case "ipc", _, path:
            _own(_directory(path))
            _check_free(path)
        case "tcp", _, place:
            server.ipv6 = place.startswith("[")
            server.curve_server = True
            server.curve_secretkey = generation.secret
            server.zap_domain = _DOMAIN + generation.link.id.encode()
            server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            server.setsockopt(zmq.USE_FD, _listen(address, beside_another=beside_another))
        case _:
            raise _unknown(address)


def secure_client(client: zmq.Socket[bytes], address: str, generation: Generation) -> None:
    """Configure a socket before it connects to an address. Makes no directory: that is for listeners.

    A frontend that ends a moment later than its supervisor would make the directory of the run again.
    """
    match address.partition("://"):
        case "ipc", _, _:
            check_directory(address)
        case "tcp", _, place:
            client.ipv6 = place.startswith("[")
            client.curve_serverkey = z85.encode(generation.peer)
            client.curve_secretkey = generation.secret
            client.curve_publickey = z85.encode(public_key(generation.secret))
        case _:
            raise _unknown(address)


def admit(request: list[bytes], keys: TransportKeys) -> list[bytes]:
    """The reply to a ZAP 1.0 request about a client: the frontends' public key of the socket's generation, no other."""
    version, request_id, *rest = request
    generation = keys.get(rest[0].removeprefix(_DOMAIN).decode("latin-1")) if rest else None
    is_curve = generation is not None and len(rest) == 5 and rest[3] == b"CURVE"
    known = generation is not None and is_curve and hmac.compare_digest(rest[4], generation.peer)
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
    """Make the directory for this user alone; refuse one that is there and that others can enter."""
    try:
        directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the socket directory {directory}: {error.strerror}; name another") from error
    _check_private(directory)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{directory} is not a directory of this user: name another for the socket")
    if stat.S_IMODE(found.st_mode) & _PRIVATE:
        raise ConfigError(
            f"others can enter the socket directory {directory}: an existing one must have mode 0700; "
            f"`chmod 700 {directory}`"
        )


def _check_free(path: str) -> None:
    """Require that no live worker has this socket file: zmq would replace it without warning."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"another worker listens on ipc://{path}: stop it, or name another address")


def _listen(address: str, *, beside_another: bool) -> int:
    """The descriptor of a socket that listens at a `tcp://` address, for zmq to own. No other program has the port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        number = 0 if port == "*" else int(port)
        family, kind, protocol, _, place = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"),
            number,
            family=socket.AF_INET if host == "*" else socket.AF_UNSPEC,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        if number and not beside_another:
            with _bound(family, kind, protocol, place, is_shared=False):  # or two workers could share it
                pass
        listening = _bound(family, kind, protocol, place, is_shared=True)
        listening.listen(_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "it is none of this machine"
        raise ConfigError(f"cannot listen on {address}: {reason}; name another address") from error
    return listening.detach()


def _bound(family: int, kind: int, protocol: int, place: object, *, is_shared: bool) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(place)  # type: ignore[arg-type]
    except BaseException:
        made.close()
        raise
    return made


def public_key(secret: bytes) -> bytes:
    """Return the public key of an X25519 secret."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))
