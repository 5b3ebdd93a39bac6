"""Collects a command's output under a cap that keeps its head and its tail. Memory stays at the cap, whatever comes.

Three views are given of the same bytes: both streams as they arrived, and each one alone; each has the whole cap.
The cut never splits a UTF-8 character: bytes that belong to a character cut in two are left out and counted.
"""

from __future__ import annotations

from typing import Final

from sandkasten.model import ExecEnd, ExecResult, Output, Stream

_MAX_CHARACTER_BYTES: Final = 4


class CappedBytes:
    """Bytes of which at most `cap` are kept: the first half of the cap and the last half."""

    def __init__(self, cap: int) -> None:
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Append a piece. Holds at most one and a half times the cap and this piece."""
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_cap:
            del self._tail[: -self._tail_cap]

    def copy(self) -> CappedBytes:
        """Return one that goes on separately from here."""
        twin = CappedBytes(self._head_cap + self._tail_cap)
        twin._head, twin._tail, twin.total = self._head[:], self._tail[:], self.total
        return twin

    def value(self) -> bytes:
        """Return what is kept."""
        if self.total <= self._head_cap + self._tail_cap:
            return bytes(self._head + self._tail)
        return _without_cut_end(bytes(self._head)) + _without_cut_start(bytes(self._tail[-self._tail_cap :]))


def _without_cut_end(data: bytes) -> bytes:
    """Drop the start of a character whose rest is missing at the end of `data`."""
    for back in range(1, min(_MAX_CHARACTER_BYTES, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if length > back else data
    return data


def _without_cut_start(data: bytes) -> bytes:
    """Drop the continuation bytes of a character whose start is missing."""
    skip = 0
    while skip < min(_MAX_CHARACTER_BYTES - 1, len(data)) and data[skip] & 0b1100_0000 == 0b1000_0000:
        skip += 1
    return data[skip:]


class Collector:
    """Takes a command's output piece by piece and makes its result.

    While only one stream has written, what it wrote is kept once; with both, each has the whole cap for itself.
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._both = CappedBytes(cap_bytes)
        self._only: Stream | None = None
        self._streams: dict[Stream, CappedBytes] = {}

    def add(self, piece: Output) -> None:
        if self._only is None and not self._streams:
            self._only = piece.stream
        elif piece.stream is not self._only and not self._streams:
            other = CappedBytes(self._cap_bytes)
            self._streams = {stream: self._both.copy() if stream is self._only else other for stream in Stream}
        if self._streams:
            self._streams[piece.stream].add(piece.data)
        self._both.add(piece.data)

    def result(self, end: ExecEnd) -> ExecResult:
        """Return the result of the command that ended like this."""
        output = self._both.value()
        return ExecResult(
            end=end,
            output=output,
            stdout=self._value(Stream.STDOUT, output),
            stderr=self._value(Stream.STDERR, output),
            bytes_total=self._both.total,
            bytes_omitted=self._both.total - len(output),
        )

    def _value(self, stream: Stream, output: bytes) -> bytes:
        if self._streams:
            return self._streams[stream].value()
        return output if stream is self._only else b""
