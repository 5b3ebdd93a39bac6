"""Reading and writing one file for a client, as the sandbox user, in pieces between other work of the loop.

PID 1 must not block: only regular files are opened, and only after their kind was checked on the descriptor itself.

Sources: open(2) (O_TMPFILE), linkat(2), rename(2) (atomic replacement), proc_pid_fd(5) (reopening a checked O_PATH
descriptor).
"""

from __future__ import annotations

import errno
import functools
import os

from runner.files.paths import FileTarget, Resolver, check_regular, refusal
from runner.files.worker import FileWorker
from runner.loop.context import Context, Refused, Sink, refuse
from runner.wire.protocol import CHUNK_BYTES, Done, Error, FileInfo, Kind, ReadFile, WriteFile

_NEW_FILE_MODE = 0o644


class FileReadJob:
    """Job of a `ReadFile`: sends a file. Ends after `max_bytes`, whatever size the file has."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sink: Sink | None = None
        self._fd = -1
        self._left = 0
        self._path = ""
        self._is_scheduled = False

    def begin(self, request: ReadFile, sink: Sink) -> None:
        """Open the file and send its first piece.

        Raises:
            Refused
        """
        refuse("max_bytes is negative" if request.max_bytes < 0 else None)
        self._open(request.path)
        self._sink = sink
        size = os.fstat(self._fd).st_size
        self._left = request.max_bytes
        sink.start(FileInfo(self._path, size, size > request.max_bytes))
        self._pump()

    def _open(self, path: str) -> None:
        resolver = Resolver(self._context.config, self._context.kernel)
        try:
            with self._context.as_user:
                path_fd, real = resolver.open_existing(resolver.encode(path))
                try:
                    check_regular(os.fstat(path_fd))
                    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                    self._fd = os.open(f"/proc/self/fd/{path_fd}", flags)
                finally:
                    os.close(path_fd)
        except OSError as error:
            raise refusal(error, path) from None
        self._path = os.fsdecode(real)

    def _pump(self) -> None:
        """Send one piece, and the next after other work had its turn."""
        self._is_scheduled = False
        if self._sink is None or self._sink.is_full:
            return
        try:
            chunk = os.read(self._fd, min(CHUNK_BYTES, self._left)) if self._left else b""
        except OSError as error:
            self._finish(Error("IO_ERROR", f"{os.strerror(error.errno or 0).lower()}: {self._path[:200]}"))
            return
        if not chunk:
            self._finish(Done(self._path))
            return
        self._left -= len(chunk)
        self._sink.send(Kind.DATA, chunk)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and self._sink is not None:
            self._is_scheduled = True
            self._context.loop.call_soon(self._pump, lambda _error: self._finish(Error("IO_ERROR", "reading failed")))

    def _finish(self, message: Done | Error) -> None:
        sink = self._sink
        self.on_close()
        if sink is not None:
            sink.finish(message)

    def on_data(self, data: bytes) -> None:
        """Nothing is sent to a reader."""

    def on_end(self) -> None:
        """Nothing is sent to a reader."""

    def on_cancel(self) -> None:
        self._finish(Error("IO_ERROR", "cancelled"))

    def on_close(self) -> None:
        self._sink = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def on_drained(self) -> None:
        self._schedule()

    @property
    def wants_input(self) -> bool:
        return True


class FileWriteJob:
    """Job of a `WriteFile`: receives into a file without a name, which takes its place at END."""

    def __init__(self, context: Context, serial: int) -> None:
        self._context = context
        # Random: a workspace is shared by sandboxes whose serials all begin at 1, and may hold what a killed one left.
        self._temporary = b".sandkasten-%d-%s.part" % (serial, os.urandom(8).hex().encode("ascii"))
        self._sink: Sink | None = None
        self._target: FileTarget | None = None
        self._fd = -1
        self._syncs = False
        self._worker: FileWorker | None = None

    def begin(self, request: WriteFile, sink: Sink) -> None:
        """Open the new file.

        Raises:
            Refused
        """
        self._sink = sink
        self._syncs = request.sync
        try:
            self._open(request.path)
        except Refused:
            self.on_close()
            raise

    def _open(self, path: str) -> None:
        resolver = Resolver(self._context.config, self._context.kernel)
        try:
            with self._context.as_user:
                self._target = target = resolver.target_for_writing(resolver.encode(path))
                _check_writable(target)
                self._fd = _open_new(target.directory_fd, self._temporary)
        except OSError as error:
            raise refusal(error, path) from None
        self._context.config.passing("runner.files.opened")

    def on_data(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._fail(refusal(error, os.fsdecode(self._target.path) if self._target else ""))

    def on_end(self) -> None:
        target, fd, temporary = self._target, self._fd, self._temporary
        assert target is not None
        try:
            if self._syncs:  # the disk may take its time
                work = functools.partial(self._place_durably, fd, temporary, target)
                self._worker = FileWorker(self._context, work, self._on_answer, kept=(fd, target.directory_fd))
                return
            with self._context.as_user:
                answer = _put_in_place(fd, temporary, target, syncs=False)
        except OSError as error:
            self._fail(refusal(error, os.fsdecode(target.path)))
        else:
            self._on_answer(answer)

    def _place_durably(self, fd: int, temporary: bytes, target: FileTarget, _start: object) -> Done:
        """Work of a file worker: put the file in place when it is on the disk."""
        os.fsync(fd)
        self._context.config.passing("runner.files.synced")
        return _put_in_place(fd, temporary, target, syncs=True)

    def _on_answer(self, answer: object) -> None:
        self._context.config.passing("runner.files.placed")
        sink, self._worker = self._sink, None
        if isinstance(answer, Error):
            self.on_close()
        else:
            self._forget()
        if sink is not None:
            sink.finish(answer)

    def on_cancel(self) -> None:
        self._fail(Refused("IO_ERROR", "cancelled"))

    def on_close(self) -> None:
        """The client is gone. Before END the old file stays; after it, either the old or the new file is there."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        if self._fd >= 0 and self._target is not None:
            try:
                with self._context.as_user:
                    os.unlink(self._temporary, dir_fd=self._target.directory_fd)
            except OSError:
                pass  # the sandbox has removed it, perhaps with its directory
        self._forget()

    def on_drained(self) -> None:
        """Nothing waits for room."""

    @property
    def wants_input(self) -> bool:
        return True

    def _fail(self, refused: Refused) -> None:
        sink = self._sink
        self.on_close()
        if sink is not None:
            sink.finish(refused.error)

    def _forget(self) -> None:
        self._sink = None
        for fd in (self._fd, self._target.directory_fd if self._target else -1):
            if fd >= 0:
                os.close(fd)
        self._fd, self._target = -1, None


def _open_new(directory_fd: int, temporary: bytes) -> int:
    """Open a new file without a name, of which nothing is left if PID 1 is killed before the file is whole. Where the
    file system can't do that, the file has the temporary name."""
    try:
        return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(temporary, flags, 0o600, dir_fd=directory_fd)


def _put_in_place(fd: int, temporary: bytes, target: FileTarget, *, syncs: bool) -> Done:
    """Give the new file its mode and its name; with `syncs` wait until both are on the disk."""
    os.fchmod(fd, _NEW_FILE_MODE if target.mode is None else target.mode)
    if syncs:
        os.fsync(fd)
    _name(fd, temporary, target)
    if syncs:
        try:
            directory_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target.directory_fd)
        except PermissionError:  # a directory that can be written and not read
            # sync(2) has no effect here. The rename changed the inode, so its change of name is written with the inode.
            os.fsync(fd)
        else:
            os.fsync(directory_fd)
            os.close(directory_fd)
    return Done(os.fsdecode(target.path))


def _name(fd: int, temporary: bytes, target: FileTarget) -> None:
    """Let the file take its place in one step. Only rename(2) replaces, and it starts from a name."""
    directory_fd = target.directory_fd
    if os.fstat(fd).st_nlink == 0:
        path = b"/proc/self/fd/%d" % fd
        if target.mode is None:
            try:
                os.link(path, target.name, dst_dir_fd=directory_fd)
            except FileExistsError:  # another file took the name just now
                pass
            else:
                return
        os.link(path, temporary, dst_dir_fd=directory_fd)
    os.rename(temporary, target.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def _check_writable(target: FileTarget) -> None:
    """Refuse to replace a file that its own mode protects; rename(2) would replace it."""
    if target.mode is None:
        return
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        os.close(os.open(target.name, flags, dir_fd=target.directory_fd))
    except OSError as error:
        if error.errno != errno.ETXTBSY:  # a running program may be replaced
            raise
