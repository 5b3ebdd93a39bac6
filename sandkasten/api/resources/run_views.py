"""Runs, their results and shells as clients read them: texts, base64, and the fields of every ending."""

from __future__ import annotations

import base64
from typing import Any

import attrs
import trio

from sandkasten.api.http.json import scrub
from sandkasten.api.resources.schemas import OutputFormat
from sandkasten.api.resources.text import OutputText
from sandkasten.log import rfc3339, rfc3339_or_none
from sandkasten.model import Cause, ExecEnd, ExecInfo, ExecResult, ShellInfo
from sandkasten.model.errors import CommandTimeout

SLICE_BYTES = 64 * 1024
"""How much output is turned into text before other tasks get a turn."""

TIMED_OUT_CODE = 124
"""What timeout(1) exits with."""


def end_view(end: ExecEnd) -> dict[str, Any]:  # JSON values
    """Return how a command ended."""
    is_timed_out = end.cause is Cause.TIMED_OUT
    view: dict[str, Any] = {
        "exit_code": TIMED_OUT_CODE if is_timed_out else end.exit_code,
        "cwd": scrub(end.cwd),
        "duration_ms": end.duration_ms,
        "exec_id": end.exec_id,
        "cause": end.cause.value,
        "timed_out": is_timed_out,
        "timeout_ms": end.timeout_ms,
        "shell_restarted": end.shell_restarted,
        "usage": attrs.asdict(end.usage),
    }
    if end.signal is not None:
        view["signal"] = end.signal
    if end.victim is not None:
        view["victim"] = scrub(end.victim)
    return view


def run_view(run: ExecInfo) -> dict[str, Any]:  # JSON values
    """Return a run as it is; how it ended is in `end` once it did."""
    view: dict[str, Any] = {
        "exec_id": run.exec_id,
        "kind": run.kind.value,
        "state": run.state.value,
        "command": scrub(run.command),
        "created_at": rfc3339(run.created_at),
        "stdout_bytes": run.stdout_bytes,
        "stderr_bytes": run.stderr_bytes,
        "first_sequence": run.first_sequence,
        "last_sequence": run.last_sequence,
        "last_line": scrub(run.last_line),
    }
    optional = {
        "shell": run.shell,
        "started_at": rfc3339_or_none(run.started_at),
        "ended_at": rfc3339_or_none(run.ended_at),
        "pid": run.pid,
        "tty": None if run.terminal is None else attrs.asdict(run.terminal),
        "trace_id": run.trace_id,
        "end": None if run.end is None else end_view(run.end),
    }
    return view | {name: value for name, value in optional.items() if value is not None}


def process_view(run: ExecInfo) -> dict[str, Any]:  # JSON values
    """Return a background process: a run, with the name its id has there."""
    return {"process_id": run.exec_id, **run_view(run), "keep_alive": run.keep_alive}


def shell_view(shell: ShellInfo) -> dict[str, Any]:  # JSON values
    """Return a shell; `running` is null while it waits for a command."""
    return {
        "name": shell.name,
        "cwd": scrub(shell.cwd),
        "running": None if shell.running is None else run_view(shell.running),
        "queued": list(shell.queued),
    }


async def output_view(result: ExecResult, output_format: OutputFormat) -> dict[str, Any]:  # JSON values
    """Return what a command wrote, as the client wants to have it."""
    view: dict[str, Any] = {
        "truncated": result.truncated,
        "bytes_total": result.bytes_total,
        "bytes_omitted": result.bytes_omitted,
    }
    for name, data in (("output", result.output), ("stdout", result.stdout), ("stderr", result.stderr)):
        if output_format.is_base64:
            view[name] = base64.b64encode(data).decode("ascii")
        else:
            view[name] = await _text(data, is_raw=output_format.is_raw)
    return view | {"encoding": "base64"} if output_format.is_base64 else view


def is_timeout_error(end: ExecEnd, output_format: OutputFormat) -> bool:
    """Whether this ending is an error to this client."""
    return end.cause is Cause.TIMED_OUT and output_format.is_timeout_error


def timeout_error(end: ExecEnd, view: dict[str, Any]) -> CommandTimeout:
    """Return the error of a command that ran out of time; `view` becomes its details."""
    return CommandTimeout(f"the command ran longer than {end.timeout_ms} ms", **view)


async def _text(data: bytes, *, is_raw: bool) -> str:
    text = OutputText(is_raw=is_raw)
    if len(data) <= SLICE_BYTES:
        return text.feed(data, is_last=True)
    parts = []
    for start in range(0, len(data), SLICE_BYTES):
        parts.append(text.feed(data[start : start + SLICE_BYTES]))
        await trio.lowlevel.checkpoint()
    return "".join([*parts, text.feed(b"", is_last=True)])
