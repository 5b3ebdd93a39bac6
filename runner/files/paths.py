"""Resolution of paths inside the sandbox, by the kernel with the sandbox user's rights, never lexically.

The result is an O_PATH descriptor whose real place was checked. Later steps go through the descriptor, so nothing can
be exchanged in between. No file's content is opened here.

Sources: openat2(2) (RESOLVE_NO_MAGICLINKS keeps PID 1's own /proc/self out of reach), open(2) "O_PATH",
proc_pid_fd(5).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runner.files.tree import is_of_kernel, open_directory
from runner.loop.config import RunnerConfig
from runner.loop.context import Refused
from runner.loop.kernel import RESOLVE_NO_MAGICLINKS, Kernel
from runner.wire.protocol import ErrorCode

_MAX_LINKS = 16
_MAX_REPLACEMENTS = 100
"""Times that a file may be replaced while it is opened: each time the one that was found has no name any more."""
_NEW_DIRECTORY_MODE = 0o755
_O_PATH = os.O_PATH | os.O_CLOEXEC

_CODES: dict[int, ErrorCode] = {
    errno.ENOENT: "FILE_NOT_FOUND",
    errno.ENOTDIR: "FILE_NOT_FOUND",
    errno.EACCES: "PERMISSION_DENIED",
    errno.EPERM: "PERMISSION_DENIED",
    errno.EROFS: "PERMISSION_DENIED",
    errno.EBUSY: "PERMISSION_DENIED",  # rename(2), rmdir(2): a mount point
    errno.EOVERFLOW: "PERMISSION_DENIED",  # chown(2) to an id that the mount has no place for
    errno.EISDIR: "IS_DIRECTORY",
    errno.ENOSPC: "DISK_FULL",
    errno.EDQUOT: "DISK_FULL",
    errno.EFBIG: "TOO_LARGE",
    errno.ENAMETOOLONG: "INVALID_PATH",
    errno.ELOOP: "PATH_OUTSIDE",
    errno.EEXIST: "EXISTS",
    errno.ENOTEMPTY: "NOT_EMPTY",
}


def refusal(error: OSError, path: str) -> Refused:
    """Return the refusal with the code and words for the kernel's error."""
    number = error.errno or 0
    return Refused(_CODES.get(number, "IO_ERROR"), f"{os.strerror(number).lower()}: {path[:200]}")


@dataclass(frozen=True, slots=True)
class FileTarget:
    """Place of a file that exists or is to be made: a checked directory (the descriptor is the holder's), a name in the
    directory, and the mode of the file that exists."""

    directory_fd: int
    directory: bytes
    name: bytes
    mode: int | None

    @property
    def path(self) -> bytes:
        return os.path.join(self.directory, self.name)


class Resolver:
    """Resolves request paths, as the user of the request.

    Where programs run, a path may lead anywhere but to the kernel's own files: some of them hang the reader, or change
    the sandbox. Where there are only files, it may not leave the workspace.
    """

    def __init__(self, config: RunnerConfig, kernel: Kernel) -> None:
        self._workspace = os.fsencode(config.workspace)
        self._is_rooted = config.files_only
        self._top = self._workspace if config.files_only else b"/"
        self._kernel = kernel

    def encode(self, path: str) -> bytes:
        """Return the absolute path that a request means. Where there are only files, `/` is the workspace as well:
        `/a` is `/workspace/a`, while `/workspace/a` stays what it is.

        Raises:
            Refused: INVALID_PATH.
        """
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            raise Refused("INVALID_PATH", "the path holds a lone surrogate") from None
        if not encoded or b"\0" in encoded:
            raise Refused("INVALID_PATH", "the path is empty or holds a NUL character")
        if self._is_rooted and not (encoded + b"/").startswith(self._workspace + b"/"):
            encoded = encoded.lstrip(b"/")
        return os.path.join(self._workspace, encoded) if encoded else self._workspace

    def is_top(self, path: bytes) -> bool:
        """Return whether an absolute path names that as such, which no path may leave."""
        return path == self._top

    def open_existing(self, path: bytes) -> tuple[int, bytes]:
        """Return an O_PATH descriptor (the caller's) of what `path` leads to, links followed, and its real path.

        Raises:
            Refused: as `check_inside`.
            OSError: as open(2).
        """
        for _ in range(_MAX_REPLACEMENTS):
            fd = self._open_path(os.open("/", _O_PATH | os.O_DIRECTORY), path, 0)
            try:
                return fd, self.check_inside(fd)
            except Refused as refused:
                os.close(fd)
                if refused.error.code != "FILE_NOT_FOUND":
                    raise
            except BaseException:
                os.close(fd)
                raise
        raise Refused("FILE_NOT_FOUND", "the file is replaced again and again")

    def check_inside(self, fd: int) -> bytes:
        """Return the real path of an open descriptor.

        Raises:
            Refused: PATH_OUTSIDE, not in the workspace; NOT_A_FILE, the kernel's own; FILE_NOT_FOUND, deleted.
        """
        path = os.readlink(b"/proc/self/fd/%d" % fd)
        if self._is_rooted and not (path + b"/").startswith(self._workspace + b"/"):
            raise Refused("PATH_OUTSIDE", f"the path leads outside of {os.fsdecode(self._workspace)}")
        if is_of_kernel(path):
            raise Refused("NOT_A_FILE", "the path leads to the kernel's own files")
        if os.fstat(fd).st_nlink == 0:
            raise Refused("FILE_NOT_FOUND", "the file was deleted")
        return path

    def target_for_writing(self, path: bytes) -> FileTarget:
        """Return the place of a file to be written to `path`. Missing directories are made.

        Raises:
            Refused, OSError
        """
        self._refuse_directory(path)
        for _ in range(_MAX_LINKS):
            directory, name = os.path.split(path)
            if name in (b"", b".", b".."):
                raise Refused("IS_DIRECTORY", "the path names a directory")
            directory_fd = self.make_directories(directory)
            try:
                real = self.check_inside(directory_fd)
                link = _read_link(name, directory_fd)
                if link is None:
                    return FileTarget(directory_fd, real, name, mode_of_file(name, directory_fd))
            except BaseException:
                os.close(directory_fd)
                raise
            os.close(directory_fd)
            path = os.path.join(real, link)
        raise Refused("PATH_OUTSIDE", "too many symbolic links")

    def _refuse_directory(self, path: bytes) -> None:
        """Raise the error that reading would raise for a directory, the top included, or for a path outside.

        Only for a good message: the file may change at any time, and writing checks again.
        """
        try:
            fd, _ = self.open_existing(path)
        except OSError:
            return
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise Refused("IS_DIRECTORY", "the path names a directory")
        finally:
            os.close(fd)

    def make_directories(self, path: bytes) -> int:
        """Return an O_PATH descriptor of the directory, made step by step where it is missing."""
        fd = os.open("/", _O_PATH | os.O_DIRECTORY)
        for name in path.split(b"/"):
            if not name:
                continue
            try:
                next_fd = self._open_path(os.dup(fd), name, os.O_DIRECTORY)
            except FileNotFoundError:
                try:
                    self.check_inside(fd)
                    os.mkdir(name, _NEW_DIRECTORY_MODE, dir_fd=fd)
                    next_fd = self._open_path(os.dup(fd), name, os.O_DIRECTORY)
                except FileExistsError:  # a dangling link
                    raise Refused("FILE_NOT_FOUND", "a link on the way leads nowhere") from None
                finally:
                    os.close(fd)
            except BaseException:
                os.close(fd)
                raise
            else:
                os.close(fd)
            fd = next_fd
        return fd

    def _open_path(self, directory_fd: int, path: bytes, flags: int) -> int:
        """Open a path below a directory, whose descriptor is closed."""
        try:
            return self._kernel.openat2(directory_fd, path, _O_PATH | flags, 0, RESOLVE_NO_MAGICLINKS)
        finally:
            os.close(directory_fd)


def _read_link(name: bytes, directory_fd: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):  # no link, or nothing there
            return None
        raise


def status_of(name: bytes, directory_fd: int) -> os.stat_result | None:
    """Return the status of a file in a directory, of a link itself; None if there is no such file."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def mode_of_file(name: bytes, directory_fd: int) -> int | None:
    """Return the permission bits of a regular file in a directory, None if there is none.

    Raises:
        Refused: it is of another kind.
    """
    status = status_of(name, directory_fd)
    if status is None:
        return None
    check_regular(status)
    return stat.S_IMODE(status.st_mode) & 0o777


def open_regular(path: str, resolver: Resolver) -> tuple[int, bytes]:
    """Return a descriptor to read from, the caller's, of the regular file that a path leads to, and its real path.

    Raises:
        Refused
    """
    try:
        path_fd, real = resolver.open_existing(resolver.encode(path))
        try:
            check_regular(os.fstat(path_fd))
            fd = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        finally:
            os.close(path_fd)
    except OSError as error:
        raise refusal(error, path) from None
    return fd, real


def check_regular(status: os.stat_result) -> None:
    """Check that a file is a regular one: a FIFO, socket or device could block the reader.

    Raises:
        Refused
    """
    if stat.S_ISDIR(status.st_mode):
        raise Refused("IS_DIRECTORY", "the path names a directory")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("NOT_A_FILE", "the path names something that is not a regular file")


@contextmanager
def directory_of(path: str, resolver: Resolver) -> Iterator[tuple[int, bytes]]:
    """Open the directory that a path leads to; yield descriptor and real path."""
    try:
        path_fd, real = resolver.open_existing(resolver.encode(path))
    except OSError as error:
        raise refusal(error, path) from None
    try:
        if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
            raise Refused("NOT_A_DIRECTORY", f"no directory: {path[:200]}")
        fd = open_directory(path_fd, b".")
    except OSError as error:
        raise refusal(error, path) from None
    finally:
        os.close(path_fd)
    try:
        yield fd, real
    finally:
        os.close(fd)


@contextmanager
def made_directory_of(path: str, resolver: Resolver) -> Iterator[tuple[int, bytes]]:
    """Open the directory that a path leads to, making what is missing; as `directory_of`."""
    try:
        os.close(resolver.make_directories(resolver.encode(path)))
    except NotADirectoryError:
        raise Refused("NOT_A_DIRECTORY", f"no directory: {path[:200]}") from None
    except OSError as error:
        raise refusal(error, path) from None
    with directory_of(path, resolver) as opened:
        yield opened


@contextmanager
def parent_of(path: str, resolver: Resolver) -> Iterator[tuple[int, bytes, bytes]]:
    """Open the directory above the file that a path names; yield descriptor, name and real path. The name may be a
    link, which is not followed, and is `.` for the top."""
    encoded = resolver.encode(path).rstrip(b"/") or b"/"
    directory, name = os.path.split(encoded)
    if resolver.is_top(encoded) or name in (b".", b".."):
        directory, name = encoded, b"."
    try:
        fd, real = resolver.open_existing(directory)
    except OSError as error:
        raise refusal(error, path) from None
    try:
        yield fd, name, real
    except OSError as error:
        raise refusal(error, path) from None
    finally:
        os.close(fd)
