"""The daemon's end of the egress process's socket: the end of the process is noticed, whoever reads it first."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from egress import protocol
from sandkasten.links.egress import EgressLink
from sandkasten.model.errors import EgressUnavailable
from tests.waiting import patience


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The daemon's end, and that of a process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


async def test_an_end_that_a_reader_of_the_log_sees_is_seen_by_all(ends: tuple[socket.socket, socket.socket]) -> None:
    """`serve` returns, and each request fails: one that waits for its answer, and one that waits to be sent."""
    ours, theirs = ends
    link = EgressLink(ours, lambda _notice: None)
    failures = []

    async def ask() -> None:
        with pytest.raises(EgressUnavailable) as failure:
            await link.request(protocol.DescribeSession(0, "s-1"), protocol.Described)
        failures.append(failure)

    with trio.fail_after(patience()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.serve)
            for _ in range(1000):  # more than the socket takes
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            theirs.close()
            link.catch_up()
    assert len(failures) == 1000
    with pytest.raises(EgressUnavailable):
        await link.request(protocol.DescribeSession(0, "s-1"), protocol.Described)
