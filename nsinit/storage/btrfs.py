"""Mode `btrfs`: layers lie in a subvolume of their own, whose quota group has a limit.

Quotas concern the whole file system, so they are never switched on from here. Files are not counted, but their metadata
takes room, so the limit of bytes limits their number.
Sources: btrfs(5), btrfs-quota(8), btrfs-qgroup(8); include/uapi/linux/{btrfs,btrfs_tree}.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import ClassVar

from nsinit.kernel import constants as k
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

_ROOT_INODE = 256
_VOLUME = struct.Struct("=q4088s")
_LIMIT = struct.Struct("=6Q")
"""`struct btrfs_ioctl_qgroup_limit_args`: group, flags, most it may refer to, exclusively, and two reservations."""
_MAX_REFERRED = 1
_LOOKUP = struct.Struct("=2Q4080x")
_SEARCH = struct.Struct("=7Q4I4Q")
"""`struct btrfs_ioctl_search_key`: tree; first and last object, offset, transaction; first and last type; items."""
_SEARCH_BYTES, _ITEMS_FOUND = 4096, 9
_ITEM = struct.Struct("=3Q2I")
_QUOTA_TREE, _INFO, _RULE = 8, 242, 244
_NUMBERS = struct.Struct("<2Q")
_MAX = (1 << 64) - 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Btrfs(Mechanism):
    """The mechanism that this module is about."""

    mode: ClassVar[DiskMode] = "btrfs"

    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        parent_fd = os.open(place.layout.sessions, _DIRECTORY)
        try:
            _volume(parent_fd, k.BTRFS_IOC_SUBVOL_CREATE, place.session_id)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
                raise MechanismUnavailable("the data directory is not on btrfs") from error
            raise
        finally:
            os.close(parent_fd)
        os.chmod(place.directory, 0o700)
        try:
            self.fit(place, limits)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.EINVAL, errno.ENOENT):
                raise MechanismUnavailable("quotas are off; run btrfs quota enable on the data directory") from error
            raise
        make_layers(place.directory, place.base)

    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        fd = os.open(place.directory, _DIRECTORY)
        try:
            if not _is_subvolume(fd):
                raise other_mechanism()
            arguments = _LIMIT.pack(_subvolume(fd), _MAX_REFERRED, limits.size_bytes, 0, 0, 0)
            fcntl.ioctl(fd, k.BTRFS_IOC_QGROUP_LIMIT, arguments)
        finally:
            os.close(fd)

    def change(self, place: DiskFacts, limits: DiskLimits) -> None:
        self.fit(place, limits)

    def usage(self, place: DiskFacts, root_fd: int) -> Usage:
        """Return the counters of the quota group, which the kernel updates at each commit, some seconds
        after a write."""
        fd = os.open(place.directory, _DIRECTORY)
        try:
            if not _is_subvolume(fd):
                return UNKNOWN
            group = _subvolume(fd)
            return _number(fd, group, _INFO), _number(fd, group, _RULE), -1, -1
        finally:
            os.close(fd)

    def remove(self, parent_fd: int, name: str) -> None:
        """Delete the subvolume, at once; the kernel frees its blocks later."""
        try:
            _volume(parent_fd, k.BTRFS_IOC_SNAP_DESTROY, name)
        except OSError:  # it is a plain directory, or has a subvolume in it
            trash.remove_tree(parent_fd, name)


def _volume(parent_fd: int, request: int, name: str) -> None:
    fcntl.ioctl(parent_fd, request, bytearray(_VOLUME.pack(0, name.encode())))  # `bytes` may be 1024 long only


def _is_subvolume(fd: int) -> bool:
    """Whether a directory is the root of a subvolume; a plain one lies in the machine's."""
    return os.fstat(fd).st_ino == _ROOT_INODE


def _subvolume(fd: int) -> int:
    """Return the id of the subvolume that `fd` is in, which is also that of its quota group."""
    buffer = bytearray(_LOOKUP.pack(0, _ROOT_INODE))
    fcntl.ioctl(fd, k.BTRFS_IOC_INO_LOOKUP, buffer)
    subvolume_id: int = _LOOKUP.unpack(buffer)[0]
    return subvolume_id


def _number(fd: int, group: int, kind: int) -> int:
    """Return the second number of a quota group's item: the bytes that it refers to, or their limit."""
    key = _SEARCH.pack(_QUOTA_TREE, 0, 0, group, group, 0, _MAX, kind, kind, 1, 0, 0, 0, 0, 0)
    buffer = bytearray(key.ljust(_SEARCH_BYTES, b"\0"))
    fcntl.ioctl(fd, k.BTRFS_IOC_TREE_SEARCH, buffer)
    if _SEARCH.unpack_from(buffer)[_ITEMS_FOUND] == 0:
        return -1
    return int(_NUMBERS.unpack_from(buffer, _SEARCH.size + _ITEM.size)[1])
