"""What lies about in nsinit's places and belongs to no session: found, named, and removed when the daemon says so.

A session's own remains go by `sessions.Sessions.remove`; this is about everything else, and only in places that are
this data directory's: its own subdirectories, cgroups that bear its node's name and its mark (`marks`), loop devices
with a file in it, mounts below its subdirectories (`hand_mounts`). The daemon names a stray as it was told of it, and
the name is only compared with what is found again: it never becomes a path. A workspace is never in reach, nothing is
deleted through a mount (`trash`).
Network namespaces and interfaces of sessions have no name and go with their last process: there is nothing to find.
Sources: cgroups(7); loop(4) LOOP_CLR_FD; Documentation/ABI/testing/sysfs-block-loop.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

from nsinit.cgroup.session import SessionCgroup, kill_listed, read_file, read_processes, was_removed
from nsinit.cgroup.tree import LEAF, Located, Tree, mark_of, read_mark
from nsinit.kernel.files import write_file
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.server.mounts import MachineMounts, points_below
from nsinit.storage import loop_device, trash
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import Stray
from nsinit.wire.validate import is_session_id

MAX_STRAYS = 100
"""In one answer; when those are gone the next ones are found."""

_MAX_NAME = 400
_OF_VOLUMES = ("volumes", "volume-drafts")
_MAX_DEPTH = 16
_DIRECTORIES_AT_A_TIME = 100
"""Looked at before others get their turn: some 2 ms."""
_PAUSES_S = (0.0, 0.002, 0.01, 0.05, 0.2, 0.5, 1.0)

Walk = Generator[Wait, bool, "list[str]"]


@dataclass(frozen=True, slots=True)
class Strays:
    """The places to look at. `blocks_fd`: `/sys/block`, opened while it was in sight; -1 without."""

    tree: Tree
    layout: Layout
    located: Located
    group: str
    mounts: MachineMounts
    blocks_fd: int = -1

    def find(self) -> Generator[Wait, bool, list[Stray]]:
        """Return what there is, at most `MAX_STRAYS`: mounts first, since what they are on can't go before them."""
        mounts = self.mounts.find()
        found = [Stray("mount", shown(point)) for point in points_below(mounts)]
        found += [Stray("cgroup", shown(name)) for path in self.tree.unique for name in _foreign_groups(path)]
        for directory in (yield from self._other_groups()):
            found.append(Stray("other_cgroup", shown(directory)))
        found += [Stray("session_directory", shown(name)) for name in _foreign_names(self.layout.sessions)]
        found += [Stray("run_directory", shown(name)) for name in _foreign_names(self.layout.run)]
        found += [Stray("trash", shown(name)) for name in os.listdir(self.layout.trash)]
        found += [Stray("loop", shown(f"{number} {path}")) for number, path in self._loops()]
        found += [Stray("place_mount", shown(each.point)) for each in mounts if each.is_place]
        return list(dict.fromkeys(found))[:MAX_STRAYS]

    def remove(self, stray: Stray) -> Generator[Wait, bool, bool]:
        """Remove one if it is still found; False if something of it is left. Trash goes with the next deletion."""
        match stray.kind:
            case "cgroup":
                paths = [f"{each}/{name}" for each in self.tree.unique for name in _named(_foreign_groups(each), stray)]
                return (yield from _remove_groups(paths))
            case "other_cgroup":
                others = yield from self._other_groups()
                return (yield from _remove_groups(_named(others, stray)))
            case "session_directory":
                for name in _named(_foreign_names(self.layout.sessions), stray):
                    trash.discard(self.layout, f"{self.layout.sessions}/{name}")
            case "run_directory":
                for name in _named(_foreign_names(self.layout.run), stray):
                    trash.discard(self.layout, f"{self.layout.run}/{name}")
            case "loop":
                for number, path in self._loops():
                    if shown(f"{number} {path}") == stray.name:
                        loop_device.detach(self.layout.trash, self.blocks_fd, number)
            case "mount":
                return (yield from self._detach(_named(points_below(self.mounts.find()), stray)))
            case "place_mount":
                return not _named([each.point for each in self.mounts.find() if each.is_place], stray)
        return True

    def _detach(self, points: list[str]) -> Generator[Wait, bool, bool]:
        for point in points:
            if not (yield from self.mounts.detach(point)):
                return False
        return True

    def _other_groups(self) -> Walk:
        """Return directories of this node's name and mark that are not those in use: a daemon of this data directory
        was started in another cgroup before, and did not end in good order."""
        own = {os.path.realpath(path) for path in self.tree.unique}
        mark, found, seen = mark_of(self.layout.data_dir), [], 0
        for top in dict.fromkeys((*self.located.v1_mounts.values(), self.located.unified_mount)):
            for directory in _directories(top, self.group) if top is not None else ():
                seen += 1
                if seen % _DIRECTORIES_AT_A_TIME == 0:
                    yield Wait(timeout_s=0)
                if os.path.basename(directory) != self.group or os.path.realpath(directory) in own:
                    continue
                if read_mark(directory) == mark and not _holds(directory, os.getpid()):
                    found.append(directory)
        return found

    def _loops(self) -> list[tuple[int, str]]:
        """Return loop devices whose file is in the data directory and belongs to no session with a cgroup."""
        if self.blocks_fd < 0:
            return []
        below = f"{self.layout.data_dir}/"
        return [
            (number, path)
            for number, path in loop_device.backed(self.blocks_fd)
            if path.startswith(below) and not self._is_in_use(path.removeprefix(below))
        ]

    def _is_in_use(self, path: str) -> bool:
        parts = path.split("/")
        if parts[0] in _OF_VOLUMES:  # the device goes with the last mount, and is never left without one
            return True
        return len(parts) > 1 and is_session_id(parts[1]) and SessionCgroup(self.tree, parts[1]).exists()

    def close(self) -> None:
        """Let go of the machine."""
        self.mounts.close()
        if self.blocks_fd >= 0:
            os.close(self.blocks_fd)


def open_blocks() -> int:
    """Return `/sys/block` (O_PATH), -1 where it can't be seen; called while the whole machine is in sight."""
    try:
        return os.open("/sys/block", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def shown(name: str) -> str:
    """Return a name as it is told: whatever bytes it has, it can be printed, sent and compared."""
    return os.fsencode(name).decode("ascii", "backslashreplace")[:_MAX_NAME]


def _named(names: list[str], stray: Stray) -> list[str]:
    return [name for name in names if shown(name) == stray.name]


def _foreign_groups(directory: str) -> list[str]:
    """Return the cgroups among the sessions' that can't be a session's."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [name for name in names if name != LEAF and not is_session_id(name)]


def _foreign_names(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if not is_session_id(name)]


def _directories(top: str, group: str, depth: int = 0) -> Iterator[str]:
    """Yield cgroups below `top`, those in a directory named `group` left out."""
    try:
        with os.scandir(top) as entries:
            children = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return  # it ended meanwhile
    for child in children:
        yield child
        if depth < _MAX_DEPTH and os.path.basename(child) != group:
            yield from _directories(child, group, depth + 1)


def directories_named(top: str, group: str) -> Iterator[str]:
    """Yield the cgroups of that name below `top`."""
    return (each for each in _directories(top, group) if os.path.basename(each) == group)


def _holds(directory: str, pid: int) -> bool:
    """Whether a process is somewhere below."""
    return any(pid in read_processes(path) for path, _, _ in os.walk(directory))


def _remove_groups(paths: list[str]) -> Generator[Wait, bool, bool]:
    """Kill what is in cgroups, frozen or not, and remove them."""
    for path in paths:
        for pause_s in _PAUSES_S:
            inner = [each for each, _, _ in os.walk(path, topdown=False)]
            for directory in inner:
                _kill(directory)
            if not [directory for directory in inner if not was_removed(directory)]:
                break
            yield Wait(timeout_s=pause_s)
        else:
            log("error", "a cgroup is left", path=path)
            return False
    return True


def _kill(directory: str) -> None:
    kill_listed(partial(read_processes, directory))
    state = f"{directory}/freezer.state"  # v1: what is frozen does not even die
    if read_file(state):
        write_file(state, "THAWED")
