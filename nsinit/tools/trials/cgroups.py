"""Trials of cgroups: a session's cgroup is made as in earnest, and each limit is run into.

Owns the throw-away directory of the trials, removed at the end with everything in it. These trials run in the probe's
own process: where controllers can only be handed down after processes have moved, the tree counts those processes.
Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/memory.rst; Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nsinit.cgroup import limits
from nsinit.cgroup import tree as cgroup_tree
from nsinit.cgroup.session import SessionCgroup
from nsinit.kernel import steering, syscalls
from nsinit.kernel.files import write_file
from nsinit.tools.trials.attempt import Answer, FallsBack, Room, Seen, Trial, answer_of
from nsinit.wire.protocol import Limits

_MIB = 1024 * 1024
_LIMITS = Limits(memory_bytes=24 * _MIB, pids=8, cpu_quota_us=5_000, cpu_period_us=50_000)
_HOG_BYTES = 64 * _MIB
_PATIENCE_S = 3.0
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Tried:
    """A session's cgroup in a tree of the trial's own."""

    tree: cgroup_tree.Tree
    cgroup: SessionCgroup


def try_all(room: Room) -> dict[str, Answer]:
    """Return the answers by name of the check. Where no cgroup can be made, "cgroups" is the only one."""
    located = cgroup_tree.locate_process()
    made: list[cgroup_tree.Tree] = []
    answers = {"cgroups": answer_of(lambda _room: _claim(located, made), room)}
    if made:
        try:
            for name, trial in _TRIALS.items():
                answers[name] = answer_of(_in_cgroup(made[0], trial), room)
            for name, trial in _THOROUGH.items() if room.is_thorough else ():
                answers[name] = answer_of(_in_cgroup(made[0], trial), room)
        finally:
            cgroup_tree.release(made[0], located)
    return answers


def _claim(located: cgroup_tree.Located, made: list[cgroup_tree.Tree]) -> Seen:
    tree = cgroup_tree.claim(located, name=f"sandkasten-probe-{os.getpid()}", parent="auto")
    made.append(tree)
    where = f"in the own cgroup of each of {len(tree.unique)} hierarchies" if tree.mode != "v2" else "in the own cgroup"
    return Seen(f"mode {tree.mode}: made directories for sessions {where}", {"cgroup_mode": tree.mode})


def _in_cgroup(tree: cgroup_tree.Tree, trial: Callable[[Tried], str]) -> Trial:
    def with_cgroup(_room: Room) -> str:
        cgroup = SessionCgroup(tree, os.urandom(12).hex())
        cgroup.make()
        try:
            return trial(Tried(tree, cgroup))
        finally:
            _remove(cgroup)

    return with_cgroup


def _limits(tried: Tried) -> str:
    limits.first(tried.cgroup, _LIMITS)
    return "wrote limits for memory, processes and cpu"


def _pids(tried: Tried) -> str:
    limits.first(tried.cgroup, _LIMITS)
    with _child(tried, _fork_until_refused) as pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != errno.EAGAIN:
        raise OSError(status if status > 0 else 0, f"more than {_LIMITS.pids} processes could be started")
    return f"a process was refused when there were {_LIMITS.pids}"


def _fork_until_refused() -> int:
    for _ in range(_LIMITS.pids + 1):
        try:
            if os.fork() == 0:
                signal.pause()
                os._exit(0)
        except OSError as error:
            return error.errno or 255
    return 0


def _memory(tried: Tried) -> str:
    """Check that a memory hog is killed, counted, and told of by the event that a session is watched with."""
    limits.first(tried.cgroup, _LIMITS)
    kind, event_fd = tried.cgroup.open_oom_event()
    try:
        poll = select.poll()
        poll.register(event_fd, select.POLLPRI if kind == "memory_events" else select.POLLIN)
        if kind == "memory_events":
            os.read(event_fd, 4096)
        with _child(tried, _fill_memory) as pid:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            raise OSError(0, f"{_HOG_BYTES // _MIB} MiB could be used with a limit of {_LIMITS.memory_bytes // _MIB}")
        if not poll.poll(_PATIENCE_S * 1000) or tried.cgroup.counters().oom_kills < 1:
            raise FallsBack("the limit held; the kernel did not tell of it")
    finally:
        os.close(event_fd)
    return "what went over the limit was killed, counted, and told of"


def _fill_memory() -> int:
    with mmap.mmap(-1, _HOG_BYTES) as memory:
        for offset in range(0, _HOG_BYTES, mmap.PAGESIZE):
            memory[offset] = 1
    return 0


def _cpu(tried: Tried) -> str:
    limits.first(tried.cgroup, _LIMITS)
    stat = f"{tried.cgroup.directory('cpu')}/cpu.stat"
    with _child(tried, _spin):
        if not _comes_true(lambda: _field(stat, "nr_throttled") > 0):
            raise OSError(0, "a process that never waits was never held back")
    return "a process that never waits was held back"


def _spin() -> int:
    deadline = time.monotonic() + 2 * _PATIENCE_S
    while time.monotonic() < deadline:
        pass
    return 0


def _swap(tried: Tried) -> str:
    """Check that swap can be forbidden. A machine without swap has nothing to limit."""
    name = "memory.swap.max" if tried.tree.mode == "v2" else "memory.memsw.limit_in_bytes"
    if os.path.exists(f"{tried.cgroup.directory('memory')}/{name}"):
        limits.first(tried.cgroup, _LIMITS)
        return f"forbade swap by {name}"
    with open("/proc/swaps", "rb") as file:
        if len(file.read().splitlines()) <= 1:
            return "the kernel counts no swap, and there is none"
    raise OSError(0, "there is swap and the kernel does not count who uses it")


def _birth(tried: Tried) -> str:
    directory = tried.cgroup.birth_directory
    if directory is None:
        raise FallsBack("there is no cgroup v2 tree; processes move into their cgroup after their birth")
    cgroup_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pid = syscalls.fork_into_cgroup(cgroup_fd)
    except OSError as error:
        raise FallsBack(f"clone3 with CLONE_INTO_CGROUP: {error.strerror}") from error
    finally:
        os.close(cgroup_fd)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a process was born in a cgroup"


def _kill(tried: Tried) -> str:
    directory = tried.cgroup.birth_directory
    if directory is None or not os.path.exists(f"{directory}/cgroup.kill"):
        raise FallsBack("there is no cgroup.kill; processes are killed one by one")
    with _child(tried, _wait) as pid:
        write_file(f"{directory}/cgroup.kill", "1")
        os.waitpid(pid, 0)
    return "everything in a cgroup was killed by one write"


def _freeze(tried: Tried) -> str:
    directory = tried.cgroup.birth_directory
    if directory is None or not os.path.exists(f"{directory}/cgroup.freeze"):
        raise FallsBack("there is no cgroup.freeze")
    with _child(tried, _wait):
        write_file(f"{directory}/cgroup.freeze", "1")
        is_frozen = _comes_true(lambda: _field(f"{directory}/cgroup.events", "frozen") == 1)
        write_file(f"{directory}/cgroup.freeze", "0")
    if not is_frozen:
        raise FallsBack("cgroup.freeze was accepted and nothing froze")
    return "a process was frozen and thawed"


def _pressure(tried: Tried) -> str:
    directory = tried.cgroup.birth_directory
    try:
        with open(f"{directory or '/proc/pressure'}/{'memory.pressure' if directory else 'memory'}", "rb") as file:
            file.read()
    except OSError as error:
        raise FallsBack(f"no pressure is told: {error.strerror}") from error
    return "read how long a cgroup's processes waited for memory"


def _address_programs(tried: Tried) -> str:
    """Have a program refuse connections in a cgroup, and a process there run into it."""
    directory = tried.cgroup.birth_directory
    if directory is None:
        raise FallsBack("there is no cgroup v2 tree")
    cgroup_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        steering.refuse_connections(cgroup_fd)
    except OSError as error:
        raise FallsBack(f"cgroup/connect4: {error.strerror}") from error
    finally:
        os.close(cgroup_fd)
    with _child(tried, _connect) as pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != errno.EPERM:
        raise FallsBack("a program was accepted and refused nothing")
    return "a program of a cgroup refused a connection"


def _connect() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex(("127.0.0.1", 9))  # sends nothing (udp(7))


_TRIALS: dict[str, Callable[[Tried], str]] = {
    "limits": _limits,
    "pids_limit": _pids,
    "swap": _swap,
    "clone_into_cgroup": _birth,
    "address_programs": _address_programs,
}
_THOROUGH: dict[str, Callable[[Tried], str]] = {
    "cgroup_kill": _kill,
    "cgroup_freeze": _freeze,
    "pressure": _pressure,
    "memory_limit": _memory,
    "cpu_limit": _cpu,
}
"""Trials that take a moment or write to the kernel's log, or of features that no start depends on."""


def _wait() -> int:
    signal.pause()
    return 0


@contextmanager
def _child(tried: Tried, work: Callable[[], int]) -> Iterator[int]:
    """Run `work` in the cgroup; yield its pid. Its exit status is the result of `work`. All processes are killed at the
    end."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(tried, work, write_fd)
    os.close(write_fd)
    try:
        if os.read(read_fd, 1) != b"+":
            raise OSError(0, "no process could be moved into a cgroup")
        yield pid
    finally:
        os.close(read_fd)
        tried.cgroup.kill()
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _live(tried: Tried, work: Callable[[], int], write_fd: int) -> None:
    """Join the cgroup and do the work, as the child. Never returns."""
    try:
        unified = tried.cgroup.birth_directory
        if unified is not None:
            write_file(f"{unified}/cgroup.procs", "0")
        for path in tried.cgroup.attach_files:
            write_file(path, "0")
        os.write(write_fd, b"+")
        os._exit(work())
    finally:
        os._exit(255)


def _remove(cgroup: SessionCgroup) -> None:
    """Remove the cgroup, once the kernel has finished the end of killed processes."""
    if not _comes_true(lambda: not cgroup.remove()):
        raise OSError(errno.EBUSY, "a cgroup could not be removed")


def _comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _field(path: str, key: str) -> int:
    with open(path, "rb") as file:
        words = file.read().decode().split()
    return int(words[words.index(key) + 1]) if key in words else -1
