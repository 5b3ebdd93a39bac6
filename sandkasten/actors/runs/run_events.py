"""What the journal is told of runs: which event, and its fields; never a command, its output or an environment."""

from __future__ import annotations

from typing import Any

from sandkasten.actors.runs.run import Run
from sandkasten.model import EventType, ExecEnd, ExecKind

_BEGINNINGS = {
    ExecKind.COMMAND: EventType.EXEC_STARTED,
    ExecKind.PROCESS: EventType.PROCESS_STARTED,
    ExecKind.TERMINAL: EventType.TERMINAL_OPENED,
}
_ENDINGS = {
    ExecKind.COMMAND: EventType.EXEC_ENDED,
    ExecKind.PROCESS: EventType.PROCESS_EXITED,
    ExecKind.TERMINAL: EventType.TERMINAL_CLOSED,
}


def beginning(run: Run) -> tuple[EventType, dict[str, Any]]:  # JSON values
    """Return the event of a run that has begun."""
    facts: dict[str, Any] = {"exec_id": run.exec_id}
    match run.kind:
        case ExecKind.COMMAND:
            facts |= {"shell": _shell(run), "timeout_ms": run.timeout_ms}
        case ExecKind.PROCESS:
            facts |= {"pid": run.pid, "keep_alive": run.keep_alive}
        case ExecKind.TERMINAL:
            size = run.size
            facts |= {"shell": _shell(run), "cols": size.cols if size else None, "rows": size.rows if size else None}
    return _BEGINNINGS[run.kind], facts


def ending(run: Run, end: ExecEnd) -> tuple[EventType, dict[str, Any]]:  # JSON values
    """Return the event of a run that has ended."""
    facts: dict[str, Any] = {
        "exec_id": run.exec_id,
        "exit_code": end.exit_code,
        "signal": end.signal,
        "cause": end.cause.value,
        "duration_ms": end.duration_ms,
        "victim": end.victim,
    }
    if run.kind is not ExecKind.TERMINAL and run.log is not None:
        facts |= {
            "cpu_ms": end.usage.cpu_ms,
            "peak_memory_bytes": end.usage.peak_memory_bytes,
            "written_bytes": end.usage.written_bytes,
            "stdout_bytes": run.log.stdout_bytes,
            "stderr_bytes": run.log.stderr_bytes,
        }
    if run.kind is ExecKind.COMMAND:
        facts |= {"shell": _shell(run), "shell_restarted": end.shell_restarted}
    return _ENDINGS[run.kind], facts


def _shell(run: Run) -> str | None:
    return None if run.is_program else run.spec.shell
