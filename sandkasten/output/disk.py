"""Files in which the runs of each session lie: framed records that are only ever appended. Everything here blocks, and
is for worker threads, unless it says otherwise.

A session has files `<session>.<number>.runs` in `<data_dir>/spool/`, one of them open. What a file holds:

- `ids `: digests of used ids, all of them, or with a mark that some are missing;
- `run `: facts and state of a run; a later record of the same run replaces an earlier one;
- `out `: consecutive pieces of output of one run;
- `gone`: a run that is not kept any more; `none`: a run that was refused, whose id is free again;
- `all `: the end of a statement.

A new file begins with a statement: every used id and every known run. So all older files are needed only for the output
in them. A file is removed once no part of its output is needed and a younger one has its statement whole. A file that a
killed daemon left ends at most in an unfinished record, on which nobody relied: PID 1 had not been told to forget the
run, and no older file had been removed. Any other damage is told, and nothing behind it in its file is read. The bytes
of output are only read, and checked, when somebody asks for them.

Nothing is synced: a killed daemon loses nothing by that, and after a crash of the machine there are no runs.

Sources: write(2), open(2) (O_NOFOLLOW, O_APPEND, O_EXCL), ftruncate(2), pread(2), unlink(2) (a link is removed, not
followed; a directory is refused), zlib crc32.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import attrs

from sandkasten.model import SESSION_ID, Output, Stream
from sandkasten.model.run import is_made
from sandkasten.output.records import (
    BadRecord,
    RunFacts,
    RunState,
    Span,
    UsedIds,
    facts_from_json,
    facts_to_json,
    state_from_json,
    state_to_json,
)

FILE_BYTES: Final = 1024 * 1024
"""Bytes in one file, about, and at least four times its statement; a store with room for many files has larger ones."""

_NAME: Final = re.compile(r"([0-9a-f]+)\.([0-9a-f]{8})\.runs")
_MAX_NAME: Final = 400

_IDS, _RUN, _OUTPUT, _GONE, _REFUSED, _ALL = b"ids ", b"run ", b"out ", b"gone", b"none", b"all "
_TAG_BYTES: Final = 4
_HEADER: Final = struct.Struct("<IIIII")
"""Checksum of the rest of the header; lengths of the two parts of a record; checksum of each."""
_SEED: Final = 0x4E55_5233
_MAX_PART_BYTES: Final = 64 * 1024 * 1024

_PIECE: Final = struct.Struct("<BI")
"""Before every piece: its stream, its length in bytes."""
PIECE_HEADER_BYTES: Final = _PIECE.size
_STREAMS: Final = tuple(Stream)
_NUMBERS: Final = {stream: number for number, stream in enumerate(_STREAMS)}


# Records ------------------------------------------------------------------------------------------------------------


class CutShort(BadRecord):
    """A file that ends within a record, as a kill of its writer leaves it."""


def _record(head: bytes, body: bytes = b"") -> Sequence[bytes]:
    rest = len(head), len(body), zlib.crc32(head), zlib.crc32(body)
    return _HEADER.pack(_header_check(*rest), *rest), head, body


def _header_check(*rest: int) -> int:
    return zlib.crc32(_HEADER.pack(0, *rest), _SEED)


def _read_header(data: bytes) -> tuple[int, int, int, int]:
    if len(data) < _HEADER.size:
        raise CutShort("the end of a header is missing")
    check, *rest = _HEADER.unpack(data)
    head_bytes, body_bytes, head_check, body_check = rest
    if check != _header_check(*rest) or max(head_bytes, body_bytes) > _MAX_PART_BYTES:
        raise BadRecord("no record begins here")
    return head_bytes, body_bytes, head_check, body_check


def _read_part(stream: BinaryIO, size_bytes: int, check: int) -> bytes:
    part = stream.read(size_bytes)
    if len(part) != size_bytes:
        raise CutShort("the end of a record is missing")
    if zlib.crc32(part) != check:
        raise BadRecord("a record is not what was written")
    return part


def pack(pieces: Iterable[Output]) -> bytes:
    """Return pieces as they lie in a file. The packed form of two lists is that of both in a row. Does not block."""
    parts: list[bytes] = []
    for piece in pieces:
        parts += (_PIECE.pack(_NUMBERS[piece.stream], len(piece.data)), piece.data)
    return b"".join(parts)


def unpack(data: bytes, first_sequence: int) -> list[Output]:
    """Return the pieces that `pack` was given. Raises `BadRecord`. Does not block."""
    pieces: list[Output] = []
    at = 0
    while at < len(data):
        if len(data) - at < _PIECE.size:
            raise BadRecord("a piece is cut short")
        number, length = _PIECE.unpack_from(data, at)
        start, at = at + _PIECE.size, at + _PIECE.size + length
        if number >= len(_STREAMS) or at > len(data):
            raise BadRecord("no piece begins here")
        pieces.append(Output(_STREAMS[number], data[start:at], first_sequence + len(pieces)))
    return pieces


# Files of one session -----------------------------------------------------------------------------------------------


class DataFile:
    """One file. `live_parts`, counted by the event loop, are the parts of output in the file that are still needed."""

    __slots__ = ("live_parts", "owner", "path", "size_bytes")

    def __init__(self, owner: SessionFiles, path: Path, size_bytes: int = 0) -> None:
        self.owner = owner
        self.path = path
        self.size_bytes = size_bytes
        self.live_parts = 0


@attrs.frozen
class RecordPlace:
    """Where a record of output lies: from which byte of which file on, and how many bytes."""

    file: DataFile
    offset: int
    length: int

    def read(self) -> bytes:
        """Return the packed pieces. Raises `OSError`, `BadRecord`."""
        with open(self.file.path, "rb", buffering=0, opener=_open) as stream:
            stream.seek(self.offset)
            head_bytes, body_bytes, _, body_check = _read_header(_read_all(stream, _HEADER.size))
            if _HEADER.size + head_bytes + body_bytes != self.length:
                raise BadRecord("another record lies there")
            stream.seek(head_bytes, os.SEEK_CUR)
            body = _read_all(stream, body_bytes)
        if zlib.crc32(body) != body_check:
            raise BadRecord("a record is not what was written")
        return body


@attrs.frozen
class Tail:
    """Output of a run that is to be written, packed or not."""

    exec_id: str
    span: Span
    content: bytes | Sequence[Output] = attrs.field(repr=False)

    @property
    def size_bytes(self) -> int:
        return self.span.size_bytes


@attrs.frozen
class News:
    """Records to append. With `statement`, the encoded set of used ids, `runs` are all known runs and begin a file."""

    refused: Sequence[str] = ()
    runs: Sequence[tuple[RunFacts | bytes, RunState]] = ()
    tails: Sequence[Tail] = ()
    gone: Sequence[str] = ()
    statement: bytes | None = None


@attrs.define
class WrittenRun:
    """A run as it was written down, with the last part of its output that has no gap."""

    facts: RunFacts
    state: RunState
    parts: list[tuple[Span, RecordPlace]] = attrs.field(factory=list)


@attrs.define
class Written:
    """All that earlier daemons wrote down of one session. `gone` are ids of runs that were not kept any more; `used` is
    not whole if a record may be missing. A file that was cut short is not counted as damaged."""

    runs: dict[str, WrittenRun] = attrs.field(factory=dict)
    gone: dict[str, None] = attrs.field(factory=dict)
    used: UsedIds = attrs.field(factory=UsedIds)
    damaged_files: int = 0

    def drop(self, exec_id: str) -> None:
        """The run is not kept any more."""
        self.runs.pop(exec_id, None)
        self.gone[exec_id] = None
        if not is_made(exec_id):
            self.used.add(exec_id)


class OutputDiskUse:
    """Counter of the bytes that the files of all sessions take. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used_bytes = 0

    def count(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes += size_bytes


class SessionFiles:
    """The files of one session, oldest first. Calls take turns; `discard` may come at any moment."""

    def __init__(self, root: Path, session_id: str, use: OutputDiskUse, *, file_bytes: int = 0) -> None:
        self._root = root
        self._file_bytes = file_bytes or FILE_BYTES
        self.session_id = session_id
        self._use = use
        self._lock = threading.Lock()
        self._files: list[DataFile] = []
        self._number = 0
        self._stated_bytes = 0
        self._is_open = False
        self._is_kept = False
        self.is_discarded = False

    # Nothing in this part blocks

    @property
    def needs_statement(self) -> bool:
        """Whether the next write begins a file, and so has to bring all known runs."""
        return not self._is_open or self._files[-1].size_bytes >= max(self._file_bytes, 4 * self._stated_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    @property
    def slack_bytes(self) -> int:
        """Bytes that the files may take beside the output that is needed."""
        return 2 * max(self._file_bytes, 4 * self._stated_bytes)

    @property
    def is_empty(self) -> bool:
        return not self._files

    @property
    def first(self) -> DataFile | None:
        """The oldest file, which may be the newest as well."""
        return self._files[0] if self._files else None

    def is_stated_behind(self, file: DataFile) -> bool:
        """Whether a younger file than this one begins with a statement of this daemon's."""
        return self._is_open and file is not self._files[-1]

    @property
    def oldest(self) -> DataFile | None:
        """The oldest file that is not written to any more."""
        return self._files[0] if len(self._files) > 1 else None

    def found(self, name: str, number: int, size_bytes: int) -> None:
        """An earlier daemon left this file; files are told in the order of their numbers."""
        self._files.append(DataFile(self, self._root / name, size_bytes))
        self._number = number
        self._use.count(size_bytes)

    def keep(self) -> None:
        """Remove no file for want of need: the next daemon needs them. `discard` still removes them."""
        self._is_kept = True

    # For worker threads

    def write(self, news: News) -> Sequence[RecordPlace]:
        """Append records, and return where each of the tails lies.

        Raises:
            OSError: the disk did not take all of them, and now has none of them. The next write begins a file.
        """
        data, places = _encode(news)
        with self._lock:
            if self.is_discarded:
                return ()
            if news.statement is None and not self._is_open:
                raise OSError(errno.EAGAIN, "an earlier write failed meanwhile")
            file = self._begin() if news.statement is not None else self._files[-1]
            start = file.size_bytes
            self._is_open = False
            try:
                self._append(file, data)
            except OSError:
                if news.statement is not None:
                    self._files.remove(file)
                raise
            self._is_open = True
            if news.statement is not None:
                self._stated_bytes = file.size_bytes - sum(length for _, length in places)
            return [RecordPlace(file, start + offset, length) for offset, length in places]

    def read(self) -> Written:
        """Return everything that was written down; what can't be read is left out."""
        written = Written()
        with self._lock:
            self._is_open = self._is_kept = False
            for file in self._files:
                file.live_parts = 0
                _read_into(written, file)
        return written

    def remove_unneeded(self) -> None:
        """Remove the files whose output nobody needs, but for the newest. No file is, as long as none has a statement
        of this daemon's; no file but those of an ended session may go then."""
        with self._lock:
            if self.is_discarded or (self._is_open and not self._is_kept):
                kept = 0 if self.is_discarded else 1
                for file in self._files[: len(self._files) - kept]:
                    if not file.live_parts:
                        self._files.remove(file)
                        _unlink(file)
                        self._use.count(-file.size_bytes)

    def discard(self) -> None:
        """The session has ended: nothing more is written, and a file stays only while a reader needs output in it."""
        with self._lock:
            self.is_discarded = True
        self.remove_unneeded()

    def _begin(self) -> DataFile:
        self._number += 1
        self._files.append(DataFile(self, self._root / f"{self.session_id}.{self._number:08x}.runs"))
        return self._files[-1]

    def _append(self, file: DataFile, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(file.path, flags | (0 if file.size_bytes else os.O_CREAT | os.O_EXCL), 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            if file.size_bytes:
                os.ftruncate(fd, file.size_bytes)
            else:
                _unlink(file)
            raise
        finally:
            os.close(fd)
        file.size_bytes += len(data)
        self._use.count(len(data))


def _encode(news: News) -> tuple[bytes, Sequence[tuple[int, int]]]:
    """Return the bytes to append, and where in them each tail lies."""
    parts: list[bytes] = []
    places: list[tuple[int, int]] = []
    at = 0
    for is_tail, record in _records(news):
        length = sum(map(len, record))
        if is_tail:
            places.append((at, length))
        at += length
        parts += record
    return b"".join(parts), places


def _records(news: News) -> Iterator[tuple[bool, Sequence[bytes]]]:
    for exec_id in news.refused:
        yield False, _record(_REFUSED + exec_id.encode())
    if news.statement is not None:
        for start in range(0, len(news.statement), _MAX_PART_BYTES):
            yield False, _record(_IDS, news.statement[start : start + _MAX_PART_BYTES])
    for facts, state in news.runs:
        facts_json = facts if isinstance(facts, bytes) else facts_to_json(facts)
        yield False, _record(_RUN + facts_json, state_to_json(state))
    if news.statement is not None:
        yield False, _record(_ALL)
    for tail in news.tails:
        content = tail.content if isinstance(tail.content, bytes) else pack(tail.content)
        yield True, _record(_OUTPUT + tail.span.encode() + tail.exec_id.encode(), content)
    for exec_id in news.gone:
        yield False, _record(_GONE + exec_id.encode())


def _read_into(written: Written, file: DataFile) -> None:
    """Take over the records of a file, up to its end or the first that is damaged."""
    named: set[str] = set()
    try:
        with open(file.path, "rb", opener=_open) as stream:
            at, end = 0, os.fstat(stream.fileno()).st_size
            while header := stream.read(_HEADER.size):
                head_bytes, body_bytes, head_check, body_check = _read_header(header)
                head = _read_part(stream, head_bytes, head_check)
                place = RecordPlace(file, at, _HEADER.size + head_bytes + body_bytes)
                at += place.length
                if at > end:
                    raise CutShort("the end of a record is missing")
                if head.startswith(_OUTPUT):
                    stream.seek(body_bytes, os.SEEK_CUR)
                    _take_output(written, head[_TAG_BYTES:], place)
                else:
                    _take(written, named, head, _read_part(stream, body_bytes, body_check))
    except CutShort:
        pass  # a daemon that was killed as it wrote leaves such a file, and nobody relied on the last record
    except (OSError, BadRecord, ValueError, struct.error):
        written.damaged_files += 1
        written.used.is_whole = False


def _take(written: Written, named: set[str], head: bytes, body: bytes) -> None:
    tag, head = head[:_TAG_BYTES], head[_TAG_BYTES:]
    if tag == _RUN:
        facts, state = facts_from_json(head), state_from_json(body)
        known = written.runs.setdefault(facts.exec_id, WrittenRun(facts, state))
        known.facts, known.state = facts, state
        written.gone.pop(facts.exec_id, None)
        named.add(facts.exec_id)
    elif tag == _GONE:
        written.drop(head.decode("ascii"))
    elif tag == _REFUSED:
        written.runs.pop(head.decode("ascii"), None)
    elif tag == _IDS:
        written.used.merge(body)
    elif tag == _ALL:
        for exec_id in written.runs.keys() - named:
            written.drop(exec_id)
    else:
        raise BadRecord("a record of no known kind")


def _take_output(written: Written, head: bytes, place: RecordPlace) -> None:
    """Add a part to the output of its run. A part that is known was written twice; what lies before a gap is lost."""
    span, exec_id = Span.decode(head), head[Span.SIZE_BYTES :].decode("ascii")
    run = written.runs.get(exec_id)
    if run is None:
        return
    if run.parts:
        last = run.parts[-1][0]
        if span.next_sequence <= last.next_sequence:
            return
        while run.parts and run.parts[-1][0].first_sequence >= span.first_sequence:
            run.parts.pop()  # a write that its caller left alone; the next one wrote the same and more
        if run.parts and not run.parts[-1][0].precedes(span):
            run.parts.clear()
    run.parts.append((span, place))


def _open(path: str, flags: int) -> int:
    # O_NONBLOCK: a foreign FIFO of one of our names has no writer, and must not be waited for
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read_all(stream: BinaryIO, size_bytes: int) -> bytes:
    parts = []
    while size_bytes > 0:
        part = stream.read(size_bytes)
        if not part:
            raise CutShort("the file is too short")
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def _unlink(file: DataFile) -> None:
    with contextlib.suppress(OSError):
        file.path.unlink(missing_ok=True)


# The directory ------------------------------------------------------------------------------------------------------


@attrs.frozen
class SpoolFile:
    """One entry of the directory. `session_id`: whose runs are in the file; None if its name is none of ours."""

    name: str
    session_id: str | None = None


def find_files(root: Path, live: Collection[str], session: Callable[[str], SessionFiles]) -> None:
    """Make the directory (mode 0700) and tell each live session's files to it. Raises `OSError`.

    Files of other sessions, and what is no file of ours, are left to `reconcile.py`.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    with os.scandir(root) as entries:
        found = sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries)
    for name, size_bytes in found:
        match, session_id = _NAME.fullmatch(name), session_of(name)
        if match is not None and session_id is not None and session_id in live:
            session(session_id).found(name, int(match[2], 16), size_bytes)


def list_spool(root: Path) -> Sequence[SpoolFile]:
    """Return the entries of the directory, by name; nothing where there is no such directory. Raises `OSError`.

    A name is told in a form that can be printed and sent; it is only compared with what is found again and never
    becomes a path.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return ()
    return [SpoolFile(_shown(name), session_of(name)) for name in sorted(names)]


def remove_spool_files(root: Path, names: Collection[str]) -> Mapping[str, str]:
    """Remove files of these names; return why, for each that is left. Raises `OSError`: the directory can't be read."""
    refused = {}
    for name in os.listdir(root):
        if _shown(name) in names:
            try:
                os.unlink(root / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                refused[_shown(name)] = error.strerror or str(error)
    return refused


def session_of(name: str) -> str | None:
    """Return the session whose runs are in a file of that name. Does not block."""
    match = _NAME.fullmatch(name)
    return match[1] if match is not None and SESSION_ID.match(match[1]) else None


def _shown(name: str) -> str:
    """Return a name in printable form, whatever bytes the name has."""
    return os.fsencode(name).decode("ascii", "backslashreplace")[:_MAX_NAME]
