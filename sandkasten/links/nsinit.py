"""The daemon's end of the connection to nsinit: sends requests, pairs answers by `seq`.

Speaks `nsinit.wire.protocol` over `AF_UNIX SOCK_SEQPACKET`; descriptors arrive by SCM_RIGHTS and are owned by whoever
gets the answer. Where the process comes from is `nsinit_process.py`. Sources: unix(7).

How the daemon comes by an nsinit: as its own child, from its launcher, or at a socket of a service apart.

Each way is a `StartNsinit`; what it returns is the daemon's end of the connection and what can be done about the
process. Nothing here restarts anything (`actors/services/nsinit.py` does) or speaks to nsinit (`zygote_link.py` does).
nsinit stays free of secrets whichever way: an empty environment, no descriptor but /dev/null, its log and its socket.

Sources: unix(7), posix_spawn(3), pidfd_open(2); nsinit/tools/launcher.py.

Passes nsinit's log lines on. It holds no secret and sees no command, so nothing needs hiding.

What is no line of its own making (`nsinit/log.py`), a traceback or the words of a tool, is passed on as it is.
"""

from __future__ import annotations

import array
import errno
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from nsinit.spawn import spawn_launcher, spawn_nsinit
from nsinit.wire.launching import FAILED, KILL, MAX_WORD_BYTES, READY, START, LaunchForParent
from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, MAX_FDS, REQUESTS, Failed, ProtocolError
from sandkasten.links.fds import OwnedFd
from sandkasten.model.errors import LauncherGone, ZygoteLost

_FD_SIZE = array.array("i").itemsize

_PASSING_STAGES = frozenset({"builder", "cgroup maker", "child", "clone", "deadline", "identity", "stop"})
"""What of `nsinit.steps.StepFailed.stage` names a process that died, or a time that ran out."""

_TAKEN_ID = "session", errno.EEXIST
"""nsinit died over what it prepared for this id; the next create has another id."""


@attrs.frozen
class Answer:
    """A message from nsinit and the descriptors that came with it; the receiver closes them."""

    message: Any  # a member of nsinit.protocol.ANSWERS
    fds: Sequence[OwnedFd]


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
            await trio.lowlevel.cancel_shielded_checkpoint()  # whose answer came just before that goes first
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


def is_passing(stage: str, number: int) -> bool:
    """Return whether a build that failed at `stage`, with that errno, may succeed when it is tried again."""
    return stage in _PASSING_STAGES or (stage, number) == _TAKEN_ID


_START_S = 20.0
"""Longer than the launcher waits for the end of an nsinit that hangs, and than a service takes to restart."""

_KEEPER_START_S = 10.0
_KEEPER_STOP_S = 20.0
_CONNECT_PAUSE_S = 0.1
_STANDARD_ERROR = 2


def _nothing() -> None:
    pass


@attrs.frozen
class NsinitProcess:
    """A started nsinit: our end of its socket, and, unless a service apart looks after it, its pidfd and the read end
    of its log. `kill` is for one that hangs: running sandboxes go on without it. `reap` is called when it has ended."""

    sock: socket.socket
    pidfd: OwnedFd | None = None
    log: OwnedFd | None = None
    kill: Callable[[], None] = _nothing
    reap: Callable[[], object] = _nothing

    def close(self) -> None:
        self.sock.close()
        for fd in (self.pidfd, self.log):
            if fd is not None:
                fd.close()


StartNsinit = Callable[[], Awaitable[NsinitProcess]]


async def start_as_child() -> NsinitProcess:
    """Start nsinit with our own power, as our child."""
    with _Ends() as ends:
        pid = spawn_nsinit(ends.their_socket.fileno(), ends.log_write)
        return ends.give(pid, os.pidfd_open(pid))


class _Ends:
    """A socket pair and a log pipe for an nsinit about to start; what was not given away is closed."""

    def __init__(self) -> None:
        self.our_socket, self.their_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log_read, self.log_write = os.pipe2(os.O_CLOEXEC)
        self._is_given = False

    def __enter__(self) -> _Ends:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.their_socket.close()
        os.close(self.log_write)
        if not self._is_given:
            self.our_socket.close()
            os.close(self._log_read)

    def give(self, pid: int, pidfd: int, *, kill: Callable[[], None] | None = None) -> NsinitProcess:
        """Return the process. With `kill` it is somebody else's child."""
        self._is_given = True
        owned = OwnedFd(pidfd)
        ours = (lambda: _kill(owned), lambda: os.waitpid(pid, os.WNOHANG))
        return NsinitProcess(self.our_socket, owned, OwnedFd(self._log_read), *((kill,) if kill else ours))


def _kill(pidfd: OwnedFd) -> None:
    try:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
    except ProcessLookupError:
        pass


class Launcher:
    """The daemon's way to its launcher: a child that stayed root. `close` ends it."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._socket, self._pid = sock, pid
        self.pidfd = OwnedFd(os.pidfd_open(pid))

    @property
    def pid(self) -> int:
        return self._pid

    async def start_nsinit(self) -> NsinitProcess:
        """Have an nsinit started, after the end of the one before.

        Raises:
            LauncherGone: nobody else can.
            ZygoteLost: the launcher can't.
        """
        with _Ends() as ends, trio.move_on_after(_START_S):
            try:
                self._drop_old_answers()
                socket.send_fds(self._socket, [START], [ends.their_socket.fileno(), ends.log_write])
                await trio.lowlevel.wait_readable(self._socket)
                word, fds, _flags, _address = socket.recv_fds(self._socket, MAX_WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise LauncherGone(f"the launcher of the fork server is gone: {error.strerror}") from error
            if not word:
                raise LauncherGone("the launcher of the fork server is gone")
            if word == FAILED or len(fds) != 1:
                raise ZygoteLost("the fork server can't be started")
            return ends.give(int(word), fds[0], kill=self._kill_nsinit)
        raise ZygoteLost("the launcher of the fork server does not answer")

    async def wait_ended(self) -> None:
        """Wait until the launcher has ended."""
        await trio.lowlevel.wait_readable(self.pidfd.fileno())

    def close(self) -> None:
        """End the launcher, which waits for nsinit, and reap it."""
        self._socket.close()
        if select.select([self.pidfd.fileno()], [], [], _KEEPER_STOP_S)[0]:
            os.waitpid(self._pid, 0)
        self.pidfd.close()

    def _kill_nsinit(self) -> None:
        try:
            self._socket.send(KILL)
        except OSError:
            pass  # then it is its own end

    def _drop_old_answers(self) -> None:
        """Who asked was cancelled; the nsinit that came of it saw its socket close."""
        try:
            while True:
                word, fds, _flags, _address = socket.recv_fds(self._socket, MAX_WORD_BYTES, 1)
                for fd in fds:
                    os.close(fd)
                if not word:
                    return
        except BlockingIOError:
            return


def open_launcher(what: LaunchForParent) -> Launcher:
    """Start the launcher, as root. Blocking.

    Raises:
        ZygoteLost: it did not start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = spawn_launcher(theirs.fileno(), _STANDARD_ERROR, what.encode())
    launcher = Launcher(ours, pid)
    ours.settimeout(_KEEPER_START_S)
    try:
        if ours.recv(MAX_WORD_BYTES) != READY:
            raise ZygoteLost("the launcher of the fork server did not start")
    except BaseException:
        launcher.close()
        raise
    ours.setblocking(False)
    return launcher


def connect_to(path: Path) -> StartNsinit:
    """Return how to get an nsinit at the socket of a service that runs apart."""

    async def connect() -> NsinitProcess:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        failure: OSError | None = None
        with trio.move_on_after(_START_S):
            while True:
                try:
                    sock.setblocking(False)
                    sock.connect(os.fspath(path))
                    return NsinitProcess(sock)
                except OSError as error:
                    failure = error
                    if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                        break
                await trio.sleep(_CONNECT_PAUSE_S)
        sock.close()
        raise ZygoteLost(f"no fork server at {path}: {failure.strerror if failure else 'no answer'}")

    return connect


log = logging.getLogger(__name__)

_LINE_BYTES = 16 * 1024
"""A longer one is cut."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


async def forward_log(fd: int) -> None:
    """Log each line that comes from a pipe, until its other end is closed."""
    buffer = b""
    while True:
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, _LINE_BYTES)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            _log_line(line)
        if len(buffer) > _LINE_BYTES:
            _log_line(buffer)
            buffer = b""


def _log_line(line: bytes) -> None:
    try:
        entry = json.loads(line)
        level = _LEVELS.get(entry.pop("level", "info"), logging.INFO)
        event = str(entry.pop("event", "message")).replace(" ", "_")
        facts = {key if key == "session_id" else f"nsinit_{key}": value for key, value in entry.items()}
        log.log(level, "nsinit_%s", event, extra=facts)
    except (ValueError, AttributeError):
        if line.strip():
            log.warning("nsinit_output", extra={"line": line.decode("utf-8", "replace")})
