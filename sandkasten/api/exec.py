"""Run a command: one answer at its end, or a stream of events. Both raw ASGI: no time limit but the command's own.

A client that leaves cancels its command. Events are spelled in `sse.py`, results in `execview.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import trio

from sandkasten.api.errors import error_body, json_answer
from sandkasten.api.exchange import Exchange
from sandkasten.api.execview import end_view, is_timeout_error, output_view, timeout_error
from sandkasten.api.schemas import ExecRequest, parse
from sandkasten.api.sse import PING, SSE_HEADERS, base64_events, event, text_events
from sandkasten.api.text import OutputText
from sandkasten.errors import SandkastenError
from sandkasten.model import ExecEnd, ExecSpec, Output, Stream

QUEUED_PIECES = 8
"""Output pieces (64 KiB at most) between a command and a slow reader; then the command's pipe fills up."""

MAX_GATHERED_BYTES = 64 * 1024


async def run(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/exec"""
    request, spec = await _read(exchange)
    work = functools.partial(exchange.supervisor.exec, exchange.session_id, spec)
    result = await exchange.until_disconnect(work)
    view = end_view(result.end) | await output_view(result, request)
    if is_timeout_error(result.end, request):
        raise timeout_error(result.end, view)
    await exchange.answer(json_answer(view))


async def stream(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/exec/stream"""
    request, spec = await _read(exchange)
    await exchange.until_disconnect(_EventStream(exchange, request, spec).run)


async def _read(exchange: Exchange) -> tuple[ExecRequest, ExecSpec]:
    request = parse(await exchange.read_json_body(), ExecRequest)
    settings = exchange.settings
    spec = request.to_spec(max_command_bytes=settings.max_command_bytes, max_timeout_ms=settings.max_exec_timeout_ms)
    return request, spec


class _Entered:
    """The command has its turn in the shell: the answer may begin."""


_Ending = ExecEnd | SandkastenError
_Item = _Entered | Output | _Ending


class _EventStream:
    """A command's output as events: the first at once, later ones gathered for `coalesce_ms`, pings in silence."""

    def __init__(self, exchange: Exchange, request: ExecRequest, spec: ExecSpec) -> None:
        self._exchange = exchange
        self._request = request
        self._spec = spec
        self._texts = {kind: OutputText(is_raw=bool(request.raw_output)) for kind in Stream}
        self._written_at = 0.0

    async def run(self) -> None:
        """Answer the request. Raises what went wrong before the answer began."""
        async with trio.open_nursery() as nursery:
            sender, items = trio.open_memory_channel[_Item](QUEUED_PIECES)
            nursery.start_soon(self._produce, sender)
            async with items:
                failure = await self._write_all(items)
        if failure is not None:
            raise failure

    async def _produce(self, items: trio.MemorySendChannel[_Item]) -> None:
        async with items:
            try:
                async with self._exchange.supervisor.open_exec(self._exchange.session_id, self._spec) as command:
                    await items.send(_Entered())
                    async for output in command:
                        await items.send(output)
                    await items.send(await command.wait_end())
            except SandkastenError as error:
                await items.send(error)

    async def _write_all(self, items: trio.MemoryReceiveChannel[_Item]) -> SandkastenError | None:
        """Write events until the command ended; return an error that came before the answer began."""
        while True:
            item = await self._next(items)
            if item is None:
                await self._write(PING)
            elif isinstance(item, _Entered):
                await self._start()
            elif isinstance(item, Output):
                outputs, ending = await self._gather(item, items)
                await self._write_outputs(outputs)
                if ending is not None:
                    return await self._write_ending(ending)
            else:
                return await self._write_ending(item)

    async def _next(self, items: trio.MemoryReceiveChannel[_Item]) -> _Item | None:
        with trio.move_on_after(self._exchange.settings.ping_interval_s):
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

    async def _write_outputs(self, outputs: list[Output]) -> None:
        for kind, run in itertools.groupby(outputs, key=lambda output: output.stream):
            pieces = list(run)
            data = b"".join(piece.data for piece in pieces)
            if self._request.is_base64:
                await self._write_each(base64_events(kind, data, pieces[-1].sequence))
            else:
                await self._write_each(text_events(kind, self._texts[kind].feed(data), pieces[-1].sequence))

    async def _write_ending(self, ending: _Ending) -> SandkastenError | None:
        if isinstance(ending, SandkastenError) and not self._exchange.is_started:
            return ending
        if not self._request.is_base64:
            for kind in Stream:  # what was held back: no new piece, so no new number
                await self._write_each(text_events(kind, self._texts[kind].feed(b"", is_last=True), None))
        await self._write(self._ending_event(ending))
        await self._exchange.finish()
        return None

    def _ending_event(self, ending: _Ending) -> bytes:
        if isinstance(ending, ExecEnd):
            view = end_view(ending)
            if not is_timeout_error(ending, self._request):
                return event("done", view)
            ending = timeout_error(ending, view)
        body = error_body(ending)
        return event("error", body | {"error": body["message"]})

    async def _start(self) -> None:
        if not self._exchange.is_started:
            await self._exchange.start(200, SSE_HEADERS)

    async def _write_each(self, events: Iterable[bytes]) -> None:
        for chunk in events:
            await self._write(chunk)

    async def _write(self, data: bytes) -> None:
        await self._start()  # a ping may come while the command still waits for its turn
        await self._exchange.write(data)
        self._written_at = trio.current_time()
