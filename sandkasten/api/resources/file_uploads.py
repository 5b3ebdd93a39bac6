"""Files that come in several requests: an upload is begun, appended to, looked at, and committed or dropped.

What has come of it lies beside the file in the sandbox (`runner/files/uploads.py`), so an upload outlives a connection
that breaks and a daemon that is restarted. The file is replaced in one step, by the commit. An upload that was not
committed within a day is removed.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar

import attrs

from runner.wire.protocol import (
    AppendUpload,
    CommitUpload,
    Done,
    DropUpload,
    FilePut,
    LookUpload,
    Unmatched,
    UploadState,
)
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    FileMode,
    FilePath,
    Offset,
    OffsetText,
    Sha256,
    read_head,
    read_request,
    spell_path,
)
from sandkasten.api.resources.file_contents import ANY_SIZE, WriteHead, put_answer, receive_into
from sandkasten.api.resources.file_entries import Placed
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.errors import Conflict, TooLarge
from sandkasten.model.workspace import UPLOAD_S, WRITE_S, Upload, UploadSpec

OFFSET_HEADER = "upload-offset"


@attrs.frozen(kw_only=True)
class UploadRequest(Placed):
    """A file to upload. `size` in bytes and `sha256` in hexadecimal digits are compared by the commit; `mode` is octal,
    as for a write."""

    path: FilePath
    size: Offset | None = None
    sha256: Sha256 | None = None
    mode: FileMode | None = None


@attrs.frozen
class CommitRequest:
    """The end of an upload, all of which was said at its begin."""

    strict: ClassVar[bool] = True


@attrs.frozen
class AppendHead:
    """The number of bytes that an upload has before those of the body."""

    upload_offset: OffsetText


@attrs.frozen
class UploadBody(Body):
    """An upload, of which `offset` bytes have come; `path` is resolved."""

    gives: ClassVar[tuple[str, ...]] = (OFFSET_HEADER,)
    upload_id: str
    path: str
    offset: int
    size: int | None
    expires_at: datetime


async def begin(exchange: Exchange) -> Answer:
    """Begin an upload; missing directories are made."""
    request = await read_request(exchange, UploadRequest)
    path = request.at(request.path)
    spec = UploadSpec(path, request.size, request.sha256, request.mode, request.user)
    return _answer(await exchange.made_files().begin_upload(spec), 0, status=201)


async def append(exchange: Exchange) -> Answer:
    """Append the body to an upload that has `Upload-Offset` bytes."""
    offset = int(read_head(exchange, AppendHead).upload_offset)
    upload = await _upload(exchange)
    size = upload.spec.size_bytes
    request = AppendUpload(
        upload.spec.path, upload.id, offset, ANY_SIZE if size is None else size, user=upload.spec.user
    )
    async with exchange.files.stream(request, patience_s=WRITE_S) as stream:
        await receive_into(exchange, stream)
        state: UploadState = await stream.end(UploadState)
    if state.problem == "offset":
        raise Conflict("the upload has another size", offset=state.size_bytes)
    if state.problem:
        raise TooLarge("more came than the upload has room for", size=size, offset=state.size_bytes)
    return _answer(upload, state.size_bytes)


async def look(exchange: Exchange) -> Answer:
    """Read how much of an upload has come."""
    upload = await _upload(exchange)
    state = await exchange.files.ask(LookUpload(upload.spec.path, upload.id, user=upload.spec.user), UploadState)
    return _answer(upload, state.size_bytes)


async def commit(exchange: Exchange) -> Answer:
    """Put an upload in place of the file, if it is whole; the conditions are those of a write."""
    conditions = read_head(exchange, WriteHead)
    await read_request(exchange, CommitRequest)
    upload = await _upload(exchange)
    spec = upload.spec
    request = CommitUpload(
        spec.path,
        upload.id,
        spec.size_bytes,
        spec.sha256 or "",
        spec.mode,
        if_match=conditions.if_match,
        create_only=conditions.if_none_match is not None,
        user=spec.user,
    )
    done: FilePut | Unmatched | UploadState = await exchange.until_disconnect(
        lambda: exchange.files.ask(request, (FilePut, Unmatched, UploadState), patience_s=WRITE_S)
    )
    if isinstance(done, UploadState):
        expected = {"size": spec.size_bytes} if done.problem == "size" else {"sha256": spec.sha256}
        raise Conflict(f"the {done.problem} is not the announced one", offset=done.size_bytes, **expected)
    answer = put_answer(done)
    await exchange.files.end_upload(upload.id)
    return answer


async def drop(exchange: Exchange) -> Answer:
    """Give an upload up."""
    upload = await _upload(exchange)
    await exchange.files.ask(DropUpload(upload.spec.path, upload.id, user=upload.spec.user), Done)
    await exchange.files.end_upload(upload.id)
    return json_answer(DoneBody())


async def _upload(exchange: Exchange) -> Upload:
    return await exchange.files.upload(exchange.params["upload_id"])


def _answer(upload: Upload, offset: int, *, status: int = 200) -> Answer:
    spec = upload.spec
    body = UploadBody(
        upload.id, spell_path(spec.path), offset, spec.size_bytes, upload.begun_at + timedelta(seconds=UPLOAD_S)
    )
    return json_answer(body, status=status, headers=((OFFSET_HEADER, str(offset)),))
