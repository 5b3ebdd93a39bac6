"""Events, byte for byte as the published parsers need them."""

from __future__ import annotations

import base64
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.api.http.sse import MAX_EVENT_BYTES, base64_literals, chunk_event, event, text_literals
from sandkasten.api.resources.run_output import MAX_HELD_BYTES, Position
from sandkasten.model import Stream

LONGEST_POSITION = str(
    Position(10**15 - 1, dict.fromkeys(Stream, bytes(MAX_HELD_BYTES)), dict.fromkeys(Stream, 10**15 - 1))
)


def data_of(chunk: bytes) -> dict[str, object]:
    """Return an event's data as a strict line parser sees it."""
    lines = chunk.decode("ascii").split("\n")
    assert lines[-2:] == ["", ""]
    assert [line for line in lines[:-2] if line.startswith("data: ")] == [lines[-3]]
    value: dict[str, object] = json.loads(lines[-3].removeprefix("data: "))
    return value


def test_an_event_is_spelled_exactly() -> None:
    """Name and data with a space after the colon, one line, ended by an empty one."""
    assert event("done", {"exit_code": 0, "cwd": "/é"}) == b'event: done\ndata: {"exit_code":0,"cwd":"/\\u00e9"}\n\n'


def test_an_event_takes_text_that_is_none() -> None:
    """A lone surrogate, deep inside, would break strict parsers."""
    chunk = event("error", {"details": {"last_line": ["bad \udcff"]}})
    assert data_of(chunk) == {"details": {"last_line": ["bad \ufffd"]}}


def text_events(text: str, *, stream: Stream = Stream.STDOUT) -> list[bytes]:
    return [chunk_event(stream, literal, LONGEST_POSITION) for literal, _ in text_literals(text)]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=3000), st.integers(1, 4))
def test_text_is_split_into_small_ascii_events_without_loss(text: str, repeat: int) -> None:
    """Every event is ASCII, has one data line, at most 4 KiB, and splits no character; lengths count characters."""
    text *= repeat
    events = text_events(text)
    assert all(len(each) <= MAX_EVENT_BYTES for each in events)
    assert "".join(str(data_of(each)["chunk"]) for each in events) == text
    for each in events:
        str(data_of(each)["chunk"]).encode()  # a lone surrogate would raise
    assert sum(length for _, length in text_literals(text)) == len(text)


def test_the_worst_text_still_fits() -> None:
    """Characters outside the BMP take twelve ASCII bytes each."""
    events = text_events("\U0001f600" * 5000, stream=Stream.STDERR)
    assert max(map(len, events)) <= MAX_EVENT_BYTES
    assert len(events) < 25
    assert data_of(events[0])["stream"] == "stderr"


def test_a_chunk_carries_its_position() -> None:
    """Between the name and the data."""
    assert chunk_event(Stream.STDOUT, '"a"', "12.3.0").startswith(b'event: chunk\nid: 12.3.0\ndata: {"chunk":"a",')


def test_line_splitting_characters_never_appear_raw() -> None:
    """U+0085, U+2028, VT, FF and friends end lines for some parsers."""
    text = "\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r\n"
    (chunk,) = text_events(text)
    assert len(chunk.decode().splitlines()) == 4
    assert data_of(chunk)["chunk"] == text


@settings(deadline=None)
@given(st.binary(max_size=9000))
def test_base64_events_are_decodable_one_by_one(data: bytes) -> None:
    """A client may decode each as it comes; lengths count bytes."""
    literals = list(base64_literals(data))
    events = [chunk_event(Stream.STDOUT, literal, LONGEST_POSITION) for literal, _ in literals]
    assert all(len(each) <= MAX_EVENT_BYTES for each in events)
    assert b"".join(base64.b64decode(str(data_of(each)["chunk"])) for each in events) == data
    assert sum(length for _, length in literals) == len(data)
