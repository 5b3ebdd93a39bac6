"""Sessions with a way out, a thousand of them, made and ended with connections open: nothing of them is left."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, SessionSpec
from tests import leaks
from tests.kernel.test_network import ALLOWED, measured, outside, served
from tests.kernel.world import World
from tests.waiting import patience, until

__all__ = ["outside"]

_SESSIONS, _AT_ONCE, _WARM = 60, 4, 40
_GROWTH_KIB = 2048
"""Bound of what a process may grow by, for pages that its allocator keeps: 2 KiB a session."""
_FEW_NAMESPACES = 100
"""Freed objects that the kernel keeps ready, and namespaces whose end it has not come to."""
_HOLD = """cat >/tmp/hold.py <<'END'
import pathlib, socket, time, urllib.request
urllib.request.urlopen("http://site.example/", timeout=20).read()
held = [socket.create_connection(("other.example", 7), timeout=20) for _ in range(3)]
for each in held:
    each.sendall(b"x")
    each.recv(1)
pathlib.Path("/tmp/holds").touch()
time.sleep(600)
END
python3 -S /tmp/hold.py >/tmp/failure 2>&1 &
for turn in $(seq 1000); do [ -e /tmp/holds ] && exit; sleep 0.02; done; cat /tmp/failure; exit 1"""


def _processes(world: World) -> dict[str, int]:
    """Return the daemon's children that live as long as it does, by what they are."""
    named = {name: pid for pid, name in sorted(leaks.descendants(os.getpid()), reverse=True)}
    return {"egress": world.egress_pid, "nsinit": named["sandkasten-init"], "daemon": os.getpid()}


def _counted(world: World, config: Config) -> dict[str, object]:
    """Return what must be the same before and after."""
    processes = _processes(world)
    sockets = Path(f"/proc/{world.egress_pid}/net/sockstat").read_text().splitlines()
    return {
        "descriptors": {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in processes.items()},
        "threads": {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in processes.items() if name != "daemon"},
        "processes": len(leaks.descendants(os.getpid())),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "sockets of the world": [line.split()[2] for line in sockets if line.startswith(("TCP:", "UDP:"))],
        "files": sorted(str(each.relative_to(config.data_dir)) for each in config.data_dir.glob("[!i]*/**/*")),
    }


def _resident_kib(world: World) -> Mapping[str, int]:
    kib = {}
    for name, pid in _processes(world).items():
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib[name] = int(lines["VmRSS"].split()[0])
    return kib


def _namespaces() -> int:
    """Return the number of network namespaces of the machine (proc_slabinfo(5))."""
    lines = Path("/proc/slabinfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("net_namespace "))


async def _make_and_end(supervisor: LocalSupervisor, count: int) -> None:
    """Make sessions and end them while connections are open, some at one time."""
    left = iter(range(count))

    async def go_on() -> None:
        for _ in left:
            session = await supervisor.create(SessionSpec(network=ALLOWED))
            result = await supervisor.exec(session.id, ExecSpec(_HOLD))
            assert result.end.exit_code == 0, result.output
            await supervisor.destroy(session.id)

    async with trio.open_nursery() as nursery:
        for _ in range(_AT_ONCE):
            nursery.start_soon(go_on)


async def test_sessions_with_a_way_out_leave_nothing(config: Config, outside: World) -> None:
    """What a first few sessions have made stays, and the next thousand add nothing to it."""
    faulthandler.cancel_dump_traceback_later()
    async with served(config, outside) as supervisor:

        async def is_quiet() -> bool:
            return (await measured(supervisor))["connections_open",] == 0

        kept = await supervisor.create(SessionSpec(network=ALLOWED))
        await _make_and_end(supervisor, _WARM)
        await until(is_quiet)
        before, resident_kib, namespaces = _counted(outside, config), _resident_kib(outside), _namespaces()
        with trio.fail_after(patience(300)):
            await _make_and_end(supervisor, _SESSIONS)
        await until(is_quiet)
        with trio.move_on_after(patience()):
            while _counted(outside, config) != before:  # noqa: ASYNC110 - threads and the kernel end it
                await trio.sleep(0.1)
        assert _counted(outside, config) == before
        grown = {name: kib - resident_kib[name] for name, kib in _resident_kib(outside).items()}
        print(grown, _namespaces() - namespaces, before)
        del grown["daemon"]  # which is the process of the test
        assert max(grown.values()) < _GROWTH_KIB, grown
        assert _namespaces() - namespaces < _FEW_NAMESPACES
        assert (await supervisor.get(kept.id)).network == ALLOWED
