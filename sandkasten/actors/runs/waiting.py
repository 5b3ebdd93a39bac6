"""The waits of a caller for a run: for its result, its end, a port that it opens, or a line that it writes.

A result is collected under a cap that keeps the head and the tail of the output, so memory stays at the cap. The cut
never splits a UTF-8 character: bytes of a character cut in two are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import trio

from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Run, RunObserver
from sandkasten.errors import InvalidRequest
from sandkasten.model import ExecEnd, ExecResult, Gap, Output, Stream, Waited, WaitFor
from sandkasten.output.log import ReaderMode

_QUIET_S = 0.1
"""After this long without output an unfinished line is matched as it is."""
_MAX_LINE_BYTES = 4096
_MAX_PATTERN_CHARS = 1000
_PATTERN_BYTES = 256 * 1024
"""The memory of the matcher; bounds how slow a pattern can be as well."""


async def wait_for(
    run: Run, condition: WaitFor, ports: Ports, *, timeout_s: float, matchers: trio.CapacityLimiter
) -> Waited:
    """Wait until the condition holds, the run has ended or the time is over. `matchers` bounds the threads that match
    output. Raises `InvalidRequest`."""
    if sum((condition.exit, condition.port is not None, condition.pattern is not None)) != 1:
        raise InvalidRequest("wait for exactly one thing", condition="exactly one of exit, port and pattern is needed")
    outcome = Waited(happened=False, run=run.info)
    with trio.move_on_after(timeout_s):
        if condition.port is not None:
            outcome = await _wait_port(run, ports, condition.port)
        elif condition.pattern is not None:
            outcome = await _wait_pattern(run, condition.pattern, matchers)
        else:
            await run.ended.wait_done()
            outcome = Waited(happened=True, run=run.info)
    return outcome if outcome.happened else Waited(happened=False, run=run.info)


async def _wait_port(run: Run, ports: Ports, number: int) -> Waited:
    happened = False
    async with trio.open_nursery() as nursery:

        async def end_with_run() -> None:
            await run.ended.wait_done()
            nursery.cancel_scope.cancel()

        nursery.start_soon(end_with_run)
        await ports.wait_open(number)
        happened = True
        nursery.cancel_scope.cancel()
    return Waited(happened=happened, run=run.info)


async def _wait_pattern(run: Run, text: str, matchers: trio.CapacityLimiter) -> Waited:
    """Match the output in the log, then the output to come, line by line. A line without an end, such as a prompt, is
    matched when no more of it has come for a moment; a very long line is matched in parts."""
    import re2  # here: only a wait for a pattern pays for the import

    if len(text) > _MAX_PATTERN_CHARS:
        raise InvalidRequest("the pattern is too long", pattern=f"must have at most {_MAX_PATTERN_CHARS} characters")
    options = re2.Options()
    options.max_mem = _PATTERN_BYTES
    options.log_errors = False
    try:
        pattern = re2.compile(text, options)
    except re2.error as error:
        raise InvalidRequest("the pattern can't be used", pattern=_why(error)) from None
    line = await _first_match(run, pattern.search, matchers)
    return Waited(happened=line is not None, run=run.info, line=line)


def _why(error: Exception) -> str:
    """Return the message of RE2, which may be bytes."""
    (told,) = error.args or ("",)
    return (told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told))[:200]


async def _first_match(run: Run, search: Callable[[str], object], matchers: trio.CapacityLimiter) -> str | None:
    assert run.log is not None
    lines = _Lines()
    reader = run.log.reader(after=run.log.first_sequence - 1, mode=ReaderMode.FASTEST)
    is_quiet = True
    try:
        while True:
            with trio.move_on_after(math.inf if is_quiet else _QUIET_S) as pause:
                try:
                    piece = await anext(reader)
                except StopAsyncIteration:
                    break
            is_quiet = pause.cancelled_caught
            found = await _search(search, lines.rest() if is_quiet else lines.feed(piece), matchers)
            if found is not None:
                return found
    finally:
        reader.close()
    return await _search(search, lines.rest(), matchers)


async def _search(search: Callable[[str], object], lines: list[str], matchers: trio.CapacityLimiter) -> str | None:
    """Match in a thread: a client's pattern on a sandbox's line may take long."""
    if not lines:
        return None
    return await trio.to_thread.run_sync(_find, search, lines, limiter=matchers, abandon_on_cancel=True)


def _find(search: Callable[[str], object], lines: list[str]) -> str | None:
    return next((line for line in lines if search(line) is not None), None)


class _Lines:
    """Cuts both streams into lines."""

    def __init__(self) -> None:
        self._rests = dict.fromkeys(Stream, b"")

    def feed(self, piece: Output) -> list[str]:
        *lines, rest = (self._rests[piece.stream] + piece.data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rests[piece.stream] = rest
        return [_text(part) for line in lines for part in _parts(line)]

    def rest(self) -> list[str]:
        return [_text(rest) for rest in self._rests.values() if rest]


def _parts(line: bytes) -> Iterator[bytes]:
    yield line[:_MAX_LINE_BYTES]
    for start in range(_MAX_LINE_BYTES, len(line), _MAX_LINE_BYTES):
        yield line[start : start + _MAX_LINE_BYTES]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r")


_MAX_CHARACTER_BYTES: Final = 4


class CappedBytes:
    """Bytes of which at most `cap` are kept: the first half of the cap and the last half."""

    def __init__(self, cap: int, head: bytes | bytearray = b"", tail: bytes | bytearray = b"", total: int = 0) -> None:
        self._cap = cap
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray(head)
        self._tail = bytearray(tail)
        self.total = total

    def add(self, data: bytes) -> None:
        """Append a piece. Memory is at most one and a half times the cap and this piece."""
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_cap:
            del self._tail[: -self._tail_cap]

    def copy(self) -> CappedBytes:
        """Return a copy, to which other pieces can be appended."""
        return CappedBytes(self._cap, self._head, self._tail, self.total)

    def value(self) -> bytes:
        """Return the kept bytes."""
        if self.total <= self._cap:
            return bytes(self._head + self._tail)
        return _without_cut_end(bytes(self._head)) + _without_cut_start(bytes(self._tail[-self._tail_cap :]))

    def gap(self, value: bytes) -> Gap | None:
        """Return where bytes are missing in `value`, if some are."""
        if self.total <= self._cap:
            return None
        return Gap(len(_without_cut_end(bytes(self._head))), self.total - len(value))


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


class Collector(RunObserver):
    """Collects the output of a command and makes its result: both streams as they arrived, and each alone.

    As long as only one stream has written, its bytes are stored once; with both, each view has the whole cap.
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._both = CappedBytes(cap_bytes)
        self._only: Stream | None = None
        self._streams: dict[Stream, CappedBytes] = {}

    def wrote(self, run: Run, piece: Output) -> bool:
        if self._only is None and not self._streams:
            self._only = piece.stream
        elif piece.stream is not self._only and not self._streams:
            other = CappedBytes(self._cap_bytes)
            self._streams = {stream: self._both.copy() if stream is self._only else other for stream in Stream}
        if self._streams:
            self._streams[piece.stream].add(piece.data)
        self._both.add(piece.data)
        return False

    def result(self, end: ExecEnd) -> ExecResult:
        """Return the result of the command that ended with `end`."""
        output = self._both.value()
        stdout, stderr = self._value(Stream.STDOUT, output), self._value(Stream.STDERR, output)
        values = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        return ExecResult(
            end=end,
            output=output,
            stdout=stdout,
            stderr=stderr,
            bytes_total=self._both.total,
            bytes_omitted=self._both.total - len(output),
            gaps=self._gaps(output, values) if self._both.total > len(output) else {},
        )

    def _value(self, stream: Stream, output: bytes) -> bytes:
        if self._streams:
            return self._streams[stream].value()
        return output if stream is self._only else b""

    def _gaps(self, output: bytes, values: Mapping[Stream, bytes]) -> Mapping[str, Gap]:
        kept = self._streams or {stream: self._both for stream in Stream if stream is self._only}
        found = {stream.value: each.gap(values[stream]) for stream, each in kept.items()}
        return {name: gap for name, gap in {"output": self._both.gap(output), **found}.items() if gap is not None}
