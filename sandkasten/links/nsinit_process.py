"""How the daemon comes by an nsinit: as its own child, from its keeper, or at a socket of a service apart.

Each way is a `StartNsinit`; what it returns is the daemon's end of the connection and what can be done about the
process. Nothing here restarts anything (`actors/services/nsinit.py` does) or speaks to nsinit (`zygote_link.py` does). nsinit
stays free of secrets whichever way: an empty environment, no descriptor but /dev/null, its log and its socket.

Sources: unix(7), posix_spawn(3), pidfd_open(2); nsinit/tools/launcher.py.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from nsinit.spawn import spawn_keeper, spawn_nsinit
from nsinit.wire.launching import FAILED, KILL, MAX_WORD_BYTES, READY, START, KeepForParent
from sandkasten.links.fds import OwnedFd
from sandkasten.model.errors import KeeperGone, ZygoteLost

_START_S = 20.0
"""Longer than the keeper waits for the end of an nsinit that hangs, and than a service takes to restart."""

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


class Keeper:
    """The daemon's way to its keeper: a child that stayed root. `close` ends it."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._socket, self._pid = sock, pid
        self.pidfd = OwnedFd(os.pidfd_open(pid))

    @property
    def pid(self) -> int:
        return self._pid

    async def start_nsinit(self) -> NsinitProcess:
        """Have an nsinit started, after the end of the one before.

        Raises:
            KeeperGone: nobody else can.
            ZygoteLost: the keeper can't.
        """
        with _Ends() as ends, trio.move_on_after(_START_S):
            try:
                self._drop_old_answers()
                socket.send_fds(self._socket, [START], [ends.their_socket.fileno(), ends.log_write])
                await trio.lowlevel.wait_readable(self._socket)
                word, fds, _flags, _address = socket.recv_fds(self._socket, MAX_WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise KeeperGone(f"the keeper of the fork server is gone: {error.strerror}") from error
            if not word:
                raise KeeperGone("the keeper of the fork server is gone")
            if word == FAILED or len(fds) != 1:
                raise ZygoteLost("the fork server can't be started")
            return ends.give(int(word), fds[0], kill=self._kill_nsinit)
        raise ZygoteLost("the keeper of the fork server does not answer")

    async def wait_ended(self) -> None:
        """Wait until the keeper has ended."""
        await trio.lowlevel.wait_readable(self.pidfd.fileno())

    def close(self) -> None:
        """End the keeper, which waits for nsinit, and reap it."""
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


def open_keeper(what: KeepForParent) -> Keeper:
    """Start the keeper, as root. Blocking.

    Raises:
        ZygoteLost: it did not start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = spawn_keeper(theirs.fileno(), _STANDARD_ERROR, what.encode())
    keeper = Keeper(ours, pid)
    ours.settimeout(_KEEPER_START_S)
    try:
        if ours.recv(MAX_WORD_BYTES) != READY:
            raise ZygoteLost("the keeper of the fork server did not start")
    except BaseException:
        keeper.close()
        raise
    ours.setblocking(False)
    return keeper


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
