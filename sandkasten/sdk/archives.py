"""Local directories as archives: packed piece by piece, and unpacked from an archive that a sandbox made.

What comes from a sandbox is hostile. Names lead nowhere but below the directory and through no link, links that lead
out of it are left out, and so are devices, FIFOs, sparse files and set-id bits. These functions block: clients run them
in threads.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from sandkasten import errors
from sandkasten.sdk.types import UnpackedArchive

PIECE_BYTES = 1024 * 1024
_TAPE_BYTES = 32 * 1024
"""Buffer of an archive that is read as a stream: at each header, `tarfile` copies what is in it."""
_BLOCK = 512
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A file that was found to be one and is a link or a FIFO by now is not waited for, nor followed (open(2))."""
MODE_BITS = 0o777


class Digest(Protocol):
    """A sum over bytes, as of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to the sum."""


def pack(root: Path) -> Iterator[bytes]:
    """Yield a directory as a tar archive (pax), in pieces of about `PIECE_BYTES`. See `pack_files`."""
    return pack_files((path.relative_to(root).as_posix(), path) for path in _below(root))


def pack_files(
    files: Iterable[tuple[str, Path]], *, mode: int | None = None, digest: Digest | None = None
) -> Iterator[bytes]:
    """Yield files, each with its name in the archive, as a tar archive (pax), in pieces of about `PIECE_BYTES`.

    Links are packed as links. A file that changes meanwhile is cut, or filled with zeros, as tar(1) does. `mode` is in
    place of the permissions of files and directories. `digest` gets all but names and times.

    Raises:
        OSError: a file or directory can't be read.
    """
    gathered = bytearray()
    for name, path in files:
        info = _describe(name, path, mode)
        if info is None:
            continue
        gathered += _head(info)
        if digest is not None:
            info.name, info.mtime = "", 0
            digest.update(_head(info))
        if info.isreg():
            with open(os.open(path, _READ), "rb", buffering=0) as file:
                left = info.size
                while left:
                    data = file.read(min(PIECE_BYTES, left)) or bytes(min(PIECE_BYTES, left))
                    left -= len(data)
                    gathered += data
                    if digest is not None:
                        digest.update(data)
                    if len(gathered) >= PIECE_BYTES:
                        yield bytes(gathered)
                        gathered.clear()
            gathered += bytes(-info.size % _BLOCK)
    yield bytes(gathered) + bytes(2 * _BLOCK)


def _below(directory: Path) -> Iterator[Path]:
    for entry in sorted(directory.iterdir()):
        yield entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _below(entry)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _describe(name: str, path: Path, mode: int | None) -> tarfile.TarInfo | None:
    """Return the head of a member; None for what is neither a file, a directory nor a link."""
    found = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode) & MODE_BITS, int(found.st_mtime)
    if stat.S_ISREG(found.st_mode):
        info.size = found.st_size
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        return info
    else:
        return None
    info.mode = info.mode if mode is None else mode
    return info


def unpack(archive: BinaryIO, root: Path) -> UnpackedArchive:
    """Unpack a tar archive that is read once, from its begin on, into a directory, which is made if it is missing.

    Raises:
        ConnectionFailed: the archive is damaged.
        OSError: a file can't be written, or a local directory is in its way; a file or link in the way is replaced.
    """
    root.mkdir(parents=True, exist_ok=True)
    entries = size = skipped = 0
    modes: list[tuple[Path, int]] = []
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=_TAPE_BYTES) as tar:
            for member in tar:
                parts = _names(member.name)
                if parts == []:
                    continue
                if parts is None or not _write(tar, member, root, parts, modes):
                    skipped += 1
                    continue
                entries, size = entries + 1, size + member.size
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, RecursionError) as error:  # of tarfile's reading
        raise errors.ConnectionFailed(f"the archive is damaged: {error}") from error
    for path, mode in reversed(modes):  # last, since a directory may be closed to its owner
        path.chmod(mode)
    return UnpackedArchive(entries, size, skipped)


def _names(path: str) -> list[str] | None:
    """Return the names of a path below the directory; None: it may lead elsewhere, as `//etc` does, too."""
    pure = PurePosixPath(path)
    return None if pure.is_absolute() or ".." in pure.parts else list(pure.parts)


def _write(
    tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path, parts: list[str], modes: list[tuple[Path, int]]
) -> bool:
    """Write a member, in place of what is there; tell whether it is of a kind that is written."""
    place = root
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink() or not place.is_dir():
            _remove(place)
            place.mkdir()
    place = place / parts[-1]
    mode = member.mode & MODE_BITS
    if member.isdir():
        if place.is_symlink() or not place.is_dir():
            _remove(place)
            place.mkdir()
        modes.append((place, mode))
        return True
    if member.issym() and _stays(root, parts, member.linkname):
        _remove(place)
        place.symlink_to(member.linkname)
        return True
    if member.islnk():
        return _link(root, place, member.linkname)
    if not member.isreg() or member.issparse():  # the server makes none, and a hole has any size for no byte
        return False
    _remove(place)
    content = tar.extractfile(member)
    assert content is not None  # of a regular file there is one
    with place.open("xb") as file:
        while data := content.read(PIECE_BYTES):
            file.write(data)
        os.fchmod(file.fileno(), mode)
    os.utime(place, (member.mtime, member.mtime))
    return True


def _stays(root: Path, parts: list[str], target: str) -> bool:
    """Tell whether a link leads to a name below the directory.

    `..` is taken at the begin alone, where it leads through directories that are there; further on it might follow
    another link of the archive. Links of the user's own are resolved.
    """
    names = list(PurePosixPath(target).parts)
    depth = len(parts) - 1
    while names and names[0] == "..":
        del names[0]
        depth -= 1
    if depth < 0 or target.startswith("/") or ".." in names:
        return False
    found = Path(os.path.realpath(root.joinpath(*parts[:-1], target)))  # also of a loop of links
    return found.is_relative_to(os.path.realpath(root))


def _link(root: Path, place: Path, target: str) -> bool:
    """Link a name to a file that was unpacked before; tell whether there is one."""
    found = root
    for part in (parts := _names(target)) or ():
        found /= part
        if found.is_symlink():
            return False
    if parts is None or not found.is_file():
        return False
    _remove(place)
    os.link(found, place)
    return True


def _remove(place: Path) -> None:
    """Remove a file or link that is in the way; a directory in the way is an error of the system."""
    if place.is_symlink() or place.exists():
        place.unlink()
