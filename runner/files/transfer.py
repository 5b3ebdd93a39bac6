"""Reading and writing one file for a client, as the sandbox user, in pieces between other work of the loop.

PID 1 must not block: only regular files are opened, and only after their kind was checked on the descriptor itself.

Sources: open(2) (O_TMPFILE), linkat(2), rename(2) (atomic replacement), proc_pid_fd(5) (reopening a checked O_PATH
descriptor).
"""

from __future__ import annotations

import functools
import os

from runner.files.contents import check_writable, open_new, open_part, put_in_place, temporary_name
from runner.files.paths import FileTarget, Resolver, open_regular, refusal
from runner.files.worker import FileJobs, FileWorker, account_of
from runner.loop.context import Context, Job, Refused, Sink, refuse
from runner.wire.protocol import CHUNK_BYTES, Done, Error, FileInfo, FilePart, GetFile, Kind, ReadFile, WriteFile

_INLINE_BYTES = 1024 * 1024
"""Most that PID 1 reads of a file by itself for a `GetFile`: a process would cost more."""


def begin_get(context: Context, jobs: FileJobs, request: GetFile, sink: Sink) -> Job:
    """Begin to send a file: by PID 1 itself if that is a small matter, else by a worker.

    Raises:
        Refused
    """
    config = context.config
    account = account_of(context, request.user)
    if context.settings.rules_fd < 0:  # PID 1 is under no rules
        resolver = Resolver(config, context.kernel, anywhere=not config.files_only)
        try:
            with context.as_user.of(account):
                fd, head = open_part(request, resolver)
        except Refused as refused:
            if refused.error.code != "PERMISSION_DENIED":  # or a worker's groups give the right
                raise
        else:
            if head.count <= _INLINE_BYTES:
                reader = FileReadJob(context)
                reader.send(fd, head, 0 if request.head_only else head.count, sink)
                return reader
            os.close(fd)
    return jobs.begin(request, sink)


class FileReadJob:
    """Job of a `ReadFile`, or of a `GetFile`: sends a file. Ends after `max_bytes`, whatever size the file has."""

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

    def send(self, fd: int, head: FilePart, count: int, sink: Sink) -> None:
        """Send a part of an open file, which is the job's from now on."""
        self._fd, self._path, self._sink, self._left = fd, head.path, sink, count
        os.lseek(fd, head.offset, os.SEEK_SET)
        sink.start(head)
        self._pump()

    def _open(self, path: str) -> None:
        resolver = Resolver(self._context.config, self._context.kernel)
        with self._context.as_user:
            self._fd, real = open_regular(path, resolver)
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
        self._temporary = temporary_name(serial)
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
                check_writable(target)
                self._fd = open_new(target.directory_fd, self._temporary)
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
                answer = put_in_place(fd, temporary, target, syncs=False)
        except OSError as error:
            self._fail(refusal(error, os.fsdecode(target.path)))
        else:
            self._on_answer(answer)

    def _place_durably(self, fd: int, temporary: bytes, target: FileTarget, _start: object) -> Done:
        """Work of a file worker: put the file in place when it is on the disk."""
        os.fsync(fd)
        self._context.config.passing("runner.files.synced")
        return put_in_place(fd, temporary, target, syncs=True)

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
