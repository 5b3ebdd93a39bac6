"""docs/websocket.md and the code name the same messages, fields, tags, codes and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from sandkasten.api.http import websocket as ws_stream
from sandkasten.api.http.routing import RouteKind
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.websocket import CloseCode
from sandkasten.api.routes import TABLE
from sandkasten.api.websocket import channel, exec_messages, handshake, terminal, terminal_messages
from sandkasten.api.websocket import messages as ws_messages
from sandkasten.api.websocket.events import SUBPROTOCOL, WATCH_SUBPROTOCOL
from sandkasten.model import Cause, ExecEnd, TerminalSize, Usage

TEXT = (Path(__file__).parents[2] / "docs/websocket.md").read_text()

FULL_END = ExecEnd("e", 1, 9, Cause.OOM, "/", 1, 1, False, Usage(), victim="v")
PLAIN_END = attrs.evolve(FULL_END, signal=None, victim=None)
ERROR: dict[str, Any] = {"error_code": "C", "message": "m", "retryable": True}
COUNTS = {"id": 1, "seq": 0, "stdout_bytes": 0, "stderr_bytes": 0}
PUBLIC = ERROR | {"request_id": "r", "details": {"field": "bad"}}

Fields = dict[str, bool]
"""Of a message: whether each is required."""


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table beneath a heading, without its head."""
    section = TEXT.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    ends = [index for index, line in enumerate(lines) if line.startswith("|---")]
    return rows[ends[0] + 1 : ends[1] - 1 if len(ends) > 1 else None]


def documented(heading: str) -> dict[str, Fields]:
    """Return the messages in a table."""
    return {
        kind.strip("`"): {name: not mark for name, mark in re.findall(r"`(\w+)`(\??)", fields)}
        for kind, fields, _ in table(heading)
    }


def said(full: Any, plain: Any) -> Fields:  # messages
    """Return the fields of a message as it is sent, from one with everything and one with as little as possible."""
    values = [json.loads(frame[frame.index(b"{") :]) for frame in map(ws_messages.encode_message, (full, plain))]
    assert all(value.pop("type") == full.kind for value in values)
    return {name: name in values[1] for name in values[0]}


EXEC_SAID: Mapping[str, tuple[Any, Any]] = {
    "hello": (exec_messages.ExecHello("p", "s", {}),) * 2,
    "started": (exec_messages.ChannelStarted(1, 0, "e", False),) * 2,
    "exit": (
        exec_messages.ChannelExit.of(FULL_END, **COUNTS, omitted_bytes=1),
        exec_messages.ChannelExit.of(PLAIN_END, **COUNTS, omitted_bytes=None),
    ),
    "detached": (exec_messages.Detached(1, 0),) * 2,
    "error": (exec_messages.ChannelError(**PUBLIC, id=1, seq=0, refused="x"), exec_messages.ChannelError(**ERROR)),
    "credit": (exec_messages.Granted(1, 1),) * 2,
    "pong": (ws_messages.Pong("x"), ws_messages.Pong()),
}
TERMINAL_SAID: Mapping[str, tuple[Any, Any]] = {
    "ready": (terminal_messages.TerminalReady("t", 1, 1, True, True),) * 2,
    "skipped": (terminal_messages.Skipped(1),) * 2,
    "taken_over": (terminal_messages.TakenOver(),) * 2,
    "given_back": (terminal_messages.GivenBack(),) * 2,
    "exit": (ws_messages.Exit.of(FULL_END), ws_messages.Exit.of(PLAIN_END)),
    "error": (ws_messages.ErrorMessage(**PUBLIC, refused="x"), ws_messages.ErrorMessage(**ERROR)),
    "pong": (ws_messages.Pong("x"), ws_messages.Pong()),
}


def test_every_message_of_a_client_is_documented_with_its_fields() -> None:
    """Name by name, and which may be left out."""
    runs = {kind: dict(exec_messages.wire_fields(cls)) for kind, cls in exec_messages.CLIENT_MESSAGES.items()}
    assert documented("### What a client says about runs") == runs
    terminals = {kind: dict(exec_messages.wire_fields(cls)) for kind, cls in terminal_messages.CLIENT_MESSAGES.items()}
    assert documented("### What a client says about a terminal") == terminals


def test_every_message_of_the_server_is_documented_with_its_fields() -> None:
    """Compared with what is really sent."""
    assert set(EXEC_SAID) == set(exec_messages.SERVER_MESSAGES)
    sent = {kind: said(*pair) for kind, pair in EXEC_SAID.items()}
    assert documented("### What the server says about runs") == sent
    assert set(TERMINAL_SAID) == set(terminal_messages.SERVER_MESSAGES)
    sent = {kind: said(*pair) for kind, pair in TERMINAL_SAID.items()}
    assert documented("### What the server says about a terminal") == sent


def test_the_tags_and_the_header_are_documented() -> None:
    """Numbers and sizes."""
    tags = [int(number) for number, _ in table("### Bytes")]
    assert tags == [*exec_messages.Tag, exec_messages.MORE]
    assert f"a header of {exec_messages.HEADER.size} bytes" in TEXT
    assert exec_messages.HEADER.format == "!IBQ"


def test_the_close_codes_are_documented() -> None:
    """All that the server sends; 1006 is never sent (RFC 6455 §7.4.1)."""
    codes = {int(code) for code, _ in table("## Opening")}
    assert codes == set(CloseCode) - {CloseCode.ABNORMAL}


def test_the_urls_and_subprotocols_are_documented() -> None:
    """One row for each route."""
    rows = {name.strip("`"): urls for urls, name, _ in table("# WebSockets")}
    raw = terminal_messages.RAW_PROTOCOL
    assert set(rows) == {exec_messages.PROTOCOL, terminal_messages.PROTOCOL, raw, SUBPROTOCOL, WATCH_SUBPROTOCOL}
    paths = set(re.findall(r"`GET ([^`]+)`", " ".join(rows.values())))
    assert paths == {route.path for route in TABLE.routes if route.kind is RouteKind.WEBSOCKET}


def test_the_query_of_a_terminal_is_documented() -> None:
    """Every field that is taken, and no other."""
    names = {name for cell, _ in table("## Terminals") for name in re.findall(r"`(\w+)`", cell)}
    assert names == {field.name for field in attrs.fields(terminal_messages.TerminalQuery)}
    size = TerminalSize()
    assert f"{size.cols} × {size.rows}" in TEXT


@pytest.mark.parametrize(
    "sentence",
    [
        f"up to {exec_messages.MAX_CHANNELS} runs at once",
        f"a number from 1 to {ws_messages.MAX_CHANNEL}",
        f"at most {exec_messages.DEFAULT_FRAME_BYTES // 1024} KiB, or `max_frame` "
        f"({ws_messages.MIN_FRAME_BYTES} to {ws_messages.MAX_FRAME_BYTES}) bytes",
        f"{exec_messages.DEFAULT_CREDIT_BYTES // 2**20} MiB if not given",
        f"up to {ws_messages.MAX_CREDIT_BYTES // 2**20} MiB",
        f"may send {exec_messages.STDIN_CREDIT_BYTES // 1024} KiB at once",
        f"at most {ws_messages.MAX_PING_CHARS} characters",
        f"{ws_messages.MIN_FRAME_BYTES} to {ws_messages.MAX_CREDIT_BYTES} |",
        f"within {ApiSettings().websocket_auth_s:.0f} seconds",
        f"Every {ApiSettings().websocket_ping_s:.0f} seconds the server pings",
        f"within {ApiSettings().write_timeout_s:.0f} seconds ends",
        f"may have {ApiSettings().max_message_bytes // 2**20} MiB",
        f"kept, up to {terminal.MAX_TYPED_BYTES // 2**20} MiB",
        f"the first {handshake.MAX_UNPROVEN_BYTES // 1024} KiB that are sent",
        f"in at most {ws_stream.MAX_PARTS} parts",
        f"{ws_stream.MAX_CONTROL_FRAMES} pings and pongs within a second",
        f"at most {channel.MAX_ORDERS} of a run may wait",
    ],
)
def test_the_limits_are_those_of_the_code(sentence: str) -> None:
    """Each number stands in its sentence."""
    assert sentence in " ".join(TEXT.split())


def refusals(heading: str) -> set[str]:
    """Return the values of `refused` that are named beneath a heading."""
    section = TEXT.split(f"{heading}\n", 1)[1]
    sentence = re.split(r"[.:]\s", section.split("\n`refused` is the type of the message", 1)[1], maxsplit=1)[0]
    return set(re.findall(r"`(\w+)`", sentence))


def test_the_values_of_refused_are_documented() -> None:
    """The types of messages that can be refused, and what a binary message is called."""
    assert refusals("### What the server says about runs") == {*exec_messages.CLIENT_MESSAGES, exec_messages.Input.kind}
    assert refusals("### What the server says about a terminal") == {
        *terminal_messages.CLIENT_MESSAGES,
        terminal_messages.INPUT,
    }


def test_the_limits_in_hello_are_listed() -> None:
    """A client can read them instead of this page."""
    told = {*exec_messages.LIMITS, "message_bytes"}
    row = next(text for kind, _, text in table("### What the server says about runs") if kind == "`hello`")
    assert told == set(re.findall(r"`(\w+)`", row)) - {"limits"}


def test_a_silent_client_is_given_up_after_two_minutes() -> None:
    """Unanswered pings, one interval each, make two minutes."""
    assert ws_stream.PINGS_UNANSWERED * ApiSettings().websocket_ping_s == 120
