"""Synthetic addresses of one session: each stands for a name, so that a rule for a name holds on every port.

Owns which address stands for which name, and the addresses outside that were found good for the name, for a time: a
connection dials these, whatever the resolver says meanwhile. A session has so many names at a time; for one more, that
is given up which was used the longest time ago and carries no connection. No input, no output.

An address follows from its name. Programs keep addresses, some for as long as they run: with the next process, or after
a name was given up, one of theirs must not stand for another name, whose server would get what is meant for the first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from itertools import count

import attrs

from egress.policy import Address

RANGE = IPv4Network("198.18.0.0/15")
"""Addresses that stand for something of ours: RFC 2544 keeps them for tests of devices, so they are nobody's."""

OWN_ADDRESS = IPv4Address("198.18.0.1")
"""The session's own address, and that of its resolver."""

_FIRST, _LAST = int(IPv4Address("198.18.1.0")), int(IPv4Address("198.19.255.254"))
CAPACITY = 4096


def place_of(name: str, turn: int = 0) -> IPv4Address:
    """Return the address of a name, in each session and process the same; by other turns, in place of one that is
    taken, others."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, salt=turn.to_bytes(8, "big")).digest()
    return IPv4Address(_FIRST + int.from_bytes(digest, "big") % (_LAST - _FIRST + 1))


@attrs.define(eq=False)
class SyntheticName:
    """A name with its address. `uses`: its open connections; `pinned`: addresses to dial, until `pinned_until`."""

    name: str
    address: IPv4Address
    uses: int = 0
    pinned: Sequence[Address] = ()
    pinned_until: float = 0.0


class SyntheticNames:
    """Addresses that one session's DNS gave out, and the names that they stand for."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_name: OrderedDict[str, SyntheticName] = OrderedDict()  # the last used last
        self._by_address: dict[IPv4Address, SyntheticName] = {}

    def give(self, name: str) -> SyntheticName | None:
        """Return the entry of a name, with an address that stands for it from now on; None when all are in use."""
        found = self._by_name.get(name)
        if found is None:
            if len(self._by_name) >= self._capacity and not self._give_up_one():
                return None
            address = next(each for turn in count() if (each := place_of(name, turn)) not in self._by_address)
            found = SyntheticName(name, address)
            self._by_name[name] = self._by_address[address] = found
        self._by_name.move_to_end(name)
        return found

    def find(self, address: IPv4Address) -> SyntheticName | None:
        """Return the entry that an address stands for; None if it was never given, or was given up."""
        found = self._by_address.get(address)
        if found is not None:
            self._by_name.move_to_end(found.name)
        return found

    def _give_up_one(self) -> bool:
        oldest = next((each for each in self._by_name.values() if not each.uses), None)
        if oldest is not None:
            del self._by_name[oldest.name], self._by_address[oldest.address]
        return oldest is not None
