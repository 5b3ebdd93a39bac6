"""Files of a session, or of a workspace without one: read, written and uploaded in pieces.

Paths are handed on as they are: only the sandbox's own view of its file system decides what a path means.

An upload is multipart/form-data. A file is streamed into the sandbox if the field `path` came before it. A file that
comes first waits in a spool file on the daemon's disk, because the form's order is the client's choice.
`max_upload_bytes` bounds the whole body, so memory and disk are bounded whatever is sent.

Sources: RFC 7578 (multipart/form-data; §4.2 on file names), RFC 2046 §5.1.
"""

from __future__ import annotations

import base64
import contextlib
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Literal

import attrs
import trio
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Event, Field, File, MultipartDecoder, NeedData

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import JSON, Exchange
from sandkasten.api.http.json import Body, encode_json
from sandkasten.api.resources.fields import (
    MAX_PATH_BYTES,
    TOP,
    Base64,
    FileMode,
    NamedPath,
    ReadBytes,
    bad_query,
    named_path,
    path_in_workspace,
    read_query,
    read_request,
    spell_path,
)
from sandkasten.api.resources.file_entries import Placed
from sandkasten.errors import InvalidRequest
from sandkasten.supervisor import FileReader, FileWriter

if TYPE_CHECKING:
    from io import BufferedRandom

    from trio._file_io import AsyncIOWrapper  # the type of trio.wrap_file's value has no public name

_END = b'"}'
"""End of a body whose last member is a text."""


@attrs.frozen(kw_only=True)
class WriteRequest(Placed):
    """A file to write: a path, and the content as text or base64. `mode` is octal, as for `PUT …/fs/file`."""

    path: NamedPath
    mode: FileMode | None = None
    text: str | None = attrs.field(default=None, repr=False)
    content_base64: Base64 | None = attrs.field(default=None, repr=False)

    @property
    def content(self) -> bytes:
        """The bytes to write. Raises `InvalidRequest` unless exactly one of the two fields is there."""
        if (self.text is None) == (self.content_base64 is None):
            raise InvalidRequest("give the content once", text="exactly one of text and content_base64 is needed")
        return self.text.encode() if self.text is not None else bytes(self.content_base64 or b"")


@attrs.frozen(kw_only=True)
class ReadQuery(Placed):
    """The query of a file's content. `max_bytes` is at most `max_read_bytes` of the configuration."""

    path: NamedPath
    max_bytes: ReadBytes | None = None


@attrs.frozen
class WrittenBody(Body):
    """A file was written or removed; `path` is resolved."""

    ok: Literal[True]
    path: str


@attrs.frozen
class FileBody(Body):
    """A file's content, of which only the beginning if `truncated`; `path` is resolved."""

    path: str
    truncated: bool
    content_base64: str


@attrs.frozen
class UploadedBody(Body):
    """Files were written; `paths` are resolved, in the form's order. In a workspace they are relative to it."""

    ok: Literal[True]
    paths: Sequence[str]


async def write(exchange: Exchange) -> Answer:
    """Write a file, replacing one that is there; missing directories are made."""
    request = await read_request(exchange, WriteRequest, limit_bytes=exchange.settings.max_json_bytes)
    async with exchange.made_files().open_write(
        request.at(request.path), mode=request.mode, user=request.user
    ) as writer:
        await writer.send(request.content)
        path = await writer.commit()
    return json_answer(WrittenBody(True, spell_path(path)))


async def read(exchange: Exchange) -> None:
    """Read a file."""
    settings = exchange.settings
    query = read_query(exchange, ReadQuery)
    max_bytes = settings.default_read_bytes if query.max_bytes is None else query.max_bytes
    if max_bytes > settings.max_read_bytes:
        raise bad_query("max_bytes", f"must be between 1 and {settings.max_read_bytes}")
    await exchange.drop_body()
    async with exchange.files.open_read(query.at(query.path), max_bytes=max_bytes, user=query.user) as reader:
        await _send_file(exchange, reader)


async def _send_file(exchange: Exchange, reader: FileReader) -> None:
    await exchange.start(200, (JSON,))
    unsent = encode_json(FileBody(spell_path(reader.head.path), reader.head.truncated, "")).removesuffix(_END)
    rest = b""
    if exchange.method != "HEAD":
        async for piece in reader:
            if unsent:
                await exchange.write(unsent)
            # Only whole groups of three bytes: padding belongs to the end alone (RFC 4648 §4).
            data = rest + piece
            whole = len(data) - len(data) % 3
            unsent, rest = base64.b64encode(data[:whole]), data[whole:]
    await exchange.finish(unsent + base64.b64encode(rest) + _END)


# Uploads --------------------------------------------------------------------------------------------------------------

FORM = "multipart/form-data"
FILE_PARTS = frozenset({"file", "files"})
MAX_PARTS = 256
MAX_NAME_BYTES = 255
_MAX_FIELD_CHARS = 64
_UNKNOWN = "is unknown; a form has file, files and path"
DECODER_BYTES = 256 * 1024
"""Bound on what the decoder holds: one received chunk and the undecided rest of the one before."""

SPOOL_READ_BYTES = 64 * 1024


async def upload(exchange: Exchange) -> Answer:
    """Upload files as a form: parts `file` or `files`, and the field `path`, their directory."""
    async with contextlib.AsyncExitStack() as stack:
        paths = await _Upload(exchange, stack).run()
    if exchange.workspace_id:
        paths = [path.removeprefix(f"{TOP}/") for path in paths]
    return json_answer(UploadedBody(True, paths))


def safe_name(filename: str) -> str:
    """Return the last component of a client's file name, whatever system the name comes from.

    Raises:
        InvalidRequest: the rest is no usable name.
    """
    name = filename.replace("\\", "/").rpartition("/")[2]
    if name in ("", ".", "..") or "\0" in name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise InvalidRequest("the form has bad fields", file="has no usable file name")
    return name


class Parts:
    """The form as decoder events, pulled from the request's body of up to `limit_bytes`."""

    def __init__(self, exchange: Exchange, *, limit_bytes: int) -> None:
        media_type, options = parse_options_header(exchange.header(b"content-type") or "")
        boundary = options.get("boundary", "")
        if media_type != FORM or not boundary or len(boundary) > 200 or not boundary.isascii():
            raise InvalidRequest(f"send the files as {FORM}", content_type="must name a boundary")
        self._exchange = exchange
        self._limit_bytes = limit_bytes
        self._decoder = MultipartDecoder(boundary.encode(), DECODER_BYTES, max_parts=MAX_PARTS)

    async def next(self) -> Event:
        """Return the next event, `Epilogue` last.

        Raises:
            InvalidRequest: the body is no form, or has too many parts or too long a head.
            TooLarge, InvalidRequest, ClientGone: as `Exchange.read_chunk`.
        """
        while True:
            try:
                event = self._decoder.next_event()
                if not isinstance(event, NeedData):
                    return event
                chunk = await self._exchange.read_chunk(limit_bytes=self._limit_bytes)
                self._decoder.receive_data(chunk or None)
            except (ValueError, RequestEntityTooLarge):
                raise InvalidRequest("the form can't be read", body=f"is not valid {FORM}") from None

    async def data(self) -> Data:
        """Return the next piece of the current part; `more_data` is false on its last one."""
        event = await self.next()
        assert isinstance(event, Data)  # the decoder gives each part's head exactly one run of data
        return event


class _Upload:
    """The storing of one form. `stack` closes the spool file."""

    def __init__(self, exchange: Exchange, stack: contextlib.AsyncExitStack) -> None:
        self._exchange = exchange
        self._stack = stack
        self._parts = Parts(exchange, limit_bytes=exchange.settings.max_upload_bytes)
        self._directory: str | None = None
        self._spool: AsyncIOWrapper[BufferedRandom] | None = None
        self._waiting: list[tuple[str, int]] = []  # name and size, in the spool's order
        self._paths: list[str] = []

    async def run(self) -> list[str]:
        """Store every file and return their resolved paths, in the form's order."""
        while not isinstance(event := await self._parts.next(), Epilogue):
            if isinstance(event, File) and event.name in FILE_PARTS:
                await self._take_file(safe_name(event.filename))
            elif isinstance(event, Field) and event.name in FILE_PARTS:
                raise InvalidRequest("the form has bad fields", **{event.name: "has no file name"})
            elif isinstance(event, Field) and event.name == "path":
                self._directory = await self._read_directory()
                await self._store_waiting()
            elif isinstance(event, Field | File):
                raise InvalidRequest("the form has bad fields", **{str(event.name)[:_MAX_FIELD_CHARS]: _UNKNOWN})
        await self._store_waiting()
        if not self._paths:
            raise InvalidRequest("the form has no file", file="is required")
        return self._paths

    async def _read_directory(self) -> str:
        text = bytearray()
        is_open = True
        while is_open:
            data = await self._parts.data()
            text += data.data
            is_open = data.more_data
            if len(text) > MAX_PATH_BYTES:
                raise InvalidRequest("the form has bad fields", path=f"must have at most {MAX_PATH_BYTES} bytes")
        try:
            return (path_in_workspace if self._exchange.workspace_id else named_path)(text.decode())
        except ValueError as error:
            raise InvalidRequest("the form has bad fields", path=str(error)) from None

    async def _take_file(self, name: str) -> None:
        if self._directory is None:
            await self._spool_file(name)
            return
        async with self._open(name) as writer:
            is_open = True
            while is_open:
                data = await self._parts.data()
                is_open = await writer.send(data.data) and data.more_data
            self._paths.append(spell_path(await writer.commit()))

    async def _spool_file(self, name: str) -> None:
        if self._spool is None:
            file = tempfile.TemporaryFile(dir=self._exchange.settings.spool_dir)  # noqa: SIM115  # the stack closes it
            self._spool = trio.wrap_file(self._stack.enter_context(file))
        size, is_open = 0, True
        while is_open:
            data = await self._parts.data()
            size += len(data.data)
            await self._spool.write(data.data)
            is_open = data.more_data
        self._waiting.append((name, size))

    async def _store_waiting(self) -> None:
        if self._spool is None:
            return
        await self._spool.seek(0)
        for name, size in self._waiting:
            async with self._open(name) as writer:
                while size:
                    data = await self._spool.read(min(size, SPOOL_READ_BYTES))
                    await writer.send(data)
                    size -= len(data)
                self._paths.append(spell_path(await writer.commit()))
        self._waiting.clear()
        self._spool = None

    def _open(self, name: str) -> AbstractAsyncContextManager[FileWriter]:
        directory = self._directory or TOP
        return self._exchange.made_files().open_write(f"{directory.rstrip('/')}/{name}")
