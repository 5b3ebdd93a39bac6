"""The mounts of the namespace that nsinit was started in, seen and undone after it has left that.

Owns two descriptors: its mount table, and itself. To undo a mount takes being there, so a short-lived process that
holds nothing else goes back; it is given up on after a while, for a file system whose server is gone can hold it.
Sources: mount_namespaces(7); setns(2); proc_pid_mountinfo(5); pidfd_open(2).

Mounts that somebody made by hand in the sessions' places of a data directory: how they are known and let go of.

Sessions are mounted in namespaces of their own, so none of their mounts shows in the one that nsinit is started in. A
mount on such a place itself may be a disk for it, and is none of ours to undo. What lies below a place can be a
sandbox's to move about, so a point is opened without following any link, must be the mount that was found, and is let
go of by that descriptor; what is behind it is not touched.

Works in the namespace of its process; `machine_mounts` goes to another one for it.
Sources: proc_pid_mountinfo(5), proc_pid_fdinfo(5); openat2(2); umount2(2) MNT_DETACH.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.files import keep_only
from nsinit.kernel.mountinfo import is_below, parse_points
from nsinit.log import log
from nsinit.scheduler import Wait

_PLACES = ("disk", "run", "sessions", "spool", "stage", "trash")
_CHUNK_BYTES = 1 << 16
_NO_LINKS = k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class HandMount:
    """One that was found; `is_place`: on a place itself."""

    mount_id: int
    point: str
    is_place: bool


Find = Callable[[], Sequence[HandMount]]


def find_hand_mounts(data_dir: str, mountinfo: str) -> Sequence[HandMount]:
    """Return those in the places of a data directory (its real path), the last made first: so they come undone."""
    places = [f"{data_dir}/{name}" for name in _PLACES]
    found = [
        HandMount(mount_id, point, point in places)
        for mount_id, point in parse_points(mountinfo)
        if any(is_below(point, place) for place in places)
    ]
    return found[::-1]


def points_below(mounts: Sequence[HandMount]) -> list[str]:
    """Return the points below places, each once."""
    return list(dict.fromkeys(each.point for each in mounts if not each.is_place))


def open_table() -> int:
    """Return a mount table that shows the namespace it was opened in, wherever the reader is by then."""
    return os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)


def finder(data_dir: str, table_fd: int) -> Find:
    """Return what looks into an open table anew each time. Nobody else may read that table at the same time: where
    the next line begins is the kernel's to know, and between pages the table may change."""

    def find() -> Sequence[HandMount]:
        text = b""
        while chunk := os.pread(table_fd, _CHUNK_BYTES, len(text)):
            text += chunk
        return find_hand_mounts(data_dir, os.fsdecode(text))

    return find


def detach_all(data_dir: str) -> Iterator[tuple[str, OSError | None]]:
    """Detach all those below places; yield each point, with the reason if something is left on it. Raises `OSError`."""
    table_fd = open_table()
    try:
        find = finder(os.path.realpath(data_dir), table_fd)
        for point in points_below(find()):
            try:
                detach_at(point, find)
            except OSError as error:
                yield point, error
            else:
                yield point, None
    finally:
        os.close(table_fd)


def detach_at(point: str, find: Find) -> None:
    """Detach what is mounted on a point below a place, one on the other, as long as they get fewer.

    Raises:
        OSError: something is left. ELOOP: a link is on the way; EBUSY: what is there is not what was found.
    """
    before: int | None = None
    while ids := [each.mount_id for each in find() if each.point == point and not each.is_place]:
        if before is not None and len(ids) >= before:
            raise OSError(errno.EBUSY, "it does not go, or is made anew", point)
        before = len(ids)
        detach(point, ids)


def detach(point: str, mount_ids: Sequence[int]) -> None:
    """Detach the topmost mount on a point if it is one of these; who works in it goes on. Raises `OSError`."""
    fd = syscalls.openat2(k.AT_FDCWD, point, os.O_PATH, resolve=_NO_LINKS)
    try:
        if _mount_id(fd) not in mount_ids:
            raise OSError(errno.EBUSY, "another mount is there than was found", point)
        syscalls.umount2(f"/proc/self/fd/{fd}", k.MNT_DETACH)
    finally:
        os.close(fd)


def _mount_id(fd: int) -> int:
    """Return the id of the mount that a descriptor is on, without a question to its file system."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["mnt_id"])


DETACH_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineMounts:
    """See the module's docstring. `data_dir` is the real path; `stuck`: pidfds of those that were given up on."""

    data_dir: str
    table_fd: int
    namespace_fd: int
    stuck: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, data_dir: str) -> MachineMounts:
        """Open those of the namespace that this process is in now. Raises `OSError`."""
        table_fd = open_table()
        try:
            namespace_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(table_fd)
            raise
        return cls(os.path.realpath(data_dir), table_fd, namespace_fd)

    def close(self) -> None:
        """Let go of the namespace."""
        for fd in (self.table_fd, self.namespace_fd, *self.stuck):
            os.close(fd)

    def find(self) -> Sequence[HandMount]:
        """Return what was made by hand, the last first. Raises `OSError`."""
        return finder(self.data_dir, self.table_fd)()

    def detach(self, point: str) -> Generator[Wait, bool, bool]:
        """Detach what is on a point below a place; False if something is left, and while somebody is stuck."""
        if self._is_stuck():
            return False
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._detach_and_exit(point, parent_pid)
        pidfd = os.pidfd_open(pid)
        if not (yield Wait(fd=pidfd, timeout_s=DETACH_DEADLINE_S)):
            syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not (yield Wait(fd=pidfd, timeout_s=DETACH_DEADLINE_S)):
                self.stuck.append(pidfd)
                log("error", "a mount is left", path=point, reason="who was to detach it can't be killed")
                return False
        status = _reap(pidfd)
        if status:
            log("error", "a mount is left", path=point, reason=os.strerror(status))
        return not status

    def _is_stuck(self) -> bool:
        for pidfd in list(self.stuck):
            if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG) is not None:
                self.stuck.remove(pidfd)
                os.close(pidfd)
        return bool(self.stuck)

    def _detach_and_exit(self, point: str, parent_pid: int) -> NoReturn:
        """The exit status is the errno."""
        status = errno.EIO
        try:
            syscalls.end_with_parent(parent_pid)
            keep_only({self.namespace_fd})
            syscalls.setns(self.namespace_fd, k.CLONE_NEWNS)
            detach_at(point, finder(self.data_dir, open_table()))  # in nsinit's table it would move the kernel's place
            status = 0
        except OSError as error:
            status = error.errno or errno.EIO
        finally:
            os._exit(status)


def _reap(pidfd: int) -> int:
    """Return the exit status of a process that has ended, EINTR if it was killed."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    return result.si_status if result and result.si_code == os.CLD_EXITED else errno.EINTR
