"""Which addresses are public: a table of what is known, checked against an explicit list (S1)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.media.fetch.address import NOT_PUBLIC, is_public, parse_address, unmapped

PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "93.184.216.34", "100.63.255.255", "100.128.0.0"),
    *("126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0"),
    *("192.0.1.0", "192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255"),
    *("2001:200::1", "2001:db7:ffff::1", "2001:4860:4860::8888", "2003::1", "2606:4700::1", "2a00:1450::1", "3ffe::1"),
    *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8"),
]

NOT = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.100.100.200", "100.127.255.255"),
    *("127.0.0.1", "127.255.255.255", "168.63.129.16", "169.254.0.1", "169.254.169.254", "169.254.255.255"),
    *("172.16.0.0", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1"),
    *("198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1"),
    *("255.255.255.254", "255.255.255.255"),
    *("::", "::1", "::2", "100::1", "fc00::1", "fd00:ec2::254", "fd12:3456::1", "fe80::1", "fec0::1", "ff02::1"),
    *("2001::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "3fff::1", "3fff:fff::1", "5f00::1"),
    *("4000::1", "8000::1", "1::1", "64:ff9b:1::8.8.8.8", "64:ff9a::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1"),
    *("::127.0.0.1", "::8.8.8.8", "::a9fe:a9fe"),
    *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:0:7f00:1::", "2001:0:808:808::f5ff:fffe"),
    *("64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b::255.255.255.255"),
]


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_public_S1(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("text", NOT)
def test_an_address_of_a_machine_a_site_or_nobody_is_not_public_S1(text: str) -> None:
    assert not is_public(ip_address(text))


def test_no_network_of_the_table_is_public_from_its_first_to_its_last_address_S1() -> None:
    for network, why in NOT_PUBLIC:
        assert not is_public(network[0]), why
        assert not is_public(network[-1]), why


@given(st.integers(0, 2**32 - 1))
def test_ipv6_clothes_make_no_address_public_S1(number: int) -> None:
    address = IPv4Address(number)
    mapped, behind_nat64 = IPv6Address((0xFFFF << 32) | number), IPv6NAT64 + number
    assert is_public(mapped) == is_public(behind_nat64) == is_public(address)
    assert unmapped(mapped) == unmapped(behind_nat64) == address
    assert not is_public(IPv6Address(number))
    assert not is_public(IPv6Address((0x2002 << 112) | (number << 80)))
    assert not is_public(IPv6Address((0x20010000 << 96) | (number ^ 0xFFFF_FFFF)))


IPv6NAT64 = IPv6Address("64:ff9b::")


@given(st.integers(0, 2**128 - 1).map(IPv6Address))
def test_nothing_outside_the_range_of_public_ipv6_is_public_S1(address: IPv6Address) -> None:
    if is_public(address) and unmapped(address) == address:
        assert address in IPv6Network("2000::/3")


def test_python_itself_calls_some_of_these_global_which_is_why_there_is_a_table_S1() -> None:
    """The control: `is_global` alone lets them through."""
    let_through = [text for text in NOT if ip_address(text).is_global]
    assert {"168.63.129.16", "224.0.0.1", "192.88.99.1", "64:ff9b::127.0.0.1"} <= set(let_through)


@pytest.mark.parametrize(
    "text", ["", "1.2.3", "01.2.3.4", "0x7f.0.0.1", "fe80::1%eth0", "1.2.3.4/32", "localhost", " ::1"]
)
def test_only_the_usual_form_is_an_address(text: str) -> None:
    assert parse_address(text) is None
