"""The cgroup of one session: made before any process is in it, counted, emptied and removed.

Owns its directories and the names of the counters in both cgroup versions. `tree` decides where, `limits` writes the
limits, the cgroup maker makes the directories. Every call returns at once; waiting is the caller's.
Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/{memory,cgroups}.rst.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from nsinit.cgroup.tree import Tree
from nsinit.kernel import syscalls
from nsinit.kernel.files import write_file
from nsinit.wire.protocol import EventKind

MAX_RUN_CGROUPS = 100
"""The number of run cgroups that one session may have."""
BUILDING_SHARE = 100
"""The share of the processors that a sandbox has while it is built, in multiples of the usual one.

No foreign code is in it yet, and a client waits. When many are built at once, those that wait for their turn don't wait
for the shells of those that are done.
"""
_OPEN_AT_A_TIME = 100


@dataclass(frozen=True, slots=True)
class Counters:
    """The last readings of a session's cgroup; -1 means unknown."""

    oom_kills: int = -1
    cpu_usec: int = -1
    memory_peak_bytes: int = -1


@dataclass(frozen=True, slots=True)
class SessionCgroup:
    """A session's cgroup: its directory in each hierarchy."""

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
        """The session's directory in the one hierarchy in which its run cgroups are made."""
        return self.birth_directory or self.directory("pids")

    def run_cgroup_directories(self) -> tuple[str, ...]:
        """The run cgroups that exist; none when the session has no cgroup."""
        try:
            with os.scandir(self.run_cgroup_parent) as entries:
                return tuple(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return ()

    @property
    def birth_directory(self) -> str | None:
        """The v2 directory in which clone3 makes the first process; None in a v1-only system."""
        return self.directory("unified") if "unified" in self.tree.dirs else None

    @property
    def attach_files(self) -> tuple[str, ...]:
        """The v1 files to which the first process writes `0`.

        `tasks`, not `cgroup.procs`: moving just the calling thread needs no lock over all forks of the system, whose
        RCU grace period costs 5-20 ms. The process has one thread, so the move is the same.
        """
        if self.tree.mode == "v2":
            return ()
        unified = self.birth_directory
        return tuple(f"{directory}/tasks" for directory in self.directories if directory != unified)

    def make(self) -> None:
        """Make the directories. One that exists already is an error: two sessions must never share limits.

        Raises:
            OSError: none is left. ENOENT: those of the tree are gone, see `tree.restore`.
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
            # The kernel's own bound, also when something else than the cgroup maker should make cgroups in it.
            write_file(f"{self.directory('unified')}/cgroup.max.descendants", str(MAX_RUN_CGROUPS))

    def exists(self) -> bool:
        """Whether any of the directories is there."""
        return any(os.path.isdir(directory) for directory in self.directories)

    def set_share(self, factor: int) -> None:
        """Set the session's share of busy processors to `factor` times the usual one."""
        name, usual = ("cpu.weight", 100) if self.tree.mode == "v2" else ("cpu.shares", 1024)
        write_file(f"{self.directory('cpu')}/{name}", str(factor * usual))

    def processes(self) -> tuple[int, ...]:
        """Return the host pids of every process in any of the directories, run cgroups included."""
        return tuple({*self.listed()})

    def listed(self) -> Iterator[int]:
        """Yield the same, as the directories list them: PID 1 first as a rule, and each process once for each of its
        hierarchies."""
        for directory in self.directories:
            yield from read_processes(directory)
        for directory in self.run_cgroup_directories():
            yield from read_processes(directory)

    def kill(self) -> None:
        """SIGKILL every process, run cgroups included, by `cgroup.kill` where that exists, else one by one."""
        directory = self.birth_directory
        if directory is not None:
            try:
                write_file(f"{directory}/cgroup.kill", "1")  # descendants included, racing forks too (Linux 5.14)
            except FileNotFoundError:
                pass
        kill_listed(self.processes)

    def remove(self, *, but: str = "") -> tuple[str, ...]:
        """Remove the directories, all `but` one; return those that are still there, busy for a moment after the end of
        a process."""
        wanted = (each for each in (*self.run_cgroup_directories(), *self.directories) if each != but)
        return tuple(each for each in wanted if not was_removed(each))

    def has_file_pages(self) -> bool:
        """Whether pages of files are charged to the cgroup. They keep its memory in the kernel after its removal."""
        return self._has_pages("active_file", "inactive_file")

    def has_unwritten_pages(self) -> bool:
        """Whether pages of files are on their way to the disk. The kernel frees none of them before they are there."""
        names = ("file_dirty", "file_writeback") if self.tree.mode == "v2" else ("dirty", "writeback")
        return self._has_pages(*names)

    def _has_pages(self, *names: str) -> bool:
        counts = read_file(f"{self.directory('memory')}/memory.stat")
        return any(number_in(counts, name) > 0 for name in names)

    def empty_memory(self) -> None:
        """Have the kernel free the pages of files of a cgroup without processes, and none of other cgroups. Pages that
        are not written yet stay, and so do those that processes of others have mapped."""
        memory = self.directory("memory")
        if self.tree.mode == "v2":
            amount = number_in(read_file(f"{memory}/memory.current"))
            name, text = "memory.reclaim", str(amount)  # Linux 5.19
        else:
            name, text = "memory.force_empty", "0"
        try:
            write_file(f"{memory}/{name}", text)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.ENOENT):
                raise

    def counters(self) -> Counters:
        """Read the counters; works as long as the directories are there."""
        memory = self.directory("memory")
        if self.tree.mode == "v2":
            oom_kills = number_in(read_file(f"{memory}/memory.events"), "oom_kill")
            peak = number_in(read_file(f"{memory}/memory.peak"))
        else:
            oom_kills = number_in(read_file(f"{memory}/memory.oom_control"), "oom_kill")
            peak = number_in(read_file(f"{memory}/memory.max_usage_in_bytes"))
        return Counters(oom_kills, self.cpu_usec(), peak)

    def open_oom_event(self) -> tuple[EventKind, int]:
        """Return (kind, descriptor) of the out-of-memory event; the caller owns the descriptor."""
        memory = self.directory("memory")
        if self.tree.mode == "v2":
            return "memory_events", os.open(f"{memory}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        control_fd = os.open(f"{memory}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        event_fd = syscalls.eventfd()
        try:
            # Registers the eventfd for OOM notifications (cgroup-v1/memory.rst §10).
            write_file(f"{memory}/cgroup.event_control", f"{event_fd} {control_fd}")
        except OSError:
            os.close(event_fd)
            raise
        finally:
            os.close(control_fd)
        return "eventfd", event_fd

    def cpu_usec(self) -> int:
        """Return the time of processors that was used, in microseconds; -1 if it is unknown."""
        if "unified" in self.tree.dirs:
            return number_in(read_file(f"{self.directory('unified')}/cpu.stat"), "usage_usec")
        if "cpuacct" not in self.tree.dirs:
            return -1
        nanoseconds = number_in(read_file(f"{self.directory('cpuacct')}/cpuacct.usage"))
        return nanoseconds // 1000 if nanoseconds >= 0 else -1


def read_processes(directory: str) -> tuple[int, ...]:
    """Return the host pids of the processes in one cgroup directory; none when the directory is gone."""
    return tuple(pid for pid in map(int, read_file(f"{directory}/cgroup.procs").split()) if pid > 0)


def kill_listed(listed: Callable[[], Collection[int]]) -> None:
    """SIGKILL the processes that `listed` returns."""
    act_on_listed(listed, pidfd_of, _kill_by)


def act_on_listed(
    listed: Callable[[], Collection[int]], open_by: Callable[[int], int], act: Callable[[int, int], None]
) -> None:
    """Call `act` with pid and descriptor of the processes that `listed` returns. `open_by` returns a descriptor that
    stays one of that process, or -1. The list is read again after the descriptors were opened: a process that got the
    pid of one that ended in between is not in it, and is not hit."""
    pids = tuple(listed())
    for start in range(0, len(pids), _OPEN_AT_A_TIME):
        opened = {pid: fd for pid in pids[start : start + _OPEN_AT_A_TIME] if (fd := open_by(pid)) >= 0}
        try:
            still = frozenset(listed())
            for pid in opened.keys() & still:
                act(pid, opened[pid])
        finally:
            for fd in opened.values():
                os.close(fd)


def pidfd_of(pid: int) -> int:
    """Return a descriptor of the process that has this pid now, or -1."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _kill_by(_pid: int, pidfd: int) -> None:
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
