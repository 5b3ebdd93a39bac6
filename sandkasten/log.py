"""Logs: one JSON object a line on stderr, with the request and the session it is about.

Modules log with `logging.getLogger(__name__)` and put facts into `extra`; this module owns the format alone. Commands,
their output and environments are not logged above DEBUG, secrets never: callers keep to that, nothing is filtered here.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from sandkasten import logcontext

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line of ASCII JSON: whatever a message contains, it can't start a second line or drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": logcontext.request_id.get(),
            "session_id": logcontext.session_id.get(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in entry.items() if value is not None}, default=str)


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (stderr). For the command line; a library's host decides itself."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("hypercorn.access", "quart.serving"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
