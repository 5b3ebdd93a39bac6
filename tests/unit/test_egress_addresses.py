"""Special addresses in every notation, against a list of the registries written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.addresses import SPECIAL_V4, SPECIAL_V6, AddressCheck, special_range

V4_RANGES = """
    0.0.0.0-0.255.255.255 10.0.0.0-10.255.255.255 100.64.0.0-100.127.255.255 127.0.0.0-127.255.255.255
    168.63.129.16-168.63.129.16 169.254.0.0-169.254.255.255 172.16.0.0-172.31.255.255 192.0.0.0-192.0.0.255
    192.0.2.0-192.0.2.255 192.31.196.0-192.31.196.255 192.52.193.0-192.52.193.255 192.88.99.0-192.88.99.255
    192.168.0.0-192.168.255.255 192.175.48.0-192.175.48.255 198.18.0.0-198.19.255.255 198.51.100.0-198.51.100.255
    203.0.113.0-203.0.113.255 224.0.0.0-255.255.255.255
"""
V6_RANGES = """
    ::-1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 2001::-2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff
    2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff 2002::-2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff
    2620:4f:8000::-2620:4f:8000:ffff:ffff:ffff:ffff:ffff 3ffe::-3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff
    3fff::-3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff 4000::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff
"""
MAPPED = range(0xFFFF_0000_0000, 0x1_0000_0000_0000)
ALL = AddressCheck([], ())


def bounds(texts: str) -> list[tuple[int, int]]:
    return [(int(ip_address(low)), int(ip_address(high))) for low, high in (text.split("-") for text in texts.split())]


V4_BOUNDS, V6_BOUNDS = bounds(V4_RANGES), bounds(V6_RANGES)
V4_EDGES = st.sampled_from([each for pair in V4_BOUNDS for edge in pair for each in (edge - 1, edge, edge + 1)])
V6_EDGES = st.sampled_from([each for pair in V6_BOUNDS for edge in pair for each in (edge - 1, edge, edge + 1)])
V4 = st.one_of(V4_EDGES, st.integers(0, 2**32 - 1)).filter(lambda number: 0 <= number < 2**32).map(IPv4Address)
V6 = (
    st.one_of(V6_EDGES, st.integers(0, 2**128 - 1), st.integers(2**125, 2**126 - 1))
    .filter(lambda number: 0 <= number < 2**128 and number not in MAPPED)
    .map(IPv6Address)
)


def embedded(address: IPv4Address) -> Iterator[IPv6Address]:
    """Yield the IPv6 addresses that hold an IPv4 address, for one reader or another."""
    number = int(address)
    yield IPv6Address(f"::ffff:{address}")
    yield IPv6Address(number)  # IPv4-compatible
    yield IPv6Address(f"::ffff:0:{address}")  # translated, SIIT
    yield IPv6Address(f"64:ff9b::{address}")
    yield IPv6Address((0x64_FF9B_0001 << 80) | number)
    yield IPv6Address((0x2002 << 112) | number << 80)
    yield IPv6Address((0x2001_0000 << 96) | (number ^ 0xFFFF_FFFF))  # Teredo
    yield IPv6Address(f"fe80::5efe:{address}")  # ISATAP


@given(V4)
def test_ipv4_is_public_outside_of_the_list(address: IPv4Address) -> None:
    """Within the list it is refused, plain and mapped, and what Python calls local is within."""
    is_special = any(low <= int(address) <= high for low, high in V4_BOUNDS)
    assert (ALL.refusal(address) is not None) is is_special
    assert (ALL.refusal(IPv6Address(f"::ffff:{address}")) is not None) is is_special
    assert is_special or address.is_global


@given(V6)
def test_ipv6_is_public_within_one_range_and_outside_of_the_list(address: IPv6Address) -> None:
    """Everything else is refused, and what Python calls local is."""
    is_special = any(low <= int(address) <= high for low, high in V6_BOUNDS)
    assert (ALL.refusal(address) is not None) is is_special
    assert is_special or address.is_global


@given(V4)
def test_ipv4_within_ipv6_is_never_a_way_around(address: IPv4Address) -> None:
    """Each way to hold an IPv4 address is refused, but the mapped one of a public address."""
    mapped, *others = embedded(address)
    assert (ALL.refusal(mapped) is None) is (ALL.refusal(address) is None)
    assert [each for each in others if ALL.refusal(each) is None] == []


@pytest.mark.parametrize("text", [*SPECIAL_V4, *SPECIAL_V6])
def test_a_range_names_its_reason(text: str) -> None:
    """The sentence has the range and an RFC, or says that it is a cloud's."""
    network = ip_network(text)
    for address in (network[0], network[-1]):
        sentence = special_range(address) or ""
        assert text in sentence
        assert "RFC" in sentence or "cloud" in sentence


@pytest.mark.parametrize(
    "text",
    [
        *("64:ff9b::169.254.169.254", "::10.0.0.1", "fec0::1", "192.88.99.1", "2002:a00:1::", "fd00:ec2::254"),
        *("169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "::ffff:7f00:1", "ff02::1", "5f00::1"),
    ],
)
def test_known_ways_around_are_refused(text: str) -> None:
    """Addresses that `ipaddress.is_global` is or was true of, and those of clouds' metadata."""
    assert ALL.refusal(ip_address(text)) is not None


@pytest.mark.parametrize("text", ["1.1.1.1", "9.255.255.255", "2606:4700::1", "::ffff:1.1.1.1", "2001:200::1"])
def test_public_addresses_are_not_refused(text: str) -> None:
    """The check is of use."""
    assert ALL.refusal(ip_address(text)) is None


def test_the_operators_permit_is_an_exception() -> None:
    """For the networks it names, mapped addresses included, and for nothing beside them."""
    check = AddressCheck([IPv4Network("10.1.0.0/16"), IPv6Network("fd00:1::/32"), IPv4Network("127.0.0.0/8")], ())
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "fd00:1::5", "127.0.0.1"):
        assert check.refusal(ip_address(text)) is None
    for text in ("10.2.0.1", "fd00:2::5", "::1", "fd00:1:0:0::10.1.2.3%1"):
        assert check.refusal(ip_address(text)) is not None


def test_this_hosts_addresses_need_a_permit_of_their_own() -> None:
    """Public ones are refused, a permitted network around them is not enough, and the list may change meanwhile."""
    own = {ip_address("1.2.3.4"), ip_address("10.0.0.5"), ip_address("2606:4700::1"), ip_address("127.0.0.1")}
    wide = AddressCheck([IPv4Network("10.0.0.0/8"), IPv4Network("0.0.0.0/0"), IPv4Network("127.0.0.0/8")], own)
    for text in ("1.2.3.4", "::ffff:1.2.3.4", "10.0.0.5", "2606:4700::1", "2606:4700::1%eth0", "0.0.0.0", "::"):
        assert wide.refusal(ip_address(text)) is not None
    assert wide.refusal(ip_address("127.0.0.1")) is None
    assert wide.refusal(ip_address("10.0.0.6")) is None
    assert AddressCheck([IPv4Network("10.0.0.5/32")], own).refusal(ip_address("10.0.0.5")) is None
    own.add(ip_address("10.0.0.6"))
    assert wide.refusal(ip_address("10.0.0.6")) is not None
