"""Damage to the files of a layer: each is compared with what the unpacker listed, and read whole.

The layer is at rest and root's; no link in it is followed. Attributes of users are not compared. Source: openat(2).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nsinit.wire import listing
from sandkasten.images.rootfs import is_opaque

_PIECE_BYTES = 1 << 20


def find_damage(layer: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths of a layer that are not as they were unpacked, each with what is wrong. Raises `OSError`."""
    try:
        listed = listing.read_listing((layer / listing.NAME).read_bytes())
        opaque = (layer / "opaque").read_bytes().split(b"\0")[:-1]
    except FileNotFoundError as error:
        yield os.path.basename(error.filename), "is missing, as in layers of an older version: pull or import it again"
        return
    except ValueError as error:
        yield listing.NAME, f"is damaged: {error}"
        return
    top_fd = os.open(layer / "fs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, status in _walk(top_fd):
            expected = listed.pop(path, None)
            if expected is None:
                yield os.fsdecode(path), "was not in the archive"
            elif expected != listing.entry_digest(status, _content(top_fd, path, status)):
                yield os.fsdecode(path), "has another content, owner, mode or time"
        for path in listed:
            yield os.fsdecode(path), "is missing"
        for path in opaque:
            if not _hides(top_fd, path):
                yield os.fsdecode(path), "does not hide any more what layers below have there"
    finally:
        os.close(top_fd)


def _walk(top_fd: int) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield each entry with its path. Paths are below a descriptor: with the directory's name they may be too long."""
    left = [b""]
    while left:
        directory = left.pop()
        fd = _open(top_fd, directory or b".", os.O_DIRECTORY)
        try:
            names = [os.fsencode(name) for name in os.listdir(fd)]
            for name in sorted(names):
                path, status = directory + b"/" * bool(directory) + name, os.lstat(name, dir_fd=fd)
                yield path, status
                if stat.S_ISDIR(status.st_mode):
                    left.append(path)
        finally:
            os.close(fd)


def _content(top_fd: int, path: bytes, status: os.stat_result) -> bytes:
    """Return the digest of a file's bytes, or the target of a link."""
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path, dir_fd=top_fd)
    if not stat.S_ISREG(status.st_mode):
        return b""
    digest = hashlib.sha256()
    fd = _open(top_fd, path)
    try:
        while piece := os.read(fd, _PIECE_BYTES):
            digest.update(piece)
    finally:
        os.close(fd)
    return digest.digest()


def _hides(top_fd: int, path: bytes) -> bool:
    try:
        fd = _open(top_fd, path, os.O_DIRECTORY)
    except OSError:  # told as missing, or as another
        return True
    try:
        return is_opaque(fd)
    finally:
        os.close(fd)


def _open(top_fd: int, path: bytes, flags: int = 0) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=top_fd)
