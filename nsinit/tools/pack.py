"""Packs a tree of files into a tar archive in a jail, verdict on stdout: `python -I -S -B pack.py PARENT MAX_ENTRIES
MAX_BYTES` packs a layer, and with `BASE KEPT FEATURES STAGE LAYER...` what a session has above the lowest KEPT of its
layers, which are named from the topmost on: what it has changed, and what the layers between have.

Descriptors of both: the verdict (1), the root of the tree (3), the archive (4). Of a layer: the lists of files with
setuid or setgid (0) and of opaque directories (5), names with a NUL behind each. Of a session, which must stand still:
its mount namespace (5).

The process is a jail (`jail.py`) whose root is the tree, read-only. It has one capability, to read what other users
own, and makes nothing but the archive.

The same tree gives the same archive: members are sorted by the bytes of their paths, have their times to the
nanosecond, no names of users, and holes in units of `CHUNK_BYTES`, whatever the file system. So a layer that was
unpacked from an archive of this program is packed into the same bytes, and keeps its digest. Whiteouts and opaque
directories become the marks of the OCI image specification (layer.md).

The changes of a session are found by a comparison of two mounts, its root and those layers without it, and no mark of
overlayfs is read. An overlay copies up what changes, and all directories above it, and the copy has the time of its
making (overlayfs.rst, "Non-directories"), which no program can set (inode(7), ctime). So a directory with the status of
before has nothing that changed anywhere below, and what is new is read alone. It is the same with what a layer has
above others that were unpacked at another time. What is mounted in the session, such as `/tmp` and `/workspace`, is not
part of its root. Devices, FIFOs, sockets, names that would be read as marks, and attributes of others than users are
counted and left out.
Sources: pax(1); GNU tar's manual, "PAX Format, Version 1.0" (sparse files); lseek(2) SEEK_DATA; xattr(7).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TypeAlias

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, slots, syscalls
from nsinit.tools import jail
from nsinit.tools.jail import CHUNK_BYTES
from nsinit.wire import verdict
from nsinit.wire.verdict import ArchiveRefused, Counts

CAPABILITIES = (k.CAP_DAC_READ_SEARCH,)
MEMORY_BYTES = 256 * 1024 * 1024
"""Enough for the names of a directory with a million entries, which are read at once to be sorted."""
_CALLS = """
read write pread64 readv writev lseek close open openat fstat stat lstat newfstatat statx getdents64 readlink readlinkat
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr brk mmap munmap mremap mprotect madvise futex
clock_gettime restart_syscall rt_sigprocmask rt_sigreturn exit exit_group fcntl
"""
CALLS = frozenset(_CALLS.split())
"""The system calls that the filter lets pass."""
KEPT_FDS = 2
_OUT_FD, _OPAQUE_FD, _NAMESPACE_FD, _OLD_FD = 4, 5, 5, 5
JAIL = jail.Jail(CALLS, CAPABILITIES, MEMORY_BYTES, KEPT_FDS, read_only=True)
HIDDEN, _HIDES_ALL = b".wh.", b".wh..wh..opq"
_ATTRIBUTE, _OWN, _NOT_OWN = "SCHILY.xattr.", "user.", "user.overlay."
_MAX_ATTRIBUTE_BYTES = 64 * 1024
_BENEATH = k.RESOLVE_BENEATH | k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_XDEV
_LAST_S = 2**33
_SECOND_NS = 1_000_000_000
MADE = frozenset({b"etc/hostname", b"etc/hosts", b"etc/resolv.conf"})
"""Files that each session is given anew (`sandbox/rootfs.py`): the image's stay as they are."""
_MADE_IN = frozenset({b"etc"})
WORKSPACE = b"workspace"
"""The directory whose content is part of no image, whether or not something is mounted there."""
_SPARSE_NAME = "GNUSparseFile.0/file"
"""The name that a reader sees who knows no sparse files. GNU tar's has the number of a process in it."""

Member: TypeAlias = tuple[bytes, os.stat_result | None]
"""A path without its leading `/`, and its status; None of a mark, which is an empty file."""
Found: TypeAlias = tuple[bytes | None, os.stat_result | None, bool]
"""A member, or a directory whose members come now."""
_NOTHING: Found = (None, None, False)


class ArchiveOutput:
    """The bytes of the archive, digested and counted as they are written."""

    def __init__(self, fd: int) -> None:
        self._fd, self._digest = fd, hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self.size_bytes += len(data)
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def pad(self, size: int) -> None:
        """Write zeros behind a member's content of that size, up to the next record."""
        self.write(b"\0" * (-size % tarfile.BLOCKSIZE))

    def finish(self) -> str:
        """Write the mark of the end; return the digest of all."""
        self.write(b"\0" * (2 * tarfile.BLOCKSIZE))
        self.pad(self.size_bytes)
        return self._digest.hexdigest()


class Packer:
    """Writes what is below `/` into an archive and keeps count."""

    def __init__(self, out: ArchiveOutput, *, max_entries: int, max_bytes: int) -> None:
        self.entries = self.skipped = 0
        self._out, self._max_entries, self._left_bytes = out, max_entries, max_bytes
        self._links: dict[tuple[int, int], bytes] = {}
        """The first name of each file with several, by device and inode."""
        self._privileged: dict[tuple[int, int], int] = {}

    def restore(self, privileged: Mapping[bytes, int | None]) -> None:
        """Give files their setuid and setgid bits back, of `<mode in octal> <path>` and the change time that the file
        must have, in nanoseconds; None: any."""
        for line, changed_ns in privileged.items():
            mode, _, path = line.partition(b" ")
            try:
                status = os.lstat(b"/" + path)
            except FileNotFoundError:  # a later member of the layer's archive took its place
                continue
            if not stat.S_ISREG(status.st_mode) or changed_ns not in (None, status.st_ctime_ns):
                continue
            self._privileged[status.st_dev, status.st_ino] = int(mode, 8) & (stat.S_ISUID | stat.S_ISGID)

    def pack(self, members: Iterator[Member]) -> str:
        """Write members; return the digest."""
        path = b""
        try:
            for path, status in members:
                self._add(path, status)
        except OSError as error:
            if error.errno in (*jail.MACHINE, errno.EPIPE):
                raise
            raise ArchiveRefused(error.strerror or "can't be read", os.fsdecode(path)) from error
        return self._out.finish()

    def _add(self, path: bytes, status: os.stat_result | None) -> None:
        if status is None:
            self._count(path)
            self._write_header(tarfile.TarInfo(os.fsdecode(path)), {})
            return
        mode = status.st_mode
        is_kept = stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        if not is_kept or path.rpartition(b"/")[2].startswith(HIDDEN):
            self.skipped += 1
            return
        self._count(path)
        info, headers = tarfile.TarInfo(os.fsdecode(path)), {}
        info.mode, info.uid, info.gid = stat.S_IMODE(mode), status.st_uid, status.st_gid
        info.mtime, fraction = divmod(min(max(status.st_mtime_ns, 0), _LAST_S * _SECOND_NS), _SECOND_NS)
        if fraction:
            headers["mtime"] = f"{info.mtime}.{fraction:09}".rstrip("0")
        inode = status.st_dev, status.st_ino
        if not stat.S_ISDIR(mode) and status.st_nlink > 1:
            first = self._links.setdefault(inode, path)
            if first is not path:
                info.type, info.linkname = tarfile.LNKTYPE, os.fsdecode(first)
                self._write_header(info, headers)
                return
        if stat.S_ISLNK(mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(b"/" + path))
            self._write_header(info, headers)
            return
        headers |= self._attributes(path)
        if stat.S_ISDIR(mode):
            info.type = tarfile.DIRTYPE
            self._write_header(info, headers)
        else:
            info.mode |= self._privileged.get(inode, 0)
            self._add_file(path, info, headers)

    def _count(self, path: bytes) -> None:
        self.entries += 1
        if self.entries > self._max_entries:
            raise ArchiveRefused(f"more than {self._max_entries} entries", os.fsdecode(path))

    def _write_header(self, info: tarfile.TarInfo, headers: dict[str, str]) -> None:
        info.pax_headers = headers
        self._out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _attributes(self, path: bytes) -> dict[str, str]:
        """Return the attributes of users as headers; all others are left out and counted."""
        headers = {}
        for name in sorted(os.listxattr(b"/" + path, follow_symlinks=False)):
            is_users = name.startswith(_OWN) and not name.startswith(_NOT_OWN) and name.isascii() and "=" not in name
            content = os.getxattr(b"/" + path, name, follow_symlinks=False) if is_users else b""
            if is_users and len(content) <= _MAX_ATTRIBUTE_BYTES:
                headers[_ATTRIBUTE + name] = content.decode("utf-8", "surrogateescape")
            else:
                self.skipped += 1
        return headers

    def _add_file(self, path: bytes, info: tarfile.TarInfo, headers: dict[str, str]) -> None:
        fd = os.open(b"/" + path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            self._left_bytes -= size
            if self._left_bytes < 0:
                raise ArchiveRefused("more bytes of files than allowed", os.fsdecode(path))
            spans = _spans(fd, size)
            if spans == [(0, size)]:
                info.size = size
                self._write_header(info, headers)
                self._copy(fd, 0, size)
                self._out.pad(size)
                return
            text = "".join(f"{number}\n" for number in (len(spans), *(each for span in spans for each in span)))
            table = text.encode() + b"\0" * (-len(text) % tarfile.BLOCKSIZE)
            headers |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
            headers |= {"GNU.sparse.name": info.name, "GNU.sparse.realsize": str(size)}
            stored = sum(length for _, length in spans)
            info.name, info.size = _SPARSE_NAME, len(table) + stored
            self._write_header(info, headers)
            self._out.write(table)
            for start, length in spans:
                self._copy(fd, start, length)
            self._out.pad(stored)
        finally:
            os.close(fd)

    def _copy(self, fd: int, start: int, size: int) -> None:
        while size:
            piece = os.pread(fd, min(size, CHUNK_BYTES), start)
            if not piece:
                raise ArchiveRefused("a file became shorter while it was read")
            self._out.write(piece)
            start, size = start + len(piece), size - len(piece)


def _spans(fd: int, size: int) -> list[tuple[int, int]]:
    """Return where a file has data, in units of `CHUNK_BYTES`. A file without a hole is one span; in one with holes, a
    unit of zeros is a hole, too, as the unpacker makes it one."""
    if not size or os.lseek(fd, 0, os.SEEK_HOLE) >= size:
        return [(0, size)]
    spans: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # nothing but a hole up to the end
        at, end = data // CHUNK_BYTES * CHUNK_BYTES, os.lseek(fd, data, os.SEEK_HOLE)
        while at < end:
            piece = os.pread(fd, min(CHUNK_BYTES, size - at), at)
            if piece.strip(b"\0"):
                if spans and sum(spans[-1]) == at:
                    spans[-1] = spans[-1][0], spans[-1][1] + len(piece)
                else:
                    spans.append((at, len(piece)))
            at += CHUNK_BYTES
    return spans


def sorted_names(names: list[bytes], is_directory: Callable[[bytes], bool]) -> Iterator[tuple[bytes, bool]]:
    """Yield names, and each directory once more (True) at the place of what is in it: with the paths in the order of
    their bytes, `a-b` comes between `a` and `a/c`."""
    below = {name + b"/": name for name in names if is_directory(name)}
    for each in sorted([*names, *below]):
        yield below.get(each, each), each in below


def members_of(entries: Callable[[bytes], Iterator[Found]]) -> Iterator[Member]:
    """Yield the members of a tree; `entries` yields those of one directory, by its path with a `/` behind."""
    stack = [entries(b"")]
    while stack:
        path, status, is_below = next(stack[-1], _NOTHING)
        if path is None:
            stack.pop()
        elif is_below:
            stack.append(entries(path + b"/"))
        else:
            yield path, status


def entries_of_layer(prefix: bytes, opaque: frozenset[bytes]) -> Iterator[Found]:
    """Yield what is in a directory of a layer; overlayfs' marks become those of archives."""
    directories, marks = set(), set()
    names = os.listdir(b"/" + prefix)
    for at, name in enumerate(names):
        mode = os.lstat(b"/" + prefix + name).st_mode
        if stat.S_ISDIR(mode) and not name.startswith(HIDDEN):
            directories.add(name)
        elif stat.S_ISCHR(mode):  # the jail that unpacked it can make no device but 0:0
            names[at] = HIDDEN + name
            marks.add(names[at])
    if (prefix.rstrip(b"/") or b".") in opaque:
        names.append(_HIDES_ALL)
        marks.add(_HIDES_ALL)
    for name, is_below in sorted_names(names, directories.__contains__):
        path = prefix + name
        yield path, None if name in marks or is_below else os.lstat(b"/" + path), is_below


class Changes:
    """The entries of a session's root that are not as in its layers. Without layers, all are new."""

    def __init__(self, *, has_layers: bool, top: bytes = b"") -> None:
        self._merged = {top} if has_layers else set()
        """Directories that layers have, too, by the beginning of the paths in them."""

    def entries(self, prefix: bytes) -> Iterator[Found]:
        """Yield what has changed in a directory, with a mark for each name that is gone."""
        names = set(os.listdir(b"/" + prefix))
        old = self._old(prefix)
        marks = {HIDDEN + name for name in old if name not in names}
        changed, directories = [], set()
        for name in names:
            path = prefix + name
            status, before = os.lstat(b"/" + path), _old_status(path) if name in old else None
            if path in MADE or (before is not None and _is_same(status, before) and _is_at_its_place(path, status)):
                continue
            if path in _MADE_IN and before is not None and _is_as_before(path, status, before):
                continue
            changed.append(name)
            if stat.S_ISDIR(status.st_mode) and not name.startswith(HIDDEN) and path != WORKSPACE:
                directories.add(name)
                if before is not None and stat.S_ISDIR(before.st_mode):
                    self._merged.add(path + b"/")
        for name, is_below in sorted_names([*changed, *marks], directories.__contains__):
            path = prefix + name
            yield path, None if name in marks or is_below else os.lstat(b"/" + path), is_below

    def _old(self, prefix: bytes) -> frozenset[bytes]:
        """Return the names that layers have in a directory."""
        if prefix not in self._merged:
            return frozenset()
        self._merged.remove(prefix)
        fd = os.open(prefix or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=_OLD_FD)
        try:
            names = map(os.fsencode, os.listdir(fd))
            return frozenset(name for name in names if prefix + name not in MADE and _old_status(prefix + name))
        finally:
            os.close(fd)


def _old_status(path: bytes) -> os.stat_result | None:
    """Return the status of what the layers have; None for a whiteout, which is seen where there is one layer alone."""
    status = os.stat(path, dir_fd=_OLD_FD, follow_symlinks=False)
    return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else status


def _is_same(status: os.stat_result, before: os.stat_result) -> bool:
    facts = ((each.st_mode, each.st_ctime_ns, each.st_mtime_ns) for each in (status, before))
    if stat.S_ISDIR(status.st_mode):
        return next(facts) == next(facts)
    return next(facts) == next(facts) and (status.st_size, status.st_ino) == (before.st_size, before.st_ino)


def _is_as_before(path: bytes, status: os.stat_result, before: os.stat_result) -> bool:
    """Whether a directory in which each session has files made has no other change: a change below would be seen in it,
    since an overlay copies all directories above what changes."""
    owners = ((each.st_mode, each.st_uid, each.st_gid) for each in (status, before))
    if next(owners) != next(owners) or not stat.S_ISDIR(status.st_mode):
        return False
    if any(name.startswith("user.") for name in os.listxattr(b"/" + path, follow_symlinks=False)):
        return False
    return next(Changes(has_layers=True, top=path + b"/").entries(path + b"/"), None) is None


def _is_at_its_place(path: bytes, status: os.stat_result) -> bool:
    """Whether a directory with the status of one in the layers is that one. Directories that an archive brought have
    equal times, and a directory above may have been renamed, which copies nothing that is in it. Told by the number of
    a file in it, since an overlay gives directories numbers of its own (overlayfs.rst, "Inode properties")."""
    if not stat.S_ISDIR(status.st_mode) or b"/" not in path:  # what was renamed itself has another time
        return True
    for name in os.listdir(b"/" + path):
        each = path + b"/" + name
        if not stat.S_ISDIR((found := os.lstat(b"/" + each)).st_mode):
            try:
                before = os.stat(each, dir_fd=_OLD_FD, follow_symlinks=False)
            except OSError:
                return False
            return found.st_ino == before.st_ino
    return False


def main() -> NoReturn:
    """Make the jail, pack in it, leave a verdict on stdout."""
    parent_pid, max_entries, max_bytes = (int(each) for each in sys.argv[1:4])
    packer = Packer(out := ArchiveOutput(_OUT_FD), max_entries=max_entries, max_bytes=max_bytes)
    if sys.argv[4:]:
        base, kept, by_fd, stage_path, *layers = sys.argv[4:]
        syscalls.end_with_parent(parent_pid)
        at = max(0, len(layers) - int(kept))
        privileged, below = privileged_of(layers[:at]), tuple(layers[at:])
        root_fd = open_views(int(base), mounts.Features(by_fd == "1", False), stage_path, below)
        changes = Changes(has_layers=bool(below))
        rights = replace(JAIL, base=int(base))

        def pack_session() -> str:
            packer.restore(privileged)
            return packer.pack(members_of(changes.entries))

        jail.run(rights, parent_pid, lambda: root_fd, lambda: judge(packer, out, pack_session))

    def pack() -> str:
        packer.restore(dict.fromkeys(_read_names(0)))
        opaque = frozenset(_read_names(_OPAQUE_FD))
        return packer.pack(members_of(lambda prefix: entries_of_layer(prefix, opaque)))

    jail.run(JAIL, parent_pid, jail.clone_root, lambda: judge(packer, out, pack))


def open_views(base: int, features: mounts.Features, stage_path: str, layers: tuple[str, ...]) -> int:
    """Return a copy of the mount of a session's root, without the mounts in it, and put a mount of the image's
    `layers`, if there are any, at `_OLD_FD`. Both have the session's ids. Nothing of the session is read."""
    ours = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.setns(_NAMESPACE_FD, k.CLONE_NEWNS)  # a mount can be copied from within its namespace alone (open_tree(2))
    root_fd = syscalls.open_tree(jail.ROOT_FD, "", k.AT_EMPTY_PATH | k.OPEN_TREE_CLONE)
    syscalls.setns(ours, k.CLONE_NEWNS)
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", "", k.MS_REC | k.MS_PRIVATE)
    if layers:
        userns_fd = slots.make_id_map(f"0 {base} {slots.SIZE}\n")
        os.dup2(mounts.view(layers, userns_fd, features=features, stage_path=stage_path), _OLD_FD)
    return root_fd


def judge(packer: Packer, out: ArchiveOutput, pack: Callable[[], str]) -> bytes:
    """Pack, and return the verdict; `Counts.size_bytes` are the archive's."""
    try:
        digest = pack()
    except ArchiveRefused as error:
        return verdict.refused(error)
    except MemoryError:
        return verdict.refused(ArchiveRefused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory to pack"))
    except OSError as error:
        return verdict.failed(error.errno or errno.EIO)
    return verdict.Unpacked(Counts(packer.entries, out.size_bytes, packer.skipped), digest).encode()


def privileged_of(layers: Sequence[str]) -> dict[bytes, int | None]:
    """Return what layers, the topmost first, have to restore. An overlay shows the change time of a layer's file, and
    what took the file's place, in another layer or in the session, has a change time of its own (overlayfs.rst)."""
    found: dict[bytes, int | None] = {}
    for files in layers:
        with suppress(FileNotFoundError), open(f"{os.path.dirname(files)}/privileged", "rb") as file:
            files_fd = os.open(files, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            for line in file.read().split(b"\0")[:-1]:
                with suppress(OSError):
                    # The layer's links are its author's, and this is no jail yet: none is followed.
                    fd = syscalls.openat2(
                        files_fd, line.partition(b" ")[2], os.O_PATH | os.O_NOFOLLOW, resolve=_BENEATH
                    )
                    found.setdefault(line, os.fstat(fd).st_ctime_ns)
                    os.close(fd)
            os.close(files_fd)
    return found


def _read_names(fd: int) -> list[bytes]:
    with open(fd, "rb", closefd=False) as file:
        return file.read().split(b"\0")[:-1]


if __name__ == "__main__":
    main()
