"""Runs: commands, background processes and named shells of a session, and its listening ports.

A run is begun by `exec` (answered at its end, or followed as events) or as a background process. From then on clients
can look at it, follow it, signal it, send input and cancel it. A process is a run with URLs of its own, which lead to
processes only. Unless the client said otherwise, a run ends because its client left if it is a blocking `exec`, or one
that is followed and has no id of the client's.

`run_output.py` spells ends and output. All handlers here are raw: Quart would add 0.2 ms to a command, and cut an
answer that a run keeps waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar

import attrs
import trio

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources.fields import (
    Argv,
    Base64,
    Cells,
    Encoding,
    Environment,
    ExecId,
    ExecMode,
    ListLimit,
    Milliseconds,
    OnTimeout,
    OutputFields,
    Path,
    Pattern,
    PortNumber,
    Shell,
    ShellName,
    SignalNumber,
    Stdin,
    Text,
    User,
    WaitTarget,
    WhenLeft,
    bad_fields,
    bad_query,
    read_head,
    read_query,
    read_request,
)
from sandkasten.api.resources.run_output import (
    PUBLISHED_OUTPUT,
    START,
    UTF_8,
    EndBody,
    ExecResultBody,
    LastPosition,
    OutputFormat,
    OutputPosition,
    OutputQuery,
    Position,
    PreferredWait,
    RunEvents,
    Transcript,
    answer_output,
    is_timeout_error,
    timeout_error,
)
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.errors import ExecNotFound, InvalidImage, TooLarge
from sandkasten.model import (
    DEFAULT_SHELL,
    ExecInfo,
    ExecKind,
    ExecSpec,
    ExecState,
    OnDisconnect,
    Port,
    ProcessSpec,
    ShellInfo,
    ShellSpec,
    Stream,
    StreamsMode,
    TerminalSize,
    Waited,
    WaitFor,
)
from sandkasten.model.run import make_exec_id

T = TypeVar("T")

DEFAULT_LIST = ListLimit(1000)
BODIES_AT_ONCE = 100
"""Runs of a list that are spelled before other tasks get a turn."""

_MAXIMUM_MS = Milliseconds(0)
_ERROR = OnTimeout("error")

# Requests -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class TerminalRequest:
    """A terminal's size in character cells."""

    cols: Cells
    rows: Cells

    @property
    def size(self) -> TerminalSize:
        return TerminalSize(self.cols, self.rows)


@attrs.frozen
class ExecRequest:
    """A command. In `timeout_ms` 0 means the maximum, like an absent field, and null means no limit."""

    cmd: Text | None = attrs.field(default=None, repr=False)
    argv: Argv | None = attrs.field(default=None, repr=False)
    mode: ExecMode | None = None
    shell: ShellName | None = None
    user: User | None = None
    timeout_ms: Milliseconds | None = _MAXIMUM_MS
    queue_timeout_ms: Milliseconds | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    stdin: Stdin | None = attrs.field(default=None, repr=False)
    tty: TerminalRequest | None = None
    streams: StreamsMode | None = None
    exec_id: ExecId | None = None
    raw_output: bool | None = None
    encoding: Encoding | None = None
    output_fields: OutputFields = PUBLISHED_OUTPUT
    on_timeout: OnTimeout | None = None
    on_disconnect: WhenLeft | None = None

    def to_spec(self, settings: ApiSettings, *, exec_id: str | None = None, reads_both: bool = False) -> ExecSpec:
        """Return the model's command; a timeout above the maximum is the maximum. `exec_id` is for a command without.
        `reads_both`: the client reads both streams as one output.

        Raises:
            TooLarge: the command is longer than `max_command_bytes`.
            InvalidRequest: fields contradict each other, or no limit in time is asked for and not allowed.
        """
        check_command(self.cmd, self.argv, settings)
        self._check_place()
        is_unlimited = self.timeout_ms is None
        if is_unlimited and not settings.allow_unlimited_exec:
            raise bad_fields(timeout_ms="must not be null on this server: every command has a limit in time")
        if self.tty is not None and self.stdin is not None and not self.stdin.is_open:
            raise bad_fields(stdin="must be absent or true with tty: what is typed is sent later")
        return ExecSpec(
            command=self.cmd,
            argv=self.argv,
            shell=self.shell or DEFAULT_SHELL,
            stateless=None if self.mode is None else self.mode == "stateless",
            timeout_ms=None if is_unlimited else clamp_timeout(self.timeout_ms, settings),
            queue_timeout_ms=self.queue_timeout_ms,
            unlimited=is_unlimited,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user,
            stdin=None if self.stdin is None or self.stdin.is_open else self.stdin.text.encode(),
            stdin_open=self.stdin is not None and self.stdin.is_open,
            terminal=None if self.tty is None else self.tty.size,
            streams=self.streams,
            reads_both=reads_both,
            exec_id=self.exec_id or exec_id,
            has_new_id=self.exec_id is None and exec_id is not None,
        )

    def when_left(self, *, is_followed: bool) -> OnDisconnect:
        """Return the fate of the command when its client leaves. One that is followed goes on if the client gave it an
        id, by which the client finds it again."""
        if self.on_disconnect is not None:
            return OnDisconnect(self.on_disconnect)
        return OnDisconnect.DETACH if is_followed and self.exec_id is not None else OnDisconnect.CANCEL

    def _check_place(self) -> None:
        """Refuse fields that mean nothing where the command runs."""
        if self.argv is not None and self.mode == "stateful":
            raise bad_fields(mode="must be 'stateless' or absent with argv: a program runs beside the shells")
        is_program = self.argv is not None or self.mode == "stateless"
        if is_program and self.shell not in (None, DEFAULT_SHELL):
            raise bad_fields(shell="must be absent for what runs beside the shells")
        if self.mode == "stateful" and self.user is not None:
            raise bad_fields(user="needs argv or the mode 'stateless': a shell has its user")

    @property
    def output_format(self) -> OutputFormat:
        return OutputFormat(
            is_base64=self.encoding == "base64",
            is_raw=bool(self.raw_output),
            fields=self.output_fields,
            is_timeout_error=self.on_timeout != "result",
        )


def check_command(cmd: str | None, argv: tuple[str, ...] | None, settings: ApiSettings) -> None:
    """Refuse both or neither of the two, or one that is too long. Raises `InvalidRequest`, `TooLarge`."""
    if (cmd is None) == (argv is None):
        raise bad_fields(cmd="is required" if cmd is None else "exactly one of cmd and argv is needed")
    size = len((cmd or "").encode()) + sum(len(argument.encode()) + 1 for argument in argv or ())
    if size > settings.max_command_bytes:
        raise TooLarge(
            "the command is too long",
            cmd_bytes=size,
            max_cmd_bytes=settings.max_command_bytes,
            recommendation="write the script to a file with fs/write or fs/upload and run that",
        )


def clamp_timeout(asked_ms: int | None, settings: ApiSettings) -> int:
    """Return a time limit in ms: at most the maximum, which None and 0 stand for."""
    return min(asked_ms or settings.max_exec_timeout_ms, settings.max_exec_timeout_ms)


@attrs.frozen
class SignalRequest:
    """A signal, as a number or a name."""

    signal: SignalNumber


@attrs.frozen
class CancelRequest:
    """A cancellation; `now` kills without asking the run first."""

    now: bool | None = None


@attrs.frozen
class StdinRequest:
    """Input as text or base64, and with `close` its end."""

    text: str | None = attrs.field(default=None, repr=False)
    content_base64: Base64 | None = attrs.field(default=None, repr=False)
    close: bool | None = None

    @property
    def content(self) -> bytes:
        """The bytes to send. Raises `InvalidRequest` for two contents, or neither content nor `close`."""
        if self.text is not None and self.content_base64 is not None:
            raise bad_fields(text="at most one of text and content_base64 is possible")
        if self.text is None and self.content_base64 is None and not self.close:
            raise bad_fields(text="one of text, content_base64 and close is needed")
        return self.text.encode() if self.text is not None else bytes(self.content_base64 or b"")


@attrs.frozen
class ShellRequest:
    """A named shell to open."""

    name: ShellName
    shell: Shell | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    user: User | None = None

    def to_spec(self) -> ShellSpec:
        return ShellSpec(name=self.name, shell=self.shell, cwd=self.cwd, env=self.env or {}, user=self.user)


@attrs.frozen
class ProcessRequest:
    """A background process to start; without `cmd` and `argv` the command that the session's image has.

    `timeout_ms` null or 0: no time limit. `stdin` false: its input is `/dev/null`.
    """

    cmd: Text | None = attrs.field(default=None, repr=False)
    argv: Argv | None = attrs.field(default=None, repr=False)
    process_id: ExecId | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    user: User | None = None
    tty: TerminalRequest | None = None
    streams: StreamsMode | None = None
    keep_alive: bool | None = None
    timeout_ms: Milliseconds | None = None
    stdin: bool | None = None

    def to_spec(self, settings: ApiSettings) -> ProcessSpec:
        """Return the model's process. Raises `InvalidRequest`, `TooLarge`."""
        check_command(self.cmd, self.argv, settings)
        return ProcessSpec(
            command=self.cmd,
            argv=self.argv,
            process_id=self.process_id,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user,
            terminal=None if self.tty is None else self.tty.size,
            streams=self.streams,
            keep_alive=bool(self.keep_alive),
            timeout_ms=self.timeout_ms or None,
            stdin_open=self.stdin is not False,
        )


@attrs.frozen
class WaitRequest:
    """A condition to wait for, one of three; `for_` is spelled `for`."""

    for_: WaitTarget | None = None
    port: PortNumber | None = None
    pattern: Pattern | None = None
    timeout_ms: Milliseconds | None = None

    def to_condition(self) -> WaitFor:
        """Return the model's condition. Raises `InvalidRequest` unless there is exactly one."""
        if [self.for_, self.port, self.pattern].count(None) != 2:
            raise bad_fields(**{"for": "exactly one of for, port and pattern is needed"})
        return WaitFor(exit=self.for_ is not None, port=self.port, pattern=self.pattern)


@attrs.frozen
class RunsQuery:
    """The query of a list of runs: the latest `limit` of them."""

    kind: ExecKind | None = None
    state: ExecState | None = None
    limit: ListLimit = DEFAULT_LIST


@attrs.frozen
class ProcessesQuery:
    """The query of a list of processes: the latest `limit` of them."""

    state: ExecState | None = None
    limit: ListLimit = DEFAULT_LIST


@attrs.frozen
class FollowQuery:
    """The query of a run's events: from which place on, of which stream, and how they are spelled."""

    after: OutputPosition = START
    stream: Stream | None = None
    encoding: Encoding = UTF_8
    raw_output: bool = False
    on_timeout: OnTimeout = _ERROR

    @property
    def output_format(self) -> OutputFormat:
        return OutputFormat(
            is_base64=self.encoding == "base64", is_raw=self.raw_output, is_timeout_error=self.on_timeout != "result"
        )


@attrs.frozen
class FollowHead:
    """The place of the last event that a client has, which goes before that of the query, and in `prefer` a `wait` of
    some seconds (RFC 7240): the answer ends with the first events, or after that time."""

    last_event_id: LastPosition | None = None
    prefer: PreferredWait | None = None


@attrs.frozen
class LogsQuery(OutputQuery):
    """The query of a process's output; with `follow` it is sent as events, and the place is Last-Event-ID or `after`.

    `offset` and `limit` are for output that is not followed, the fields of `FollowQuery` for output that is.
    """

    follow: bool = False
    after: OutputPosition = START
    raw_output: bool = False
    on_timeout: OnTimeout = _ERROR


# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RunBody(Body):
    """A run. `end` is there once the run has ended."""

    exec_id: str
    kind: ExecKind
    state: ExecState
    command: str
    created_at: datetime
    stdout_bytes: int
    stderr_bytes: int
    first_sequence: int
    last_sequence: int
    last_line: str
    shell: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    pid: int | None = None
    tty: TerminalSize | None = None
    trace_id: str | None = None
    end: EndBody | None = None

    @classmethod
    def of(cls, run: ExecInfo, **others: Any) -> Self:  # others: fields of the subclass
        """Return a run as clients see it."""
        return cls.take(run, tty=run.terminal, end=None if run.end is None else EndBody.of(run.end), **others)


@attrs.frozen(kw_only=True)
class ProcessBody(RunBody):
    """A background process: a run, with the name of its id in these URLs."""

    process_id: str
    keep_alive: bool

    @classmethod
    def of(cls, run: ExecInfo, **others: Any) -> Self:  # others: fields of the subclass
        """Return a process as clients see it."""
        return super().of(run, process_id=run.exec_id, **others)


@attrs.frozen
class RunsBody(Body):
    """Runs of a session, oldest first."""

    execs: Sequence[RunBody]


@attrs.frozen
class ProcessesBody(Body):
    """Background processes of a session, oldest first."""

    processes: Sequence[ProcessBody]


@attrs.frozen
class WaitedBody(Body):
    """The end of a wait: whether the condition came true, the process then, and the line that matched."""

    happened: bool
    process: ProcessBody
    line: str | None = None


@attrs.frozen
class RunWaitedBody(Body):
    """The end of a wait: whether the condition came true, the run then, and the line that matched."""

    happened: bool
    run: RunBody
    line: str | None = None


@attrs.frozen
class ShellBody(Body):
    """A named shell. `running` is null while the shell waits for a command; `queued` are ids of runs."""

    name: str
    cwd: str
    running: RunBody | None
    queued: Sequence[str]

    @classmethod
    def of(cls, shell: ShellInfo) -> ShellBody:
        """Return a shell as clients see it."""
        return cls.take(shell, running=None if shell.running is None else RunBody.of(shell.running))


@attrs.frozen
class ShellsBody(Body):
    """Named shells of a session, the default one first."""

    shells: Sequence[ShellBody]


@attrs.frozen
class PortsBody(Body):
    """TCP ports that processes inside listen on."""

    ports: Sequence[Port]


async def _bodies(runs: Sequence[ExecInfo], spell: Callable[[ExecInfo], T]) -> list[T]:
    """Return the bodies of runs, giving other tasks their turns meanwhile."""
    bodies: list[T] = []
    for start in range(0, len(runs), BODIES_AT_ONCE):
        bodies += [spell(run) for run in runs[start : start + BODIES_AT_ONCE]]
        await trio.lowlevel.checkpoint()
    return bodies


# Commands -------------------------------------------------------------------------------------------------------------


async def execute(exchange: Exchange) -> Answer:
    """Run a command and wait for its end."""
    request = await read_request(exchange, ExecRequest)
    spec = request.to_spec(exchange.settings, reads_both=request.output_fields == PUBLISHED_OUTPUT)
    when_left = request.when_left(is_followed=False)
    work = functools.partial(exchange.supervisor.exec, exchange.session_id, spec, on_disconnect=when_left)
    result = await exchange.until_disconnect(work)
    output_format = request.output_format
    body = await ExecResultBody.read(result, output_format)
    if is_timeout_error(result.end, output_format):
        raise timeout_error(result.end, to_plain(body))
    return json_answer(body)


async def execute_and_follow(exchange: Exchange) -> None:
    """Run a command and send its output as events; with Last-Event-ID follow one that was begun before."""
    request = await read_request(exchange, ExecRequest)
    spec = request.to_spec(exchange.settings)
    head = read_head(exchange, FollowHead)
    position = head.last_event_id
    if position is not None and spec.exec_id is None:
        raise bad_fields(exec_id="is required with Last-Event-ID")
    if spec.exec_id is None:
        spec = attrs.evolve(spec, exec_id=make_exec_id(), has_new_id=True)
    supervisor, session_id, exec_id = exchange.supervisor, exchange.session_id, str(spec.exec_id)
    if position is None:
        when_left = request.when_left(is_followed=True)
        open_run = functools.partial(supervisor.open_exec, session_id, spec, on_disconnect=when_left)
    else:
        open_run = functools.partial(supervisor.attach_exec, session_id, exec_id, after=position.sequence)
    output_format = request.output_format
    transcript = Transcript(output_format, position or Position())
    named = (("x-exec-id", exec_id),)
    events = RunEvents(exchange, open_run, transcript, output_format, headers=named, wait_s=head.prefer)
    await exchange.until_disconnect(events.run)


# Runs -----------------------------------------------------------------------------------------------------------------


async def list_runs(exchange: Exchange) -> Answer:
    """List the latest runs of a session, oldest first."""
    query = read_query(exchange, RunsQuery)
    runs = await _find_runs(exchange, query.kind, query.state, query.limit)
    return json_answer(RunsBody(await _bodies(runs, RunBody.of)))


async def get_run(exchange: Exchange) -> Answer:
    """Read a run."""
    return json_answer(RunBody.of(await exchange.supervisor.get_exec(exchange.session_id, _exec_id(exchange))))


async def read_output(exchange: Exchange) -> Answer | None:
    """Read a part of a run's output by offset, as text, base64 or plain bytes."""
    return await answer_output(exchange, _exec_id(exchange), read_query(exchange, OutputQuery))


async def follow_run(exchange: Exchange) -> None:
    """Follow a run as events, from its beginning, `after` a place or Last-Event-ID on."""
    await exchange.drop_body()
    query = read_query(exchange, FollowQuery)
    head = read_head(exchange, FollowHead)
    position = head.last_event_id or query.after
    wanted = _exec_id(exchange)
    open_run = functools.partial(exchange.supervisor.attach_exec, exchange.session_id, wanted, after=position.sequence)
    transcript = Transcript(query.output_format, position, only=query.stream)
    named = (("x-exec-id", wanted),)
    events = RunEvents(exchange, open_run, transcript, query.output_format, headers=named, wait_s=head.prefer)
    await exchange.until_disconnect(events.run)


async def send_signal(exchange: Exchange) -> Answer:
    """Send a signal to a run."""
    request = await read_request(exchange, SignalRequest)
    await exchange.supervisor.signal_exec(exchange.session_id, _exec_id(exchange), request.signal)
    return json_answer(DoneBody())


async def cancel_run(exchange: Exchange) -> Answer:
    """Cancel a run; answered once the run has ended."""
    request = await read_request(exchange, CancelRequest)
    run = await exchange.supervisor.cancel_exec(exchange.session_id, _exec_id(exchange), now=bool(request.now))
    return json_answer(RunBody.of(run))


async def send_stdin(exchange: Exchange) -> Answer:
    """Send input to a run; answered once the run has taken it."""
    request = await read_request(exchange, StdinRequest, limit_bytes=exchange.settings.max_json_bytes)
    work = functools.partial(
        exchange.supervisor.send_stdin,
        exchange.session_id,
        _exec_id(exchange),
        request.content,
        close=bool(request.close),
    )
    await exchange.until_disconnect(work)
    return json_answer(DoneBody())


async def resize(exchange: Exchange) -> Answer:
    """Change the size of a run's terminal."""
    request = await read_request(exchange, TerminalRequest)
    await exchange.supervisor.resize_exec(exchange.session_id, _exec_id(exchange), request.size)
    return json_answer(DoneBody())


async def _find_runs(
    exchange: Exchange, kind: ExecKind | None, state: ExecState | None, limit: int
) -> Sequence[ExecInfo]:
    runs = await exchange.supervisor.execs(exchange.session_id)
    return [run for run in runs if kind in (None, run.kind) and state in (None, run.state)][-limit:]


def _exec_id(exchange: Exchange) -> str:
    return exchange.params["exec_id"]


# Processes ------------------------------------------------------------------------------------------------------------


async def start_process(exchange: Exchange) -> Answer:
    """Start a background process."""
    request = await read_request(exchange, ProcessRequest)
    if request.cmd is None and request.argv is None:
        request = attrs.evolve(request, argv=await _command_of_image(exchange))
    process = await exchange.supervisor.start_process(exchange.session_id, request.to_spec(exchange.settings))
    return json_answer(ProcessBody.of(process), status=201)


async def _command_of_image(exchange: Exchange) -> Argv | None:
    """Return the command of the image that has the name of the session's by now, if it has one."""
    session = await exchange.supervisor.get(exchange.session_id)
    try:
        command = (await exchange.supervisor.image(session.image)).config.command
        return Argv(command) if command else None
    except InvalidImage:
        return None


async def list_processes(exchange: Exchange) -> Answer:
    """List the latest background processes of a session, oldest first."""
    query = read_query(exchange, ProcessesQuery)
    runs = await _find_runs(exchange, ExecKind.PROCESS, query.state, query.limit)
    return json_answer(ProcessesBody(await _bodies(runs, ProcessBody.of)))


async def get_process(exchange: Exchange) -> Answer:
    """Read a background process."""
    return json_answer(ProcessBody.of(await _process(exchange)))


async def process_logs(exchange: Exchange) -> Answer | None:
    """Read a process's output by offset, or follow it as events."""
    await _process(exchange)
    query = read_query(exchange, LogsQuery)
    if not query.follow:
        return await answer_output(exchange, _exec_id(exchange), query)
    for name in ("offset", "limit"):
        if name in exchange.query:
            raise bad_query(name, "must be absent with follow: the place is told by Last-Event-ID or after")
    await follow_run(exchange)
    return None


async def process_stdin(exchange: Exchange) -> Answer:
    """Send input to a process; answered once the process has taken it."""
    await _process(exchange)
    return await send_stdin(exchange)


async def process_signal(exchange: Exchange) -> Answer:
    """Send a signal to a process."""
    await _process(exchange)
    return await send_signal(exchange)


async def process_resize(exchange: Exchange) -> Answer:
    """Change the size of a process's terminal."""
    await _process(exchange)
    return await resize(exchange)


async def kill_process(exchange: Exchange) -> Answer:
    """Kill a process and all processes it started, at once."""
    await _process(exchange)
    process = await exchange.supervisor.cancel_exec(exchange.session_id, _exec_id(exchange), now=True)
    return json_answer(ProcessBody.of(process))


async def wait_for_process(exchange: Exchange) -> Answer:
    """Wait for a process's end, a listener on a port, or a line of output that matches."""
    request = await read_request(exchange, WaitRequest)
    await _process(exchange)
    waited = await _wait(exchange, request)
    return json_answer(WaitedBody(waited.happened, ProcessBody.of(waited.run), waited.line))


async def wait_for_run(exchange: Exchange) -> Answer:
    """Wait for a run's end, a listener on a port, or a line of output that matches."""
    waited = await _wait(exchange, await read_request(exchange, WaitRequest))
    return json_answer(RunWaitedBody(waited.happened, RunBody.of(waited.run), waited.line))


async def _wait(exchange: Exchange, request: WaitRequest) -> Waited:
    work = functools.partial(
        exchange.supervisor.wait_process,
        exchange.session_id,
        _exec_id(exchange),
        request.to_condition(),
        timeout_s=clamp_timeout(request.timeout_ms, exchange.settings) / 1000,
    )
    return await exchange.until_disconnect(work)


async def list_ports(exchange: Exchange) -> Answer:
    """List the TCP ports that processes inside listen on."""
    return json_answer(PortsBody(await exchange.supervisor.ports(exchange.session_id)))


async def _process(exchange: Exchange) -> ExecInfo:
    """Return the process that the path names. Raises `ExecNotFound`, also for a run of another kind."""
    run = await exchange.supervisor.get_exec(exchange.session_id, _exec_id(exchange))
    if run.kind is not ExecKind.PROCESS:
        raise ExecNotFound("no such process", process_id=run.exec_id)
    return run


# Shells ---------------------------------------------------------------------------------------------------------------


async def open_shell(exchange: Exchange) -> Answer:
    """Open a named shell."""
    request = await read_request(exchange, ShellRequest)
    shell = await exchange.supervisor.open_shell(exchange.session_id, request.to_spec())
    return json_answer(ShellBody.of(shell), status=201)


async def list_shells(exchange: Exchange) -> Answer:
    """List the named shells of a session, the default one first."""
    shells = await exchange.supervisor.shells(exchange.session_id)
    return json_answer(ShellsBody([ShellBody.of(shell) for shell in shells]))


async def close_shell(exchange: Exchange) -> Answer:
    """Close a named shell."""
    await exchange.supervisor.close_shell(exchange.session_id, exchange.params["name"])
    return json_answer(DoneBody())
