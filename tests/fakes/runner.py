"""PID 1 of a sandbox that follows a script: real is the wire contract, made up is what commands do.

A test says beforehand what a command will write and how it ends (`Script`), or holds the run (`ScriptedRun`) and
lets it write and end. Files lie in directories (`files.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from runner.wire import protocol
from runner.wire.protocol import CHUNK_BYTES, KEPT_RUN_BYTES, Kind
from sandkasten.model import Stream
from tests.fakes.files import WORKSPACE, FileRequest, ScriptedFiles

CANCELLED_CODE = 130
"""As after Ctrl-C."""
_HARMLESS = frozenset({17, 18, 23, 28})  # SIGCHLD, SIGCONT, SIGURG, SIGWINCH: signal(7)
_KINDS = {Stream.STDOUT: Kind.STDOUT, Stream.STDERR: Kind.STDERR}
_MAX_UNSENT = KEPT_RUN_BYTES // CHUNK_BYTES
"""Pieces that a run writes while nobody takes them."""
_READ_BYTES = 64 * 1024


@attrs.define
class Script:
    """Behaviour of a run: wait for `turn`, write `outputs`, `repeat` times, wait for `hold`, end; or be refused with
    `refusal`.

    With `echo` what it is sent comes back, and it ends with its input (for a terminal: with Ctrl-D). Input is taken
    once `reads` is set. Signals end it, except those in `ignores`; cancelling does, unless it `is_tough` and it isn't
    done `now`. With `breaks_protocol` its end is no frame, with `loses_connection` its connection ends without one.
    """

    outputs: Sequence[tuple[Stream, bytes]] = ()
    exit_code: int = 0
    cause: protocol.Cause = "exited"
    signal: int | None = None
    cwd: str = WORKSPACE
    repeat: int = 1
    turn: trio.Event | None = None
    hold: trio.Event | None = None
    refusal: protocol.Error | None = None
    echo: bool = False
    reads: trio.Event | None = None
    ignores: frozenset[int] = frozenset()
    is_tough: bool = False
    breaks_protocol: bool = False
    loses_connection: bool = False
    restarts_shell: bool = False
    written_bytes: int = -1


class ScriptedRun:
    """One run. `cancelled` is set when it was, by whatever way; `pieces_taken` counts what went to the daemon."""

    def __init__(self, request: protocol.Exec | protocol.RunProgram, script: Script) -> None:
        self.request, self.script = request, script
        self.exec_id = request.exec_id
        self.started, self.cancelled, self.ended = trio.Event(), trio.Event(), trio.Event()
        self.was_killed_now = False
        self.signals: list[int] = []
        self.sizes = [] if request.terminal is None else [request.terminal]
        self.stdin = bytearray()
        self.is_stdin_open = request.stdin or request.terminal is not None
        self.pieces_taken = 0
        self.reply: protocol.ExecReply | None = None
        self.began_at = math.inf
        self._kept = {stream: bytearray() for stream in Stream}
        self._dropped = dict.fromkeys(Stream, 0)
        self.unsent: deque[tuple[Stream, bytes]] = deque()
        self.changed = trio.Event()
        self.stream: trio.SocketStream | None = None

    def write(self, stream: Stream, data: bytes) -> None:
        """Have the run write `data` now."""
        kept = self._kept[stream]
        kept += data
        surplus = max(0, len(kept) - KEPT_RUN_BYTES)
        del kept[:surplus]
        self._dropped[stream] += surplus
        self.unsent.extend(_pieces(stream, data))
        self.notify()

    def finish(
        self, *, cause: protocol.Cause | None = None, exit_code: int | None = None, signal: int | None = None
    ) -> None:
        """End the run now, as its script says unless told otherwise."""
        if self.reply is None:
            self.reply = protocol.ExecReply(
                exec_id=self.exec_id,
                exit_code=self.script.exit_code if exit_code is None else exit_code,
                signal=self.script.signal if signal is None else signal,
                cause=cause or self.script.cause,
                cwd=self.script.cwd,
                duration_us=7000,
                shell_restarted=self.script.restarts_shell,
                written_bytes=self.script.written_bytes,
            )
            self.is_stdin_open = False
            self.ended.set()
            self.notify()

    def cancel(self, *, now: bool = False) -> None:
        if self.reply is None and (now or not self.script.is_tough):
            self.was_killed_now = now
            self.finish(cause="cancelled", exit_code=CANCELLED_CODE)
            self.cancelled.set()

    def kill(self, number: int) -> None:
        """Send a signal."""
        self.signals.append(number)
        if number not in self.script.ignores | _HARMLESS:
            self.finish(cause="signalled", exit_code=128 + number, signal=number)

    def take_input(self, data: bytes) -> None:
        self.stdin += data
        if self.script.echo:
            self.write(Stream.STDOUT, data)
        if self.sizes and self.script.echo and b"\x04" in data:
            self.finish()
        self.notify()

    def rewind(self, request: protocol.AttachRun) -> protocol.Attached:
        """Go on for a daemon that knows the first bytes of each stream; return where what it gets begins."""
        offsets = {Stream.STDOUT: request.stdout_offset, Stream.STDERR: request.stderr_offset}
        self.unsent.clear()
        for stream, kept in self._kept.items():
            offsets[stream] = max(offsets[stream], self._dropped[stream])
            self.unsent.extend(_pieces(stream, bytes(kept[offsets[stream] - self._dropped[stream] :])))
        age_us = round((trio.current_time() - self.began_at) * 1e6) if self.started.is_set() else 0
        return protocol.Attached(self.exec_id, offsets[Stream.STDOUT], offsets[Stream.STDERR], age_us, self.pid)

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    @property
    def pid(self) -> int:
        return 42 if isinstance(self.request, protocol.RunProgram) else 0

    async def play(self) -> None:
        """Begin, and follow the script until it ends."""
        self.began_at, script = trio.current_time(), self.script
        self.started.set()
        self.notify()
        with trio.move_on_after(
            math.inf if self.request.timeout_ms is None else self.request.timeout_ms / 1000
        ) as time:
            for _ in range(script.repeat):
                for stream, data in script.outputs:
                    await trio.lowlevel.checkpoint()
                    while self.unsent and (self.stream is not None or len(self.unsent) >= _MAX_UNSENT):
                        await self.changed.wait()
                    if self.reply is not None:
                        return
                    self.write(stream, data)
            while self.reply is None and (script.hold is not None and not script.hold.is_set()):
                await _first_of(script.hold.wait, self.changed.wait)
            while self.reply is None and script.echo and self.is_stdin_open:
                await self.changed.wait()
        if time.cancelled_caught:
            self.finish(cause="timed_out", exit_code=CANCELLED_CODE)
        self.finish()

    async def send_all(self, stream: trio.SocketStream, *, was_attached: bool = False) -> None:
        """Send the run's output, until its end is sent or the run goes on over another connection."""
        self.stream, is_told = stream, False
        while self.stream is stream:
            if not is_told and self.started.is_set():
                is_told = True
                if not was_attached:
                    await stream.send_all(answer(protocol.Started(self.exec_id, self.pid), Kind.STARTED))
            elif self.unsent:
                kind, data = self.unsent[0]
                await stream.send_all(protocol.encode_frame(_KINDS[kind], data))
                self.pieces_taken += 1
                self.unsent.popleft()
                self.notify()
            elif self.reply is not None:
                if self.script.loses_connection:
                    await trio.aclose_forcefully(stream)
                else:
                    await stream.send_all(b"\xff" * 16 if self.script.breaks_protocol else answer(self.reply))
                return
            else:
                await self.changed.wait()


def _pieces(stream: Stream, data: bytes) -> list[tuple[Stream, bytes]]:
    return [(stream, data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]


async def _first_of(*waits: Callable[[], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(each: Callable[[], Awaitable[None]]) -> None:
            await each()
            nursery.cancel_scope.cancel()

        for each in waits:
            nursery.start_soon(wait, each)


def answer(message: Any, kind: Kind | None = None) -> bytes:  # a member of protocol.ANSWERS
    """Return the frame of an answer: a final one, unless `kind` says otherwise."""
    final = Kind.ERROR if isinstance(message, protocol.Error) else Kind.REPLY
    return protocol.encode_frame(kind or final, protocol.ANSWERS.encode(message))


class ScriptedRunner:
    """PID 1 of one sandbox. `script_of` says what a command does; `on_run` is told of each run that begins.

    `requests` are those that were not about a run.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        files: ScriptedFiles,
        script_of: Callable[[str], Script] = lambda command: Script(),
        on_run: Callable[[ScriptedRun], None] = lambda run: None,
    ) -> None:
        self._nursery, self.files, self._script_of, self._on_run = nursery, files, script_of, on_run
        self.setup = protocol.Setup()
        self.requests: list[Any] = []
        self.runs: dict[str, ScriptedRun] = {}
        self.shells: dict[str, protocol.ShellInfo] = {}
        self.ports: list[tuple[int, str]] = []
        self._ports_changed = trio.Event()
        self._turns: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        self._streams: set[trio.SocketStream] = set()
        self.env: dict[str, str | None] = {}
        """Variables that were set since `Setup`."""
        self.version = protocol.PROTOCOL_VERSION
        self.is_silent = False
        """Whether requests are read and not answered."""

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve a connection until the daemon closes it."""
        connection = _Connection(stream)
        self._streams.add(stream)
        try:
            async with stream:
                while (frame := await connection.receive()) is not None:
                    if frame[0] is Kind.REQUEST:  # else of a request that was answered meanwhile
                        await self._handle(connection, protocol.REQUESTS.decode(frame[1]))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # its session has ended
        finally:
            self._streams.discard(stream)

    async def die(self) -> None:
        """End every connection, as the kernel does when the process ends."""
        for stream in list(self._streams):
            await trio.aclose_forcefully(stream)

    def set_ports(self, *ports: int) -> None:
        """Let exactly these ports be listened on."""
        self.ports = [(port, "0.0.0.0") for port in ports]
        self._ports_changed.set()
        self._ports_changed = trio.Event()

    async def _handle(self, connection: _Connection, request: Any) -> None:
        if self.is_silent:
            return
        match request:
            case protocol.Exec() | protocol.RunProgram():
                await self._begin(connection, request)
            case protocol.AttachRun(exec_id):
                await self._attach(connection, request, self.runs.get(exec_id))
            case protocol.Watch():
                await self._watch(connection)
            case protocol.ReadFile() | protocol.WriteFile():
                await self._serve_older(connection, request)
            case _ if isinstance(request, FileRequest):
                final = await self.files.serve(request, connection.receive, connection.stream.send_all)
                if final is not None:
                    await connection.stream.send_all(answer(final))
            case _:
                self.requests.append(request)
                await connection.stream.send_all(answer(self._answer(request)))

    def _answer(self, request: Any) -> object:
        match request:
            case protocol.Setup():
                self.setup = request
                return self._hello()
            case protocol.Hello():
                return self._hello()
            case protocol.SetEnv(env):
                self.env |= env
            case protocol.ListRuns():
                kept = [run for run in self.runs.values() if run.request.ticket]
                return protocol.RunList(tuple(map(_entry, range(1, len(kept) + 1), kept)), more=False)
            case protocol.ForgetRuns(exec_ids):
                for exec_id in exec_ids:
                    if (run := self.runs.pop(exec_id, None)) is not None:
                        run.cancel(now=True)
            case protocol.Signal(exec_id) | protocol.Cancel(exec_id) | protocol.Resize(exec_id):
                run = self.runs.get(exec_id)
                if run is None or run.reply is not None:
                    return protocol.Error("NOT_RUNNING", "no such run")
                self._control(run, request)
            case protocol.OpenShell(name):
                self.shells[name] = protocol.ShellInfo(name, f"/bin/{request.shell}", request.cwd or WORKSPACE)
                return self.shells[name]
            case protocol.CloseShell(name):
                if self.shells.pop(name, None) is None:
                    return protocol.Error("NOT_RUNNING", "no such shell")
                for run in self.runs.values():
                    if isinstance(run.request, protocol.Exec) and run.request.shell == name:
                        run.cancel(now=True)
        return protocol.Done()

    def _hello(self) -> protocol.HelloReply:
        return protocol.HelloReply(
            f"/bin/{self.setup.shell}",
            WORKSPACE,
            tuple(self.shells.values()),
            self.version,
            has_changes=bool(self.env),
        )

    def _control(self, run: ScriptedRun, request: Any) -> None:
        match request:
            case protocol.Signal(number=number):
                run.kill(number)
            case protocol.Cancel(now=now):
                run.cancel(now=now)
            case protocol.Resize(size=size):
                run.sizes.append(size)
                run.notify()

    async def _begin(self, connection: _Connection, request: protocol.Exec | protocol.RunProgram) -> None:
        argv = request.argv if isinstance(request, protocol.RunProgram) else ()
        script = self._script_of(" ".join(argv) or request.command or "")
        if script.refusal is not None:
            await connection.stream.send_all(answer(script.refusal))
            return
        run = self.runs[request.exec_id] = ScriptedRun(request, script)
        self._on_run(run)
        self._nursery.start_soon(self._play, run)
        await self._carry(connection, run)

    async def _play(self, run: ScriptedRun) -> None:
        """Play a run, in a shell when its turn has come. A run that ends before its turn is never played."""
        if run.script.turn is not None:
            await _first_of(run.script.turn.wait, run.ended.wait)
            if run.reply is not None:
                return
        if isinstance(run.request, protocol.RunProgram):
            await run.play()
            return
        async with self._turns[run.request.shell]:
            if run.reply is None:
                await run.play()

    async def _attach(self, connection: _Connection, request: protocol.AttachRun, run: ScriptedRun | None) -> None:
        if run is None:
            await connection.stream.send_all(answer(protocol.Error("NOT_RUNNING", "no such run")))
            return
        await connection.stream.send_all(answer(run.rewind(request), Kind.STARTED))
        await self._carry(connection, run, was_attached=run.started.is_set())

    async def _carry(self, connection: _Connection, run: ScriptedRun, *, was_attached: bool = False) -> None:
        """Send what a run writes and take what it is sent, until it ends or the connection does."""
        async with trio.open_nursery() as nursery:

            async def take() -> None:
                while True:
                    if run.script.reads is not None:
                        await run.script.reads.wait()
                    frame = await connection.receive()
                    if frame is None:
                        break
                    match frame[0]:
                        case Kind.DATA:
                            run.take_input(frame[1])
                        case Kind.END:
                            run.is_stdin_open = False
                            run.notify()
                        case Kind.CANCEL:
                            run.cancel()
                if run.request.ticket:
                    run.stream = None
                else:
                    run.cancel(now=True)
                nursery.cancel_scope.cancel()

            nursery.start_soon(take)
            try:
                await run.send_all(connection.stream, was_attached=was_attached)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                run.stream = None
                if not run.request.ticket:
                    run.cancel(now=True)
            nursery.cancel_scope.cancel()

    async def _serve_older(self, connection: _Connection, request: protocol.ReadFile | protocol.WriteFile) -> None:
        """Perform a request that only a PID 1 of an older version takes; one that is newer refuses it."""
        if self.version >= protocol.FILES_VERSION:
            await connection.stream.send_all(answer(protocol.Error("BAD_REQUEST", "no request of this version")))
            return
        path = self.files.path(request.path)
        if isinstance(request, protocol.WriteFile):
            content = b""
            while (frame := await connection.receive()) is not None and frame[0] is not Kind.END:
                content += frame[1]
            path.write_bytes(content)
        else:
            content = path.read_bytes()
            info = protocol.FileInfo(f"{WORKSPACE}/{request.path}", len(content), len(content) > request.max_bytes)
            await connection.stream.send_all(answer(info, Kind.STARTED))
            if content:
                await connection.stream.send_all(protocol.encode_frame(Kind.DATA, content[: request.max_bytes]))
        await connection.stream.send_all(answer(protocol.Done(f"{WORKSPACE}/{request.path}")))

    async def _watch(self, connection: _Connection) -> None:
        """Tell of ports until the daemon closes the connection."""
        await connection.stream.send_all(answer(protocol.Started(""), Kind.STARTED))
        told: set[tuple[int, str]] = set()
        async with trio.open_nursery() as nursery:

            async def wait_end() -> None:
                while (frame := await connection.receive()) is not None and frame[0] is not Kind.CANCEL:
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait_end)
            while True:
                now = set(self.ports)
                for port in sorted(now - told):
                    await connection.stream.send_all(answer(protocol.PortOpened(*port), Kind.EVENT))
                for port in sorted(told - now):
                    await connection.stream.send_all(answer(protocol.PortClosed(*port), Kind.EVENT))
                told = now
                await self._ports_changed.wait()


class _Connection:
    """Frames of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = protocol.FrameDecoder(protocol.FROM_DAEMON, max_body_bytes=protocol.MAX_REQUEST_BYTES)

    async def receive(self) -> protocol.Frame | None:
        """Return the next frame; None when the daemon has closed the connection."""
        while (frame := next(self._decoder, None)) is None:
            try:
                data = await self.stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._decoder.feed(data)
        return frame


def _entry(number: int, run: ScriptedRun) -> protocol.RunEntry:
    return protocol.RunEntry(
        number,
        run.exec_id,
        run.request.ticket,
        has_begun=run.started.is_set(),
        has_ended=run.reply is not None,
        input_ended=not run.is_stdin_open,
    )
