"""Addresses of clients: what counts as one client, and from which networks a proxy may say who its client is.

Values only. uvicorn reads the proxies' headers, and only if the connection comes from a network that the operator has
named (threats S25).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from semel.core.flag import flag
from semel.errors import ConfigError

__all__ = ["UNKNOWN", "PeerSettings", "is_loopback", "network_of", "parse_networks", "plain_address"]

UNKNOWN: Final = "unknown"
"""Anything that is no IP address counts as this one."""

_IPV6_NETWORK_BITS: Final = 64
"""The smallest network that a provider gives to a customer: all of its addresses are one client's."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """By which names clients may call a server, and which proxies are believed."""

    allowed_hosts: tuple[str, ...] = flag(
        (),
        help="Hosts that requests may name besides this machine's own, such as chat.example.com, or "
        ".example.com with all its subdomains; * for all. Others are answered with 421.",
        group="Server",
        default_text="on 127.0.0.1 and without API keys none, else all",
    )
    forwarded_allow_ips: tuple[str, ...] = flag(
        (),
        help="Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted, such "
        "as 10.0.0.0/8. Commas separate them too.",
        group="Server",
        default_text="none",
    )

    @property
    def proxies(self) -> tuple[str, ...]:
        """The networks of the proxies."""
        return parse_networks(self.forwarded_allow_ips)


def plain_address(text: str) -> str:
    """Return an address as text: an IPv4 address that came over an IPv6 socket is shown as what it is."""
    address = _parse(text)
    return text if address is None else str(address)


def network_of(text: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    address = _parse(text)
    if address is None:
        return UNKNOWN
    if isinstance(address, IPv4Address) or address.is_loopback:
        return str(address)
    return str(ip_network((int(address), _IPV6_NETWORK_BITS), strict=False))


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens at a host."""
    address = _parse(host)
    return host == "localhost" if address is None else address.is_loopback


def parse_networks(texts: Iterable[str]) -> tuple[str, ...]:
    """Addresses and networks, each alone or several with commas between. A `ConfigError` names what is none."""
    found = []
    for text in (one.strip() for many in texts for one in many.split(",")):
        try:
            found.append(str(ip_network(text)))
        except ValueError as error:
            raise ConfigError(
                f"--forwarded-allow-ips {text}: name the proxies' addresses or networks, such as 10.0.0.0/8 ({error})"
            ) from None
    return tuple(found)


def _parse(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
