"""Logs: one line for each event, with the request, the trace, the key and the session it is about.

Modules log an event's name with `logging.getLogger(__name__)` and put facts into `extra`; this module owns the format
alone, and that of moments (`rfc3339`). Commands, their output and environments are not logged above DEBUG, secrets
never: callers keep to that, nothing is filtered here. Lines are ASCII, so no text can begin another line or drive a
terminal.

Source: RFC 3339 §5.6.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import re
import select
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from sandkasten import logcontext

QUEUE_LINES = 10_000
QUEUE_BYTES = 16 * 1024 * 1024
CLOSE_S = 2.0
_WRITE_BYTES = 64 * 1024
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[!#-<>-~]+\Z", re.ASCII)
"""A value that needs no quotes: visible, without `=` and `"`."""


def configure(level: str = "info", stream: TextIO | None = None, *, format: str = "json") -> LogWriter:
    """Send all logs of this process to `stream` (stderr). For the command line; an embedding program decides itself.

    Close the writer that is returned before the process ends, or lines may be lost.
    """
    writer = LogWriter(stream or sys.stderr, format)
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(level.upper())
    for noisy in ("hypercorn.access", "quart.serving"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return writer


def dropped_lines() -> int:
    """Return the number of lines of this process that were dropped because the log was not read."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


# Format


def rfc3339(moment: datetime) -> str:
    """Return an aware datetime in UTC with milliseconds and `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def rfc3339_or_none(moment: datetime | None) -> str | None:
    """Return an aware datetime as `rfc3339` does, None for None."""
    return None if moment is None else rfc3339(moment)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the facts of an event: session, request, trace and key of the task, and those the caller gave."""
    origin = logcontext.origin.get()
    facts: dict[str, object] = {
        "session_id": logcontext.session_id.get(),
        "request_id": origin.request_id,
        "trace_id": None if origin.trace is None else origin.trace.trace_id,
        "key_id": origin.key_id,
    }
    facts |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return {key: value for key, value in facts.items() if value is not None}


def time_of(record: logging.LogRecord) -> str:
    """Return the time of a log record, in UTC (RFC 3339)."""
    return rfc3339(datetime.fromtimestamp(record.created, UTC))


class JsonFormatter(logging.Formatter):
    """Format for machines: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        entry |= facts_of(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Format for people: time, level, event, facts as `name=value`; then a traceback, each line behind a bar."""

    def format(self, record: logging.LogRecord) -> str:
        head = [time_of(record), f"{record.levelname.lower():7}", _escape(record.getMessage())]
        lines = [" ".join([*head, *(f"{_escape(key)}={_value(value)}" for key, value in facts_of(record).items())])]
        if record.exc_info:
            lines += [f"  | {_escape(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if not isinstance(value, str) or _PLAIN.match(text) else json.dumps(text)


def _escape(text: str) -> str:
    return json.dumps(text)[1:-1].replace('\\"', '"')


FORMATS: dict[str, Callable[[], logging.Formatter]] = {"json": JsonFormatter, "text": TextFormatter}

# Writing


class LogWriter(logging.Handler):
    """Formats in the thread that logs, and writes in a thread of its own: a stalled reader never stops the event loop.

    The queue of lines is bounded. Lines beyond the bound, and lines that the stream does not take, are dropped and
    counted, and the count is logged when there is room again. A write that a full disk cut short leaves a part of a
    line; the next write begins a line of its own.
    """

    def __init__(self, stream: TextIO, format: str = "json") -> None:
        super().__init__()
        self.setFormatter(FORMATS[format]())
        self._put = _sink(stream)
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._unreported = 0
        self.dropped = 0
        """Lines dropped since the start."""
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._enqueue(self.format(record) + "\n")
        except Exception as error:  # noqa: BLE001 - logging must not fail its caller, nor wait for the stream itself
            failed = {"name": record.name, "msg": "log_line_failed", "levelname": "ERROR", "levelno": logging.ERROR}
            facts = {"template": str(record.msg), "error": repr(error)}
            self._enqueue(self.format(logging.makeLogRecord(failed | facts)) + "\n")

    def close(self) -> None:
        """Write the queued lines, for at most `CLOSE_S` seconds, and end the thread."""
        super().close()
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _enqueue(self, line: str) -> None:
        if self._waiting_bytes + len(line) <= QUEUE_BYTES:
            try:
                self._lines.put_nowait(line)
                self._count(len(line))
                return
            except queue.Full:
                pass
        self._drop(1, 1)

    def _drop(self, unreported: int, dropped: int) -> None:
        with self._counting:
            self._unreported += unreported
            self.dropped += dropped

    def _count(self, size: int) -> None:
        with self._counting:
            self._waiting_bytes += size

    def _write(self) -> None:
        is_open = True
        while is_open:
            lines, is_open = self._next_lines()
            self._count(-sum(map(len, lines)))
            unreported = self._unreported
            report = ""
            if unreported:
                lost = {"name": __name__, "msg": "log_lines_dropped", "levelname": "WARNING", "count": unreported}
                report = self.format(logging.makeLogRecord(lost)) + "\n"
            try:
                self._put(report + "".join(lines))
                self._drop(-unreported, 0)
            except (OSError, ValueError):  # a full disk, which may have room again; a stream that is closed
                self._drop(len(lines), len(lines))

    def _next_lines(self) -> tuple[list[str], bool]:
        """Wait for a line; return it with the queued ones that fit into one write, and whether more may come."""
        line = self._lines.get()
        lines: list[str] = []
        size = 0
        while line is not None:
            lines.append(line)
            size += len(line)
            if size >= _WRITE_BYTES or self._lines.empty():  # this thread alone takes lines out
                return lines, True
            line = self._lines.get()
        return lines, False


def _sink(stream: TextIO) -> Callable[[str], object]:
    """Return a function that writes to a stream: to its descriptor, past Python's buffer, where there is one.

    A thread that is stuck in the buffer would hold its lock, and the interpreter could not end any more.
    """
    try:
        fd = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return stream.write

    is_cut = False

    def write(text: str) -> None:
        nonlocal is_cut
        data = memoryview((b"\n" if is_cut else b"") + text.encode("ascii"))
        whole = len(data)
        try:
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:  # another process made a shared terminal non-blocking
                    select.select([], [fd], [])
        finally:
            is_cut = 0 < len(data) < whole or (is_cut and len(data) == whole)

    return write
