"""Mode `project`: layers are plain directories in a project of their own, whose quota ext4 or xfs enforces.

A directory hands its project down to every file made in it, and no process in a user namespace can change a project.
The id is drawn from the session's, and must be one that neither a session nor its remains in the trash use. The first
half of the file is the layout of the kernel's structures, on descriptors only; the second is the mechanism.
Sources: quotactl(2), quotactl_fd(2); include/uapi/linux/{quota,fs}.h; xfs_quota(8) "DIRECTORY TREE QUOTA";
Documentation/filesystems/ext4 (project feature).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.storage import trash
from nsinit.storage.mechanism import (
    UNKNOWN,
    DiskFacts,
    Mechanism,
    MechanismUnavailable,
    Usage,
    make_layers,
    other_mechanism,
)
from nsinit.wire.protocol import DiskLimits, DiskMode

_FSXATTR = struct.Struct("=5I8x")
"""`struct fsxattr`: flags, extent size, extents, project id, copy-on-write extent size."""
_DQBLK = struct.Struct("=8QI4x")
"""`struct if_dqblk`: hard and soft limit in KiB and use in bytes, the same in inodes; two times; what is valid."""
_UNIT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ProjectQuota:
    """The use and the limits of a project; a limit of 0 is none."""

    used_bytes: int
    limit_bytes: int
    used_inodes: int
    limit_inodes: int

    @property
    def is_free(self) -> bool:
        """Whether nobody uses the project."""
        return (self.used_bytes, self.limit_bytes, self.used_inodes, self.limit_inodes) == (0, 0, 0, 0)


def project_of(directory_fd: int) -> int:
    """Return the project id of a file or directory."""
    project_id: int = _FSXATTR.unpack(fcntl.ioctl(directory_fd, k.FS_IOC_FSGETXATTR, bytes(_FSXATTR.size)))[3]
    return project_id


def set_project(directory_fd: int, project_id: int) -> None:
    """Put a directory, and every file made in it from now on, into a project."""
    flags, extent_size, extents, _, cow_extent_size = _FSXATTR.unpack(
        fcntl.ioctl(directory_fd, k.FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))
    )
    new = _FSXATTR.pack(flags | k.FS_XFLAG_PROJINHERIT, extent_size, extents, project_id, cow_extent_size)
    fcntl.ioctl(directory_fd, k.FS_IOC_FSSETXATTR, new)


def read(fd: int, project_id: int) -> ProjectQuota:
    """Return the account of a project on the file system of `fd`."""
    buffer = bytearray(_DQBLK.size)
    try:
        syscalls.quotactl_fd(fd, k.Q_GETQUOTA << 8 | k.PRJQUOTA, project_id, buffer)
    except FileNotFoundError:  # xfs: there never was one
        return ProjectQuota(0, 0, 0, 0)
    hard_kib, _, used_bytes, hard_inodes, _, used_inodes, *_ = _DQBLK.unpack(buffer)
    return ProjectQuota(used_bytes, hard_kib * _UNIT_BYTES, used_inodes, hard_inodes)


def set_limits(fd: int, project_id: int, *, limit_bytes: int, limit_inodes: int) -> None:
    """Set the limits of a project on the file system of `fd`."""
    kib = limit_bytes // _UNIT_BYTES
    block = bytearray(_DQBLK.pack(kib, kib, 0, limit_inodes, limit_inodes, 0, 0, 0, k.QIF_LIMITS))
    syscalls.quotactl_fd(fd, k.Q_SETQUOTA << 8 | k.PRJQUOTA, project_id, block)


def reason(error: OSError) -> str | None:
    """Return the means to have project quotas, if their lack is the reason for an error; None for other errors."""
    if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
        return "the file system has no project ids (xfs has; ext4: mke2fs or tune2fs -O project,quota)"
    if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
        return "project quotas are not enforced (mount the file system with prjquota; the kernel needs quota support)"
    return None


_FIRST_ID, _IDS = 1 << 30, 1 << 30
"""The range of ids for sessions. Ids that people give out by hand are smaller."""
_ATTEMPTS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Project(Mechanism):
    """The mechanism that this module is about."""

    mode: ClassVar[DiskMode] = "project"

    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        """Make the directories. The limit is set before the directory belongs to the project."""
        os.mkdir(place.directory, 0o700)
        with _opened(place.directory) as fd:
            try:
                project_id = _free_id(fd, place.session_id)
                _limit(fd, project_id, limits)
                set_project(fd, project_id)
            except OSError as error:
                if (why := reason(error)) is None:
                    raise
                raise MechanismUnavailable(why) from error
        make_layers(place.directory, place.base)

    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        with _opened(place.directory) as fd:
            project_id = project_of(fd)
            if not _is_own(project_id):
                raise other_mechanism()
            _limit(fd, project_id, limits)

    def change(self, place: DiskFacts, limits: DiskLimits) -> None:
        self.fit(place, limits)

    def usage(self, place: DiskFacts, root_fd: int) -> Usage:
        with _opened(place.directory) as fd:
            project_id = project_of(fd)
            if not _is_own(project_id):
                return UNKNOWN
            account = read(fd, project_id)
        return account.used_bytes, account.limit_bytes, account.used_inodes, account.limit_inodes

    def remove(self, parent_fd: int, name: str) -> None:
        """Delete the directory and clear the limits of its project, so that the file system forgets the project."""
        with _opened(name, parent_fd) as fd:
            project_id = project_of(fd)
        trash.remove_tree(parent_fd, name)
        if _is_own(project_id):
            set_limits(parent_fd, project_id, limit_bytes=0, limit_inodes=0)


def _is_own(project_id: int) -> bool:
    """Whether a project was made here; a plain directory is in the project of the whole machine."""
    return _FIRST_ID <= project_id < _FIRST_ID + _IDS


def _limit(fd: int, project_id: int, limits: DiskLimits) -> None:
    set_limits(fd, project_id, limit_bytes=limits.size_bytes, limit_inodes=limits.inodes)


def _free_id(fd: int, session_id: str) -> int:
    first = int(session_id[:8], 16)
    for number in range(first, first + _ATTEMPTS):
        project_id = _FIRST_ID + number % _IDS
        if read(fd, project_id).is_free:
            return project_id
    raise OSError(errno.EBUSY, f"{_ATTEMPTS} project ids in a row are used by others")


@contextmanager
def _opened(path: str, parent_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, _DIRECTORY, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)
