"""A command's result as clients read it: texts, base64, and the fields of every ending."""

from __future__ import annotations

import base64
from typing import Any

import attrs
import trio

from sandkasten.api.jsontext import scrub
from sandkasten.api.schemas import ExecRequest
from sandkasten.api.text import OutputText
from sandkasten.errors import CommandTimeout
from sandkasten.model import Cause, ExecEnd, ExecResult

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
    return view if end.signal is None else view | {"signal": end.signal}


async def output_view(result: ExecResult, request: ExecRequest) -> dict[str, Any]:  # JSON values
    """Return what a command wrote, as the client wants to have it."""
    view: dict[str, Any] = {
        "truncated": result.truncated,
        "bytes_total": result.bytes_total,
        "bytes_omitted": result.bytes_omitted,
    }
    for name, data in (("output", result.output), ("stdout", result.stdout), ("stderr", result.stderr)):
        if request.is_base64:
            view[name] = base64.b64encode(data).decode("ascii")
        else:
            view[name] = await _text(data, is_raw=bool(request.raw_output))
    return view | {"encoding": "base64"} if request.is_base64 else view


def is_timeout_error(end: ExecEnd, request: ExecRequest) -> bool:
    """Whether this ending is an error to this client."""
    return end.cause is Cause.TIMED_OUT and request.on_timeout != "result"


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
