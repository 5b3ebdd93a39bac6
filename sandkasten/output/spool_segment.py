"""The files of the spool: how pieces of output lie in them, and every call that touches the disk.

All functions block and run in worker threads only. Nothing here knows logs, budgets or trio. A file is written once,
never changed, and means nothing without the index its daemon holds in memory, so none outlives that daemon. Names are
numbers: nothing that a client chose reaches the filesystem.

Sources: open(2) (`O_NOFOLLOW`, `O_EXCL`), pread(2).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from sandkasten.model import Output, Stream

SEGMENT_SUFFIX: Final = ".spool"
_RECORD: Final = struct.Struct("<BI")
"""Before every piece: its stream, its length in bytes."""

_STREAMS: Final = tuple(Stream)
_NUMBERS: Final = {stream: number for number, stream in enumerate(_STREAMS)}


class SegmentDamaged(Exception):
    """A file does not hold what was written to it."""


class Segment:
    """One file. It is in the way of nobody once no block of it is live, and is then removed."""

    __slots__ = ("live_blocks", "path", "size_bytes")

    def __init__(self, path: Path, size_bytes: int, live_blocks: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.live_blocks = live_blocks


def prepare_directory(root: Path) -> int:
    """Make the spool's directory (mode 0700), remove the files that an earlier daemon left in it, return how many."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    return clear_directory(root)


def clear_directory(root: Path) -> int:
    """Remove the spool's files from its directory, and no others; return how many."""
    with os.scandir(root) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.endswith(SEGMENT_SUFFIX)]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def segment_path(root: Path, number: int) -> Path:
    """Return the name of the `number`th file of this daemon."""
    return root / f"{number:016x}{SEGMENT_SUFFIX}"


def pack(pieces: Sequence[Output]) -> bytes:
    """Return pieces as they lie in a file."""
    parts: list[bytes] = []
    for piece in pieces:
        parts.append(_RECORD.pack(_NUMBERS[piece.stream], len(piece.data)))
        parts.append(piece.data)
    return b"".join(parts)


def unpack(data: bytes, first_sequence: int) -> list[Output]:
    """Return the pieces that `pack` was given. Raises `SegmentDamaged`."""
    pieces: list[Output] = []
    at, size = 0, len(data)
    while at < size:
        start = at + _RECORD.size
        if start > size:
            raise SegmentDamaged("a record is cut")
        number, length = _RECORD.unpack_from(data, at)
        at = start + length
        if number >= len(_STREAMS) or at > size:
            raise SegmentDamaged("a record is none of ours")
        pieces.append(Output(_STREAMS[number], data[start:at], first_sequence + len(pieces)))
    return pieces


def write_segment(path: Path, blocks: Sequence[Sequence[Output] | bytes]) -> Sequence[int]:
    """Write some blocks, packed or not, to a new file and return how many bytes each takes.

    Raises:
        OSError: the disk is full or broken; nothing is left of the file.
    """
    parts = [block if isinstance(block, bytes) else pack(block) for block in blocks]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), part)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return [len(part) for part in parts]


def read_block(path: Path, position: int, length: int, first_sequence: int) -> list[Output]:
    """Return the pieces that lie in `length` bytes from `position` on.

    Raises:
        OSError: the file can't be read.
        SegmentDamaged: it is not what was written.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        data = _read_all(fd, position, length)
    finally:
        os.close(fd)
    return unpack(data, first_sequence)


def remove_segments(segments: Iterable[Segment]) -> int:
    """Remove files and return how many bytes that freed. One that can't be removed is skipped."""
    freed = 0
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.path.unlink(missing_ok=True)
            freed += segment.size_bytes
    return freed


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, position: int, length: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(fd, length, position)
        if not part:
            raise SegmentDamaged("the file is too short")
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)
