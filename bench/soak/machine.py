"""Resources of the machine that a soak may use and must give back: counted from outside, by what the kernel shows.

Processes are those below this one, which is their subreaper: whatever a daemon started and forgot is still counted.
Sources: proc(5); cgroup-v2.rst "cgroup.stat"; prctl(2) PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from bench.measure import own_resident_bytes

_PR_SET_CHILD_SUBREAPER = 36
_OURS = "sandkasten"
SCRATCH = "sandkasten-soak-"
"""The beginning of the name of a soak's directory."""
INIT, BUILDER = "sandkasten-init", "nsinit-builder"
CGROUP_MAKER, CGROUP_EMPTIER = "nsinit-cgroups", "nsinit-emptier"
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_BLOCK_DEVICES = Path("/sys/block")


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(waited_for: set[int]) -> None:
    """Collect what died and was handed to us; `waited_for` are the children that somebody else waits for."""
    for pid, process in family().items():
        if process.state == "Z" and process.parent == os.getpid() and pid not in waited_for:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


@attrs.frozen
class Process:
    """A line of `/proc/<pid>/stat`."""

    name: str
    state: str
    parent: int


def family() -> Mapping[int, Process]:
    """Return every process below this one, by pid; zombies too."""
    everyone: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace")
                state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                everyone[int(entry)] = Process(name, state, int(parent))
    children: dict[int, list[int]] = {}
    for pid, process in everyone.items():
        children.setdefault(process.parent, []).append(pid)
    found, queue = {}, [os.getpid()]
    while queue:
        for pid in children.get(queue.pop(), ()):
            found[pid] = everyone[pid]
            queue.append(pid)
    return found


@attrs.frozen
class Inventory:
    """Counts of resources by kind. `dying_cgroups` are removed ones that the kernel still holds something of."""

    processes: int
    mounts: int
    cgroups: int
    dying_cgroups: int
    namespaces: int
    loop_devices: int
    directories: int
    descriptors: int

    @classmethod
    def take(cls) -> Inventory:
        processes = {pid: each for pid, each in family().items() if each.state not in "ZX"}
        groups = list(_own_groups())
        return cls(
            processes=len(processes),
            mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
            cgroups=sum(1 for group in groups for _ in os.walk(group)),
            dying_cgroups=sum(_dying(base) for base in _own_bases()),
            namespaces=len(set(_namespaces([os.getpid(), *processes]))),
            loop_devices=sum(1 for _ in _loop_devices()),
            directories=sum(1 for _ in _directories()),
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def more_than(self, before: Inventory) -> Mapping[str, int]:
        """Return what there is more of now than before; dying cgroups aside, which are the kernel's to forget."""
        now, then = attrs.asdict(self), attrs.asdict(before)
        return {name: now[name] - then[name] for name in now if now[name] > then[name] and name != "dying_cgroups"}


@attrs.frozen
class Usage:
    """Resources that one process holds."""

    resident_bytes: int
    descriptors: int
    threads: int
    mounts: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        place = Path(f"/proc/{pid}")
        return cls(
            resident_bytes=own_resident_bytes(pid),
            descriptors=len(os.listdir(place / "fd")),
            threads=len(os.listdir(place / "task")),
            mounts=len((place / "mountinfo").read_text().splitlines()),
        )


def named(name: str) -> list[int]:
    """Return the pids below this process that bear a name, as `/proc/<pid>/comm` has it, and live."""
    return [pid for pid, each in family().items() if each.name == name[:15] and each.state not in "ZX"]


def fork_servers() -> list[int]:
    """Return the pids of the nsinit processes below this one: they have no name of their own, their builders have."""
    everyone = family()
    return sorted({everyone[pid].parent for pid in named(BUILDER) if everyone[pid].parent in everyone})


def children_of(pid: int) -> Mapping[int, Process]:
    """Return the living children of a process below this one."""
    return {child: each for child, each in family().items() if each.parent == pid and each.state not in "ZX"}


def count_names() -> Counter[str]:
    """Return how many living processes below this one bear each name; for reports of what is left."""
    return Counter(each.name for each in family().values() if each.state not in "ZX")


def _namespaces(pids: list[int]) -> Iterator[str]:
    for pid in pids:
        for kind in _NAMESPACES:
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/ns/{kind}")


def _own_bases() -> Iterator[Path]:
    """Yield this process's own cgroup in each hierarchy that is mounted."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, place = left.split()[3:5]
        kind, _, options = right.split()[:3]
        names = {"cgroup2": {""}, "cgroup": set(options.split(","))}.get(kind, set())
        for _, controllers, path in own:
            if names & set(controllers.split(",")) and path.startswith(root.rstrip("/")):
                yield Path(place + path[len(root.rstrip("/")) :])


def _own_groups() -> Iterator[Path]:
    for base in _own_bases():
        with contextlib.suppress(OSError):
            yield from (base / name for name in os.listdir(base) if name.startswith(_OURS))


def _dying(base: Path) -> int:
    """Return how many removed cgroups there are beneath `base`; v1 does not say."""
    with contextlib.suppress(OSError):
        for line in (base / "cgroup.stat").read_text().splitlines():
            if line.startswith("nr_dying_descendants "):
                return int(line.split()[1])
    return 0


def _loop_devices() -> Iterator[str]:
    """Yield the files of a soak's directory that have a loop device; others of the machine may come and go."""
    for device in _BLOCK_DEVICES.glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if f"/{SCRATCH}" in (file := device.read_text().strip()):
                yield file


def _directories() -> Iterator[str]:
    for base in (tempfile.gettempdir(), "/run", "/dev/shm"):
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(base) if name.startswith(_OURS))
