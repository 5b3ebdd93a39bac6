"""The egress client over an nsinit that refuses, or a process that is silent: what a caller is told."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from egress.protocol import EgressTotals, Entries
from nsinit.wire.protocol import NETWORK_STAGE, CloseBridge, OpenBridge
from sandkasten.actors import core
from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.services import egress
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.egress import EgressClient, OpenWay
from sandkasten.actors.services.nsinit import NetworkSockets
from sandkasten.actors.session.changing import open_way
from sandkasten.config import EgressSettings
from sandkasten.counters.metrics import Metrics
from sandkasten.errors import BuildFailed, EgressUnavailable, NetworkNotSupported, NsinitLost, SandkastenError
from sandkasten.journal.egress import EgressLogs
from sandkasten.journal.ring import Journal
from sandkasten.links.fds import OwnedFd
from sandkasten.links.processes import ChildProcess, Role, StartEgress
from sandkasten.model import EventType
from sandkasten.model.network import Network, NetworkMode
from tests.strategies import make_record
from tests.waiting import patience


class RefusingNsinit(Actor):
    """An nsinit whose every request fails at one step."""

    def __init__(self, ref: Ref, failure: BuildFailed) -> None:
        super().__init__(ref)
        self._failure = failure

    async def handle(self, message: Any) -> Any:
        raise self._failure


async def _never(role: Role = "egress", path: Path | None = None, *words: str) -> ChildProcess:
    raise AssertionError("no process is started for a session that has no sockets")


def _client(nsinit: Ref, start: StartEgress) -> EgressClient:
    return EgressClient(
        Ref("egress"),
        nsinit=nsinit,
        broker=Ref("broker"),
        settings=EgressSettings(),
        directory=SessionDirectory(),
        logs=EgressLogs(),
        journal=Journal(),
        metrics=Metrics(),
        start=start,
        path=Path("/nowhere/egress.sock"),
        steers=True,
    )


@pytest.mark.parametrize(
    ("stage", "number", "told"),
    [
        ("program", errno.EINVAL, NetworkNotSupported),
        ("link", errno.EPERM, NetworkNotSupported),
        ("map", errno.ENOMEM, BuildFailed),
        ("sockets", errno.EADDRINUSE, BuildFailed),
    ],
)
async def test_a_kernel_that_cannot_steer_is_told_from_a_failure(
    stage: str, number: int, told: type[SandkastenError]
) -> None:
    """The one will never do on this node; the other may pass."""
    failure = BuildFailed("failed", stage=f"{NETWORK_STAGE}{stage}", path="", errno=number)
    nsinit = RefusingNsinit(Ref("nsinit"), failure)
    client = _client(nsinit.ref, _never)
    async with trio.open_nursery() as nursery:
        await nursery.start(nsinit.run)
        await nursery.start(client.run)
        with pytest.raises(SandkastenError) as refused:
            await client.ref.ask(OpenWay("0" * 24, Network(NetworkMode.OPEN)))
        assert refused.type is told
        nursery.cancel_scope.cancel()


class DyingNsinit(Actor):
    """An nsinit that opens a bridge and dies before it says so, and once more before it closes it."""

    def __init__(self, ref: Ref) -> None:
        super().__init__(ref)
        self.deaths, self.opened, self.closed = 0, False, trio.Event()

    async def handle(self, message: Any) -> Any:
        match message.request:
            case OpenBridge():
                self.opened = True
            case CloseBridge() if self.deaths > 1:
                self.closed.set()
                return None
        self.deaths += 1
        raise NsinitLost("nsinit ended")


async def test_a_bridge_that_may_have_been_made_is_closed_however_long_nsinit_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller is told that nothing was changed, which the client sees to."""
    monkeypatch.setattr(core, "RESTART_PATIENCE_S", 0.0)
    nsinit = DyingNsinit(Ref("nsinit"))
    client = _client(nsinit.ref, _never)
    async with trio.open_nursery() as nursery:
        await nursery.start(nsinit.run)
        await nursery.start(client.run)
        with pytest.raises(NsinitLost):
            await client.ref.ask(OpenWay("0" * 24, Network(NetworkMode.BRIDGE)))
        assert nsinit.opened
        with trio.fail_after(patience(20)):
            await nsinit.closed.wait()
        nursery.cancel_scope.cancel()


async def test_pauses_are_told_of_once_and_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process tells of all its pauses so far; an event has those that no event had before."""
    monkeypatch.setattr(egress, "_REFUSALS_EVERY_S", 0.05)
    client = _client(Ref("nsinit"), _never)
    client._journal.open(1, None)
    client._take(Entries(1, (), EgressTotals(pauses=1)))
    client._take(Entries(2, (), EgressTotals(pauses=3)))
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    told = [dict(each.data) for each in client._journal.recent("", limit=9) if each.type is EventType.EGRESS_LIMITED]
    assert [each["count"] for each in told] == [2, 1]  # newest first
    counts = {each.name: each.value for family in client._metrics.read() for each in family.samples}
    assert counts["sandkasten_egress_pauses_total"] == 3
    assert counts["sandkasten_egress_entries_dropped_total"] == 3


class RefusingEgress(Actor):
    """An egress client that refuses some times, and then not."""

    def __init__(self, ref: Ref, refusals: int) -> None:
        super().__init__(ref)
        self.asked, self._refusals = 0, refusals

    async def handle(self, message: OpenWay) -> None:
        self.asked += 1
        if self.asked <= self._refusals:
            raise BuildFailed("no such session", stage=f"{NETWORK_STAGE}session", path="", errno=errno.ESRCH)


@pytest.mark.parametrize("refusals", [1, 2])
async def test_a_way_out_is_asked_for_again_when_its_sandbox_is_built(refusals: int) -> None:
    """The first request may come to nsinit before the sandbox does; what fails then is the create's failure."""
    session = attrs.evolve(make_record("0" * 24).session, network=Network(NetworkMode.OPEN))
    client, is_built = RefusingEgress(Ref("egress"), refusals), trio.Event()
    failures: list[SandkastenError] = []

    async def open_it() -> None:
        try:
            await open_way(client.ref, session, is_built)
        except SandkastenError as error:
            failures.append(error)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        nursery.start_soon(open_it)
        await trio.testing.wait_all_tasks_blocked()
        assert client.asked == 1
        is_built.set()
    assert (client.asked, len(failures)) == (2, refusals - 1)


class GivingNsinit(Actor):
    """An nsinit that gives descriptors of no use."""

    async def handle(self, message: Any) -> NetworkSockets:
        return NetworkSockets([OwnedFd(os.open("/dev/null", os.O_RDONLY)) for _ in range(3)])


@pytest.fixture
def silent() -> Iterator[StartEgress]:
    """A way to start processes that answer nothing."""
    ends: list[socket.socket] = []

    async def start(role: Role = "egress", path: Path | None = None, *words: str) -> ChildProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(theirs)
        log_read, log_write = os.pipe()
        os.close(log_write)
        pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})  # noqa: ASYNC221 - takes a millisecond
        kill, reap = partial(os.kill, pid, signal.SIGKILL), partial(os.waitpid, pid, 0)
        return ChildProcess(ours, OwnedFd(os.pidfd_open(pid)), OwnedFd(log_read), kill, reap)

    yield start
    for end in ends:
        end.close()


async def test_a_process_that_does_not_answer_costs_its_askers_alone(
    silent: StartEgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers that wait are told, as often as the process is started; the client goes on."""
    monkeypatch.setattr(egress, "_START_S", 0.1)
    monkeypatch.setattr(egress, "STOP_S", 0.05)
    nsinit = GivingNsinit(Ref("nsinit"))
    async with trio.open_nursery() as nursery:
        await nursery.start(nsinit.run)
        client = _client(nsinit.ref, silent)
        await nursery.start(client.run)
        for _ in range(2):
            with pytest.raises(EgressUnavailable, match="does not answer"):
                await client.ref.ask(OpenWay("0" * 24, Network(NetworkMode.OPEN)))
            await trio.sleep(0.5)
        assert client.ref.is_alive
        nursery.cancel_scope.cancel()
