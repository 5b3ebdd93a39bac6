"""The part of the supervisor in memory that has runs: commands, shells, processes, terminals. Knows no HTTP."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from sandkasten.model import (
    DEFAULT_SHELL,
    EventType,
    ExecInfo,
    ExecKind,
    ExecResult,
    ExecSpec,
    ExecState,
    OnDisconnect,
    OutputSlice,
    Port,
    ProcessSpec,
    ShellInfo,
    ShellSpec,
    Stream,
    TerminalSize,
    TerminalSpec,
    Waited,
    WaitFor,
    errors,
)
from sandkasten.model.run import is_made
from tests.fakes.readers import Reader, Viewer
from tests.fakes.runs import KEPT_BYTES, Run, Script, wait_any
from tests.fakes.sessions import FakeSessions

MAX_SHELLS = 16


class FakeRuns(FakeSessions):
    """`scripts` maps commands (an argv joined by spaces) to their behaviour; others succeed in silence."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, Script] = {}
        self.terminal_script = Script(echo=True)
        self.take_over_refusal: errors.SandkastenError | None = None
        self.take_over_turn: trio.Event | None = None
        self.kept_bytes = KEPT_BYTES
        self.runs: list[Run] = []
        self.run_opened = trio.Event()
        self.shell_specs: dict[str, dict[str, ShellSpec]] = {}
        self._runs: dict[str, dict[str, Run]] = {}
        self._gone: set[tuple[str, str]] = set()
        self._ports: dict[str, list[Port]] = {}
        self._ports_changed = trio.Event()

    # What a test does

    def forget(self, session_id: str, exec_id: str) -> None:
        """Let go of an ended run."""
        del self._runs[session_id][exec_id]
        self._gone.add((session_id, exec_id))

    def set_ports(self, session_id: str, *ports: Port) -> None:
        """Change what something inside listens on."""
        self._ports[session_id] = list(ports)
        self._ports_changed.set()
        self._ports_changed = trio.Event()

    # Commands

    @asynccontextmanager
    async def open_exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> AsyncIterator[Reader]:
        spec = spec.in_session((await self._live(session_id)).options)
        if (run := self._joined(session_id, spec.exec_id, spec)) is not None:
            with Reader(run) as reader:
                yield reader
            return
        if not spec.is_program:
            self._shell(session_id, spec.shell)
        run = self._add(session_id, spec)
        owner = Reader(run, is_joined=False)
        owner.is_detached = on_disconnect is OnDisconnect.DETACH
        try:
            await self._begin(session_id, run)
            with owner as reader:
                yield reader
        finally:
            if not owner.is_detached:
                run.cancel()

    async def exec(
        self, session_id: str, spec: ExecSpec, *, on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    ) -> ExecResult:
        streams: dict[Stream, bytearray] = {kind: bytearray() for kind in Stream}
        merged = bytearray()
        async with self.open_exec(session_id, spec, on_disconnect=on_disconnect) as reader:
            async for output in reader:
                streams[output.stream] += output.data
                merged += output.data
            end = await reader.wait_end()
        omitted = self._runs[session_id][end.exec_id].script.omitted
        return ExecResult(
            end=end,
            output=bytes(merged),
            stdout=bytes(streams[Stream.STDOUT]),
            stderr=bytes(streams[Stream.STDERR]),
            bytes_total=len(merged) + omitted,
            bytes_omitted=omitted,
        )

    @asynccontextmanager
    async def attach_exec(self, session_id: str, exec_id: str, *, after: int = 0) -> AsyncIterator[Reader]:
        run = await self._run(session_id, exec_id)
        if after + 1 < run.first_sequence:
            raise errors.ExecGone("that output is not kept any more", first_sequence=run.first_sequence)
        with Reader(run, after=min(after, run.info.last_sequence)) as reader:
            yield reader

    async def execs(self, session_id: str) -> Sequence[ExecInfo]:
        await self._live(session_id)
        return [run.info for run in self._settled(session_id)]

    async def get_exec(self, session_id: str, exec_id: str) -> ExecInfo:
        return (await self._run(session_id, exec_id)).info

    async def read_output(
        self, session_id: str, exec_id: str, *, stream: Stream | None = None, offset: int = 0, limit: int = 1024 * 1024
    ) -> OutputSlice:
        return (await self._run(session_id, exec_id)).output(stream, offset, limit)

    async def send_stdin(self, session_id: str, exec_id: str, data: bytes, *, close: bool = False) -> None:
        run = await self._run(session_id, exec_id)
        await run.send(data)
        if close:
            run.close_stdin()

    async def signal_exec(self, session_id: str, exec_id: str, number: int) -> None:
        (await self._run(session_id, exec_id)).kill(number)

    async def cancel_exec(self, session_id: str, exec_id: str, *, now: bool = False) -> ExecInfo:
        run = await self._run(session_id, exec_id)
        run.cancel(now=now)
        while run.end is None:
            await run.changed.wait()
        return run.info

    async def resize_exec(self, session_id: str, exec_id: str, size: TerminalSize) -> None:
        (await self._run(session_id, exec_id)).resize(size)

    # Shells

    async def open_shell(self, session_id: str, spec: ShellSpec) -> ShellInfo:
        await self._live(session_id)
        shells = self._shells(session_id)
        if spec.name in shells:
            raise errors.Conflict("there is a shell of that name", name=spec.name)
        if len(shells) >= MAX_SHELLS:
            raise errors.Capacity("the session has too many shells", max_shells=MAX_SHELLS)
        shells[spec.name] = spec
        self.emit(EventType.SHELL_OPENED, session_id, name=spec.name)
        return self._shell_info(session_id, spec)

    async def shells(self, session_id: str) -> Sequence[ShellInfo]:
        await self._live(session_id)
        return [self._shell_info(session_id, spec) for spec in self._shells(session_id).values()]

    async def close_shell(self, session_id: str, name: str) -> None:
        await self._live(session_id)
        if name == DEFAULT_SHELL:
            raise errors.InvalidRequest("the default shell can't be closed", name=name)
        self._shell(session_id, name)
        for run in self._in_shell(session_id, name):
            run.cancel()
        del self._shells(session_id)[name]
        self.emit(EventType.SHELL_CLOSED, session_id, name=name)

    # Processes

    async def start_process(self, session_id: str, spec: ProcessSpec) -> ExecInfo:
        await self._live(session_id)
        if (joined := self._joined(session_id, spec.process_id, spec)) is not None:
            return joined.info
        as_exec = ExecSpec(
            command=spec.command,
            argv=spec.argv,
            stateless=True,
            unlimited=True,
            cwd=spec.cwd,
            env=spec.env,
            user=spec.user,
            stdin_open=True,
            terminal=spec.terminal,
            exec_id=spec.process_id,
        )
        run = self._add(session_id, as_exec, process=spec)
        await self._begin(session_id, run)
        return run.info

    async def wait_process(self, session_id: str, exec_id: str, condition: WaitFor, *, timeout_s: float) -> Waited:
        run = await self._run(session_id, exec_id)
        happened, line = False, None
        with trio.move_on_after(timeout_s):
            if condition.exit:
                await run.wait_ended()
                happened = True
            elif condition.port is not None:
                happened = await self._wait_port(session_id, run, condition.port)
            else:
                line = await _wait_line(run, condition.pattern or "")
                happened = line is not None
        return Waited(happened=happened, run=run.info, line=line)

    async def ports(self, session_id: str) -> Sequence[Port]:
        await self._live(session_id)
        return list(self._ports.get(session_id, ()))

    # Terminals

    @asynccontextmanager
    async def open_terminal(self, session_id: str, spec: TerminalSpec) -> AsyncIterator[Viewer]:
        await self._live(session_id)
        run = self._terminal(session_id, spec)
        viewer = Viewer(run, read_only=spec.read_only, is_shell=run.spec.shell != "")
        viewer.refusal, viewer.turn = self.take_over_refusal, self.take_over_turn
        try:
            yield viewer
        finally:
            run.takers.discard(viewer)

    # Inside

    def _terminal(self, session_id: str, spec: TerminalSpec) -> Run:
        runs = self._runs.setdefault(session_id, {})
        if spec.terminal_id is not None and spec.terminal_id.startswith("shell:"):
            spec = attrs.evolve(spec, terminal_id=None, shell=spec.terminal_id.removeprefix("shell:"))
        if spec.terminal_id is not None:
            found = runs.get(spec.terminal_id)
            if found is None or found.kind is not ExecKind.TERMINAL or found.end is not None:
                raise errors.TerminalNotFound("no such terminal", terminal_id=spec.terminal_id)
            return found
        if spec.shell is not None:
            self._shell(session_id, spec.shell)
            for run in runs.values():
                if run.kind is ExecKind.TERMINAL and run.spec.shell == spec.shell and run.end is None:
                    return run
        as_exec = ExecSpec(
            command="", shell=spec.shell or "", unlimited=True, cwd=spec.cwd, env=spec.env, terminal=spec.size
        )
        run = self._add(session_id, as_exec, kind=ExecKind.TERMINAL, script=self.terminal_script)
        run.start()
        self.emit(EventType.TERMINAL_OPENED, session_id, terminal_id=run.exec_id)
        return run

    def _joined(self, session_id: str, exec_id: str | None, spec: ExecSpec | ProcessSpec) -> Run | None:
        if exec_id is None:
            return None
        run = self._runs.get(session_id, {}).get(exec_id)
        is_chosen = not (isinstance(spec, ExecSpec) and spec.has_new_id)
        if (session_id, exec_id) in self._gone or (run is None and is_chosen and is_made(exec_id)):
            raise errors.ExecGone("that run is not kept any more", exec_id=exec_id)
        if run is not None and spec != (run.process or attrs.evolve(run.spec, exec_id=exec_id)):
            raise errors.Conflict("the id was used for something else", exec_id=exec_id, status=run.state.value)
        return run

    def _add(
        self,
        session_id: str,
        spec: ExecSpec,
        *,
        process: ProcessSpec | None = None,
        kind: ExecKind | None = None,
        script: Script | None = None,
    ) -> Run:
        name = spec.command if spec.command is not None else " ".join(spec.argv or ())
        kind = kind or (ExecKind.COMMAND if process is None else ExecKind.PROCESS)
        found = script or self.scripts.get(name, Script())
        run = Run(spec, found, kind=kind, process=process, kept_bytes=self.kept_bytes)
        run.on_end = functools.partial(self._ended, session_id)
        self.runs.append(run)
        self._runs.setdefault(session_id, {})[run.exec_id] = run
        self.run_opened.set()
        return run

    def _ended(self, session_id: str, run: Run) -> None:
        assert run.end is not None
        if run.kind is ExecKind.TERMINAL:
            self.emit(EventType.TERMINAL_CLOSED, session_id, terminal_id=run.exec_id)
        elif run.kind is ExecKind.PROCESS:
            self.emit(EventType.PROCESS_EXITED, session_id, process_id=run.exec_id, exit_code=run.end.exit_code)
        else:
            self.emit(EventType.EXEC_ENDED, session_id, exec_id=run.exec_id, exit_code=run.end.exit_code)

    async def _begin(self, session_id: str, run: Run) -> None:
        if run.script.turn is not None:
            await run.script.turn.wait()
        if run.script.refusal is not None:
            self.runs.remove(run)
            del self._runs[session_id][run.exec_id]
            raise run.script.refusal
        run.start()
        if run.kind is ExecKind.PROCESS:
            self.emit(EventType.PROCESS_STARTED, session_id, process_id=run.exec_id)
        else:
            self.emit(EventType.EXEC_STARTED, session_id, exec_id=run.exec_id)

    async def _run(self, session_id: str, exec_id: str) -> Run:
        await self._live(session_id)
        if (session_id, exec_id) in self._gone:
            raise errors.ExecGone("that run is not kept any more", exec_id=exec_id)
        run = self._runs.get(session_id, {}).get(exec_id)
        if run is None:
            raise errors.ExecNotFound("no such run", exec_id=exec_id)
        run.settle()
        return run

    def _settled(self, session_id: str) -> Iterator[Run]:
        for run in self._runs.get(session_id, {}).values():
            run.settle()
            yield run

    def _shells(self, session_id: str) -> dict[str, ShellSpec]:
        return self.shell_specs.setdefault(session_id, {DEFAULT_SHELL: ShellSpec(DEFAULT_SHELL)})

    def _shell(self, session_id: str, name: str) -> ShellSpec:
        try:
            return self._shells(session_id)[name]
        except KeyError:
            raise errors.ShellNotFound("no such shell", name=name) from None

    def _in_shell(self, session_id: str, name: str) -> list[Run]:
        return [run for run in self._settled(session_id) if not run.spec.is_program and run.spec.shell == name]

    def _shell_info(self, session_id: str, spec: ShellSpec) -> ShellInfo:
        infos = [run.info for run in self._in_shell(session_id, spec.name)]
        return ShellInfo(
            name=spec.name,
            cwd=spec.cwd or "/workspace",
            running=next((info for info in infos if info.state is ExecState.RUNNING), None),
            queued=tuple(info.exec_id for info in infos if info.state is ExecState.QUEUED),
        )

    async def _wait_port(self, session_id: str, run: Run, number: int) -> bool:
        while True:
            run.settle()
            if any(port.port == number for port in self._ports.get(session_id, ())):
                return True
            if run.end is not None:
                return False
            await wait_any(self._ports_changed, run.changed)


async def _wait_line(run: Run, pattern: str) -> str | None:
    try:
        wanted = re.compile(pattern)
    except re.error:
        raise errors.InvalidRequest("the pattern is malformed", pattern="is not RE2 syntax") from None
    while True:
        run.settle()
        for line in run.output(None, run.dropped_bytes, 2**40).data.decode(errors="replace").splitlines():
            if wanted.search(line):
                return line
        if run.end is not None:
            return None
        await run.changed.wait()
