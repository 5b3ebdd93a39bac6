"""Shares of a session's bandwidth, as the kernel has them of real sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.pacing import Pacing

_SO_MAX_PACING_RATE = 47
_UNLIMITED = 2**32 - 1
Pair = tuple[socket.socket, socket.socket]


def rate(sock: socket.socket) -> int:
    """Return the bytes in a second that the kernel lets the socket send."""
    (found,) = struct.unpack("=I", sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 4))
    return int(found)


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Pair]]:
    with ExitStack() as stack:
        yield [(stack.enter_context(socket.socket()), stack.enter_context(socket.socket())) for _ in range(40)]


def test_connections_have_equal_shares(pairs: list[Pair]) -> None:
    """Of what goes up by the socket outside, of what comes down by the session's; those that stay get what is free."""
    pacing = Pacing(8, 80)
    for pair in pairs[:4]:
        pacing.add(*pair)
    assert {(rate(client), rate(server)) for client, server in pairs[:4]} == {(2_500_000, 250_000)}
    for pair in pairs[1:4]:
        pacing.remove(*pair)
    assert (rate(pairs[0][0]), rate(pairs[0][1])) == (10_000_000, 1_000_000)
    pacing.remove(*pairs[0])


def test_rates_change_while_connections_are_open() -> None:
    """To others, and to none; where there are none, no socket is touched."""
    pacing = Pacing(None, None)
    with socket.socket() as client, socket.socket() as server:
        pacing.limit(8, None)
        pacing.add(client, server)
        assert (rate(server), rate(client)) == (1_000_000, _UNLIMITED)
        pacing.limit(None, 16)
        assert (rate(server), rate(client)) == (_UNLIMITED, 2_000_000)
        pacing.limit(None, None)
        assert (rate(server), rate(client)) == (_UNLIMITED, _UNLIMITED)
    pacing.remove(client, server)
    pacing.add(client, server)  # closed by now


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 10_000))
def test_all_together_have_about_the_rate(pairs: list[Pair], steps: list[bool], mbit: int) -> None:
    """However connections come and go: an eighth more at most, and about an eighth less; less than a byte aside."""
    pacing, open_, free = Pacing(None, mbit), list[Pair](), list(pairs)
    for is_new in steps:
        if is_new and free:
            open_.append(free.pop())
            pacing.add(*open_[-1])
        elif not is_new and open_:
            free.append(open_.pop(0))
            pacing.remove(*free[-1])
        if open_:
            whole = sum(rate(client) for client, _ in open_)
            assert mbit * 125_000 * 7 / 8 - len(open_) <= whole <= mbit * 125_000 * 9 / 8
