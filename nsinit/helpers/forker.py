"""The forker: an idle process that PID 1 of every sandbox is a fork of.

The forker exists to save memory. A page that the forking process writes after the fork is copied and no longer shared,
and nsinit writes many. In the forker runs one short loop and nothing else. PID 1 is born as nsinit's child
(CLONE_PARENT): nsinit reaps PID 1, and PID 1 dies with nsinit, not with the forker.

`Forker` is nsinit's side, `_live` and below the process. nsinit starts another forker when one died; then only the
clone under way fails. A filter of system calls is inherited, and what runs in sandboxes must not be under nsinit's: so
forkers, network makers and bridge makers are forks of a seed, which nsinit forks before it goes under its filter, and
which does nothing but fork.
Sources: clone(2) CLONE_PARENT, CLONE_INTO_CGROUP; unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import struct
from typing import NoReturn

from nsinit.helpers import bridge_maker, network_maker
from nsinit.kernel import constants as k
from nsinit.kernel import stage, syscalls
from nsinit.log import log
from nsinit.sandbox import child
from nsinit.sandbox.builder_steps import BuildFacts
from nsinit.sandbox.crash_points import INIT
from nsinit.sandbox.init_steps import Init
from nsinit.steps import StepFailed, Steps

NAME = "nsinit-forker"
SEED_NAME = "nsinit-seed"
"""The names in `/proc/<pid>/comm`."""
NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWUTS | k.CLONE_NEWIPC | k.CLONE_NEWNET
_DEADLINE_S = 5.0
_MAX_BYTES, _MAX_FDS = 32768, 4
"""Room for a path in each hierarchy, and for the descriptors that `clone` sends along."""
_HEAD = struct.Struct("=I")
_ANSWER = _INT = struct.Struct("=i")
_CHANNEL_FD = 3
_FORK_FORKER, _FORK_NETWORK_MAKER, _FORK_BRIDGE_MAKER = b"forker", b"network", b"bridge"
_MAKERS = {_FORK_NETWORK_MAKER: network_maker.live, _FORK_BRIDGE_MAKER: bridge_maker.live}
_REHEARSALS = 16
"""The interpreter rewrites the code of a function at its 8th call, each instruction with the next calls, and keeps the
method names that it has looked up. Such writes are made once in the seed, and not in a page of each PID 1."""


class SeedGone(SystemExit):
    """The process that forkers are forked from is gone: nsinit ends, and the next one has another. No `Exception`, so
    that no step takes it for its own failure."""


class Forker:
    """nsinit's end of the forker."""

    def __init__(self, machine: BuildFacts, runner: child.Runner) -> None:
        parent_pid = os.getpid()
        self._seed, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._seed_pid = os.fork()
            if self._seed_pid == 0:
                _live_as_seed(theirs, machine, runner, parent_pid)
        self._seed.settimeout(_DEADLINE_S)
        self.start()

    def start(self) -> None:
        """Have the seed start a forker. Raises `SeedGone`."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = self._ask_seed(_FORK_FORKER, theirs)
        if self._pid < 0:
            raise SeedGone(f"no forker can be started: {os.strerror(-self._pid)}")
        self._channel.settimeout(_DEADLINE_S)

    def fork_network_maker(self, theirs: socket.socket) -> int:
        """Have the seed fork a network maker, a child of this process with that end of a socket; return its pid.

        Raises:
            OSError: there is no room for a process.
            SeedGone: the seed has ended.
        """
        return self._fork_of_seed(_FORK_NETWORK_MAKER, theirs)

    def fork_bridge_maker(self, theirs: socket.socket) -> int:
        """Have the seed fork a bridge maker. Raises as `fork_network_maker`."""
        return self._fork_of_seed(_FORK_BRIDGE_MAKER, theirs)

    def _fork_of_seed(self, word: bytes, theirs: socket.socket) -> int:
        if (pid := self._ask_seed(word, theirs)) < 0:
            raise OSError(-pid, f"clone3: {os.strerror(-pid)}")
        return pid

    def _ask_seed(self, word: bytes, theirs: socket.socket) -> int:
        """Return the pid of a fork of the seed, or a negative errno."""
        try:
            socket.send_fds(self._seed, [word], [theirs.fileno()])
            (pid,) = _ANSWER.unpack(self._seed.recv(_ANSWER.size))
        except (OSError, struct.error) as error:
            raise SeedGone("the process that nsinit has others forked from is gone") from error
        return int(pid)

    def stop(self) -> None:
        """End the forker and the seed, and wait until they are gone."""
        self._end()
        self._seed.close()
        os.kill(self._seed_pid, signal.SIGKILL)
        os.waitpid(self._seed_pid, 0)

    def _end(self) -> None:
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def clone(self, base: int, attach_files: tuple[str, ...], fds: tuple[int, int, int], cgroup_fd: int) -> int:
        """Fork a PID 1, a child of this process, and return its pid. `fds`: user namespace, listener, control socket.
        `attach_files`: the v1 files that PID 1 joins its cgroups by. `cgroup_fd`: its v2 cgroup, or -1.

        Raises:
            OSError: clone3 failed.
            StepFailed: the forker died or hangs.
        """
        request = _HEAD.pack(base) + b"\n".join(map(os.fsencode, attach_files))
        try:
            self._send(request, [*fds, *([cgroup_fd] if cgroup_fd >= 0 else [])])
            answer = self._channel.recv(_ANSWER.size)
            if not answer:
                raise ConnectionResetError(errno.ECONNRESET, "the forker died")
        except OSError as error:
            log("error", "the forker failed", pid=self._pid, reason=str(error))
            self._end()
            self.start()
            raise StepFailed("clone", "the forker died", errno=error.errno or 0) from error
        (pid,) = _ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, f"clone3: {os.strerror(-pid)}")
        return int(pid)

    def _send(self, request: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self._channel, [request], fds)
        except ConnectionError:  # the forker died while it was idle: no clone was under way
            self._end()
            self.start()
            socket.send_fds(self._channel, [request], fds)


def _live_as_seed(channel: socket.socket, machine: BuildFacts, runner: child.Runner, parent_pid: int) -> NoReturn:
    """Run the seed until nsinit hangs up: fork a forker or a maker, a child of nsinit, for each socket that comes.
    Ends the process, always."""
    try:
        syscalls.end_with_parent(parent_pid)
        os.dup2(channel.fileno(), _CHANNEL_FD, inheritable=False)
        syscalls.close_range(_CHANNEL_FD + 1)
        for _ in range(_REHEARSALS):
            runner.rehearse()
        syscalls.close_range(_CHANNEL_FD + 1)
        gc.freeze()
        quiet, cloner = socket.socket(fileno=_CHANNEL_FD), syscalls.Cloner(0)
        syscalls.set_name(SEED_NAME)
        while True:
            word, fds, _, _ = socket.recv_fds(quiet, _MAX_BYTES, 1)
            if not word:
                break
            try:
                pid = cloner.clone(-1)
            except OSError as error:
                pid = -(error.errno or errno.EIO)
            with socket.socket(fileno=fds[0]) as theirs:
                if pid == 0 and word in _MAKERS:
                    _MAKERS[word](theirs, machine, parent_pid)
                if pid == 0:
                    _live(theirs, machine, runner, parent_pid)
            quiet.send(_ANSWER.pack(pid))
    finally:
        os._exit(1)


def _live(channel: socket.socket, machine: BuildFacts, runner: child.Runner, parent_pid: int) -> NoReturn:
    """Run the forker until nsinit hangs up. Ends the process, always."""
    try:
        syscalls.end_with_parent(parent_pid)
        os.dup2(channel.fileno(), _CHANNEL_FD, inheritable=False)
        syscalls.close_range(_CHANNEL_FD + 1)
        os.chdir("/")
        # A collection writes to the header of every object, and so would copy their pages.
        gc.freeze()
        gc.disable()
        quiet = socket.socket(fileno=_CHANNEL_FD)
        syscalls.set_name(NAME)
        _serve(quiet, machine, runner)
    finally:
        os._exit(1)


def _serve(channel: socket.socket, machine: BuildFacts, runner: child.Runner) -> None:
    """Fork for every request. A fork never leaves this function: returning would free objects, and so write to their
    pages, dozens of them."""
    room, cloner, close = socket.CMSG_SPACE(_MAX_FDS * _INT.size), syscalls.Cloner(NAMESPACES), os.closerange
    while True:
        request, ancillary, _, _ = channel.recvmsg(_MAX_BYTES, room)
        if not request:
            return
        fds = struct.unpack(f"={len(ancillary[0][2]) // _INT.size}i", ancillary[0][2])
        try:
            pid = cloner.clone(fds[3] if len(fds) > 3 else -1)
        except OSError as error:
            pid = -(error.errno or errno.EIO)
        if pid == 0:
            _become_init(request, fds, machine, runner)
        close(_CHANNEL_FD + 1, _CHANNEL_FD + 1 + _MAX_FDS)
        channel.send(_ANSWER.pack(pid))


def _become_init(request: bytes, fds: tuple[int, ...], machine: BuildFacts, runner: child.Runner) -> NoReturn:
    (base,) = _HEAD.unpack_from(request)
    files = tuple(map(os.fsdecode, filter(None, request[_HEAD.size :].split(b"\n"))))
    proc_path = f"{machine.layout.stage}/{stage.PROC}"
    powers = machine.last_capability, machine.landlock_abi, machine.filters
    init = Init(base, fds[0], files, fds[1], fds[2], proc_path, *powers)
    init.merge_pages = machine.merge_pages
    if machine.crash is not None:
        init.crash, init.steps = machine.crash, Steps(INIT, machine.crash)
    child.live(init, runner)
