"""A run as server-sent events, over raw ASGI: chunks, then `done` or `error`, and pings when nothing is written.

Owns the time: the first output goes out at once, later output is gathered for `coalesce_ms`. Where the run comes from
and what becomes of it when the client leaves is its caller's business. Events are spelled in `sse.py`.

A run's output as chunk events that can be resumed exactly, whatever was cut between two pieces. Sans-I/O.

Every chunk's id is a position: a client that comes back with it gets what follows, nothing twice and nothing missing,
although a piece becomes several events, and a character, line end or escape sequence may begin in one piece and end in
another one. Mostly a position is just the number of the last piece that was handed over whole.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import trio

from sandkasten.api.http.errors import Headers, error_body
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.sse import PING, SSE_HEADERS, base64_literals, chunk_event, event, short_end, text_literals
from sandkasten.api.resources.run_views import end_view, is_timeout_error, timeout_error
from sandkasten.api.resources.schemas import OutputFormat
from sandkasten.api.resources.text import OutputText
from sandkasten.model import ExecEnd, Output, Stream
from sandkasten.model.errors import SandkastenError
from sandkasten.supervisor import ExecStream

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


QUEUED_PIECES = 8
"""Output pieces (64 KiB at most) between a run and a slow reader; then the run's pipe fills up."""

MAX_GATHERED_BYTES = 64 * 1024

OpenRun = Callable[[], AbstractAsyncContextManager[ExecStream]]


class _Entered:
    """The command has its turn in the shell: the answer may begin."""


_Ending = ExecEnd | SandkastenError
_Item = _Entered | Output | _Ending


class RunEvents:
    """One answer with the events of one run."""

    def __init__(
        self,
        exchange: Exchange,
        open_run: OpenRun,
        transcript: Transcript,
        output_format: OutputFormat,
        *,
        headers: Headers = (),
    ) -> None:
        self._exchange = exchange
        self._open_run = open_run
        self._transcript = transcript
        self._format = output_format
        self._headers = (*SSE_HEADERS, *headers)
        self._written_at = -math.inf
        self._ping_at = math.inf

    async def run(self) -> None:
        """Answer the request. Raises what went wrong before the answer began."""
        if self._exchange.method == "HEAD":
            await self._answer_head()
            return
        self._put_off_ping()
        async with trio.open_nursery() as nursery:
            sender, items = trio.open_memory_channel[_Item](QUEUED_PIECES)
            nursery.start_soon(self._produce, sender)
            async with items:
                failure = await self._write_all(items)
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
                        await items.send(output)
                    await items.send(await command.wait_end())
            except SandkastenError as error:
                await items.send(error)

    async def _write_all(self, items: trio.MemoryReceiveChannel[_Item]) -> SandkastenError | None:
        """Write events until the run ended; return an error that came before the answer began."""
        while True:
            item = await self._next(items)
            if item is None:
                await self._write(PING)
            elif isinstance(item, _Entered):
                await self._start()
            elif isinstance(item, Output):
                outputs, ending = await self._gather(item, items)
                await self._write_each(self._transcript.feed(outputs))
                if ending is not None:
                    return await self._write_ending(ending)
            else:
                return await self._write_ending(item)

    async def _next(self, items: trio.MemoryReceiveChannel[_Item]) -> _Item | None:
        """Return what comes next, None when it is time for a ping, also while nothing comes of what does."""
        with trio.move_on_at(self._ping_at):
            return await items.receive()
        return None

    async def _gather(
        self, first: Output, items: trio.MemoryReceiveChannel[_Item]
    ) -> tuple[list[Output], _Ending | None]:
        """Return `first` and what follows until `coalesce_ms` after the last write, with the ending if it is near."""
        outputs, size = [first], len(first.data)
        with trio.move_on_at(self._written_at + self._exchange.settings.coalesce_ms / 1000):
            while size < MAX_GATHERED_BYTES:
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
        if isinstance(ending, ExecEnd) or not ending.retryable:  # else what is held back may go on for who comes again
            await self._write_each(self._transcript.finish())
        await self._write(self._ending_event(ending))
        await self._exchange.finish()
        return None

    def _ending_event(self, ending: _Ending) -> bytes:
        if isinstance(ending, ExecEnd):
            view = short_end(end_view(ending))
            if not is_timeout_error(ending, self._format):
                return event("done", view)
            ending = timeout_error(ending, view)
        body = error_body(ending)
        return event("error", body | {"error": body["message"]})

    async def _start(self) -> None:
        if not self._exchange.is_started:
            await self._exchange.start(200, self._headers)
            self._put_off_ping()

    async def _write_each(self, events: Iterable[bytes]) -> None:
        for chunk in events:
            await self._write(chunk)

    async def _write(self, data: bytes) -> None:
        await self._start()  # a ping may come while the command still waits for its turn
        await self._exchange.write(data)
        self._written_at = trio.current_time()
        self._put_off_ping()

    def _put_off_ping(self) -> None:
        self._ping_at = trio.current_time() + self._exchange.settings.ping_interval_s
