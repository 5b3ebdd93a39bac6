"""Logs: one JSON object a line on stderr, with the request and the session it is about.

Modules log with `logging.getLogger(__name__)` and put facts into `extra`; this module owns the format alone. Commands,
their output and environments are not logged above DEBUG, secrets never: callers keep to that, nothing is filtered here.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

from sandkasten import logcontext

QUEUE_LINES = 10_000
CLOSE_S = 2.0

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


class LogWriter(logging.Handler):
    """Formats in the thread that logs, and writes in a thread of its own, so that a reader of the log that stalls never
    stops the event loop. At most `QUEUE_LINES` wait; what comes on top is counted and reported when there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - logging must not fail its caller
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_S` seconds, and end the thread."""
        super().close()
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                line = f"{json.dumps({'level': 'warning', 'message': 'log_lines_dropped', 'count': dropped})}\n{line}"
            try:
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # the stream is gone; nobody is left to tell
                return


def configure(level: str = "info", stream: TextIO | None = None) -> LogWriter:
    """Send all logs of this process to `stream` (stderr). For the command line; a library's host decides itself.

    Close the writer that is returned before the process ends, or lines may be lost.
    """
    writer = LogWriter(stream or sys.stderr)
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(level.upper())
    for noisy in ("hypercorn.access", "quart.serving"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return writer
