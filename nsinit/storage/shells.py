"""Copies of an image's shells that everybody may execute and nobody may read: `<image>/shells/{bash,busybox,dash,sh}`.

The kernel makes a process that was executed from such a file not dumpable: its memory and descriptors below `/proc` are
closed to its own uid. The image's own file stays as it is, for users copy and compare it. One copy serves all sessions
of the image, so its pages are shared; it has the length and the time of the original, by which PID 1 finds out whether
the session has the same shell still.

Sources: execve(2), PR_SET_DUMPABLE(2const); `would_dump` in the kernel's fs/exec.c; openat2(2) RESOLVE_IN_ROOT.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.storage.paths import make_directory

_NAMES = ("bash", "busybox", "dash", "sh")
_DIRECTORIES = ("bin", "usr/bin", "usr/local/bin")
_MODE = 0o111
"""Not even readable for its owner: that is the session's root inside."""
_MAX_BYTES = 16 << 20
_ELF = b"\x7fELF"
_IN_ROOT = k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS


def keep(root_fd: int, directory: str) -> None:
    """Have a copy of each shell below `root_fd`, a root directory in which no program of a session has run yet.

    Raises:
        OSError: no copy could be made.
    """
    make_directory(directory, mode=0o711)
    for name in _NAMES:
        for parent in _DIRECTORIES:
            try:
                # The image's links are followed, and lead nowhere but to a file of the image.
                found_fd = syscalls.openat2(root_fd, f"{parent}/{name}", os.O_PATH, resolve=_IN_ROOT)
            except OSError:
                continue
            try:
                if _is_program(found := os.fstat(found_fd)):
                    _keep(found_fd, found, f"{directory}/{name}")
                    break
            finally:
                os.close(found_fd)


def _is_program(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_mode & 0o001 != 0 and 0 < found.st_size <= _MAX_BYTES


def _keep(found_fd: int, found: os.stat_result, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        kept = os.lstat(path)
        if (kept.st_size, int(kept.st_mtime)) == (found.st_size, int(found.st_mtime)):
            return
    read_fd = os.open(f"/proc/self/fd/{found_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(read_fd, found.st_size)
    finally:
        os.close(read_fd)
    if not content.startswith(_ELF):
        return  # a script must be read by its interpreter
    draft = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as file:
        if file.write(content) != found.st_size:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        os.fchmod(fd, _MODE)
        os.utime(fd, (int(found.st_mtime), int(found.st_mtime)))
        os.fsync(fd)  # a copy that a crash of the machine cuts short would have the right length on some file systems
    os.rename(draft, path)
