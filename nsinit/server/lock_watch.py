"""The bound on record locks: a session that holds too many ends, as if it had run out of memory.

The kernel charges a lock to no cgroup, and no limit counts locks. Ten times a second one number is read: how many
objects the kernel's cache of locks has. That cache is shared with other objects, and does not say whose they are, so
when the number has grown `/proc/locks` is read until one session is found above the bound. Each page of `/proc/locks`
holds up all who lock a file on the machine, and costs as much as the pages before it: the less often the better.

A process's record locks go when it ends, and `/proc/locks` names it: the filter's floor lets no other process share its
descriptors, and refuses locks that belong to an open file (F_OFD_SETLK) and leases. Locks of flock(2) may outlive the
process that they name. They are not counted: each has an open file, which is charged.
Sources: proc_locks(5); fcntl(2); Documentation/ABI/testing/sysfs-kernel-slab; fs/locks.c, locks_start, lock_get_status.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

from nsinit.cgroup.session import SessionCgroup, number_in, read_file
from nsinit.cgroup.tree import Tree
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.wire.validate import is_session_id

MAX_LOCKS = 8192
"""The most record locks of a session, 1.5 MiB; half as many again may go unnoticed."""
_COUNT_PATH = "/sys/kernel/slab/file_lock_cache/objects"
PERIOD_S = 0.1
"""The time between two looks, in which one processor makes locks of up to 40 MiB."""
_PAGE_BYTES = 65536
_OF_RECORD = re.compile(rb" POSIX +\S+ +\S+ +([1-9]\d*) ")


@dataclass(slots=True)
class LockWatch:
    """The count of the kernel's cache, open; -1 where the kernel has none, and then nothing is bounded."""

    count_fd: int
    _known: int = 0
    """A number of objects that needs no look: with at most `MAX_LOCKS` more, no session is over for want of one."""

    @classmethod
    def open(cls) -> LockWatch:
        """Open the count, while `/sys` is in sight."""
        try:
            return cls(os.open(_COUNT_PATH, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            log("warning", "record locks of sessions are not bounded", path=_COUNT_PATH, reason=str(error))
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
        over = yield from _find_over(tree)
        if over is None:
            self._known = count - MAX_LOCKS // 2
        return over


def _find_over(tree: Tree) -> Generator[Wait, bool, tuple[str, int] | None]:
    """Return the first session that is found to hold more than `MAX_LOCKS` record locks, and the number so far."""
    sessions: dict[int, str] = {}
    held: Counter[str] = Counter()
    with open("/proc/locks", "rb", buffering=0) as file:
        while page := file.read(_PAGE_BYTES):
            for pid in map(int, _OF_RECORD.findall(page)):
                if pid not in sessions:
                    sessions[pid] = _session_of(pid, tree)
                held[sessions[pid]] += 1
            for session_id, count in held.items():
                if session_id and count > MAX_LOCKS:
                    return session_id, count
            yield Wait(timeout_s=0)
    return None


def _session_of(pid: int, tree: Tree) -> str:
    """Return the session that a process is of; empty if it is of none of this tree, or has ended."""
    try:
        parts = set(re.split(r"[/\n]", read_file(f"/proc/{pid}/cgroup")))
    except ProcessLookupError:
        return ""
    found = [each for each in parts if is_session_id(each) and SessionCgroup(tree, each).exists()]
    return found[0] if len(found) == 1 else ""
