"""Which data directory a cgroup directory of ours was made for: an extended attribute that only root can write.

A node's id names its cgroups and may have been copied along with a data directory. The mark has not: it is the device
and inode of the directory itself. What bears no mark, or another one, is somebody else's and is left alone.
Sources: xattr(7), "Trusted extended attributes"; Documentation/admin-guide/cgroup-v2.rst (xattrs of cgroups).
"""

from __future__ import annotations

import errno
import os

_NAME = "trusted.sandkasten"
_NONE = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT, errno.EPERM)


def mark_of(data_dir: str) -> str:
    """Return the mark of what belongs to this data directory."""
    status = os.stat(data_dir)
    return f"{status.st_dev}:{status.st_ino}"


def set_mark(directory: str, mark: str) -> None:
    """Mark a directory as ours. Where the kernel keeps no such attributes nothing is ever recognised by them."""
    try:
        os.setxattr(directory, _NAME, mark.encode())
    except OSError as error:
        if error.errno not in _NONE:
            raise


def read_mark(directory: str) -> str:
    """Return the mark of a directory, empty when it has none."""
    try:
        return os.getxattr(directory, _NAME).decode("ascii", "replace")
    except OSError as error:
        if error.errno not in _NONE:
            raise
        return ""
