"""A run as server-sent events, over raw ASGI: chunks, then `done` or `error`, and pings when nothing is written.

Owns the time: the first output goes out at once, later output is gathered for `coalesce_ms`. Where the run comes from
and what becomes of it when the client leaves is its caller's business. Events are spelled in `sse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

import trio

from sandkasten.api.http.errors import Headers, error_body
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.sse import PING, SSE_HEADERS, event, short_end
from sandkasten.api.resources.run_views import end_view, is_timeout_error, timeout_error
from sandkasten.api.resources.schemas import OutputFormat
from sandkasten.api.resources.transcript import Transcript
from sandkasten.model import ExecEnd, Output
from sandkasten.model.errors import SandkastenError
from sandkasten.supervisor import ExecStream

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
