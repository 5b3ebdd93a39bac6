"""Files of a session or of a workspace: contents of any size as streams, directories, archives, search and edits.

Contents are never held whole unless the caller asks for them so: `write` sends a local file in pieces, `copy_in` and
`copy_out` move directories as archives that are made and unpacked as they go.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, cast

from sandkasten import errors
from sandkasten.sdk import waiting
from sandkasten.sdk.archives import MODE_BITS, PIECE_BYTES, pack, unpack
from sandkasten.sdk.streams import ResumedEvents
from sandkasten.sdk.transport import Endpoint, HttpStream, Lost, StreamRecovery, Transport
from sandkasten.sdk.types import (
    FileEdit,
    FileInfo,
    FileView,
    Match,
    Matches,
    UnpackedArchive,
    WatchedChange,
    WrittenFile,
)
from sandkasten.sdk.wire import HttpCall, given, new_id

MAX_PAGE = 1000
"""Most entries that the server puts into one answer."""
_PARTIAL = 206

Progress = Callable[[int, int | None], object]
"""Called with the bytes moved so far and their number in all, None if that is not known."""

Source = str | bytes | Path | BinaryIO | AsyncIterator[bytes]
"""Content to write: text, bytes, the path of a local file, an open file, or pieces that are made as they are taken."""


class FileStream:
    """A file that is being read: `async with files.open(path) as stream: async for piece in stream`.

    `size` is in bytes, None if the server does not tell; `etag` is the version that is read.
    """

    def __init__(
        self, transport: Transport, request: HttpCall, progress: Progress | None = None, *, offset: int | None = None
    ) -> None:
        """Internal: use `Files.open`. `offset` is where the file is read from, None if it can't be read on."""
        self._transport, self._request, self._progress, self._offset = transport, request, progress, offset
        self._recovery = StreamRecovery(transport.timeout)
        self._moved = 0
        self._reply: HttpStream | None = None
        self.size: int | None = None
        self.etag = ""

    async def __aenter__(self) -> Self:
        self._reply = await self._transport.open(self._request)
        length = self._reply.headers.get("content-length")
        self.size = None if length is None else int(length)
        self.etag = self._reply.headers.get("etag", "")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._reply is not None:
            await self._reply.aclose()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece. Where a connection is lost, the file is read on, if nobody has changed it.

        Raises:
            ConnectionFailed: the connection was lost, and the file can't be read on.
        """
        assert self._reply is not None, "a file is opened by `async with`"
        while True:
            try:
                data = await self._reply.read()
                break
            except Lost as error:
                if self._moved == self.size:
                    raise StopAsyncIteration from None
                await self._read_on(error)
        if not data:
            raise StopAsyncIteration
        self._moved += len(data)
        self._recovery.progress()
        if self._progress is not None:
            self._progress(self._moved, self.size)
        return data

    async def _read_on(self, error: Lost) -> None:
        """Connect anew behind what has come. Raises the error if that is not possible."""
        if self._offset is None or self.size is None or not self.etag or self.etag.startswith("W/"):
            raise error
        assert self._reply is not None
        await self._reply.aclose()
        await self._recovery.wait(error)
        rest = f"bytes={self._offset + self._moved}-{self._offset + self.size - 1}"
        self._request.headers |= {"range": rest, "if-range": self.etag}
        self._reply = await self._transport.open(self._request)
        if self._reply.status != _PARTIAL:
            raise error


class WatchedChanges:
    """Changes of watched files: `async with files.watch(path) as changes: async for change in changes`.

    The first change is `ready`: all that happens from then on is told. After a lost connection, too, `ready` comes
    first, and what happened between is not told.
    """

    def __init__(self, transport: Transport, request: HttpCall) -> None:
        """Internal: use `Files.watch`."""
        self._stream = ResumedEvents(transport, request, may_poll=False)  # what happens between two is not told

    async def __aenter__(self) -> Self:
        await self._stream.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> AsyncIterator[WatchedChange]:
        return self

    async def __anext__(self) -> WatchedChange:
        return await self._stream.take(lambda event: WatchedChange.take(event.value))


class Files:
    """Files of one session or workspace.

    Relative paths begin at `/workspace`, or at `cwd` where a method takes one. `user` is the user as whom a file is
    reached, by default the session's; only `root` may change owners.
    """

    def __init__(self, owner: Endpoint) -> None:
        """Internal: use `Session.files` or `Workspace.files`."""
        self._endpoint = owner.below("/fs")

    # Contents ---------------------------------------------------------------------------------------------------------

    def open(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None, cwd: str | None = None
    ) -> FileStream:
        """Return a file to be read in pieces, or `length` bytes of it from `offset` on.

        Raises (when it is opened):
            FileNotFound, IsADirectory, NotAFile, PermissionDenied: as the names say.
            RangeNotSatisfiable: `offset` is behind the end.
        """
        request = self._reading(path, offset, length, user, cwd)
        return FileStream(self._endpoint.transport, request, offset=offset)

    def _reading(self, path: str, offset: int, length: int | None, user: str | None, cwd: str | None) -> HttpCall:
        end = "" if length is None else str(offset + length - 1)
        headers = {"range": f"bytes={offset}-{end}"} if offset or length is not None else {}
        query = given(path=path, user=user, cwd=cwd)
        return self._endpoint.call("GET", "/file", query=query, headers=headers, patience_s=None, is_transfer=True)

    async def read_bytes(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None, cwd: str | None = None
    ) -> bytes:
        """Return the content of a file, or a part of it. Errors as of `open`."""
        if length == 0:
            return b""
        return (await self._endpoint.transport.send(self._reading(path, offset, length, user, cwd))).body

    async def read_text(
        self, path: str, *, encoding: str = "utf-8", user: str | None = None, cwd: str | None = None
    ) -> str:
        """Return the content of a file as text. Raises `UnicodeDecodeError`, and the errors of `open`."""
        return (await self.read_bytes(path, user=user, cwd=cwd)).decode(encoding)

    async def write(
        self,
        path: str,
        content: Source,
        *,
        mode: int | None = None,
        if_match: str | None = None,
        new: bool = False,
        user: str | None = None,
        cwd: str | None = None,
        progress: Progress | None = None,
    ) -> WrittenFile:
        """Write a file of any size; one that is there is replaced in one step when all has come.

        Args:
            content: text, bytes, a `Path` of a local file, an open binary file, or an iterator of bytes.
            mode: permission bits, such as 0o755; by default those of the file that is there, or 0644.
            if_match: write only if the file has this `etag`.
            new: write only if there is no file.

        The call is repeated when the connection is lost, if the content can be had again: an iterator can't, nor an
        open file that can't seek.

        Raises:
            PreconditionFailed: `if_match` or `new` does not hold.
            Uncertain: the connection was lost, and the content can't be had again.
        """
        headers = given(**{"if-match": if_match, "if-none-match": "*" if new else None})
        query = given(path=path, mode=None if mode is None else f"{mode:04o}", user=user, cwd=cwd)
        request = self._endpoint.call("PUT", "/file", query=query, headers=headers, patience_s=None, is_transfer=True)
        # A condition holds once: a repetition would find the file that the lost request wrote.
        request.repeat = if_match is None and not new
        return WrittenFile.take((await self._upload(request, content, progress)).value)

    async def _upload(self, request: HttpCall, content: Source, progress: Progress | None) -> Any:  # an WholeAnswer
        return await send_content(self._endpoint.transport, request, content, progress)

    # Entries ----------------------------------------------------------------------------------------------------------

    async def stat(
        self,
        path: str,
        *,
        follow: bool = False,
        sha256: bool = False,
        user: str | None = None,
        cwd: str | None = None,
    ) -> FileInfo:
        """Return the entry of a path; `follow` gives what a link leads to, `sha256` also the digest of that file.

        Raises:
            FileNotFound: there is no such file, directory or link.
            Conflict: the file was changed while its digest was computed.
        """
        query = given(path=path, follow=follow or None, digest="sha256" if sha256 else None, user=user, cwd=cwd)
        return FileInfo.take(await self._endpoint.ask("GET", "/stat", query=query))

    async def stat_many(
        self, paths: Sequence[str], *, follow: bool = False, user: str | None = None, cwd: str | None = None
    ) -> list[FileInfo | None]:
        """Return the entries of at most 1000 paths in their order; None for a path without a file."""
        body = given(paths=list(paths), follow=follow or None, user=user, cwd=cwd)
        entries = (await self._endpoint.ask("POST", "/stat", body))["entries"]
        return [None if each is None else FileInfo.take(each) for each in entries]

    async def exists(self, path: str, *, user: str | None = None, cwd: str | None = None) -> bool:
        """Return whether there is a file, directory or link of that path."""
        return (await self.stat_many([path], user=user, cwd=cwd))[0] is not None

    async def mkdir(
        self,
        path: str,
        *,
        parents: bool = True,
        mode: int | None = None,
        user: str | None = None,
        cwd: str | None = None,
    ) -> str:
        """Make a directory and return its resolved path; with `parents` it may be there already.

        Raises:
            Conflict: there is such a directory, and `parents` is false.
        """
        body = given(path=path, parents=parents, mode=None if mode is None else f"{mode:04o}", user=user, cwd=cwd)
        return str((await self._endpoint.ask("POST", "/mkdir", body, repeat=parents))["path"])

    async def move(
        self, source: str, target: str, *, overwrite: bool = False, user: str | None = None, cwd: str | None = None
    ) -> str:
        """Give a file or directory another name, also in another file system, and return the resolved new path.

        Raises:
            Conflict: the new name is taken. NotEmpty: by a directory with entries, in spite of `overwrite`.
            Uncertain: the connection was lost.
        """
        return await self._rename("/move", source, target, overwrite, user, cwd, repeat=False)

    async def copy(
        self, source: str, target: str, *, overwrite: bool = False, user: str | None = None, cwd: str | None = None
    ) -> str:
        """Copy a file or directory within the session. As `move`."""
        return await self._rename("/copy", source, target, overwrite, user, cwd, repeat=overwrite)

    async def _rename(
        self, name: str, source: str, target: str, overwrite: bool, user: str | None, cwd: str | None, *, repeat: bool
    ) -> str:
        body = {"from": source, "to": target, "overwrite": overwrite} | given(user=user, cwd=cwd)
        return str((await self._endpoint.ask("POST", name, body, repeat=repeat))["path"])

    async def remove(
        self, path: str, *, recursive: bool = False, user: str | None = None, cwd: str | None = None
    ) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a directory and all below it.

        Raises:
            FileNotFound, NotEmpty: as the names say.
        """
        query = given(path=path, recursive=recursive or None, user=user, cwd=cwd)
        await self._endpoint.ask("DELETE", "", query=query)

    async def chmod(
        self, path: str, mode: int, *, recursive: bool = False, user: str | None = None, cwd: str | None = None
    ) -> None:
        """Change permission bits, such as 0o755."""
        body = given(path=path, mode=f"{mode:04o}", recursive=recursive or None, user=user, cwd=cwd)
        await self._endpoint.ask("POST", "/chmod", body)

    async def chown(
        self,
        path: str,
        *,
        uid: int | None = None,
        gid: int | None = None,
        recursive: bool = False,
        user: str | None = "root",
        cwd: str | None = None,
    ) -> None:
        """Change the owner, the group, or both."""
        body = given(path=path, uid=uid, gid=gid, recursive=recursive or None, user=user, cwd=cwd)
        await self._endpoint.ask("POST", "/chown", body)

    # Texts ------------------------------------------------------------------------------------------------------------

    async def view(
        self,
        path: str,
        *,
        first: int | None = None,
        last: int | None = None,
        user: str | None = None,
        cwd: str | None = None,
    ) -> FileView:
        """Return numbered lines of a text from `first` to `last`, or the paths of a directory two levels deep."""
        query = given(path=path, from_=first, to=last, user=user, cwd=cwd)
        return FileView.take(await self._endpoint.ask("GET", "/view", query=query))

    async def edit(
        self,
        edits: Sequence[Mapping[str, Any]],
        *,
        dry_run: bool = False,
        user: str | None = None,
        cwd: str | None = None,
    ) -> list[FileEdit]:
        """Make all of the edits, or none; docs/api.md#files describes them (`{"path", "op": "replace", "old", "new"}`).

        Raises:
            Ambiguous: the text is there more than once. Conflict: it is not there.
            PreconditionFailed: the file has another `etag` than an edit says.
            Uncertain: the connection was lost.
        """
        body = given(edits=[dict(each) for each in edits], dry_run=dry_run or None, user=user, cwd=cwd)
        answer = await self._endpoint.ask("POST", "/edit", body, repeat=dry_run)
        return [FileEdit.take(each) for each in answer["files"]]

    async def glob(
        self, pattern: str, path: str = "", *, limit: int | None = None, user: str | None = None, cwd: str | None = None
    ) -> list[str]:
        """Return the paths below a directory that a pattern with `*`, `**`, `?`, `[…]` and `{a,b}` fits, at most
        `limit`."""
        body = given(pattern=pattern, path=path or None, limit=_page(limit), user=user, cwd=cwd)
        found: list[str] = []
        while True:
            answer = await self._endpoint.ask("POST", "/glob", body)
            found += answer["paths"]
            if not (cursor := answer.get("next_cursor")) or (limit is not None and len(found) >= limit):
                return found[:limit]
            body["cursor"] = cursor

    async def search(
        self,
        pattern: str,
        path: str = "",
        *,
        regex: bool = False,
        case: bool = True,
        glob: str | None = None,
        context: int = 0,
        max_matches: int | None = None,
        everything: bool = False,
        user: str | None = None,
        cwd: str | None = None,
    ) -> Matches:
        """Return the lines that hold a text, or match a regular expression. docs/api.md#files has the limits."""
        body = given(pattern=pattern, path=path or None, regex=regex, case=case, glob=glob, context=context, user=user)
        body |= given(max_matches=max_matches, everything=everything or None, cwd=cwd)
        answer = await self._endpoint.transport.send(self._endpoint.call("POST", "/search", body))
        lines = [json.loads(line) for line in answer.body.splitlines()]
        if not lines or "totals" not in lines[-1]:
            raise errors.api_error(json.dumps(lines[-1] if lines else None), None, streamed=True)
        return Matches.take(lines.pop()["totals"], found=[Match.take(each) for each in lines])

    def watch(
        self, path: str = "", *, recursive: bool = False, user: str | None = None, cwd: str | None = None
    ) -> WatchedChanges:
        """Return the changes of a file or of a directory's entries, with `recursive` of all below it."""
        query = given(path=path or None, recursive=recursive or None, user=user, cwd=cwd)
        return WatchedChanges(self._endpoint.transport, self._endpoint.call("GET", "/watch", query=query))

    # Archives ---------------------------------------------------------------------------------------------------------

    def archive(
        self,
        path: str = "",
        *,
        format: Literal["tar", "tar.zst", "zip"] = "tar",
        user: str | None = None,
        cwd: str | None = None,
    ) -> FileStream:
        """Return a directory as an archive, to be read in pieces."""
        query = given(path=path or None, format=format, user=user, cwd=cwd)
        return FileStream(
            self._endpoint.transport,
            self._endpoint.call("GET", "/archive", query=query, patience_s=None, is_transfer=True),
        )

    async def unpack(
        self,
        archive: Source,
        path: str = "",
        *,
        uid: int | None = None,
        gid: int | None = None,
        user: str | None = None,
        cwd: str | None = None,
        progress: Progress | None = None,
    ) -> UnpackedArchive:
        """Unpack an archive (tar, tar.zst or zip) below a directory, which is made if it is missing.

        Args:
            uid, gid: the owners of what is made, which only `user="root"` may choose.
        """
        query = given(path=path or None, uid=uid, gid=gid, user=user, cwd=cwd)
        headers = {"content-type": "application/x-tar"}
        request = self._endpoint.call(
            "POST", "/archive", query=query, headers=headers, patience_s=None, is_transfer=True
        )
        return UnpackedArchive.take((await self._upload(request, archive, progress)).value)

    # Directories ------------------------------------------------------------------------------------------------------

    async def copy_in(
        self, local: str | Path, path: str, *, user: str | None = None, progress: Progress | None = None
    ) -> None:
        """Copy a local file or directory to a path: a directory as an archive, of which no more than a piece is held.

        Permission bits stay. Links are copied as links. Files that are there stay, unless they have the same name.
        `progress` is told the bytes of the archive.

        Raises:
            OSError: a local file can't be read.
        """
        source = Path(local)
        mode = (await waiting.in_thread(source.stat)).st_mode
        if not stat.S_ISDIR(mode):
            await self.write(path, source, mode=mode & MODE_BITS, user=user, progress=progress)
            return
        query = given(path=path, user=user)
        headers = {"content-type": "application/x-tar"}
        request = self._endpoint.call(
            "POST", "/archive", query=query, headers=headers, patience_s=None, is_transfer=True
        )
        request.source = lambda: _in_threads(pack(source), progress)
        await self._endpoint.transport.send(request)

    async def copy_out(
        self, path: str, local: str | Path, *, user: str | None = None, progress: Progress | None = None
    ) -> UnpackedArchive:
        """Copy a file or directory to a local path: a directory as an archive that is unpacked as it comes.

        Links that lead out of the directory are left out, as are devices and FIFOs; `skipped` of the result counts
        them. After an error the files copied by then stay.

        Raises:
            FileNotFound: there is no such path.
            OSError: a local file can't be written.
        """
        target = Path(local)
        info = await self.stat(path, follow=True, user=user)
        is_directory = info.is_dir
        query = given(path=path, format="tar" if is_directory else None, user=user)
        request = self._endpoint.call(
            "GET", "/archive" if is_directory else "/file", query=query, patience_s=None, is_transfer=True
        )
        offset = None if is_directory else 0
        async with FileStream(self._endpoint.transport, request, progress, offset=offset) as stream:
            if is_directory:
                return await waiting.in_thread(unpack, cast("BinaryIO", waiting.FileOf(stream)), target)
            return await save(stream, target, int(info.mode, 8) & MODE_BITS)

    async def walk(
        self,
        path: str = "",
        *,
        depth: int = 1,
        glob: str | None = None,
        limit: int | None = None,
        user: str | None = None,
        cwd: str | None = None,
    ) -> AsyncIterator[FileInfo]:
        """Yield what `list` returns, of which no more than a page is held."""
        query = given(path=path or None, depth=depth, glob=glob, limit=_page(limit), user=user, cwd=cwd)
        count = 0
        while True:
            answer = await self._endpoint.ask("GET", "/list", query=query)
            for each in answer["entries"]:
                if count == limit:
                    return
                yield FileInfo.take(each)
                count += 1
            if not (cursor := answer.get("next_cursor")):
                return
            query["cursor"] = cursor

    # Last, since the name hides the type in what follows.

    async def list(
        self,
        path: str = "",
        *,
        depth: int = 1,
        glob: str | None = None,
        limit: int | None = None,
        user: str | None = None,
        cwd: str | None = None,
    ) -> list[FileInfo]:
        """Return the entries of a directory, with `depth` also those of its directories, in the order of their paths.

        `glob` chooses by name, or by the path below `path` if it has a `/`; the first `limit` are returned.
        """
        return [each async for each in self.walk(path, depth=depth, glob=glob, limit=limit, user=user, cwd=cwd)]


def _page(limit: int | None) -> int | None:
    return limit and min(limit, MAX_PAGE)


def _open(path: Path, mode: Literal["rb", "wb", "xb"]) -> BinaryIO:
    return path.open(mode)


def _undo_open(file: BinaryIO) -> None:
    file.close()
    if file.mode == "xb":
        Path(file.name).unlink(missing_ok=True)


def _extent(file: BinaryIO) -> tuple[int, int | None]:
    """Return the offset of an open file and the number of bytes from there to its end, 0 and None for a file that can't
    seek."""
    try:
        start = file.tell()
        end = file.seek(0, os.SEEK_END)
        file.seek(start)
    except (OSError, AttributeError, ValueError):
        return 0, None
    return start, end - start


async def send_content(
    transport: Transport, request: HttpCall, content: Source, progress: Progress | None = None
) -> Any:  # a WholeAnswer
    """Send a request whose body is `content`; one that can be read but once is not sent again."""
    request.headers.setdefault("content-type", "application/octet-stream")
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, bytes):
        request.body = content
        if progress is not None:
            progress(0, len(content))
        answer = await transport.send(request)
        if progress is not None:
            progress(len(content), len(content))
        return answer
    if isinstance(content, Path):
        with await waiting.in_thread(_open, content, "rb", undo=_undo_open) as opened:
            return await send_content(transport, request, opened, progress)
    if hasattr(content, "read"):
        file = cast("BinaryIO", content)
        start, size = await waiting.in_thread(_extent, file)
        if size is None:
            request.repeat = False
        else:
            request.headers["content-length"] = str(size)
        request.source = lambda: _pieces(file, start, size, progress)
    else:
        request.repeat = False
        request.source = lambda: counted(content, progress)
    return await transport.send(request)


async def _pieces(file: BinaryIO, start: int, size: int | None, progress: Progress | None) -> AsyncIterator[bytes]:
    if size is not None:
        await waiting.in_thread(file.seek, start)
    sent = 0
    while size is None or sent < size:
        most = PIECE_BYTES if size is None else min(PIECE_BYTES, size - sent)
        data = await waiting.in_thread(file.read, most)
        if not data:
            break
        sent += len(data)
        yield data
        if progress is not None:
            progress(sent, size)


async def counted(pieces: AsyncIterator[bytes], progress: Progress | None) -> AsyncIterator[bytes]:
    """Yield what an iterator of the caller's gives, and close the iterator, if it can be closed."""
    moved = 0
    try:
        async for data in pieces:
            moved += len(data)
            yield data
            if progress is not None:
                progress(moved, None)
    finally:
        if (aclose := getattr(pieces, "aclose", None)) is not None:
            await aclose()


async def _in_threads(pieces: Iterator[bytes], progress: Progress | None) -> AsyncIterator[bytes]:
    """Yield what an iterator gives that reads local files."""
    moved = 0
    while data := await waiting.in_thread(next, pieces, b""):
        moved += len(data)
        yield data
        if progress is not None:
            progress(moved, None)


async def save(pieces: AsyncIterator[bytes], target: Path, mode: int | None) -> UnpackedArchive:
    """Write a local file, which takes its name when it is whole; without a mode, as umask(2) says.

    Until then its name can't be foreseen, and no link of that name is followed (open(2), O_EXCL). What is there and is
    no file, such as /dev/null or a FIFO, is written to. Raises `OSError`.
    """
    if await waiting.in_thread(_is_device, target):
        with await waiting.in_thread(_open, target, "wb", undo=_undo_open) as file:
            return UnpackedArchive(1, await _write_all(file, pieces), 0)
    part = target.with_name(f".{target.name}.{new_id()}")
    try:
        with await waiting.in_thread(_open, part, "xb", undo=_undo_open) as file:
            size = await _write_all(file, pieces)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        await waiting.in_thread(os.replace, part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return UnpackedArchive(1, size, 0)


def _is_device(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


async def _write_all(file: BinaryIO, pieces: AsyncIterator[bytes]) -> int:
    size = 0
    async for data in pieces:
        await waiting.in_thread(file.write, data)
        size += len(data)
    return size
