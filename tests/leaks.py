"""What a test may leave behind, seen from outside: mounts, cgroups, processes, descriptors, directories."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import SLOWNESS

_PATIENCE_S = 5.0 * SLOWNESS
_PAUSE_S = 0.02
_OURS = "sandkasten"


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    mounts: frozenset[str]
    cgroups: frozenset[str]
    processes: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[int, str]]
    directories: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        _reap()
        return cls(
            mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
            cgroups=frozenset(_idle_cgroups()),
            processes=frozenset(descendants(os.getpid())),
            descriptors=frozenset(_descriptors()),
            directories=frozenset(_directories()),
        )

    def difference(self) -> list[str]:
        """Return what is there now and was not then, one sentence each."""
        now = Snapshot.take()
        return [
            *(f"mount: {each}" for each in sorted(now.mounts - self.mounts)),
            *(f"cgroup: {each}" for each in sorted(now.cgroups - self.cgroups)),
            *(f"process: {pid} {name}" for pid, name in sorted(now.processes - self.processes)),
            *(f"descriptor: {fd} {target}" for fd, target in sorted(now.descriptors - self.descriptors)),
            *(f"directory: {each}" for each in sorted(now.directories - self.directories)),
        ]

    def wait_for_difference_to_vanish(self) -> list[str]:
        """Return the difference, after giving the kernel the moment it needs to finish what was begun."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := self.difference()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(_PAUSE_S)
        return left


def clean_up(before: Snapshot) -> None:
    """Kill the processes and remove the cgroups that were left since `before`."""
    known = {pid for pid, _ in before.processes}
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        processes = {pid for pid, _ in descendants(os.getpid())} - known
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        cgroups = {Path(each) for each in _idle_cgroups()} - {Path(each) for each in before.cgroups}
        for directory in sorted(cgroups, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                directory.rmdir()
        if not processes and not cgroups:
            return
        time.sleep(_PAUSE_S)


def descendants(root: int) -> set[tuple[int, str]]:
    """Return (pid, command name) of every living descendant of `root`; zombies are none."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace")
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
                if state not in "ZX":
                    parents.setdefault(int(parent), []).append((int(entry), name))
    found: set[tuple[int, str]] = set()
    queue = [root]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.add(child)
            queue.append(child[0])
    return found


def _reap() -> None:
    """Reap orphans that were handed to us and died. Children that someone waits for by pid are reaped by them."""
    for pid in _orphan_zombies():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _orphan_zombies() -> Iterator[int]:
    own = os.getpid()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace")
                state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
                if state == "Z" and int(parent) == own:
                    yield int(entry)


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target != "/proc/self/fd" and not target.startswith("/proc/"):
                yield int(entry), target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target


def _directories() -> Iterator[str]:
    for base in (tempfile.gettempdir(), "/run", "/dev/shm"):
        if os.path.isdir(base):
            for name in os.listdir(base):
                if name.startswith(_OURS):
                    yield os.path.join(base, name)


def _idle_cgroups() -> Iterator[str]:
    """Return our cgroups that hold no process; one that does is reported by its process."""
    for directory in own_cgroups():
        for path, _, _ in os.walk(directory):
            if not _is_populated(Path(path)):
                yield path


def own_cgroups() -> Iterator[Path]:
    """Return the top directories of ours in every hierarchy, beneath this process's own cgroups."""
    for base in _own_cgroup_dirs():
        with contextlib.suppress(OSError):
            yield from (base / name for name in os.listdir(base) if name.startswith(_OURS))


def _own_cgroup_dirs() -> Iterator[Path]:
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        names = {"cgroup2": [""], "cgroup": options.split(",")}.get(kind, [])
        for controllers, path in paths.items():
            if set(controllers.split(",")) & set(names) and path.startswith(root.rstrip("/")):
                yield Path(mount_point + path[len(root.rstrip("/")) :])


def _is_populated(directory: Path) -> bool:
    for path, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            if (Path(path) / "cgroup.procs").read_text().strip():
                return True
    return False
