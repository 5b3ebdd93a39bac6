"""Events from which a client can go on exactly, wherever it was cut off."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandkasten.actors.runs.run import Run, RunReader, RunRequest
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources.run_output import MAX_HELD_BYTES, OutputFormat, Position, RunEvents, Transcript
from sandkasten.model import ExecSpec, Output, Stream
from sandkasten.sdk.text import OutputText
from tests.api.test_websocket_outbox import Steps
from tests.stores import open_output
from tests.unit.test_output_disk import END

TEXT = OutputFormat()
RAW = OutputFormat(is_raw=True)
EXACT = OutputFormat(is_base64=True)

_MORSELS = (b"a", b"\r", b"\n", b"\r\n", "é".encode(), b"\xc3", b"\xa9", "\U0001f600".encode(), b"\xf0\x9f", b"\xff")
_SEQUENCES = (b"\x1b", b"\x1b[", b"\x1b[31m", b"[0m", b"\x1b]0;" + b"t" * 40, b"\x07", b"x" * 5000, b"\x1b\x1b")
_DATA = st.lists(st.sampled_from(_MORSELS + _SEQUENCES), min_size=1, max_size=4).map(b"".join)
_PIECES = st.lists(st.tuples(st.sampled_from(Stream), _DATA), max_size=12)


def outputs(pieces: list[tuple[Stream, bytes]]) -> list[Output]:
    return [Output(stream, data, number) for number, (stream, data) in enumerate(pieces, start=1)]


def read(events: list[bytes]) -> tuple[dict[Stream, list[str]], list[str]]:
    """Return the chunks of each stream, and the events' positions."""
    chunks: dict[Stream, list[str]] = {stream: [] for stream in Stream}
    positions = []
    for event in events:
        name, position, data, *_ = event.decode("ascii").split("\n")
        assert name == "event: chunk"
        value = json.loads(data.removeprefix("data: "))
        chunks[Stream(value["stream"])].append(value["chunk"])
        positions.append(position.removeprefix("id: "))
    return chunks, positions


def events_of(pieces: list[Output], output_format: OutputFormat, start: Position, groups: list[int]) -> list[bytes]:
    """Return all events of the pieces behind `start`, fed in groups of these sizes."""
    transcript = Transcript(output_format, start)
    rest = pieces[start.sequence :]
    events: list[bytes] = []
    for size in groups:
        events += transcript.feed(rest[:size])
        rest = rest[size:]
    return [*events, *transcript.feed(rest), *transcript.finish()]


def content(pieces: list[Output], stream: Stream, output_format: OutputFormat) -> str | bytes:
    """Return what a client that was never cut off has of a stream in the end."""
    data = b"".join(piece.data for piece in pieces if piece.stream is stream)
    return data if output_format.is_base64 else OutputText(is_raw=output_format.is_raw).feed(data, is_last=True)


def joined(chunks: list[str], output_format: OutputFormat) -> str | bytes:
    return b"".join(map(base64.b64decode, chunks)) if output_format.is_base64 else "".join(chunks)


@settings(deadline=None)
@given(_PIECES, st.sampled_from([TEXT, RAW, EXACT]), st.data())
def test_a_client_that_is_cut_off_goes_on_exactly(
    pieces: list[tuple[Stream, bytes]], output_format: OutputFormat, data: st.DataObject
) -> None:
    """After any event, as often as it likes, however the pieces are gathered each time."""
    written = outputs(pieces)
    got: dict[Stream, list[str]] = {stream: [] for stream in Stream}
    position = Position()
    for is_last in (False, False, True):
        groups = data.draw(st.lists(st.integers(1, 4), max_size=6))
        events = events_of(written, output_format, position, groups)
        kept = len(events) if is_last else data.draw(st.integers(0, len(events)))
        chunks, positions = read(events[:kept])
        for stream in Stream:
            got[stream] += chunks[stream]
        if positions:
            position = Position.parse(positions[-1])
            assert str(position) == positions[-1]
    for stream in Stream:
        assert joined(got[stream], output_format) == content(written, stream, output_format)


@settings(deadline=None)
@given(_PIECES, st.sampled_from([TEXT, RAW, EXACT]))
def test_no_two_events_have_one_position(pieces: list[tuple[Stream, bytes]], output_format: OutputFormat) -> None:
    """An id would otherwise say nothing."""
    _, positions = read(events_of(outputs(pieces), output_format, Position(), []))
    assert len(set(positions)) == len(positions)


def test_a_position_is_a_plain_number_where_nothing_is_held_back() -> None:
    """Bytes held back are spelled out. Where they are too many, the position is the last that could be spelled out, and
    the bytes since.
    """
    title = b"\x1b]0;" + b"t" * MAX_HELD_BYTES
    written = outputs(
        [
            (Stream.STDOUT, b"one\n"),
            (Stream.STDERR, b"50 %\r"),
            (Stream.STDOUT, b"two\xc3"),
            (Stream.STDOUT, b"\xa9\n"),
            (Stream.STDERR, b"\nx" + title),
            (Stream.STDOUT, b"three"),
            (Stream.STDERR, b"\x07end"),
        ]
    )
    _, positions = read(events_of(written, TEXT, Position(), [1] * 7))
    assert positions == ["1", "2~~0d", "3~c3~0d", "4~~0d", "4~~0d.0.2", "4~~0d.5.2", "7"]


def test_what_was_sent_is_not_forgotten_while_it_is_skipped() -> None:
    """A client that is cut off again before all that it has was skipped, with other groups than before."""
    opener = b"\x1b]0;" + b"t" * MAX_HELD_BYTES
    pieces = [(Stream.STDERR, b"a"), (Stream.STDERR, opener), (Stream.STDOUT, b"out"), (Stream.STDERR, b"\x07b")]
    written = outputs(pieces)
    _, positions = read(events_of(written, TEXT, Position(), [2, 1]))
    assert positions[1] == "0.3.1"
    transcript = Transcript(TEXT, Position.parse(positions[1]))
    assert list(transcript.feed(written[:1])) == []
    assert str(transcript.position) == positions[1]


def test_a_long_piece_has_a_position_in_each_event() -> None:
    """Characters are counted; the last event has the piece's number."""
    _, positions = read(events_of(outputs([(Stream.STDOUT, "é".encode() * 1000)]), TEXT, Position(), []))
    assert positions[-1] == "1"
    assert [position.split(".")[0] for position in positions[:-1]] == ["0"] * (len(positions) - 1)
    assert len(positions) > 1


def test_one_stream_can_be_left_out() -> None:
    """Pieces of the stream that is left out count, and none of their content is told."""
    transcript = Transcript(TEXT, Position(), only=Stream.STDERR)
    events = [
        *transcript.feed(outputs([(Stream.STDOUT, b"no\xc3"), (Stream.STDERR, b"yes"), (Stream.STDOUT, b"no")])),
        *transcript.finish(),
    ]
    chunks, positions = read(events)
    assert (chunks[Stream.STDOUT], chunks[Stream.STDERR], positions) == ([], ["yes"], ["2"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "1.",
        "1.2",
        "1.2.3.4",
        "1~",
        "1~0~",
        "1~0D~",
        "1~~.1",
        " 1",
        "1\n",
        "\u0661",
        "9" * 16,
        "1~" + "00" * 33 + "~",
    ],
)
def test_what_is_no_position_is_refused(text: str) -> None:
    """A client sends what it likes."""
    with pytest.raises(ValueError):
        Position.parse(text)


@given(st.integers(0, 10**15 - 1), st.binary(max_size=32), st.binary(max_size=32), st.integers(0, 10**15 - 1), _PIECES)
@example(0, b"\r", b"", 0, [])
def test_a_made_up_position_does_no_harm(
    sequence: int, held_out: bytes, held_err: bytes, sent: int, pieces: list[tuple[Stream, bytes]]
) -> None:
    """A made-up position may give nonsense, and only to its client."""
    start = Position(sequence, {Stream.STDOUT: held_out, Stream.STDERR: held_err}, dict.fromkeys(Stream, sent))
    assert Position.parse(str(start)) == start
    for output_format in (TEXT, EXACT):
        _, positions = read(events_of(outputs(pieces), output_format, start, []))
        for position in positions:
            Position.parse(position)


class Answer(Exchange):
    """An answer whose client takes all at once."""

    method, is_started, settings = "POST", False, ApiSettings()

    def __init__(self) -> None:
        self.body = b""

    async def start(self, *_: object) -> None:
        self.is_started = True
        await trio.lowlevel.checkpoint()

    async def write(self, data: bytes) -> None:
        self.body += data
        await trio.lowlevel.checkpoint()

    async def finish(self, data: bytes = b"") -> None:
        await trio.lowlevel.checkpoint()


async def test_a_piece_costs_no_switch_of_tasks(tmp_path: Path) -> None:
    """Many pieces go from the task that reads to the one that writes in a turn."""
    async with open_output(tmp_path) as store:
        run = Run(RunRequest(ExecSpec(":", exec_id="a"), timeout_ms=1000))
        run.join(store.session("s").open("a"), cancel=lambda run, now: None, wake=trio.lowlevel.checkpoint)
        run.begin(1)
        for number in range(2000):
            await run.put(Stream.STDOUT, b"%d\n" % number)
        run.finish(attrs.evolve(END, exec_id="a"))

        @asynccontextmanager
        async def open_run() -> AsyncIterator[RunReader]:
            yield RunReader(run)

        answer, steps = Answer(), Steps()
        trio.lowlevel.add_instrument(steps)
        await RunEvents(answer, open_run, Transcript(TEXT, Position()), TEXT).run()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 1000
        assert b"1998\\n1999\\n" in answer.body
        assert b"event: done" in answer.body
