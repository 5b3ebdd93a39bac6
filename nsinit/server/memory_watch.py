"""The watch over memory that limits of sessions don't hold: record locks, and the memory of the machine.

Locks. The kernel charges a lock to no cgroup, and no limit counts locks. Ten times a second, and less often while the
sessions rest, since to wake up costs more than to look, one number is read: how many objects the kernel's cache of
locks has. That cache is shared with other objects, and does not say whose they are, so when the number has grown
`/proc/locks` is read until one session is found above the bound, which ends as if it had run out of memory. Each page
of `/proc/locks` holds up all who lock a file on the machine, and costs as much as the pages before it: the less often
the better. A process's record locks go when it ends, and `/proc/locks` names it: the filter's floor lets no other
process share its descriptors, and refuses locks that belong to an open file (F_OFD_SETLK) and leases. Locks of flock(2)
may outlive the process that they name. They are not counted: each has an open file, which is charged.

Scores. When the machine, or a cgroup above the sessions that has a limit, runs out of memory, the kernel ends the
process with the most points: its part of that memory in thousandths, and `oom_score_adj`. While little is left the
session that uses most of its own limit gets the highest `oom_score_adj`, so that no neighbour ends in its place.

Sources: proc_locks(5); fcntl(2); Documentation/ABI/testing/sysfs-kernel-slab; fs/locks.c, locks_start, lock_get_status;
proc_pid_oom_score_adj(5); mm/oom_kill.c, oom_badness; fs/proc/base.c, __set_oom_adj.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from nsinit.cgroup import limits
from nsinit.cgroup.identity import find_identity
from nsinit.cgroup.session import SessionCgroup, act_on_listed, number_in, read_file
from nsinit.cgroup.tree import Tree
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.wire.validate import is_session_id

MAX_LOCKS = 8192
"""The most record locks of a session, 1.5 MiB; half as many again may go unnoticed."""
COUNT_PATH = "/sys/kernel/slab/file_lock_cache/objects"
_PERIOD_S, _IDLE_PERIOD_S = 0.1, 0.5
"""Seconds between two looks. One processor makes locks of up to 40 MiB in a tenth of a second."""
_BUSY = 0.05
"""Processors that all sessions together use, from which on looks are frequent. With less they make 20 MiB a second."""
_PAGE_BYTES = 65536
_OF_RECORD = re.compile(rb" POSIX +\S+ +\S+ +([1-9]\d*) (.+)")


@dataclass(slots=True)
class LockWatch:
    """The count of the kernel's cache, open; -1 where the kernel has none, and then nothing is bounded."""

    count_fd: int
    _known: int = 0
    """A count of objects at which no session held too many. Until `MAX_LOCKS` more exist, none can."""

    @classmethod
    def open(cls) -> LockWatch:
        """Open the count, while `/sys` is in sight."""
        try:
            return cls(os.open(COUNT_PATH, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            log("warning", "record locks of sessions are not bounded", path=COUNT_PATH, reason=str(error))
            return cls(-1)

    def close(self) -> None:
        """Close the count."""
        if self.count_fd >= 0:
            os.close(self.count_fd)
            self.count_fd = -1

    def look(self, tree: Tree) -> Generator[Wait, bool, tuple[str, int] | None]:
        """Return a session of `tree` that holds too many locks, and the number seen; None if none is noticed."""
        count = number_in(os.pread(self.count_fd, 64, 0).decode()) if self.count_fd >= 0 else 0
        self._known = min(self._known, count)
        if count - self._known <= MAX_LOCKS:
            return None
        over = yield from find_over(tree)
        if over is None:
            self._known = count - MAX_LOCKS // 2
        return over


def find_over(tree: Tree) -> Generator[Wait, bool, tuple[str, int] | None]:
    """Return the first session that is found to hold more than `MAX_LOCKS` record locks, and the number so far."""
    held: Counter[str] = Counter()
    cleared = {""}
    for page in _pages(tree):
        held.update(session_id for session_id, _, _ in page)
        for session_id in [each for each, count in held.items() if count > MAX_LOCKS and each not in cleared]:
            if (count := (yield from _count_distinct(session_id, tree))) > MAX_LOCKS:
                return session_id, count
            cleared.add(session_id)
        yield Wait(timeout_s=0)
    return None


def _count_distinct(session_id: str, tree: Tree) -> Generator[Wait, bool, int]:
    """Return how many record locks a session holds, at most a page more than `MAX_LOCKS`. The kernel finds the next
    page by the number of locks before it, and new ones come first: whoever makes locks meanwhile has those of others
    listed once more. A set of all sessions' locks could be large, so this is for one that seems to be over."""
    found: set[tuple[str, bytes, bytes]] = set()
    for page in _pages(tree):
        found.update(each for each in page if each[0] == session_id)
        if len(found) > MAX_LOCKS:
            break
        yield Wait(timeout_s=0)
    return len(found)


def _pages(tree: Tree) -> Iterator[list[tuple[str, bytes, bytes]]]:
    """Yield the record locks of a page of `/proc/locks` after the other: session, pid and place of each."""
    sessions: dict[bytes, str] = {}
    with open("/proc/locks", "rb", buffering=0) as file:
        while page := file.read(_PAGE_BYTES):
            found = _OF_RECORD.findall(page)
            for pid, _ in found:
                if pid not in sessions:
                    sessions[pid] = _session_of(int(pid), tree)
            yield [(sessions[pid], pid, place) for pid, place in found]


def _session_of(pid: int, tree: Tree) -> str:
    """Return the session that a process is of; empty if it is of none of this tree, or has ended."""
    try:
        parts = set(re.split(r"[/\n]", read_file(f"/proc/{pid}/cgroup")))
    except ProcessLookupError:
        return ""
    found = [each for each in parts if is_session_id(each) and SessionCgroup(tree, each).exists()]
    return found[0] if len(found) == 1 else ""


@dataclass(slots=True)
class Pace:
    """The time until the next look. `cpu_usec`, `at_s`: the time of processors used by all sessions, and when."""

    tree: Tree
    cpu_usec: int = 0
    at_s: float = 0.0

    def next_s(self) -> float:
        """Return the seconds until the next look."""
        before_usec, before_s = self.cpu_usec, self.at_s
        self.cpu_usec, self.at_s = SessionCgroup(self.tree, ".").cpu_usec(), time.monotonic()
        is_known = self.cpu_usec >= 0 and before_s > 0
        is_idle = is_known and self.cpu_usec - before_usec < _BUSY * 1e6 * (self.at_s - before_s)
        return _IDLE_PERIOD_S if is_idle else _PERIOD_S


# Scores ---------------------------------------------------------------------------------------------------------------

COMMAND, WORST_INIT, WORST = 500, 900, 1000
"""`oom_score_adj` of programs (the runner sets it), and of PID 1 and the programs of the session with the highest use.
PID 1 follows its programs: only its end frees files in memory. A neighbour with less than half of all memory has fewer
points than any program of that session, and one with less than two fifths fewer than its PID 1."""
_SCARCE, _AMPLE, _SPARED = 0.1, 0.25, 4
"""Parts of memory that are left: below the first scores follow use; above the second so many looks are spared."""
_ROUNDS = 3
"""The times that a session's processes are listed, for those forked meanwhile. Children inherit the score."""


@dataclass(slots=True)
class OomScores:
    """The session whose processes have the highest scores, empty if none, and the memory that the machine has."""

    tree: Tree
    meminfo_fd: int
    init_score: int
    """`oom_score_adj` of PID 1s, which have that of nsinit; a negative one they give up."""
    worst: str = ""
    _spared: int = 0

    @classmethod
    def open(cls, tree: Tree) -> OomScores:
        """Open the machine's account of its memory."""
        init_score = max(0, int(read_file("/proc/self/oom_score_adj")))
        return cls(tree, os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC), init_score)

    def close(self) -> None:
        """Close the account."""
        os.close(self.meminfo_fd)

    def look(self) -> Generator[Wait, bool, None]:
        """While memory is scarce, give the session that uses most of its limit the highest scores, and no other."""
        if self._spared:
            self._spared -= 1
            return
        left, worst = self._left(), ""
        self._spared = _SPARED if left > _AMPLE else 0
        if left < _SCARCE:
            worst = yield from self._find_worst()
        if self.worst not in ("", worst):
            self.reset(self.worst)
        if worst:
            _set_scores(SessionCgroup(self.tree, worst), WORST, WORST_INIT)
        if worst and worst != self.worst:
            log("warning", "memory is scarce", worst, left=round(left, 3))
        self.worst = worst

    def reset(self, session_id: str) -> None:
        """Give the processes of a session the usual scores."""
        _set_scores(SessionCgroup(self.tree, session_id), COMMAND, self.init_score)

    def _left(self) -> float:
        """Return the part of memory that is left, of the machine's or of a limit above the sessions."""
        words = os.pread(self.meminfo_fd, 256, 0).split()
        left = int(words[words.index(b"MemAvailable:") + 1]) / int(words[words.index(b"MemTotal:") + 1])
        directory = self.tree.dirs["memory"]
        while (used := limits.part_in_use(directory, self.tree.mode)) is not None:
            left = min(left, 1 - used)
            directory = os.path.dirname(directory)
        return left

    def _find_worst(self) -> Generator[Wait, bool, str]:
        """Return the session with processes that uses the largest part of its memory limit; empty if there is none."""
        directory = self.tree.dirs["memory"]
        found: list[tuple[float, str]] = []
        for name in filter(is_session_id, os.listdir(directory)):
            found.append((limits.part_in_use(f"{directory}/{name}", self.tree.mode) or 0, name))
            yield Wait(timeout_s=0)
        return next((name for _, name in sorted(found, reverse=True) if SessionCgroup(self.tree, name).processes()), "")


def _set_scores(cgroup: SessionCgroup, programs: int, init: int) -> None:
    """Set the `oom_score_adj` of all processes of a session."""
    if (identity := find_identity(cgroup)) is None:
        return
    known: frozenset[int] = frozenset()

    def write(pid: int, fd: int) -> None:
        try:
            os.write(fd, b"%d" % (init if pid == identity.pid else programs))
        except (PermissionError, ProcessLookupError):
            pass  # a lower score than root gave it takes CAP_SYS_RESOURCE; or it has ended

    for _ in range(_ROUNDS):
        before, known = known, frozenset(cgroup.processes())
        if known <= before:
            break
        act_on_listed(cgroup.processes, _open_score, write)


def _open_score(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return -1
