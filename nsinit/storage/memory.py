"""Mode `tmpfs`: layers lie in memory, on a tmpfs in the session's mount namespace alone; they go with its PID 1.

Pages are charged to the session, so the disk is never larger than half of its memory: a full one must be "no space
left", not an out-of-memory kill. Sources: Documentation/filesystems/tmpfs.rst (size, nr_inodes).
"""

from __future__ import annotations

import os
from typing import ClassVar

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, stage, syscalls
from nsinit.storage.mechanism import Mechanism, Place, make_layers
from nsinit.wire.protocol import DiskLimits, DiskMode

_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Memory(Mechanism):
    """See the module's docstring."""

    mode: ClassVar[DiskMode] = "tmpfs"

    def make(self, place: Place, limits: DiskLimits) -> None:
        """The session's directory stays empty; it is what a start after a crash finds."""
        os.mkdir(place.directory, 0o700)
        options: dict[str, str | int] = {"size": _size(place, limits), "nr_inodes": limits.inodes, "mode": "0700"}
        mount_fd = mounts.filesystem("tmpfs", mounts.NOSUID_NODEV, **options)
        mounts.attach(mount_fd, os.open(self.layers(place), _POINT))
        make_layers(self.layers(place), place.base)

    def fit(self, place: Place, limits: DiskLimits) -> None:
        options = f"size={_size(place, limits)},nr_inodes={limits.inodes}"
        flags = k.MS_REMOUNT | k.MS_NOSUID | k.MS_NODEV
        syscalls.mount("sandkasten", self.layers(place), "tmpfs", flags, options)

    def layers(self, place: Place) -> str:
        return f"{place.layout.stage}/{stage.DISK}"


def _size(place: Place, limits: DiskLimits) -> int:
    return limits.size_bytes if place.memory_bytes is None else min(limits.size_bytes, place.memory_bytes // 2)
