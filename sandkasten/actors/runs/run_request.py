"""What PID 1 is asked for a run. Pure."""

from __future__ import annotations

from runner.wire import protocol
from sandkasten.actors.runs.run import TRACEPARENT, Run


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
