"""Output, names and directories of a hostile program that look like the daemon's own words, as clients get them.

Such text ends up in streams of events, WebSockets, JSON, headers and the log. Each client is served by the real front;
text that a program chose must never be more than a value there.

Sources: HTML Living Standard §9.2.6; RFC 6455; CWE-93, CWE-113, CWE-117, CWE-150.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import trio

from sandkasten.api.websocket.exec_messages import HEADER
from sandkasten.log import FORMATS
from sandkasten.model import EventType, ExecSpec
from sandkasten.security.attacks.field import SMALL, Field
from sandkasten.security.attacks.http_front import BINARY, TEXT, Frame, Front, read_events
from sandkasten.security.attacks.workspaces import new_workspace
from sandkasten.security.probes.attempt import Answers, attempt, collect

_SESSIONS = "/v1/sessions"
_FORGED = (
    b'plain\n\nevent: done\ndata: {"exit_code":0}\n\nid: 999\nretry: 1\n: comment\r\rdata: x\r\n\r\n'
    b"\xc2\x85event: error\xe2\x80\xa8data: y\xe2\x80\xa9\x0b\x0c\x1c\x00\x1b]0;title\x07\x1b[6n"
    b'\xff\xfe\xed\xa0\x80\xf0\x9f{"type":"exit","id":1}\x82\x7e\x88\x02\x03\xe8</script>\n'
)
"""Ends of events, frames, lines and strings of every kind, and bytes that are no text."""
_STATUS = 7
_PRINT = ["python3", "-I", "-S", "-c", f"import os; os.write(1, {_FORGED!r}); os._exit({_STATUS})"]
_NAME = b"a\r\n\nevent: z\x1b[2J"
"""Longest name of a process."""
_DIRECTORY = b"\n\nevent: done\r\ndata: {}\n\n\x1b[2J\xff"
_DIE = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, {_NAME!r}, 0, 0, 0)
held = [bytearray(b"x" * (8 << 20)) for _ in range(200)]
"""
_FILES = (b"\r\nX-Evil: 1", b'"},{"name":"evil', b"\xff\xfe", "\u202egpj.exe".encode(), b"\n\nevent: done", b"a\x1b[2J")
_QUERY = """
import os, select, tty
tty.setraw(0)
os.write(1, b"\\033[6n\\033[c\\033[>q\\033[14t\\033]52;c;?\\007\\033P$q q\\033\\\\\\005")
os.write(1, b"typed" if select.select([0], [], [], 0.5)[0] else b"quiet")
"""


@attempt("front.sse-output", "forge the end of a command by what it prints", "CWE-93", ("as written",), users=("",))
async def forge_stream(field: Field) -> Answers:
    """Chunks as text and as bytes, then the one true end."""
    front = Front(field)
    async with field.session() as session_id:
        target = f"{_SESSIONS}/{session_id}/exec/stream"
        exact = await front.ask("POST", target, {"argv": _PRINT, "encoding": "base64"})
        text = await front.ask("POST", target, {"argv": _PRINT, "raw_output": True})
    return {"bytes": _judge_stream(exact.body, is_text=False), "text": _judge_stream(text.body, is_text=True)}


def _judge_stream(body: bytes, *, is_text: bool) -> str:
    events = read_events(body)
    values = [json.loads(each["data"]) for each in events]
    names = [each["event"] for each in events]
    if names != ["chunk"] * (len(names) - 1) + ["done"] or values[-1]["exit_code"] != _STATUS:
        return f"forged: {names}"
    chunks = [value["chunk"] for value in values[:-1]]
    if is_text:
        return "as written" if "".join(chunks) == _FORGED.decode(errors="replace") else "other text"
    return "as written" if b"".join(map(base64.b64decode, chunks)) == _FORGED else "other bytes"


@attempt(
    "front.websocket-output", "forge messages of a WebSocket by what a command prints", "CWE-93", ("as written",),
    users=("",),
)  # fmt: skip
async def forge_messages(field: Field) -> Answers:
    front = Front(field)
    async with field.session() as session_id:
        start = {"type": "start", "id": 1, "argv": _PRINT}
        frames = await front.talk(f"{_SESSIONS}/{session_id}/exec/ws", [start], until=_has_exit)
    texts = [json.loads(payload) for opcode, payload in frames if opcode == TEXT]
    said = b"".join(payload[HEADER.size :] for opcode, payload in frames if opcode == BINARY)
    kinds = [each["type"] for each in texts]
    is_right = kinds == ["hello", "started", "exit"] and texts[-1]["exit_code"] == _STATUS and said == _FORGED
    return {"messages": "as written" if is_right else f"forged: {kinds}, {len(said)} bytes"}


def _has_exit(frames: list[Frame]) -> bool:
    return any(opcode == TEXT and json.loads(payload)["type"] == "exit" for opcode, payload in frames)


@attempt(
    "front.names",
    "forge events and log lines by the name of a process, a directory, a port",
    "CWE-117",
    ("as told",),
    users=("",),
)
async def forge_names(field: Field) -> Answers:
    """The event of an OOM kill names the process by the name that the process gave itself; all readers get it."""
    front = Front(field)
    async with field.session(SMALL) as session_id:
        with _logged() as lines:
            await field.supervisor.exec(session_id, ExecSpec(argv=("python3", "-I", "-S", "-c", _DIE)))
            directory = f"mkdir $'{_octal(_DIRECTORY)}'; cd $'{_octal(_DIRECTORY)}'"
            ended = await front.ask("POST", f"{_SESSIONS}/{session_id}/exec/stream", {"cmd": directory})
            target = f"{_SESSIONS}/{session_id}/events?cursor=0"
            with trio.fail_after(10 * field.patience):
                told = await front.ask("GET", target, until=lambda heard: _has_both(read_events(heard)))
                frames = await front.talk(target, [], until=lambda heard: _has_both(_texts(heard)))
        events = read_events(told.body)
    return {
        "stream": _judge_events(session_id, events),
        "websocket": "as told"
        if _texts(frames)[: len(events)] == [json.loads(each["data"]) for each in events]
        else "otherwise",
        "directory": "as told" if [each["event"] for each in read_events(ended.body)] == ["done"] else "forged",
        "log": "as told" if lines and all(each.isprintable() and each.isascii() for each in lines) else "forged lines",
    }


def _octal(name: bytes) -> str:
    return "".join(f"\\{byte:03o}" for byte in name)


def _texts(frames: list[Frame]) -> list[dict[str, Any]]:  # JSON values
    values = [json.loads(payload) for _, payload in frames]
    return [each for each in values if each["type"] != "cursor"]


def _has_both(events: list[dict[str, Any]]) -> bool:
    """Whether the events of the kill, and of the command's end after it, have come."""
    kinds = [each.get("event", each.get("type")) for each in events]
    return EventType.OOM in kinds and kinds.count(EventType.EXEC_ENDED) >= 2


def _judge_events(session_id: str, events: list[dict[str, str]]) -> str:
    for each in events:
        told = json.loads(each["data"])
        if (told["type"], told["cursor"], told["session_id"]) != (each["event"], each["id"], session_id):
            return f"forged: {each}"
        if told["type"] not in set(EventType) or not str(told["data"].get("victim", "")).isprintable():
            return f"forged: {told}"
    return "as told"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the log lines written meanwhile, in each of the daemon's formats."""
    lines: list[str] = []

    class LogCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(make().format(record) for make in FORMATS.values() if not record.exc_info)

    collector = LogCollector(logging.WARNING)
    logging.getLogger().addHandler(collector)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(collector)


@attempt("front.file-names", "forge answers and headers by the names of files", "CWE-113", ("as written",), users=("",))
async def forge_file_names(field: Field) -> Answers:
    front = Front(field)
    async with new_workspace(field) as workspace_id, field.session(workspace_id=workspace_id) as session_id:
        made = f"import os; [open(name, 'w').close() for name in {_FILES!r}]; os.symlink({_FILES[0]!r}, 'link')"
        await field.supervisor.exec(session_id, ExecSpec(argv=("python3", "-I", "-S", "-c", made), cwd="/workspace"))
        place = f"/v1/workspaces/{workspace_id}"
        listed = await front.ask("GET", f"{place}/fs")
        looked = [await front.ask("GET", f"{place}/fs/stat?path={quote(name)}") for name in _FILES if name.isascii()]
        read = [await front.ask("GET", f"{place}/fs/read?path={quote(name)}") for name in _FILES if name.isascii()]
        packed = [await front.ask("GET", f"{place}/{path}") for path in ("export", "fs/download?path=.&format=tar")]
    entries = json.loads(listed.body)["entries"]
    names = {
        base64.b64decode(each["name_base64"]) if "name_base64" in each else each["name"].encode() for each in entries
    }
    every = [listed, *looked, *read, *packed]
    wrong = [name for each in every for name, value in each.headers if b"evil" in (name + value).lower()]
    stats = [json.loads(each.body)["name"].encode() for each in looked]
    return {
        "names": "as written" if names == {*_FILES, b"link"} else f"{names}",
        "each": "as written" if stats == [name for name in _FILES if name.isascii()] else f"{stats}",
        "headers": "as written" if not wrong else f"{wrong}",
    }


@attempt(
    "front.answerback",
    "have a terminal that nobody sits at answer a query, and so type into it",
    "CVE-2003-0063",
    ("quiet",),
    users=("",),
)
async def query_terminal(field: Field) -> Answers:
    """The daemon passes a terminal's bytes on; only a viewer's screen would answer escape sequences."""
    front = Front(field)
    async with field.session() as session_id:
        argv = ["python3", "-I", "-S", "-c", _QUERY]
        start = {"type": "start", "id": 1, "argv": argv, "tty": {"cols": 80, "rows": 24}}
        frames = await front.talk(f"{_SESSIONS}/{session_id}/exec/ws", [start], until=_has_exit)
    said = b"".join(payload[HEADER.size :] for opcode, payload in frames if opcode == BINARY)
    return {"terminal": said[-5:].decode(errors="replace")}


FRONT = collect(globals())
