"""Starts nsinit's programs, and the roles of `egress` beside it: each with an empty environment and no descriptor but
/dev/null, its log and its socket.

Used by processes of root: a program that embeds the daemon, the launcher (`tools/launcher.py`) of a daemon that gave
root away, the command line, to import an image; and by nsinit, to have a layer unpacked. Owns the command line and
the descriptors; waits for no process and restarts none. Sources: posix_spawn(3), setsid(2).
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterable

CHANNEL_FD = 3
"""The descriptor of nsinit's socket."""

ENVIRONMENT = {"LANG": "C.UTF-8", "TZ": "UTC0"}
FLAGS = ("-I", "-S", "-B")
_WITH_LIBRARIES = ("-I", "-B")
_HERE = os.path.dirname(os.path.abspath(__file__))
_EGRESS = f"{_HERE.removesuffix('nsinit')}egress"
"""Beside nsinit, under the same prefix (docs/adr/0016-names-in-the-wheel.md)."""
_HIGH_FD = 64


def spawn_nsinit(channel_fd: int, log_fd: int, *arguments: str) -> int:
    """Start nsinit, in a session of its own so that a terminal's Ctrl-C never reaches it; return its pid."""
    return spawn_python(_HERE, channel_fd, log_fd, *arguments)


def spawn_launcher(channel_fd: int, log_fd: int, *arguments: str) -> int:
    """Start the launcher in the same way; return its pid."""
    return spawn_python(f"{_HERE}/tools/launcher.py", channel_fd, log_fd, *arguments)


def spawn_egress(channel_fd: int, log_fd: int, role: str = "egress", *words: str, cgroups: Iterable[str] = ()) -> int:
    """Start the egress process, or another role of its program, in the same way, with the libraries of this
    interpreter; return its pid. It makes and enters the cgroups and gives its privileges away itself, once it has
    imported the libraries. `words` are further ones that it knows (`egress/__main__.py`)."""
    words = (*(f"cgroup={path}" for path in cgroups), *words)
    return _spawn(_WITH_LIBRARIES, _EGRESS, channel_fd, log_fd, role, *words)


def launcher_command(*arguments: str) -> list[str]:
    """Return the command to execute to become the launcher."""
    return [sys.executable, *FLAGS, f"{_HERE}/tools/launcher.py", *arguments]


def spawn_python(program: str, channel_fd: int, log_fd: int, *arguments: str) -> int:
    """Start one of nsinit's programs with `channel_fd` as descriptor 3 and `log_fd` as its standard error."""
    return _spawn(FLAGS, program, channel_fd, log_fd, *arguments)


def _spawn(flags: tuple[str, ...], program: str, channel_fd: int, log_fd: int, *arguments: str) -> int:
    # Above every number the child fills, so that no dup2 below overwrites a source.
    safe_channel, safe_log = _dup_high(channel_fd), _dup_high(log_fd)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *flags, program, *arguments],
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, safe_log, 2),
                (os.POSIX_SPAWN_DUP2, safe_channel, CHANNEL_FD),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[each for each in signal.valid_signals() if each not in (signal.SIGKILL, signal.SIGSTOP)],
        )
    finally:
        os.close(safe_channel)
        os.close(safe_log)


def spawn_unpacker(archive_fd: int, verdict_fd: int, root_fd: int, listing_fd: int, *arguments: str) -> int:
    """Start the unpacker of an archive (`tools/unpack.py`): from its standard input into the directory of descriptor 3,
    which it lists in 4. It has the libraries of this interpreter, of which it needs one to read zstd. Called by
    nsinit."""
    return _spawn_jail(_WITH_LIBRARIES, "unpack.py", archive_fd, verdict_fd, (root_fd, listing_fd), arguments)


def spawn_packer(input_fd: int | None, verdict_fd: int, *files: int, arguments: Iterable[str]) -> int:
    """Start the packer of a tree (`tools/pack.py`), with `files` as its descriptors from 3 on, and its standard input
    if it has one. Called by nsinit."""
    return _spawn_jail(FLAGS, "pack.py", 0 if input_fd is None else input_fd, verdict_fd, files, arguments)


def _spawn_jail(
    flags: Iterable[str], program: str, input_fd: int, verdict_fd: int, files: Iterable[int], arguments: Iterable[str]
) -> int:
    safe = [_dup_high(each) for each in files]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *flags, f"{_HERE}/tools/{program}", *arguments],
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, input_fd, 0),
                (os.POSIX_SPAWN_DUP2, verdict_fd, 1),
                # From 3 on, and so it has no way to nsinit's socket.
                *((os.POSIX_SPAWN_DUP2, fd, CHANNEL_FD + number) for number, fd in enumerate(safe)),
            ],
            setsigmask=[],
        )
    finally:
        for fd in safe:
            os.close(fd)


def _dup_high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
