"""The end and the output of a run as clients read them: at once, by offset, or as server-sent events.

Text is made from bytes by `OutputText`, which the clients have, too. By offset nothing is removed, since offsets count
bytes.

Events can be resumed exactly. Every chunk's id is a `Position`: a client that comes back with it gets what follows,
nothing twice and nothing missing, although a piece becomes several events, and a character, line end or escape sequence
may begin in one piece and end in another. Mostly a position is the number of the last piece that was handed over whole.
"""

from __future__ import annotations

import base64
import codecs
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NewType, Self

import attrs
import trio

from sandkasten.api.http.errors import Answer, Headers, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.sse import (
    PING,
    SSE_HEADERS,
    ChunkEvent,
    ErrorEvent,
    base64_literals,
    chunk_event,
    error_event,
    event,
    preferred_wait,
    short_end,
    text_literals,
)
from sandkasten.api.resources.fields import (
    MAX_OUTPUT_BYTES,
    OUTPUT_FIELDS,
    Encoding,
    Offset,
    OutputBytes,
    OutputFields,
    add_kinds,
)
from sandkasten.errors import CommandTimeout, SandkastenError
from sandkasten.model import Cause, ExecEnd, ExecResult, Output, OutputSlice, Stream, Usage
from sandkasten.model.network import EgressDenial
from sandkasten.sdk.text import OutputText
from sandkasten.supervisor import ExecStream

SLICE_BYTES = 64 * 1024
"""Output turned into text before other tasks get a turn."""

MAX_CUT_LINE_BYTES = 4096
"""Longest part of a line that is left out with what a gap left out, at either side; shorter where there is little."""

TIMED_OUT_CODE = 124
"""The exit code of timeout(1)."""


PUBLISHED_OUTPUT = OutputFields(("output",))
"""Fields of a result that hold output, for a client that asks for none: each byte is sent once."""


@attrs.frozen(kw_only=True)
class OutputFormat:
    """The form of output that a client asks for: exact bytes, or text, raw or cleaned; `fields` of a result that hold
    it; and if a timeout is an error."""

    is_base64: bool = False
    is_raw: bool = False
    fields: OutputFields = PUBLISHED_OUTPUT
    is_timeout_error: bool = True


# The end --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EndBody(Body):
    """The end of a run. `victim` is the name of the process that the kernel killed for want of memory, `egress_denied`
    what the session was refused to reach meanwhile, if anything."""

    exit_code: int
    cwd: str
    duration_ms: int
    exec_id: str
    cause: Cause
    timed_out: bool
    timeout_ms: int | None
    shell_restarted: bool
    usage: Usage
    queued_ms: int
    signal: int | None = None
    victim: str | None = None
    egress_denied: Sequence[EgressDenial] | None = None

    @classmethod
    def of(cls, end: ExecEnd, **others: Any) -> Self:  # others: fields of the subclass
        """Return an end as clients see it."""
        is_timed_out = end.cause is Cause.TIMED_OUT
        exit_code = TIMED_OUT_CODE if is_timed_out else end.exit_code
        denied = tuple(end.egress_denied) or None
        return cls.take(end, exit_code=exit_code, timed_out=is_timed_out, egress_denied=denied, **others)


@attrs.frozen(kw_only=True)
class DoneEvent(EndBody):
    """The end of a run that was followed. `cwd_truncated`: the directory was cut to fit into the event."""

    cwd_truncated: bool | None = None


RUN_EVENTS: Mapping[str, type[Body]] = {"chunk": ChunkEvent, "done": DoneEvent, "error": ErrorEvent}
"""The events of a run, by name."""


def is_timeout_error(end: ExecEnd, output_format: OutputFormat) -> bool:
    """Return whether an end is an error to this client."""
    return end.cause is Cause.TIMED_OUT and output_format.is_timeout_error


def timeout_error(end: ExecEnd, details: Mapping[str, Any]) -> CommandTimeout:  # JSON values
    """Return the error of a command that ran out of time; `details` are the fields of its end."""
    return CommandTimeout(f"the command ran longer than {end.timeout_ms} ms", **details)


# The whole output -----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ExecResultBody(EndBody):
    """The end of a command and its output: text, or base64 if `encoding` says so. Text says in a line of its own where
    bytes are left out."""

    truncated: bool
    bytes_total: int
    bytes_omitted: int
    output: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    encoding: str | None = None

    @classmethod
    async def read(cls, result: ExecResult, output_format: OutputFormat) -> ExecResultBody:
        """Return a result with its output as the client wants to have it."""
        return cls.of(
            result.end,
            truncated=result.truncated,
            bytes_total=result.bytes_total,
            bytes_omitted=result.bytes_omitted,
            **{name: await _spell_field(result, name, output_format) for name in OUTPUT_FIELDS},
            encoding="base64" if output_format.is_base64 else None,
        )


async def _spell_field(result: ExecResult, name: str, output_format: OutputFormat) -> str | None:
    if name not in output_format.fields:
        return None
    data, gap = getattr(result, name), result.gaps.get(name)
    if output_format.is_base64:
        return base64.b64encode(data).decode("ascii")
    if gap is None:
        return await _spell_text(data, output_format)
    head, tail = data[: gap.offset], data[gap.offset :]
    most_bytes = min(MAX_CUT_LINE_BYTES, len(data) // 16)
    if line_end := head.rfind(b"\n", max(0, len(head) - most_bytes)) + 1:
        head = head[:line_end]
    if line_end := tail.find(b"\n", 0, most_bytes) + 1:
        tail = tail[line_end:]
    size = _size(gap.omitted_bytes + len(data) - len(head) - len(tail))
    begin, end = await _spell_text(head, output_format), await _spell_text(tail, output_format)
    line = "" if not begin or begin.endswith("\n") else "\n"
    return f"{begin}{line}… {size} left out …\n{end}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    return f"{size_bytes / 1000:.1f} kB" if size_bytes < 1_000_000 else f"{size_bytes / 1_000_000:.1f} MB"


async def _spell_text(data: bytes, output_format: OutputFormat) -> str:
    text = OutputText(is_raw=output_format.is_raw)
    if len(data) <= SLICE_BYTES:
        return text.feed(data, is_last=True)
    parts = []
    for start in range(0, len(data), SLICE_BYTES):
        parts.append(text.feed(data[start : start + SLICE_BYTES]))
        await trio.lowlevel.checkpoint()
    return "".join([*parts, text.feed(b"", is_last=True)])


# Output by offset -----------------------------------------------------------------------------------------------------

DEFAULT_OUTPUT_BYTES = OutputBytes(MAX_OUTPUT_BYTES // 4)
UTF_8 = Encoding("utf-8")
_FROM_THE_START = Offset(0)
_CHARACTER_BYTES = 4
OCTETS = "application/octet-stream"


@attrs.frozen
class OutputQuery:
    """The query of a part of a run's output; `offset` and `limit` count bytes."""

    stream: Stream | None = None
    offset: Offset = _FROM_THE_START
    limit: OutputBytes = DEFAULT_OUTPUT_BYTES
    encoding: Encoding = UTF_8


@attrs.frozen(kw_only=True)
class OutputBody(Body):
    """A part of a run's output, as text or base64, and the offsets in bytes of the part and of what there is."""

    text: str | None = None
    content_base64: str | None = None
    offset: int
    next_offset: int
    first_offset: int
    total_bytes: int
    is_final: bool


async def answer_output(exchange: Exchange, exec_id: str, query: OutputQuery) -> Answer | None:
    """Return the part of a run's output that is asked for; None if it was sent as plain bytes. Never waits for more."""
    is_plain = _accepts_octets(exchange)
    is_text = not is_plain and query.encoding != "base64"
    found = await exchange.supervisor.read_output(
        exchange.session_id,
        exec_id,
        stream=query.stream,
        offset=query.offset,
        limit=max(query.limit, _CHARACTER_BYTES) if is_text else query.limit,
    )
    if is_plain:
        await _answer_octets(exchange, found)
        return None
    if not is_text:
        content = base64.b64encode(found.data).decode("ascii")
        return json_answer(OutputBody.take(found, text=None, content_base64=content))
    text, held_bytes = await _decode(found)
    next_offset = found.next_offset - held_bytes
    return json_answer(OutputBody.take(found, text=text, content_base64=None, next_offset=next_offset))


async def _decode(found: OutputSlice) -> tuple[str, int]:
    """Return the text, and how many bytes at the end are left to the next call as an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = []
    for start in range(0, len(found.data), SLICE_BYTES):
        parts.append(decoder.decode(found.data[start : start + SLICE_BYTES]))
        await trio.lowlevel.checkpoint()
    held_bytes = 0 if found.is_final else len(decoder.getstate()[0])
    parts.append(decoder.decode(b"", found.is_final))
    return "".join(parts), held_bytes


async def _answer_octets(exchange: Exchange, found: OutputSlice) -> None:
    offsets = to_plain(OutputBody.take(found, text=None, content_base64=None)).items()
    headers: Headers = tuple(
        (f"x-{name.replace('_', '-')}", str(value).lower()) for name, value in offsets if value is not None
    )
    await exchange.start(200, (("content-type", OCTETS), ("content-length", str(len(found.data))), *headers))
    await exchange.finish(found.data)


def _accepts_octets(exchange: Exchange) -> bool:
    """Return whether the client asks for plain bytes by name (RFC 9110 §12.5.1)."""
    ranges = (exchange.header(b"accept") or "").lower().split(",")
    return OCTETS in (media_range.partition(";")[0].strip() for media_range in ranges)


# Output as events -----------------------------------------------------------------------------------------------------

MAX_HELD_BYTES = 32
"""Bytes held back that a position may spell out for each stream; a CR, half a character or a colour fits."""

POSITION = re.compile(
    rf"(\d{{1,15}})(?:~((?:[0-9a-f]{{2}}){{0,{MAX_HELD_BYTES}}})~((?:[0-9a-f]{{2}}){{0,{MAX_HELD_BYTES}}}))?"
    r"(?:\.(\d{1,15})\.(\d{1,15}))?\Z",
    re.ASCII,
)

_NOTHING: Mapping[Stream, bytes] = dict.fromkeys(Stream, b"")
_NONE: Mapping[Stream, int] = dict.fromkeys(Stream, 0)


@attrs.frozen
class Position:
    """A place in a transcript: whole pieces up to `sequence` were sent, but for the bytes `held` back of each stream,
    and `sent` characters (bytes, in base64) of what comes next on each.

    Spelled `12`, `12~0d~` (stdout ends in a CR) or `12~~.40.0` (and 40 characters of piece 13 were sent).
    """

    sequence: int = 0
    held: Mapping[Stream, bytes] = _NOTHING
    sent: Mapping[Stream, int] = _NONE

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position in `text`. Raises `ValueError`."""
        match = POSITION.match(text)
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


OutputPosition = NewType("OutputPosition", Position)
PreferredWait = NewType("PreferredWait", int)
LastPosition = NewType("LastPosition", Position)
"""In a header, which may be empty: then there is none."""
START = OutputPosition(Position())

add_kinds(
    {
        OutputPosition: lambda value: Position.parse(str(value)),
        LastPosition: lambda value: Position.parse(str(value)) if value else None,
        PreferredWait: preferred_wait,
    }
)


class Transcript:
    """The chunk events of one run for one client from a position on. `only` leaves the other stream out."""

    def __init__(self, output_format: OutputFormat, start: Position, *, only: Stream | None = None) -> None:
        self._is_base64 = output_format.is_base64
        self._only = only
        self._base = start
        self._sent = dict(start.sent)
        self._to_skip = dict(start.sent)
        self._texts = {stream: OutputText(is_raw=output_format.is_raw) for stream in Stream}
        for stream, held in start.held.items():
            self._texts[stream].feed(b"" if self._is_base64 else held)  # base64 holds nothing back

    def feed(self, outputs: Iterable[Output]) -> Iterator[bytes]:
        """Yield the events of the next pieces. The last event of neighbours on one stream has their number."""
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
        """Yield the events of the text held back to the end."""
        for stream, text in self._texts.items():
            for literal, length in self._literals(stream, text.feed(b"", is_last=True)):
                self._sent[stream] += length
                yield chunk_event(stream, literal, str(self.position))

    @property
    def position(self) -> Position:
        """The place of a client that has received all events."""
        return attrs.evolve(self._base, sent=dict(self._sent))

    def _literals(self, stream: Stream, content: Any) -> Iterator[tuple[str, int]]:  # str or bytes
        """Return the JSON strings of content that the client has not received yet."""
        skipped = min(self._to_skip[stream], len(content))
        self._to_skip[stream] -= skipped
        content = content[skipped:]
        return base64_literals(content) if self._is_base64 else text_literals(content)

    def _move_to(self, sequence: int) -> None:
        """Count from the end of piece `sequence`, if the bytes held back there fit into a position; else as before."""
        held = {stream: text.held for stream, text in self._texts.items()}
        if max(map(len, held.values())) <= MAX_HELD_BYTES and not any(self._to_skip.values()):
            self._base = Position(sequence, held)
            self._sent = dict(_NONE)


QUEUED_PIECES = 8
"""Output pieces of at most 256 KiB between a run and a slow reader; behind them the run's pipe fills up."""

MAX_GATHERED_BYTES = 64 * 1024

OpenRun = Callable[[], AbstractAsyncContextManager[ExecStream]]


class _Entered:
    """The command has its turn in the shell, so the answer may begin."""


_Ending = ExecEnd | SandkastenError
_Item = _Entered | Output | _Ending


class RunEvents:
    """One answer with the events of one run: chunks, then `done` or `error`, and pings in times of silence.

    The first output goes out at once, later output is gathered for `coalesce_ms`. The caller decides with `open_run`
    which run it is, and if the run goes on when the client leaves.
    """

    def __init__(
        self,
        exchange: Exchange,
        open_run: OpenRun,
        transcript: Transcript,
        output_format: OutputFormat,
        *,
        headers: Headers = (),
        wait_s: float | None = None,
    ) -> None:
        """`wait_s`: the answer ends behind the first output, or after this time, so that a client gets it through a
        proxy that holds answers back; the run is then left as by a client that leaves."""
        self._exchange = exchange
        self._is_part, self._until = wait_s is not None, math.inf if wait_s is None else trio.current_time() + wait_s
        self._open_run = open_run
        self._transcript = transcript
        self._format = output_format
        self._headers = (*SSE_HEADERS, *headers)
        self._written_at = -math.inf
        self._ping_at = math.inf

    async def run(self) -> None:
        """Answer the request. Raises the `SandkastenError` that came before the answer began."""
        if self._exchange.method == "HEAD":
            await self._answer_head()
            return
        self._put_off_ping()
        async with trio.open_nursery() as nursery:
            sender, items = trio.open_memory_channel[_Item](QUEUED_PIECES)
            nursery.start_soon(self._produce, sender)
            async with items:
                failure = await self._write_all(items)
                if failure is None:
                    nursery.cancel_scope.cancel()  # of an answer that is a part, the run goes on
        if failure is not None:
            raise failure

    async def _answer_head(self) -> None:
        async with self._open_run():
            await self._start()
            await self._exchange.finish()

    async def _produce(self, items: trio.MemorySendChannel[_Item]) -> None:
        async with items:
            try:
                async with self._open_run() as command:
                    await items.send(_Entered())
                    async for output in command:
                        try:
                            items.send_nowait(output)  # `send` would switch tasks for each piece
                        except trio.WouldBlock:
                            await items.send(output)
                    await items.send(await command.wait_end())
            except SandkastenError as error:
                await items.send(error)

    async def _write_all(self, items: trio.MemoryReceiveChannel[_Item]) -> SandkastenError | None:
        """Write events until the run ended; return an error that came before the answer began."""
        while True:
            item = await self._next(items)
            if item is None and trio.current_time() >= self._until:
                await self._end_part()
                return None
            if item is None:
                await self._write(PING)
            elif isinstance(item, _Entered):
                await self._start()
            elif isinstance(item, Output):
                outputs, ending = await self._gather(item, items)
                await self._write_each(self._transcript.feed(outputs))
                if ending is not None:
                    return await self._write_ending(ending)
                if self._is_part:
                    await self._end_part()
                    return None
            else:
                return await self._write_ending(item)

    async def _end_part(self) -> None:
        await self._start()
        await self._exchange.finish()

    async def _next(self, items: trio.MemoryReceiveChannel[_Item]) -> _Item | None:
        """Return the next item, or None when a ping is due."""
        with trio.move_on_at(min(self._ping_at, self._until)):
            return await items.receive()
        return None

    async def _gather(
        self, first: Output, items: trio.MemoryReceiveChannel[_Item]
    ) -> tuple[list[Output], _Ending | None]:
        """Return `first` and the output until `coalesce_ms` after the last write, and the ending if it came by then."""
        outputs, size = [first], len(first.data)
        with trio.move_on_at(self._written_at + self._exchange.settings.coalesce_ms / 1000):
            while size < MAX_GATHERED_BYTES:
                try:
                    item = items.receive_nowait()
                except trio.WouldBlock:
                    item = await items.receive()
                if isinstance(item, ExecEnd | SandkastenError):
                    return outputs, item
                if isinstance(item, Output):
                    outputs.append(item)
                    size += len(item.data)
        return outputs, None

    async def _write_ending(self, ending: _Ending) -> SandkastenError | None:
        if isinstance(ending, SandkastenError) and not self._exchange.is_started:
            return ending
        if isinstance(ending, ExecEnd) or not ending.retryable:  # else the text held back may go on in a retry
            await self._write_each(self._transcript.finish())
        await self._write(self._ending_event(ending))
        await self._exchange.finish()
        return None

    def _ending_event(self, ending: _Ending) -> bytes:
        if isinstance(ending, ExecEnd):
            fields = short_end(to_plain(DoneEvent.of(ending, cwd_truncated=None)))
            if not is_timeout_error(ending, self._format):
                return event("done", fields)
            ending = timeout_error(ending, fields)
        return error_event(ending)

    async def _start(self) -> None:
        if not self._exchange.is_started:
            await self._exchange.start(200, self._headers)
            self._put_off_ping()

    async def _write_each(self, events: Iterable[bytes]) -> None:
        for chunk in events:
            await self._write(chunk)

    async def _write(self, data: bytes) -> None:
        await self._start()  # a ping may be due while the command waits for its turn
        await self._exchange.write(data)
        self._written_at = trio.current_time()
        self._put_off_ping()

    def _put_off_ping(self) -> None:
        self._ping_at = trio.current_time() + self._exchange.settings.ping_interval_s
