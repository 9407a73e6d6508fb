"""Rules for the URLs that may be fetched: from values alone, and denied unless allowed (threats S1).

A host must be allowed by name, and its address must be public or in an allowed network. Hosts that only `*` allows may
have public addresses only: an operator who allows a private network must name the hosts in it. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Network, ip_network
from pathlib import Path
from typing import Final, Self

from semel.errors import ConfigError, InvalidRequest, MediaNotAllowed
from semel.media.fetch.address import METADATA, Address, Network, is_public, unmapped
from semel.media.fetch.url import FileUrl, Url, WebUrl, parse_host

__all__ = ["AddressScope", "Folder", "HostRule", "MediaPolicy", "unreachable"]

_RULE: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:]+)(?::(?P<port>[1-9][0-9]{0,4}))?")
_USUAL_PORTS: Final = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class HostRule:
    """Allowed hosts: one, all below a domain, or any."""

    host: str
    """`example.com`, `.example.com` for all hosts below it, `*` for any."""

    port: int | None = None
    """None for the scheme's default port."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule as an operator writes it, such as `media.example.com` or `.example.com:8443`."""
        found = _RULE.fullmatch(text)
        try:
            if found is None:
                raise ConfigError(f"--allowed-media-domains {text}: write a host, or a host and a port")
            host = found["host"]
            dot = "." if host.startswith(".") else ""
            return cls(host if host == "*" else dot + parse_host(host[len(dot) :]), _port(found["port"]))
        except InvalidRequest as error:
            raise ConfigError(f"--allowed-media-domains {text}: {error}") from None

    def matches(self, url: WebUrl) -> bool:
        """Return whether the rule allows a URL's host and port."""
        return url.port == (self.port or _USUAL_PORTS[url.scheme]) and (self.host == "*" or self.names(url.host))

    def names(self, host: str) -> bool:
        """Return whether the rule names a host or a domain above it. A rule for any host names none."""
        return host == self.host or (self.host.startswith(".") and host.endswith(self.host))


@dataclass(frozen=True, slots=True)
class AddressScope:
    """The addresses that a host may have: public ones, and those in the networks."""

    networks: tuple[Network, ...] = ()

    def covers(self, address: Address) -> bool:
        """Return whether a connection to this address is allowed."""
        address = unmapped(address)
        inside = [network for network in self.networks if address in network]
        if address in METADATA:
            return any(network.prefixlen == network.max_prefixlen for network in inside)
        return bool(inside) or is_public(address)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of files: its path as the operator writes it, and with all symbolic links followed."""

    path: Path
    real: Path

    @classmethod
    def find(cls, path: Path) -> Self:
        """Return the folder at a path, which must exist."""
        try:
            real = path.resolve(strict=True)
        except OSError:
            real = None
        if real is None or not real.is_dir():
            raise ConfigError(f"--allowed-local-media-path {path}: there is no such folder")
        return cls(path.absolute(), real)

    def names(self, path: Path) -> bool:
        """Return whether a path begins like one in the folder. Only opening it shows where it leads."""
        return path.is_relative_to(self.path) or path.is_relative_to(self.real)


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """The media URLs that may be fetched. By default: none."""

    allowed_domains: tuple[HostRule, ...] = ()
    allow_http: bool = False
    """True allows plain `http`, which others on the network path can read and change."""

    allowed_networks: tuple[Network, ...] = ()
    """Allowed networks with addresses that are not public."""

    allowed_folder: Folder | None = None
    """The folder whose files requests may name as `file://`."""

    @classmethod
    def of(
        cls,
        *,
        domains: Iterable[str] = (),
        allow_http: bool = False,
        networks: Iterable[str] = (),
        local_path: Path | None = None,
    ) -> Self:
        """Build a policy from an operator's settings. An invalid value is refused with its flag's name."""
        return cls(
            tuple(map(HostRule.parse, domains)),
            allow_http,
            tuple(map(_network, networks)),
            None if local_path is None else Folder.find(local_path),
        )

    def check(self, url: Url, *, previous: WebUrl | None = None) -> None:
        """Refuse a URL that is not allowed; `previous` is the URL that redirected to it."""
        if isinstance(url, FileUrl):
            return self._check_file(url)
        if previous is not None and previous.scheme == "https" and url.scheme != "https":
            raise MediaNotAllowed("the URL redirects from https to http, which is not followed")
        if flags := self._missing_flags(url, is_first=previous is None):
            # A client learns nothing about the target of a redirect.
            host = f"{url.scheme}://{url.host[:64]}:{url.port}" if previous is None else "what the URL redirects to"
            raise MediaNotAllowed(f"{host} is not fetched: send a data URL, or start with {' and '.join(flags)}")
        if url.address is not None and not self.reach(url.host, url.port).covers(url.address):
            raise unreachable()
        return None

    def _missing_flags(self, url: WebUrl, *, is_first: bool) -> list[str]:
        """All flags that a URL would need and that are not set, so that an operator need not find them one by one."""
        flags = []
        if url.scheme == "http" and not self.allow_http:
            flags.append("--allow-media-http")
        if not any(rule.matches(url) for rule in self.allowed_domains):
            flags.append("--allowed-media-domains with the host")
        if flags and is_first and url.address is not None and not is_public(url.address):
            # Said also if its network is allowed, so that nobody can look for allowed ones.
            flags.append("--allowed-media-networks with its network")
        return flags

    def reach(self, host: str, port: int) -> AddressScope:
        """Return the addresses that a host may have; those in allowed networks only if a rule names the host."""
        named = any(rule.names(host) and rule.port in (None, port) for rule in self.allowed_domains)
        return self.widest_reach if named else AddressScope()

    @property
    def widest_reach(self) -> AddressScope:
        """The addresses that any host may have."""
        return AddressScope(self.allowed_networks)

    def _check_file(self, url: FileUrl) -> None:
        if self.allowed_folder is None:
            raise MediaNotAllowed("files are not allowed: send a data URL, or start with --allowed-local-media-path")
        if not self.allowed_folder.names(Path(url.path)):
            raise MediaNotAllowed("the file is not in the folder of --allowed-local-media-path")


def unreachable() -> MediaNotAllowed:
    """The same error for a host that does not exist and for a forbidden one, so that clients cannot tell them apart."""
    return MediaNotAllowed(
        "the host has no address to fetch from: its name does not resolve, or not to a public address or one in "
        "--allowed-media-networks"
    )


def _port(text: str | None) -> int | None:
    if text is not None and int(text) > 65_535:
        raise ConfigError(f"--allowed-media-domains: {text} is not a port")
    return None if text is None else int(text)


def _network(text: str) -> Network:
    try:
        network = ip_network(text)
    except ValueError:
        raise ConfigError(
            f"--allowed-media-networks {text}: write a network such as 10.1.0.0/16 or fd12::/48"
        ) from None
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ConfigError(f"--allowed-media-networks {text}: write it as an IPv4 network")
    return network
