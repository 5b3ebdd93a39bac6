"""E2B's `process.Process`: commands and terminals of a sandbox, which are processes of ours.

A command outlives its client, as one of E2B's does. Its time limit is the deadline of the request that started it. A
process is named by its pid in the session, or by a tag; the newest run that goes on is meant. When a sandbox dies, its
streams break off: an end event would say that the command had ended by itself.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NewType

import attrs
import trio

from sandkasten.api.e2b.connect import (
    Code,
    ConnectError,
    base64_bytes,
    base64_text,
    envelope,
    integer,
    read_message,
)
from sandkasten.api.e2b.context import KERNEL_PREFIX, Command, EnvdRequest
from sandkasten.api.resources.fields import MAX_ARGUMENTS, Cells, Environment, add_kinds, encodable
from sandkasten.errors import ExecNotFound, InvalidRequest, RunnerLost
from sandkasten.model import Cause, ExecEnd, ExecInfo, ExecState, Output, ProcessSpec, Stream, StreamsMode, TerminalSize
from sandkasten.model.run import MAX_TIMEOUT_MS

Data = NewType("Data", bytes)
Arguments = NewType("Arguments", tuple[str, ...])

_SIGNALS: Mapping[object, int] = {"SIGNAL_SIGTERM": 15, 15: 15, "SIGNAL_SIGKILL": 9, 9: 9}
"""Numbers of signals by the names and the numbers of E2B's schema."""
_MAX_ARGUMENT_BYTES = 128 * 1024
"""Longest argument that a program can be given: MAX_ARG_STRLEN, execve(2)."""

INPUT_S = 60.0
"""Longest time for which input waits for its process to read."""

_LOST = frozenset({Cause.SANDBOX_DIED, Cause.DAEMON_RESTARTED})
_KEEPALIVE_S = (5.0, 90.0, 3600.0)
"""Least, usual and greatest time between two signs of life on a stream."""


class Pid(int):
    """The id of a process. No NewType, as the next: our API's description has no such fields."""


class SignalName(int):
    """A signal, by its name or its number in E2B's schema."""


def _arguments(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) >= MAX_ARGUMENTS:
        raise ValueError(f"must be an array of fewer than {MAX_ARGUMENTS} strings")
    arguments = tuple(encodable(each) for each in value)
    for each in arguments:
        if len(each.encode()) >= _MAX_ARGUMENT_BYTES:
            raise ValueError(f"has an argument of more than {_MAX_ARGUMENT_BYTES - 1} bytes; write it to a file")
    return arguments


def _signal(value: object) -> SignalName:
    if not isinstance(value, str | int) or value not in _SIGNALS:
        raise ValueError("must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
    return SignalName(_SIGNALS[value])


add_kinds(
    {
        Pid: lambda value: Pid(integer(value, low=1)),
        Data: base64_bytes,
        Arguments: _arguments,
        SignalName: _signal,
    }
)

# Messages -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class WindowSize:
    """A terminal's size, in characters."""

    cols: Cells
    rows: Cells


@attrs.frozen
class Pty:
    """The terminal of a process to start, or its new size."""

    size: WindowSize

    @property
    def terminal(self) -> TerminalSize:
        """The size as the model has it."""
        return TerminalSize(self.size.cols, self.size.rows)


@attrs.frozen
class ProcessConfig:
    """A program with its arguments, variables and working directory."""

    cmd: str
    args: Arguments = Arguments(())
    envs: Environment = attrs.field(factory=lambda: Environment({}), repr=False)
    cwd: str | None = None


@attrs.frozen
class StartMessage:
    """A process to start. Without `stdin` its input is open: older clients don't know the field."""

    process: ProcessConfig
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool = True


@attrs.frozen
class Selector:
    """A process, by its pid or its tag."""

    pid: Pid | None = None
    tag: str | None = None


@attrs.frozen
class ProcessMessage:
    """A request about one process, without further fields."""

    process: Selector


@attrs.frozen
class InputBytes:
    """Bytes for a process's standard input (`stdin`) or for its terminal (`pty`)."""

    stdin: Data | None = attrs.field(default=None, repr=False)
    pty: Data | None = attrs.field(default=None, repr=False)

    @property
    def data(self) -> bytes:
        """The bytes, of whichever kind."""
        return bytes(self.stdin or self.pty or b"")


@attrs.frozen
class InputMessage:
    """Bytes for the input of one process."""

    process: Selector
    input: InputBytes


@attrs.frozen
class SignalMessage:
    """A signal for one process."""

    process: Selector
    signal: SignalName


@attrs.frozen
class UpdateMessage:
    """A new size for the terminal of one process."""

    process: Selector
    pty: Pty | None = None


@attrs.frozen
class InputStart:
    """The process that a stream of input is for."""

    process: Selector


@attrs.frozen
class InputPiece:
    """A piece of a stream of input."""

    input: InputBytes


@attrs.frozen
class InputStreamMessage:
    """A message of a stream of input: exactly one of the fields; `keepalive` alone has no effect."""

    start: InputStart | None = None
    data: InputPiece | None = None


# Unary methods --------------------------------------------------------------------------------------------------------


async def list_processes(request: EnvdRequest, _message: Mapping[str, Any]) -> Mapping[str, Any]:
    """List the processes that go on."""
    return {"processes": [_shown(request, run) for run in await _running(request)]}


async def send_input(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send input; answered once the process has taken it, or will."""
    asked = read_message(message, InputMessage)
    run = await _find(request, asked.process)
    await _feed(request, run, asked.input.data)
    return {}


async def _feed(request: EnvdRequest, run: ExecInfo, data: bytes) -> None:
    """Send input. Raises `ConnectError` if the process does not read for so long that it may never."""
    with trio.move_on_after(INPUT_S):
        return await request.supervisor.send_stdin(request.session.id, run.exec_id, data)
    raise ConnectError(Code.DEADLINE_EXCEEDED, f"the process has not read its input for {INPUT_S:.0f} s")


async def close_stdin(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """End the input of a process."""
    run = await _find(request, read_message(message, ProcessMessage).process)
    await request.supervisor.send_stdin(request.session.id, run.exec_id, b"", close=True)
    return {}


async def send_signal(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send a signal to a process and what it started."""
    asked = read_message(message, SignalMessage)
    run = await _find(request, asked.process)
    await request.supervisor.signal_exec(request.session.id, run.exec_id, asked.signal)
    return {}


async def update(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resize the terminal of a process."""
    asked = read_message(message, UpdateMessage)
    run = await _find(request, asked.process)
    if asked.pty is not None:
        await request.supervisor.resize_exec(request.session.id, run.exec_id, asked.pty.terminal)
    return {}


async def _running(request: EnvdRequest) -> Sequence[ExecInfo]:
    runs = await request.supervisor.execs(request.session.id)
    going = (run for run in runs if run.state is ExecState.RUNNING and run.pid is not None)
    return [run for run in going if not run.exec_id.startswith(KERNEL_PREFIX)]


async def _find(request: EnvdRequest, selector: Selector) -> ExecInfo:
    """Return the newest process that is meant and goes on. Raises `ExecNotFound`, `InvalidRequest`."""
    if (selector.pid is None) == (selector.tag is None):
        raise InvalidRequest("name one process", process="must have a pid or a tag")
    for run in reversed(await _running(request)):
        if selector.pid is not None and run.pid == selector.pid:
            return run
        if selector.tag is not None and _tag_of(request, run) == selector.tag:
            return run
    named = f"pid {selector.pid}" if selector.pid is not None else f"tag {selector.tag!r:.100}"
    raise ExecNotFound(f"there is no process with {named}")


def _tag_of(request: EnvdRequest, run: ExecInfo) -> str | None:
    command = request.commands.get(request.session.id, run.exec_id)
    return None if command is None else command.tag


def _shown(request: EnvdRequest, run: ExecInfo) -> dict[str, Any]:
    command = request.commands.get(request.session.id, run.exec_id) or Command(run.command, (), {})
    config: dict[str, Any] = {"cmd": command.cmd, "args": list(command.args), "envs": dict(command.envs)}
    if command.cwd is not None:
        config["cwd"] = command.cwd
    shown: dict[str, Any] = {"pid": run.pid, "config": config}
    return shown if command.tag is None else {**shown, "tag": command.tag}


# Streams --------------------------------------------------------------------------------------------------------------

Writing = Callable[[bytes], Awaitable[None]]
"""Sends a part of the answer."""


async def start(request: EnvdRequest, message: Mapping[str, Any], write: Writing) -> None:
    """Start a process and follow it to its end."""
    asked = read_message(message, StartMessage)
    config = asked.process
    timeout_s = request.timeout_s
    spec = ProcessSpec(
        argv=(config.cmd, *config.args),
        cwd=await request.place(config.cwd or ""),
        env=config.envs,
        user=request.user,
        terminal=None if asked.pty is None else asked.pty.terminal,
        streams=StreamsMode.SEPARATE,
        timeout_ms=None if not timeout_s else min(round(timeout_s * 1000), MAX_TIMEOUT_MS),
        stdin_open=asked.stdin,
    )
    info = await request.supervisor.start_process(request.session.id, spec)
    kept = Command(config.cmd, config.args, config.envs, config.cwd, asked.tag)
    request.commands.keep(request.session.id, info.exec_id, kept)
    await _follow(request, info, write, after=0)


async def connect(request: EnvdRequest, message: Mapping[str, Any], write: Writing) -> None:
    """Follow a process that goes on, from now on, within the client's deadline."""
    info = await _find(request, read_message(message, ProcessMessage).process)
    await request.in_time(lambda: _follow(request, info, write, after=info.last_sequence))


async def _follow(request: EnvdRequest, info: ExecInfo, write: Writing, *, after: int) -> None:
    async with (
        request.supervisor.attach_exec(request.session.id, info.exec_id, after=after) as reader,
        signs_of_life(request, write) as tell,
    ):
        await tell(envelope({"event": {"start": {"pid": info.pid}}}))
        async for output in reader:
            await tell(_data(output, is_terminal=info.terminal is not None))
        await tell(_ending_of(await reader.wait_end()))


def _data(output: Output, *, is_terminal: bool) -> bytes:
    name = "pty" if is_terminal else "stdout" if output.stream is Stream.STDOUT else "stderr"
    return envelope({"event": {"data": {name: base64_text(output.data)}}})


def _ending_of(end: ExecEnd) -> bytes:
    """Return the last event of a process.

    Raises:
        ConnectError: the time limit was over.
        RunnerLost: the sandbox died, and the stream has to break.
    """
    if end.cause in _LOST:
        raise RunnerLost("the sandbox died under the command")
    if end.cause is Cause.TIMED_OUT:
        raise ConnectError(Code.DEADLINE_EXCEEDED, f"the command ran longer than its limit of {end.timeout_ms} ms")
    return envelope({"event": {"end": end_event(end)}})


def end_event(end: ExecEnd) -> Mapping[str, Any]:
    """Return the end of a process in E2B's terms; `exit 137` is no signal."""
    if end.signal is None:
        status = f"exit status {end.exit_code}"
        event: dict[str, Any] = {"exitCode": end.exit_code, "exited": True, "status": status}
        return event if end.exit_code == 0 else {**event, "error": status}
    status = f"signal: {(signal.strsignal(end.signal) or f'signal {end.signal}').lower()}"
    why = f" ({end.cause.value})" if end.cause in (Cause.OOM, Cause.PIDS_LIMIT, Cause.DISK_FULL) else ""
    return {"exitCode": -1, "exited": False, "status": status, "error": status + why}


@asynccontextmanager
async def signs_of_life(
    request: EnvdRequest, write: Writing, alive: Mapping[str, Any] = MappingProxyType({"event": {"keepalive": {}}})
) -> AsyncGenerator[Writing, None]:
    """Yield what writes events, beside a task that writes an empty one in each interval that the client asked for, so
    that neither the client nor a proxy takes the stream for dead."""
    least, usual, most = _KEEPALIVE_S
    asked = request.exchange.header(b"keepalive-ping-interval") or ""
    is_number = asked.isascii() and asked.isdigit() and len(asked) < 6
    interval_s = min(max(float(asked), least), most) if is_number else usual
    lock = trio.Lock()

    async def write_alone(data: bytes) -> None:
        async with lock:
            await write(data)

    async def keep_alive() -> None:
        while True:
            await trio.sleep(interval_s)
            await write_alone(envelope(alive))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_alive)
        yield write_alone
        nursery.cancel_scope.cancel()


async def stream_input(request: EnvdRequest, messages: AsyncIterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Send the input in a client's stream, whose first message names the process."""
    run: ExecInfo | None = None
    async for message in messages:
        asked = read_message(message, InputStreamMessage)
        if asked.start is not None:
            run = await _find(request, asked.start.process)
        elif asked.data is not None:
            if run is None:
                raise InvalidRequest("the stream does not begin with a process", start="must be the first message")
            await _feed(request, run, asked.data.input.data)
    return {}
