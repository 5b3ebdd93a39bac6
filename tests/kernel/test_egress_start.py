"""The start of the egress process, as a child and by the launcher: its rights once it serves, and what ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from egress.protocol import EGRESS_ID, MAX_DATAGRAM_BYTES, Configure, Configured, decode_answer, encode
from nsinit.cgroup.beside import name_cgroups
from nsinit.cgroup.tree import BESIDE
from nsinit.wire.launching import LaunchForParent
from sandkasten.links.fds import wait_ended
from sandkasten.links.processes import (
    ChildProcess,
    Launcher,
    StartEgress,
    forward_log,
    open_launcher,
    start_egress_as_child,
)
from tests.allowance import ALLOWANCE
from tests.leaks import children
from tests.waiting import patience, until

PATIENCE_S = 20.0


@asynccontextmanager
async def launched(tmp_path: Path, permit: tuple[str, ...] = (), proxy: str = "") -> AsyncIterator[Launcher]:
    """A launcher of this process, as a daemon has one that gave root away."""
    launcher = open_launcher(LaunchForParent(str(tmp_path), 61_100, ALLOWANCE, os.getpid(), permit=permit, proxy=proxy))
    try:
        yield launcher
    finally:
        await trio.to_thread.run_sync(launcher.close)


async def test_the_socket_of_a_daemon_that_follows_is_not_removed(tmp_path: Path) -> None:
    """A launcher removes the file that its daemon bound, and not the one of the next daemon, which may come before the
    launcher's end and could have the same inode."""
    path, second = tmp_path / "first", tmp_path / "second"
    for each in (path, second):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(each))
    what = LaunchForParent(str(tmp_path), 61_100, ALLOWANCE, os.getpid(), sockets=(str(path), str(second)))
    launcher = open_launcher(what)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    await trio.to_thread.run_sync(launcher.close)
    assert (path.exists(), second.exists()) == (True, False)


async def served(start: StartEgress) -> tuple[ChildProcess, dict[str, str]]:
    """Start an egress process and wait until it has answered; return it with its status."""
    process = await start()
    with trio.fail_after(patience(PATIENCE_S)):
        process.sock.setblocking(False)
        process.sock.send(encode(Configure(seq=1)))
        await trio.lowlevel.wait_readable(process.sock)
        answer = decode_answer(process.sock.recv(MAX_DATAGRAM_BYTES))
    assert isinstance(answer, Configured), answer
    assert process.pidfd is not None
    return process, status_of(process)


def status_of(process: ChildProcess) -> dict[str, str]:
    """Return what the kernel tells about a process, by its pidfd."""
    assert process.pidfd is not None
    fdinfo = Path(f"/proc/self/fdinfo/{process.pidfd.fileno()}").read_text()
    (pid,) = (line.split()[1] for line in fdinfo.splitlines() if line.startswith("Pid:"))
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def permits_of(process: ChildProcess) -> list[str]:
    """Return what a process was told at its start that it may reach."""
    words = Path(f"/proc/{status_of(process)['Pid']}/cmdline").read_text().split("\0")
    return [each for each in words if each.startswith(("permit=", "proxy="))]


def cgroups_beside() -> list[str]:
    """Return the cgroups of processes beside a daemon, in each hierarchy."""
    places = {os.path.dirname(each) for each in name_cgroups("egress")}
    return sorted(f"{place}/{name}" for place in places for name in os.listdir(place) if name.startswith(BESIDE))


def pids_beside() -> set[str]:
    """Return the processes in those cgroups; each of the processes is in all of them."""
    return {pid for each in cgroups_beside() for pid in Path(each, "cgroup.procs").read_text().split()}


async def nothing_beside() -> bool:
    """Whether no such cgroup is left: the launcher removes them when it has reaped."""
    return cgroups_beside() == []


async def ended(process: ChildProcess) -> None:
    """Wait until a process has ended."""
    assert process.pidfd is not None
    with trio.fail_after(patience(PATIENCE_S)):
        await wait_ended(process.pidfd)


def check_rights(status: dict[str, str]) -> None:
    """Check that a process has a user of its own and no other right."""
    assert (status["Uid"].split(), status["Gid"].split()) == ([str(EGRESS_ID)] * 4, [str(EGRESS_ID)] * 4)
    assert (status["Groups"], status["CapPrm"], status["CapEff"]) == ("", f"{0:016x}", f"{0:016x}")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_a_child_gives_root_away_and_ends_with_its_socket() -> None:
    """The process answers with the libraries of this interpreter, as a user of its own without any power; it ends when
    its socket does, and so does its log."""
    process, status = await served(start_egress_as_child)
    check_rights(status)
    assert pids_beside() == {status["Pid"]}
    process.sock.close()
    await ended(process)
    process.reap()
    assert cgroups_beside() == []
    assert process.log is not None
    with trio.fail_after(patience(PATIENCE_S)):
        await forward_log(process.log.fileno(), "egress")
    process.close()


async def test_the_launcher_starts_one_beside_nsinit_and_reaps_it(tmp_path: Path) -> None:
    """With the launcher's few capabilities it still becomes its user. A word kills it, another starts the next one, and
    an nsinit of the same launcher is not touched."""
    async with launched(tmp_path) as launcher:
        nsinit = await launcher.start_nsinit()
        first, status = await served(launcher.start_egress)
        check_rights(status)
        assert status["PPid"] == str(launcher.pid)
        assert pids_beside() == {status["Pid"]}
        first.kill()
        await ended(first)
        first.close()
        await until(nothing_beside)
        second, status = await served(launcher.start_egress)
        check_rights(status)
        assert len(children(launcher.pid)) == 2
        second.sock.close()
        await ended(second)
        second.close()
        assert nsinit.pidfd is not None
        signal.pidfd_send_signal(nsinit.pidfd.fileno(), 0)
        nsinit.close()


async def test_an_nsinit_started_ahead_is_the_first_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first that asks gets it, the next another; one that nobody asks for ends by itself, as the launcher does."""
    async with launched(tmp_path) as launcher:
        launcher.start_ahead()

        async def is_started() -> bool:
            return len(children(launcher.pid)) == 1

        await until(is_started)
        (ahead,) = children(launcher.pid)
        first = await launcher.start_nsinit()
        assert status_of(first)["Pid"] == str(ahead)
        await first.end("nsinit", patience(PATIENCE_S))
        second = await launcher.start_nsinit()
        assert status_of(second)["Pid"] != str(ahead)
        await second.end("nsinit", patience(PATIENCE_S))
    async with launched(tmp_path) as launcher:
        launcher.start_ahead()
    assert launcher.pid not in children(os.getpid())
    assert "killed" not in capfd.readouterr().err


async def test_two_starts_at_once_get_a_process_each(tmp_path: Path) -> None:
    """The answer to each start goes to who asked for it."""
    async with launched(tmp_path) as launcher:

        async def nsinit() -> None:
            process = await launcher.start_nsinit()
            assert status_of(process)["Uid"].split() == ["0"] * 4
            process.close()

        async def egress() -> None:
            process, status = await served(launcher.start_egress)
            check_rights(status)
            await process.end("egress", patience(PATIENCE_S))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(egress)
            nursery.start_soon(nsinit)


async def test_it_ends_with_the_daemon_of_its_launcher(tmp_path: Path) -> None:
    """When the launcher's socket and its own are closed, as at a daemon's death, it ends and the launcher reaps it and
    removes its cgroups."""
    async with launched(tmp_path) as launcher:
        process, _ = await served(launcher.start_egress)
        process.sock.close()
    await ended(process)
    process.close()
    assert cgroups_beside() == []


async def test_the_launcher_takes_permits_from_root_alone(tmp_path: Path) -> None:
    """The process is started with those of the launcher's argument, whatever the daemon asks for."""
    proxy = "http://10.77.0.1:3128"
    async with launched(tmp_path, permit=("10.77.0.0/16",), proxy=proxy) as launcher:
        process = await launcher.start_egress("egress", None, "permit=10.0.0.0/8", "proxy=http://10.0.0.1:80")
        assert permits_of(process) == ["permit=10.77.0.0/16", f"proxy={proxy}"]
        await process.end("egress", patience(PATIENCE_S))


async def test_the_gateway_has_a_cgroup_too() -> None:
    """The limits are for either role."""
    process = await start_egress_as_child("gateway")

    async def is_there() -> bool:
        return pids_beside() == {status_of(process)["Pid"]}

    await until(is_there)
    await process.end("gateway", patience(PATIENCE_S))
    assert cgroups_beside() == []


async def test_its_log_lines_are_under_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """Lines of the egress process have `egress_` before their event and their fields."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b'{"level": "warning", "event": "way out", "reason": "none"}\nplain\n')
    os.close(write_fd)
    with caplog.at_level(logging.INFO):
        await forward_log(read_fd, "egress")
    os.close(read_fd)
    assert [record.getMessage() for record in caplog.records] == ["egress_way_out", "egress_output"]
    assert caplog.records[0].__dict__["egress_reason"] == "none"
