"""Runs the runner as PID 1 of small namespaces of its own, without nsinit, and speaks its protocol.

The sandbox here is only what the runner's own claims need: a pid namespace with a fresh /proc, private tmpfs mounts,
and the uid drop of `runner.process.spawn`. Isolation as a whole is tested where it is built.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nsinit import spawn
from runner.loop.config import RunnerConfig
from runner.wire.protocol import (
    ANSWERS,
    FROM_RUNNER,
    MAX_FRAME_BYTES,
    REQUESTS,
    Error,
    Exec,
    ExecReply,
    FileRequest,
    FrameDecoder,
    GetFile,
    HelloReply,
    Kind,
    PutFile,
    Setup,
    encode_frame,
)
from tests.kernel import keeper
from tests.waiting import patience, slowness

PATIENCE_S = 20.0

UID = 30_000 + os.getpid() % 30_000
"""Uid of commands: one that no other test run has, so that other processes do not count towards RLIMIT_NPROC here."""

_KEEPER = keeper.__file__


def _why_not() -> str | None:
    """Return why no sandbox can be started here, as the kernel says it, or None."""
    pid = os.fork()
    if pid == 0:
        try:
            keeper.unshare()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if number == 0 else f"unshare of mount and pid namespaces: {os.strerror(number)}"


_WHY_NOT = _why_not()

needs_namespaces = [pytest.mark.kernel, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]
"""Marker of a module of kernel tests, for `pytestmark`."""

SHELLS = [
    pytest.param(path, id=name, marks=pytest.mark.skipif(not os.path.exists(path), reason=f"no {path} here"))
    for name, path in (("bash", "/bin/bash"), ("dash", "/bin/dash"), ("busybox", "/bin/busybox"))
]


@dataclass
class Outcome:
    """All that came back for one command."""

    reply: Any
    stdout: bytes
    stderr: bytes
    started: bool


@dataclass
class Client:
    """One connection to a runner, blocking. With `connect` it is several, as a daemon has them: requests for files have
    one of their own for each user. `sock` is that of the last request."""

    sock: socket.socket
    connect: Callable[[], socket.socket] | None = None
    decoder: FrameDecoder = field(default_factory=lambda: FrameDecoder(FROM_RUNNER, max_body_bytes=MAX_FRAME_BYTES))
    _kind: object = None
    _others: dict[object, Client] = field(default_factory=dict)

    def close(self) -> None:
        """Leave."""
        self.sock.close()
        for other in self._others.values():
            other.sock.close()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        self.sock.sendall(encode_frame(kind, body))

    def request(self, message: object) -> None:
        kind = (message.user,) if isinstance(message, FileRequest) else None
        if self.connect is not None and kind != self._kind:
            self._others[self._kind] = Client(self.sock, decoder=self.decoder)
            other = self._others.pop(kind, None) or Client(self.connect())
            self.sock, self.decoder, self._kind = other.sock, other.decoder, kind
        self.send(Kind.REQUEST, REQUESTS.encode(message))

    def next_frame(self) -> tuple[Kind, bytes]:
        while True:
            for frame in self.decoder:
                return frame
            data = self.sock.recv(256 * 1024)
            if not data:
                raise ConnectionResetError("the runner closed the connection")
            self.decoder.feed(data)

    def next_message(self) -> Any:
        """Return the next message that is not output."""
        while True:
            kind, body = self.next_frame()
            if kind in (Kind.STARTED, Kind.REPLY, Kind.ERROR):
                return ANSWERS.decode(body)

    def ask(self, message: object) -> Any:
        self.request(message)
        return self.next_message()

    def begin(self, command: str, **options: Any) -> None:
        """Send a command and return when it was handed to the shell."""
        self.request(Exec("x", command, **options))
        kind, body = self.next_frame()
        assert kind is Kind.STARTED, body

    def outcome(self) -> Outcome:
        """Collect everything up to the final frame."""
        streams = {Kind.STDOUT: bytearray(), Kind.STDERR: bytearray(), Kind.STARTED: bytearray()}
        while True:
            kind, body = self.next_frame()
            if kind not in streams:
                stdout, stderr, started = streams.values()
                return Outcome(ANSWERS.decode(body), bytes(stdout), bytes(stderr), bool(started))
            streams[kind] += body

    def read_until(self, text: bytes) -> bytes:
        """Return the output so far once it holds `text`."""
        seen = b""
        while text not in seen:
            kind, body = self.next_frame()
            assert kind in (Kind.STDOUT, Kind.STDERR, Kind.STARTED), (kind, body)
            seen += body if kind is not Kind.STARTED else b""
        return seen

    def run(self, command: str, *, stdin: bytes | None = None, **options: Any) -> Outcome:
        """Run a command to its end."""
        self.request(Exec("x", command, stdin=stdin is not None, **options))
        if stdin is not None:
            for start in range(0, len(stdin), 65536):
                self.send(Kind.DATA, stdin[start : start + 65536])
            self.send(Kind.END)
        return self.outcome()

    def reply(self, command: str, **options: Any) -> ExecReply:
        answer = self.run(command, **options).reply
        assert isinstance(answer, ExecReply), answer
        return answer

    def stdout(self, command: str, **options: Any) -> bytes:
        return self.run(command, **options).stdout

    def write_file(self, path: str, content: bytes) -> Any:
        """Return `FilePut` or `Error`."""
        self.request(PutFile(path))
        for start in range(0, len(content), 65536):
            self.send(Kind.DATA, content[start : start + 65536])
        self.send(Kind.END)
        return self.next_message()

    def read_file(self, path: str, start: int | None = None, end: int | None = None) -> tuple[Any, bytes]:
        """Return (FilePart or Error, content)."""
        first = self.ask(GetFile(path, start, end))
        if isinstance(first, Error):
            return first, b""
        content = bytearray()
        while True:
            kind, body = self.next_frame()
            if kind is not Kind.DATA:
                final = ANSWERS.decode(body)
                return (final if isinstance(final, Error) else first), bytes(content)
            content += body


@dataclass
class Sandbox:
    """A running runner."""

    pid: int
    """Pid of the process that holds the namespaces and waits for PID 1."""
    socket_path: str
    clients: list[Client] = field(default_factory=list)

    def connect(self) -> Client:
        client = Client(self.open(), self.open)
        self.clients.append(client)
        return client

    def open(self) -> socket.socket:
        """Return a connected socket, the caller's."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(patience(PATIENCE_S))
        sock.connect(self.socket_path)
        return sock

    def shell(self, name: str = "bash", env: dict[str, str] | None = None) -> Client:
        """Return a connection after `Setup` with this shell."""
        client = self.connect()
        answer = client.ask(Setup(env=env or {}, shell=name))
        assert isinstance(answer, HelloReply), answer
        return client

    def init_pid(self) -> int:
        """Return the pid of PID 1 as it is seen here."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def is_alive(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)


@contextlib.contextmanager
def open_sandbox(**overrides: Any) -> Iterator[Sandbox]:
    """Start a runner as PID 1 of a new pid and mount namespace; kill it and all below it at the end. On a slow machine
    a shell has more time before it is replaced."""
    defaults, slow = RunnerConfig(), slowness()
    overrides = {name: getattr(defaults, name) * slow for name in _GRACES} | overrides
    with tempfile.TemporaryDirectory() as directory:
        socket_path = f"{directory}/r.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(socket_path)
        listener.listen(64)
        ready_fd, write_fd = os.pipe()
        process = spawn.spawn_python(_KEEPER, listener.fileno(), write_fd, json.dumps({"uid": UID, **overrides}))
        os.close(write_fd)
        listener.close()
        with os.fdopen(ready_fd, "rb") as ready:  # the pid of PID 1 and READY, in any order
            words = ready.read().split()
        pid = next((int(word) for word in words if word.isdigit()), 0)
        sandbox = Sandbox(process, socket_path)
        try:
            assert keeper.READY in words, words
            yield sandbox
        finally:
            for client in sandbox.clients:
                client.close()
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)


_GRACES = "interrupt_grace_s", "terminate_grace_s", "kill_grace_s"


def code(answer: object) -> str:
    """Return the code of a refusal."""
    assert isinstance(answer, Error), answer
    return answer.code


def wait_until(claim: Any, *, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that has no event of its own here, such as a process elsewhere being gone."""
    deadline = time.monotonic() + patience(patience_s)
    while not claim():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)
