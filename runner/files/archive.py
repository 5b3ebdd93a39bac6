"""A directory tree as a tar archive, and back. Runs in a file worker as the sandbox user; may block.

Archives are written as pax (POSIX.1-2001): names of any bytes and length, times to the nanosecond, permission bits,
hard links. Owners are not restored: unpacked files belong to the sandbox user, or to whom the request says. An archive
to unpack is hostile: its names are followed one directory at a time and through no link, only directories, regular
files and links are made, set-id bits are dropped, the size is bounded.

Sources: POSIX.1-2024 pax; Python library reference, `tarfile`; openat2(2).
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from runner.files.contents import drop, open_new, put_in_place, temporary_name
from runner.files.paths import FileTarget
from runner.files.tree import READ, Check, TreeFile, Walk, is_of_kernel
from runner.loop.context import Refused
from runner.loop.kernel import RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, Kernel
from runner.wire.protocol import CHUNK_BYTES, Packed, Unpack
from runner.wire.tarheaders import TAPE_BYTES, StrictHeader

_MAX_LINKED = 200_000
"""Most files with several names that are remembered. A further one is packed once for each name."""
PERMISSIONS = 0o1777
_CHANGED = frozenset({errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO})
"""Errors of open(2) and readlink(2) for a name that is gone, or a link, a file or a socket by now."""
_NOTHING: IO[bytes] = io.BytesIO()
_NOT_OURS = frozenset({errno.EPERM, errno.EROFS, errno.EOVERFLOW})
"""Errors of chmod(2) and utimensat(2) for a directory that was there and belongs to another user."""
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_WITHIN = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_MAX_PARTS = 2048
_MAX_TIME_S = 2**33
_TIME = re.compile(r"(-?)([0-9]{1,12})(?:\.([0-9]{1,9})[0-9]*)?\Z")


def check_readable(tree: Walk, *, max_entries: int | None = None) -> None:
    """Check that everything that `pack` would pack can be read.

    Raises:
        Refused: PERMISSION_DENIED; TOO_LARGE, more than `max_entries` files.
    """
    entries = 0
    for found in tree:
        entries += not found.is_left
        if max_entries is not None and entries > max_entries:
            raise Refused("TOO_LARGE", f"more than {max_entries} files")
        if stat.S_ISREG(found.status.st_mode) and not os.access(found.name, os.R_OK, dir_fd=found.parent_fd):
            raise Refused("PERMISSION_DENIED", f"can't be read: {os.fsdecode(found.path)[:200]}")


def pack(tree: Walk, out: IO[bytes]) -> Packed:
    """Write an archive of a tree."""
    entries = size = skipped = 0
    linked: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=TAPE_BYTES) as archive:
        for found in tree:
            if found.is_left:
                continue
            try:
                with opened(found) as (status, file):
                    member = _member_of(found, status, linked)
                    if member is None:
                        skipped += 1
                        continue
                    entries += 1
                    size += member.size
                    archive.addfile(member, _Exactly(file))  # type: ignore[arg-type]  # it only reads
            except Changed:
                continue
            archive.members = []  # type: ignore[attr-defined]  # or tarfile keeps every header in memory
    return Packed(entries, size, skipped)


class Changed(Exception):
    """A file was removed or replaced just now."""


@contextmanager
def opened(found: TreeFile) -> Iterator[tuple[os.stat_result, IO[bytes]]]:
    """Yield status and content of a file, both from one descriptor if it is a regular file: a file that was replaced
    since it was found must not come with the size of the old one.

    Raises:
        Changed
    """
    if not stat.S_ISREG(found.status.st_mode):
        yield found.status, _NOTHING
        return
    try:
        fd = os.open(found.name, READ, dir_fd=found.parent_fd)
    except OSError as error:
        if error.errno in _CHANGED:
            raise Changed from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise Changed
    with open(fd, "rb", buffering=0) as file:
        yield status, file


def _member_of(found: TreeFile, status: os.stat_result, linked: dict[tuple[int, int], str]) -> tarfile.TarInfo | None:
    name = os.fsdecode(found.path)
    member = tarfile.TarInfo(name)
    member.mode, member.uid, member.gid = stat.S_IMODE(status.st_mode) & PERMISSIONS, status.st_uid, status.st_gid
    member.pax_headers = {"mtime": f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"}
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(_target_of(found))
    elif not stat.S_ISREG(status.st_mode):
        return None
    elif (first := linked.get((status.st_dev, status.st_ino))) is not None:
        member.type, member.linkname = tarfile.LNKTYPE, first
    else:
        member.size = status.st_size
        if status.st_nlink > 1 and len(linked) < _MAX_LINKED:
            linked[status.st_dev, status.st_ino] = name
    return member


def _target_of(link: TreeFile) -> bytes:
    try:
        return os.readlink(link.name, dir_fd=link.parent_fd)
    except OSError as error:
        if error.errno in _CHANGED:
            raise Changed from None
        raise


class _Exactly:
    """Reader of a file whose size stands in the archive already: bytes that are missing since then read as zeros."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


def unpack(source: IO[bytes], maker: TreeMaker) -> Packed:
    """Unpack a tar archive into the maker's tree.

    Raises:
        Refused: BAD_ARCHIVE, TOO_LARGE.
        OSError: the disk is full, say.
    """
    try:
        with tarfile.open(fileobj=source, mode="r|", bufsize=TAPE_BYTES, tarinfo=StrictHeader) as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # or tarfile keeps every header in memory
                maker.take(member, functools.partial(_content_of, archive, member))
    except tarfile.TarError:
        raise Refused("BAD_ARCHIVE", "this is no tar archive, or a broken one") from None
    except (ValueError, MemoryError, KeyError, IndexError, OverflowError) as error:
        raise Refused("BAD_ARCHIVE", f"the archive is broken ({type(error).__name__})") from None
    return maker.finish()


def _content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    assert content is not None
    return content


class TreeMaker:
    """Makes the members of an archive below the directory `top_fd`, whose path is `real`, within the request's bounds.
    Members are described as those of a tar archive are. Each takes its place in one step, also that of a file which is
    there: where an error or `check` ends the work, no file is there by halves and no old one is lost."""

    def __init__(self, top_fd: int, real: bytes, kernel: Kernel, request: Unpack, check: Check) -> None:
        self._top_fd, self._real, self._kernel, self._request = top_fd, real, kernel, request
        self._check = check
        self._entries = self._size = self._skipped = 0
        self._directories: dict[bytes, tuple[int, int]] = {}

    def take(self, member: tarfile.TarInfo, open_content: Callable[[], IO[bytes]]) -> None:
        """Make one member.

        Raises:
            Refused: BAD_ARCHIVE, TOO_LARGE.
            OSError: the disk is full, or broken.
        """
        self._check()
        self._entries += 1
        if self._entries > self._request.max_entries:
            raise Refused("TOO_LARGE", f"more than {self._request.max_entries} members")
        path = _path_of(member.name)
        if not path:
            return
        is_known = member.isdir() or member.isreg() or member.issym() or member.islnk()
        if not is_known or is_of_kernel(os.path.join(self._real, path)):
            self._skipped += 1
            return
        try:
            self._make(member, path, open_content)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            reason = "leads through a link" if error.errno == errno.ELOOP else str(error.strerror).lower()
            raise Refused("BAD_ARCHIVE", f"{reason}: {member.name[:200]}") from None

    def finish(self) -> Packed:
        """Give directories their modes and times, and return the counts."""
        # Not earlier: a directory that may not be written would have kept its own files out.
        for path in sorted(self._directories, reverse=True):
            mode, mtime_ns = self._directories[path]
            fd = self._kernel.openat2(self._top_fd, path, _PARENT, 0, _WITHIN)
            place = b"/proc/self/fd/%d" % fd  # of a directory that may not be read, too
            try:
                os.utime(place, ns=(mtime_ns, mtime_ns))
                os.chmod(place, mode)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
            finally:
                os.close(fd)
        return Packed(self._entries, self._size, self._skipped)

    def _make(self, member: tarfile.TarInfo, path: bytes, open_content: Callable[[], IO[bytes]]) -> None:
        parent, _, name = path.rpartition(b"/")
        parent_fd = self._open_parent(parent)
        try:
            if member.isdir():
                if _make_directory(parent_fd, name):
                    self._give(name, parent_fd)
                self._directories[path] = member.mode & PERMISSIONS, _mtime_ns(member)
                return
            if member.isreg():
                self._write(member, parent_fd, name, open_content)
                return
            temporary = temporary_name(os.getpid())
            try:
                if member.islnk():
                    self._link(member, parent_fd, temporary)
                else:
                    os.symlink(os.fsencode(member.linkname), temporary, dir_fd=parent_fd)
                    self._give(temporary, parent_fd)
                    os.utime(temporary, ns=(_mtime_ns(member),) * 2, dir_fd=parent_fd, follow_symlinks=False)
                os.rename(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            finally:
                drop(temporary, parent_fd)  # it is there after an error, and where both were names of one file
        finally:
            os.close(parent_fd)

    def _write(
        self, member: tarfile.TarInfo, parent_fd: int, name: bytes, open_content: Callable[[], IO[bytes]]
    ) -> None:
        temporary, target = temporary_name(os.getpid()), FileTarget(parent_fd, b"", name, None)
        with open_content() as source, open(open_new(parent_fd, temporary), "wb", buffering=0) as file:
            fd = file.fileno()
            try:
                while chunk := source.read(CHUNK_BYTES):
                    self._check()
                    self._note_written(len(chunk))
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[file.write(rest) :]
                self._give(fd)
                os.utime(fd, ns=(_mtime_ns(member),) * 2)
                put_in_place(fd, temporary, target, syncs=False, mode=member.mode & PERMISSIONS)
            except BaseException:
                drop(temporary, parent_fd)
                raise

    def _give(self, file: bytes | int, parent_fd: int | None = None) -> None:
        """Give a file that was made, a name or a descriptor, to whom the request says."""
        owner, group = self._request.owner, self._request.group
        if (owner, group) != (-1, -1):
            os.chown(file, owner, group, dir_fd=parent_fd, follow_symlinks=isinstance(file, int))

    def check_size(self, size_bytes: int) -> None:
        """Raise `Refused`, TOO_LARGE, if that is more than the request allows."""
        if size_bytes > self._request.max_bytes:
            raise Refused("TOO_LARGE", f"more than {self._request.max_bytes} bytes of files")

    def _note_written(self, size_bytes: int) -> None:
        self._size += size_bytes
        self.check_size(self._size)

    def _link(self, member: tarfile.TarInfo, parent_fd: int, name: bytes) -> None:
        directory, _, target = _path_of(member.linkname).rpartition(b"/")
        source_fd = self._open_parent(directory)
        try:
            os.link(target, name, src_dir_fd=source_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
        finally:
            os.close(source_fd)

    def _open_parent(self, path: bytes) -> int:
        """Open a directory below the top. Missing directories are made."""
        try:
            return self._kernel.openat2(self._top_fd, path or b".", _PARENT, 0, _WITHIN)
        except FileNotFoundError:
            pass
        fd = os.dup(self._top_fd)
        for name in path.split(b"/"):
            try:
                try:
                    os.mkdir(name, 0o755, dir_fd=fd)
                    self._give(name, fd)
                except FileExistsError:
                    pass
                next_fd = self._kernel.openat2(fd, name, _PARENT, 0, _WITHIN)
            finally:
                os.close(fd)
            fd = next_fd
        return fd


def _path_of(name: str) -> bytes:
    """Return the parts of a member's path. A leading `/` means nothing; `..` and NUL are refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > _MAX_PARTS:
        raise Refused("BAD_ARCHIVE", f"not a plain path: {name[:200]}")
    return os.fsencode("/".join(parts))


def _make_directory(parent_fd: int, name: bytes) -> bool:
    """Make a directory, closed to all but the sandbox user until it has its mode; return False where one is there."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            raise
        return False
    return True


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """Return the time of a member. An absurd one does not refuse the member."""
    exact = _TIME.match(member.pax_headers.get("mtime", ""))
    if exact is not None:
        seconds, fraction = int(exact[2]), int((exact[3] or "0").ljust(9, "0"))
        return 0 if exact[1] else min(seconds, _MAX_TIME_S) * 10**9 + fraction
    return int(min(max(member.mtime, 0), _MAX_TIME_S)) * 10**9
