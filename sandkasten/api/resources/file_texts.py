"""Text of files as editing tools want it: numbered lines, and edits of many files that are made together or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NewType

import attrs

from runner.wire.protocol import (
    MAX_EDITS,
    Edited,
    EditFiles,
    FileEntry,
    ListFiles,
    Listing,
    Unedited,
    Viewed,
    ViewFile,
)
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    Edits,
    FilePath,
    Line,
    add_kinds,
    bad_fields,
    bad_query,
    file_path,
    one_etag,
    read_query,
    read_request,
    spell_path,
)
from sandkasten.api.resources.file_entries import HERE, Placed, entries_at
from sandkasten.errors import Ambiguous, Conflict, PreconditionFailed, RunnerProtocolError

_FIRST = Line(1)
_MAX_TEXT_BYTES = 2 * 1024 * 1024
_MAX_PATHS = 1000
_DEPTH = 2
_EDIT_S = 600.0


Versions = NewType("Versions", dict[str, str])


def _versions(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_EDITS:
        raise ValueError(f"must be an object of at most {MAX_EDITS} ETags by path")
    return {file_path(path): str(one_etag(etag)) for path, etag in value.items()}


add_kinds({Versions: _versions})


@attrs.frozen(kw_only=True)
class ViewQuery(Placed):
    """The query of a view: lines `from` to `to`, counted from 1."""

    path: FilePath = HERE
    from_: Line = _FIRST
    to: Line | None = None


@attrs.frozen
class ViewBody(Body):
    """Numbered lines of a file, `first` to `last`, or paths below a directory. `lines` counts all lines of the file."""

    path: str
    type: str
    text: str
    first: int
    last: int
    lines: int
    truncated: bool
    etag: str


@attrs.frozen(kw_only=True)
class EditRequest(Placed):
    """Edits that are made in order, all or none; `dry_run`: none, but answered as if; `if_match`: versions of files, by
    the paths that the edits have."""

    edits: Edits
    dry_run: bool = False
    if_match: Versions = attrs.field(factory=lambda: Versions({}))


@attrs.frozen
class EditBody(Body):
    """An edit that was made; `offsets` are the lines by which the hunks of a patch were off."""

    path: str
    etag: str
    replacements: int
    diff: str | None
    offsets: Sequence[int]


@attrs.frozen
class EditsBody(Body):
    """Edits in their order."""

    files: Sequence[EditBody]


async def view(exchange: Exchange) -> Answer:
    """Show numbered lines of a file, or the files of a directory, two levels deep."""
    query = read_query(exchange, ViewQuery)
    if query.to is not None and query.to < query.from_:
        raise bad_query("to", "is before the first line")
    return json_answer(await exchange.until_disconnect(lambda: _view(exchange, query)))


async def _view(exchange: Exchange, query: ViewQuery) -> ViewBody:
    path = query.at(query.path)
    (entry,) = await entries_at(exchange, (path,), follow=True, user=query.user)
    if entry is not None and entry.kind == "directory":
        return await _view_directory(exchange, query, path, entry)
    return await _view_lines(exchange, query, path)


async def _view_directory(exchange: Exchange, query: ViewQuery, path: str, entry: FileEntry) -> ViewBody:
    request = ListFiles(path, limit=_MAX_PATHS, depth=_DEPTH, user=query.user)
    found = await exchange.files.ask(request, Listing)
    names = [f"{spell_path(each.name)}{'/' if each.kind == 'directory' else ''}\n" for each in found.entries]
    return ViewBody(
        spell_path(entry.path), "directory", "".join(names), 1, len(names), len(names), found.more, entry.etag
    )


async def _view_lines(exchange: Exchange, query: ViewQuery, path: str) -> ViewBody:
    request = ViewFile(path, query.from_, query.to, user=query.user)
    text = bytearray()
    async with exchange.files.stream(request) as stream:
        async for piece in stream:
            text += piece
            if len(text) > _MAX_TEXT_BYTES:
                raise RunnerProtocolError("more lines than were asked for")
        seen = await stream.answer(Viewed)
    lines = text.decode("utf-8", "replace").removesuffix("\n").split("\n") if text else []
    numbered = "".join(f"{number:6}\t{line}\n" for number, line in enumerate(lines, query.from_))
    return ViewBody(
        spell_path(seen.path), "file", numbered, query.from_, seen.last, seen.total, seen.truncated, seen.etag
    )


async def edit(exchange: Exchange) -> Answer:
    """Edit text files: all edits are made, or none."""
    request = await read_request(exchange, EditRequest, limit_bytes=exchange.settings.max_json_bytes)
    versions = {path: {"if_match": etag} for path, etag in request.if_match.items()}
    if versions.keys() - {each["path"] for each in request.edits}:
        raise bad_fields(if_match="has a path that no edit has")
    edits = [{**versions.get(each["path"], {}), **each, "path": request.at(each["path"])} for each in request.edits]
    # Not as ASCII, which would be three times as long as what came; names of any bytes hold surrogates.
    text = json.dumps(edits, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    answer = await exchange.until_disconnect(lambda: _edit(exchange, request, text))
    if isinstance(answer, Unedited):
        raise _refusal(answer, request.edits)
    if len(answer.files) != len(edits):
        raise RunnerProtocolError("as many edits as nobody asked for")
    return json_answer(
        EditsBody(
            [
                EditBody(spell_path(each["path"]), made.etag, made.replacements, made.diff, made.offsets)
                for each, made in zip(request.edits, answer.files, strict=True)
            ]
        )
    )


async def _edit(exchange: Exchange, request: EditRequest, edits: bytes) -> Edited | Unedited:
    wanted = EditFiles(request.dry_run, user=request.user)
    async with exchange.made_files(make=not request.dry_run).stream(wanted, patience_s=_EDIT_S) as stream:
        await stream.send(edits)
        answer: Edited | Unedited = await stream.end((Edited, Unedited))
        return answer


def _refusal(answer: Unedited, edits: Edits) -> Ambiguous | Conflict | PreconditionFailed:
    if not 0 <= answer.edit < len(edits):
        raise RunnerProtocolError("an edit that nobody asked for")
    told = {"edit": answer.edit, "path": spell_path(edits[answer.edit]["path"])}
    if answer.reason == "ambiguous":
        return Ambiguous("the text is there more than once", **told, lines=list(answer.lines))
    if answer.reason == "version":
        return PreconditionFailed("the file is of another version", **told, etag=answer.etag)
    return Conflict("the text that is to be edited is not there", **told)
