"""Drives one run over a runner connection: the request, its input, its output, and the end the runner reports.

Every byte received is hostile; what is no message of the contract ends the session. Knows no queue and no record.

What PID 1 is asked for a run. Pure.
"""

from __future__ import annotations

from typing import TypeVar

import trio

from runner.wire import protocol
from runner.wire.protocol import Kind
from sandkasten.actors.core import unwrap
from sandkasten.actors.runs.run import PATIENCE_S, TRACEPARENT, Run
from sandkasten.actors.services.nsinit import GroupHandle
from sandkasten.links.runner import RunnerConnection, RunnerLink, check_piece, decode_answer
from sandkasten.model import Stream
from sandkasten.model.errors import (
    Capacity,
    Conflict,
    ExecEnded,
    InvalidRequest,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    ShellFailed,
    ShellNotFound,
)


def request_of(run: Run, *, group: protocol.Group | None, ticket: str) -> protocol.Exec | protocol.RunProgram:
    """Return what the runner is asked for this run."""
    spec = run.spec
    size = None if spec.terminal is None else protocol.TerminalSize(spec.terminal.cols, spec.terminal.rows)
    has_stdin = size is None and (spec.stdin is not None or spec.stdin_open)
    if not spec.is_program:
        return protocol.Exec(
            exec_id=run.exec_id,
            command=spec.command or "",
            timeout_ms=run.timeout_ms,
            cwd=spec.cwd,
            env=_environment(run),
            stdin=has_stdin,
            shell=spec.shell,
            terminal=size,
            interactive=run.interactive,
            ticket=ticket,
        )
    return protocol.RunProgram(
        exec_id=run.exec_id,
        argv=spec.argv or (),
        command=None if spec.argv else spec.command or "",
        timeout_ms=run.timeout_ms,
        cwd=spec.cwd,
        env=_environment(run),
        stdin=has_stdin,
        terminal=size,
        interactive=run.interactive,
        user=spec.user,
        group=group,
        ticket=ticket,
    )


def _environment(run: Run) -> dict[str, str]:
    """Return the variables of a run; its trace is no part of what was asked for, and of no repetition of it."""
    if run.trace is None or not run.pass_trace:
        return dict(run.spec.env)
    return {TRACEPARENT: run.trace.header, **run.spec.env}


_STREAMS = {Kind.STDOUT: Stream.STDOUT, Kind.STDERR: Stream.STDERR}

A = TypeVar("A")

CONTROL_S = 10.0
"""How long PID 1 may take to answer a request that asks for nothing to wait for."""


async def drive(run: Run, link: RunnerLink, group: GroupHandle | None) -> protocol.ExecReply:
    """Run it to its end and return how it ended. `group` is where a program is born; it stays the caller's.

    Raises:
        RunnerLost, RunnerProtocolError: PID 1 is gone or hostile.
        SandkastenError: the runner refused the run.
    """
    async with link.connection() as connection:
        membership = None if group is None else protocol.Group(group.name, group.membership)
        fd = None if group is None else group.fd.fileno()
        ticket = "" if run.keeping is None else run.keeping.ticket(run)
        await connection.send_request(request_of(run, group=membership, ticket=ticket), fd=fd)
        if group is not None:
            group.fd.close()  # PID 1 has its own now
        run.connect(connection)
        try:
            if run.spec.stdin is None:
                return await _receive(run, connection)
            return await _receive_while_sending(run, connection, run.spec.stdin)
        finally:
            run.connect(None)
            if connection.is_sending:  # cut in the middle of a frame: of no further use
                connection.is_idle = False


async def drive_again(run: Run, link: RunnerLink) -> protocol.ExecReply:
    """Go on with a run that outlived its daemon, behind the output that is known, and see it to its end.

    Raises:
        ExecEnded: PID 1 has no such run.
        RunnerLost, RunnerProtocolError: PID 1 is gone or hostile.
    """
    log = run.log
    assert log is not None
    async with link.connection() as connection:
        await connection.send_request(protocol.AttachRun(run.exec_id, log.stdout_bytes, log.stderr_bytes))
        answer = await connection.receive_answer(deadline=trio.current_time() + CONTROL_S)
        if isinstance(answer, protocol.Error):
            raise refusal(answer)
        if not isinstance(answer, protocol.Attached):
            raise RunnerProtocolError(f"{type(answer).__name__} to AttachRun")
        if answer.stdout_offset < log.stdout_bytes or answer.stderr_offset < log.stderr_bytes or answer.age_us < 0:
            raise RunnerProtocolError("a run that begins before what is known of it")
        log.skip_to(stdout_bytes=answer.stdout_offset, stderr_bytes=answer.stderr_offset)
        if answer.age_us > 0 and run.began_at is None:
            run.go_on(answer.age_us / 1_000_000, answer.pid)
        run.connect(connection)
        try:
            return await _receive(run, connection)
        finally:
            run.connect(None)
            if connection.is_sending:
                connection.is_idle = False


async def _receive_while_sending(run: Run, connection: RunnerConnection, stdin: bytes) -> protocol.ExecReply:
    """Feed the first input while output comes; whichever end ends it, the other stops."""
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
        await run.send_stdin(stdin, close=not run.spec.stdin_open)
    except ExecEnded:  # its end is on its way to the other task
        await trio.lowlevel.checkpoint()


async def _receive(run: Run, connection: RunnerConnection) -> protocol.ExecReply:
    while True:
        kind, body = await connection.receive(deadline=run.answer_by)
        if trio.current_time() > run.answer_by + PATIENCE_S:
            raise RunnerProtocolError("the sandbox's init goes on long after the end")
        if kind in _STREAMS:
            check_piece(body, "output")
            await run.put(_STREAMS[kind], body)
            continue
        if kind is Kind.STARTED and run.began_at is None and body == _plain_start(run):
            run.begin(0)  # what nearly every run begins with, without the cost of taking it apart
            continue
        message = decode_answer(kind, body)
        match message:
            case protocol.Started() if run.began_at is None:
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
    """Make a request that is answered at once, and return the answer. `fd` rides along and stays the caller's.

    Raises:
        SandkastenError: it was refused, or PID 1 is gone or hostile.
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
    """Return what the runner's refusal means to the caller."""
    match error.code:
        case "FILE_NOT_FOUND":  # the one file that a run needs is its directory
            return InvalidRequest(error.message, cwd="is no directory that can be entered")
        case "NO_SUCH_USER":
            return InvalidRequest(error.message, user="can't be used")
        case "INVALID_PATH" | "BAD_REQUEST" | "PERMISSION_DENIED" | "NOT_A_FILE":
            return InvalidRequest(error.message)
        case "NOT_RUNNING":
            return ExecEnded(error.message)
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
