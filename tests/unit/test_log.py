"""Log lines: what is on them, and that nothing in a message can break out of its line."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from sandkasten import log, logcontext


class Lines:
    """What was logged, once the writer has written it."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._writer = log.configure("info", self._stream)

    def getvalue(self) -> str:
        self._writer.close()
        return self._stream.getvalue()


@pytest.fixture
def lines() -> Iterator[Lines]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    lines = Lines()
    yield lines
    lines.getvalue()
    root.handlers[:], root.level = before, level


def test_a_line_carries_request_session_and_facts(lines: Lines) -> None:
    """Context variables and `extra` become fields."""
    request, session = logcontext.request_id.set("r-1"), logcontext.session_id.set("abc")
    logging.getLogger("sandkasten.x").info("built in %d ms", 4, extra={"image": "host"})
    logcontext.request_id.reset(request)
    logcontext.session_id.reset(session)
    entry = json.loads(lines.getvalue())
    assert (entry["message"], entry["level"], entry["logger"]) == ("built in 4 ms", "info", "sandkasten.x")
    assert (entry["request_id"], entry["session_id"], entry["image"]) == ("r-1", "abc", "host")
    assert entry["time"].endswith("+00:00")


def test_a_line_without_context_has_no_empty_fields(lines: Lines) -> None:
    """Outside of a request there is no request id, not an empty one."""
    logging.getLogger("sandkasten.x").warning("hello")
    assert "request_id" not in json.loads(lines.getvalue())


def test_hostile_text_stays_on_its_line(lines: Lines) -> None:
    """Newlines, escapes and line separators in a message are escaped."""
    logging.getLogger("sandkasten.x").info("%s", "a\nb\x1b[2J\u2028c\x85")
    text = lines.getvalue()
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert "\x1b" not in text


def test_tracebacks_are_one_field(lines: Lines) -> None:
    """An exception with its traceback is part of the same line."""
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("sandkasten.x").exception("failed")
    entry = json.loads(lines.getvalue())
    assert "RuntimeError: boom" in entry["exception"]


def test_debug_is_silent_unless_asked_for(lines: Lines) -> None:
    """The default level keeps commands, which are logged at debug only, out of the log."""
    logging.getLogger("sandkasten.x").debug("secret command")
    assert lines.getvalue() == ""


def test_a_stalled_reader_never_blocks_and_what_is_lost_is_counted() -> None:
    """The event loop logs on although nobody reads; afterwards the gap is named."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        writer = log.LogWriter(stream)
        record = logging.makeLogRecord({"msg": "x" * 1000, "levelname": "INFO", "name": "test"})
        for _ in range(2 * log.QUEUE_LINES):
            writer.emit(record)
        counts: list[int] = []
        while not counts:
            entry = json.loads(reader.readline())
            if entry["message"] == "log_lines_dropped":
                counts.append(entry["count"])
            elif len(entry["message"]) == 1000:
                writer.emit(record)
        drain = threading.Thread(target=reader.read)
        drain.start()
        writer.close()
        stream.close()
        drain.join()
    assert counts[0] > log.QUEUE_LINES / 2
