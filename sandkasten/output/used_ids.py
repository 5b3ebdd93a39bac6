"""Ids that clients chose and whose runs are not kept any more: a compact set of their digests, and the file it lies in.

Nothing is ever taken out. A digest has 64 bits: with a million of them, one new id in 18 million million is taken for
a used one and refused; a used one is always known. Not being able to read all of the file is a state of its own, since
then nobody knows which ids were used. Everything of `UsedIdsFile` blocks, and is for worker threads.

Sources: hashlib (BLAKE2, RFC 7693), bisect, array.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from sandkasten.output import record_file

DIGEST_BYTES: Final = 8
SUFFIX: Final = ".ids"
_BUCKET_SHIFT: Final = 52
"""The first 12 bits choose one of 4096 small sorted arrays: putting one more into it moves little."""
_ENTRY: Final = struct.Struct("<QI")
"""A digest and its checksum."""


class UsedIds:
    """The set. Takes 8 to 10 bytes for each of many, up to 200 while there are few."""

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._count = 0
        self.is_whole = True
        """Whether nothing that belongs here is missing."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, exec_id: str) -> bool:
        return self._has(digest_of(exec_id))

    def add(self, exec_id: str) -> int | None:
        """Put one in; return its digest if it was not there before."""
        digest = digest_of(exec_id)
        if self._has(digest):
            return None
        bucket = self._buckets.setdefault(digest >> _BUCKET_SHIFT, array("Q"))
        bucket.insert(bisect_left(bucket, digest), digest)
        self._count += 1
        return digest

    @classmethod
    def of(cls, digests: Iterable[int]) -> UsedIds:
        """Return a set of these, which may come more than once; much cheaper than one by one."""
        found: defaultdict[int, array[int]] = defaultdict(lambda: array("Q"))
        for digest in digests:
            found[digest >> _BUCKET_SHIFT].append(digest)
        used = cls()
        used._buckets = {place: array("Q", sorted(set(bucket))) for place, bucket in found.items()}
        used._count = sum(map(len, used._buckets.values()))
        return used

    def _has(self, digest: int) -> bool:
        bucket = self._buckets.get(digest >> _BUCKET_SHIFT)
        if bucket is None:
            return False
        place = bisect_left(bucket, digest)
        return place < len(bucket) and bucket[place] == digest


class UsedIdsFile:
    """The digests of one session, as they are written down for the next daemon."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = 0

    def found(self) -> None:
        """An earlier daemon left the file."""
        self.size_bytes = self._path.stat().st_size

    def append(self, digests: Collection[int]) -> int:
        """Add some; return by how much the file grew. Raises `OSError`: nothing was added."""
        grown = record_file.append(self._path, self.size_bytes, [b"".join(map(_entry, digests))])
        self.size_bytes += grown
        return grown

    def read(self) -> UsedIds:
        """Return what was written down. An entry that a killed daemon left unfinished is taken off."""
        try:
            content = _read(self._path) if self.size_bytes else b""
            self.size_bytes = len(content) // _ENTRY.size * _ENTRY.size
            if self.size_bytes < len(content):
                os.truncate(self._path, self.size_bytes)
        except OSError:
            used = UsedIds()
            used.is_whole = False
            return used
        entries = _ENTRY.iter_unpack(memoryview(content)[: self.size_bytes])
        sound = array("Q", (digest for digest, check in entries if check == _check(digest)))
        used = UsedIds.of(sound)
        used.is_whole = len(sound) == self.size_bytes // _ENTRY.size
        return used

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self.size_bytes = 0


def digest_of(exec_id: str) -> int:
    """Return what is remembered of an id."""
    return int.from_bytes(hashlib.blake2b(exec_id.encode(), digest_size=DIGEST_BYTES).digest(), "little")


def _entry(digest: int) -> bytes:
    return _ENTRY.pack(digest, _check(digest))


def _check(digest: int) -> int:
    return zlib.crc32(digest.to_bytes(DIGEST_BYTES, "little"))


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        return stream.read()
