"""Landlock: what a sandbox may not reach however its other walls stand, by rules that no process of it can take off.

Two layers. Every sandbox gets the first, from PID 1 down: no signal and no connection to an abstract socket leaves it,
even where it shares a network or pid namespace with others. The second is asked for per session and binds commands
alone: where they may write, and where from they may read and execute. PID 1 makes it, and each command enters it before
execve(2).

It must not decide who gets file rules, nor believe that a kernel has what it was not asked for: `probe_abi` asks.
Sources: landlock(7); landlock_create_ruleset(2), landlock_add_rule(2), landlock_restrict_self(2);
Documentation/userspace-api/landlock.rst (what each ABI adds).
"""

from __future__ import annotations

import errno
import os

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

SCOPES_ABI = 6
"""From here on signals and abstract sockets can be kept inside."""

FILES_ABI = 3
"""From here on file rules cover truncation and renames: with less a file could be emptied where none may be written."""

_ABSENT = (errno.ENOSYS, errno.EOPNOTSUPP)

_SCOPES = k.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | k.LANDLOCK_SCOPE_SIGNAL
_READ_FILE = k.LANDLOCK_ACCESS_FS_EXECUTE | k.LANDLOCK_ACCESS_FS_READ_FILE
_READ = _READ_FILE | k.LANDLOCK_ACCESS_FS_READ_DIR
_WRITE_FILE = k.LANDLOCK_ACCESS_FS_WRITE_FILE | k.LANDLOCK_ACCESS_FS_TRUNCATE
_WRITE = (
    _WRITE_FILE
    | k.LANDLOCK_ACCESS_FS_REMOVE_DIR
    | k.LANDLOCK_ACCESS_FS_REMOVE_FILE
    | k.LANDLOCK_ACCESS_FS_MAKE_CHAR
    | k.LANDLOCK_ACCESS_FS_MAKE_DIR
    | k.LANDLOCK_ACCESS_FS_MAKE_REG
    | k.LANDLOCK_ACCESS_FS_MAKE_SOCK
    | k.LANDLOCK_ACCESS_FS_MAKE_FIFO
    | k.LANDLOCK_ACCESS_FS_MAKE_BLOCK
    | k.LANDLOCK_ACCESS_FS_MAKE_SYM
    | k.LANDLOCK_ACCESS_FS_REFER
)


def probe_abi() -> int:
    """Return the version of Landlock that this kernel has, 0 if it has none or does not use it."""
    try:
        return syscalls.landlock_abi()
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise


def features(abi: int) -> dict[str, bool]:
    """Return what a kernel of this version can be asked for."""
    return {"landlock_scopes": abi >= SCOPES_ABI, "landlock_files": abi >= FILES_ABI}


def keep_inside(abi: int) -> None:
    """Let no signal and no connection to an abstract socket of this process, and of all it forks, leave them.

    It takes no_new_privs. Older kernels are let through: there other walls do the same, and `features` says so.
    """
    if abi >= SCOPES_ABI:
        _enter(syscalls.landlock_create_ruleset(scoped=_SCOPES))


def make_file_rules(readable: list[tuple[int, bool]] | None, writable: list[tuple[int, bool]] | None) -> int:
    """Return a ruleset: reading and executing only beneath `readable`, changing only beneath `writable`; None of either
    means everywhere. Each is an O_PATH descriptor and whether it is a directory. What is writable is not readable by
    that alone.

    Raises:
        OSError: the kernel refuses.
    """
    handled = (0 if readable is None else _READ) | (0 if writable is None else _WRITE)
    ruleset_fd = syscalls.landlock_create_ruleset(handled_access_fs=handled)
    try:
        for paths, in_file, in_directory in ((readable, _READ_FILE, _READ), (writable, _WRITE_FILE, _WRITE)):
            for fd, is_directory in paths or ():
                syscalls.landlock_add_path(ruleset_fd, fd, in_directory if is_directory else in_file)
    except BaseException:
        os.close(ruleset_fd)
        raise
    return ruleset_fd


def _enter(ruleset_fd: int) -> None:
    try:
        syscalls.landlock_restrict_self(ruleset_fd)
    finally:
        os.close(ruleset_fd)
