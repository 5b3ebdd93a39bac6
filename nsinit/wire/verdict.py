"""The unpacker's verdict on an archive: one byte, then numbers of fixed size and names, or the reason of a refusal.

The sender has read a hostile archive. So there is little to parse: `read` takes numbers within bounds, names that are
used only beneath the unpacked directory and through no link, and printable text, and no more of each than was asked
for.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

MAX_OPAQUE = 100_000
"""Directories of a layer that hide what is below them."""
MAX_NAMES_BYTES = 4 << 20
"""Bytes of all names in a verdict: opaque directories, and files whose setuid or setgid bit was dropped."""
MAX_VERDICT_BYTES = MAX_NAMES_BYTES + 1024
MAX_TEXT = 500
"""Characters of a sentence that are kept."""

_UNPACKED, _REFUSED, _FAILED = b"+", b"-", b"!"
_COUNTS = struct.Struct("=5Q32s")
_ERRNO = struct.Struct("=i")
_DIED = "the process that works on it died"


class ArchiveRefused(Exception):
    """The archive can't be unpacked; the message is for the person who brought the archive. `member`: the name of the
    member at fault, empty without one."""

    def __init__(self, reason: str, member: str = "") -> None:
        super().__init__(f"{member[:200]!r}: {reason}" if member else reason)
        self.reason, self.member = reason, member


class Counts(NamedTuple):
    """The counts of an unpacked archive; see `protocol.LayerUnpacked`."""

    entries: int
    size_bytes: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive that was unpacked. `digest`: SHA-256 of the tar stream, in hex. `opaque`: directories, relative.
    `privileged`: mode in octal, a blank and the name of each file whose setuid or setgid bit was dropped."""

    counts: Counts
    digest: str
    opaque: tuple[bytes, ...] = ()
    privileged: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes that the unpacker sends."""
        numbers = *self.counts, len(self.opaque), len(self.privileged), bytes.fromhex(self.digest)
        return _UNPACKED + _COUNTS.pack(*numbers) + b"".join(name + b"\0" for name in (*self.opaque, *self.privileged))


def refused(error: ArchiveRefused) -> bytes:
    """Return the verdict on an archive that was refused."""
    return _REFUSED + b"\0".join(each.encode("utf-8", "replace")[:1000] for each in (error.reason, error.member))


def failed(number: int) -> bytes:
    """Return the verdict where the machine is at fault, with an errno."""
    return _FAILED + _ERRNO.pack(number)


def read(data: bytes, *, max_entries: int, max_bytes: int) -> Unpacked:
    """Return what was unpacked.

    Raises:
        ArchiveRefused: with the verdict's reason, or with the fault of the verdict.
        OSError: the machine was at fault.
    """
    kind, rest = data[:1], data[1:]
    if kind == _REFUSED:
        reason, _, member = rest.partition(b"\0")
        raise ArchiveRefused(_printable(reason), _printable(member))
    if kind == _FAILED and len(rest) == _ERRNO.size:
        (number,) = _ERRNO.unpack(rest)
        raise OSError(number, os.strerror(number))
    if kind != _UNPACKED or len(rest) < _COUNTS.size:
        raise ArchiveRefused(_DIED)
    *numbers, digest = _COUNTS.unpack_from(rest)
    counts, (opaque, privileged) = Counts(*numbers[:3]), numbers[3:]
    names = rest[_COUNTS.size :].split(b"\0")
    is_bounded = counts.entries <= max_entries and counts.size_bytes <= max_bytes and opaque <= MAX_OPAQUE
    if not is_bounded or len(names) != opaque + privileged + 1 or names.pop():
        raise ArchiveRefused("the process that works on it can't have done what it says")
    return Unpacked(counts, digest.hex(), tuple(names[:opaque]), tuple(names[opaque:]))


def _printable(text: bytes) -> str:
    return "".join(each if each.isprintable() else "?" for each in text.decode("utf-8", "replace")[:MAX_TEXT])
