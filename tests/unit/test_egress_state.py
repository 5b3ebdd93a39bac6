"""State of a session's way out: shares of its bandwidth, as the kernel has them, and what the daemon is asked."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from egress import state
from egress.addresses import AddressCheck
from egress.connection import CarriedConnection
from egress.pacing import Pacing
from egress.policy import Reason, parse_policy
from egress.protocol import EgressEntry, WayOutLimits
from egress.resolver import NameResolver

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


MOST = 2
HOSTS = st.integers(0, 2 * MOST).map("n{}.example".format)
STEPS = st.one_of(HOSTS, HOSTS, st.floats(0.1, 20), st.lists(HOSTS, max_size=3).map(tuple))
"""A connection to a host, seconds that pass, or a policy that allows these hosts."""


@given(st.lists(STEPS, max_size=60), st.integers(10, 60))
def test_nobody_is_asked_twice_or_too_much(steps: list[str | float | tuple[str, ...]], ask_s: int) -> None:
    """Of one host within the time of an answer, unless a policy decided on the host meanwhile; of all together."""

    async def main() -> None:
        told: list[EgressEntry] = []
        async with trio.open_nursery() as nursery:
            check = AddressCheck([], set())
            machine = state.SharedState(NameResolver(nursery), check, told.append, lambda _id, error: None)
            asking = parse_policy("ask", [], [])
            session = state.WayOutState("s-1", asking, WayOutLimits(ask_s=ask_s), machine)
            ends: dict[str, float] = {}
            for step in steps:
                now = trio.current_time()
                open_ = {host: end for host, end in ends.items() if end > now}
                if isinstance(step, float):
                    clock.jump(step)
                elif isinstance(step, tuple):
                    session.change(parse_policy("ask", step, []), session.limits)
                    session.change(asking, session.limits)
                    ends = {host: end for host, end in ends.items() if host not in step}
                elif step not in open_ and len(open_) == MOST:
                    with pytest.raises(state.Refusal, match=Reason.LIMIT):
                        session.ask(step, 80)
                else:
                    before = len(told)
                    assert session.ask(step, 80) == open_.get(step, now + ask_s)
                    assert [each.host for each in told[before:]] == ([] if step in open_ else [step])
                    ends[step] = session.ask(step, 80)

    clock = trio.testing.MockClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "MAX_ASKED", MOST)
        trio.run(main, clock=clock)


async def test_a_policy_cuts_no_connection_that_has_not_begun() -> None:
    """One that was accepted right before a change has no name yet, and its address is not judged as a literal."""
    async with trio.open_nursery() as nursery:
        resolver = NameResolver(nursery)
        machine = state.SharedState(resolver, AddressCheck([], set()), lambda _entry: None, lambda _id, error: None)
        policy = parse_policy("allow", ["good.example"], [])
        session = state.WayOutState("s-1", policy, WayOutLimits(), machine)
        entry = session.names.give("good.example")
        assert entry is not None
        with socket.socket() as client:
            connection = CarriedConnection(session, client, entry.address, 443)
            connection.judge_again()
            assert not connection.is_cut
