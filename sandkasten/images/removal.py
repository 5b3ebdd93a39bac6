"""Remove a directory tree without following a link, crossing a mount, or recursing.

Works beneath one directory descriptor. A subdirectory is never entered from its parent: it is renamed up into the top
directory first, then emptied there. So depth costs neither stack nor descriptors, and the kernel itself refuses to
cross a mount: rename(2) of a mount point fails with EBUSY, of an entry on another mount with EXDEV.
"""

from __future__ import annotations

import os
import stat

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(parent_fd: int, name: str) -> None:
    """Remove directory `name` of `parent_fd` and its content; a directory that is gone already is no error.

    Raises:
        OSError: an entry can't be removed (EBUSY: a mount point). Other entries may be gone by then.
    """
    try:
        top_fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    try:
        lifted = 0
        while pending := os.listdir(top_fd):
            for entry in pending:
                if _is_directory(top_fd, entry):
                    lifted = _empty(top_fd, entry, lifted)
                    os.rmdir(entry, dir_fd=top_fd)
                else:
                    os.unlink(entry, dir_fd=top_fd)
    finally:
        os.close(top_fd)
    os.rmdir(name, dir_fd=parent_fd)


def _empty(top_fd: int, name: str, lifted: int) -> int:
    """Unlink the files of a directory and lift its subdirectories into `top_fd`; return the number lifted so far."""
    directory_fd = os.open(name, _DIRECTORY, dir_fd=top_fd)
    try:
        for entry in os.listdir(directory_fd):
            if not _is_directory(directory_fd, entry):
                os.unlink(entry, dir_fd=directory_fd)
                continue
            while _exists(top_fd, f".lifted-{lifted}"):
                lifted += 1
            # rename(2) refuses a mount point (EBUSY) and a crossing of mounts (EXDEV).
            os.rename(entry, f".lifted-{lifted}", src_dir_fd=directory_fd, dst_dir_fd=top_fd)
    finally:
        os.close(directory_fd)
    return lifted


def _is_directory(directory_fd: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode)


def _exists(directory_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
