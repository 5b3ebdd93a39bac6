"""The files in which the runs of each session are written down for the next daemon. Every function that touches the
disk blocks, and is for worker threads.

Records are appended and never changed: what a run is and what became of it, pieces of its output, and that it is gone.
A new file begins with all that is known, and says so: an older one is only needed for the output in it; the oldest go
when a session or all together take too much. A record is checked before anything in it is used. Behind one that is
damaged or was cut short nothing of its file is, and of a run's output what follows without a gap to its last piece.

Which ids clients chose for runs that are gone lies in a file of its own (`used_ids.py`), which stays as long as the
session. It is written first: no run leaves these files before its id is in that one.

Nothing is synced: a killed daemon loses nothing by that, and a machine that went down has no runs to be found.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from sandkasten.config import MIB, Runs
from sandkasten.model import SESSION_ID, Output, Stream
from sandkasten.output import record_file
from sandkasten.output.record_file import CutShort, record
from sandkasten.output.run_records import (
    BadRecord,
    RunFacts,
    RunState,
    facts_from_json,
    state_from_json,
    state_to_json,
)
from sandkasten.output.spool_segment import SegmentDamaged, pack, unpack
from sandkasten.output.used_ids import SUFFIX as IDS_SUFFIX
from sandkasten.output.used_ids import UsedIds, UsedIdsFile

FILE_BYTES: Final = 8 * 1024 * 1024
"""About as much goes into one file."""

_SUFFIX: Final = ".runs"
RUNS_NAME: Final = re.compile(r"([0-9a-f]+)(?:\.([0-9a-f]{8})\.runs|\.ids)")
"""Session and number of a file; without a number the one of its used ids."""
_LARGE_BYTES: Final = 64 * 1024

_RUN, _OUTPUT, _GONE, _REFUSED, _ALL = b"run ", b"out ", b"gone", b"none", b"all "
"""What a record is: a run, a part of its output, a run that is gone, one that never was; and that no others than those
named in the file so far are known."""
_TAG_BYTES: Final = 4
_OUTPUT_HEAD: Final = struct.Struct("<QQQQQQ")


@attrs.frozen
class RunNews:
    """What to write of one run: `facts` (as JSON) and `state` if they changed, and the pieces that follow what was
    written."""

    exec_id: str
    facts: bytes | None = None
    state: RunState | None = None
    stdout_offset: int = 0
    stderr_offset: int = 0
    pieces: Sequence[Output] = ()

    @property
    def has_ended(self) -> bool:
        return self.state is not None and self.state.end is not None

    @property
    def output_bytes(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)


@attrs.frozen
class Chunk:
    """Consecutive pieces of output, packed: from which to behind which number, and the same of each stream's bytes."""

    first_sequence: int
    next_sequence: int
    stdout_start: int
    stdout_end: int
    stderr_start: int
    stderr_end: int
    packed: bytes = attrs.field(repr=False)

    @classmethod
    def of(cls, place: tuple[int, ...], packed: bytes) -> Chunk:
        first, behind, stdout_start, stdout_end, stderr_start, stderr_end = place
        return cls(first, behind, stdout_start, stdout_end, stderr_start, stderr_end, packed)

    def is_before(self, other: Chunk) -> bool:
        """Whether the other one follows without a gap."""
        ours = (self.next_sequence, self.stdout_end, self.stderr_end)
        return ours == (other.first_sequence, other.stdout_start, other.stderr_start)

    def pieces(self) -> Sequence[Output]:
        """Raises `BadRecord`."""
        try:
            return unpack(self.packed, self.first_sequence)
        except SegmentDamaged as error:
            raise BadRecord(str(error)) from None


@attrs.define
class WrittenRun:
    """A run as it was written down."""

    facts: RunFacts
    state: RunState
    chunks: list[Chunk] = attrs.field(factory=list)


@attrs.define
class Written:
    """All that was written down of one session. `gone` are ids of runs that were not kept any more, `used` those of
    them, and of all before, that clients chose; it is not whole if any file was damaged."""

    runs: dict[str, WrittenRun] = attrs.field(factory=dict)
    gone: dict[str, None] = attrs.field(factory=dict)
    used: UsedIds = attrs.field(factory=UsedIds)
    damaged_files: int = 0


@attrs.define
class _File:
    path: Path
    size_bytes: int = 0
    stated_bytes: int = 0
    """How much of it says what was known when it was begun."""
    outputs: set[str] = attrs.field(factory=set)
    """Runs that have output in it and are not gone."""


class RunArchive:
    """The files of all sessions, which lie side by side in one directory of the daemon's."""

    def __init__(self, root: Path, *, session_bytes: int, total_bytes: int) -> None:
        self._root = root
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._sessions: dict[str, SessionArchive] = {}
        self.used_bytes = 0

    @classmethod
    def configured(cls, root: Path, runs: Runs) -> RunArchive:
        """Return one with the limits of the configuration."""
        return cls(root, session_bytes=runs.keep_mb * MIB, total_bytes=runs.spool_disk_mb * MIB)

    def open(self, live: Collection[str]) -> None:
        """Find what an earlier daemon left of the live sessions; the rest is for `reconcile.py`. Raises `OSError`."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.scandir(self._root) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith((_SUFFIX, IDS_SUFFIX)))
        for name in names:
            found = RUNS_NAME.fullmatch(name)
            if found is None or found[1] not in live or not SESSION_ID.match(found[1]):
                continue
            session = self.session(found[1])
            if found[2] is None:
                session.found_ids()
            else:
                session.found(self._root / name, int(found[2], 16))

    def session(self, session_id: str) -> SessionArchive:
        """Return the files of one session; blocks for nothing."""
        with self._lock:
            if session_id not in self._sessions:
                self._sessions[session_id] = SessionArchive(self, self._root, session_id, self._session_bytes)
            return self._sessions[session_id]

    def forget(self, session_id: str) -> None:
        """The session has ended and its files are gone."""
        with self._lock:
            self._sessions.pop(session_id, None)

    def count(self, size_bytes: int) -> None:
        """So much more is on disk, or less."""
        with self._lock:
            self.used_bytes += size_bytes

    @property
    def is_full(self) -> bool:
        return self.used_bytes > self._total_bytes


class SessionArchive:
    """The files of one session: one writer, in threads, one call at a time; `discard` may come at any moment."""

    def __init__(self, archive: RunArchive, root: Path, session_id: str, limit_bytes: int) -> None:
        self._archive = archive
        self._root = root
        self._session_id = session_id
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._ids = UsedIdsFile(root / f"{session_id}{IDS_SUFFIX}")
        self._number = 0
        self._is_open = False
        self._is_read = True
        """Whether it is known what is in the files."""
        self._is_discarded = False

    @property
    def wants_all(self) -> bool:
        """Whether the next write begins a file, and so has to bring all known runs."""
        if not self._is_open:
            return True
        return self._files[-1].size_bytes >= max(FILE_BYTES, 2 * self._files[-1].stated_bytes)

    def found(self, path: Path, number: int) -> None:
        """An earlier daemon left this file."""
        size_bytes = path.stat().st_size
        self._files.append(_File(path, size_bytes))
        self._is_read = False
        self._number = max(self._number, number)
        self._archive.count(size_bytes)

    def found_ids(self) -> None:
        """An earlier daemon left the file of used ids."""
        self._ids.found()
        self._archive.count(self._ids.size_bytes)

    def read(self) -> Written:
        """Return what earlier daemons wrote down. What can't be read is left out."""
        before_bytes = self._ids.size_bytes
        written = Written(used=self._ids.read())
        self._archive.count(self._ids.size_bytes - before_bytes)
        for file in self._files:
            _read_into(written, file)
        self._is_read = True
        for run in written.runs.values():
            run.chunks = _gapless(run.chunks)
        return written

    def write(
        self,
        news: Sequence[RunNews],
        gone: Sequence[str],
        *,
        refused: Sequence[str] = (),
        used: Collection[int] = (),
        is_all: bool,
    ) -> None:
        """Append records; with `is_all`, all known runs, to a new file. `refused` never were, and may have been begun
        anew since; `used` are the digests of ids that clients chose and that are gone.

        Raises:
            OSError: the disk did not take it; what was written of it is taken back, but for `used`, which may be
                written twice, and the next write begins a file.
        """
        parts = _merged(_encode(news, gone, refused, is_all=is_all))
        with self._lock:
            if self._is_discarded:
                return
            if used:
                self._archive.count(self._ids.append(used))
            if is_all or not self._is_open:
                self._number += 1
                path = self._root / f"{self._session_id}.{self._number:08x}{_SUFFIX}"
                self._files.append(_File(path))
            self._is_open = False
            self._append(self._files[-1], parts)
            if is_all:
                self._files[-1].stated_bytes = sum(map(len, parts)) - sum(each.output_bytes for each in news)
            self._is_open = True
            self._files[-1].outputs.update(each.exec_id for each in news if each.pieces)
            for file in self._files:
                file.outputs.difference_update(gone, refused)
            self._drop_unneeded()

    def discard(self) -> None:
        """The session has ended: remove its files, now and for good."""
        with self._lock:
            self._is_discarded = True
            for file in self._files:
                self._remove(file)
            self._files.clear()
            self._archive.count(-self._ids.size_bytes)
            self._ids.remove()
        self._archive.forget(self._session_id)

    def _append(self, file: _File, parts: Sequence[bytes]) -> None:
        grown = record_file.append(file.path, file.size_bytes, parts)
        file.size_bytes += grown
        self._archive.count(grown)

    def _drop_unneeded(self) -> None:
        older = self._files[:-1]
        used_bytes = sum(file.size_bytes for file in self._files)
        for file in older:
            is_empty = self._is_read and not file.outputs
            if is_empty or used_bytes > self._limit_bytes or self._archive.is_full:
                used_bytes -= file.size_bytes
                self._remove(file)
                self._files.remove(file)

    def _remove(self, file: _File) -> None:
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
        self._archive.count(-file.size_bytes)


def _encode(news: Sequence[RunNews], gone: Sequence[str], refused: Sequence[str], *, is_all: bool) -> Iterator[bytes]:
    for exec_id in refused:
        yield from record(_REFUSED + exec_id.encode(), b"")
    for each in news:
        if each.facts is not None and each.state is not None:
            yield from record(_RUN + each.facts, state_to_json(each.state))
        if each.pieces:
            yield from record(_OUTPUT + _place(each) + each.exec_id.encode(), pack(each.pieces))
    for exec_id in gone:
        yield from record(_GONE + exec_id.encode(), b"")
    if is_all:
        yield from record(_ALL, b"")


def _place(news: RunNews) -> bytes:
    sizes = dict.fromkeys(Stream, 0)
    for piece in news.pieces:
        sizes[piece.stream] += len(piece.data)
    first, last = news.pieces[0].sequence, news.pieces[-1].sequence
    ends = news.stdout_offset + sizes[Stream.STDOUT], news.stderr_offset + sizes[Stream.STDERR]
    return _OUTPUT_HEAD.pack(first, last + 1, news.stdout_offset, ends[0], news.stderr_offset, ends[1])


def _merged(parts: Iterable[bytes]) -> Sequence[bytes]:
    """Return the same bytes in fewer parts, the large ones as they are."""
    merged: list[bytes] = []
    small: list[bytes] = []
    for part in parts:
        if len(part) < _LARGE_BYTES:
            small.append(part)
        else:
            merged += (b"".join(small), part)
            small = []
    return [*merged, b"".join(small)]


def _read_into(written: Written, file: _File) -> None:
    """Take over the records of a file, up to its end or the first that is damaged. One that was never finished was
    relied on by nobody: PID 1 was not told to forget what was in it, and no older file was removed."""
    named: set[str] = set()
    try:
        for head, body in record_file.read_records(file.path):
            _take(written, file, named, head, body)
    except CutShort:
        written.damaged_files += 1
    except (OSError, BadRecord, struct.error):
        written.damaged_files += 1
        written.used.is_whole = False


def _take(written: Written, file: _File, named: set[str], head: bytes, body: bytes) -> None:
    tag, head = head[:_TAG_BYTES], head[_TAG_BYTES:]
    if tag == _RUN:
        facts, state = facts_from_json(head), state_from_json(body)
        known = written.runs.setdefault(facts.exec_id, WrittenRun(facts, state))
        known.facts, known.state = facts, state
        written.gone.pop(facts.exec_id, None)
        named.add(facts.exec_id)
    elif tag == _OUTPUT:
        exec_id = head[_OUTPUT_HEAD.size :].decode("ascii", "replace")
        run = written.runs.get(exec_id)
        if run is not None:
            run.chunks.append(Chunk.of(_OUTPUT_HEAD.unpack_from(head), body))
            file.outputs.add(exec_id)
    elif tag == _GONE:
        _drop(written, head.decode("ascii", "replace"))
    elif tag == _REFUSED:
        written.runs.pop(head.decode("ascii", "replace"), None)
    elif tag == _ALL:
        for exec_id in written.runs.keys() - named:
            _drop(written, exec_id)


def _drop(written: Written, exec_id: str) -> None:
    written.runs.pop(exec_id, None)
    written.gone[exec_id] = None


def _gapless(chunks: list[Chunk]) -> list[Chunk]:
    """Return the last chunks, as many as follow each other without a gap."""
    first = len(chunks)
    while first > 0 and (first == len(chunks) or chunks[first - 1].is_before(chunks[first])):
        first -= 1
    return chunks[first:]
