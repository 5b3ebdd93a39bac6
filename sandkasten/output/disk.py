"""Files in which the runs of each session lie: framed records that are only ever appended. Everything here blocks, and
is for worker threads, unless it says otherwise.

A session has two kinds of files in `<data_dir>/spool/`, numbered in the order in which they were begun. The newest of
each kind is open.

Files `<session>.<number>.runs` hold records:

- `ids `: digests of used ids, all of them, or with a mark that some are missing;
- `run `: facts and state of a run; a later record of the same run replaces an earlier one;
- `gone`: a run that is not kept any more; `none`: a run that was refused, whose id is free again;
- `all `: the end of a statement.

Such a file begins with a statement: every used id and every known run. So all older ones are removed once the
statement is whole. Files `<session>.<number>.out` hold nothing but `out `: consecutive pieces of output of one run.
Such a file is removed once no part of it is needed.

A write brings output first, then the records: a kill between both leaves output that the next one writes again. A file
that a killed daemon left ends at most in an unfinished record, on which nobody relied: PID 1 had not been told to
forget the run, and no older file had been removed. Any other damage is told, and nothing behind it in its file is read.
The bytes of output are only read, and checked, when somebody asks for them.

Nothing is synced: a killed daemon loses nothing by that, and after a crash of the machine there are no runs.

Sources: writev(2), open(2) (O_NOFOLLOW, O_APPEND, O_EXCL), ftruncate(2), pread(2), unlink(2) (a link is removed, not
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
"""About the size of a file; one of records may be four times as large as its statement, and one of output larger for a
session that may keep much (`SessionFiles.out_file_bytes`)."""

_MOST_FILE_BYTES: Final = 8 * 1024 * 1024
_FILES_PER_SESSION: Final = 8

_NAME: Final = re.compile(r"([0-9a-f]+)\.([0-9a-f]{8})\.(runs|out)")
_MAX_NAME: Final = 400

_IDS, _RUN, _OUTPUT, _GONE, _REFUSED, _ALL = b"ids ", b"run ", b"out ", b"gone", b"none", b"all "
_TAG_BYTES: Final = 4
_HEADER: Final = struct.Struct("<IIIII")
"""Checksum of the rest of the header; lengths of the two parts of a record; checksum of each."""
_SEED: Final = 0x4E55_5233
_MAX_PART_BYTES: Final = 64 * 1024 * 1024
_MAX_PARTS: Final = os.sysconf("SC_IOV_MAX")

_PIECE: Final = struct.Struct("<BI")
"""Before every piece: its stream, its length in bytes."""
PIECE_HEADER_BYTES: Final = _PIECE.size
_STREAMS: Final = tuple(Stream)
_NUMBERS: Final = {stream: number for number, stream in enumerate(_STREAMS)}


# Records ------------------------------------------------------------------------------------------------------------


class CutShort(BadRecord):
    """A file that ends within a record."""


def _record(head: bytes, *body: bytes) -> Sequence[bytes]:
    """Return the parts of a record, of which large ones are not copied."""
    body_check = 0
    for part in body:
        body_check = zlib.crc32(part, body_check)
    rest = len(head), sum(map(len, body)), zlib.crc32(head), body_check
    return _HEADER.pack(_header_check(*rest), *rest), head, *body


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
    return b"".join(_packed(pieces))


def _packed(pieces: Iterable[Output]) -> Iterator[bytes]:
    for piece in pieces:
        yield _PIECE.pack(_NUMBERS[piece.stream], len(piece.data))
        yield piece.data


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
    """One file. `live_parts`, counted by the event loop, are the parts of output in the file that are still needed;
    `is_given_up`: they go all the same."""

    __slots__ = ("is_given_up", "is_output", "live_parts", "owner", "path", "size_bytes")

    def __init__(self, owner: SessionFiles, path: Path, size_bytes: int = 0) -> None:
        self.owner = owner
        self.path = path
        self.size_bytes = size_bytes
        self.is_output = path.suffix == ".out"
        self.live_parts = 0
        self.is_given_up = False


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
    """Records and output to append. With `statement`, the encoded set of used ids, `runs` are all known runs, and
    both begin a file of records."""

    refused: Sequence[str] = ()
    runs: Sequence[tuple[RunFacts | bytes, RunState]] = ()
    tails: Sequence[Tail] = ()
    gone: Sequence[str] = ()
    statement: bytes | None = None
    number: int = 0
    """Place in the order in which the event loop decided on the writes of a session."""


@attrs.define
class WrittenRun:
    """A run as it was written down, with the last part of its output that has no gap."""

    facts: RunFacts
    state: RunState
    parts: list[tuple[Span, RecordPlace]] = attrs.field(factory=list)


@attrs.define
class Written:
    """All that earlier daemons wrote down of one session. `gone` are ids of runs that were not kept any more; `used` is
    not whole if a record may be missing. `damaged_files` does not count files that a kill cut short."""

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
    """Counters of the bytes that the files of all sessions take. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.record_bytes = 0
        self.output_bytes = 0

    def count(self, file: DataFile, size_bytes: int) -> None:
        with self._lock:
            if file.is_output:
                self.output_bytes += size_bytes
            else:
                self.record_bytes += size_bytes


class SessionFiles:
    """The files of one session, oldest first. Calls take turns; `discard` may come at any moment."""

    def __init__(self, root: Path, session_id: str, use: OutputDiskUse, *, limit_bytes: int = 0) -> None:
        """`limit_bytes` of output may be kept. It goes file by file, so a file takes a small part of it; but
        to make and remove a file costs the file system (ext4) some 0.7 ms."""
        self._root = root
        self.out_file_bytes = max(FILE_BYTES, min(_MOST_FILE_BYTES, limit_bytes // _FILES_PER_SESSION))
        self.session_id = session_id
        self._use = use
        self._lock = threading.Lock()
        self._records: list[DataFile] = []
        self._outputs: list[DataFile] = []
        self._number = 0
        self._numbers_taken = self._last_news = 0
        self._stated_bytes = 0
        self._is_stated = False
        """Whether the newest file of records begins with a statement of this daemon's, and the last write succeeded."""
        self._is_filling = False
        """Whether the newest file of output is this daemon's and takes more."""
        self._is_counted = True
        """Whether `live_parts` counts all parts that are needed; not before an earlier daemon's runs have logs."""
        self._is_kept = False
        self.is_discarded = False

    # Nothing in this part blocks

    @property
    def needs_statement(self) -> bool:
        """Whether the next write begins a file of records, and so has to bring all known runs."""
        return not self._is_stated or self._records[-1].size_bytes >= max(FILE_BYTES, 4 * self._stated_bytes)

    @property
    def has_old_records(self) -> bool:
        """Whether there are files of records before the newest."""
        return len(self._records) > 1

    @property
    def output_bytes(self) -> int:
        """The size of the files of output."""
        return sum(file.size_bytes for file in self._outputs)

    @property
    def is_empty(self) -> bool:
        return not (self._records or self._outputs)

    @property
    def oldest_output(self) -> DataFile | None:
        """The oldest file of output, which may be the newest as well."""
        return self._outputs[0] if self._outputs else None

    def found(self, name: str, size_bytes: int) -> None:
        """An earlier daemon left this file; files of a kind are told in the order of their numbers."""
        file = DataFile(self, self._root / name, size_bytes)
        (self._outputs if file.is_output else self._records).append(file)
        self._number = max(self._number, int(name.split(".")[1], 16))
        self._is_counted = False
        self._use.count(file, size_bytes)

    def note_counted(self) -> None:
        """All parts of output that are needed are in `live_parts` from now on."""
        self._is_counted = True

    def take_number(self) -> int:
        """Return the number of the next write."""
        self._numbers_taken += 1
        return self._numbers_taken

    def keep(self) -> None:
        """Remove no file for want of need: the next daemon needs them. `discard` still removes them."""
        self._is_kept = True

    # For worker threads

    def write(self, news: News) -> Sequence[RecordPlace]:
        """Append records and output, and return where each of the tails lies.

        Raises:
            OSError: the disk did not take all of them, and now has none of them. The next write begins a file.
        """
        records = [part for record in _records(news) for part in record]
        output, spans = _encode(news.tails)
        with self._lock:
            if self.is_discarded:
                return ()
            if news.number < self._last_news:  # its caller was cancelled and a later write has told all of it
                raise OSError(errno.EAGAIN, "a later write came first")
            if news.statement is None and not self._is_stated:
                raise OSError(errno.EAGAIN, "an earlier write failed meanwhile")
            self._last_news = news.number
            out_file = self._outputs[-1] if self._is_filling else None
            if output and (out_file is None or out_file.size_bytes >= self.out_file_bytes):
                out_file = self._begin("out")
            file = self._records[-1] if news.statement is None else self._begin("runs")
            start = 0 if out_file is None else out_file.size_bytes
            self._is_stated = self._is_filling = False
            self._append([(out_file, output), (file, records)])
            if out_file is not None:
                if not start:
                    self._outputs.append(out_file)
                self._is_filling = True
            if news.statement is not None:
                self._records.append(file)
                self._stated_bytes = file.size_bytes
            self._is_stated = True
            return [] if out_file is None else [RecordPlace(out_file, start + at, length) for at, length in spans]

    def read(self) -> Written:
        """Return everything that was written down; what can't be read is left out."""
        written = Written()
        with self._lock:
            self._is_stated = self._is_filling = self._is_counted = self._is_kept = False
            self._last_news = self._numbers_taken + 1  # a write that was left alone comes too late
            for file in self._records:
                _read_into(written, file)
            for file in self._outputs:
                file.live_parts = 0
                _read_into(written, file, is_output=True)
        return written

    def remove_unneeded(self) -> None:
        """Remove files of records that are older than a statement of this daemon's, and files of output that nobody
        needs. The one that is being filled stays: a part that was just written is not counted yet."""
        with self._lock:
            if self._is_kept and not self.is_discarded:
                return
            if self.is_discarded:
                self._remove(self._records, list(self._records))
            elif self._is_stated:
                self._remove(self._records, self._records[:-1])
            if self.is_discarded or self._is_counted:
                filling = self._outputs[-1:] if self._is_filling else []
                self._remove(
                    self._outputs, [file for file in self._outputs if not file.live_parts and file not in filling]
                )

    def give_up(self, file: DataFile) -> None:
        """Remove a file of output, also while a reader needs it; unless the next daemon does."""
        with self._lock:
            if file in self._outputs and not self._is_kept:
                self._is_filling = self._is_filling and file is not self._outputs[-1]
                file.is_given_up = True
                self._remove(self._outputs, [file])

    def discard(self) -> None:
        """The session has ended: nothing more is written, and a file stays only while a reader needs output in it."""
        with self._lock:
            self.is_discarded = True
            self._is_stated = self._is_filling = False
        self.remove_unneeded()

    def _begin(self, kind: str) -> DataFile:
        self._number += 1
        return DataFile(self, self._root / f"{self.session_id}.{self._number:08x}.{kind}")

    def _append(self, additions: Iterable[tuple[DataFile | None, Sequence[bytes]]]) -> None:
        """Append to all of these files, or to none."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        opened: list[tuple[DataFile, int, int]] = []
        with contextlib.ExitStack() as stack:
            try:
                for file, parts in additions:
                    if file is not None and parts:
                        fd = os.open(file.path, flags | (0 if file.size_bytes else os.O_CREAT | os.O_EXCL), 0o600)
                        stack.callback(os.close, fd)
                        opened.append((file, fd, sum(map(len, parts))))
                        _write_all(fd, parts)
            except OSError:
                for file, fd, _ in opened:
                    with contextlib.suppress(OSError):  # each file is put back, whatever becomes of the other
                        os.ftruncate(fd, file.size_bytes)
                    if not file.size_bytes:
                        _unlink(file)
                raise
        for file, _, length in opened:
            file.size_bytes += length
            self._use.count(file, length)

    def _remove(self, files: list[DataFile], unneeded: Iterable[DataFile]) -> None:
        for file in unneeded:
            files.remove(file)
            _unlink(file)
            self._use.count(file, -file.size_bytes)


def _write_all(fd: int, parts: Iterable[bytes]) -> None:
    views = [memoryview(part) for part in parts]
    done = 0
    while done < len(views):
        count = os.writev(fd, views[done : done + _MAX_PARTS])
        while done < len(views) and count >= len(views[done]):
            count -= len(views[done])
            done += 1
        if count:
            views[done] = views[done][count:]


def _encode(tails: Iterable[Tail]) -> tuple[Sequence[bytes], Sequence[tuple[int, int]]]:
    """Return the parts to append, and at which of their bytes each tail begins, and how many it takes."""
    parts: list[bytes] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for tail in tails:
        content = (tail.content,) if isinstance(tail.content, bytes) else _packed(tail.content)
        record = _record(_OUTPUT + tail.span.encode() + tail.exec_id.encode(), *content)
        spans.append((at, sum(map(len, record))))
        at += spans[-1][1]
        parts += record
    return parts, spans


def _records(news: News) -> Iterator[Sequence[bytes]]:
    for exec_id in news.refused:
        yield _record(_REFUSED + exec_id.encode())
    if news.statement is not None:
        for start in range(0, len(news.statement), _MAX_PART_BYTES):
            yield _record(_IDS, news.statement[start : start + _MAX_PART_BYTES])
    for facts, state in news.runs:
        facts_json = facts if isinstance(facts, bytes) else facts_to_json(facts)
        yield _record(_RUN + facts_json, state_to_json(state))
    if news.statement is not None:
        yield _record(_ALL)
    for exec_id in news.gone:
        yield _record(_GONE + exec_id.encode())


def _read_into(written: Written, file: DataFile, *, is_output: bool = False) -> None:
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
                if is_output:
                    stream.seek(body_bytes, os.SEEK_CUR)
                    _take_output(written, head, place)
                else:
                    _take(written, named, head, _read_part(stream, body_bytes, body_check))
    except CutShort:
        return  # by a kill; see above
    except (OSError, BadRecord, ValueError, struct.error):
        written.damaged_files += 1
        if not is_output:
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
    if not head.startswith(_OUTPUT):
        raise BadRecord("a record of no known kind")
    head = head[_TAG_BYTES:]
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
class OutputFile:
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
        session_id = session_of(name)
        if session_id is not None and session_id in live:
            session(session_id).found(name, size_bytes)


def list_output_files(root: Path) -> Sequence[OutputFile]:
    """Return the entries of the directory, by name; nothing where there is no such directory. Raises `OSError`.

    A name is told in a form that can be printed and sent; it is only compared with what is found again and never
    becomes a path.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return ()
    return [OutputFile(_shown(name), session_of(name)) for name in sorted(names)]


def remove_output_files(root: Path, names: Collection[str]) -> Mapping[str, str]:
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
