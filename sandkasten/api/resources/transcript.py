"""A run's output as chunk events that can be resumed exactly, whatever was cut between two pieces. Sans-I/O.

Every chunk's id is a position: a client that comes back with it gets what follows, nothing twice and nothing missing,
although a piece becomes several events, and a character, line end or escape sequence may begin in one piece and end in
another one. Mostly a position is just the number of the last piece that was handed over whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from sandkasten.api.http.sse import base64_literals, chunk_event, text_literals
from sandkasten.api.resources.schemas import OutputFormat
from sandkasten.api.resources.text import OutputText
from sandkasten.model import Output, Stream

MAX_HELD_BYTES = 32
"""How much of what is held back, per stream, a position may spell out; CR, half characters and colours do fit."""

_SPELLING = re.compile(
    rf"(\d{{1,15}})(?:~((?:[0-9a-f]{{2}}){{0,{MAX_HELD_BYTES}}})~((?:[0-9a-f]{{2}}){{0,{MAX_HELD_BYTES}}}))?"
    r"(?:\.(\d{1,15})\.(\d{1,15}))?\Z",
    re.ASCII,
)

_NOTHING: Mapping[Stream, bytes] = dict.fromkeys(Stream, b"")
_NONE: Mapping[Stream, int] = dict.fromkeys(Stream, 0)


@attrs.frozen
class Position:
    """How far a transcript got: whole pieces up to `sequence` but for the bytes `held` back of each stream, and `sent`
    characters (bytes, in base64) of what comes next on each.

    Spelled `12`, `12~0d~` (stdout ends in a CR) or `12~~.40.0` (and 40 characters of piece 13 were sent).
    """

    sequence: int = 0
    held: Mapping[Stream, bytes] = _NOTHING
    sent: Mapping[Stream, int] = _NONE

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position that is spelled so. Raises `ValueError`."""
        match = _SPELLING.match(text)
        if match is None:
            raise ValueError("is no position in a stream of output")
        sequence, held_out, held_err, sent_out, sent_err = match.groups()
        return cls(
            int(sequence),
            {Stream.STDOUT: bytes.fromhex(held_out or ""), Stream.STDERR: bytes.fromhex(held_err or "")},
            {Stream.STDOUT: int(sent_out or 0), Stream.STDERR: int(sent_err or 0)},
        )

    def __str__(self) -> str:
        text = str(self.sequence)
        if any(self.held.values()):
            text += f"~{self.held[Stream.STDOUT].hex()}~{self.held[Stream.STDERR].hex()}"
        if any(self.sent.values()):
            text += f".{self.sent[Stream.STDOUT]}.{self.sent[Stream.STDERR]}"
        return text


class Transcript:
    """One client's view of one run from a position on; `only` leaves the other stream out."""

    def __init__(self, output_format: OutputFormat, start: Position, *, only: Stream | None = None) -> None:
        self._is_base64 = output_format.is_base64
        self._only = only
        self._base = start
        self._sent = dict(start.sent)
        self._to_skip = dict(start.sent)
        self._texts = {stream: OutputText(is_raw=output_format.is_raw) for stream in Stream}
        for stream, held in start.held.items():
            self._texts[stream].feed(b"" if self._is_base64 else held)  # there nothing is held back but in made-up ones

    def feed(self, outputs: Iterable[Output]) -> Iterator[bytes]:
        """Return the events of pieces that follow. The last event of neighbours on one stream has their number."""
        for stream, run in itertools.groupby(outputs, key=lambda output: output.stream):
            pieces = list(run)
            data = b"".join(piece.data for piece in pieces) if self._only in (None, stream) else b""
            literals = list(self._literals(stream, data if self._is_base64 else self._texts[stream].feed(data)))
            for index, (literal, length) in enumerate(literals, start=1):
                self._sent[stream] += length
                if index == len(literals):
                    self._move_to(pieces[-1].sequence)
                yield chunk_event(stream, literal, str(self.position))
            if not literals:
                self._move_to(pieces[-1].sequence)

    def finish(self) -> Iterator[bytes]:
        """Return the events of what was held back to the end."""
        for stream, text in self._texts.items():
            for literal, length in self._literals(stream, text.feed(b"", is_last=True)):
                self._sent[stream] += length
                yield chunk_event(stream, literal, str(self.position))

    @property
    def position(self) -> Position:
        """How far the client got once it has all events."""
        return attrs.evolve(self._base, sent=dict(self._sent))

    def _literals(self, stream: Stream, content: Any) -> Iterator[tuple[str, int]]:  # str or bytes
        """Return what a client that came back has not seen yet."""
        skipped = min(self._to_skip[stream], len(content))
        self._to_skip[stream] -= skipped
        content = content[skipped:]
        return base64_literals(content) if self._is_base64 else text_literals(content)

    def _move_to(self, sequence: int) -> None:
        """Count from here on, if what is held back can be spelled out; otherwise from where it could be last time."""
        held = {stream: text.held for stream, text in self._texts.items()}
        if max(map(len, held.values())) <= MAX_HELD_BYTES and not any(self._to_skip.values()):
            self._base = Position(sequence, held)
            self._sent = dict(_NONE)
