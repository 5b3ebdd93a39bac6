"""What of the data directory's disk is kept free of sessions, so that the machine lives when they fill theirs.

Sessions' disks may promise more than there is, and where theirs is an image a host disk that is full is an input/output
error inside: so none is created that late. Reads the file system's counters and nothing else.
Sources: statvfs(3) (`f_bavail`, `f_favail`: what is there for others than root).
"""

from __future__ import annotations

import os
from pathlib import Path

from sandkasten.config import MIB, Disk
from sandkasten.model.errors import DiskReserve


def check(data_dir: Path, disk: Disk) -> None:
    """Raise `DiskReserve` while less is free than is to be kept."""
    space = os.statvfs(data_dir)
    refuse_below(space, disk)


def refuse_below(space: os.statvfs_result, disk: Disk) -> None:
    """Raise `DiskReserve` if these counters are below the reserve."""
    free_mb = space.f_bavail * space.f_frsize // MIB
    needed_mb = max(disk.reserve_mb, int(space.f_blocks * space.f_frsize * disk.reserve_percent / 100) // MIB)
    if free_mb < needed_mb:
        raise DiskReserve("the disk of this node is too full for a new session", free_mb=free_mb, reserve_mb=needed_mb)
    needed_inodes = int(space.f_files * disk.reserve_percent / 100)  # 0 where inodes are made as needed
    if space.f_favail < needed_inodes:
        message = "the disk of this node has too few inodes left for a new session"
        raise DiskReserve(message, free_inodes=space.f_favail, reserve_inodes=needed_inodes)
