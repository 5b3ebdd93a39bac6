"""Our processes beside the daemon: how nsinit and the roles of the program `egress` are started, and their logs.

They come as children of this process, from its launcher (a child that stayed root), or from the launcher of a service
apart, at its socket, where nsinit itself is at the other end. Each way returns a `ChildProcess`: our end of the socket,
and the means to watch, kill and reap the process. None gets a secret at its start: an empty environment, and no
descriptor but /dev/null, its log and its socket. The actors in `actors/services` own the processes; `keep_running`
starts one again after its end, and `forward_log` passes log lines on.

Sources: unix(7), posix_spawn(3), pidfd_open(2); nsinit/tools/launcher.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import attrs
import trio

from egress.protocol import EGRESS_ID
from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from nsinit.spawn import spawn_egress, spawn_launcher, spawn_nsinit
from nsinit.wire.launching import (
    FAILED,
    KILL,
    KILL_BROKER,
    KILL_EGRESS,
    KILL_GATEWAY,
    MAX_WORD_BYTES,
    READY,
    START,
    START_BROKER,
    START_EGRESS,
    START_GATEWAY,
    LaunchForParent,
)
from sandkasten.errors import EgressUnavailable, LauncherGone, NsinitLost, SandkastenError
from sandkasten.links.fds import OwnedFd, wait_ended

log = logging.getLogger(__name__)
_START_S = 20.0
"""Longer than the launcher waits for the end of an nsinit that hangs, and than a service takes to restart."""

_LAUNCHER_START_S = 10.0
_LAUNCHER_STOP_S = 20.0
_CONNECT_PAUSE_S = 0.1
_STANDARD_ERROR = 2
_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred` (unix(7)): pid, user, group."""

_PAUSES_S = (0.05, 0.2, 1.0, 5.0)
"""Pauses before a process is started again, the last one again and again."""

_STEADY_S = 30.0
"""A process that ran so long is started again after the first pause."""

_LAST_WORDS_S = 1.0

STOP_S = 2.0
"""Time for a process to end by itself, when its socket is closed."""

# Starting


def _nothing() -> None:
    pass


@attrs.frozen
class ChildProcess:
    """A started nsinit, egress process or preview gateway: our end of its socket; but for an nsinit that is a service
    apart, also its pidfd and its log's read end.

    `kill` is for one that hangs: running sandboxes go on without it. `reap` is called when it has ended.
    """

    sock: socket.socket
    pidfd: OwnedFd | None = None
    log: OwnedFd | None = None
    kill: Callable[[], None] = _nothing
    reap: Callable[[], object] = _nothing

    async def end(self, program: str, patience_s: float) -> None:
        """Close the socket, which ends the process, wait for its end and reap it; kill it when that takes longer than
        `patience_s`. A service apart has its own manager, and is not waited for."""
        self.sock.close()
        try:
            if not await self._has_ended(patience_s):
                log.error("%s_killed", program, extra={"waited_s": patience_s})
                self.kill()
                await self._has_ended(patience_s)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.reap)  # the cgroups of a process may be busy for a moment
            self.close()

    async def _has_ended(self, patience_s: float) -> bool:
        if self.pidfd is None:
            return True
        with trio.move_on_after(patience_s) as scope:
            await wait_ended(self.pidfd)
        return not scope.cancelled_caught

    @asynccontextmanager
    async def forwarding_log(self, program: str) -> AsyncIterator[None]:
        """Pass the process's log on during the block, and what it says within a second of the block's end: the last
        lines say why a process has ended."""
        assert self.log is not None, "a service apart has a log of its own"
        has_ended = trio.Event()

        async def forward(fd: int) -> None:
            await forward_log(fd, program)
            has_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(forward, self.log.fileno())
            yield
            with trio.move_on_after(_LAST_WORDS_S):
                await has_ended.wait()
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        self.sock.close()
        for fd in (self.pidfd, self.log):
            if fd is not None:
                fd.close()


async def keep_running(program: str, run: Callable[[], Awaitable[None]]) -> NoReturn:
    """Have `run` start a process and serve it to its end, and again after a pause, also if it could not be started."""
    tries = 0
    while True:
        began = trio.current_time()
        try:
            await run()
        except (SandkastenError, OSError) as error:  # OSError: no process or descriptor to be had at the moment
            log.error("%s_not_started", program, extra={"error": str(error)})
        tries = 0 if trio.current_time() - began > _STEADY_S else tries
        await trio.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
        tries += 1


StartNsinit = Callable[[], Awaitable[ChildProcess]]
Role = Literal["egress", "gateway", "broker"]
"""Roles of the program `egress`: the way out, the way in, and secrets."""


class StartEgress(Protocol):
    """A way to start a role of the program `egress`. With a path it listens there, so that it can outlive its daemon,
    and the socket of the `ChildProcess` is the first connection. `words` say what the process may reach, as
    `egress/__main__.py` has them; a launcher has them from root, and takes none from the daemon.
    """

    async def __call__(self, role: Role = "egress", path: Path | None = None, *words: str) -> ChildProcess: ...


async def start_as_child() -> ChildProcess:
    """Start nsinit as a child of this process, with its privileges."""
    with Ends() as ends:
        pid = spawn_nsinit(ends.their_socket.fileno(), ends.log_write)
        return ends.give(pid, os.pidfd_open(pid))


async def start_egress_as_child(role: Role = "egress", path: Path | None = None, *words: str) -> ChildProcess:
    """Start a role of the program `egress` as a child of this process."""
    with Ends(path) as ends:
        cgroups = name_cgroups(role)
        pid = spawn_egress(ends.their_socket.fileno(), ends.log_write, role, *words, cgroups=cgroups)
        return ends.give(pid, os.pidfd_open(pid), cgroups=cgroups)


def find_egress(path: Path) -> tuple[ChildProcess, OwnedFd] | None:
    """Connect to an egress process of an earlier daemon, if one listens at `path`. Return it with the write end of its
    new log, which the caller sends and closes. Only root can kill it.

    Raises:
        EgressUnavailable: somebody may listen there, and can't be reached now.
    """
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)
        try:
            with _near(path) as near:
                sock.connect(near)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user_id, _group_id = _CREDENTIALS.unpack(credentials)
            if user_id != EGRESS_ID:  # that of who made the socket: the process has not come to listen itself
                raise EgressUnavailable("the egress process of an earlier daemon is not ready")
            pidfd = undo.enter_context(OwnedFd(os.pidfd_open(pid)))
            log_read, log_write = os.pipe2(os.O_CLOEXEC)
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
            return None
        except OSError as error:
            raise EgressUnavailable(f"the egress process of an earlier daemon: {error.strerror}") from error
        undo.pop_all()

    def reap() -> None:
        with suppress(ChildProcessError):  # of a daemon before, as a rule
            os.waitpid(pid, os.WNOHANG)

    return ChildProcess(sock, pidfd, OwnedFd(log_read), lambda: _kill(pidfd), reap), OwnedFd(log_write)


@contextmanager
def _near(path: Path) -> Iterator[str]:
    """Yield a path to the same file, as short as an address of a socket must be (unix(7))."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _listen_at(path: Path) -> socket.socket:
    """Listen at a path; nobody else can connect but root. The file of an earlier process is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # bind(2) gives the file this mode
        with _near(path) as near:
            with suppress(FileNotFoundError):
                os.unlink(near)
            listener.bind(near)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


class Ends:
    """Sockets and a log pipe for a process about to start; ends that were not given away are closed. Their socket is
    the other end of ours, or, with a path, listens there.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self.our_socket, self.their_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            self.their_socket = _listen_at(path)
            self.our_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with _near(path) as near:
                self.our_socket.connect(near)
        self._log_read, self.log_write = os.pipe2(os.O_CLOEXEC)
        self._is_given = False

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.their_socket.close()
        os.close(self.log_write)
        if not self._is_given:
            self.our_socket.close()
            os.close(self._log_read)

    def give(
        self, pid: int, pidfd: int, *, kill: Callable[[], None] | None = None, cgroups: Sequence[str] = ()
    ) -> ChildProcess:
        """Return the process; `kill` is given where it is the launcher's child, and is not ours to reap. `cgroups` are
        removed when it has been reaped."""
        self._is_given = True
        owned = OwnedFd(pidfd)

        def reap() -> None:
            os.waitpid(pid, os.WNOHANG)
            remove_cgroups(cgroups)

        ours = (lambda: _kill(owned), reap)
        return ChildProcess(self.our_socket, owned, OwnedFd(self._log_read), *((kill,) if kill else ours))


def _kill(pidfd: OwnedFd) -> None:
    try:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # it has a user of its own, and this is no child of a process of ours
        log.error("egress_not_killed")


_WORDS: Mapping[Role, tuple[bytes, bytes]] = {
    "egress": (START_EGRESS, KILL_EGRESS),
    "gateway": (START_GATEWAY, KILL_GATEWAY),
    "broker": (START_BROKER, KILL_BROKER),
}


class Launcher:
    """The daemon's way to its launcher, a child that stayed root. `close` ends the launcher."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._socket, self._pid = sock, pid
        self._one_start = trio.Lock()
        self._ahead: Ends | None = None
        self.pidfd = OwnedFd(os.pidfd_open(pid))

    @property
    def pid(self) -> int:
        return self._pid

    def start_ahead(self) -> None:
        """Have the first nsinit started, which the first `start_nsinit` gives; nothing else may be started before that.
        Its imports take 0.2 s, in which this process does other work of its start. Raises `LauncherGone`."""
        self._ahead = _ask(self._socket, START)

    async def start_nsinit(self) -> ChildProcess:
        """Have an nsinit started, after the end of the one before.

        Raises:
            LauncherGone: the launcher has ended, and no nsinit can be started any more.
            NsinitLost: the launcher failed to start an nsinit.
        """
        return await self._start(START, KILL)

    async def start_egress(self, role: Role = "egress", path: Path | None = None, *_words: str) -> ChildProcess:
        """Have a role of the program `egress` started, after the end of the one before.

        Raises:
            EgressUnavailable: the launcher failed to start one, or has ended.
        """
        try:
            return await self._start(*_WORDS[role], path)
        except (LauncherGone, NsinitLost) as error:
            raise EgressUnavailable(str(error)) from error

    async def _start(self, word: bytes, kill_word: bytes, path: Path | None = None) -> ChildProcess:
        """Have a process started by `word`. An answer names no process, so one start follows the other."""
        async with self._one_start:
            asked, self._ahead = self._ahead, None
            assert asked is None or word == START
            if asked is None:
                self._drop_old_answers()
                asked = _ask(self._socket, word, path)
            return await _have_started(self._socket, asked, kill=partial(self._say, kill_word))

    async def wait_ended(self) -> None:
        """Wait until the launcher has ended."""
        await wait_ended(self.pidfd)

    def close(self) -> None:
        """End the launcher, which waits for nsinit, and reap it."""
        if self._ahead is not None:
            self._ahead.close()
        self._socket.close()
        if select.select([self.pidfd.fileno()], [], [], _LAUNCHER_STOP_S)[0]:
            os.waitpid(self._pid, 0)
        self.pidfd.close()

    def _say(self, word: bytes) -> None:
        try:
            self._socket.send(word)
        except OSError:
            pass  # the launcher has ended, and its children with it

    def _drop_old_answers(self) -> None:
        """Drop answers to cancelled starts, whose nsinit has ended since its socket was closed."""
        try:
            while True:
                word, fds, _flags, _address = socket.recv_fds(self._socket, MAX_WORD_BYTES, 1)
                for fd in fds:
                    os.close(fd)
                if not word:
                    return
        except BlockingIOError:
            return


def _ask(launcher: socket.socket, word: bytes, path: Path | None = None) -> Ends:
    """Ask for a process by `word`; return its ends. Raises `LauncherGone`."""
    ends = Ends(path)
    try:
        socket.send_fds(launcher, [word], [ends.their_socket.fileno(), ends.log_write])
    except OSError as error:
        ends.close()
        raise _gone(error) from error
    return ends


def _gone(error: OSError) -> LauncherGone:
    return LauncherGone(f"the launcher of the fork server is gone: {error.strerror}")


async def _have_started(launcher: socket.socket, asked: Ends, *, kill: Callable[[], None]) -> ChildProcess:
    """Return the process that was asked for.

    Raises:
        LauncherGone: the launcher has ended.
        NsinitLost: the launcher can't start a process, or does not answer.
    """
    with asked as ends, trio.move_on_after(_START_S):
        try:
            await trio.lowlevel.wait_readable(launcher)
            said, fds, _flags, _address = socket.recv_fds(launcher, MAX_WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise _gone(error) from error
        if not said:
            raise LauncherGone("the launcher of the fork server is gone")
        if said == FAILED or len(fds) != 1:
            raise NsinitLost("the launcher can't start a process")
        return ends.give(int(said), fds[0], kill=kill)
    raise NsinitLost("the launcher does not answer")


def open_launcher(what: LaunchForParent) -> Launcher:
    """Start the launcher, as root. Blocking.

    Raises:
        NsinitLost: the launcher did not start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = spawn_launcher(theirs.fileno(), _STANDARD_ERROR, what.encode())
    launcher = Launcher(ours, pid)
    ours.settimeout(_LAUNCHER_START_S)
    try:
        if ours.recv(MAX_WORD_BYTES) != READY:
            raise NsinitLost("the launcher of the fork server did not start")
    except BaseException:
        launcher.close()
        raise
    ours.setblocking(False)
    return launcher


def connect_to(path: Path) -> StartNsinit:
    """Return the way to an nsinit at the socket of a service apart."""

    async def connect() -> ChildProcess:
        return ChildProcess(await _connect(path))

    return connect


def start_egress_at(service: Path) -> StartEgress:
    """Return the way to have an egress process or a preview gateway started by the launcher of a service apart."""

    def kill(word: bytes) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            sock.connect(os.fspath(service))
            sock.send(word)

    async def start(role: Role = "egress", path: Path | None = None, *_words: str) -> ChildProcess:
        word, kill_word = _WORDS[role]
        try:
            with await _connect(service) as launcher:
                return await _have_started(launcher, _ask(launcher, word, path), kill=partial(kill, kill_word))
        except (LauncherGone, NsinitLost) as error:
            raise EgressUnavailable(str(error)) from error

    return start


async def _connect(path: Path) -> socket.socket:
    """Connect to a launcher that is a service, which may be restarting. Raises `NsinitLost`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    failure: OSError | None = None
    with trio.move_on_after(_START_S):
        while True:
            try:
                sock.connect(os.fspath(path))
                return sock
            except OSError as error:
                failure = error
                if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                    break
            await trio.sleep(_CONNECT_PAUSE_S)
    sock.close()
    raise NsinitLost(f"no fork server at {path}: {failure.strerror if failure else 'no answer'}")


# Logs

_LINE_BYTES = 16 * 1024
"""Longer lines are cut."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


async def forward_log(fd: int, program: str = "nsinit") -> None:
    """Log each line of a pipe until its other end is closed, events and fields under the name of the program.

    No program sees a command, and the broker's lines have no secret in them, so nothing is hidden. A line that is not
    of `nsinit/log.py`, such as a traceback or a tool's message, is logged as it is.
    """
    buffer = b""
    while True:
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, _LINE_BYTES)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            _log_line(line, program)
        if len(buffer) > _LINE_BYTES:
            _log_line(buffer, program)
            buffer = b""


def _log_line(line: bytes, program: str) -> None:
    try:
        entry = json.loads(line)
        level = _LEVELS.get(entry.pop("level", "info"), logging.INFO)
        event = str(entry.pop("event", "message")).replace(" ", "_")
        facts = {key if key == "session_id" else f"{program}_{key}": value for key, value in entry.items()}
        log.log(level, "%s_%s", program, event, extra=facts)
    except (ValueError, AttributeError):
        if line.strip():
            log.warning("%s_output", program, extra={"line": line.decode("utf-8", "replace")})
