"""Files by a pattern of their paths, and lines of files by the text they hold. Work of a file worker; may block.

Both walk in the order of the names, follow no link, and end after a time: a glob with the place where it can go on, a
search with what it has found. A regular expression may take for ever on a few bytes, so an alarm interrupts it
(CPython's matcher looks at signals as it goes).

Sources: Python library reference, `re`, `fnmatch`, `signal.setitimer`.
"""

from __future__ import annotations

import fnmatch
import os
import re
import signal
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedWriter, RawIOBase
from itertools import islice

from runner.files.paths import Resolver, directory_of, open_regular
from runner.files.tree import CLOCK_EVERY, JSON_BYTES, PAGE_BYTES, READ, OrderedWalk
from runner.loop.context import Refused
from runner.wire.protocol import (
    ANSWERS,
    MAX_CONTEXT,
    MAX_MATCHES,
    MAX_SEARCHED_BYTES,
    FileMatch,
    FoundFiles,
    GlobFiles,
    Searched,
    SearchFiles,
)

MAX_FOUND = 1000
MAX_LINE_BYTES = 1000
"""Most of a line that is sent. A message of a match then fits into one frame, whatever its bytes are."""
_MAX_ALTERNATIVES = 64
_GLOB_S = 10.0
_LEAD_BYTES = 100
"""Of a long line, the bytes before the match that are sent."""
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_OUT_BYTES = 64 * 1024

# Patterns of paths ----------------------------------------------------------------------------------------------------

_Part = re.Pattern[str] | None
"""A pattern of one name; None for any number of directories."""


class Pattern:
    """A pattern of paths. In one name `*`, `?` and `[…]` stand for characters, those of a leading dot, too; a name `**`
    stands for any number of directories, at the end for at least one name; `{a,b}` for either text.

    Raises:
        Refused: BAD_REQUEST.
    """

    def __init__(self, text: str) -> None:
        self._rows = [_parts_of(each) for each in _alternatives(text)]

    def matches(self, path: bytes) -> bool:
        """Return whether a path below the top fits."""
        names = os.fsdecode(path).split("/")
        return any(len(row) in _reached(row, names) for row in self._rows)

    def may_hold(self, directory: bytes) -> bool:
        """Return whether a path in a directory, or further below, may fit."""
        names = os.fsdecode(directory).split("/")
        return any(min(_reached(row, names), default=len(row)) < len(row) for row in self._rows)


def _alternatives(text: str) -> list[str]:
    """Return the patterns without braces that one with braces stands for."""
    found, left = [], [text]
    while left:
        each = left.pop()
        braces = _BRACES.search(each)
        if braces is None:
            found.append(each)
            continue
        left += [each[: braces.start()] + option + each[braces.end() :] for option in braces[1].split(",")]
        if len(found) + len(left) > _MAX_ALTERNATIVES:
            raise Refused("BAD_REQUEST", f"the pattern has more than {_MAX_ALTERNATIVES} alternatives")
    return found


def _parts_of(pattern: str) -> list[_Part]:
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if not names or pattern.startswith("/") or ".." in names or "\0" in pattern:
        raise Refused("BAD_REQUEST", f"no pattern of paths below a directory: {pattern[:200]}")
    if names[-1] == "**":
        names.append("*")
    return [None if name == "**" else re.compile(fnmatch.translate(name)) for name in names]


def _reached(row: list[_Part], names: list[str]) -> set[int]:
    """Return the places in a pattern that are reached behind the names, each the index of the next part."""
    places = _passed(row, {0})
    for name in names:
        stepped = set()
        for place in places:
            if place < len(row):
                part = row[place]
                if part is None:
                    stepped.add(place)
                elif part.match(name):
                    stepped.add(place + 1)
        places = _passed(row, stepped)
    return places


def _passed(row: list[_Part], places: set[int]) -> set[int]:
    """Return the places with those behind parts that may stand for nothing."""
    for place in sorted(places):
        while place < len(row) and row[place] is None:
            place += 1
            places.add(place)
    return places


def glob(request: GlobFiles, resolver: Resolver) -> FoundFiles:
    """Return the paths that a pattern fits.

    Raises:
        Refused
    """
    pattern = Pattern(request.pattern)
    limit = min(max(request.limit, 1), MAX_FOUND)
    give_up_at = time.monotonic() + _GLOB_S
    found: list[str] = []
    room = PAGE_BYTES
    with directory_of(request.path, resolver) as (fd, real):
        walk = OrderedWalk(real, enters=pattern.may_hold).below(fd, after=os.fsencode(request.after))
        last = request.after
        for count, (path, _, _) in enumerate(walk, 1):
            if pattern.matches(path):
                room -= JSON_BYTES * len(path)
                if len(found) == limit or (room < 0 and found):
                    return FoundFiles(os.fsdecode(real), tuple(found), last)
                found.append(os.fsdecode(path))
            last = os.fsdecode(path)
            if count % CLOCK_EVERY == 0 and time.monotonic() > give_up_at:
                return FoundFiles(os.fsdecode(real), tuple(found), last)
    return FoundFiles(os.fsdecode(real), tuple(found), "")


# Lines of files -------------------------------------------------------------------------------------------------------


class _TimeUp(Exception):
    """Raised in a search whose time is over."""


class _Alarm:
    """Raises `_TimeUp` in a block after a time; within `held` at its end, so that what is sent is sent whole."""

    def __init__(self) -> None:
        self._is_held = self._has_rung = False

    @contextmanager
    def after(self, span_s: float) -> Iterator[None]:
        handler = signal.signal(signal.SIGALRM, self._ring)
        timer = signal.setitimer(signal.ITIMER_REAL, span_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._has_rung:
            raise _TimeUp

    def _ring(self, _signal: int, _frame: object) -> None:
        self._has_rung = True
        if not self._is_held:
            raise _TimeUp


def search(request: SearchFiles, resolver: Resolver, raw: RawIOBase) -> Searched:
    """Send the lines that hold a text, and return how many there are.

    Raises:
        Refused
    """
    with BufferedWriter(raw, _OUT_BYTES) as out:
        alarm = _Alarm()
        work = _Search(request, out, alarm)
        is_over = False
        try:
            with alarm.after(request.max_ms / 1000):
                work.compile()
                is_over = work.run(resolver)
        except _TimeUp:
            return work.result(truncated=False, timed_out=True)
        return work.result(truncated=not is_over, timed_out=False)


class _Search:
    """One search; its counts are those of `Searched`."""

    def __init__(self, request: SearchFiles, out: BufferedIOBase, alarm: _Alarm) -> None:
        self._request, self._out, self._alarm = request, out, alarm
        self._limit = min(max(request.max_matches, 1), MAX_MATCHES)
        self._context = min(max(request.context, 0), MAX_CONTEXT)
        self._file_bytes = min(max(request.max_file_bytes, 1), MAX_SEARCHED_BYTES)
        self._matches = self._files = self._searched = self._skipped = 0
        self._glob: Pattern | None = None
        self._regex = re.compile(b"")

    def compile(self) -> None:
        """Make the patterns. Raises `Refused`: BAD_REQUEST."""
        request = self._request
        if request.glob:
            self._glob = Pattern(request.glob if "/" in request.glob else f"**/{request.glob}")
        text = os.fsencode(request.pattern)
        flags = re.MULTILINE if request.case else re.MULTILINE | re.IGNORECASE
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that a later Python may read differently
                self._regex = re.compile(text if request.regex else re.escape(text), flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise Refused("BAD_REQUEST", f"no regular expression: {str(error)[:200]}") from None

    def run(self, resolver: Resolver) -> bool:
        """Search the files; return whether all matches were sent. Raises `Refused`, `_TimeUp`."""
        try:
            with directory_of(self._request.path, resolver) as (fd, real):
                return all(self._take_file(*each, real) for each in OrderedWalk(real, enters=self._enters).below(fd))
        except Refused as refused:
            if refused.error.code != "NOT_A_DIRECTORY":
                raise
        file_fd, real = open_regular(self._request.path, resolver)
        return self._take(file_fd, real)

    def result(self, *, truncated: bool, timed_out: bool) -> Searched:
        """Return the answer: the counts so far, and why the search ended early, if so."""
        return Searched(self._matches, self._files, self._searched, self._skipped, truncated, timed_out)

    def _enters(self, path: bytes) -> bool:
        is_wanted = self._request.everything or os.path.basename(path) != b".git"
        return is_wanted and (self._glob is None or self._glob.may_hold(path))

    def _take_file(self, path: bytes, parent_fd: int, name: bytes, real: bytes) -> bool:
        """Search one file; as `run`. One that is not regular holds no text."""
        if self._glob is not None and not self._glob.matches(path):
            return True
        try:
            if not stat.S_ISREG(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
                return True
            fd = os.open(name, READ, dir_fd=parent_fd)
        except FileNotFoundError:
            return True
        except OSError:  # of a file that the user may not read, or one that is no file any more
            self._skipped += 1
            return True
        return self._take(fd, os.path.join(real, path))

    def _take(self, fd: int, path: bytes) -> bool:
        """Search an open file, which is closed."""
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return True
            content = file.read(status.st_size) if status.st_size <= self._file_bytes else None
        if content is None or (b"\0" in content and not self._request.everything):
            self._skipped += 1
            return True
        self._searched += 1
        is_first = True
        for found in _lines(content, self._regex):
            if self._matches == self._limit:
                return False
            message = ANSWERS.encode(self._match(os.fsdecode(path), content, *found)) + b"\n"
            with self._alarm.held():
                self._out.write(message)
                self._matches += 1
            self._files += is_first
            is_first = False
        if not is_first:
            with self._alarm.held():
                self._out.flush()
        return True

    def _match(self, path: str, content: bytes, line: int, begin: int, match: int, end: int) -> FileMatch:
        is_cut = end - begin > MAX_LINE_BYTES
        first = max(begin, match - _LEAD_BYTES) if is_cut else begin
        column = len(content[begin:match].decode("utf-8", "replace")) + 1
        before = list(islice(_lines_before(content, begin), self._context))
        after = list(islice(_lines_after(content, end), self._context))
        return FileMatch(path, line, column, _text(content, first, end), tuple(before[::-1]), tuple(after), is_cut)


def _lines(content: bytes, regex: re.Pattern[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each line in which a match begins: its number, its begin, the first match's begin, and its end."""
    line, counted, place = 1, 0, 0
    while place < len(content) and (found := regex.search(content, place)):
        match = found.start()
        begin = content.rfind(b"\n", 0, match) + 1
        if begin == len(content):  # behind the last line
            return
        end = content.find(b"\n", match)
        end = len(content) if end < 0 else end
        line += content.count(b"\n", counted, begin)
        yield line, begin, match, end
        counted, place = begin, end + 1


def _lines_before(content: bytes, begin: int) -> Iterator[str]:
    while begin > 0:
        end = begin - 1
        begin = content.rfind(b"\n", 0, end) + 1
        yield _text(content, begin, end)


def _lines_after(content: bytes, end: int) -> Iterator[str]:
    while end + 1 < len(content):
        begin = end + 1
        found = content.find(b"\n", begin)
        end = len(content) if found < 0 else found
        yield _text(content, begin, end)


def _text(content: bytes, begin: int, end: int) -> str:
    return content[begin : min(end, begin + MAX_LINE_BYTES)].removesuffix(b"\r").decode("utf-8", "replace")
