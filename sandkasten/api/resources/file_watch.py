"""Changes of files as server-sent events, and the parts that the WebSocket shares.

The first event, `ready`, comes when every change from then on is told. A client that reads too slowly is told
`overflow`, since the kernel's queue inside is the only one. The stream ends when what is watched is gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Literal, get_args

import attrs

from runner.wire.protocol import ChangeKind, FileChange, WatchFiles, Watching
from sandkasten.api.http.exchange import AsgiExchange, Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.sse import PING, SSE_HEADERS, error_event, event
from sandkasten.api.resources.fields import FilePath, read_query, spell_path
from sandkasten.api.resources.file_entries import HERE, Placed
from sandkasten.api.resources.file_search import messages
from sandkasten.errors import SandkastenError


@attrs.frozen(kw_only=True)
class WatchQuery(Placed):
    """The query of a watch; with `recursive` of everything below the directory."""

    path: FilePath = HERE
    recursive: bool = False


@attrs.frozen
class ChangeBody(Body):
    """A change of a file; `ready`: everything from now on is told. `to` is the new name of a file that was renamed."""

    type: Literal["ready"] | ChangeKind
    path: str
    to: str | None = None


CHANGES: Mapping[str, type[Body]] = dict.fromkeys(("ready", *get_args(ChangeKind)), ChangeBody)
"""The messages of a watch, by their types."""


async def watch(exchange: Exchange) -> None:
    """Follow the changes of a file, or of the files in a directory, as server-sent events."""
    query = read_query(exchange, WatchQuery)
    await exchange.drop_body()
    await exchange.until_disconnect(lambda: _stream(exchange, query))


async def _stream(exchange: Exchange, query: WatchQuery) -> None:
    try:
        async with aclosing(changes(exchange, query)) as batches:
            async for batch in batches:
                if not exchange.is_started:
                    await exchange.start(200, SSE_HEADERS)
                    if exchange.method == "HEAD":
                        break
                await exchange.write(b"".join(event(each.type, to_plain(each)) for each in batch) or PING)
        await exchange.finish()
    except SandkastenError as error:
        if not exchange.is_started:
            raise
        await exchange.write(error_event(error))
        await exchange.finish()


async def changes(exchange: AsgiExchange, query: WatchQuery) -> AsyncGenerator[list[ChangeBody], None]:
    """Yield what a client is told, `ready` first, and nothing in times of silence."""
    silence_ms = int(exchange.settings.ping_interval_s * 1000)
    path = query.at(query.path)
    request = WatchFiles(path, query.recursive, silence_ms, user=query.user)
    async with exchange.files.stream(request) as stream:
        head = await stream.head(Watching)
        yield [ChangeBody("ready", spell_path(head.path))]
        async with aclosing(messages(stream, FileChange)) as batches:
            async for batch in batches:
                yield [ChangeBody(each.kind, spell_path(each.path), spell_path(each.to) or None) for each in batch]
