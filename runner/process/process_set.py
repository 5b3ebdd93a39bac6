"""Sets of processes: those of one command, shell or program, found in /proc at every look, and killed as a whole.

PID 1 holds /proc open from its start (`hold_proc`): root inside may shut `/` to it, by `chmod 0 /`, and can't shut
/proc, whose files are not the sandbox's.

No process is remembered between calls. Pids are reused, so every decision rests on a scan of that moment and on
(start tick, pid). Only the kernel's own words about processes are read, never their memory, arguments or environment.

A command's processes are those that began after it below its shell, and orphans of that time which hang below PID 1
(the shell adopts orphans, so that is after its death only). An orphan counts as the command's own if it is in the same
cgroup as the command's shell and does not descend from another shell or program.

Sources: openat(2) (a relative path is looked up from the descriptor on, without `/`); proc_pid_stat(5) (comm may hold
any byte, so fields count from the last parenthesis), proc_loadavg(5) (last pid of the reader's pid namespace),
cgroups(7) "/proc/pid/cgroup"; PR_SET_CHILD_SUBREAPER(2const).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_DEAD = b"ZXx"

_STABLE_PASSES = 64
"""Most looks of one kill for processes born meanwhile; each look stops everything that the last one missed."""


class _Proc:
    """Way to /proc: from `fd` on by an empty path, or by `path` as long as `fd` is None."""

    fd: int | None = None
    path: str = "/proc/"


def hold_proc() -> None:
    """Open /proc for good. For PID 1, before foreign code runs. Raises: OSError."""
    _Proc.fd, _Proc.path = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), ""


def open_proc(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file by its path below /proc; it closes on execve(2). Raises: OSError."""
    return os.open(_Proc.path + path, flags | os.O_CLOEXEC, dir_fd=_Proc.fd)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. `start_tick` counts clock ticks since boot."""

    pid: int
    ppid: int
    start_tick: int
    is_dead: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the order of process starts: the clock tick, and the last pid handed out by then."""

    tick: int
    last_pid: int

    def precedes(self, process: Process) -> bool:
        """Return whether `process` started after this moment. Pids break ties within one tick (10 ms)."""
        if process.start_tick != self.tick:
            return process.start_tick > self.tick
        return process.pid > self.last_pid


class Clock:
    """Tells the current moment, time and again. Keeps the file open that tells the last pid."""

    def __init__(self) -> None:
        self._fd = -1

    def now(self) -> Moment:
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
        try:
            if self._fd < 0:
                self._fd = open_proc("loadavg")
            return Moment(tick, int(os.pread(self._fd, 128, 0).rpartition(b" ")[2]))
        except (OSError, ValueError):  # masked: the tick alone decides
            return Moment(tick, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def now() -> Moment:
    """Return the current moment."""
    clock = Clock()
    try:
        return clock.now()
    finally:
        clock.close()


def parse_stat(pid: int, stat: bytes) -> Process:
    """Return the process described by the content of `/proc/<pid>/stat`.

    Raises:
        ValueError, IndexError: it is not such content.
    """
    fields = stat[stat.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[19]), fields[0] in _DEAD)


def scan() -> dict[int, Process]:
    """Return every process this one can see."""
    table = {}
    for name in os.listdir(_Proc.path if _Proc.fd is None else _Proc.fd):
        if name.isdecimal():
            process = _read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def _read_process(pid: int) -> Process | None:
    try:
        fd = open_proc(f"{pid}/stat")
    except OSError:
        return None  # ended since it was listed
    try:
        return parse_stat(pid, os.read(fd, 4096))
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(fd)


def started_since(
    moment: Moment, roots: frozenset[int], table: Mapping[int, Process], *, foreign: frozenset[int] = frozenset()
) -> list[Process]:
    """Return the live processes that began after `moment` below one of `roots`, the roots themselves excepted.

    Every ancestor up to the root must have begun after `moment` too: a child of an earlier command's job belongs to
    that job. A process whose parents are gone hangs below a root directly and counts. One of `foreign`, or a descendant
    of one, does not.
    """
    return [
        process
        for process in table.values()
        if not process.is_dead
        and process.pid not in roots
        and _hangs_below_since(process, moment, roots, foreign, table)
    ]


def _hangs_below_since(
    process: Process, moment: Moment, roots: frozenset[int], foreign: frozenset[int], table: Mapping[int, Process]
) -> bool:
    for _ in range(len(table)):
        if not moment.precedes(process) or process.pid in foreign:
            return False
        if process.ppid in roots:
            return True
        parent = table.get(process.ppid)
        if parent is None:
            return False
        process = parent
    return False


def hangs_below(process: Process, root: int | None, table: Mapping[int, Process]) -> bool:
    """Return whether `process` is `root` or descends from it."""
    current: Process | None = process
    for _ in range(len(table)):
        if current is None:
            return False
        if current.pid == root:
            return True
        current = table.get(current.ppid)
    return False


def is_computing(pid: int) -> bool:
    """Return whether a process runs, or would if it had a processor."""
    try:
        fd = open_proc(f"{pid}/stat")
    except OSError:
        return False
    try:
        return os.read(fd, 4096).rpartition(b") ")[2][:1] == b"R"
    except OSError:
        return False
    finally:
        os.close(fd)


def heeds(pid: int, number: int) -> bool:
    """Return whether a process would take a signal; jobs that a shell starts with `&` ignore SIGINT and SIGQUIT."""
    try:
        fd = open_proc(f"{pid}/status")
    except OSError:
        return False
    try:
        mask = os.read(fd, 8192).partition(b"\nSigIgn:")[2].partition(b"\n")[0]
        return not int(mask, 16) >> (number - 1) & 1
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)


_DELETED = b" (deleted)"


def read_directory(pid: int) -> bytes:
    """Return the directory of a process, empty if it has ended. A removed directory has the path that it had."""
    try:
        link = f"{_Proc.path}{pid}/cwd"
        path = os.fsencode(os.readlink(link, dir_fd=_Proc.fd))
        if path.endswith(_DELETED) and os.stat(link, dir_fd=_Proc.fd).st_nlink == 0:
            return path.removesuffix(_DELETED)
    except OSError:
        return b""
    return path


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that has ended or is not ours to signal is fine."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def signal_all(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        send_signal(process.pid, number)


def kill_all(find: Callable[[], list[Process]]) -> None:
    """SIGKILL all that `find` finds, a fork bomb included."""
    stopped: dict[int, Process] = {}  # a stopped process forks no more; one killed at once makes room for a new one
    for _ in range(_STABLE_PASSES):
        found = [each for each in find() if stopped.get(each.pid) != each]
        if not found:
            break
        signal_all(found, signal.SIGSTOP)
        stopped.update((each.pid, each) for each in found)
    signal_all(stopped.values(), signal.SIGKILL)


_MEMBERSHIP_BYTES = 65536


class ProcessSet(Protocol):
    """Processes that belong together."""

    def find(self) -> list[Process]:
        """Return the live processes of the set as of now."""

    def kill(self) -> None:
        """SIGKILL all of them, a fork bomb included. The next `find` shows what was born meanwhile."""


class CommandSet:
    """The processes that a command of a shell has started since `began`.

    `root` returns the pid of the shell now, None between two shells; `leaders` the pids of all shells and programs.
    `group` is the cgroup of the shell if it has its own.
    """

    def __init__(
        self,
        began: Moment,
        root: Callable[[], int | None],
        *,
        leaders: Callable[[], frozenset[int]] = frozenset,
        group: str | None = None,
    ) -> None:
        self._began = began
        self._root = root
        self._leaders = leaders
        self._group = group

    def find(self) -> list[Process]:
        root = self._root()
        init = os.getpid()
        roots = frozenset({init, root or init})
        table = scan()
        found = started_since(self._began, roots, table, foreign=self._leaders() - roots)
        return [each for each in found if hangs_below(each, root, table) or self._is_own(each.pid)]

    def kill(self) -> None:
        kill_all(self.find)

    def _is_own(self, orphan_pid: int) -> bool:
        if self._group is not None:
            return is_member(orphan_pid, self._group)
        return read_membership(orphan_pid) == read_membership(os.getpid())


class RunCgroupSet:
    """Every process in the cgroup whose path ends in `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find(self) -> list[Process]:
        init = os.getpid()
        return [
            process
            for process in scan().values()
            if not process.is_dead and process.pid != init and is_member(process.pid, self._name)
        ]

    def kill(self) -> None:
        kill_all(self.find)


class TreeSet:
    """One process and all below it: a shell without a cgroup of its own."""

    def __init__(self, root: Callable[[], int | None]) -> None:
        self._root = root

    def find(self) -> list[Process]:
        root = self._root()
        table = scan()
        return [each for each in table.values() if not each.is_dead and hangs_below(each, root, table)]

    def kill(self) -> None:
        kill_all(self.find)


class ProgramSet:
    """A program without a cgroup of its own: the program, all below it, and orphans that began after it and are no
    other run's. Make the set before the program starts."""

    def __init__(self, pid: Callable[[], int | None], leaders: Callable[[], frozenset[int]]) -> None:
        self._tree = TreeSet(pid)
        self._orphans = CommandSet(now(), pid, leaders=leaders)

    def find(self) -> list[Process]:
        return list(dict.fromkeys([*self._tree.find(), *self._orphans.find()]))

    def kill(self) -> None:
        kill_all(self.find)


def read_membership(pid: int) -> bytes:
    """Return the content of `/proc/<pid>/cgroup`, empty if the process has ended."""
    try:
        fd = open_proc(f"{pid}/cgroup")
    except OSError:
        return b""
    try:
        return os.read(fd, _MEMBERSHIP_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def is_member(pid: int, group: str) -> bool:
    """Return whether one of the cgroups of a process is called `group`."""
    name = b"/" + os.fsencode(group)
    return any(line.endswith(name) for line in read_membership(pid).splitlines())
