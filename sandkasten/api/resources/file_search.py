"""Files found by a pattern of their paths, and lines of files by the text they hold.

A search is streamed: one JSON object a line for each match, and the totals last. An error after the first line is the
last line instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import attrs

from runner.wire.protocol import ANSWERS, FileMatch, FoundFiles, GlobFiles, ProtocolError, Searched, SearchFiles
from sandkasten.api.http.errors import Answer, ErrorBody, error_body, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, encode_ascii
from sandkasten.api.resources.fields import (
    MAX_FILES,
    ContextLines,
    FilePath,
    FilesLimit,
    Glob,
    MatchLimit,
    NameCursor,
    Pattern,
    SearchedBytes,
    encode_cursor,
    read_request,
    spell_path,
)
from sandkasten.api.resources.file_entries import HERE, Placed
from sandkasten.errors import RunnerProtocolError, SandkastenError
from sandkasten.supervisor import FileStream

T = TypeVar("T")

NDJSON = "application/x-ndjson"
_ANY = Glob("")
_ALL = FilesLimit(MAX_FILES)
_MATCHES = MatchLimit(1000)
_NO_LINES = ContextLines(0)
_FILE_BYTES = SearchedBytes(16 * 1024 * 1024)
_MAX_LINE_BYTES = 256 * 1024


@attrs.frozen(kw_only=True)
class GlobRequest(Placed):
    """A pattern of paths below a directory."""

    pattern: Glob
    path: FilePath = HERE
    limit: FilesLimit = _ALL
    cursor: NameCursor | None = None


@attrs.frozen
class GlobBody(Body):
    """Paths in the order of their names' bytes; without `next_cursor` the last ones. There may be a cursor and fewer
    paths than asked for: the time was over."""

    path: str
    paths: Sequence[str]
    next_cursor: str | None = None


@attrs.frozen(kw_only=True)
class SearchRequest(Placed):
    """A text, with `regex` a regular expression, that lines of files are searched for."""

    pattern: Pattern
    path: FilePath = HERE
    regex: bool = False
    case: bool = True
    glob: Glob = _ANY
    context: ContextLines = _NO_LINES
    max_matches: MatchLimit = _MATCHES
    max_file_bytes: SearchedBytes = _FILE_BYTES
    everything: bool = False


@attrs.frozen
class MatchBody(Body):
    """A line that holds the text."""

    path: str
    line: int
    column: int
    text: str
    before: Sequence[str]
    after: Sequence[str]
    cut: bool


@attrs.frozen
class TotalsBody(Body):
    """Counts of a search."""

    matches: int
    files: int
    searched: int
    skipped: int
    truncated: bool
    timed_out: bool


@attrs.frozen
class SearchedBody(Body):
    """The last line of a search."""

    totals: TotalsBody


LINES: Mapping[str, type[Body]] = {"match": MatchBody, "totals": SearchedBody, "error": ErrorBody}
"""Kinds of lines of a search."""


async def glob(exchange: Exchange) -> Answer:
    """List the paths below a directory that a pattern fits."""
    wanted = await read_request(exchange, GlobRequest)
    request = GlobFiles(
        wanted.at(wanted.path),
        wanted.pattern,
        after=wanted.cursor or "",
        limit=wanted.limit,
        user=wanted.user,
    )
    found = await exchange.until_disconnect(lambda: exchange.files.ask(request, FoundFiles))
    paths = [spell_path(f"{found.path.rstrip('/')}/{path}") for path in found.paths]
    return json_answer(GlobBody(spell_path(found.path), paths, encode_cursor(found.after) if found.after else None))


async def search(exchange: Exchange) -> None:
    """Find lines of files; stream them, and the totals last."""
    wanted = await read_request(exchange, SearchRequest)
    request = SearchFiles(
        wanted.at(wanted.path),
        wanted.pattern,
        wanted.regex,
        wanted.case,
        wanted.glob,
        wanted.context,
        wanted.max_matches,
        wanted.max_file_bytes,
        wanted.everything,
        user=wanted.user,
    )
    await exchange.until_disconnect(lambda: _search(exchange, request))


async def _search(exchange: Exchange, request: SearchFiles) -> None:
    try:
        async with exchange.files.stream(request) as stream:
            async with aclosing(messages(stream, FileMatch)) as found:
                async for lines in found:
                    await _start(exchange)
                    bodies = [MatchBody.take(each, path=spell_path(each.path)) for each in lines]
                    await exchange.write(b"".join(map(_line, bodies)))
            totals = await stream.answer(Searched)
        await _start(exchange)
        await exchange.finish(_line(SearchedBody(TotalsBody.take(totals))))
    except SandkastenError as error:
        if not exchange.is_started:
            raise
        await exchange.finish(_line(error_body(error)))


async def _start(exchange: Exchange) -> None:
    if not exchange.is_started:
        await exchange.start(200, (("content-type", NDJSON),))


def _line(body: Body) -> bytes:
    return encode_ascii(body) + b"\n"


async def messages(stream: FileStream, expected: type[T]) -> AsyncGenerator[Sequence[T], None]:
    """Yield the messages in the lines of an answer's content, as many at once as have come; none for an empty line.

    Raises:
        RunnerProtocolError: a line is none, or too long.
    """
    rest = b""
    async for piece in stream:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise RunnerProtocolError("a line without an end")
        if lines:
            yield [_decoded(line, expected) for line in lines if line]


def _decoded(line: bytes, expected: type[T]) -> T:
    try:
        message = ANSWERS.decode(line)
    except ProtocolError as error:
        raise RunnerProtocolError(str(error)) from None
    if not isinstance(message, expected):
        raise RunnerProtocolError(f"a line of another kind than {expected.__name__}")
    return message
