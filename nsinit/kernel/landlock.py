"""Landlock: rules that keep a sandbox inside even if its other walls fail, and that no process of it can take off.

Two layers. Every sandbox gets the first, from PID 1 down: no signal and no connection to an abstract socket leaves the
sandbox, even where it shares a network or pid namespace with others. The second is asked for per session and binds
commands alone: below which directories they may write, read and execute. PID 1 makes the rules, and each command enters
them before execve(2).

Decides about no session. `probe_abi` asks the kernel for its version; nothing is assumed.
Sources: landlock(7); landlock_create_ruleset(2), landlock_add_rule(2), landlock_restrict_self(2);
Documentation/userspace-api/landlock.rst (additions of each ABI).
"""

from __future__ import annotations

import errno
import os

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

SCOPES_ABI = 6
"""The first version that can keep signals and abstract sockets inside."""

FILES_ABI = 3
"""The first version whose file rules cover truncation and renames: with less a file that is not writable could be
emptied."""

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
    """Return the version of Landlock that this kernel has, 0 if it has none or has it switched off."""
    try:
        return syscalls.landlock_abi()
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise


def features(abi: int) -> dict[str, bool]:
    """Return the features that a kernel of this version has."""
    return {"landlock_scopes": abi >= SCOPES_ABI, "landlock_files": abi >= FILES_ABI}


def keep_inside(abi: int) -> None:
    """Let no signal and no connection to an abstract socket of this process, and of all it forks, leave them.

    Takes no_new_privs. Kernels without the feature are let through: namespaces do the same, and `features` says so.
    """
    if abi >= SCOPES_ABI:
        _enter(syscalls.landlock_create_ruleset(scoped=_SCOPES))


def make_file_rules(readable: list[tuple[int, bool]] | None, writable: list[tuple[int, bool]] | None) -> int:
    """Return a ruleset: reading and executing only beneath `readable`, changing only beneath `writable`; None:
    everywhere. Each entry is an O_PATH descriptor and whether it is a directory. A writable path is not thereby
    readable.

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
