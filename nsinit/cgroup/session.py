"""The cgroup of one session: made before any process is in it, counted, emptied and removed.

Owns its directories and the names of the counters in both cgroup versions; `cgroup_tree` decides where, `limits` writes
the limits, the process that makes them is the `cgroup_maker`. Every call returns at once; waiting is the caller's.
Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/{memory,cgroups}.rst.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nsinit.cgroup.tree import Tree
from nsinit.kernel import syscalls
from nsinit.kernel.files import write_file
from nsinit.wire.protocol import EventKind

MAX_RUN_CGROUPS = 100
"""How many cgroups of their own programs and shells of one session may have."""
BUILDING_SHARE = 100
"""What is built goes before what runs: no foreign code is in it yet, and somebody waits for it. When many are built at
once, those that wait for their turn don't wait for the shells of those that are done."""
_KILLED_AT_A_TIME = 100


@dataclass(frozen=True, slots=True)
class Counters:
    """The last readings of a session's cgroup; -1 means unknown."""

    oom_kills: int = -1
    cpu_usec: int = -1
    memory_peak_bytes: int = -1


@dataclass(frozen=True, slots=True)
class SessionCgroup:
    """The directories of one session."""

    tree: Tree
    session_id: str

    def directory(self, controller: str) -> str:
        """Return the session's directory in the hierarchy of `controller` (or `unified`)."""
        return f"{self.tree.dirs[controller]}/{self.session_id}"

    @property
    def directories(self) -> tuple[str, ...]:
        """All directories, memory first, unified last."""
        return tuple(f"{directory}/{self.session_id}" for directory in self.tree.unique)

    @property
    def run_cgroup_parent(self) -> str:
        """The session's directory in the one hierarchy that its groups are made in."""
        return self.birth_directory or self.directory("pids")

    def run_cgroup_directories(self) -> tuple[str, ...]:
        """The groups there are; none when the session has no cgroup."""
        try:
            with os.scandir(self.run_cgroup_parent) as entries:
                return tuple(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return ()

    @property
    def birth_directory(self) -> str | None:
        """Where clone3 puts the first process; None in a v1-only system."""
        return self.directory("unified") if "unified" in self.tree.dirs else None

    @property
    def attach_files(self) -> tuple[str, ...]:
        """The v1 files the first process writes `0` to.

        `tasks`, not `cgroup.procs`: moving just the calling thread needs no lock over all forks of the system, whose
        RCU grace period costs 5-20 ms; the process has one thread, so it is the same move.
        """
        if self.tree.mode == "v2":
            return ()
        unified = self.birth_directory
        return tuple(f"{directory}/tasks" for directory in self.directories if directory != unified)

    def make(self) -> None:
        """Make the directories; one that is there already is an error (two sessions must never share limits).

        Raises:
            OSError: none is left. ENOENT: those of the tree are gone, see `cgroup_tree.restore`.
        """
        made: list[str] = []
        try:
            for directory in self.directories:
                os.mkdir(directory, 0o755)
                made.append(directory)
        except OSError:
            for directory in made:
                os.rmdir(directory)
            raise
        if self.tree.mode == "v2":
            write_file(f"{self.directory('unified')}/cgroup.max.descendants", str(MAX_RUN_CGROUPS))

    def exists(self) -> bool:
        """Whether any of the directories is there."""
        return any(os.path.isdir(directory) for directory in self.directories)

    def set_share(self, factor: int) -> None:
        """Set how much of busy processors the session gets beside others: `factor` times what is usual."""
        name, usual = ("cpu.weight", 100) if self.tree.mode == "v2" else ("cpu.shares", 1024)
        write_file(f"{self.directory('cpu')}/{name}", str(factor * usual))

    def processes(self) -> tuple[int, ...]:
        """Host pids of every process in any of the directories, and in the groups."""
        pids: set[int] = set()
        for directory in (*self.directories, *self.run_cgroup_directories()):
            pids.update(read_processes(directory))
        return tuple(pids)

    def kill(self) -> None:
        """SIGKILL everything inside, groups as well, by `cgroup.kill` where there is one, else process by process."""
        directory = self.birth_directory
        if directory is not None:
            try:
                write_file(f"{directory}/cgroup.kill", "1")
            except FileNotFoundError:
                pass
        kill_listed(self.processes)

    def remove(self) -> tuple[str, ...]:
        """Remove what can be removed; return the directories that are still there (busy for a moment after an exit)."""
        return tuple(each for each in (*self.run_cgroup_directories(), *self.directories) if not was_removed(each))

    def counters(self) -> Counters:
        """Read the counters; works as long as the directories are there."""
        memory = self.directory("memory")
        if self.tree.mode == "v2":
            oom_kills = number_in(read_file(f"{memory}/memory.events"), "oom_kill")
            peak = number_in(read_file(f"{memory}/memory.peak"))
        else:
            oom_kills = number_in(read_file(f"{memory}/memory.oom_control"), "oom_kill")
            peak = number_in(read_file(f"{memory}/memory.max_usage_in_bytes"))
        return Counters(oom_kills, self._cpu_usec(), peak)

    def open_oom_event(self) -> tuple[EventKind, int]:
        """Return (kind, descriptor) of the out-of-memory event; the caller owns the descriptor."""
        memory = self.directory("memory")
        if self.tree.mode == "v2":
            return "memory_events", os.open(f"{memory}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        control_fd = os.open(f"{memory}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        event_fd = syscalls.eventfd()
        try:
            write_file(f"{memory}/cgroup.event_control", f"{event_fd} {control_fd}")
        except OSError:
            os.close(event_fd)
            raise
        finally:
            os.close(control_fd)
        return "eventfd", event_fd

    def _cpu_usec(self) -> int:
        if "unified" in self.tree.dirs:
            return number_in(read_file(f"{self.directory('unified')}/cpu.stat"), "usage_usec")
        if "cpuacct" not in self.tree.dirs:
            return -1
        nanoseconds = number_in(read_file(f"{self.directory('cpuacct')}/cpuacct.usage"))
        return nanoseconds // 1000 if nanoseconds >= 0 else -1


def read_processes(directory: str) -> tuple[int, ...]:
    """Return the host pids of the processes in one cgroup directory; none when it isn't there.

    A process of an outer pid namespace shows as 0, which for kill(2) would mean this process's own group.
    """
    return tuple(pid for pid in map(int, read_file(f"{directory}/cgroup.procs").split()) if pid > 0)


def kill_listed(listed: Callable[[], Collection[int]]) -> None:
    """SIGKILL the processes that `listed` names. It is asked twice: who has got the pid of one that ended in between is
    in no list of ours, and is not hit."""
    pids = tuple(listed())
    for start in range(0, len(pids), _KILLED_AT_A_TIME):
        pidfds = {pid: fd for pid in pids[start : start + _KILLED_AT_A_TIME] if (fd := _pidfd_of(pid)) >= 0}
        try:
            still = frozenset(listed())
            for pid in pidfds.keys() & still:
                _kill_by(pidfds[pid])
        finally:
            for fd in pidfds.values():
                os.close(fd)


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _kill_by(pidfd: int) -> None:
    try:
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass


def was_removed(directory: str) -> bool:
    """Remove a cgroup directory; False if it is still there."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def read_file(path: str) -> str:
    """Return the text of a counter file; empty when the directory or file isn't there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        pieces = []
        while piece := os.read(fd, 65536):
            pieces.append(piece)
        return b"".join(pieces).decode()
    except OSError as error:
        if error.errno != errno.ENODEV:  # the cgroup was removed after the open
            raise
        return ""
    finally:
        os.close(fd)


def number_in(text: str, key: str | None = None) -> int:
    """Return the number in `text`, or the one after `key` in `key value` lines; -1 if there is none."""
    words = text.split()
    if key is not None:
        words = words[words.index(key) + 1 :] if key in words else []
    return int(words[0]) if words and words[0].isdigit() else -1
