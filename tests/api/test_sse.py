"""Events, byte for byte as the published parsers need them."""

from __future__ import annotations

import base64
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.api.sse import MAX_EVENT_BYTES, base64_events, event, text_events
from sandkasten.model import Stream


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


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=3000), st.integers(1, 4))
def test_text_is_split_into_small_ascii_events_without_loss(text: str, repeat: int) -> None:
    """Every event is ASCII, has one data line, at most 4 KiB, and splits no character."""
    text *= repeat
    events = list(text_events(Stream.STDOUT, text, 9))
    assert all(len(each) <= MAX_EVENT_BYTES for each in events)
    assert "".join(str(data_of(each)["chunk"]) for each in events) == text
    for each in events:
        str(data_of(each)["chunk"]).encode()  # a lone surrogate would raise


def test_the_worst_text_still_fits() -> None:
    """Characters outside the BMP take twelve ASCII bytes each."""
    events = list(text_events(Stream.STDERR, "\U0001f600" * 5000, 1))
    assert max(map(len, events)) <= MAX_EVENT_BYTES
    assert len(events) < 25
    assert data_of(events[0])["stream"] == "stderr"


def test_only_the_last_event_of_a_run_carries_its_number() -> None:
    """An id promises that everything up to it was sent."""
    events = list(text_events(Stream.STDOUT, "x" * 10_000, 42))
    assert [b"\nid: 42\n" in each for each in events] == [False] * (len(events) - 1) + [True]


def test_a_flush_has_no_number() -> None:
    """No piece of output came with it."""
    (chunk,) = text_events(Stream.STDOUT, "\ufffd", None)
    assert b"id:" not in chunk


def test_line_splitting_characters_never_appear_raw() -> None:
    """U+0085, U+2028, VT, FF and friends end lines for some parsers."""
    text = "\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r\n"
    (chunk,) = text_events(Stream.STDOUT, text, 1)
    assert len(chunk.decode().splitlines()) == 4
    assert data_of(chunk)["chunk"] == text


@settings(deadline=None)
@given(st.binary(max_size=9000))
def test_base64_events_are_decodable_one_by_one(data: bytes) -> None:
    """A client may decode each as it comes."""
    events = list(base64_events(Stream.STDOUT, data, 1))
    assert all(len(each) <= MAX_EVENT_BYTES for each in events)
    assert b"".join(base64.b64decode(str(data_of(each)["chunk"])) for each in events) == data
