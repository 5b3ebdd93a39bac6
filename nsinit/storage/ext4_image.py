"""Empty ext4 images: made by mke2fs once for each size, then copied, holes and all.

Owns `<data_dir>/disk`. A copy costs a tenth of a millisecond and some hundred KiB, whatever its size. There is no
journal unless asked for, since no file in a session's image outlives the session; inode tables are written only when
used; no block is reserved for root. Room in the group descriptors lets a mounted image grow.
Sources: mke2fs(8), ext4(5), lseek(2) SEEK_DATA, copy_file_range(2).
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.steps import StepFailed
from nsinit.storage.mechanism import MechanismUnavailable
from nsinit.storage.paths import Layout, make_directory
from nsinit.wire.protocol import DiskLimits

SUFFIX = ".ext4"
_SEARCH_PATH = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin"
_BYTES_PER_INODE = 4096
"""The least number of bytes for one inode: the tables take a sixteenth of the image at most."""
_FEATURES = (
    "none,ext_attr,resize_inode,dir_index,filetype,flex_bg,sparse_super,large_file,huge_file,uninit_bg,"
    "dir_nlink,extra_isize"
)
_MAX_GROWTH = 16
_SMALL_BYTES, _JOURNAL_MIB = 1 << 30, 16
"""Images from that size on have a journal of 16 MiB, as mke2fs gives to those of 128 MiB to 1 GiB."""
_REPAIRED = 1
"""The status of e2fsck when it repaired the file system, and all is well."""
_MAX_BLOCKS = (1 << 32) - 1
_SUPERBLOCK_OFFSET, _SUPERBLOCK = 1024, struct.Struct("<2I16xI28xH")
"""Inodes, blocks, the block size as a power of two of KiB, and the mark of ext4."""
_MAGIC, _MAX_BLOCK_KIB_LOG = 0xEF53, 6
_MAX_KEPT = 64
"""Templates that are kept. Clients could ask for any number of sizes; further ones are made anew each time."""


def name_of(limits: DiskLimits) -> str:
    """Return the file name of an image; it tells its limits."""
    return f"{limits.size_bytes}-{limits.inodes}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one data directory."""

    layout: Layout
    mke2fs: str

    @classmethod
    def open(cls, layout: Layout) -> Templates:
        """Delete all templates and begin anew. Raises `MechanismUnavailable` without mke2fs."""
        mke2fs = find_tool("mke2fs")
        make_directory(layout.disk)
        for name in os.listdir(layout.disk):  # an earlier version may have made them otherwise
            os.unlink(f"{layout.disk}/{name}")
        return cls(layout, mke2fs)

    def copy(self, limits: DiskLimits, path: str) -> None:
        """Make the image `path`. Raises `StepFailed` when mke2fs can't."""
        template = f"{self.layout.disk}/{name_of(limits)}"
        try:
            source_fd = os.open(template, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if len(os.listdir(self.layout.disk)) >= _MAX_KEPT:
                self._format(limits, path)
                return
            self._keep(limits, template)
            source_fd = os.open(template, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            copy_sparse(source_fd, path)
        finally:
            os.close(source_fd)

    def _keep(self, limits: DiskLimits, template: str) -> None:
        """Make a template. Two builders may do so at the same time, and the second rename puts an equal
        file in place."""
        new = f"{self.layout.disk}/new-{os.getpid()}"
        try:
            self._format(limits, new)
            os.rename(new, template)
        except BaseException:
            os.unlink(new)
            raise

    def _format(self, limits: DiskLimits, path: str) -> None:
        make_image(self.mke2fs, limits, path)


def find_tool(name: str) -> str:
    """Return the path of one of e2fsprogs. Raises `MechanismUnavailable`."""
    path = shutil.which(name, path=_SEARCH_PATH)
    if path is None:
        raise MechanismUnavailable(f"{name} is missing; install e2fsprogs")
    return path


def make_image(mke2fs: str, limits: DiskLimits, path: str, *, has_journal: bool = False) -> None:
    """Make a new image. Raises `StepFailed` when mke2fs can't."""
    with open(path, "wb", opener=_open_new) as file:
        file.truncate(limits.size_bytes)
    blocks = limits.size_bytes // k.EXT4_BLOCK_BYTES
    inodes = min(limits.inodes, limits.size_bytes // _BYTES_PER_INODE)
    extended = f"lazy_itable_init=1,nodiscard,root_owner=0:0,resize={min(blocks * _MAX_GROWTH, _MAX_BLOCKS)}"
    features = f"{_FEATURES},has_journal" if has_journal else _FEATURES
    command = [mke2fs, "-q", "-F", "-b", str(k.EXT4_BLOCK_BYTES), "-I", "256", "-m", "0", "-N", str(inodes)]
    command += ["-O", features, "-E", extended]
    if has_journal and limits.size_bytes >= _SMALL_BYTES:  # mke2fs writes all of it, and takes 64 MiB from 2 GiB on
        command += ["-J", f"size={_JOURNAL_MIB}"]
    _run([*command, path, str(blocks)], path)


def enlarge(path: str, size_bytes: int) -> None:
    """Enlarge the file system of an image that is mounted nowhere, durably. Raises `StepFailed`."""
    _run([find_tool("e2fsck"), "-f", "-p", path], path, fine=(0, _REPAIRED))
    with open(path, "r+b") as file:
        file.truncate(size_bytes)
        _run([find_tool("resize2fs"), path], path)
        os.fsync(file.fileno())


def read_size(fd: int) -> DiskLimits:
    """Return bytes and inodes of the file system in an image, or on its device. It may be smaller than the image:
    mke2fs and resize2fs leave out a last block group that is too small. Raises `OSError` (`EUCLEAN`) when there is
    none."""
    head = os.pread(fd, _SUPERBLOCK.size, _SUPERBLOCK_OFFSET)
    inodes, blocks, log_kib, magic = _SUPERBLOCK.unpack(head.ljust(_SUPERBLOCK.size, b"\0"))
    if magic != _MAGIC or log_kib > _MAX_BLOCK_KIB_LOG:
        raise OSError(errno.EUCLEAN, "the image is damaged")
    return DiskLimits(blocks << (10 + log_kib), inodes)


def _run(command: list[str], path: str, *, fine: tuple[int, ...] = (0,)) -> None:
    """Run a tool, its output in the log. Raises `StepFailed` unless its status is one of `fine`."""
    pid = os.posix_spawn(command[0], command, {"LANG": "C"}, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in fine:
        name = os.path.basename(command[0])
        raise StepFailed("disk", f"{name} failed with status {status} (its words are in the log)", path=path)


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def copy_sparse(source_fd: int, path: str) -> None:
    """Copy the data of a sparse file into a new one; holes stay holes."""
    size = os.fstat(source_fd).st_size
    target_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(target_fd, size)
        end = 0
        while True:
            try:
                start = os.lseek(source_fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            end = os.lseek(source_fd, start, os.SEEK_HOLE)
            while start < end:
                start += os.copy_file_range(source_fd, target_fd, end - start, start, start)
    finally:
        os.close(target_fd)
