"""File rules of a session: paths a client named, made into one ruleset that every command enters. Made once.

PID 1 itself enters no rules. A set of rules is made whole or refused. Paths are looked up inside the sandbox, with the
rights of the session's user; a rule holds for the file that was found, whatever takes its name later.

Sources: landlock(7), openat2(2).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from runner.loop.context import Context, Refused
from runner.loop.kernel import AT_FDCWD, RESOLVE_NO_MAGICLINKS
from runner.wire.protocol import FileRules

MAX_PATHS = 64
"""Paths in either list."""

_ALWAYS_WRITABLE = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts"),
    "/proc",
)
_ALWAYS_READABLE = ("/dev", "/proc")


def check(rules: FileRules) -> str | None:
    """Return what is wrong with rules that no image could serve, or None."""
    for paths in (rules.readable, rules.writable):
        if len(paths or ()) > MAX_PATHS:
            return f"at most {MAX_PATHS} paths can be readable, and as many writable"
        for path in paths or ():
            if not path.startswith("/") or "\0" in path or not path.isprintable():
                return f"not an absolute path: {path[:64]!r}"
    return None


def make(context: Context, rules: FileRules) -> int:
    """Return the ruleset, which is the caller's.

    Raises:
        Refused: a path is not there for the session's user, or the kernel has no such rules.
    """
    own = context.config.private_dir
    readable = writable = None
    opened: list[tuple[int, bool]] = []
    try:
        if rules.writable is not None:
            writable = _open_all(context, (*_ALWAYS_WRITABLE, own, *rules.writable), opened)
        if rules.readable is not None:
            paths = (*_ALWAYS_READABLE, own, *rules.readable, *(rules.writable or ()))
            readable = _open_all(context, paths, opened)
            if context.shells_fd >= 0:  # in no mount: below no path that was opened
                readable.append((context.shells_fd, True))
        return context.kernel.make_file_rules(readable, writable)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise Refused("INVALID_PATH", f"this kernel can't keep these file rules: {reason}") from None
    finally:
        for fd, _ in opened:
            os.close(fd)


def _open_all(context: Context, paths: Iterable[str], opened: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    return [_open(context, path, opened) for path in paths]


def _open(context: Context, path: str, opened: list[tuple[int, bool]]) -> tuple[int, bool]:
    try:
        with context.as_user:
            fd = context.kernel.openat2(AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_NO_MAGICLINKS)
    except OSError as error:
        raise Refused("INVALID_PATH", f"{os.strerror(error.errno or 0).lower()}: {path[:200]}") from None
    entry = fd, stat.S_ISDIR(os.fstat(fd).st_mode)
    opened.append(entry)
    return entry
