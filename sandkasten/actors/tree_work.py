"""The supervisor's interface to the work of sessions: runs, shells, processes, terminals and events.

`tree.LocalSupervisor` inherits it. Runs in the caller's task: it asks the session's actor, and gives back a run, reader
or viewer when its context is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.node.creating import stopping
from sandkasten.actors.runs.run import Joined, Run, RunClaim, RunReader, RunRequest
from sandkasten.actors.runs.terminals import Viewer
from sandkasten.actors.runs.waiting import Collector, wait_for
from sandkasten.actors.services.directory import Entry
from sandkasten.actors.services.events import EventReader, open_reader
from sandkasten.actors.session.messages import (
    Activity,
    Attend,
    CloseShell,
    FindRun,
    KillRest,
    ListRuns,
    ListShells,
    OpenRun,
    OpenShell,
    OpenTerminal,
    ResizeRun,
    RunToEnd,
    SignalRun,
    WatchPorts,
)
from sandkasten.actors.session.watch import translating_death
from sandkasten.config import Config
from sandkasten.errors import InvalidRequest, TooLarge
from sandkasten.journal.ring import Journal
from sandkasten.model import (
    EXEC_ID,
    ExecEnd,
    ExecInfo,
    ExecResult,
    ExecSpec,
    OnDisconnect,
    OutputSlice,
    Port,
    ProcessSpec,
    Session,
    ShellInfo,
    ShellSpec,
    Stream,
    TerminalSize,
    TerminalSpec,
    Waited,
    WaitFor,
)
from sandkasten.model.run import MAX_TIMEOUT_MS

_MAX_READ_BYTES = 4 * 1024 * 1024
_MAX_CELLS = 1000
_MAX_SIGNAL = 64
_MAX_ARGUMENTS = 4096


class InFlight:
    """Requests in flight: runs and file transfers that a caller waits for. A graceful stop waits for them and admits
    no new ones. Detached runs, processes, terminals and readers are not counted: they may last for ever, and go on
    in the sandbox without the daemon."""

    def __init__(self) -> None:
        self._count = 0
        self._is_closed = False
        self._is_none = trio.Event()

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Admit no more requests."""
        self._is_closed = True
        self._tell_when_none()

    def check_open(self) -> None:
        """Raise `ShuttingDown` after `close`."""
        if self._is_closed:
            raise stopping()

    def __enter__(self) -> None:
        """Count a request for as long as the context lasts. Raises `ShuttingDown`."""
        self.check_open()
        self._count += 1

    def __exit__(self, *_error: object) -> None:
        self._count -= 1
        self._tell_when_none()

    async def wait_none(self) -> None:
        """Wait until, after `close`, the last request has ended."""
        await self._is_none.wait()

    def _tell_when_none(self) -> None:
        if self._is_closed and not self._count:
            self._is_none.set()


class WorkOfSessions:
    """The part of `supervisor.Supervisor` about the work of sessions. The heir brings the fields, `get` and `_live`."""

    _config: Config
    _store: Ref
    _journal: Journal
    _matchers: trio.CapacityLimiter
    _in_flight: InFlight

    async def _live(self, session_id: str) -> Entry:
        """Return the entry of a live session. Raises the error that an ended one ended with."""
        raise NotImplementedError

    async def get(self, session_id: str) -> Session:
        """See `Supervisor.get`."""
        raise NotImplementedError

    def attend(self, session_id: str) -> AbstractAsyncContextManager[None]:
        return self._attend(session_id)

    @asynccontextmanager
    async def _attend(self, session_id: str) -> AsyncIterator[None]:
        entry = await self._live(session_id)
        activity = Activity()
        try:
            await entry.ref.ask(Attend(activity))
            yield
        finally:
            activity.end()

    # Commands ---------------------------------------------------------------------------------------------------

    def open_exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> AbstractAsyncContextManager[RunReader]:
        check_spec(spec, self._config.server.max_command_bytes)
        return self._open_exec(session_id, spec, on_disconnect)

    @asynccontextmanager
    async def _open_exec(
        self, session_id: str, spec: ExecSpec, on_disconnect: OnDisconnect
    ) -> AsyncIterator[RunReader]:
        with self._in_flight:
            entry = await self._live(session_id)
            asked = self._command(entry, spec, on_disconnect)
            claim = RunClaim(asked)
            try:
                await entry.ref.ask(OpenRun(claim))
                reader = RunReader(claim.run, is_joined=claim.run is not asked)
                try:
                    if claim.run is asked:
                        await asked.started.wait()
                    yield reader
                finally:
                    reader.close()
            finally:
                claim.leave()

    async def exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> ExecResult:
        check_spec(spec, self._config.server.max_command_bytes)
        with self._in_flight:
            return await self._exec(session_id, spec, on_disconnect)

    async def _exec(self, session_id: str, spec: ExecSpec, on_disconnect: OnDisconnect) -> ExecResult:
        collector = Collector(self._config.server.output_cap_bytes)
        entry = await self._live(session_id)
        asked = self._command(entry, spec, on_disconnect, collector)
        claim = RunClaim(asked)
        try:
            entry.ref.post(RunToEnd(claim), asked.ended)
            try:
                return collector.result(await asked.ended.wait())
            except Joined:
                end = await claim.run.ended.wait()
                return await _result_of(claim.run, end, collector)
        finally:
            claim.leave()

    def _command(
        self, entry: Entry, spec: ExecSpec, on_disconnect: OnDisconnect, collector: Collector | None = None
    ) -> Run:
        spec = spec.in_session(entry.options)
        if spec.user is not None and not spec.is_program:
            raise InvalidRequest("a persistent shell has one user", user="needs argv or the stateless mode")
        timeout_ms = self._timeout_ms(spec)
        request = RunRequest(
            spec,
            timeout_ms=timeout_ms,
            on_disconnect=on_disconnect,
            queue_timeout_ms=_queue_timeout_ms(spec, None if collector is None else timeout_ms),
            pass_trace=self._config.runs.pass_traceparent,
        )
        return Run(request) if collector is None else Run(request, collector)

    def _timeout_ms(self, spec: ExecSpec) -> int | None:
        if spec.unlimited:
            if not self._config.runs.allow_unlimited:
                raise InvalidRequest("this server lets no command run without a time limit", timeout_ms="is null")
            return None
        maximum = self._config.defaults.max_exec_timeout_ms
        return min(spec.timeout_ms or maximum, maximum)

    def attach_exec(self, session_id: str, exec_id: str, *, after: int = 0) -> AbstractAsyncContextManager[RunReader]:
        return self._attach_exec(session_id, exec_id, after)

    @asynccontextmanager
    async def _attach_exec(self, session_id: str, exec_id: str, after: int) -> AsyncIterator[RunReader]:
        run = await self._find(session_id, exec_id)
        assert run.log is not None
        async with self.attend(session_id):
            await run.log.catch_up(after)
            reader = RunReader(run, after=after)
            try:
                yield reader
            finally:
                reader.close()

    async def execs(self, session_id: str) -> Sequence[ExecInfo]:
        entry = await self._live(session_id)
        return await entry.ref.ask(ListRuns())

    async def get_exec(self, session_id: str, exec_id: str) -> ExecInfo:
        return (await self._find(session_id, exec_id)).info

    async def read_output(
        self, session_id: str, exec_id: str, *, stream: Stream | None = None, offset: int = 0, limit: int = 1024 * 1024
    ) -> OutputSlice:
        if offset < 0 or not 0 < limit <= _MAX_READ_BYTES:
            raise InvalidRequest("no such part of the output", limit=f"must be between 1 and {_MAX_READ_BYTES}")
        run = await self._find(session_id, exec_id)
        assert run.log is not None
        return await run.log.read(stream, offset, limit)

    async def send_stdin(self, session_id: str, exec_id: str, data: bytes, *, close: bool = False) -> None:
        entry = await self._live(session_id)
        run = await entry.ref.ask(FindRun(exec_id, to_act=True))
        async with translating_death(entry.ref):
            await run.input.queue(data, close=close)

    async def signal_exec(self, session_id: str, exec_id: str, number: int) -> None:
        if not 0 < number <= _MAX_SIGNAL:
            raise InvalidRequest("no such signal", signal=f"must be between 1 and {_MAX_SIGNAL}")
        entry = await self._live(session_id)
        await entry.ref.ask(SignalRun(exec_id, number))

    async def cancel_exec(self, session_id: str, exec_id: str, *, now: bool = False) -> ExecInfo:
        run = await self._find(session_id, exec_id, to_act=True)
        run.cancel(now=now)
        await run.ended.wait_done()
        if now:
            entry = await self._live(session_id)
            await entry.ref.ask(KillRest(exec_id))
        return run.info

    async def resize_exec(self, session_id: str, exec_id: str, size: TerminalSize) -> None:
        _check_size(size)
        entry = await self._live(session_id)
        await entry.ref.ask(ResizeRun(exec_id, size))

    async def _find(self, session_id: str, exec_id: str, *, to_act: bool = False) -> Run:
        entry = await self._live(session_id)
        return await entry.ref.ask(FindRun(exec_id, to_act))

    # Shells -----------------------------------------------------------------------------------------------------

    async def open_shell(self, session_id: str, spec: ShellSpec) -> ShellInfo:
        self._in_flight.check_open()
        entry = await self._live(session_id)
        return await entry.ref.ask(OpenShell(spec))

    async def shells(self, session_id: str) -> Sequence[ShellInfo]:
        entry = await self._live(session_id)
        return await entry.ref.ask(ListShells())

    async def close_shell(self, session_id: str, name: str) -> None:
        entry = await self._live(session_id)
        await entry.ref.ask(CloseShell(name))

    # Processes --------------------------------------------------------------------------------------------------

    async def start_process(self, session_id: str, spec: ProcessSpec) -> ExecInfo:
        self._in_flight.check_open()
        check_spec(spec.program, self._config.server.max_command_bytes)
        if spec.timeout_ms is not None and not 0 < spec.timeout_ms <= MAX_TIMEOUT_MS:
            raise InvalidRequest("no such time limit", timeout_ms=f"must be between 1 and {MAX_TIMEOUT_MS}")
        entry = await self._live(session_id)
        request = RunRequest.of_process(spec, entry.options, pass_trace=self._config.runs.pass_traceparent)
        claim = RunClaim(Run(request))
        try:
            await entry.ref.ask(OpenRun(claim))
            await claim.run.started.wait()
            return claim.run.info
        finally:
            claim.leave()

    async def wait_process(self, session_id: str, exec_id: str, condition: WaitFor, *, timeout_s: float) -> Waited:
        run = await self._find(session_id, exec_id)
        entry = await self._live(session_id)
        ports = await entry.ref.ask(WatchPorts())
        async with self.attend(session_id):
            return await wait_for(run, condition, ports, timeout_s=timeout_s, matchers=self._matchers)

    async def ports(self, session_id: str) -> Sequence[Port]:
        entry = await self._live(session_id)
        return (await entry.ref.ask(WatchPorts())).list()

    # Terminals --------------------------------------------------------------------------------------------------

    def open_terminal(self, session_id: str, spec: TerminalSpec) -> AbstractAsyncContextManager[Viewer]:
        return self._open_terminal(session_id, spec)

    @asynccontextmanager
    async def _open_terminal(self, session_id: str, spec: TerminalSpec) -> AsyncIterator[Viewer]:
        _check_size(spec.size)
        self._in_flight.check_open()
        entry = await self._live(session_id)
        viewer = await entry.ref.ask(OpenTerminal(spec))
        try:
            await viewer.wait_started()
            yield viewer
        finally:
            viewer.close()

    # Events -----------------------------------------------------------------------------------------------------

    def events(
        self, *, session_id: str | None = None, after: str | None = None
    ) -> AbstractAsyncContextManager[EventReader]:
        return self._events(session_id, after)

    @asynccontextmanager
    async def _events(self, session_id: str | None, after: str | None) -> AsyncIterator[EventReader]:
        if session_id is not None:
            await self.get(session_id)
        async with open_reader(self._journal, self._store, session_id=session_id, after=after) as reader:
            yield reader


async def _result_of(run: Run, end: ExecEnd, collector: Collector) -> ExecResult:
    """Make the result of a run from its output log. Output that is not kept any more counts as omitted."""
    assert run.log is not None
    reader = RunReader(run, after=run.log.first_sequence - 1)
    try:
        async for piece in reader:
            collector.wrote(run, piece)
    finally:
        reader.close()
    result = collector.result(end)
    total = run.log.stdout_bytes + run.log.stderr_bytes
    return attrs.evolve(result, bytes_total=total, bytes_omitted=total - len(result.output))


def check_spec(spec: ExecSpec, max_bytes: int) -> None:
    """Refuse a command that no shell and no program can be given. Raises `InvalidRequest`, `TooLarge`."""
    if (spec.command is None) == (spec.argv is None):
        raise InvalidRequest("say what to run", cmd="exactly one of cmd and argv is needed")
    if spec.exec_id is not None and not EXEC_ID.match(spec.exec_id):
        raise InvalidRequest("the id is malformed", exec_id="must be 1 to 128 visible ASCII characters")
    if spec.argv is not None and not 0 < len(spec.argv) <= _MAX_ARGUMENTS:
        raise InvalidRequest("no such program", argv=f"must have 1 to {_MAX_ARGUMENTS} elements")
    if spec.terminal is not None:
        _check_size(spec.terminal)
    size = sum(_size(text) for text in (spec.argv if spec.argv is not None else (spec.command or "",)))
    if size > max_bytes:
        raise TooLarge(
            "the command is too long",
            cmd_bytes=size,
            max_cmd_bytes=max_bytes,
            recommendation="write it to a file in the session and run that",
        )


def _size(text: str) -> int:
    if "\0" in text:
        raise InvalidRequest("the command holds a NUL", cmd="NUL character")
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the command is not valid Unicode", cmd="lone surrogate") from None


def _check_size(size: TerminalSize) -> None:
    if not (0 < size.cols <= _MAX_CELLS and 0 < size.rows <= _MAX_CELLS):
        raise InvalidRequest("no such size", cols=f"cols and rows must be between 1 and {_MAX_CELLS}")


def _queue_timeout_ms(spec: ExecSpec, timeout_ms: int | None) -> int | None:
    """Return the longest wait for a turn in a shell: as asked for, else `timeout_ms`."""
    asked_ms = spec.queue_timeout_ms or timeout_ms
    return None if asked_ms is None else min(asked_ms, MAX_TIMEOUT_MS)
