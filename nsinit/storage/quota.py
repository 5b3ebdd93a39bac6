"""Project quotas of ext4 and xfs: the project of a directory, and what a project may hold.

Owns the layout of two kernel structures, no policy. Works on descriptors only.
Sources: quotactl(2), quotactl_fd(2); include/uapi/linux/{quota,fs}.h; xfs_quota(8) "DIRECTORY TREE QUOTA".
"""

from __future__ import annotations

import errno
import fcntl
import struct
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

_FSXATTR = struct.Struct("=5I8x")
"""`struct fsxattr`: flags, extent size, extents, project id, copy-on-write extent size."""
_DQBLK = struct.Struct("=8QI4x")
"""`struct if_dqblk`: hard and soft limit in KiB and use in bytes, the same in inodes; two times; what is valid."""
_UNIT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Account:
    """What a project has and may have; a limit of 0 is none."""

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
    """Put a directory, and everything made in it from now on, into a project."""
    flags, extent_size, extents, _, cow_extent_size = _FSXATTR.unpack(
        fcntl.ioctl(directory_fd, k.FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))
    )
    new = _FSXATTR.pack(flags | k.FS_XFLAG_PROJINHERIT, extent_size, extents, project_id, cow_extent_size)
    fcntl.ioctl(directory_fd, k.FS_IOC_FSSETXATTR, new)


def read(fd: int, project_id: int) -> Account:
    """Return the account of a project on the file system of `fd`."""
    buffer = bytearray(_DQBLK.size)
    try:
        syscalls.quotactl_fd(fd, k.Q_GETQUOTA << 8 | k.PRJQUOTA, project_id, buffer)
    except FileNotFoundError:  # xfs: there never was one
        return Account(0, 0, 0, 0)
    hard_kib, _, used_bytes, hard_inodes, _, used_inodes, *_ = _DQBLK.unpack(buffer)
    return Account(used_bytes, hard_kib * _UNIT_BYTES, used_inodes, hard_inodes)


def set_limits(fd: int, project_id: int, *, limit_bytes: int, limit_inodes: int) -> None:
    """Let these be the limits of a project on the file system of `fd`."""
    kib = limit_bytes // _UNIT_BYTES
    block = bytearray(_DQBLK.pack(kib, kib, 0, limit_inodes, limit_inodes, 0, 0, 0, k.QIF_LIMITS))
    syscalls.quotactl_fd(fd, k.Q_SETQUOTA << 8 | k.PRJQUOTA, project_id, block)


def reason(error: OSError) -> str | None:
    """Return what it takes to have project quotas, if their lack is the reason for an error."""
    if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
        return "the file system has no project ids (xfs has; ext4: mke2fs or tune2fs -O project,quota)"
    if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
        return "project quotas are not enforced (mount the file system with prjquota; the kernel needs quota support)"
    return None
