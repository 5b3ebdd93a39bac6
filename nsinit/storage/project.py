"""Mode `project`: layers are plain directories in a project of their own, which ext4 or xfs keeps to its limits.

A directory hands its project down to whatever is made in it, and nobody in a user namespace can change one. The id is
drawn from the session's, and is one that nobody uses: neither a session nor what is left of one in the trash.
Sources: quotactl(2); xfs_quota(8); Documentation/filesystems/ext4 (project feature).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from nsinit.storage import quota, trash
from nsinit.storage.mechanism import UNKNOWN, Mechanism, Place, Unavailable, Usage, make_layers, other_mechanism
from nsinit.wire.protocol import DiskLimits, DiskMode

_FIRST_ID, _IDS = 1 << 30, 1 << 30
"""Ids that people give out by hand are small."""
_ATTEMPTS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Project(Mechanism):
    """See the module's docstring."""

    mode: ClassVar[DiskMode] = "project"

    def make(self, place: Place, limits: DiskLimits) -> None:
        """The limit is set before the directory belongs to the project."""
        os.mkdir(place.directory, 0o700)
        with _opened(place.directory) as fd:
            try:
                project_id = _free_id(fd, place.session_id)
                _limit(fd, project_id, limits)
                quota.set_project(fd, project_id)
            except OSError as error:
                if (reason := quota.reason(error)) is None:
                    raise
                raise Unavailable(reason) from error
        make_layers(place.directory, place.base)

    def fit(self, place: Place, limits: DiskLimits) -> None:
        with _opened(place.directory) as fd:
            project_id = quota.project_of(fd)
            if not _is_own(project_id):
                raise other_mechanism()
            _limit(fd, project_id, limits)

    def change(self, place: Place, limits: DiskLimits) -> None:
        self.fit(place, limits)

    def usage(self, place: Place, root_fd: int) -> Usage:
        with _opened(place.directory) as fd:
            project_id = quota.project_of(fd)
            if not _is_own(project_id):
                return UNKNOWN
            account = quota.read(fd, project_id)
        return account.used_bytes, account.limit_bytes, account.used_inodes, account.limit_inodes

    def remove(self, parent_fd: int, name: str) -> None:
        """Nothing is in the project then, and without limits the file system forgets it."""
        with _opened(name, parent_fd) as fd:
            project_id = quota.project_of(fd)
        trash.remove_tree(parent_fd, name)
        if _is_own(project_id):
            quota.set_limits(parent_fd, project_id, limit_bytes=0, limit_inodes=0)


def _is_own(project_id: int) -> bool:
    """Whether a directory is in a project that was made here; a plain one is in the project of the whole machine."""
    return _FIRST_ID <= project_id < _FIRST_ID + _IDS


def _limit(fd: int, project_id: int, limits: DiskLimits) -> None:
    quota.set_limits(fd, project_id, limit_bytes=limits.size_bytes, limit_inodes=limits.inodes)


def _free_id(fd: int, session_id: str) -> int:
    first = int(session_id[:8], 16)
    for number in range(first, first + _ATTEMPTS):
        project_id = _FIRST_ID + number % _IDS
        if quota.read(fd, project_id).is_free:
            return project_id
    raise OSError(errno.EBUSY, f"{_ATTEMPTS} project ids in a row are used by others")


@contextmanager
def _opened(path: str, parent_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, _DIRECTORY, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)
