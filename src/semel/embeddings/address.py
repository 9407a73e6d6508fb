"""Address of a node of the store. Values only."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from semel.errors import ConfigError

__all__ = ["StoreAddress"]

_PORT: Final = 6_379
_SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True, "unix": False}
"""Each with whether it is encrypted."""

_FORMS: Final = "valkeys://[USER@]HOST[:PORT] (TLS), valkey://127.0.0.1:6379 or unix:///PATH"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One node: a host and a port, or the path of a socket."""

    host: str = ""
    port: int = _PORT
    path: str | None = None
    user: str | None = None
    is_encrypted: bool = False

    @property
    def name(self) -> str:
        """The name in logs, which also decides which entries it has."""
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")

    @property
    def is_local(self) -> bool:
        """True if what is sent to it does not leave this machine."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that an operator has written. An error never repeats a password."""
        try:
            url = urlsplit(text)
            port = url.port
        except ValueError:
            raise ConfigError(f"--embedding-store: an address is not valid; write {_FORMS}") from None
        if url.password is not None:
            raise ConfigError(
                "--embedding-store: an address has a password, which others can see in `ps`; put it into a file, and "
                "name that by --embedding-store-password-file"
            )
        if url.scheme not in _SCHEMES:  # whatever it is, it may be secret
            raise ConfigError(f"--embedding-store: an address is not valid; write {_FORMS}")
        if url.query or url.fragment:
            raise ConfigError(f"--embedding-store {_readable(url)} has options after the address; write {_FORMS}")
        return cls._of_path(url) if url.scheme == "unix" else cls._of_host(url, port)

    @classmethod
    def _of_path(cls, url: SplitResult) -> Self:
        if url.hostname or not url.path.strip("/"):
            raise ConfigError(
                f"--embedding-store {_readable(url)} has no path of a socket; write unix:///run/valkey.sock"
            )
        return cls(path=url.path, user=url.username)

    @classmethod
    def _of_host(cls, url: SplitResult, port: int | None) -> Self:
        if not url.hostname or port == 0:
            raise ConfigError(f"--embedding-store {_readable(url)} is no address of a store; write {_FORMS}")
        if url.path.strip("/") not in ("", "0"):
            raise ConfigError(
                f"--embedding-store {_readable(url)} names a database, and only the first is used; leave out {url.path}"
            )
        encrypted = _SCHEMES[url.scheme]
        return cls(host=url.hostname, port=port or _PORT, user=url.username or None, is_encrypted=encrypted)


def _readable(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
