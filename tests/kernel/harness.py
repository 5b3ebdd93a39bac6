"""Starts nsinit the way the daemon does and speaks both protocols to it and to runners, without trio.

For tests about what the kernel enforces: `Nsinit` is the fork server, `Sandbox` one session it built, and `run` a
command inside as the sandbox user. Everything is closed and removed by the context managers, whatever the test did.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nsinit
from nsinit import spawn
from nsinit.helpers.bridge_maker import NAME as BRIDGE_MAKER
from nsinit.helpers.builder import NAME as BUILDER
from nsinit.helpers.cgroup_maker import EMPTIER_NAME as CGROUP_EMPTIER
from nsinit.helpers.cgroup_maker import NAME as CGROUP_MAKER
from nsinit.helpers.forker import NAME as FORKER
from nsinit.helpers.forker import SEED_NAME as SEED
from nsinit.helpers.network_maker import NAME as NETWORK_MAKER
from nsinit.wire.launching import Allowance, Grant
from nsinit.wire.protocol import (
    ANSWERS,
    MAX_DATAGRAM_BYTES,
    MAX_FDS,
    REQUESTS,
    BridgeTerms,
    Build,
    Built,
    DiskSpec,
    Found,
    IoLimits,
    Limits,
    Ok,
    Ready,
    SandboxPlan,
    Scan,
    Scanned,
    SetFrozen,
    Start,
    Teardown,
    TornDown,
)
from runner.wire import protocol as runner_protocol
from runner.wire.protocol import Exec, ExecReply, FrameDecoder, HelloReply, Kind, Setup, encode_frame
from sandkasten import model
from sandkasten.counters.cgroup import CgroupStats
from tests.leaks import descendants
from tests.waiting import patience

PATIENCE_S = 20.0
_PAUSE_S = 0.001
FORK_UNTIL_REFUSED = """
import errno, os, signal
children = []
try:
    while len(children) < 100:
        children.append(os.fork() or signal.pause())
except BlockingIOError as error:
    print(errno.errorcode[error.errno], 8 < len(children) < 16)
for child in children:
    os.kill(child, signal.SIGKILL)
"""
"""Python that forks until it may not; prints why, and whether that was just below a limit of 16 processes."""

ROOMY = Limits(memory_bytes=256 << 20, pids=64, cpu_quota_us=200_000)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "run", "usr", "etc", "root", "var", "workspace", "home/sandbox")


@dataclass(frozen=True)
class Result:
    """A command's end."""

    code: int
    out: str
    err: str


NO_IO_LIMITS = IoLimits()
_STRANGER = 61_100


class Nsinit:
    """A running nsinit. Requests may be sent without waiting; `receive` returns answers as they come.

    `wrapper` is a command that ends by executing its arguments, to give nsinit other surroundings than the test's.
    `allowance`: the most that nsinit, as told by root, does for us.
    """

    def __init__(
        self,
        data_dir: Path,
        node_id: str,
        wrapper: tuple[str, ...] = (),
        allowance: Allowance | None = None,
        **asked: Any,
    ) -> None:
        self.data_dir = data_dir
        self._wrapper = wrapper
        self._grant = () if allowance is None else (Grant(str(data_dir), _STRANGER, allowance).encode(),)
        self._seq = itertools.count(1)
        self._sandboxes: list[Sandbox] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(patience(PATIENCE_S))
        with theirs:
            self.pid = self._spawn(theirs)
        self.ready = self.ask(Start, data_dir=str(data_dir), node_id=node_id, **asked)[0]

    def _spawn(self, theirs: socket.socket) -> int:
        if not self._wrapper:
            return spawn.spawn_nsinit(theirs.fileno(), self._log.fileno(), *self._grant)
        null_fd = os.open("/dev/null", os.O_RDWR)
        actions = [
            *((os.POSIX_SPAWN_DUP2, null_fd, fd) for fd in (0, 1)),
            (os.POSIX_SPAWN_DUP2, self._log.fileno(), 2),
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), spawn.CHANNEL_FD),
        ]
        try:
            program = [*self._wrapper, sys.executable, *spawn.FLAGS, str(Path(nsinit.__file__).parent), *self._grant]
            return os.posix_spawn(program[0], program, spawn.ENVIRONMENT, file_actions=actions)
        finally:
            os.close(null_fd)

    def send(self, request: type[Any], **fields: Any) -> int:
        """Send a request and return its sequence number."""
        seq = next(self._seq)
        self.channel.send(REQUESTS.encode(request(seq, **fields)))
        return seq

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next answer and its descriptors, which are the caller's."""
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, MAX_DATAGRAM_BYTES, MAX_FDS)
        except ConnectionResetError:  # nsinit ended with requests unread
            data, fds = b"", []
        if not data:
            raise EOFError(self.log)
        return ANSWERS.decode(data), list(fds)

    def ask(self, request: type[Any], **fields: Any) -> tuple[Any, list[int]]:
        """Send a request and return its answer; nothing else may be under way."""
        seq = self.send(request, **fields)
        answer, fds = self.receive()
        assert answer.seq == seq
        return answer, fds

    def build(self, plan: SandboxPlan, setup: Setup | None = None) -> Sandbox:
        """Build a sandbox that must succeed; `setup` is the first request to its runner."""
        answer, fds = self.ask(Build, plan=plan)
        assert isinstance(answer, Built), (answer, self.log)
        sandbox = Sandbox(self, answer, fds, setup or Setup(shell="bash"))
        self._sandboxes.append(sandbox)
        return sandbox

    def refused(self, plan: SandboxPlan) -> Any:
        """Build a sandbox that must not succeed; return the `Failed`."""
        answer, fds = self.ask(Build, plan=plan)
        for fd in fds:
            os.close(fd)
        assert type(answer).__name__ == "Failed", answer
        return answer

    def teardown(self, session_id: str) -> TornDown:
        """Tear a session down and return the counters."""
        answer, _ = self.ask(Teardown, session_id=session_id)
        assert isinstance(answer, TornDown), answer
        return answer

    def scan(self) -> dict[str, Found]:
        """Return all sessions by id."""
        found: dict[str, Found] = {}
        while True:
            answer, _ = self.ask(Scan, after=max(found, default=""))
            assert isinstance(answer, Scanned), answer
            found.update({each.session_id: each for each in answer.sessions})
            if not answer.more:
                return found

    def traces(self, session_id: str) -> list[str]:
        """Return every directory that still names the session, of its cgroup after some time: it stays until the memory
        of the session's files is freed, in the background."""
        assert isinstance(self.ready, Ready)
        files = [f"{self.data_dir}/{parent}/{session_id}" for parent in ("sessions", "run")]
        groups = [f"{parent}/{session_id}" for parent in self.ready.cgroup_dirs.values()]
        deadline = time.monotonic() + patience(10)
        while any(map(os.path.lexists, groups)) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return [path for path in (*files, *groups) if os.path.lexists(path)]

    def processes(self) -> set[int]:
        """Return the pids below nsinit that belong to a session or delete its files; its helpers are there for good."""
        helpers = BRIDGE_MAKER, BUILDER, CGROUP_EMPTIER, CGROUP_MAKER, FORKER, NETWORK_MAKER, SEED
        return {pid for pid, name in descendants(self.pid) if name not in helpers}

    def helpers(self, name: str) -> set[int]:
        """Return the pids of nsinit's helpers of that name."""
        return {pid for pid, each in descendants(self.pid) if each == name}

    @property
    def log(self) -> str:
        """Text that nsinit has logged so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def release_sandboxes(self) -> None:
        """Close what this process holds of every session that was built."""
        for sandbox in self._sandboxes:
            sandbox.release()

    def remove_sandboxes(self) -> None:
        """Tear down every session there is, and wait until nothing is left but nsinit and its helpers."""
        self.release_sandboxes()
        self._sandboxes.clear()
        for session_id in self.scan():
            self.teardown(session_id)
        wait_until(self._is_alone, "the trash was deleted")

    def _is_alone(self) -> bool:
        """Tell whether nsinit and its helpers are all that is left. Deletion begins a moment after a teardown: first
        there is something to delete, then a process that deletes it.
        """
        return not os.listdir(self.data_dir / "trash") and self.processes() == set()

    def kill(self) -> None:
        """Kill nsinit by SIGKILL and wait until its process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Hang up and wait until nsinit has ended by itself."""
        if self.pid:
            self.channel.close()
            os.waitpid(self.pid, 0)
            self.pid = 0
            said = self.log
            self._log.close()
            assert "system call refused" not in said, said


class Sandbox:
    """A session that was built, with a connection to its runner."""

    def __init__(self, owner: Nsinit, built: Any, fds: list[int], setup: Setup) -> None:
        self.owner, self.built = owner, built
        self.session_id: str = built.session_id
        self.pid: int = built.identity.pid
        self.pidfd, self.event_fd = fds
        self._names = itertools.count(1)
        self._runner = connect(owner.data_dir, self.session_id)
        self._decoder = new_decoder()
        if isinstance(self.request(setup)[0], HelloReply):  # the shell comes after the answer, and is no leak of a test
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
            wait_until(children.read_text, "its shell has been started")

    def request(self, message: Any, *fds: int) -> tuple[Any, bytes, bytes]:
        """Ask the runner, sending descriptors along; return its final answer, stdout and stderr."""
        frame = encode_frame(Kind.REQUEST, runner_protocol.REQUESTS.encode(message))
        sent = socket.send_fds(self._runner, [frame], fds)
        self._runner.sendall(frame[sent:])
        streams = {Kind.STDOUT: b"", Kind.STDERR: b""}
        while True:
            for kind, body in self._decoder:
                if kind in streams:
                    streams[kind] += body
                elif kind in (Kind.REPLY, Kind.ERROR):
                    return runner_protocol.ANSWERS.decode(body), streams[Kind.STDOUT], streams[Kind.STDERR]
            data = self._runner.recv(65536)
            if not data:
                raise EOFError(f"the runner is gone: {self.owner.log}")
            self._decoder.feed(data)

    def run(self, command: str, *, timeout_ms: int = 10_000) -> Result:
        """Run a command in the session's shell."""
        reply, out, err = self.request(Exec(f"e{next(self._names)}", command, timeout_ms=round(patience(timeout_ms))))
        assert isinstance(reply, ExecReply), reply
        return Result(reply.exit_code, out.decode(errors="replace"), err.decode(errors="replace"))

    def python(self, script: str) -> str:
        """Run a script with the sandbox's own Python; return what it printed."""
        result = self.run(f"python3 - <<'END_OF_SCRIPT'\n{script}\nEND_OF_SCRIPT")
        assert result.code == 0, result
        return result.out.strip()

    def teardown(self) -> TornDown:
        """Remove the session."""
        self.release()
        return self.owner.teardown(self.session_id)

    def release(self) -> None:
        """Close what this process holds of the session; the session lives on."""
        self._runner.close()
        for fd in (self.pidfd, self.event_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.pidfd = self.event_fd = -1


def connect(data_dir: Path, session_id: str) -> socket.socket:
    """Return a connection to a session's runner."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(patience(PATIENCE_S))
    directory_fd = os.open(data_dir / "run" / session_id, os.O_PATH)
    try:
        connection.connect(f"/proc/self/fd/{directory_fd}/r.sock")
    finally:
        os.close(directory_fd)
    return connection


def new_decoder() -> FrameDecoder:
    """Return a decoder for what a runner sends."""
    return FrameDecoder(runner_protocol.FROM_RUNNER, max_body_bytes=runner_protocol.MAX_FRAME_BYTES)


def new_id() -> str:
    """Return a session id nobody else uses."""
    return secrets.token_hex(12)


def new_node_id() -> str:
    """Return a node id nobody else uses: its first eight characters name the cgroup of all its sessions."""
    return secrets.token_hex(8)


def host_plan(session_id: str | None = None, **fields: Any) -> SandboxPlan:
    """Return a plan for the host image."""
    limits = fields.pop("limits", ROOMY)
    return SandboxPlan(session_id or new_id(), fields.pop("image", "host"), "host", limits, **fields)


def make_host_image(data_dir: Path, name: str = "host") -> Path:
    """Make the smallest root file system that the machine's `/usr` completes."""
    rootfs = data_dir / "images" / name / "rootfs"
    for path in _MOUNT_POINTS:
        (rootfs / path).mkdir(parents=True)
    for link in _MERGED:
        if os.path.islink(f"/{link}"):
            (rootfs / link).symlink_to(os.readlink(f"/{link}"))
    (rootfs / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (rootfs / "etc/group").write_text("root:x:0:\n")
    shutil.copy("/etc/ld.so.cache", rootfs / "etc/ld.so.cache")
    return rootfs


@contextlib.contextmanager
def data_directory() -> Iterator[Path]:
    """A data directory with a host image, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="sandkasten-kernel-"))
    try:
        make_host_image(path)
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def running(
    data_dir: Path,
    node_id: str | None = None,
    wrapper: tuple[str, ...] = (),
    *,
    disk: DiskSpec = "auto",
    io: IoLimits = NO_IO_LIMITS,
    allowance: Allowance | None = None,
    own_filters: bool = True,
    merge_pages: bool = False,
    cgroup_parent: str = "auto",
    bridge: BridgeTerms | None = None,
) -> Iterator[Nsinit]:
    """An nsinit; every session it knows of is torn down afterwards."""
    asked: dict[str, Any] = {"disk": disk, "io": io, "own_filters": own_filters, "cgroup_parent": cgroup_parent}
    asked |= {"merge_pages": merge_pages, "bridge": bridge}
    server = Nsinit(data_dir, node_id or new_node_id(), wrapper, allowance, **asked)
    try:
        yield server
    finally:
        server.release_sandboxes()
        if server.pid:
            try:
                server.release_sandboxes()
                for session_id in server.scan() if isinstance(server.ready, Ready) else ():
                    server.teardown(session_id)
            finally:
                server.close()


def wait_until(condition: Any, what: str) -> None:
    """Wait for something the kernel reports by no event to a bystander; fails naming it."""
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(_PAUSE_S)  # the awaited process may have the lowest priority, and there may be one processor


def run_outside(command: list[str]) -> str:
    """Run a command on the host and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_rootfs_image(data_dir: Path, name: str) -> Path:
    """Make a foreign root file system of one static binary, without accounts and without mount points."""
    rootfs = data_dir / "images" / name / "rootfs"
    (rootfs / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", rootfs / "bin/busybox")
    for applet in ("sh", "cat", "echo", "id", "ls", "stat", "touch", "readlink", "grep"):
        (rootfs / "bin" / applet).symlink_to("busybox")
    return rootfs


def rootfs_plan(image: str, **fields: Any) -> SandboxPlan:
    """Return a plan for a foreign root file system."""
    return SandboxPlan(new_id(), image, "rootfs", fields.pop("limits", ROOMY), **fields)


def check_counters(server: Nsinit, limits: Limits) -> None:
    """Run a session into its memory and pids limits; the reader behind stats and command results must tell so."""
    assert isinstance(server.ready, Ready)
    box = server.build(host_plan(limits=replace(limits, pids=12)))
    stats = CgroupStats(server.ready.cgroup_dirs, box.session_id)
    before = stats.read_usage()
    box.run(
        "python3 -c 'x = bytearray(400 << 20)'; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do sleep 2 & done",
        timeout_ms=20_000,
    )
    all_of_it, after = stats.read_all(), stats.read_usage()
    refused = stats.read_pids_refused()
    assert (all_of_it.memory_limit, all_of_it.pids_limit) == (limits.memory_bytes, 12)
    assert 0 < (all_of_it.memory_bytes or 0) <= limits.memory_bytes
    assert (all_of_it.memory_peak_bytes or 0) > limits.memory_bytes // 2
    assert (all_of_it.oom_kills or 0) >= 1
    assert all_of_it.cpu_throttled is not None
    assert all_of_it.cpu_limit == limits.cpu_quota_us / limits.cpu_period_us
    assert (all_of_it.pids or 0) >= 2
    assert all_of_it.pids_peak is None or all_of_it.pids_peak == 12
    assert all_of_it.pids_refused == refused
    assert (all_of_it.memory_pressure is not None) is _has_pressure(server, box.session_id)
    assert stats.read_limits(model.Limits()) == model.Limits(
        cpu=limits.cpu_quota_us / limits.cpu_period_us, memory_mb=limits.memory_bytes >> 20, pids=12
    )
    assert after.cpu_usec > before.cpu_usec >= 0
    assert refused > 0
    stats.close()
    box.teardown()


def check_freezing(server: Nsinit) -> None:
    """Freeze a busy session and look whether anything of it still computes; thaw it; tear it down while frozen."""
    assert isinstance(server.ready, Ready)
    box = server.build(host_plan())
    stats = CgroupStats(server.ready.cgroup_dirs, box.session_id)
    box.run("while :; do :; done & while :; do sleep 0.001; done & n=kept")
    for _ in range(2):
        assert isinstance(server.ask(SetFrozen, session_id=box.session_id, frozen=True)[0], Ok)
        frozen_at = stats.read_usage().cpu_usec
        time.sleep(0.1)
        assert stats.read_usage().cpu_usec - frozen_at < 1000
        assert isinstance(server.ask(SetFrozen, session_id=box.session_id, frozen=True)[0], Ok)
        assert isinstance(server.ask(SetFrozen, session_id=box.session_id, frozen=False)[0], Ok)
        assert box.run("echo $n").out == "kept\n"
        wait_until(lambda: stats.read_usage().cpu_usec > frozen_at + 1000, "it computes again")  # noqa: B023
    server.ask(SetFrozen, session_id=box.session_id, frozen=True)
    stats.close()
    assert box.teardown().leftovers == ()
    assert server.traces(box.session_id) == []
    answer, _ = server.ask(SetFrozen, session_id=box.session_id, frozen=True)
    assert (answer.stage, answer.errno) == ("freeze", errno.ENOENT)


def _has_pressure(server: Nsinit, session_id: str) -> bool:
    directory = server.ready.cgroup_dirs.get("unified")
    return directory is not None and os.access(f"{directory}/{session_id}/memory.pressure", os.R_OK)
