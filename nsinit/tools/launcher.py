"""Starts nsinit for a daemon that gave root away. Entry: `python -I -S -B launcher.py ARGUMENT`.

A process of its own, root, started before the daemon changes its user. Owns one nsinit at a time: starts it, reaps it,
and kills it when the daemon has gone and nsinit does not end by itself. Does the same for the preview gateway, the
broker and the egress process, which start with these privileges and give them away themselves; the last may outlive the
daemon. Names the cgroups of the three, and removes them. Two ways of life, by the argument:

- `LaunchForParent`: descriptor 3 leads to the daemon that started the launcher. The daemon may say `START`,
  `START_EGRESS` and the like, with the socket and the log of the process, `KILL` and the like, nothing else. The
  launcher ends soon after the daemon.
- `LaunchForUser`: descriptor 3 listens at a path. A process that connects as the one allowed user gets an nsinit of its
  own at the other end; the next one waits until that nsinit has ended. If it says one of the words for the other
  programs first, that is done at once, and answered on this connection. SIGTERM ends nsinit in good order, and the
  launcher; the others end with the daemon's end of their sockets, or later.

Reads what the kernel says of its cgroups and no other file, and parses nothing else but its argument. Sources: unix(7)
SO_PEERCRED, SCM_RIGHTS; pidfd_open(2).
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from nsinit.kernel.capabilities import START_CAPABILITIES, keep_only, read_last_capability
from nsinit.kernel.constants import CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_KILL
from nsinit.kernel.syscalls import capget, capset
from nsinit.log import log
from nsinit.own_filters import refuse_machine
from nsinit.spawn import CHANNEL_FD, spawn_egress, spawn_nsinit
from nsinit.wire.launching import (
    FAILED,
    FDS_OF_START,
    KILL,
    KILL_BROKER,
    KILL_EGRESS,
    KILL_GATEWAY,
    MAX_WORD_BYTES,
    NOTIFY_FD,
    READY,
    START,
    START_BROKER,
    START_EGRESS,
    START_GATEWAY,
    Allowance,
    Grant,
    LaunchForParent,
    LaunchForUser,
)

STOP_S = 15.0
"""Longer than nsinit takes to end by itself."""

FIRST_WORD_S = 2.0
"""The longest wait for the first bytes of a connection."""

OWN_CAPABILITIES = 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER | 1 << CAP_KILL
"""Capabilities to unlink a socket in a directory of the daemon's, and to kill an egress process, which has a user of
its own."""

_KILLS = {KILL: START, KILL_EGRESS: START_EGRESS, KILL_GATEWAY: START_GATEWAY, KILL_BROKER: START_BROKER}
"""Each word that kills, and the one that starts the same program."""

_STANDARD_ERROR = 2
_CREDENTIALS = struct.Struct("iII")


class Charge:
    """The one process of its kind, if one runs. `spawn` starts it with a socket and a log, and returns its pid; `tidy`
    is called when it has been reaped."""

    def __init__(self, name: str, spawn: Callable[[int, int], int], tidy: Callable[[], None] = lambda: None) -> None:
        self.name, self._spawn, self._tidy = name, spawn, tidy
        self._pid = 0
        self.pidfd = -1

    def start(self, channel_fd: int, log_fd: int) -> int:
        """Start one, after the end of the one before; return its pid."""
        self.end()
        self._pid = self._spawn(channel_fd, log_fd)
        self.pidfd = os.pidfd_open(self._pid)
        return self._pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended and is to be reaped."""
        return self.pidfd >= 0 and bool(select.select([self.pidfd], [], [], 0)[0])

    def kill(self) -> None:
        if self.pidfd >= 0:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # not reaped yet, so it exists

    def end(self, *, patience_s: float = 0.0) -> None:
        """Wait for the end of the process, and kill it after `patience_s` seconds."""
        if self.pidfd < 0:
            return
        if not select.select([self.pidfd], [], [], patience_s)[0]:
            log("error", f"killed the {self.name}", pid=self._pid, waited_s=patience_s)
            self.kill()
        self.reap()

    def reap(self) -> None:
        """Reap the process; waits if it still runs."""
        _, status = os.waitpid(self._pid, 0)
        if status:
            log("warning", f"{self.name} failed", pid=self._pid, status=os.waitstatus_to_exitcode(status))
        os.close(self.pidfd)
        self.pidfd = -1
        self._tidy()


def _programs(grant: Grant, what: LaunchForParent | LaunchForUser) -> dict[bytes, Charge]:
    """Return what the launcher starts, by the words for it."""
    argument = grant.encode()
    reach = [*(f"permit={network}" for network in what.permit), *([f"proxy={what.proxy}"] if what.proxy else [])]
    authorities = [f"ca={what.ca_file}"] if what.ca_file else []

    def beside(name: str, role: str, *words: str) -> Charge:
        cgroups: list[str] = []

        def spawn(channel_fd: int, log_fd: int) -> int:
            cgroups[:] = name_cgroups(role, grant.cgroup_parent)
            return spawn_egress(channel_fd, log_fd, role, *words, cgroups=cgroups)

        return Charge(name, spawn, lambda: remove_cgroups(cgroups))

    return {
        START: Charge("fork server", lambda channel_fd, log_fd: spawn_nsinit(channel_fd, log_fd, argument)),
        START_EGRESS: beside("egress process", "egress", *reach),
        START_GATEWAY: beside("preview gateway", "gateway"),
        START_BROKER: beside("broker", "broker", f"data={grant.data_dir}", *authorities),
    }


class ServiceManager:
    """The service manager, which is given signs of life (sd_notify(3)) by a launcher that is a service.

    They are about the launcher. The daemon knows whether nsinit answers, and ends one that does not.
    """

    def __init__(self, notify_fd: int, beat_s: float) -> None:
        self._fd = notify_fd
        self._beat_ms = round(beat_s * 1000) if notify_fd >= 0 and beat_s > 0 else None
        if notify_fd >= 0:
            os.set_inheritable(notify_fd, False)

    def wait(self, wanted: dict[int, int]) -> list[int]:
        """Wait for events on descriptors (`wanted`: descriptor to poll events, 0: hang-up); return the descriptors that
        have one."""
        poll = select.poll()
        for fd, events in wanted.items():
            poll.register(fd, events)
        while True:
            happened = [fd for fd, _ in poll.poll(self._beat_ms)]
            if self._beat_ms is not None:
                self.tell(b"WATCHDOG=1")
            if happened:
                return happened

    def tell(self, line: bytes) -> None:
        if self._fd >= 0:
            try:
                os.write(self._fd, line)
            except OSError as error:
                log("warning", "the service manager was not told", reason=str(error))


def main() -> None:
    """Serve as the argument says, until the daemon (or, with a socket, the service) ends."""
    fields = json.loads(sys.argv[1])
    fields["allowance"] = Allowance.read(fields["allowance"])
    is_service = "uid" in fields
    os.closerange((NOTIFY_FD if is_service and fields["notify_fd"] == NOTIFY_FD else CHANNEL_FD) + 1, 256)
    os.chdir("/")
    os.umask(0o077)
    become_small()
    if fields["own_filters"]:
        refuse_machine()
    channel = socket.socket(fileno=CHANNEL_FD)
    channel.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if is_service:
        launch_for_user(channel, LaunchForUser(**fields))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager means the daemon, and that ends us
        launch_for_parent(channel, LaunchForParent(**fields))


def become_small() -> None:
    """Keep the capabilities that an nsinit starts with, and use only `OWN_CAPABILITIES`.

    With no_new_privs nsinit gets no capability that this process does not have (capabilities(7), "Capabilities and
    execution of programs by root").
    """
    keep_only(START_CAPABILITIES, read_last_capability())
    permitted = capget()
    capset(permitted & OWN_CAPABILITIES, permitted=permitted)


def launch_for_parent(channel: socket.socket, what: LaunchForParent) -> None:
    """Serve the daemon that is this process's parent until it ends."""
    grant = Grant(what.data_dir, what.gid, what.allowance, (what.pid, os.getpid()), what.own_filters)
    programs = _programs(grant, what)
    # Opened while the daemon is still root: later, a way through its own directories might lead elsewhere.
    sockets = [(_open_path(os.path.dirname(path) or "/"), _open_path(path), path) for path in what.sockets]
    channel.send(READY)
    try:
        while _wait_word(channel, *programs.values()):
            data, fds, _flags, _address = socket.recv_fds(channel, MAX_WORD_BYTES, FDS_OF_START)
            try:
                if not data:
                    break
                _obey(data, fds, channel, programs)
            finally:
                for fd in fds:
                    os.close(fd)
    except ConnectionError:
        pass  # it died while being answered
    for word, program in programs.items():
        # The egress process serves sessions until the next daemon comes, or ends by itself without any.
        if word != START_EGRESS or program.has_ended:
            program.end(patience_s=STOP_S)
    for parent_fd, socket_fd, path in sockets:
        _remove(parent_fd, socket_fd, os.path.basename(path))


def _wait_word(channel: socket.socket, *programs: Charge) -> bool:
    """Wait until the daemon says something or ends; reap programs meanwhile."""
    while True:
        running = {each.pidfd: each for each in programs if each.pidfd >= 0}
        readable = select.select([channel.fileno(), *running], [], [])[0]
        if channel.fileno() in readable:
            return True
        for pidfd in readable:
            running[pidfd].reap()


def _obey(word: bytes, fds: list[int], channel: socket.socket, programs: Mapping[bytes, Charge]) -> None:
    if word in programs and len(fds) == FDS_OF_START:
        program = programs[word]
        try:
            pid = program.start(*fds)
        except OSError as error:
            log("error", f"the {program.name} can't be started", reason=str(error))
            channel.send(FAILED)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [program.pidfd]))]
        channel.sendmsg([str(pid).encode()], rights, socket.MSG_NOSIGNAL)
    elif word in _KILLS and _KILLS[word] in programs:
        programs[_KILLS[word]].kill()
    else:
        log("error", "the daemon said something unknown")
        raise ConnectionError("unknown word")


def launch_for_user(listener: socket.socket, what: LaunchForUser) -> None:
    """Serve processes that connect as the allowed user until SIGTERM."""
    grant = Grant(what.data_dir, what.gid, what.allowance, (os.getpid(),), what.own_filters, what.cgroup_parent)
    manager = ServiceManager(what.notify_fd, what.beat_s)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(stop_write)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    LauncherService(listener, what.uid, _programs(grant, what), manager).serve(stop_read)
    manager.tell(b"STOPPING=1")
    listener.close()


class LauncherService:
    """The launcher of a service: one connection at a time has an nsinit, and others may say the words that start and
    kill another program, one a connection.
    """

    def __init__(
        self, listener: socket.socket, uid: int, programs: Mapping[bytes, Charge], manager: ServiceManager
    ) -> None:
        self._listener, self._uid, self._manager = listener, uid, manager
        self._nsinit = programs[START]
        self._others = {word: program for word, program in programs.items() if word != START}
        self._served: socket.socket | None = None
        """The connection whose other end has the present nsinit."""
        self._next: socket.socket | None = None
        """A connection that waits for the end of the present nsinit; no other is accepted meanwhile."""

    def serve(self, stop_fd: int) -> None:
        """Serve until `stop_fd` is readable."""
        while True:
            wanted = {each.pidfd: select.POLLIN for each in (self._nsinit, *self._others.values()) if each.pidfd >= 0}
            if self._served is not None:
                wanted[self._served.fileno()] = 0
            if self._next is None:
                wanted[self._listener.fileno()] = select.POLLIN
            happened = self._manager.wait(wanted | {stop_fd: select.POLLIN})
            for other in self._others.values():
                if other.pidfd in happened:
                    other.reap()
            if self._served is not None and {self._served.fileno(), self._nsinit.pidfd, stop_fd} & {*happened}:
                self._end_nsinit(self._served)
            if stop_fd in happened:
                return
            if self._listener.fileno() in happened:
                self._accept()
            if self._served is None and self._next is not None:
                self._served, self._next = self._next, None
                self._nsinit.start(self._served.fileno(), _STANDARD_ERROR)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _pid, uid, _gid = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid not in (0, self._uid):
            log("warning", "refused a connection", uid=uid)
            connection.close()
            return
        # Both kinds speak first, and a request to nsinit is longer than any word.
        is_there = bool(select.select([connection], [], [], FIRST_WORD_S)[0])
        word = connection.recv(MAX_WORD_BYTES + 1, socket.MSG_PEEK) if is_there else b""
        if word not in _KILLS and word not in self._others:
            self._next = connection
            return
        with connection:
            _data, fds, _flags, _address = socket.recv_fds(connection, MAX_WORD_BYTES, FDS_OF_START)
            try:
                _obey(word, fds, connection, self._others)
            except OSError as error:
                log("warning", "a word had no effect", reason=str(error))
            finally:
                for fd in fds:
                    os.close(fd)

    def _end_nsinit(self, connection: socket.socket) -> None:
        """End nsinit, which follows the end of its socket's other side."""
        try:
            connection.shutdown(socket.SHUT_RDWR)  # what nsinit reads then is the end, if there was none before
        except OSError:
            pass  # the other side has gone
        self._nsinit.end(patience_s=STOP_S)
        connection.close()
        self._served = None


def _open_path(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(parent_fd: int, socket_fd: int, name: str) -> None:
    """Remove a socket that root bound, but not another file of its name. While its descriptor is open no other file
    gets its inode, as that of the next daemon could."""
    try:
        found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if os.path.samestat(found, os.fstat(socket_fd)):
            os.unlink(name, dir_fd=parent_fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        log("warning", "a socket stays", name=name, reason=str(error))


if __name__ == "__main__":
    main()
