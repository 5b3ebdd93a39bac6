"""Changes of a directory tree: made, moved, copied, removed, with another mode or owner. In a file worker; may block.

A copy is made beside its target and takes its place in one step, so a copy that fails or is killed never stands under
the target's name. Links are copied as links, and never followed. A FIFO, socket or device is not copied: the request is
refused instead of leaving a part out.

Sources: renameat2(2) (RENAME_NOREPLACE, EXDEV), unlink(2) (EACCES, EPERM), rmdir(2) (EBUSY), ioctl_ficlone(2), lseek(2)
(SEEK_DATA), proc_pid_fd(5).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from runner.files.contents import MAX_MODE, temporary_name
from runner.files.paths import Resolver, parent_of, refusal, status_of
from runner.files.tree import READ, Check, Walk, is_of_kernel, never_ends, open_directory
from runner.loop.context import Refused
from runner.loop.kernel import Kernel
from runner.wire.protocol import ChangeMode, ChangeOwner, CopyFile, Done, MakeDirectory, MoveFile, RemoveFile

_FICLONE = 0x40049409
_COPY_BYTES = 8 * 1024 * 1024
_COPIED_BITS = 0o1777
_MAX_ID = 65535
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Place = tuple[int, bytes]
"""A name, and the directory that it is in."""
_NO_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(request: MakeDirectory, resolver: Resolver) -> Done:
    """Make a directory; with `parents` also those above it, and one that is there is no error."""
    mode = 0o755 if request.mode is None else request.mode
    if not 0 <= mode <= _COPIED_BITS:
        raise Refused("BAD_REQUEST", "no mode of a directory")
    path = resolver.encode(request.path).rstrip(b"/") or b"/"
    try:
        if request.parents:
            os.close(resolver.make_directories(os.path.dirname(path)))
    except OSError as error:
        raise refusal(error, request.path) from None
    with parent_of(request.path, resolver) as (parent_fd, name, real):
        try:
            os.mkdir(name, mode, dir_fd=parent_fd)
        except FileExistsError:
            if not (request.parents and stat.S_ISDIR(os.stat(name, dir_fd=parent_fd).st_mode)):
                raise
        return Done(os.fsdecode(os.path.normpath(os.path.join(real, name))))


def move(request: MoveFile, resolver: Resolver, kernel: Kernel, check: Check) -> Done:
    """Give a file another name; between file systems it is copied, synced and then removed.

    Once the copy has its name, the removal goes on whatever `check` says, for as long as a worker may go on after its
    client: where that ends in its midst, the copy is whole and a part of the original is left.
    """
    with (
        parent_of(request.source, resolver) as (source_fd, source, source_real),
        parent_of(request.target, resolver) as (target_fd, target, target_real),
    ):
        place = _check_places((source_real, source), (target_real, target))
        try:
            _rename(kernel, source_fd, source, target_fd, target, overwrite=request.overwrite)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _check_removable(source_fd, source, check)
            _Copying(kernel, check, syncs=True).into_place(
                (source_fd, source), (target_fd, target), overwrite=request.overwrite
            )
            _remove_moved((source_fd, source), (target_fd, target), request)
        return Done(os.fsdecode(place))


def _check_removable(parent_fd: int, name: bytes, check: Check) -> None:
    """Refuse a file of which a part could not be removed, before a copy of it is made."""
    status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    _check_one_removable(parent_fd, status)
    if stat.S_ISDIR(status.st_mode):
        top_fd = open_directory(parent_fd, name)
        try:
            for found in Walk(top_fd, check=check):
                if not found.is_left:
                    _check_one_removable(found.parent_fd, found.status)
        finally:
            os.close(top_fd)


def _check_one_removable(parent_fd: int, status: os.stat_result) -> None:
    above = os.fstat(parent_fd)
    if stat.S_ISDIR(status.st_mode) and status.st_dev != above.st_dev:  # a mount point
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    is_sticky = above.st_mode & stat.S_ISVTX and os.geteuid() not in (0, above.st_uid, status.st_uid)
    if is_sticky or not os.access(b".", os.W_OK | os.X_OK, dir_fd=parent_fd):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _remove_moved(source: _Place, target: _Place, request: MoveFile) -> None:
    """Remove what has a copy under its new name. Where nothing of it can be removed, which Landlock may decide and
    access(2) does not tell, the copy goes instead, unless it has replaced another file."""
    removal = _Removal(never_ends)
    try:
        removal.remove(*source, recursive=True)
    except (OSError, Refused) as error:
        refused = error if isinstance(error, Refused) else refusal(error, request.source)
        if not removal.count and not request.overwrite:
            _Removal(never_ends).remove(*target, recursive=True)
            raise refused from None
        left = "copied whole, and not all of the original could be removed"
        raise Refused(refused.error.code, f"{left}: {refused.error.message}") from None


def copy(request: CopyFile, resolver: Resolver, kernel: Kernel, check: Check) -> Done:
    """Copy a file, a link or a directory with all that is below it; blocks are shared where the file system can."""
    with (
        parent_of(request.source, resolver) as (source_fd, source, source_real),
        parent_of(request.target, resolver) as (target_fd, target, target_real),
    ):
        place = _check_places((source_real, source), (target_real, target))
        _Copying(kernel, check, syncs=False).into_place(
            (source_fd, source), (target_fd, target), overwrite=request.overwrite
        )
        return Done(os.fsdecode(place))


def change_mode(request: ChangeMode, resolver: Resolver, check: Check) -> Done:
    """Set the permission bits of a file; with `recursive` of all that is below, links left out."""
    if not 0 <= request.mode <= MAX_MODE:
        raise Refused("BAD_REQUEST", "no such mode")
    return _change(request, resolver, check, lambda path: os.chmod(path, request.mode))


def change_owner(request: ChangeOwner, resolver: Resolver, check: Check) -> Done:
    """Set user and group of a file, -1 for the present one; what may be set is the kernel's decision."""
    if not all(-1 <= each <= _MAX_ID for each in (request.owner, request.group)):
        raise Refused("BAD_REQUEST", "no such id")
    return _change(request, resolver, check, lambda path: os.chown(path, request.owner, request.group))


def _change(
    request: ChangeMode | ChangeOwner, resolver: Resolver, check: Check, change: Callable[[bytes], None]
) -> Done:
    """Change what a path leads to, and with `recursive` what is below: a directory after its content."""
    try:
        fd, real = resolver.open_existing(resolver.encode(request.path))
        try:
            if request.recursive and stat.S_ISDIR(os.fstat(fd).st_mode):
                for found in Walk(fd, real=real, check=check):
                    is_link = stat.S_ISLNK(found.status.st_mode)
                    if not is_link and (found.is_left or not stat.S_ISDIR(found.status.st_mode)):
                        _change_one(found.parent_fd, found.name, change)
            change(b"/proc/self/fd/%d" % fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise refusal(error, request.path) from None
    return Done(os.fsdecode(real))


def _change_one(parent_fd: int, name: bytes, change: Callable[[bytes], None]) -> None:
    try:
        fd = os.open(name, _NO_LINK, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):  # it was none when it was found
            change(b"/proc/self/fd/%d" % fd)
    finally:
        os.close(fd)


def _check_places(source: tuple[bytes, bytes], target: tuple[bytes, bytes]) -> bytes:
    """Return the target's real path. Raises `Refused` as `_place_of`, and for a target in the source itself."""
    begin, end = _place_of(*source), _place_of(*target)
    if begin == end or end.startswith(begin + b"/"):
        raise Refused("INVALID_PATH", "the target is the source, or in it")
    return end


def _place_of(directory: bytes, name: bytes) -> bytes:
    """Return the real path of a file that is to be changed. Raises `Refused` for a root, and for the kernel's files."""
    if name == b".":
        raise Refused("PERMISSION_DENIED", "this directory itself can't be changed by its own name")
    place = os.path.join(directory, name)
    if is_of_kernel(place):
        raise Refused("NOT_A_FILE", "the path leads to the kernel's own files")
    return place


def _rename(kernel: Kernel, source_fd: int, source: bytes, target_fd: int, target: bytes, *, overwrite: bool) -> None:
    if overwrite:
        try:
            os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        except NotADirectoryError:
            raise Refused("NOT_A_DIRECTORY", "a directory takes the place of no file") from None
    else:
        kernel.rename_new(source_fd, source, target_fd, target)


@dataclass(frozen=True, slots=True)
class _Copying:
    """The making of copies. With `syncs` they are on the disk when they are made."""

    kernel: Kernel
    check: Check
    syncs: bool

    def into_place(self, source: _Place, target: _Place, *, overwrite: bool) -> None:
        """Copy a file beside its target, and let the copy take its place; or leave nothing."""
        target_fd, name = target
        if not overwrite and status_of(name, target_fd) is not None:  # sooner than after a long copy
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        temporary = temporary_name(os.getpid())
        directory_fd = open_directory(target_fd, b".") if self.syncs else -1
        try:
            self._copy(source, (target_fd, temporary))
            _rename(self.kernel, target_fd, temporary, target_fd, name, overwrite=overwrite)
            if self.syncs:
                os.fsync(directory_fd)
        except BaseException:
            try:
                _Removal(never_ends).remove(target_fd, temporary, recursive=True)
            except OSError:
                pass  # never made, or the sandbox has removed it
            raise
        finally:
            if self.syncs:
                os.close(directory_fd)

    def _copy(self, source: _Place, target: _Place) -> None:
        source_fd, name = source
        status = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            self._copy_leaf(source, status, target)
            return
        top_fd = open_directory(source_fd, name)
        made = [(_make_closed(*target), status)]
        try:
            for found in Walk(top_fd, check=self.check):
                depth = found.path.count(b"/") + 1
                while len(made) > depth:
                    self._close(*made.pop())
                if found.is_left:
                    continue
                if stat.S_ISDIR(found.status.st_mode):
                    made.append((_make_closed(made[-1][0], found.name), found.status))
                else:
                    self._copy_leaf((found.parent_fd, found.name), found.status, (made[-1][0], found.name))
            while made:
                self._close(*made.pop())
        finally:
            os.close(top_fd)
            for fd, _ in made:
                os.close(fd)

    def _close(self, fd: int, status: os.stat_result) -> None:
        """Give a copied directory its times and mode, now that its entries are in it, and close it."""
        try:
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fchmod(fd, status.st_mode & _COPIED_BITS)
            if self.syncs:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _copy_leaf(self, source: _Place, status: os.stat_result, target: _Place) -> None:
        (source_fd, name), (target_fd, new_name) = source, target
        times = status.st_atime_ns, status.st_mtime_ns
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source_fd), new_name, dir_fd=target_fd)
            os.utime(new_name, ns=times, dir_fd=target_fd, follow_symlinks=False)
            return
        if not stat.S_ISREG(status.st_mode):
            raise Refused("NOT_A_FILE", f"neither file, directory nor link: {os.fsdecode(name)[:200]}")
        with open(os.open(name, READ, dir_fd=source_fd), "rb", buffering=0) as old:
            if not stat.S_ISREG(os.fstat(old.fileno()).st_mode):
                raise Refused("NOT_A_FILE", f"replaced meanwhile: {os.fsdecode(name)[:200]}")
            with open(os.open(new_name, _CREATE, 0o600, dir_fd=target_fd), "wb", buffering=0) as new:
                self._copy_content(old.fileno(), new.fileno())
                os.fchmod(new.fileno(), status.st_mode & _COPIED_BITS)
                os.utime(new.fileno(), ns=times)
                if self.syncs:
                    os.fsync(new.fileno())

    def _copy_content(self, old_fd: int, new_fd: int) -> None:
        """Copy what is written of a file; its holes stay holes."""
        try:
            fcntl.ioctl(new_fd, _FICLONE, old_fd)
            return
        except OSError:
            pass  # another file system, or one that shares no blocks
        size = os.fstat(old_fd).st_size
        os.ftruncate(new_fd, size)
        offset = 0
        while offset < size:
            try:
                offset = os.lseek(old_fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    return
                raise
            end = os.lseek(old_fd, offset, os.SEEK_HOLE)
            os.lseek(new_fd, offset, os.SEEK_SET)
            while offset < end:
                self.check()
                copied = os.sendfile(new_fd, old_fd, offset, min(end - offset, _COPY_BYTES))
                if not copied:
                    return
                offset += copied


def _make_closed(parent_fd: int, name: bytes) -> int:
    """Make a directory that is closed to all others until it has its mode."""
    os.mkdir(name, 0o700, dir_fd=parent_fd)
    return open_directory(parent_fd, name)


def remove(request: RemoveFile, resolver: Resolver, check: Check) -> Done:
    """Remove a file, a link or a directory."""
    with parent_of(request.path, resolver) as (parent_fd, name, real):
        place = _place_of(real, name)
        _Removal(check).remove(parent_fd, name, recursive=request.recursive)
        return Done(os.fsdecode(place))


class _Removal:
    """The removal of a file. `count`: files and directories that are gone."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self.count = 0

    def remove(self, parent_fd: int, name: bytes, *, recursive: bool) -> None:
        """Remove a file, a link or a directory."""
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            self._unlink(name, parent_fd)
            return
        if not self._remove_directory(name, parent_fd, must=not recursive):
            self._empty(open_directory(parent_fd, name))
            self._remove_directory(name, parent_fd)

    def _empty(self, top_fd: int) -> None:
        """Remove everything below a directory, whose descriptor is closed."""
        try:
            for found in Walk(top_fd, check=self._check):
                if stat.S_ISDIR(found.status.st_mode):
                    self._remove_directory(found.name, found.parent_fd, must=found.is_left)
                else:
                    self._unlink(found.name, found.parent_fd)
        finally:
            os.close(top_fd)

    def _unlink(self, name: bytes, parent_fd: int) -> None:
        os.unlink(name, dir_fd=parent_fd)
        self.count += 1

    def _remove_directory(self, name: bytes, parent_fd: int, *, must: bool = True) -> bool:
        """Remove a directory; unless that is a `must`, return False for one with entries."""
        # Before the entries go, too: rmdir(2) looks for them last, behind the mount, the mode above, the sticky bit and
        # Landlock, so a directory that has to stay keeps what is in it.
        try:
            os.rmdir(name, dir_fd=parent_fd)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            if must:
                raise Refused("NOT_EMPTY", f"the directory is not empty: {os.fsdecode(name)[:200]}") from None
            return False
        self.count += 1
        return True
