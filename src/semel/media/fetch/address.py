"""Addresses of the public internet: one table, the same under every version of Python. Pure.

`ipaddress` changed its answers between versions, and serves more purposes than this one. Here an IPv4 address is public
unless it is in the table. An IPv6 address is public only if it is in the one range that public addresses come from, and
not in the table. An IPv4 address inside an IPv6 address is treated as the address that a router would use (threats S1).
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

__all__ = ["METADATA", "NOT_PUBLIC", "Address", "Network", "is_public", "parse_address", "unmapped"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_PUBLIC_IPV6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")

NOT_PUBLIC: Final[tuple[tuple[Network, str], ...]] = (
    (IPv4Network("0.0.0.0/8"), "this network"),
    (IPv4Network("10.0.0.0/8"), "private"),
    (IPv4Network("100.64.0.0/10"), "shared by customers of a carrier"),
    (IPv4Network("127.0.0.0/8"), "loopback"),
    (IPv4Network("168.63.129.16/32"), "the platform of a cloud"),
    (IPv4Network("169.254.0.0/16"), "link-local"),
    (IPv4Network("172.16.0.0/12"), "private"),
    (IPv4Network("192.0.0.0/24"), "protocol assignments"),
    (IPv4Network("192.0.2.0/24"), "documentation"),
    (IPv4Network("192.88.99.0/24"), "relays of 6to4"),
    (IPv4Network("192.168.0.0/16"), "private"),
    (IPv4Network("198.18.0.0/15"), "benchmarking"),
    (IPv4Network("198.51.100.0/24"), "documentation"),
    (IPv4Network("203.0.113.0/24"), "documentation"),
    (IPv4Network("224.0.0.0/4"), "multicast"),
    (IPv4Network("240.0.0.0/4"), "reserved, and broadcast"),
    (IPv6Network("2001::/23"), "protocol assignments: Teredo, benchmarking, ORCHID"),
    (IPv6Network("2001:db8::/32"), "documentation"),
    (IPv6Network("2002::/16"), "6to4"),
    (IPv6Network("3fff::/20"), "documentation"),
)
"""Ranges that are not public, with the reason; IPv6 outside 2000::/3 is not public either and needs no entry."""

METADATA: Final[frozenset[Address]] = frozenset(
    {
        IPv4Address("100.100.100.200"),
        IPv4Address("168.63.129.16"),
        IPv4Address("169.254.169.254"),
        IPv4Address("169.254.170.2"),
        IPv4Address("169.254.170.23"),
        IPv4Address("192.0.0.192"),
        IPv6Address("fd00:ec2::23"),
        IPv6Address("fd00:ec2::254"),
        IPv6Address("fd20:ce::254"),
    }
)
"""Metadata services that reveal a cloud machine's secrets: never reachable through a wider allowed network."""


def parse_address(text: str) -> Address | None:
    """Parse an address in its usual form; None for anything else, and for an address with a zone."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return None if isinstance(address, IPv6Address) and address.scope_id is not None else address


def unmapped(address: Address) -> Address:
    """Return the address that is finally reached: the IPv4 address inside an IPv4-mapped or NAT64 address."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address


def is_public(address: Address) -> bool:
    """Return whether this address leads to the same host from anywhere on the internet."""
    address = unmapped(address)
    if isinstance(address, IPv6Address) and address not in _PUBLIC_IPV6:
        return False
    return not any(address in network for network, _ in NOT_PUBLIC)
