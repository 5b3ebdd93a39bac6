"""Walking a directory tree that other processes may be changing, and describing its files.

Every step is one name below an open directory, so no link is ever followed and nothing outside is reached. A file that
vanished meanwhile is passed over. Runs in a file worker as the sandbox user; may block.

Sources: openat(2) O_NOFOLLOW; readlink(2); stat(2).
"""

from __future__ import annotations

import bisect
import errno
import heapq
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from runner.loop.context import Refused
from runner.wire.protocol import FileEntry, FileKind

Check = Callable[[], None]
"""Called between two steps of work that takes long; raises where the work should end."""

MAX_DEPTH = 4096
MAX_ORDERED_DEPTH = 256
_NAMES_AT_ONCE = 8192
PAGE_BYTES = 160 * 1024
"""Bound of a list in one message: well below `MAX_FRAME_BYTES`, as JSON."""
JSON_BYTES = 6
"""Most that a byte of a name takes as JSON."""
CLOCK_EVERY = 256
"""Files of a walk between two looks at the clock."""
_NOT_ENTERED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})
"""Errors of a name that is no directory, not any more, or one that the user may not read."""
_UNSETTLED_NS = 20_000_000
_WORD = 2**64 - 1
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags of open(2) for a name whose kind may have changed: no link is followed, and no FIFO or device waited for."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def never_ends() -> None:
    """Check nothing: the work goes on to its end."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a tree: `name` in the directory `parent_fd`, which is open until the next file is asked for.

    `path` is relative to the top. A directory comes twice: before its content, and after it with `is_left`.
    """

    parent_fd: int
    name: bytes
    path: bytes
    status: os.stat_result
    is_left: bool = False


class Walk:
    """Iterates over all files below a directory. With `passes_denied`, directories that may not be read are passed over
    and counted; otherwise they are an error. With the directory's path, `real`, the kernel's files are not entered.
    `check` is called before each file is looked at."""

    def __init__(
        self, top_fd: int, *, passes_denied: bool = False, real: bytes = b"", check: Check = never_ends
    ) -> None:
        self._top_fd, self._real, self._check = top_fd, real, check
        self._passes_denied = passes_denied
        self.denied = 0

    def __iter__(self) -> Iterator[TreeFile]:
        stack = [(open_directory(self._top_fd, b"."), _NOTHING)]
        names = [os.scandir(stack[0][0])]
        try:
            while stack:
                self._check()
                fd, above = stack[-1]
                entry = next(names[-1], None)
                if entry is None:
                    names.pop().close()
                    os.close(stack.pop()[0])
                    if above is not _NOTHING:
                        yield TreeFile(above.parent_fd, above.name, above.path, above.status, is_left=True)
                    continue
                found = _look(fd, os.fsencode(entry.name), above.path)
                if found is None:
                    continue
                yield found
                if stat.S_ISDIR(found.status.st_mode) and (child := self._enter(found, len(stack))) >= 0:
                    stack.append((child, found))
                    names.append(os.scandir(child))
        finally:
            for each in names:
                each.close()
            for fd, _ in stack:
                os.close(fd)

    def _enter(self, found: TreeFile, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise Refused("INVALID_PATH", f"directories are nested more than {MAX_DEPTH} deep")
        if self._real and is_of_kernel(os.path.join(self._real, found.path)):
            return -1
        try:
            return open_directory(found.parent_fd, found.name)
        except (FileNotFoundError, NotADirectoryError):  # removed or replaced meanwhile
            return -1
        except PermissionError:
            self.denied += 1
            if self._passes_denied:
                return -1
            raise Refused("PERMISSION_DENIED", f"can't be read: {os.fsdecode(found.path)[:200]}") from None


@dataclass(frozen=True, slots=True)
class OrderedWalk:
    """Walk through the files below a directory in the order of the names' bytes, a directory before its content.

    `real` is the directory's real path, `depth` the levels that are walked. A directory whose path below the top
    `enters` refuses is passed over, as are the kernel's own files and directories that may not be read.
    """

    real: bytes
    depth: int = MAX_ORDERED_DEPTH
    enters: Callable[[bytes], bool] = lambda _path: True

    def below(self, fd: int, *, after: bytes = b"") -> Iterator[tuple[bytes, int, bytes]]:
        """Yield path below the top, directory and name of each file behind the path `after`. The descriptor stays the
        caller's.

        Raises:
            Refused: BAD_REQUEST, no file has the path `after`, or one outside.
        """
        names = after.split(b"/") if after else []
        if b"\0" in after or not {b"", b".", b".."}.isdisjoint(names):
            raise Refused("BAD_REQUEST", "a cursor that no list gave")
        return self._below(fd, b"", self.depth, names)

    def _below(self, fd: int, path: bytes, depth: int, after: list[bytes]) -> Iterator[tuple[bytes, int, bytes]]:
        # Names are read as they come and the first ones are kept: a huge directory costs time, not memory.
        last = b""
        if after:
            last = after[0]
            yield from self._inside(fd, last, os.path.join(path, last), depth - 1, after[1:])
        while True:
            names, are_all = _names_behind(fd, last)
            for name in names:
                place = os.path.join(path, name)
                yield place, fd, name
                yield from self._inside(fd, name, place, depth - 1, [])
            if are_all:
                return
            last = names[-1]

    def _inside(
        self, fd: int, name: bytes, path: bytes, depth: int, after: list[bytes]
    ) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield what is in one entry of a directory, nothing if that is no directory or may not be entered."""
        if depth == 0 or is_of_kernel(os.path.join(self.real, path)) or not self.enters(path):
            return
        try:
            child = open_directory(fd, name)
        except OSError as error:
            if error.errno in _NOT_ENTERED:
                return
            raise
        try:
            yield from self._below(child, path, depth, after)
        finally:
            os.close(child)


_read: tuple[tuple[int, ...], list[bytes]] = (), []
"""A version of a directory, and names in it that follow one another: the next page of a list goes on among them. A
further read of a huge directory would be most of what a page costs."""


def _names_behind(fd: int, last: bytes) -> tuple[list[bytes], bool]:
    """Return the first names of a directory behind `last`, in order, and whether there are no more."""
    global _read
    status, now = os.fstat(fd), time.time_ns()
    version = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    known, names = _read
    if known == version and names[0] <= last < names[-1]:
        return names[bisect.bisect_right(names, last) :], len(names) < _NAMES_AT_ONCE
    with os.scandir(fd) as found:
        names = heapq.nsmallest(_NAMES_AT_ONCE, (name for each in found if (name := os.fsencode(each.name)) > last))
    # A change from now on leaves another time, unless one was made just before.
    _read = (version, names) if now - max(version[2:]) > _UNSETTLED_NS and names else ((), [])
    return names, len(names) < _NAMES_AT_ONCE


def is_of_kernel(path: bytes) -> bool:
    """Return whether a real path is of a file system whose files are made by the kernel."""
    return path.startswith((b"/proc/", b"/sys/")) or path in (b"/proc", b"/sys")


def open_directory(parent_fd: int, name: bytes) -> int:
    """Open a directory for reading; `name` is one component, and no link."""
    return os.open(name, _DIRECTORY, dir_fd=parent_fd)


def _look(fd: int, name: bytes, above: bytes) -> TreeFile | None:
    try:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return TreeFile(fd, name, os.path.join(above, name), status)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of users and groups by their ids."""

    users: Mapping[int, str] = field(default_factory=dict)
    groups: Mapping[int, str] = field(default_factory=dict)


NO_NAMES = Names()


def etag_of(status: os.stat_result) -> str:
    """Return the version of a file. A strong one (no `W/`) stands for the same bytes whenever it is found again.

    A write within the clock's granularity may leave the times as they were, so a file that was written just now has a
    weak one.
    """
    numbers = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    tag = "-".join(f"{number & _WORD:x}" for number in numbers)
    # Every write sets ctime, and nobody can set it otherwise.
    return f'W/"{tag}"' if time.time_ns() - status.st_ctime_ns < _UNSETTLED_NS else f'"{tag}"'


def describe(
    parent_fd: int, name: bytes, status: os.stat_result, *, path: bytes = b"", names: Names = NO_NAMES
) -> FileEntry:
    """Return the description of one file for a client."""
    mode, target = status.st_mode, b""
    if stat.S_ISLNK(mode):
        try:
            target = os.readlink(name, dir_fd=parent_fd)
        except OSError:  # replaced meanwhile
            target = b""
    return FileEntry(
        name=os.fsdecode(name),
        kind=_kind_of(mode),
        size_bytes=status.st_size,
        mode=stat.S_IMODE(mode),
        owner=status.st_uid,
        mtime_us=status.st_mtime_ns // 1000,
        target=os.fsdecode(target),
        path=os.fsdecode(path),
        group=status.st_gid,
        user_name=names.users.get(status.st_uid, ""),
        group_name=names.groups.get(status.st_gid, ""),
        etag=etag_of(status),
    )


def _kind_of(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


_NOTHING = TreeFile(-1, b"", b"", os.stat_result((0,) * 10))
