"""Leftovers in nsinit's places that belong to no session: found, named, and some of them removed on request.

A session's own remains go by `sessions.Sessions.remove`. Removed are only leftovers that are surely this data
directory's: foreign names in its own subdirectories, foreign cgroups among those of its sessions, loop devices with a
file in it. Two kinds are told of and never undone (`TOLD_ONLY`): mounts that a person made on or below the places of
sessions, and cgroups that an earlier nsinit of this data directory made in another part of the tree.

The daemon names a leftover as it was told of it; the name is only compared with what is found again, and never becomes
a path. A workspace is never in reach, and nothing is deleted through a mount (`storage/trash.py`). Network namespaces
of sessions have no name and end with their last process: there is nothing to find.
Sources: cgroups(7); loop(4) LOOP_CLR_FD; proc_pid_mountinfo(5); Documentation/ABI/testing/sysfs-block-loop.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

from nsinit.cgroup.session import SessionCgroup, kill_listed, read_file, read_processes, was_removed
from nsinit.cgroup.tree import Located, Tree, is_ours, owner_of, read_owner
from nsinit.kernel.files import write_file
from nsinit.kernel.mountinfo import is_below, parse_points
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.storage import loop_device, trash
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import TOLD_ONLY, Leftover
from nsinit.wire.validate import is_session_id

MAX_LEFTOVERS = 100
"""In one answer; when those are gone the next ones are found."""

_MAX_NAME = 400
_PLACES = ("disk", "run", "sessions", "spool", "stage", "trash")
"""Subdirectories of the data directory in which no person has a reason to mount anything."""
_OF_VOLUMES = ("volumes", "volume-drafts")
_MAX_DEPTH = 16
_DIRECTORIES_AT_A_TIME = 100
"""Cgroups that are looked at before other jobs get their turn: some 2 ms."""
_PAUSES_S = (0.0, 0.002, 0.01, 0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class HostView:
    """Two descriptors opened while the whole machine was in sight, before nsinit left its mount namespace.

    `mounts_fd`: the mount table of that namespace, which shows later mounts as well (proc_pid_mountinfo(5): the file
    belongs to the namespace it was opened in). `blocks_fd`: `/sys/block` (O_PATH), -1 without.
    """

    mounts_fd: int
    blocks_fd: int

    @classmethod
    def open(cls) -> HostView:
        """Open both. Raises `OSError` when there is no mount table."""
        try:
            blocks_fd = os.open("/sys/block", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            blocks_fd = -1
        return cls(os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC), blocks_fd)

    def close(self) -> None:
        """Close both."""
        os.close(self.mounts_fd)
        if self.blocks_fd >= 0:
            os.close(self.blocks_fd)

    def find_mounts(self, layout: Layout) -> list[str]:
        """Return the points of mounts that a person made on or below the places of sessions. Raises `OSError`."""
        # From offset 0 on each time. The kernel remembers where the next page begins, so there must be one reader.
        text = b""
        while piece := os.pread(self.mounts_fd, 1 << 16, len(text)):
            text += piece
        return mounts_in(layout.data_dir, os.fsdecode(text))


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The places where leftovers are looked for. `node_name`: the name of this node's cgroup directories."""

    tree: Tree
    layout: Layout
    located: Located
    node_name: str
    host: HostView

    def find(self) -> Generator[Wait, bool, list[Leftover]]:
        """Return the leftovers there are, at most `MAX_LEFTOVERS`."""
        found = [Leftover("mount", shown(point)) for point in self.host.find_mounts(self.layout)]
        found += [Leftover("other_cgroup", shown(each)) for each in (yield from self._other_cgroups())]
        # What is never removed stays in every answer, and must not keep out what is found only when the rest is gone.
        found = list(dict.fromkeys(found))[: MAX_LEFTOVERS // 2]
        found += [Leftover("cgroup", shown(name)) for path in self.tree.unique for name in _foreign_cgroups(path)]
        found += [Leftover("session_directory", shown(name)) for name in _foreign_names(self.layout.sessions)]
        found += [Leftover("run_directory", shown(name)) for name in _foreign_names(self.layout.run)]
        found += [Leftover("trash", shown(name)) for name in os.listdir(self.layout.trash)]
        found += [Leftover("loop", shown(f"{number} {path}")) for number, path in self._loops()]
        return list(dict.fromkeys(found))[:MAX_LEFTOVERS]

    def remove(self, leftover: Leftover) -> Generator[Wait, bool, bool]:
        """Remove a leftover if it is still found; False if something of it is left, and of kinds that are told only."""
        if leftover.kind in TOLD_ONLY:
            return False
        match leftover.kind:
            case "cgroup":
                for directory in self.tree.unique:
                    for name in _named(_foreign_cgroups(directory), leftover):
                        if not (yield from _remove_cgroup(f"{directory}/{name}")):
                            return False
            case "session_directory":
                return self._discard(self.layout.sessions, leftover)
            case "run_directory":
                return self._discard(self.layout.run, leftover)
            case "trash":  # deleted by the next deletion, unless a mount keeps it
                names = _named(os.listdir(self.layout.trash), leftover)
                return not any(self._has_mount(f"{self.layout.trash}/{name}") for name in names)
            case "loop":
                for number, path in self._loops():
                    if shown(f"{number} {path}") == leftover.name:
                        loop_device.detach(self.layout.trash, self.host.blocks_fd, number)
        return True

    def _discard(self, place: str, leftover: Leftover) -> bool:
        """Move a foreign entry of a place into the trash; False if a mount keeps it."""
        for name in _named(_foreign_names(place), leftover):
            if self._has_mount(f"{place}/{name}"):
                return False
            trash.discard(self.layout, f"{place}/{name}")
        return True

    def _has_mount(self, path: str) -> bool:
        """Whether a mount is on or below a path: then nothing there is moved or deleted."""
        return any(is_below(point, path) for point in self.host.find_mounts(self.layout))

    def _other_cgroups(self) -> Generator[Wait, bool, list[str]]:
        """Return directories of this node's name and owner that are not in use: an nsinit of this data directory was
        started in another cgroup before, and did not end in good order."""
        own = {os.path.realpath(path) for path in self.tree.unique}
        owner, found, seen = owner_of(self.layout.data_dir), [], 0
        for top in dict.fromkeys((*self.located.v1_mounts.values(), self.located.unified_mount)):
            for directory in _directories(top, self.node_name) if top is not None else ():
                seen += 1
                if seen % _DIRECTORIES_AT_A_TIME == 0:
                    yield Wait(timeout_s=0)
                if os.path.basename(directory) != self.node_name or os.path.realpath(directory) in own:
                    continue
                if read_owner(directory) == owner and not _holds(directory, os.getpid()):
                    found.append(directory)
        return found

    def _loops(self) -> list[tuple[int, str]]:
        """Return loop devices whose file is in the data directory and belongs to no session with a cgroup."""
        if self.host.blocks_fd < 0:
            return []
        below = f"{self.layout.data_dir}/"
        return [
            (number, path)
            for number, path in loop_device.backed(self.host.blocks_fd)
            if path.startswith(below) and not self._is_in_use(path.removeprefix(below))
        ]

    def _is_in_use(self, path: str) -> bool:
        parts = path.split("/")
        if parts[0] in _OF_VOLUMES:  # the device of a volume goes with the last mount of the volume
            return True
        return len(parts) > 1 and is_session_id(parts[1]) and SessionCgroup(self.tree, parts[1]).exists()


def mounts_in(data_dir: str, mountinfo: str) -> list[str]:
    """Return the mount points on and below the places of a data directory (its real path), once each, last made first.

    Sessions are mounted in namespaces of their own, so none of their mounts shows in the machine's table.
    """
    places = [f"{data_dir}/{name}" for name in _PLACES]
    points = [point for _, point in parse_points(mountinfo) if any(is_below(point, place) for place in places)]
    return list(dict.fromkeys(reversed(points)))


def shown(name: str) -> str:
    """Return a name in ASCII, at most `_MAX_NAME` characters: any bytes can be printed, sent and compared."""
    return os.fsencode(name).decode("ascii", "backslashreplace")[:_MAX_NAME]


def directories_named(top: str, node_name: str) -> Iterator[str]:
    """Yield the cgroups of that name below `top`."""
    return (each for each in _directories(top, node_name) if os.path.basename(each) == node_name)


def _named(names: list[str], leftover: Leftover) -> list[str]:
    return [name for name in names if shown(name) == leftover.name]


def _foreign_cgroups(directory: str) -> list[str]:
    """Return the cgroups among those of sessions whose names can't be a session's."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [name for name in names if not is_ours(name) and not is_session_id(name)]


def _foreign_names(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if not is_session_id(name)]


def _directories(top: str, node_name: str, depth: int = 0) -> Iterator[str]:
    """Yield cgroups below `top`; nothing below a directory of a node is looked at."""
    try:
        with os.scandir(top) as entries:
            children = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return  # the cgroup was removed meanwhile
    for child in children:
        yield child
        if depth < _MAX_DEPTH and os.path.basename(child) != node_name:
            yield from _directories(child, node_name, depth + 1)


def _holds(directory: str, pid: int) -> bool:
    """Whether a process is somewhere below a cgroup."""
    return any(pid in read_processes(path) for path, _, _ in os.walk(directory))


def _remove_cgroup(path: str) -> Generator[Wait, bool, bool]:
    """Kill every process in a cgroup, frozen or not, and remove it; False if it is left."""
    for pause_s in _PAUSES_S:
        inner = [each for each, _, _ in os.walk(path, topdown=False)]
        for directory in inner:
            _kill(directory)
        if not [directory for directory in inner if not was_removed(directory)]:
            return True
        yield Wait(timeout_s=pause_s)
    log("error", "a cgroup is left", path=path)
    return False


def _kill(directory: str) -> None:
    kill_listed(partial(read_processes, directory))
    state = f"{directory}/freezer.state"
    if read_file(state):
        write_file(state, "THAWED")  # v1: a frozen task handles SIGKILL only when it is thawed (freezer-subsystem.rst)
