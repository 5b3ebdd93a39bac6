"""The unpacker's verdict on an archive: one byte, then numbers of fixed size or a sentence.

The sender has read a hostile archive. So there is nothing to parse: `read` takes numbers within bounds and printable
text, and no more of either than was asked for.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_VERDICT_BYTES = 4096
MAX_TEXT = 500
"""Characters of a sentence that are kept."""

_UNPACKED, _REFUSED = b"+", b"-"
_COUNTS = struct.Struct("=4Q")


class ArchiveRefused(Exception):
    """The archive can't be unpacked; the message is for the person who brought the archive."""


class Counts(NamedTuple):
    """The counts of an unpacked archive; see `protocol.Unpacked`."""

    members: int
    size_bytes: int
    skipped: int
    privileged: int


def unpacked(counts: Counts) -> bytes:
    """Return the verdict on an archive that was unpacked."""
    return _UNPACKED + _COUNTS.pack(*counts)


def refused(sentence: str) -> bytes:
    """Return the verdict on an archive that was refused."""
    return (_REFUSED + sentence.encode("utf-8", "replace"))[:MAX_VERDICT_BYTES]


def read(data: bytes, *, max_members: int, max_bytes: int) -> Counts:
    """Return the counts. Raises `ArchiveRefused` with the verdict's sentence, or with the fault of the verdict."""
    kind, rest = data[:1], data[1:]
    if kind == _REFUSED:
        text = rest.decode("utf-8", "replace")[:MAX_TEXT]
        raise ArchiveRefused("".join(each if each.isprintable() else "?" for each in text))
    if kind != _UNPACKED or len(rest) != _COUNTS.size:
        raise ArchiveRefused("the process that unpacks it died")
    counts = Counts._make(_COUNTS.unpack(rest))
    others = max(counts.skipped, counts.privileged)
    if not (0 < counts.members <= max_members and counts.size_bytes <= max_bytes and others <= counts.members):
        raise ArchiveRefused("the process that unpacks it can't have done what it says")
    return counts
