"""Files of checked records that are only ever appended to. Every function that touches the disk blocks.

A record has two parts, their lengths and a checksum; the lengths have one of their own. So what a killed writer left
unfinished at the end of a file differs from what was changed later: the one was never finished, the other was there and
is not known any more.

Sources: write(2), open(2) (O_NOFOLLOW, O_APPEND), ftruncate(2), zlib crc32.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from sandkasten.output.run_records import BadRecord

_HEADER: Final = struct.Struct("<IIII")
"""Checksum of the rest of the header; lengths of the two parts of a record; checksum of both parts."""
_SEED: Final = 0x4E55_5232
_UNCHECKED: Final = 0x4E55_5231
"""Stands in place of the header's checksum in what earlier versions wrote."""
_MAX_PART_BYTES: Final = 64 * 1024 * 1024


class CutShort(BadRecord):
    """The file ends within a record."""


def record(head: bytes, body: bytes = b"") -> Iterator[bytes]:
    """Yield the bytes of a record."""
    rest = len(head), len(body), _checksum(head, body)
    yield _HEADER.pack(_header_check(*rest), *rest)
    yield head
    yield body


def read_records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records of a file. Raises `BadRecord` or `OSError` at the first that can't be read."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        while header := stream.read(_HEADER.size):
            yield _parts(header, stream)


def append(path: Path, size_bytes: int, parts: Sequence[bytes]) -> int:
    """Append to a file of that size, which is made if that is 0; return how much.

    Raises:
        OSError: the disk did not take it; what was written of it is taken back.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags | (0 if size_bytes else os.O_CREAT | os.O_TRUNC), 0o600)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, size_bytes)
        raise
    finally:
        os.close(fd)
    return sum(map(len, parts))


def _parts(header: bytes, stream: BinaryIO) -> tuple[bytes, bytes]:
    if len(header) < _HEADER.size:
        raise CutShort("the end of a header is missing")
    check, head_bytes, body_bytes, checksum = _HEADER.unpack(header)
    is_ours = check in (_UNCHECKED, _header_check(head_bytes, body_bytes, checksum))
    if not is_ours or max(head_bytes, body_bytes) > _MAX_PART_BYTES:
        raise BadRecord("no record begins here")
    head, body = stream.read(head_bytes), stream.read(body_bytes)
    if (len(head), len(body)) != (head_bytes, body_bytes):
        raise CutShort("the end of a record is missing")
    if _checksum(head, body) != checksum:
        raise BadRecord("a record is not what was written")
    return head, body


def _checksum(head: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(head, len(head)))


def _header_check(head_bytes: int, body_bytes: int, checksum: int) -> int:
    return zlib.crc32(_HEADER.pack(0, head_bytes, body_bytes, checksum), _SEED)
