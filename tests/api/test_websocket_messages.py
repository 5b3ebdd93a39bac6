"""The messages of exec and terminal WebSockets without I/O: what is taken, what is refused, how it is spelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.api.http.websocket import MAX_REASON_BYTES, Opcode, cut_reason, encode_frame
from sandkasten.api.websocket import exec_messages as execs
from sandkasten.api.websocket import terminal_messages as terminals
from sandkasten.api.websocket.messages import MAX_CHANNEL, MessageRefused, encode_message
from sandkasten.errors import InvalidRequest
from sandkasten.model import Stream, TerminalSize

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("id", "cmd", "credit", "max_frame", "exec_id", "after", "bytes", "signal", "cols", "rows", "now", "data")
KINDS = sorted({*execs.CLIENT_MESSAGES, *terminals.CLIENT_MESSAGES})
MESSAGES = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JSON}, optional={name: st.integers(-1, 2**33) | JSON for name in NAMES}
)


def payload(frame: bytes) -> dict[str, Any]:  # JSON values
    """Return the object in a short text frame."""
    assert frame[0] == 0x80 | Opcode.TEXT
    value: dict[str, Any] = json.loads(frame[frame.index(b"{") :])
    return value


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or why it refuses."""
    try:
        return call()
    except (MessageRefused, InvalidRequest) as refused:
        return refused


@given(st.text() | st.binary() | MESSAGES.map(json.dumps))
def test_any_message_is_taken_or_refused(message: str | bytes) -> None:
    """Never anything else, and a refusal names only a channel that can exist."""
    taken = outcome(lambda: execs.parse_message(message))
    assert isinstance(taken, execs.ClientMessage | MessageRefused)
    if isinstance(taken, MessageRefused):
        assert isinstance(taken.error, InvalidRequest)
        assert taken.channel is None or 1 <= taken.channel <= MAX_CHANNEL
        assert taken.kind in (None, "stdin", *execs.CLIENT_MESSAGES)


@given(st.text() | MESSAGES.map(json.dumps))
def test_any_message_to_a_terminal_is_taken_or_refused(message: str) -> None:
    """As with runs."""
    taken = outcome(lambda: terminals.parse_message(message))
    assert isinstance(taken, terminals.ClientMessage | MessageRefused)


@given(st.dictionaries(st.sampled_from(["cols", "rows", "shell", "terminal_id", "read_only", "window"]), st.text()))
def test_any_query_of_a_terminal_is_taken_or_refused(query: dict[str, str]) -> None:
    """A bad field is named."""
    taken = outcome(lambda: terminals.parse_query(query))
    assert isinstance(taken, terminals.TerminalQuery | InvalidRequest)
    if isinstance(taken, InvalidRequest):
        assert set(taken.details) <= set(query)


def test_a_query_of_a_terminal_is_taken_apart() -> None:
    """Numbers and truth values are text in a query."""
    parsed = terminals.parse_query({"cols": "100", "read_only": "true", "window": "65536"})
    assert (parsed.size, parsed.read_only, parsed.window) == (TerminalSize(100, 24), True, 65536)
    with pytest.raises(InvalidRequest) as caught:
        terminals.parse_query({"cols": "100", "colls": "1"})
    assert caught.value.details == {"colls": "is unknown; the nearest known field is cols"}


@given(st.integers(1, MAX_CHANNEL), st.binary())
def test_input_is_a_header_and_bytes(channel: int, data: bytes) -> None:
    """The header has a channel and nothing else to say."""
    assert execs.parse_message(execs.HEADER.pack(channel, 0, 0) + data) == execs.Input(channel, data)


@given(st.sampled_from(Stream), st.integers(0, 2**53), st.booleans(), st.binary(max_size=70_000))
def test_output_is_a_header_and_bytes(stream: Stream, sequence: int, more: bool, data: bytes) -> None:
    """The tag says which stream, and whether more of the piece follows."""
    frame = b"".join(execs.encode_output(7, stream, memoryview(data), sequence, more=more))
    body = frame[len(frame) - len(data) - execs.HEADER.size :]
    tag = execs.Tag.STDOUT if stream is Stream.STDOUT else execs.Tag.STDERR
    assert execs.HEADER.unpack_from(body) == (7, tag | (execs.MORE if more else 0), sequence)
    assert body[execs.HEADER.size :] == data


REFUSED = [
    ('{"type":"start","id":0,"cmd":"x"}', None, "start"),
    ('{"type":"start","id":true,"cmd":"x"}', None, "start"),
    ('{"type":"start","id":1.0,"cmd":"x"}', None, "start"),
    ('{"type":"start","id":2147483649,"cmd":"x"}', None, "start"),
    ('{"type":"start","cmd":"x"}', None, "start"),
    ('{"type":"start","id":1,"cmd":7}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","credit":-1}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","credit":16777217}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","max_frame":65537}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","max_frame":1}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","encoding":"base64"}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","raw_output":true}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","stdin":7}', 1, "start"),
    ('{"type":"start","id":1,"cmd":"x","on_disconnect":"stay"}', 1, "start"),
    ('{"type":"attach","id":1}', 1, "attach"),
    ('{"type":"attach","id":1,"exec_id":"a b"}', 1, "attach"),
    ('{"type":"attach","id":1,"exec_id":"a","after":-1}', 1, "attach"),
    ('{"type":"credit","id":1}', 1, "credit"),
    ('{"type":"credit","id":1,"bytes":"1"}', 1, "credit"),
    ('{"type":"signal","id":1,"signal":"NO"}', 1, "signal"),
    ('{"type":"signal","id":1,"signal":65}', 1, "signal"),
    ('{"type":"resize","id":1,"cols":0,"rows":1}', 1, "resize"),
    ('{"type":"cancel","id":1,"now":1}', 1, "cancel"),
    ('{"type":"detach","id":"1"}', None, "detach"),
    ('{"type":"ping","data":7}', None, "ping"),
    ('{"type":"ping","data":"' + "x" * 257 + '"}', None, "ping"),
    ('{"type":"stop","id":3}', 3, None),
    ('{"type":["start"],"id":3}', 3, None),
    ('{"id":3}', 3, None),
    ("{}", None, None),
    ("[]", None, None),
    ("null", None, None),
    ("", None, None),
    ("{", None, None),
    ('{"type":"ping"} x', None, None),
    (b"", None, None),
    (bytes(12), None, None),
    (execs.HEADER.pack(0, 0, 0), None, None),
    (execs.HEADER.pack(2**32 - 1, 0, 0), None, None),
    (execs.HEADER.pack(5, 1, 0) + b"x", 5, "stdin"),
    (execs.HEADER.pack(5, 0x80, 0) + b"x", 5, "stdin"),
    (execs.HEADER.pack(5, 0, 1) + b"x", 5, "stdin"),
]


@pytest.mark.parametrize(("message", "channel", "kind"), REFUSED)
def test_malformed_messages_are_refused_by_name(message: str | bytes, channel: int | None, kind: str | None) -> None:
    """The refusal has the channel and the type wherever they can be read."""
    with pytest.raises(MessageRefused) as caught:
        execs.parse_message(message)
    assert (caught.value.channel, caught.value.kind) == (channel, kind)
    assert caught.value.error.details


def test_a_start_has_the_fields_of_a_command() -> None:
    """Besides its own; unknown ones are ignored."""
    text = '{"type":"start","id":9,"cmd":"x","stdin":true,"max_frame":65536,"request":1,"new":1}'
    start = execs.parse_message(text)
    assert isinstance(start, execs.StartCommand)
    assert (start.id, start.max_frame, start.request.cmd) == (9, 65536, "x")
    assert start.request.stdin is not None
    assert start.request.stdin.is_open


def test_what_is_none_is_not_sent() -> None:
    """False and zero are sent."""
    error = execs.ChannelError(error_code="CODE", message="message", retryable=False, id=3, seq=0)
    fields = {"type": "error", "error_code": "CODE", "message": "message", "retryable": False, "id": 3, "seq": 0}
    assert payload(encode_message(error)) == fields | {"final": False}


@pytest.mark.parametrize(("size", "head_bytes"), [(0, 2), (125, 2), (126, 4), (65_535, 4), (65_536, 10)])
def test_a_frame_has_the_shortest_head(size: int, head_bytes: int) -> None:
    """RFC 6455 §5.2: the length is spelled with as few bytes as possible."""
    frame = encode_frame(Opcode.BINARY, bytes(size))
    assert (len(frame), frame[0]) == (head_bytes + size, 0x82)


@given(st.text())
def test_a_reason_fits_into_a_close_frame(text: str) -> None:
    """Cut at a character (RFC 6455 §5.5)."""
    reason = cut_reason(text)
    assert text.startswith(reason)
    assert len(reason.encode()) <= MAX_REASON_BYTES
