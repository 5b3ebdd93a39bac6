"""The daemon's end of the egress process's socket: the end of the process is noticed, whoever reads it first."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from egress import protocol
from sandkasten.errors import EgressUnavailable
from sandkasten.journal import egress as egress_log
from sandkasten.journal.egress import EgressLogs
from sandkasten.links.egress import EgressLink
from sandkasten.model.network import EgressLogging, EgressVerdict
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


@pytest.mark.parametrize("time", [-1.0, 1e300])
async def test_an_entry_of_no_time_is_the_end(ends: tuple[socket.socket, socket.socket], time: float) -> None:
    """A process that was taken over raises nothing in a task that looks at the log."""
    ours, theirs = ends
    logs = EgressLogs()
    logs.open("s-1", EgressLogging.ALL)

    def take(notice: protocol.Entries) -> None:
        for entry in notice.entries:
            log = logs.get(entry.session_id)
            assert log is not None
            log.add(entry)

    link = EgressLink(ours, take)
    good = protocol.encode(protocol.Entries(0, (protocol.EgressEntry("s-1", 1.5, "tcp", "a.example", 1, "denied"),)))
    theirs.send(good)
    link.catch_up()
    assert not link.is_lost
    theirs.send(good.replace(b"1.5", repr(time).encode()))
    link.catch_up()
    assert link.is_lost
    assert len(logs.page("s-1", None, None, None, 10).entries) == 1


def test_entries_of_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that has the most loses its oldest, and one with few keeps them; an ended one makes room."""
    monkeypatch.setattr(egress_log, "KEPT_OF_ALL", 20)
    logs = EgressLogs()
    for session_id in ("s-1", "s-2"):
        logs.open(session_id, EgressLogging.ALL)
    hosts = [f"h{number}.example" for number in range(100)]

    def kept(session_id: str) -> list[str]:
        return [each.host for each in logs.page(session_id, None, None, None, 1000).entries]

    for host in hosts[:3]:
        logs.add(protocol.EgressEntry("s-2", 1.5, "tcp", host, 1, "denied"))
    for host in hosts:
        logs.add(protocol.EgressEntry("s-1", 1.5, "tcp", host, 1, "denied"))
        assert len(kept("s-1")) + len(kept("s-2")) <= 20
    assert kept("s-2") == hosts[:3]
    assert kept("s-1") == hosts[-len(kept("s-1")) :]
    logs.forget("s-1")
    for host in hosts[:17]:
        logs.add(protocol.EgressEntry("s-2", 1.5, "tcp", host, 1, "denied"))
    assert len(kept("s-2")) == 20


def test_lost_entries_are_in_every_log() -> None:
    """Nobody knows whose they were."""
    logs = EgressLogs()
    for session_id in ("s-1", "s-2"):
        logs.open(session_id, EgressLogging.ALL)
    logs.note_dropped(3)
    assert [logs.page(each, None, None, None, 10).dropped for each in logs] == [3, 3]


def test_refusals_push_out_no_other_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has itself refused washes nothing out; a reader is told how much it has missed."""
    monkeypatch.setattr(egress_log, "KEPT", 5)
    monkeypatch.setattr(egress_log, "KEPT_OF_ALL", 6)
    logs = EgressLogs()
    logs.open("s-1", EgressLogging.ALL)
    logs.add(protocol.EgressEntry("s-1", 1.5, "tcp", "upload.example", 1, "allowed"))
    for number in range(8):
        logs.add(protocol.EgressEntry("s-1", 1.5, "tcp", f"h{number}.example", 1, "denied"))
    page = logs.page("s-1", None, None, None, 10)
    assert [each.host for each in page.entries] == ["upload.example", *(f"h{number}.example" for number in range(3, 8))]
    assert page.missed == 3
    assert logs.page("s-1", page.entries[1].cursor, None, None, 10).missed == 0
    logs.add(protocol.EgressEntry("s-1", 1.5, "tcp", "late.example", 1, "allowed"))
    page = logs.page("s-1", None, EgressVerdict.ALLOWED, None, 10)
    assert ([each.host for each in page.entries], page.missed) == (["upload.example", "late.example"], 6)
