"""Leaks of a test, seen from outside: mounts, cgroups, processes, descriptors, directories.

Only the ground of this process is searched, so that nothing found belongs to another run. In `/run` and `/dev/shm`,
which all processes share, entries with our name are looked for; in the checkout, whatever is not hidden.
Sources: proc_pid_task(5), `children`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from nsinit.kernel.slots import LEASE_PATH
from tests.ground import Ground
from tests.waiting import patience

_PATIENCE_S = 5.0
_PAUSE_S = 0.02
_OURS = "sandkasten"
_HELPER = "nsinit-"
"""Beginning of the names of nsinit's helpers."""
_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Snapshot:
    """Mounts, cgroups, processes, descriptors and directories at one moment."""

    ground: Ground
    mounts: frozenset[str]
    cgroups: frozenset[str]
    processes: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[int, str]]
    directories: frozenset[str]

    @classmethod
    def take(cls, ground: Ground) -> Snapshot:
        _reap()
        return cls(
            ground=ground,
            mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
            cgroups=frozenset(_idle_cgroups(ground)),
            processes=frozenset(descendants(os.getpid())),
            descriptors=frozenset(_descriptors()),
            directories=frozenset(_directories(ground)),
        )

    def new(self, processes: Collection[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return those that were not there then, but for helpers of an nsinit that was: it forks another one for each
        that dies, or that a loaded machine kept from its deadline.
        """
        known = {pid for pid, _name in self.processes}  # a process that was just forked may take another name
        return [
            (pid, name)
            for pid, name in processes
            if pid not in known and not (name.startswith(_HELPER) and (status := _status(pid)) and status[2] in known)
        ]

    def difference(self) -> list[str]:
        """Return what is there now and was not then, one sentence each."""
        now = Snapshot.take(self.ground)
        new = self.new(now.processes)
        return [
            *(f"mount: {each}" for each in sorted(now.mounts - self.mounts)),
            *(f"cgroup: {each}" for each in sorted(now.cgroups - self.cgroups)),
            *(f"process: {pid} {name}" for pid, name in sorted(new)),
            *(f"descriptor: {fd} {target}" for fd, target in sorted(now.descriptors - self.descriptors)),
            *(f"directory: {each}" for each in sorted(now.directories - self.directories)),
        ]

    def wait_for_difference_to_vanish(self) -> list[str]:
        """Return the difference, after giving the kernel the moment it needs to finish what was begun."""
        left, pause_s = self.difference(), _PAUSE_S
        if any(each.startswith("cgroup") for each in left):
            os.sync()  # the cgroup of an ended session stays until the kernel has written the workspace's files
        deadline = time.monotonic() + (patience(_PATIENCE_S) if left else 0)
        while left and time.monotonic() < deadline:
            gc.collect()
            time.sleep(pause_s)
            left, pause_s = self.difference(), min(2 * pause_s, 0.5)  # a look takes time of the processor
        return left


def clean_up(before: Snapshot) -> None:
    """Kill the processes and remove the cgroups that were left since `before`."""
    deadline = time.monotonic() + patience(_PATIENCE_S)
    while time.monotonic() < deadline:
        processes = before.new(descendants(os.getpid()))
        for pid, _ in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        cgroups = {Path(each) for each in _idle_cgroups(before.ground)} - {Path(each) for each in before.cgroups}
        for directory in sorted(cgroups, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                directory.rmdir()
        if not processes and not cgroups:
            return
        time.sleep(_PAUSE_S)


def descendants(root: int) -> set[tuple[int, str]]:
    """Return (pid, command name) of every living descendant of `root`; zombies are none.

    Walks until two walks in a row agree: what is orphaned while one goes on may be missed by it.
    """
    found = _walk(root)
    while (again := _walk(root)) != found:
        found = again
    return found


def _walk(root: int) -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    queue = [root]
    while queue:
        for child in children(queue.pop()):
            if (process := _status(child)) is not None:
                name, state, _ = process
                if state not in "ZX":
                    found.add((child, name))
                queue.append(child)
    return found


def _reap() -> None:
    """Reap orphans that were handed to us and died. Children that someone waits for by pid are reaped by them."""
    for pid in children(os.getpid()):
        if (process := _status(pid)) is not None and process[1] == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children(pid: int) -> set[int]:
    """Return the children of a process, dead ones included."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
    return found


def _status(pid: int) -> tuple[str, str, int] | None:
    """Return name, state and parent of a process, None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
    except OSError:
        return None
    state, parent, *_ = stat[stat.rindex(")") + 1 :].split()
    return stat[stat.index("(") + 1 : stat.rindex(")")], state, int(parent)


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target != "/proc/self/fd" and not target.startswith("/proc/"):
                yield int(entry), target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target


_LEASE = os.path.basename(LEASE_PATH)
"""The file of id ranges belongs to the machine, and stays."""


def _directories(ground: Ground) -> Iterator[str]:
    yield from (os.path.join(ground.directory, name) for name in os.listdir(ground.directory))
    yield from (f"{_CHECKOUT}/{name}" for name in os.listdir(_CHECKOUT) if not name.startswith("."))
    for base in ("/run", "/dev/shm"):
        if os.path.isdir(base):
            yield from (
                os.path.join(base, name) for name in os.listdir(base) if name.startswith(_OURS) and name != _LEASE
            )


def _idle_cgroups(ground: Ground) -> Iterator[str]:
    """Return our cgroups that hold no process; one that does is reported by its process."""
    for base in ground.cgroups:
        with contextlib.suppress(OSError):
            for name in os.listdir(base):
                if name.startswith(_OURS):
                    yield from (path for path, _, _ in os.walk(base / name) if not _is_populated(Path(path)))


def _is_populated(directory: Path) -> bool:
    for path, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            if (Path(path) / "cgroup.procs").read_text().strip():
                return True
    return False
