"""Synthetic addresses: who has one, until when, and whose it becomes."""

from __future__ import annotations

from ipaddress import IPv4Address
from itertools import count

from egress.names import CAPACITY, OWN_ADDRESS, RANGE, SyntheticNames, place_of
from egress.state import RateBucket


def test_a_name_keeps_its_address() -> None:
    """Asked for again, and found by it; no two names share one, and none is the session's own."""
    names = SyntheticNames()
    given = [names.give(f"n{each}.example") for each in range(CAPACITY)]
    addresses = {each.address for each in given if each}
    assert len(addresses) == CAPACITY
    assert OWN_ADDRESS not in addresses
    assert all(each in RANGE for each in addresses)
    again = names.give("n7.example")
    assert again is given[7]
    assert again is not None
    assert names.find(again.address) is again


def test_an_address_follows_from_its_name() -> None:
    """In whatever order names are asked for; of two that would share one, the later has another."""
    forth, back = SyntheticNames(), SyntheticNames()
    asked = [f"n{each}.example" for each in range(50)]
    given, again = (
        {name: entry.address for name in order if (entry := names.give(name))}
        for names, order in ((forth, asked), (back, asked[::-1]))
    )
    assert given == again
    rival = next(name for each in count() if place_of(name := f"r{each}") == given["n7.example"])
    entry = forth.give(rival)
    assert entry is not None
    assert entry.address not in given.values()


def test_an_address_that_was_never_given_stands_for_nothing() -> None:
    """Neither the next one, nor one of the session's own."""
    names = SyntheticNames()
    entry = names.give("a.example")
    assert entry is not None
    assert names.find(IPv4Address(int(entry.address) + 1)) is None
    assert names.find(OWN_ADDRESS) is None


def test_the_oldest_name_without_a_connection_goes_first() -> None:
    """The address of one that was given up stands for nothing; a name that carries a connection is never given up."""
    names = SyntheticNames(capacity=3)
    first, second, third = (names.give(name) for name in ("a", "b", "c"))
    assert first is not None
    assert second is not None
    assert third is not None
    first.uses = 1
    names.find(second.address)  # used last of all
    fourth = names.give("d")
    assert fourth is not None
    assert names.find(third.address) is None
    assert names.find(fourth.address) is fourth
    second.uses = fourth.uses = 1
    assert names.give("e") is None
    second.uses = 0
    assert names.give("e") is not None


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """Tokens that are left over are kept, up to the burst."""
    bucket = RateBucket(rate=10, burst=3)
    assert [bucket.take(100) for _ in range(4)] == [0, 0, 0, 0.1]
    assert bucket.take(100.15) == 0
    assert bucket.take(100.15) > 0
    assert [bucket.take(200) for _ in range(4)][:3] == [0, 0, 0]
    assert bucket.take(200) > 0
