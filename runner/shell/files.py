"""The directory of one shell, by a descriptor of it: making, opening and removing the files there.

Its path is `<private directory>/<number of the shell>`. Only processes of the shell's uid can open what is in it, and
only by name. The sandbox's root can still put anything there, a link in the place of a file included; PID 1 would
follow the link with its own rights, and `/proc/self` is PID 1's own then. So no link is followed.

`runner.shell.command_driver` says what each file is for.

Sources: open(2) O_NOFOLLOW, fifo(7), symlink(7); acl(5), linux/posix_acl_xattr.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct

_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_SEARCH, _ALL = 1, 7
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


class PrivateDirectory:
    """Owns the directory, its files and a descriptor of it."""

    def __init__(self, path: str, uid: int) -> None:
        """Make the directory, for a shell of this uid.

        Raises:
            OSError: ENOTSUP among others: the kernel's tmpfs has no access control lists.
        """
        self.path = path
        entries = ((_OWNER, _ALL, _NOBODY), (_USER, _SEARCH, uid), (_GROUP, 0, _NOBODY), (_MASK, _SEARCH, _NOBODY))
        packed = b"".join(struct.pack("<HHI", *entry) for entry in (*entries, (_OTHER, 0, _NOBODY)))
        os.mkdir(path, 0o700)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # A list and not a group: users may share their group, and PID 1 has no right to give the directory away.
            os.setxattr(self._fd, _ACL, struct.pack("<I", _ACL_VERSION) + packed)
        except OSError:
            self.remove()
            raise

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        """Open a file, which may not be a link.

        Raises:
            OSError: as open(2).
        """
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self._fd)

    def write(self, name: str, content: bytes) -> None:
        """Make a file that nobody writes to afterwards.

        Raises:
            OSError: as open(2) and write(2).
        """
        fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        try:
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)

    def make_fifo(self, name: str, mode: int) -> None:
        """Make a FIFO. Raises: OSError."""
        os.mkfifo(name, mode, dir_fd=self._fd)

    def open_fifo(self, name: str, flags: int) -> int:
        """Open a FIFO, never waiting.

        Raises:
            OSError: as open(2), or EINVAL: it is no FIFO.
        """
        fd = self.open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return fd

    def link(self, name: str, target: str) -> None:
        """Make a symbolic link, for the shell to follow. Raises: OSError."""
        os.symlink(target, name, dir_fd=self._fd)

    def rename(self, name: str, new_name: str) -> None:
        """Put a file in the place of another. Raises: OSError."""
        os.rename(name, new_name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Remove a file if it is there: the sandbox's root can have taken it."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            pass

    def remove(self) -> None:
        """Remove the directory and all that is in it, as far as the sandbox's root has left it there."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):
                self.unlink(name)
            os.rmdir(self.path)
        os.close(self._fd)
