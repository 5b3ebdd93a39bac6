"""Changes of the files below a directory, told as they happen. Work of a file worker, which ends with its client.

The kernel watches single directories. So a directory that appears is watched and then listed: what was made in it
meanwhile is told, maybe twice. Directories are reached below the top by name, through no link, and keep their watches
when they are renamed. Changes are gathered for 50 ms. A client that does not read makes the kernel's queue overflow:
that is told, and all directories are looked for again.

Sources: inotify(7); openat2(2).
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedIOBase, BufferedWriter, RawIOBase

from runner.files.paths import Resolver, refusal
from runner.files.tree import Walk
from runner.loop.context import Refused
from runner.loop.kernel import RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, Kernel
from runner.wire.protocol import ANSWERS, ChangeKind, Done, FileChange, WatchFiles, Watching

MAX_DIRECTORIES = 16_384
_GATHER_S = 0.05
_READ_BYTES = 64 * 1024
_MOST_READS = 64
"""Pieces of the kernel's queue that one batch takes."""
_OUT_BYTES = 64 * 1024
_HEAD = struct.Struct("iIII")
_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORY, _DONT_FOLLOW, _EXCLUDE_UNLINKED, _IS_DIRECTORY = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_MASK = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _EXCLUDE_UNLINKED
_OF_TOP = _MASK | _DELETE_SELF | _MOVE_SELF
_BELOW = _MASK | _ONLY_DIRECTORY | _DONT_FOLLOW
_WITHIN = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.ENOMEM})
_KINDS: dict[int, ChangeKind] = {
    _CREATE: "create",
    _MODIFY: "write",
    _CLOSE_WRITE: "close",
    _DELETE: "remove",
    _ATTRIB: "chmod",
}
_REPEATED = frozenset({"write", "chmod", "create"})
"""Kinds of which one after another of the same file tells nothing new."""


@dataclass(frozen=True, slots=True)
class _Event:
    watch: int
    mask: int
    cookie: int
    name: bytes


class _Full(Exception):
    """No further directory can be watched."""


def watch(
    request: WatchFiles, resolver: Resolver, kernel: Kernel, tell: Callable[[object], None], raw: RawIOBase
) -> Done:
    """Tell the changes of a file, or of the entries of a directory, with `recursive` of all below it, until it is
    gone. `tell` gets the head once everything is watched.

    Raises:
        Refused: TOO_MANY, more directories than can be watched; others as for a listing.
    """
    try:
        top_fd, real = resolver.open_existing(resolver.encode(request.path))
        top = os.fstat(top_fd)
        os.close(top_fd)
        queue_fd = kernel.inotify_init()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise Refused("TOO_MANY", "the user has too many inotify instances") from None
        raise refusal(error, request.path) from None
    with open(queue_fd, "rb", buffering=0):
        watched = _WatchedTree(resolver, kernel, queue_fd, real, top, is_recursive=request.recursive)
        try:
            watched.begin()
        except _Full:
            raise Refused("TOO_MANY", "there are more directories than can be watched") from None
        except OSError as error:
            raise refusal(error, request.path) from None
        tell(Watching(os.fsdecode(real)))
        with BufferedWriter(raw, _OUT_BYTES) as out:
            while not watched.is_over:
                _write(out, watched.next(request.silence_ms))
    return Done(os.fsdecode(real))


def _write(out: BufferedIOBase, changes: list[FileChange]) -> None:
    """Send changes as lines; an empty line if there was none."""
    out.write(b"".join(ANSWERS.encode(each) + b"\n" for each in changes) or b"\n")
    out.flush()


class _WatchedTree:
    """A tree that is watched: paths below the top by the numbers of the watches. `is_over`: the top is gone."""

    def __init__(
        self,
        resolver: Resolver,
        kernel: Kernel,
        queue_fd: int,
        real: bytes,
        top: os.stat_result,
        *,
        is_recursive: bool,
    ) -> None:
        self._resolver, self._kernel, self._queue_fd, self._real, self._top = resolver, kernel, queue_fd, real, top
        self._is_recursive = is_recursive and stat.S_ISDIR(top.st_mode)
        self._paths: dict[int, bytes] = {}
        self._queue = select.poll()
        self._queue.register(queue_fd, select.POLLIN)
        self.is_over = False

    def begin(self) -> None:
        """Watch the top and what is below. Raises `_Full`, OSError."""
        with self._opened_top() as fd:
            self._add(b"/proc/self/fd/%d" % fd, b"", _OF_TOP)
        if self._is_recursive:
            for _ in self._enter(b"", is_new=True):
                pass

    def next(self, silence_ms: int) -> list[FileChange]:
        """Wait for changes, and return those of the next moments; none after a silence."""
        if not self._queue.poll(silence_ms):
            try:
                with self._opened_top():
                    return []
            except OSError:  # removed, but still the working directory of a process, say
                self.is_over = True
                return [self._change("remove", b"")]
        time.sleep(_GATHER_S)
        events = self._read()
        if events and events[-1].mask & _MOVED_FROM and self._queue.poll(int(_GATHER_S * 1000)):
            events += self._read()  # the other half of a rename comes right behind, yet not in the same moment
        return self._told(events)

    def _read(self) -> list[_Event]:
        events: list[_Event] = []
        for _ in range(_MOST_READS):
            try:
                data = os.read(self._queue_fd, _READ_BYTES)
            except BlockingIOError:
                break
            place = 0
            while place < len(data):
                watch, mask, cookie, size = _HEAD.unpack_from(data, place)
                place += _HEAD.size + size
                events.append(_Event(watch, mask, cookie, data[place - size : place].rstrip(b"\0")))
        return events

    def _told(self, events: list[_Event]) -> list[FileChange]:
        """Return what a client is told of events, and follow them."""
        arrived = {each.cookie: each for each in events if each.mask & _MOVED_TO}
        left = {each.cookie for each in events if each.mask & _MOVED_FROM}
        changes: list[FileChange] = []
        for event in events:
            if event.mask & _MOVED_TO and event.cookie in left:
                continue  # told with its first half
            try:
                changes += self._told_one(event, arrived.get(event.cookie))
            except _Full:
                changes.append(self._change("overflow", b""))
        kinds: dict[str, ChangeKind] = {}
        wanted = []
        for each in changes:
            if each.kind not in _REPEATED or kinds.get(each.path) != each.kind:
                wanted.append(each)
            kinds[each.path] = each.kind
        return wanted

    def _told_one(self, event: _Event, arrival: _Event | None) -> Iterator[FileChange]:
        if event.mask & _OVERFLOW:
            yield self._change("overflow", b"")
            self.begin()
            return
        path = self._paths.get(event.watch)
        if event.mask & _IGNORED:
            self._paths.pop(event.watch, None)
        if path is None:
            return
        if not path and event.mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED):
            if not self.is_over:
                yield self._change("remove", b"")
            self.is_over = True
            return
        if not event.name and path:
            return  # of a directory below: told by the one above
        path = os.path.join(path, event.name) if event.name else path
        is_directory = bool(event.mask & _IS_DIRECTORY)
        if event.mask & _MOVED_FROM:
            yield from self._moved(path, is_directory, arrival)
            return
        kind = "create" if event.mask & _MOVED_TO else next((_KINDS[bit] for bit in _KINDS if event.mask & bit), None)
        if kind is None:
            return
        yield self._change(kind, path)
        if kind == "create" and is_directory and self._is_recursive:
            yield from self._enter_new(path)

    def _moved(self, path: bytes, is_directory: bool, arrival: _Event | None) -> Iterator[FileChange]:
        above = None if arrival is None else self._paths.get(arrival.watch)
        if arrival is None or above is None:  # to a place that is not watched
            yield self._change("remove", path)
            if is_directory:
                self._forget(path)
            return
        target = os.path.join(above, arrival.name)
        yield self._change("rename", path, target)
        if is_directory:
            for watch, each in list(self._paths.items()):
                if each == path or each.startswith(path + b"/"):
                    self._paths[watch] = target + each[len(path) :]
            if self._is_recursive:  # it may have got the name before it was looked for under the old one
                yield from self._enter_new(target)

    def _forget(self, path: bytes) -> None:
        for watch, each in list(self._paths.items()):
            if each == path or each.startswith(path + b"/"):
                del self._paths[watch]
                with suppress(OSError):
                    self._kernel.inotify_rm_watch(self._queue_fd, watch)

    def _enter_new(self, path: bytes) -> Iterator[FileChange]:
        """Watch a directory that has appeared, and all below; yield what is in it."""
        try:
            above_fd = self._open_below(os.path.dirname(path))
        except OSError:  # gone, or not for the user
            return
        try:
            is_new = self._add_below(above_fd, os.path.basename(path), path)
        finally:
            os.close(above_fd)
        for each in self._enter(path, is_new=is_new):
            yield self._change("create", each)

    def _enter(self, path: bytes, *, is_new: bool) -> Iterator[bytes]:
        """Watch the directories below one that is watched, since now if it `is_new`; yield the paths of the files in
        directories that were not watched before."""
        new = {path} if is_new else set()
        try:
            fd = self._open_below(path)
        except OSError:
            return
        try:
            for found in Walk(fd, passes_denied=True, real=os.path.join(self._real, path)):
                if found.is_left:
                    continue
                below = os.path.join(path, found.path)
                if stat.S_ISDIR(found.status.st_mode) and self._add_below(found.parent_fd, found.name, below):
                    new.add(below)
                if os.path.dirname(below) in new:
                    yield below
        finally:
            os.close(fd)

    @contextmanager
    def _opened_top(self) -> Iterator[int]:
        """Open the top where it was found. An open descriptor would keep the kernel from telling its removal.

        Raises:
            OSError: something else, or nothing, is there.
        """
        try:
            fd, _ = self._resolver.open_existing(self._real)
        except Refused as refused:
            raise FileNotFoundError(errno.ENOENT, refused.error.message) from None
        try:
            if not os.path.samestat(os.fstat(fd), self._top):
                raise FileNotFoundError(errno.ENOENT, "something else is there")
            yield fd
        finally:
            os.close(fd)

    def _open_below(self, path: bytes) -> int:
        """Return a descriptor, the caller's, of a directory below the top. Raises OSError."""
        with self._opened_top() as fd:
            return self._kernel.openat2(fd, path or b".", _DIRECTORY, 0, _WITHIN)

    def _add_below(self, parent_fd: int, name: bytes, path: bytes) -> bool:
        """Watch a directory, unless it is gone or not for the user; return whether it was not watched before. Raises
        `_Full`."""
        if len(self._paths) >= MAX_DIRECTORIES:
            raise _Full
        try:
            return self._add(b"/proc/self/fd/%d/%s" % (parent_fd, name), path, _BELOW)
        except OSError as error:
            if error.errno in _FULL:
                raise _Full from None
            return False

    def _add(self, place: bytes, path: bytes, mask: int) -> bool:
        watch = self._kernel.inotify_add_watch(self._queue_fd, place, mask)
        is_new = watch not in self._paths
        self._paths[watch] = path
        return is_new

    def _change(self, kind: ChangeKind, path: bytes, target: bytes | None = None) -> FileChange:
        to = "" if target is None else os.fsdecode(os.path.join(self._real, target))
        return FileChange(kind, os.fsdecode(os.path.join(self._real, path) if path else self._real), to)
