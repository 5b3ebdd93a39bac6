"""The drive of one run over a connection to PID 1: the request, the input, the output, and the end that PID 1 reports.

Every byte received is hostile: a message outside the protocol ends the session. Knows no queue and no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import trio

from runner.wire import protocol
from runner.wire.protocol import Kind
from sandkasten.actors.core import unwrap
from sandkasten.actors.runs.run import PATIENCE_S, Run, RunRequest
from sandkasten.actors.services.nsinit import RunCgroup
from sandkasten.errors import (
    Capacity,
    Conflict,
    ExecEnded,
    InvalidRequest,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    ShellBusy,
    ShellFailed,
    ShellNotFound,
)
from sandkasten.links.runner import RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model import Stream, StreamsMode


def request_of(
    run: Run, *, cgroup: protocol.BirthCgroup | None, ticket: str, version: int = protocol.PROTOCOL_VERSION
) -> protocol.Exec | protocol.RunProgram:
    """Return the request for a run to a PID 1 of that version of the protocol; an older one lets commands wait without
    bound. Pure.

    Raises:
        InvalidRequest: PID 1 is older than merged streams.
    """
    request = run.request
    spec = request.spec
    size = None if spec.terminal is None else protocol.TerminalSize(spec.terminal.cols, spec.terminal.rows)
    has_stdin = size is None and (spec.stdin is not None or spec.stdin_open)
    is_new = version >= protocol.MERGED_VERSION
    is_merged = spec.is_merged and is_new
    if spec.streams is StreamsMode.MERGED and not is_new:
        raise InvalidRequest("this session is older than merged streams", streams="must be 'separate' here")
    if not spec.is_program:
        return protocol.Exec(
            exec_id=run.exec_id,
            command=spec.command or "",
            timeout_ms=request.timeout_ms,
            cwd=spec.cwd,
            env=_environment(request),
            stdin=has_stdin,
            shell=spec.shell,
            terminal=size,
            interactive=request.interactive,
            merged=is_merged,
            queue_timeout_ms=request.queue_timeout_ms if is_new and run.is_behind_others else None,
            ticket=ticket,
        )
    return protocol.RunProgram(
        exec_id=run.exec_id,
        argv=spec.argv or (),
        command=None if spec.argv else spec.command or "",
        timeout_ms=request.timeout_ms,
        cwd=spec.cwd,
        env=_environment(request),
        stdin=has_stdin,
        terminal=size,
        interactive=request.interactive,
        merged=is_merged,
        user=spec.user,
        group=cgroup,
        ticket=ticket,
    )


def _environment(request: RunRequest) -> dict[str, str]:
    """Return the environment of a run. Its trace is not part of the request: a repeated request has another one."""
    if request.trace is None or not request.pass_trace:
        return dict(request.spec.env)
    return {TRACEPARENT: request.trace.header, **request.spec.env}


TRACEPARENT = "TRACEPARENT"
"""The variable that holds the trace of a run, in the format of the HTTP header of that name."""

_STREAMS = {Kind.STDOUT: Stream.STDOUT, Kind.STDERR: Stream.STDERR}

A = TypeVar("A")

CONTROL_S = 10.0
"""Deadline for PID 1's answer to a request that PID 1 can serve at once."""


async def drive(run: Run, link: RunnerLink, cgroup: RunCgroup | None, *, ticket: str) -> protocol.ExecReply:
    """Have PID 1 serve a run to its end and return how the run ended. A program is born in `cgroup`, which stays the
    caller's. `ticket` is what PID 1 shows of the run to the next daemon.

    Raises:
        RunnerLost, RunnerProtocolError: PID 1 is gone or hostile.
        SandkastenError: PID 1 refused the run.
    """
    async with link.connection() as connection:
        membership = None if cgroup is None else protocol.BirthCgroup(cgroup.name, cgroup.membership)
        fd = None if cgroup is None else cgroup.fd.fileno()
        request = request_of(run, cgroup=membership, ticket=ticket, version=link.version)
        await connection.send_request(request, fd=fd)
        if cgroup is not None:
            cgroup.fd.close()  # PID 1 has its own now
        run.input.connect(connection)
        try:
            stdin = run.request.spec.stdin
            if stdin is None:
                return await _receive(run, connection)
            return await _receive_while_sending(run, connection, stdin)
        finally:
            run.input.connect(None)
            connection.spend_if_sending()


async def drive_again(run: Run, link: RunnerLink) -> protocol.ExecReply:
    """Serve a run that outlived its daemon to its end, from the output on that is not in its log yet.

    Raises:
        ExecEnded: PID 1 has no such run.
        RunnerLost, RunnerProtocolError: PID 1 is gone or hostile.
    """
    log = run.log
    assert log is not None
    async with link.connection() as connection:
        answer = await _attach(run, connection)
        log.skip_to(stdout_bytes=answer.stdout_offset, stderr_bytes=answer.stderr_offset)
        if answer.age_us > 0 and not run.has_begun:
            run.go_on(answer.age_us / 1_000_000, answer.pid)
        run.input.connect(connection)
        try:
            return await _receive(run, connection)
        finally:
            run.input.connect(None)
            connection.spend_if_sending()


async def fetch_output(run: Run, link: RunnerLink) -> tuple[protocol.Attached, Sequence[tuple[Stream, bytes]]]:
    """Return what PID 1 has of the output of an ended run, behind the output that is known.

    Raises:
        RunnerLost: PID 1 is gone, or did not answer in time.
        RunnerProtocolError: PID 1 is hostile.
        SandkastenError: PID 1 has no such run, or refused the request.
    """
    pieces: list[tuple[Stream, bytes]] = []
    size_bytes = 0
    deadline = trio.current_time() + CONTROL_S
    async with link.connection() as connection:
        answer = await _attach(run, connection)
        while size_bytes <= protocol.KEPT_RUN_BYTES:
            kind, body = await connection.receive(deadline=deadline)
            if kind not in _STREAMS:
                if not isinstance(decode_answer(kind, body), protocol.ExecReply):
                    raise RunnerProtocolError("a run without an end that has ended")
                return answer, pieces
            check_piece(body, "output")
            pieces.append((_STREAMS[kind], body))
            size_bytes += len(body)
            if len(pieces) * protocol.KEPT_PIECE_BYTES > protocol.KEPT_RUN_BYTES:
                raise SandboxError("more pieces than may be kept of a run")  # an older PID 1 may have them
    raise RunnerProtocolError("more output than may be kept of a run")


async def _attach(run: Run, connection: RunnerConnection) -> protocol.Attached:
    """Ask for a run that PID 1 kept, behind the output that is known."""
    log = run.log
    assert log is not None
    await connection.send_request(protocol.AttachRun(run.exec_id, log.stdout_bytes, log.stderr_bytes))
    answer = await connection.receive_answer(deadline=trio.current_time() + CONTROL_S)
    if isinstance(answer, protocol.Error):
        raise refusal(answer)
    if not isinstance(answer, protocol.Attached):
        raise RunnerProtocolError(f"{type(answer).__name__} to AttachRun")
    if answer.stdout_offset < log.stdout_bytes or answer.stderr_offset < log.stderr_bytes or answer.age_us < 0:
        raise RunnerProtocolError("a run that begins before what is known of it")
    return answer


async def _receive_while_sending(run: Run, connection: RunnerConnection, stdin: bytes) -> protocol.ExecReply:
    """Send the input of the request while output comes; the end of the run stops the sending."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_input, run, stdin)
            reply = await _receive(run, connection)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise unwrap(group) from None
    return reply


async def _send_input(run: Run, stdin: bytes) -> None:
    try:
        await run.input.send(stdin, close=not run.request.spec.stdin_open)
    except ExecEnded:  # the task that receives gets the end
        await trio.lowlevel.checkpoint()


async def _receive(run: Run, connection: RunnerConnection) -> protocol.ExecReply:
    clock = run.clock
    while True:
        deadline = clock.answer_by
        kind, body = await connection.receive(deadline=deadline)
        if trio.current_time() > deadline + PATIENCE_S and trio.current_time() > clock.answer_by + PATIENCE_S:
            raise RunnerProtocolError("the sandbox's init goes on long after the end")
        if kind in _STREAMS:
            check_piece(body, "output")
            await run.put(_STREAMS[kind], body)
            continue
        if kind is Kind.STARTED and clock.began_at is None and body == _plain_start(run):
            run.begin(0)  # nearly every run begins with this frame: decoding it would cost more
            continue
        message = decode_answer(kind, body)
        match message:
            case protocol.Started() if clock.began_at is None:
                run.begin(message.pid)
            case protocol.ExecReply() if kind is Kind.REPLY:
                return message
            case protocol.Error():
                raise refusal(message)
            case _:
                raise RunnerProtocolError(f"{type(message).__name__} while a command runs")


def _plain_start(run: Run) -> bytes:
    """Return the body of a command's STARTED frame, if its id needs no escapes in JSON."""
    return b'{"type":"Started","exec_id":"%b"}' % run.exec_id.encode()


async def ask_runner(link: RunnerLink, request: object, answer: type[A], *, fd: int | None = None) -> A:
    """Send a request that is answered at once, and return the answer. `fd` is sent along and stays the caller's.

    Raises:
        SandkastenError: PID 1 refused the request, or is gone or hostile.
    """
    deadline = trio.current_time() + CONTROL_S
    async with link.connection() as connection:
        await connection.send_request(request, fd=fd)
        message = await connection.receive_answer(deadline=deadline)
    if isinstance(message, protocol.Error):
        raise refusal(message)
    if not isinstance(message, answer):
        raise RunnerProtocolError(f"{type(message).__name__} to {type(request).__name__}")
    return message


def refusal(error: protocol.Error) -> SandkastenError:
    """Translate a refusal of PID 1 into the error of the caller."""
    match error.code:
        case "FILE_NOT_FOUND":  # a run needs no file but its directory
            return InvalidRequest(error.message, cwd="is no directory that can be entered")
        case "NO_SUCH_USER":
            return InvalidRequest(error.message, user="can't be used")
        case "INVALID_PATH" | "BAD_REQUEST" | "PERMISSION_DENIED" | "NOT_A_FILE":
            return InvalidRequest(error.message)
        case "NOT_RUNNING":
            return ExecEnded(error.message)
        case "QUEUE_TIMEOUT":
            return ShellBusy(error.message)
        case "NO_SUCH_SHELL":
            return ShellNotFound(error.message)
        case "EXISTS":
            return Conflict(error.message)
        case "TOO_MANY":
            return Capacity(error.message)
        case "NO_SHELL" | "SHELL_FAILED":
            return ShellFailed(error.message)
        case _:
            return SandboxError(f"the sandbox could not run the command: {error.message}")
