"""Unpacks a tar archive in a jail: `python -I -S -B unpack.py PARENT MAX_MEMBERS MAX_BYTES < TAR`, verdict on stdout.

A process of its own for one archive, which lives no longer than its parent, an nsinit. Its root directory is the new
image, descriptor 3, and nothing else. So a member name or link of any kind can only reach the image: safety does not
rest on judging names (CVE-2007-4559 and CVE-2025-4517 were such judgements). The process has its own mount, pid,
network, IPC and user namespace (ids 0-65535 mapped to themselves), the four capabilities and the system calls that
writing files of other owners needs, and can't import any module.

Unpacked are directories, regular files, symbolic and hard links. Device nodes, FIFOs and unknown members are counted
and left out; setuid, setgid, extended attributes and file capabilities are dropped.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import lzma
import os
import resource
import signal
import stat
import sys
import tarfile
import zlib
from typing import IO, NoReturn

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.seccomp.filters import list_filter
from nsinit.wire import verdict
from nsinit.wire.verdict import ArchiveRefused, Counts
from runner.wire.tarheaders import StrictHeader

PRELOADED = (bz2, gzip, lzma, zlib)
"""tarfile imports these when it meets such an archive; no import works in the jail."""
CODECS = ("utf-8", "ascii", "latin-1")
ID_MAP = "0 0 65536"
CAPABILITIES = (k.CAP_CHOWN, k.CAP_DAC_OVERRIDE, k.CAP_FOWNER, k.CAP_FSETID)
CHUNK_BYTES = 1024 * 1024
MEMORY_BYTES = 512 * 1024 * 1024
"""A compressed archive may hold a header of any size, which tarfile reads at once."""
CPU_S = 3600
_CALLS = """
read write pread64 readv writev lseek close open openat fstat stat lstat newfstatat statx mkdir mkdirat link linkat
symlink symlinkat unlink unlinkat chown lchown fchownat chmod fchmodat fchmodat2 utimensat brk mmap munmap mremap
mprotect madvise futex clock_gettime restart_syscall rt_sigprocmask rt_sigreturn exit exit_group
"""
CALLS = frozenset(_CALLS.split())
"""The system calls that the filter lets pass. Of a call with several names an architecture has one or another."""
_PRIVILEGED = stat.S_ISUID | stat.S_ISGID
_ROOT_FD = 3
_MOUNT_FLAGS = k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV | k.MOUNT_ATTR_NOEXEC


class Unpacker:
    """Writes members below `/` and keeps count. Names are taken as they come: `/` is the image."""

    def __init__(self, *, max_members: int, max_bytes: int) -> None:
        self.members = self.size_bytes = self.skipped = self.privileged = 0
        self._max_members, self._max_bytes = max_members, max_bytes
        self._directory_times: list[tuple[str, float]] = []

    def unpack(self, file: IO[bytes]) -> None:
        """Unpack all of `file`, whatever its compression."""
        with tarfile.open(fileobj=file, mode="r|*", tarinfo=StrictHeader) as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # or tarfile keeps every header in memory
                self.members += 1
                if self.members > self._max_members:
                    raise ArchiveRefused(f"more than {self._max_members} members")
                try:
                    self._unpack_member(archive, member)
                except OSError as error:
                    if error.errno is None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                        raise
                    raise ArchiveRefused(f"{member.name[:200]!r}: {error.strerror}") from error
        if not self.members:
            raise ArchiveRefused("the archive is empty")
        for path, mtime in reversed(self._directory_times):
            _set_time(path, mtime)

    def _unpack_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _path_of(member.name)
        if path == "/":
            return
        if member.isdir():
            self._make_directory(path, member)
        elif member.isreg():
            self._write_file(path, archive, member)
        elif member.issym():
            _make_way(path)
            os.symlink(member.linkname, path)
            os.lchown(path, member.uid, member.gid)
        elif member.islnk():
            _make_way(path)
            os.link(_path_of(member.linkname), path, follow_symlinks=False)
        else:
            self.skipped += 1

    def _make_directory(self, path: str, member: tarfile.TarInfo) -> None:
        if not os.path.isdir(path):  # a link to a directory stays, as with merged /usr
            _make_way(path)
            os.mkdir(path)
        self._own(path, member)
        self._directory_times.append((path, member.mtime))

    def _write_file(self, path: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        source = archive.extractfile(member)
        assert source is not None
        _make_way(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                self.size_bytes += len(chunk)
                if self.size_bytes > self._max_bytes:
                    raise ArchiveRefused(f"more than {self._max_bytes} bytes of files")
                target.write(chunk)
        self._own(path, member)
        _set_time(path, member.mtime)

    def _own(self, path: str, member: tarfile.TarInfo) -> None:
        os.chown(path, member.uid, member.gid)
        if member.isreg() and member.mode & _PRIVILEGED:
            self.privileged += 1
        os.chmod(path, member.mode & 0o7777 & ~_PRIVILEGED)


def _path_of(name: str) -> str:
    """Return where a member goes. A leading `/` means nothing; `..` and NUL are no names in an image."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ArchiveRefused(f"member name {name[:200]!r} is not a plain path")
    return "/" + "/".join(parts)


def _make_way(path: str) -> None:
    """Make the directories above `path`, and remove the present entry of that name unless it is a directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        parent = ""
        for part in path.split("/")[1:-1]:
            parent = f"{parent}/{part}"
            if not os.path.isdir(parent):
                os.mkdir(parent, 0o755)


def _set_time(path: str, mtime: float) -> None:
    seconds = min(max(mtime, 0), 2**33)  # absurd times are no reason to refuse
    os.utime(path, (seconds, seconds))


# The jail ---------------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Make the jail, unpack in it, leave a verdict on stdout."""
    parent_pid, max_members, max_bytes = (int(each) for each in sys.argv[1:])
    syscalls.end_with_parent(parent_pid)
    for name in CODECS:
        codecs.lookup(name)
    program = list_filter(CALLS)
    ours, theirs = os.pipe(), os.pipe()
    syscalls.unshare(k.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        _close(ours[0], theirs[1])
        _map_ids(pid, wait_fd=theirs[0], answer_fd=ours[1])
    _close(ours[1], theirs[0])
    try:
        _enter_jail(program, wait_fd=ours[0], answer_fd=theirs[1])
        said = _unpack(Unpacker(max_members=max_members, max_bytes=max_bytes))
    except OSError as error:
        said = verdict.refused(f"the jail can't be made: {error}")
    os.write(1, said)
    os._exit(0)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _map_ids(pid: int, *, wait_fd: int, answer_fd: int) -> NoReturn:
    """Write the id maps, as the parent, when the child has its user namespace, and end after the child."""
    if os.read(wait_fd, 1):
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(ID_MAP)
        os.write(answer_fd, b"1")
    os.close(answer_fd)
    os.waitpid(pid, 0)
    os._exit(0)


def _enter_jail(program: syscalls.FilterProgram, *, wait_fd: int, answer_fd: int) -> None:
    """Change to a root that is the image, with no descriptors but the standard streams. Every step must succeed."""
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)
    image_fd = syscalls.open_tree(_ROOT_FD, "", k.AT_EMPTY_PATH | k.OPEN_TREE_CLONE)
    syscalls.mount_setattr(image_fd, attr_set=_MOUNT_FLAGS)
    syscalls.unshare(k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
    syscalls.mount("", "/", "", k.MS_REC | k.MS_PRIVATE)
    syscalls.move_mount(image_fd, os.open("/", os.O_PATH))
    os.fchdir(image_fd)
    syscalls.mount("", ".", "", k.MS_PRIVATE)  # a copy of a shared mount is shared, and no root can be
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    os.chdir("/")
    syscalls.unshare(k.CLONE_NEWUSER)
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)  # a new user namespace may have cleared it
    os.write(answer_fd, b"1")
    if not os.read(wait_fd, 1):
        raise OSError(errno.EPERM, "the id maps were not written")
    syscalls.close_range(_ROOT_FD)
    os.umask(0o022)
    os.setgroups([])
    _drop_power()
    for name, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 1)):
        resource.setrlimit(name, (value, value))
    sys.path[:], sys.meta_path[:], sys.path_hooks[:] = [], [], []
    sys.path_importer_cache.clear()
    syscalls.set_filter(program)


def _drop_power() -> None:
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if capability not in CAPABILITIES:
            try:
                syscalls.prctl(k.PR_CAPBSET_DROP, capability)
            except OSError:  # EINVAL: past the kernel's last capability
                break
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(sum(1 << capability for capability in CAPABILITIES))
    syscalls.prctl(k.PR_SET_DUMPABLE, 0)


def _unpack(unpacker: Unpacker) -> bytes:
    """Return the verdict."""
    try:
        with open(0, "rb", buffering=CHUNK_BYTES, closefd=False) as file:
            unpacker.unpack(file)
    except ArchiveRefused as error:
        return verdict.refused(str(error))
    except tarfile.ReadError:
        return verdict.refused("this is no tar archive (plain, gzip, bzip2 or xz), or a broken one")
    except OSError as error:
        return verdict.refused(error.strerror or "the compressed data is broken")
    except Exception as error:  # noqa: BLE001  # a decoder met bytes its author did not think of: the archive's fault
        return verdict.refused(f"the archive is broken ({type(error).__name__})")
    return verdict.unpacked(Counts(unpacker.members, unpacker.size_bytes, unpacker.skipped, unpacker.privileged))


if __name__ == "__main__":
    main()
