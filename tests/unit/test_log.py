"""Log lines: what is on them, and that nothing in a message can break out of its line."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sandkasten import log, logcontext
from sandkasten.logcontext import Trace
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]


class Lines:
    """Lines that were logged, once the writer has written them."""

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
    origin = logcontext.Origin("r-1", Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"), "key-1")
    request, session = logcontext.origin.set(origin), logcontext.session_id.set("abc")
    logging.getLogger("sandkasten.x").info("built in %d ms", 4, extra={"image": "host"})
    logcontext.origin.reset(request)
    logcontext.session_id.reset(session)
    entry = json.loads(lines.getvalue())
    assert (entry["event"], entry["level"], entry["logger"]) == ("built in 4 ms", "info", "sandkasten.x")
    assert (entry["request_id"], entry["session_id"], entry["image"]) == ("r-1", "abc", "host")
    assert (entry["trace_id"], entry["key_id"]) == ("0af7651916cd43dd8448eb211c80319c", "key-1")
    assert entry["time"].endswith("Z")


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


def test_a_full_disk_is_counted_and_survived(tmp_path: Path) -> None:
    """Lines that the disk does not take are dropped; with room again the count is logged, on a line of its own."""
    path = tmp_path / "log"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with path.open("w") as stream:
            writer = log.LogWriter(stream)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limit[1]))
            for number in range(3):
                writer.emit(logging.makeLogRecord({"msg": f"{number}" * 1000, "levelname": "INFO", "name": "test"}))
                wait_for(lambda: path.stat().st_size > 1000)
                wait_for(partial(dropped, writer, number))
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            writer.emit(logging.makeLogRecord({"msg": "last", "levelname": "INFO", "name": "test"}))
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    first, _cut, lost, last = path.read_text().splitlines()
    assert json.loads(first)["event"] == "0" * 1000
    assert (json.loads(lost)["event"], json.loads(lost)["count"]) == ("log_lines_dropped", 2)
    assert json.loads(last)["event"] == "last"


def dropped(writer: log.LogWriter, count: int) -> bool:
    return writer.dropped == count


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + patience(5)
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


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
            if entry["event"] == "log_lines_dropped":
                counts.append(entry["count"])
            elif len(entry["event"]) == 1000:
                writer.emit(record)
        drain = threading.Thread(target=reader.read)
        drain.start()
        writer.close()
        stream.close()
        drain.join()
    assert counts[0] > log.QUEUE_LINES / 2
    assert writer.dropped >= counts[0]


def test_long_lines_are_bounded_by_their_size_before_their_number() -> None:
    """A few thousand tracebacks with nobody reading don't fill the memory."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        writer = log.LogWriter(stream)
        size = log.QUEUE_BYTES // 16
        for _ in range(20):
            writer.emit(logging.makeLogRecord({"msg": "x" * size, "levelname": "INFO", "name": "test"}))
        assert writer.dropped >= 3
        drain = threading.Thread(target=reader.read)
        drain.start()
        writer.close()
        stream.close()
        drain.join()


def test_a_line_that_can_not_be_made_is_replaced_by_one_that_says_so() -> None:
    """A bug in a log call costs its line, not the request, and never writes past the queue."""
    stream = io.StringIO()
    writer = log.LogWriter(stream)
    writer.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",), "name": "sandkasten.x"}))
    writer.close()
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["template"], entry["logger"]) == ("log_line_failed", "%d", "sandkasten.x")


TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (\w+) +(.*)")


def test_the_text_format_is_for_people_and_as_safe() -> None:
    """Time, level, event, facts; what is hostile is escaped, and a traceback can't pose as a line of its own."""
    stream = io.StringIO()
    writer = log.LogWriter(stream, "text")
    try:
        raise RuntimeError("boom\n2026-01-01T00:00:00.000Z error   forged")
    except RuntimeError as error:
        info = (type(error), error, None)
    facts = {"reason": 'a "b" c', "session_id": "abc", "count": 3, "path": "/x\x1b\ny"}
    writer.emit(logging.makeLogRecord({"msg": "ended", "levelname": "ERROR", "name": "t", "exc_info": info, **facts}))
    writer.close()
    first, *rest = stream.getvalue().splitlines()
    match = TEXT_LINE.fullmatch(first)
    assert match is not None
    assert match.groups() == (
        "error",
        r'ended session_id=abc reason="a \"b\" c" count=3 path="/x\u001b\ny"',
    )
    assert rest
    assert all(line.startswith("  | ") for line in rest)


STALLED = """
import logging, sys
from sandkasten import log
log.CLOSE_S = 0.2
writer = log.configure()
for number in range(3000):
    logging.getLogger("x").info("y" * 1000)
writer.close()
print("over", flush=True)
"""


def test_a_process_whose_log_nobody_reads_still_ends() -> None:
    """The writer is stuck in a full pipe; neither its close nor the interpreter's end waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", STALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"over\n"
        assert process.wait(patience(10)) == 0
        first = process.stderr.readline()
        assert json.loads(first)["event"] == "y" * 1000
        assert b"Fatal" not in process.stderr.read()
