"""Work of PID 1's own that may take long or meet something that blocks, in a fork of it that is the sandbox user.

The fork runs our code and no other: it has no capability, keeps only the descriptors it was given, and ends with one
answer, a message of `protocol.ANSWERS`. PID 1 never waits for it; whoever gives up kills it.

Sources: pipe(7); fork(2); credentials(7).
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterable
from typing import NoReturn

from runner.files.paths import FileRefused, refusal
from runner.loop.context import Context
from runner.loop.kernel import FD_MAX, Kernel
from runner.loop.loop import READ
from runner.loop.reaper import unblock_signals
from runner.process.spawn import change_user, fork
from runner.wire.protocol import ANSWERS, CHUNK_BYTES, MAX_FRAME_BYTES, Error, ProtocolError

Work = Callable[[], object]
"""Runs in the fork and returns the answer. Raises `FileRefused` or `OSError` for what went wrong."""

_CUT_SHORT = Error("IO_ERROR", "the work was cut short")


class Offshoot:
    """One such fork. `on_answer` is called once, unless it is killed before."""

    def __init__(
        self, context: Context, work: Work, on_answer: Callable[[object], None], *, kept: Iterable[int] = ()
    ) -> None:
        """Raises `OSError`: no process could be made."""
        self._context = context
        self._on_answer = on_answer
        self._answer = bytearray()
        self._fd, answer_fd = os.pipe2(os.O_CLOEXEC)
        self._pid = 0
        try:
            pid = fork(context.kernel)
            if pid == 0:
                _live(context, work, answer_fd, (*kept, answer_fd))
        except OSError:
            os.close(self._fd)
            raise
        finally:
            os.close(answer_fd)
        self._pid = pid
        context.reaper.watch(pid, self._on_death)
        os.set_blocking(self._fd, False)
        context.loop.watch(self._fd, READ, self._on_readable, lambda _error: self._finish(_CUT_SHORT))

    def kill(self) -> None:
        """End it, whatever it does; its answer is not wanted any more."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        self._close()

    def _on_death(self, _status: int) -> None:
        self._pid = 0

    def _on_readable(self, _events: int) -> None:
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._answer += chunk
        if not chunk or len(self._answer) > MAX_FRAME_BYTES:
            self._finish(_decode(bytes(self._answer)))

    def _finish(self, answer: object) -> None:
        if self._fd >= 0:
            self._close()
            self._on_answer(answer)

    def _close(self) -> None:
        if self._fd >= 0:
            self._context.loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1


def _decode(data: bytes) -> object:
    """Return the answer; of a fork that was killed there is none, or half of one."""
    try:
        return ANSWERS.decode(data)
    except ProtocolError:
        return _CUT_SHORT


def _live(context: Context, work: Work, answer_fd: int, kept: tuple[int, ...]) -> NoReturn:
    """The fork. Nothing may unwind into PID 1's stack."""
    try:
        try:
            _become_user(context, kept)
            answer = work()
        except FileRefused as refused:
            answer = Error(refused.code, str(refused))
        except OSError as error:
            failure = refusal(error, os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "")
            answer = Error(failure.code, str(failure))
        except Exception as error:  # noqa: BLE001 - the last frame of the process
            answer = Error("IO_ERROR", f"the work failed ({type(error).__name__})")
        data = memoryview(ANSWERS.encode(answer))
        while data:
            data = data[os.write(answer_fd, data) :]
    finally:
        os._exit(0)


def _become_user(context: Context, kept: tuple[int, ...]) -> None:
    _close_others(context.kernel, kept)
    signal.set_wakeup_fd(-1)
    unblock_signals()
    change_user(context.kernel, context.as_user.account)
    context.kernel.restrict_command()
    os.umask(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.enable()


def _close_others(kernel: Kernel, kept: tuple[int, ...]) -> None:
    first = 3
    for fd in sorted(kept):
        if fd > first:
            kernel.close_range(first, fd - 1)
        first = fd + 1
    kernel.close_range(first, FD_MAX)
