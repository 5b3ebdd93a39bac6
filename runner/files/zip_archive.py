"""A directory tree as a zip archive, and back. Runs in a file worker as the sandbox user; may block.

An archive is written as it is made: the sizes of a file follow its content (data descriptors), with the fields of ZIP64
where they are needed, and names are UTF-8. Links and names that are not UTF-8 are left out, and the archive's comment
counts them. Zip has times of local clocks in steps of two seconds; here they are UTC.

The table of an archive stands at its end, so one to unpack lies in a file without a name while it is. What is made of
it, and within which bounds, is the same as for tar: see `archive.py`.

Sources: PKWARE APPNOTE 6.3.10 §4.3.9, §4.4.4 (bits 3 and 11), §4.5.3; Python library reference, `zipfile`.
"""

from __future__ import annotations

import calendar
import encodings.cp437  # noqa: F401  # of names in old archives; nothing can be imported once PID 1 runs
import os
import stat
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from runner.files.archive import PERMISSIONS, Changed, TreeMaker, opened
from runner.files.contents import open_new, temporary_name
from runner.files.tree import TreeFile, Walk
from runner.loop.context import Refused
from runner.wire.protocol import CHUNK_BYTES, Packed

MAX_ENTRIES = 200_000
"""The table of an archive is kept in memory until its end."""
_UNIX = 3
_IS_DIRECTORY = 0x10
_IS_ENCRYPTED = 0x01
_LEVEL = 6
_FIRST_TIME, _LAST_TIME = 315_532_800, 4_354_819_198
"""Bounds of the times in an archive: the years 1980 to 2107."""


class _Sink:
    """Where an archive goes: no place to go back to."""

    def __init__(self, out: IO[bytes]) -> None:
        self.write, self.flush = out.write, out.flush


def pack(tree: Walk, out: IO[bytes]) -> Packed:
    """Write an archive of a tree."""
    entries = size = skipped = 0
    with zipfile.ZipFile(_Sink(out), "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:  # type: ignore[call-overload]  # typeshed wants more than zipfile
        for found in tree:
            if found.is_left:
                continue
            try:
                with opened(found) as (status, file):
                    member = _member_of(found, status)
                    if member is None:
                        skipped += 1
                        continue
                    entries += 1
                    size += _add(archive, member, file)
            except Changed:
                continue
        if skipped:
            archive.comment = b"left out: %d" % skipped
    return Packed(entries, size, skipped)


def _member_of(found: TreeFile, status: os.stat_result) -> zipfile.ZipInfo | None:
    is_directory = stat.S_ISDIR(status.st_mode)
    try:
        name = found.path.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return None
    moment = time.gmtime(min(max(int(status.st_mtime), _FIRST_TIME), _LAST_TIME))
    member = zipfile.ZipInfo(f"{name}/" if is_directory else name, moment[:6])
    member.create_system = _UNIX
    mode = stat.S_IFMT(status.st_mode) | stat.S_IMODE(status.st_mode) & PERMISSIONS
    member.external_attr = mode << 16 | (_IS_DIRECTORY if is_directory else 0)
    member.compress_type = zipfile.ZIP_STORED if is_directory else zipfile.ZIP_DEFLATED
    member.file_size = 0 if is_directory else status.st_size
    return member


def _add(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: IO[bytes]) -> int:
    """Write a member with as many bytes as the file had when it was looked at, or has now, and return the number."""
    if member.is_dir():
        member.CRC = member.compress_size = 0
        archive.mkdir(member)  # without a data descriptor, which some readers take of compressed members alone
        return 0
    left = member.file_size
    with archive.open(member, "w") as content:
        while left and (piece := file.read(min(left, CHUNK_BYTES))):
            left -= content.write(piece)
    return member.file_size


def unpack(top_fd: int, source: IO[bytes], maker: TreeMaker) -> Packed:
    """Unpack a zip archive into the maker's tree.

    Raises:
        Refused: BAD_ARCHIVE, TOO_LARGE.
        OSError: the disk is full, say.
    """
    try:
        with _spooled(top_fd, source, maker) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                _take(archive, member, maker)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise Refused("BAD_ARCHIVE", "this is no zip archive, or a broken one") from None
    except (ValueError, MemoryError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise Refused("BAD_ARCHIVE", f"the archive is broken ({type(error).__name__})") from None
    return maker.finish()


@contextmanager
def _spooled(top_fd: int, source: IO[bytes], maker: TreeMaker) -> Iterator[IO[bytes]]:
    """Yield a file that has the content of `source` and no name."""
    name = temporary_name(0)
    with open(open_new(top_fd, name, os.O_RDWR), "w+b") as file:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=top_fd)
        while chunk := source.read(CHUNK_BYTES):
            maker.check_size(file.tell() + len(chunk))
            file.write(chunk)
        file.seek(0)
        yield file


def _take(archive: zipfile.ZipFile, member: zipfile.ZipInfo, maker: TreeMaker) -> None:
    if member.flag_bits & _IS_ENCRYPTED or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused("BAD_ARCHIVE", f"encrypted, or compressed by no usual method: {member.filename[:200]}")
    maker.take(_described(member), lambda: archive.open(member))


def _described(member: zipfile.ZipInfo) -> tarfile.TarInfo:
    """Return a member as one of a tar archive. Without a mode it has the usual one; a link is of no known type."""
    mode = member.external_attr >> 16 if member.create_system == _UNIX else 0
    described = tarfile.TarInfo(member.filename)
    if member.is_dir():
        described.type = tarfile.DIRTYPE
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        described.type = tarfile.FIFOTYPE
    described.mode = mode & PERMISSIONS or (0o755 if member.is_dir() else 0o644)
    described.mtime = calendar.timegm((*member.date_time, 0, 0, 0))
    return described
