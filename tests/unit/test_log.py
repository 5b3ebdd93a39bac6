"""Log lines: what is on them, and that nothing in a message can break out of its line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from sandkasten import log, logcontext


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    log.configure("info", stream)
    yield stream
    root.handlers[:], root.level = before, level


def test_a_line_carries_request_session_and_facts(lines: io.StringIO) -> None:
    """Context variables and `extra` become fields."""
    request, session = logcontext.request_id.set("r-1"), logcontext.session_id.set("abc")
    logging.getLogger("sandkasten.x").info("built in %d ms", 4, extra={"image": "host"})
    logcontext.request_id.reset(request)
    logcontext.session_id.reset(session)
    entry = json.loads(lines.getvalue())
    assert (entry["message"], entry["level"], entry["logger"]) == ("built in 4 ms", "info", "sandkasten.x")
    assert (entry["request_id"], entry["session_id"], entry["image"]) == ("r-1", "abc", "host")
    assert entry["time"].endswith("+00:00")


def test_a_line_without_context_has_no_empty_fields(lines: io.StringIO) -> None:
    """Outside of a request there is no request id, not an empty one."""
    logging.getLogger("sandkasten.x").warning("hello")
    assert "request_id" not in json.loads(lines.getvalue())


def test_hostile_text_stays_on_its_line(lines: io.StringIO) -> None:
    """Newlines, escapes and line separators in a message are escaped."""
    logging.getLogger("sandkasten.x").info("%s", "a\nb\x1b[2J\u2028c\x85")
    text = lines.getvalue()
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert "\x1b" not in text


def test_tracebacks_are_one_field(lines: io.StringIO) -> None:
    """An exception with its traceback is part of the same line."""
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("sandkasten.x").exception("failed")
    entry = json.loads(lines.getvalue())
    assert "RuntimeError: boom" in entry["exception"]


def test_debug_is_silent_unless_asked_for(lines: io.StringIO) -> None:
    """The default level keeps commands, which are logged at debug only, out of the log."""
    logging.getLogger("sandkasten.x").debug("secret command")
    assert lines.getvalue() == ""
