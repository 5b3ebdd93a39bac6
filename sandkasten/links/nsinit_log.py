"""Passes nsinit's log lines on. It holds no secret and sees no command, so nothing needs hiding.

What is no line of its own making (`nsinit/log.py`), a traceback or the words of a tool, is passed on as it is.
"""

from __future__ import annotations

import json
import logging
import os

import trio

log = logging.getLogger(__name__)

_LINE_BYTES = 16 * 1024
"""A longer one is cut."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


async def forward_log(fd: int) -> None:
    """Log each line that comes from a pipe, until its other end is closed."""
    buffer = b""
    while True:
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, _LINE_BYTES)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            _log_line(line)
        if len(buffer) > _LINE_BYTES:
            _log_line(buffer)
            buffer = b""


def _log_line(line: bytes) -> None:
    try:
        entry = json.loads(line)
        level = _LEVELS.get(entry.pop("level", "info"), logging.INFO)
        event = str(entry.pop("event", "message")).replace(" ", "_")
        facts = {key if key == "session_id" else f"nsinit_{key}": value for key, value in entry.items()}
        log.log(level, "nsinit_%s", event, extra=facts)
    except (ValueError, AttributeError):
        if line.strip():
            log.warning("nsinit_output", extra={"line": line.decode("utf-8", "replace")})
