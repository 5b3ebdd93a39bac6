"""Sessions with a way out, a thousand of them, made and ended with connections open: nothing of them is left."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from pathlib import Path

import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, SessionSpec
from tests import leaks
from tests.kernel.test_network import ALLOWED, measured, outside, served
from tests.kernel.world import World
from tests.waiting import patience, until

__all__ = ["outside"]

_SESSIONS, _AT_ONCE, _WARM = 1000, 4, 40
_GROWTH_KIB = {"egress": 2048, "nsinit": 2048, "daemon": 24 * 1024}
"""Bounds of what a process grows by: pages that its allocator keeps, and the latest events of the daemon."""
_FEW = 8
"""Helpers of nsinit and threads come and go; what one session in a hundred left would be more."""
_FEW_NAMESPACES = 100
"""Freed objects that the kernel keeps ready, and namespaces whose end it has not come to."""
_HOLD = """cat >/tmp/hold.py <<'END'
import pathlib, socket, time, urllib.request
urllib.request.urlopen("http://site.example/", timeout=20).read()
held = [socket.create_connection(("other.example", 7), timeout=20) for _ in range(3)]
for each in held:
    each.sendall(b"\\1")  # no beginning of an HTTP request
    each.recv(1)
pathlib.Path("/tmp/holds").touch()
time.sleep(600)
END
python3 -S /tmp/hold.py >/tmp/failure 2>&1 &
for turn in $(seq 1000); do [ -e /tmp/holds ] && break; sleep 0.02; done; [ -e /tmp/holds ] || cat /tmp/failure"""


def _processes(world: World) -> dict[str, int]:
    """Return the daemon's children that live as long as it does, by what they are."""
    named = {name: pid for pid, name in sorted(leaks.descendants(os.getpid()), reverse=True)}
    return {"egress": world.egress_pid, "nsinit": named["sandkasten-init"], "daemon": os.getpid()}


def _counted(world: World) -> dict[str, int]:
    """Return what a session has some of."""
    numbers = {
        "processes": len(leaks.descendants(os.getpid())),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
    }
    for name, pid in _processes(world).items():
        numbers[f"descriptors of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
        if name != "daemon":  # whose threads are trio's, for a while
            numbers[f"threads of {name}"] = len(os.listdir(f"/proc/{pid}/task"))
    for line in Path(f"/proc/{world.egress_pid}/net/sockstat").read_text().splitlines():
        protocol, _, value = line.split()[:3]
        numbers[f"sockets outside, {protocol}"] = int(value)
    return numbers


def _files(config: Config) -> list[str]:
    """Return the paths in the data directory; images are of all tests."""
    return sorted(str(each.relative_to(config.data_dir)) for each in config.data_dir.glob("[!i]*/**/*"))


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


async def _settled(config: Config) -> list[str]:
    """Return the paths when they have not changed for a second: what is in the trash is deleted meanwhile."""
    with trio.fail_after(patience(60)):
        found = None
        while (now := _files(config)) != found:
            found = now
            await trio.sleep(1)
        return now


async def _make_and_end(supervisor: LocalSupervisor, count: int) -> None:
    """Make sessions and end them while connections are open, some at one time."""
    left = iter(range(count))

    async def go_on() -> None:
        for _ in left:
            session = await supervisor.create(SessionSpec(network=ALLOWED))
            result = await supervisor.exec(session.id, ExecSpec(_HOLD))
            assert result.output == b"", result.output
            await supervisor.destroy(session.id)

    async with trio.open_nursery() as nursery:
        for _ in range(_AT_ONCE):
            nursery.start_soon(go_on)


async def test_sessions_with_a_way_out_leave_nothing(config: Config, outside: World) -> None:
    """The next thousand sessions add nothing to what a first few have made."""
    faulthandler.cancel_dump_traceback_later()
    async with served(config, outside) as supervisor:

        async def is_quiet() -> bool:
            return (await measured(supervisor))["connections_open",] == 0

        kept = await supervisor.create(SessionSpec(network=ALLOWED))
        await _make_and_end(supervisor, _WARM)
        await until(is_quiet)
        files = await _settled(config)
        before, resident_kib, namespaces = _counted(outside), _resident_kib(outside), _namespaces()
        with trio.fail_after(patience(300)):
            await _make_and_end(supervisor, _SESSIONS)
        await until(is_quiet)
        assert await _settled(config) == files
        more = {name: number - before[name] for name, number in _counted(outside).items()}
        assert max(more.values()) <= _FEW, more
        grown = {name: kib - resident_kib[name] for name, kib in _resident_kib(outside).items()}
        assert all(grown[name] < most for name, most in _GROWTH_KIB.items()), grown
        assert _namespaces() - namespaces < _FEW_NAMESPACES
        assert (await supervisor.get(kept.id)).network == ALLOWED
