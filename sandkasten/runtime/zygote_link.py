"""The daemon's end of the connection to nsinit: starts the process, sends requests, pairs answers by `seq`.

Speaks `nsinit.protocol` over `AF_UNIX SOCK_SEQPACKET`; descriptors arrive by SCM_RIGHTS and are owned by whoever gets
the answer. Keeps nsinit free of secrets: it starts with an empty environment, no argument but the program, and no
descriptor but /dev/null, the log pipe and its socket. Does not restart anything: `actors/zygote.py` does.

Sources: unix(7), posix_spawn(3), pidfd_open(2).
"""

from __future__ import annotations

import array
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

import nsinit
from nsinit.protocol import ANSWERS, MAX_DATAGRAM_BYTES, MAX_FDS, REQUESTS, Failed, ProtocolError
from sandkasten.errors import ZygoteLost
from sandkasten.runtime.fds import OwnedFd

SOCKET_FD = 3
"""Where nsinit finds its socket."""

_FD_SIZE = array.array("i").itemsize


@attrs.frozen
class Answer:
    """A message from nsinit and the descriptors that came with it; the receiver closes them."""

    message: Any  # a member of nsinit.protocol.ANSWERS
    fds: Sequence[OwnedFd]


class NsinitProcess:
    """A started nsinit: its pid, its pidfd, our end of the socket, the read end of its log. `close` frees all."""

    def __init__(self, pid: int, sock: socket.socket, log_fd: int) -> None:
        self.pid = pid
        self.pidfd = OwnedFd(os.pidfd_open(pid))
        self.sock = sock
        self.log = OwnedFd(log_fd)

    def kill(self) -> None:
        """SIGKILL; running sandboxes go on without their fork server."""
        try:
            signal.pidfd_send_signal(self.pidfd.fileno(), signal.SIGKILL)
        except ProcessLookupError:
            pass

    def reap(self) -> int | None:
        """Return the exit status if the process has ended, as `os.waitstatus_to_exitcode` gives it."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def close(self) -> None:
        self.sock.close()
        self.pidfd.close()
        self.log.close()


def start_nsinit() -> NsinitProcess:
    """Start nsinit in a session of its own, so that a terminal's Ctrl-C never reaches it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_read, log_write = os.pipe2(os.O_CLOEXEC)
    try:
        # Above every number the child fills, so that no dup2 below overwrites a source.
        safe_socket, safe_log = _dup_high(theirs.fileno()), _dup_high(log_write)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-B", os.fspath(Path(nsinit.__file__).parent)],
                {"LANG": "C.UTF-8", "TZ": "UTC0"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, safe_log, 2),
                    (os.POSIX_SPAWN_DUP2, safe_socket, SOCKET_FD),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[each for each in signal.valid_signals() if each not in (signal.SIGKILL, signal.SIGSTOP)],
            )
        finally:
            os.close(safe_socket)
            os.close(safe_log)
    except BaseException:
        ours.close()
        os.close(log_read)
        raise
    finally:
        theirs.close()
        os.close(log_write)
    return NsinitProcess(pid, ours, log_read)


def _dup_high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


class ZygoteLink:
    """Request and answer over one socket. `serve` must run while requests are made."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._waiting: dict[int, _Slot] = {}
        self._next_seq = 1
        self._send_lock = trio.Lock()
        self._lost: str | None = None

    def next_seq(self) -> int:
        """Return a fresh number for a request's `seq`."""
        self._next_seq += 1
        return self._next_seq

    async def request(self, message: Any) -> Answer:  # a member of nsinit.protocol.REQUESTS
        """Send a request and wait for its answer, which may be `Failed`. A dropped answer's descriptors are closed.

        Raises:
            ZygoteLost: nsinit died, or broke the protocol.
        """
        if self._lost is not None:
            raise ZygoteLost(self._lost)
        slot = self._waiting[message.seq] = _Slot()
        try:
            async with self._send_lock:
                await self._socket.send(REQUESTS.encode(message))
            await slot.done.wait()
        except OSError as error:
            raise ZygoteLost("the fork server is gone") from error
        except trio.Cancelled:
            slot.drop()
            raise
        finally:
            del self._waiting[message.seq]
        if slot.answer is None:
            raise ZygoteLost(self._lost or "the fork server is gone")
        return slot.answer

    async def serve(self) -> None:
        """Hand answers to their askers until nsinit goes away; then raise `ZygoteLost` here and in every asker."""
        try:
            while True:
                answer = await self._receive()
                slot = self._waiting.get(answer.message.seq)
                if slot is not None:
                    slot.fill(answer)
                else:  # the asker has gone; what came for it is not kept
                    for fd in answer.fds:
                        fd.close()
        except (OSError, ProtocolError, ZygoteLost) as error:
            self._lost = f"the fork server is gone: {error}"
            raise ZygoteLost(self._lost) from error
        finally:
            self._lost = self._lost or "the fork server is gone"
            for slot in self._waiting.values():
                slot.done.set()

    async def _receive(self) -> Answer:
        space = socket.CMSG_SPACE(MAX_FDS * _FD_SIZE)
        data, ancillary, flags, _ = await self._socket.recvmsg(MAX_DATAGRAM_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = [OwnedFd(fd) for fd in _fds_in(ancillary)]
        try:
            if not data:
                raise ZygoteLost("it closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("truncated datagram")
            return Answer(ANSWERS.decode(data), fds)
        except BaseException:
            for fd in fds:
                fd.close()
            raise


class _Slot:
    """Where one answer lands."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None

    def fill(self, answer: Answer) -> None:
        self.answer = answer
        self.done.set()

    def drop(self) -> None:
        """The asker was cancelled: close what it will never take."""
        for fd in self.answer.fds if self.answer else ():
            fd.close()


def _fds_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return fds.tolist()


def failure_text(failed: Failed) -> str:
    """Return a sentence for the log: step, path, errno and what nsinit said."""
    reason = f": {os.strerror(failed.errno)}" if failed.errno else ""
    return f"{failed.stage} {failed.path}{reason} ({failed.message})" if failed.message else f"{failed.stage}{reason}"
