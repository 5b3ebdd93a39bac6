"""Archives of images: what kind a file is, and where in it an image's documents and layers are.

`docker save`, and the tar of an OCI image layout, have whole layers as members, beside documents that name them. Such
an outer archive is never unpacked: its headers say where each member's bytes are, and a member is read under the name
that a document of the archive has for it. No file system sees these names, so a member called `../x` does no harm.

The reader has no root. Headers are read here and not by `tarfile`, which takes extended headers, and maps of holes, of
any size into memory: here a header is 512 bytes, or a bounded record. Blocking: call it from a thread.
Sources: pax(1), "ustar Interchange Format", "pax Header Block"; tar(5), "GNU tar Archives"; the OCI image specification
(image-layout.md); Docker's image specification 1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import contextlib
import enum
import gzip
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Protocol

import attrs
from backports import zstd

from sandkasten.errors import InvalidImage, TooLarge
from sandkasten.images.registry.blobs import write_at

MAX_MEMBERS = 10_000
"""Members of an outer archive: 127 layers have some hundred."""
_BLOCK = tarfile.BLOCKSIZE
_MAX_RECORD_BYTES = 64 << 10
_MAX_NAME_CHARS = 4096
_MAX_DIGITS = 16
_PIECE_BYTES = 1 << 20
_CHECK_EVERY_BYTES = 64 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_OCI, _DOCKER = frozenset({"oci-layout", "index.json"}), frozenset({"manifest.json"})
_TOP = """
bin boot dev etc home lib lib32 lib64 libx32 media mnt opt proc root run sbin srv sys tmp usr var
"""
_ROOTS = frozenset(_TOP.split())
"""The directories of a root file system (hier(7)): an archive that has one is no archive of layers."""
_DECODER_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, zstd.ZstdError)
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ArchiveKind(enum.Enum):
    """Forms of archives that have images."""

    OCI = enum.auto()
    DOCKER = enum.auto()


@attrs.frozen
class MemberBytes:
    """The bytes of a member, as a part of an open file."""

    fd: int
    start: int
    size: int

    def read(self, at: int, size: int) -> bytes:
        """Return at most `size` bytes from offset `at` in the part. Raises `InvalidImage`: the file ends before the
        part does."""
        data = os.pread(self.fd, min(size, self.size - at), self.start + at)
        if not data and at < self.size:
            raise InvalidImage("the archive ends before its end")
        return data

    def read_all(self, most: int, what: str) -> bytes:
        """Return all bytes. Raises `TooLarge` for more than `most`; `what` names the part in the error."""
        if self.size > most:
            raise TooLarge(f"{what} has {self.size} bytes", limit=most)
        data = b""
        while len(data) < self.size:
            data += self.read(len(data), self.size)
        return data


class ImageArchive(Protocol):
    """The members of an archive of images, read in place whatever its layout."""

    @property
    def kind(self) -> ArchiveKind: ...

    def opened(self, name: str) -> contextlib.AbstractContextManager[MemberBytes]:
        """Open a member for as long as the context. Raises `InvalidImage`: there is none of that name."""
        ...


@attrs.frozen
class OuterTar:
    """An outer tar: the bytes of each member, or the name that a link leads to."""

    kind: ArchiveKind
    members: Mapping[str, MemberBytes | str]

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[MemberBytes]:
        """See `ImageArchive`. One link is followed, within the archive: `docker save` wrote such for a layer that is
        there twice."""
        found = self.members.get(_plain(name))
        if isinstance(found, str):
            found = self.members.get(found)
        if not isinstance(found, MemberBytes):
            raise InvalidImage(f"the archive has no file {name[:200]!r}")
        yield found


@attrs.frozen
class LayoutDirectory:
    """An OCI image layout that is a directory, open as `fd`; no link in it is followed."""

    fd: int
    kind: ArchiveKind = ArchiveKind.OCI

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[MemberBytes]:
        """See `ImageArchive`. A name is `index.json`, or made of a digest."""
        fds = [self.fd]
        try:
            *above, last = name.split("/")
            try:
                for part in above:
                    fds.append(os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=fds[-1]))
                fds.append(os.open(last, _OPEN, dir_fd=fds[-1]))
            except OSError as error:
                raise InvalidImage(f"{name} can't be read in the directory: {error.strerror}") from error
            found = os.fstat(fds[-1])
            if not stat.S_ISREG(found.st_mode):
                raise InvalidImage(f"{name} is no file in the directory")
            yield MemberBytes(fds[-1], 0, found.st_size)
        finally:
            for fd in fds[:0:-1]:
                os.close(fd)


def open_archive(
    fd: int, make_spool: Callable[[], IO[bytes]], max_bytes: int, check_room: Callable[[int], None]
) -> ImageArchive | None:
    """Return the archive of images that a directory or a seekable file is; None for any other file, such as the tar of
    a root file system, which the unpacker judges.

    A compressed outer tar (gzip or zstd) is decoded into a file of `make_spool`, which stays open for as long as the
    archive is used. `check_room` raises when the disk has no room for that many bytes.

    Raises:
        InvalidImage: the file is a broken archive of images.
        TooLarge: the archive has more than `max_bytes` uncompressed, or more than `MAX_MEMBERS` members.
        DiskReserve: by `check_room`.
        DiskFull.
    """
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        return LayoutDirectory(fd)
    head = os.pread(fd, len(_ZSTD), 0)
    if not head.startswith((_GZIP, _ZSTD)):
        return _walk(_PlainFile(fd))
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        decoder = gzip.GzipFile(fileobj=file) if head.startswith(_GZIP) else zstd.ZstdFile(file)
        with decoder:
            return _walk(_DecodedFile(decoder, make_spool(), max_bytes, check_room))


class _Decoder(Protocol):
    def read1(self, size: int, /) -> bytes: ...


class _TarBytes(Protocol):
    """The bytes of an outer tar by offset. A compressed tar is decoded as far as is asked for."""

    @property
    def fd(self) -> int: ...

    def read(self, at: int, size: int) -> bytes:
        """Return `size` bytes from offset `at`, fewer at the end. Raises `_BrokenTar`."""
        ...


@attrs.frozen
class _PlainFile:
    fd: int

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self.fd, size, at)


@attrs.define
class _DecodedFile:
    """A compressed tar, and the file that has its decoded beginning of `_size` bytes."""

    _source: _Decoder
    _spool: IO[bytes]
    _max_bytes: int
    _check_room: Callable[[int], None]
    _size: int = 0

    @property
    def fd(self) -> int:
        return self._spool.fileno()

    def read(self, at: int, size: int) -> bytes:
        while self._size < at + size and (piece := self._decoded()):
            if self._size + len(piece) > self._max_bytes:
                raise TooLarge(f"the archive has more than {self._max_bytes} bytes", limit=self._max_bytes)
            if self._size // _CHECK_EVERY_BYTES != (self._size + len(piece)) // _CHECK_EVERY_BYTES:
                self._check_room(_CHECK_EVERY_BYTES)
            write_at(self.fd, piece, self._size)
            self._size += len(piece)
        return os.pread(self.fd, size, at)

    def _decoded(self) -> bytes:
        try:
            return self._source.read1(_PIECE_BYTES)  # read() would lose what comes before a fault
        except _DECODER_ERRORS as error:
            raise _BrokenTar("the compressed data is broken, or ends before its end") from error


class _BrokenTar(Exception):
    """Bytes that are no tar."""


def _walk(source: _TarBytes) -> OuterTar | None:
    """Return the archive of images that a tar is; None if it is none."""
    members: dict[str, MemberBytes | str] = {}
    try:
        for count, (name, member) in enumerate(_members(source)):
            if name.partition("/")[0] in _ROOTS or (count == MAX_MEMBERS and _kind(members) is None):
                return None
            if count == MAX_MEMBERS:
                raise TooLarge("the archive has too many members", limit=MAX_MEMBERS)
            if member is not None and members.setdefault(name, member) is not member:
                raise InvalidImage(f"the archive has two members {name[:200]!r}")
    except _BrokenTar as error:
        if _kind(members) is None:
            return None
        raise InvalidImage(f"the archive is broken: {error}") from error
    kind = _kind(members)
    return None if kind is None else OuterTar(kind, members)


def _kind(members: Mapping[str, object]) -> ArchiveKind | None:
    if members.keys() >= _OCI:
        return ArchiveKind.OCI
    return ArchiveKind.DOCKER if members.keys() >= _DOCKER else None


def _members(source: _TarBytes) -> Iterator[tuple[str, MemberBytes | str | None]]:
    """Yield the name and the bytes of each file, the name and the target of each link, and the name and None for a
    member of another kind."""
    at = 0
    records: dict[str, str] = {}
    taken = 0  # bytes of headers before the member that they are about
    while True:
        block = source.read(at, _BLOCK)
        if len(block) == _BLOCK and not block.strip(b"\0"):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _BrokenTar(str(error)) from error
        at += _BLOCK
        if header.size < 0 or header.type == tarfile.GNUTYPE_SPARSE:
            raise _BrokenTar("a member has a size or a kind that no archive of images has")
        if header.type in _RECORDS:
            taken += _BLOCK + header.size
            if taken > _MAX_RECORD_BYTES:
                raise _BrokenTar("a header is too large")
            records |= _RECORDS[header.type](source.read(at, header.size))
            at += _whole(header.size)
            continue
        size = _number(records.get("size", str(header.size)))
        name, target = records.get("path", header.name), records.get("linkpath", header.linkname)
        member: MemberBytes | str | None = None
        if max(len(name), len(target)) > _MAX_NAME_CHARS:
            raise _BrokenTar("a name is too long")
        if header.issym():
            member = _plain(posixpath.join(posixpath.dirname(name), target))
        elif header.islnk():
            member = _plain(target)
        elif header.isreg() and not any(each.startswith("GNU.sparse.") for each in records):
            member = MemberBytes(source.fd, at, size)
        yield _plain(name), member
        # As tarfile has it: links, directories and devices have no content, whatever size they say.
        if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES:
            at += _whole(size)
        records, taken = {}, 0


def _pax(data: bytes) -> dict[str, str]:
    """Return the records of a pax header: `LENGTH KEY=VALUE` and a newline each."""
    found, at = {}, 0
    while at < len(data) and data[at]:
        length, blank, _ = data[at : at + 12].partition(b" ")
        end = at + _number(length.decode("ascii", "replace"))
        key, equals, value = data[at + len(length) + 1 : end - 1].partition(b"=")
        if not (blank and equals and end <= len(data)):
            raise _BrokenTar("an extended header is malformed")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at = end
    return found


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


_RECORDS: Mapping[bytes, Callable[[bytes], dict[str, str]]] = {
    tarfile.XHDTYPE: _pax,
    tarfile.SOLARIS_XHDTYPE: _pax,
    tarfile.XGLTYPE: lambda _: {},
    tarfile.GNUTYPE_LONGNAME: lambda data: {"path": _text(data)},
    tarfile.GNUTYPE_LONGLINK: lambda data: {"linkpath": _text(data)},
}
"""Readers of the headers that precede a member."""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
        raise _BrokenTar("a number is malformed")
    return int(text)


def _whole(size: int) -> int:
    """Return a size rounded up to whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _plain(name: str) -> str:
    """Return a name as it is looked up: from the top of the archive, without what means nothing in it."""
    return posixpath.normpath(name).lstrip("/")
