"""Collects a command's output under a cap that keeps its head and its tail. Memory stays at the cap, whatever comes.

Three views are kept of the same bytes: both streams in order of arrival, and each one alone; each has the whole cap.
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
    """Takes a command's output piece by piece and makes its result."""

    def __init__(self, cap_bytes: int) -> None:
        self._both = CappedBytes(cap_bytes)
        self._streams = {Stream.STDOUT: CappedBytes(cap_bytes), Stream.STDERR: CappedBytes(cap_bytes)}

    def add(self, piece: Output) -> None:
        self._both.add(piece.data)
        self._streams[piece.stream].add(piece.data)

    def result(self, end: ExecEnd) -> ExecResult:
        """Return the result of the command that ended like this."""
        output = self._both.value()
        return ExecResult(
            end=end,
            output=output,
            stdout=self._streams[Stream.STDOUT].value(),
            stderr=self._streams[Stream.STDERR].value(),
            bytes_total=self._both.total,
            bytes_omitted=self._both.total - len(output),
        )
