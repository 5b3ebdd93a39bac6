"""Unpacks a tar archive in a jail: `python -I -B unpack.py PARENT MAX_ENTRIES MAX_BYTES RESERVE_BYTES < TAR`, verdict
on stdout.

The process is a jail (`jail.py`) whose root is the new layer. So safety does not rest on judging names (CVE-2007-4559
and CVE-2025-4517 were such judgements). It has the four capabilities and the system calls that writing files of other
owners needs.

Unpacked are directories, regular files with their holes, symbolic and hard links, and attributes of users. Marks of
deletion become overlayfs' own; directories that hide what is below them are told to the parent, which may mark them.
Device nodes, FIFOs, unknown members, capabilities of files and all other attributes are counted and left out. Setuid
and setgid bits of files are dropped and told.
Sources: the OCI image specification (layer.md, "Whiteouts"); Documentation/filesystems/overlayfs.rst (whiteouts and
opaque directories); mknod(2); xattr(7); pax(1).
"""

from __future__ import annotations

import binascii
import bz2
import errno
import hashlib
import lzma
import os
import stat
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn, Protocol

from backports import zstd

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.kernel import constants as k
from nsinit.tools import jail
from nsinit.tools.jail import CHUNK_BYTES
from nsinit.wire import listing, verdict
from nsinit.wire.verdict import ArchiveRefused, Counts
from runner.wire.tarheaders import TAPE_BYTES, StrictHeader

MAX_ID = 65535
CAPABILITIES = (k.CAP_CHOWN, k.CAP_DAC_OVERRIDE, k.CAP_FOWNER, k.CAP_FSETID)
MEMORY_BYTES = 128 * 1024 * 1024
"""A compressed archive may hold a header of any size, which tarfile reads at once, and may ask for a large window."""
_WINDOW_BYTES = 80 * 1024 * 1024
"""Memory of a decoder, enough for `xz -9`."""
_BYTES_PER_ENTRY = 4096
"""Bytes of the tar stream beside the content, for each entry: headers, padding, names, attributes."""
_RESERVE_EVERY_BYTES = 64 * 1024 * 1024
"""Content, and `_BYTES_PER_ENTRY` for each file, between two looks at what the disk has left."""
_MAX_ATTRIBUTE_BYTES = 64 * 1024
_CALLS = """
read write pread64 readv writev lseek close open openat fstat stat lstat newfstatat statx mkdir mkdirat link linkat
symlink symlinkat unlink unlinkat rmdir chown lchown fchownat chmod fchmod fchmodat fchmodat2 utimensat mknod mknodat
setxattr lsetxattr fsetxattr getdents64 readlink readlinkat ftruncate statfs fstatfs brk mmap munmap mremap
mprotect madvise futex clock_gettime restart_syscall rt_sigprocmask rt_sigreturn exit exit_group
"""
CALLS = frozenset(_CALLS.split())
"""The system calls that the filter lets pass. Of a call with several names an architecture has one or another."""
LISTING_FD = 4
JAIL = jail.Jail(CALLS, CAPABILITIES, MEMORY_BYTES, kept_fds=1)
_PRIVILEGED = stat.S_ISUID | stat.S_ISGID
_HIDDEN, _HIDES_ALL, _NOT_OURS = ".wh.", ".wh..wh..opq", ".wh..wh."
_ATTRIBUTE, _OTHER_ATTRIBUTE = "SCHILY.xattr.", "LIBARCHIVE.xattr."
_OWN = "user."
_NOT_OWN = "user.overlay."
"""Marks of an overlay that is mounted by a user: none is, and none of these is needed."""
_TIME = struct.Struct("=qH")
_LAST_S, _MOST_DIGITS = 2**33, 20
"""The last second that a file may have, for absurd times are no reason to refuse an archive; and digits of one."""


class Readable(Protocol):
    """A stream of bytes: an answer is as long as what there is, and empty at the end."""

    def read(self, size: int, /) -> bytes: ...


class MemberDecoder(Protocol):
    """A decoder of one compressed member, as the standard library has them."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


class Gunzip:
    """zlib's decoder for gzip, with the interface of the others. RFC 1952."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def _unxz() -> MemberDecoder:
    return lzma.LZMADecompressor(memlimit=_WINDOW_BYTES)


DECODERS: dict[bytes, Callable[[], MemberDecoder]] = {
    b"\x1f\x8b": Gunzip,
    b"\x28\xb5\x2f\xfd": zstd.ZstdDecompressor,
    b"\xfd7zXZ\0": _unxz,
    b"BZh": bz2.BZ2Decompressor,
}
"""By the first bytes of the archive, whatever it is said to be."""
_MAGIC_BYTES = 6


class Decoded:
    """The content of a compressed stream, of one member or several, a bounded piece at a time."""

    def __init__(self, file: Readable, head: bytes, make: Callable[[], MemberDecoder]) -> None:
        self._file, self._left, self._make = file, head, make
        self._decoder = make()

    def read(self, size: int, /) -> bytes:
        while True:
            if self._decoder.eof:  # between members there may be zeros (gzip(1), "tapes")
                rest = self._decoder.unused_data.lstrip(b"\0")
                while not rest and (piece := self._file.read(CHUNK_BYTES)):
                    rest = piece.lstrip(b"\0")
                if not rest:
                    return b""
                self._decoder, self._left = self._make(), rest
            data, self._left = self._left, b""
            if not data and self._decoder.needs_input and not (data := self._file.read(CHUNK_BYTES)):
                raise ArchiveRefused("the compressed data ends before its end")
            if piece := self._decoder.decompress(data, size):
                return piece


class TarStream:
    """The bytes of the tar stream, digested and bounded as they are read."""

    def __init__(self, file: Readable, max_bytes: int) -> None:
        self._file, self._left = file, max_bytes
        self._digest = hashlib.sha256()
        self._piece = memoryview(b"")
        head = b""
        while len(head) < _MAGIC_BYTES and (piece := file.read(_MAGIC_BYTES - len(head))):
            head += piece
        make = next((DECODERS[magic] for magic in DECODERS if head.startswith(magic)), None)
        if make is None:
            self._take(head)
        else:
            self._file = Decoded(file, head, make)

    def read(self, size: int, /) -> bytes:
        if not self._piece:
            self._take(self._file.read(CHUNK_BYTES))
        data, self._piece = self._piece[:size].tobytes(), self._piece[size:]
        return data

    def _take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._left -= len(piece)
        if self._left < 0:
            raise ArchiveRefused("the archive is longer than what it may hold")
        self._piece = memoryview(piece)

    def finish(self) -> str:
        """Read what is behind the end of the archive, which belongs to the digest; return that."""
        while self.read(CHUNK_BYTES):
            pass
        return self._digest.hexdigest()


class NameList:
    """Names for the verdict, bounded: paths without links and without a leading `/`, each with a note."""

    def __init__(self, most: int, what: str) -> None:
        self._room, self._most, self._what = verdict.MAX_NAMES_BYTES // 2, most, what
        self._notes: dict[bytes, bytes] = {}

    def add(self, name: bytes, note: bytes = b"") -> None:
        self.drop(name)
        self._notes[name] = note
        self._room -= len(note) + len(name) + 1
        if self._room < 0 or len(self._notes) > self._most:
            raise ArchiveRefused(f"too many {self._what}")

    def note(self, name: bytes) -> bytes | None:
        """Return the note of a name, None if there is no such name."""
        return self._notes.get(name)

    def drop(self, name: bytes) -> None:
        """Take a name away, if it is there."""
        if (note := self._notes.pop(name, None)) is not None:
            self._room += len(note) + len(name) + 1

    def still(self, is_kind: Callable[[int], bool]) -> tuple[bytes, ...]:
        """Return notes and names of what is there at the end, as that kind and through no link: a later member may have
        taken the place of a directory above."""
        return tuple(note + name for name, note in self._notes.items() if _is_still(name, is_kind))


def _is_still(name: bytes, is_kind: Callable[[int], bool]) -> bool:
    path = b"/" + name
    try:
        return is_kind(os.lstat(path).st_mode) and os.path.realpath(path) == os.path.normpath(path)
    except OSError:  # nothing is there, or a circle of links is above
        return False


class Unpacker:
    """Writes members below `/`, keeps count, and lists what it has made (`wire/listing.py`). Names are taken as they
    come: `/` is the layer."""

    def __init__(self, listed: IO[bytes], *, max_entries: int, max_bytes: int, reserve_bytes: int) -> None:
        self._listed = listed
        self._real = ("", "")
        """The directory that was met last, and where that is without links."""
        self.entries = self.size_bytes = self.skipped = 0
        self.opaque = NameList(verdict.MAX_OPAQUE, "opaque directories")
        self.privileged = NameList(max_entries, "files with setuid or setgid")
        self._max_entries, self._max_bytes, self._reserve_bytes = max_entries, max_bytes, reserve_bytes
        self._directory_times = bytearray()
        self._unchecked_bytes = 0

    def unpack(self, file: Readable) -> str:
        """Unpack all of `file`, whatever its compression; return the digest of its tar stream."""
        self._check_reserve()
        stream = TarStream(file, self._max_bytes + (self._max_entries + 16) * _BYTES_PER_ENTRY)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictHeader, bufsize=TAPE_BYTES) as archive:  # type: ignore[call-overload]
            while member := archive.next():
                archive.members = []  # or tarfile keeps every header in memory
                self.entries += 1
                self._count(_BYTES_PER_ENTRY)
                if self.entries > self._max_entries:
                    raise ArchiveRefused(f"more than {self._max_entries} members")
                try:
                    self._unpack_member(archive, member)
                except OSError as error:
                    if error.errno is None or error.errno in jail.MACHINE:
                        raise
                    raise ArchiveRefused(error.strerror or "can't be made", member.name) from error
        digest = stream.finish()
        self._set_directory_times()
        return digest

    def _unpack_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _path_of(member.name)
        if path == "/" or (member.isdir() and os.path.isdir(path) and os.path.samefile(path, "/")):
            return  # the top is nsinit's, which closes it to others; a link in the archive may lead there
        directory, _, name = path.rpartition("/")
        if name.startswith(_HIDDEN):
            self._hide(directory, name)
            return
        if not (0 <= member.uid <= MAX_ID and 0 <= member.gid <= MAX_ID):
            raise ArchiveRefused(
                f"its owner is {member.uid}:{member.gid}, and an image has ids up to {MAX_ID}", path[1:]
            )
        content = b""
        if member.isdir():
            self._make_directory(path, member)
        elif member.isreg():
            content = self._write_file(path, archive, member)
        elif member.issym():
            self._make_way(path)
            os.symlink(member.linkname, path)
            content = os.fsencode(member.linkname)
            os.lchown(path, member.uid, member.gid)
            time_ns = _time_ns(member)
            os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
        elif member.islnk():
            self._make_way(path)
            target = _path_of(member.linkname)
            os.link(target, path, follow_symlinks=False)
            real, real_target = self._real_path(path), self._real_path(target)
            self._listed.write(listing.link_field(real, real_target))
            self.privileged.drop(real)
            if (note := self.privileged.note(real_target)) is not None:
                self.privileged.add(real, note)
        else:
            self.skipped += 1
            return
        if not member.islnk():
            self._set_attributes(path, member)
            self._list(path, content, is_directory=member.isdir())

    def _list(self, path: str, content: bytes = b"", *, is_directory: bool = False) -> None:
        """Note an entry. A directory may be met by a link, which stays."""
        status = os.stat(path) if is_directory else os.lstat(path)
        real = os.fsencode(os.path.realpath(path)[1:]) if is_directory else self._real_path(path)
        self._listed.write(listing.entry_field(real, status, content))

    def _real_path(self, path: str) -> bytes:
        """Return where an entry is, without links on the way, and without the leading `/`."""
        directory, _, name = path.rpartition("/")
        if self._real[0] != directory or not directory:
            self._real = directory, os.path.realpath(directory or "/").rstrip("/")
        return os.fsencode(f"{self._real[1]}/{name}"[1:])

    def _hide(self, directory: str, name: str) -> None:
        """Hide what layers below have in a directory, or under one name there. What this layer has there stays,
        whatever came first (layer.md, "Whiteouts"). Below what this layer hides, or has as no directory, nothing shows:
        umoci repack(1) names all that was there, too."""
        above = directory
        while above:
            if os.path.lexists(above) and not os.path.isdir(above):
                return
            above = above.rpartition("/")[0]
        self._make_way(f"{directory}/{name}")
        if name == _HIDES_ALL:
            self.opaque.add(_real(directory or "/"))
        elif name.startswith(_NOT_OURS):
            self.skipped += 1  # aufs' own
        elif os.path.isdir(path := f"{directory}/{name.removeprefix(_HIDDEN)}") and not os.path.islink(path):
            self.opaque.add(_real(path))
        elif path != f"{directory}/" and not os.path.lexists(path):
            # mknod(2): a device 0:0, which overlayfs takes for a whiteout, needs no capability. No other can be made.
            os.mknod(path, stat.S_IFCHR, 0)
            self._list(path)

    def _make_directory(self, path: str, member: tarfile.TarInfo) -> None:
        if not os.path.isdir(path):  # a link to a directory stays, as with merged /usr
            if _is_whiteout(path):
                self.opaque.add(_real(path))
            self._make_way(path)
            os.mkdir(path)
        self._own(path, member)
        encoded = os.fsencode(path)
        self._directory_times += _TIME.pack(_time_ns(member), len(encoded)) + encoded

    def _write_file(self, path: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        """Write a file; return the digest of its content."""
        if member.size > self._max_bytes - self.size_bytes:
            raise ArchiveRefused(f"more than {self._max_bytes} bytes of files")
        self.size_bytes += member.size
        is_sparse = member.issparse()
        if is_sparse:
            source: Any = archive.extractfile(member)
        else:  # as `TarFile.makefile` reads
            source = archive.fileobj
            source.seek(member.offset_data)
        digest, fd = hashlib.sha256(), self._open_new(path)
        try:
            left = member.size
            while left:
                chunk = source.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise tarfile.ReadError("unexpected end of data")
                left -= len(chunk)
                digest.update(chunk)
                self._count(len(chunk))
                if is_sparse and not chunk.strip(b"\0"):
                    os.lseek(fd, len(chunk), os.SEEK_CUR)
                else:
                    _write_all(fd, chunk)
            if is_sparse:
                os.ftruncate(fd, member.size)
        finally:
            os.close(fd)
        self._own(path, member)
        _set_time(path, _time_ns(member))
        return digest.digest()

    def _open_new(self, path: str) -> int:
        """Make a file; what stands in its way, or lacks above it, is looked at only when it has failed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            self._make_way(path)
            return os.open(path, flags, 0o600)

    def _make_way(self, path: str) -> None:
        """Make the directories above `path`, and remove what has that name."""
        self._real = "", ""  # which may be a link
        try:
            os.unlink(path)
        except IsADirectoryError:
            self._listed.write(listing.removal_field(self._real_path(path)))
            self._real = "", ""
            _remove_tree(path)
        except (FileNotFoundError, NotADirectoryError):
            parent = ""
            for part in path.split("/")[1:-1]:
                parent = f"{parent}/{part}"
                if not os.path.isdir(parent):
                    if _is_whiteout(parent):
                        os.unlink(parent)
                        self.opaque.add(_real(parent))
                    elif os.path.lexists(parent):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                    os.mkdir(parent, 0o755)
                    self._list(parent, is_directory=True)
                    self._count(_BYTES_PER_ENTRY)

    def _count(self, size: int) -> None:
        """Count bytes that the disk is about to hold, and look at it now and then."""
        self._unchecked_bytes += size
        if self._unchecked_bytes >= _RESERVE_EVERY_BYTES:
            self._check_reserve()

    def _check_reserve(self) -> None:
        """Raise `OSError` (ENOSPC) when the disk has less left than must stay, of its bytes or in the same share of its
        inodes, if their number is fixed (statvfs(3))."""
        self._unchecked_bytes = 0
        disk = os.statvfs("/")
        is_low = disk.f_bavail * disk.f_frsize < self._reserve_bytes
        if is_low or disk.f_favail * disk.f_blocks * disk.f_frsize < self._reserve_bytes * disk.f_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _own(self, path: str, member: tarfile.TarInfo) -> None:
        os.chown(path, member.uid, member.gid)
        mode = member.mode & 0o7777
        if member.isreg():
            real = self._real_path(path)
            self.privileged.drop(real)
            if mode & _PRIVILEGED:
                self.privileged.add(real, b"%04o " % mode)
                mode &= ~_PRIVILEGED
        os.chmod(path, mode)  # setgid of a directory gives no privilege, but its files the right group (inode(7))

    def _set_attributes(self, path: str, member: tarfile.TarInfo) -> None:
        """Set the attributes of users; marks of overlays, capabilities and all others are left out."""
        for name, value in member.pax_headers.items():
            if not name.startswith((_ATTRIBUTE, _OTHER_ATTRIBUTE)):
                continue
            own, content = _attribute_of(name, value)
            self._count(len(content))
            is_users = own.startswith(_OWN) and not own.startswith(_NOT_OWN) and not member.issym()
            if not (is_users and len(content) <= _MAX_ATTRIBUTE_BYTES and _has_set(path, own, content)):
                self.skipped += 1

    def _set_directory_times(self) -> None:
        """Set times at the end, for every file that is made in a directory sets that of the directory."""
        at = 0
        while at < len(self._directory_times):
            time_ns, length = _TIME.unpack_from(self._directory_times, at)
            at += _TIME.size + length
            path = os.fsdecode(bytes(self._directory_times[at - length : at]))
            if os.path.isdir(path):
                _set_time(path, time_ns)


def _real(path: str) -> bytes:
    """Return where something is, without links and without the leading `/`; `.` for the top."""
    return os.fsencode(os.path.realpath(path)[1:] or ".")


def _path_of(name: str) -> str:
    """Return where a member goes. A leading `/` means nothing; `..` and NUL are no names in an image."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ArchiveRefused("its name is not a plain path", name)
    return "/" + "/".join(parts)


def _attribute_of(name: str, value: str) -> tuple[str, bytes]:
    """Return name and content of an attribute; no name for one that can't be read. libarchive's have the content in
    base64 without its padding, and names with escapes, which none needs (archive_write_set_format_pax.c)."""
    if name.startswith(_ATTRIBUTE):
        return name.removeprefix(_ATTRIBUTE), value.encode("utf-8", "surrogateescape")
    try:
        content = binascii.a2b_base64(value + "=" * (-len(value) % 4))
    except ValueError:
        return "", b""
    return "" if "%" in name else name.removeprefix(_OTHER_ATTRIBUTE), content


def _has_set(path: str, name: str, content: bytes) -> bool:
    """Set an attribute, if the file system has such, and has room for it beside the inode (xattr(7))."""
    try:
        os.setxattr(path, name, content)
    except OSError:
        return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _is_whiteout(path: str) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISCHR(found.st_mode)


def _remove_tree(path: str) -> None:
    """Remove a directory. Its depth costs no stack, and no link in it is followed."""
    left = [path]
    while left:
        try:
            os.rmdir(left[-1])
            left.pop()
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        directory = left[-1]
        for entry in os.listdir(directory):
            try:
                os.unlink(f"{directory}/{entry}")
            except IsADirectoryError:
                left.append(f"{directory}/{entry}")


def _time_ns(member: tarfile.TarInfo) -> int:
    """Return a member's time. A fraction is read by its digits, for tarfile's number has no room for nine of them."""
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if seconds.isdecimal() and fraction.isdecimal() and len(seconds) < _MOST_DIGITS:
        return min(int(seconds), _LAST_S) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
    return int(min(max(member.mtime, 0), _LAST_S) * 1_000_000_000)


def _set_time(path: str, time_ns: int) -> None:
    os.utime(path, ns=(time_ns, time_ns))


def main() -> NoReturn:
    """Make the jail, unpack in it, leave a verdict on stdout."""
    parent_pid, max_entries, max_bytes, reserve_bytes = (int(each) for each in sys.argv[1:])
    bounds = {"max_entries": max_entries, "max_bytes": max_bytes, "reserve_bytes": reserve_bytes}
    jail.run(JAIL, parent_pid, jail.clone_root, lambda: _unpack(bounds))


def _unpack(bounds: Mapping[str, int]) -> bytes:
    """Unpack the archive on descriptor 0, and return the encoded verdict; every error becomes one."""
    try:
        with open(0, "rb", buffering=0, closefd=False) as file, open(LISTING_FD, "wb", closefd=False) as listed:
            unpacker = Unpacker(listed, **bounds)
            digest = unpacker.unpack(file)
    except ArchiveRefused as error:
        return verdict.refused(error)
    except tarfile.ReadError:
        return verdict.refused(ArchiveRefused("this is no tar archive (plain, gzip, zstd, xz, bzip2), or a broken one"))
    except MemoryError:
        return verdict.refused(ArchiveRefused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory to read"))
    except OSError as error:
        if error.errno is not None:
            return verdict.failed(error.errno)
        return verdict.refused(ArchiveRefused("the compressed data is broken"))
    except Exception as error:  # noqa: BLE001  # a decoder met bytes its author did not think of: the archive's fault
        return verdict.refused(ArchiveRefused(f"the archive is broken ({type(error).__name__})"))
    counts = Counts(unpacker.entries, unpacker.size_bytes, unpacker.skipped)
    opaque, privileged = unpacker.opaque.still(stat.S_ISDIR), unpacker.privileged.still(stat.S_ISREG)
    return verdict.Unpacked(counts, digest, opaque, privileged).encode()


if __name__ == "__main__":
    main()
