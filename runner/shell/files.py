"""Opening, and removing, a file of a shell's directory.

The directory is `<private directory>/<number of the shell>`. The sandbox's root can put anything there, a link in the
place of a file included; PID 1 would follow the link with its own rights, and `/proc/self` is PID 1's own then. So no
link is followed. The two directories above the last one are mount points, which nobody inside can replace.

`runner.shell.command_driver` says what each file is for.

Sources: open(2) O_NOFOLLOW, fifo(7); acl(5), linux/posix_acl_xattr.h.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_SEARCH, _ALL = 1, 7
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(path: str, uid: int) -> None:
    """Make a shell's directory. The processes of `uid` alone can open what is in it, by name; PID 1 alone lists it.

    Raises:
        OSError: ENOTSUP among others: the kernel's tmpfs has no access control lists.
    """
    entries = ((_OWNER, _ALL, _NOBODY), (_USER, _SEARCH, uid), (_GROUP, 0, _NOBODY), (_MASK, _SEARCH, _NOBODY))
    packed = b"".join(struct.pack("<HHI", *entry) for entry in (*entries, (_OTHER, 0, _NOBODY)))
    os.mkdir(path, 0o700)
    # A list and not a group: users may share their group, and PID 1 has no right to give the directory away.
    os.setxattr(path, _ACL, struct.pack("<I", _ACL_VERSION) + packed, follow_symlinks=False)


def open_private(path: str, flags: int, mode: int = 0) -> int:
    """Open `<private directory>/<shell>/<name>`; neither the shell's directory nor the file may be a link.

    Raises:
        OSError: as open(2).
    """
    directory, _, name = path.rpartition("/")
    directory_fd = os.open(directory, _DIRECTORY)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory_fd)
    finally:
        os.close(directory_fd)


def remove_private(path: str) -> None:
    """Remove a file if it is there and can be reached: the sandbox's root can have taken it, or the way to it."""
    try:
        os.unlink(path)
    except OSError:
        pass


def open_fifo(path: str, flags: int) -> int:
    """Open a FIFO as `open_private` does, never waiting.

    Raises:
        OSError: as open(2), or EINVAL: it is no FIFO.
    """
    fd = open_private(path, flags | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return fd
