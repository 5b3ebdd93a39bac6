"""Sandbox for LangChain's deepagents: `create_deep_agent(model=..., backend=SandkastenSandbox.create())`.

The file tools speak to the server's file routes, so no program is needed in the image. One blocking client serves both
kinds of methods: the asynchronous ones run theirs in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import io
import re
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

from deepagents.backends.protocol import (
    FILE_NOT_FOUND,
    INVALID_PATH,
    IS_DIRECTORY,
    PERMISSION_DENIED,
    BackendProtocol,
    DeleteResult,
    EditResult,
    ExecuteResponse,
    FileData,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.protocol import FileInfo as Entry
from deepagents.backends.sandbox import MAX_BINARY_BYTES, MAX_OUTPUT_BYTES, TRUNCATION_MSG, BaseSandbox
from deepagents.backends.utils import (
    EMPTY_OLD_STRING_ERROR,
    _get_backend_read_file_type,
    compile_grep_include_glob,
    normalize_read_bounds,
)

from sandkasten import errors
from sandkasten.sdk.types import FileInfo, Match
from sandkasten.sdk.wire import new_id
from sandkasten.sync import SandboxClient, Session

MAX_MATCHES = 10_000
"""Matches of one search or glob: the server's limit."""
MAX_DOWNLOAD_BYTES = 16 * 1024 * 1024
"""Size of a file that a download takes: the framework wants it whole. `Session.files.open` reads any."""
CANCEL_S = 5.0
"""Time that the end of a command may take whose caller was cancelled."""
EMPTY_FILE = "System reminder: File exists but has empty contents"
"""Content of an empty file, in the words of the base class."""
_COUNTED_BYTES = 1024 * 1024
"""Size up to which a file that is read in part is read to its end, for the number of its lines."""
_PREFIX_BYTES = 8192
_DEPTH = 32
_PLAIN_GLOB = re.compile(r"(?!.*\*\*)[\w.*?/ -]+")
"""Patterns of which the server chooses a superset, so that fewer paths are sent."""
_CANCEL_WAITS_S = (0.0, 0.05, 0.15, 0.3, 0.5)


class SandkastenSandbox(BaseSandbox):
    """A session as the backend of a deep agent.

    `SandkastenSandbox.create()` makes the session, and `with` or `close` ends it; `SandkastenSandbox(session)` uses one
    that is the caller's, and `close` leaves it. Commands run in fresh shells beside each other, or with
    `is_stateful=True` in the session's persistent shell, one after the other. Errors of the sandbox are results, as the
    framework wants them; a server that is gone raises `sandkasten.errors`.
    """

    def __init__(self, session: Session, *, is_stateful: bool = False) -> None:
        """Use a session of `sandkasten.sync`."""
        self._session = session
        self._is_stateful = is_stateful
        self._own: SandboxClient | None = None

    @classmethod
    def create(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 120.0,
        is_stateful: bool = False,
        **fields: Any,  # of `SandboxClient.create_session`
    ) -> Self:
        """Make a session; `fields` are those of `SandboxClient.create_session`, such as `image`.

        `base_url` and `api_key` default to `SANDKASTEN_URL` and `SANDKASTEN_API_KEY`.
        """
        if base_url is None:
            client = SandboxClient.from_env(timeout=timeout)
        else:
            client = SandboxClient(base_url=base_url, api_key=api_key, timeout=timeout)
        try:
            made = cls(client.create_session(**fields), is_stateful=is_stateful)
        except BaseException:
            client.close()
            raise
        made._own = client
        return made

    def close(self) -> None:
        """End the session that `create` made, and close its connections."""
        client, self._own = self._own, None
        if client is not None:
            try:
                self._session.destroy()
            finally:
                client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The id of the session."""
        return self._session.id

    # Commands ---------------------------------------------------------------------------------------------------------

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command; without a `timeout` in seconds, or with 0, for as long as the server allows."""
        return self._execute(command, timeout, new_id())

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command; a caller that is cancelled ends it."""
        exec_id = new_id()
        work = asyncio.ensure_future(asyncio.to_thread(self._execute, command, timeout, exec_id))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks for either
            giving_up = asyncio.ensure_future(asyncio.to_thread(self._give_up, exec_id))
            # The answer comes with the run's end, and the thread with it; a server that is gone is not waited for.
            await asyncio.wait([giving_up, work], timeout=CANCEL_S)
            raise

    def _execute(self, command: str, timeout: int | None, exec_id: str) -> ExecuteResponse:
        try:
            result = self._session.exec(
                command,
                timeout_ms=1000 * (timeout or 0),
                stateless=not self._is_stateful,
                on_timeout="result",
                exec_id=exec_id,
            )
        except errors.ClientError as error:
            return ExecuteResponse(output=f"Error: {error}", exit_code=1)
        output = result.output
        if result.timed_out:
            output += f"\nError: Command timed out after {result.duration_ms / 1000:.1f} seconds."
        elif result.cause not in ("exited", "signalled"):
            output += f"\n[{result.cause}]"
        return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=result.truncated)

    def _give_up(self, exec_id: str) -> None:
        """Cancel a run whose request may still be on its way."""
        for wait_s in _CANCEL_WAITS_S:
            time.sleep(wait_s)
            try:
                self._session.run(exec_id).cancel()
            except errors.ExecNotFound:
                continue
            except errors.SandkastenError:
                pass  # it has ended, or its session has
            return

    # Files ------------------------------------------------------------------------------------------------------------

    # The base class has these run Python in the sandbox; its own base has them run the blocking method in a thread.
    als = BackendProtocol.als
    aread = BackendProtocol.aread
    awrite = BackendProtocol.awrite
    aedit = BackendProtocol.aedit
    adelete = BackendProtocol.adelete
    agrep = BackendProtocol.agrep
    aglob = BackendProtocol.aglob

    def ls(self, path: str) -> LsResult:
        """List a directory."""
        try:
            return LsResult(entries=[_entry(each) for each in self._session.files.list(path)])
        except errors.ClientError as error:
            return LsResult(error=f"Path '{path}': {_code(error, 'path_not_found')}")

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Return lines of a text, or a file that is no text in base64. Limits are those of the base class."""
        offset, limit = normalize_read_bounds(offset, limit)
        try:
            with self._session.files.open(file_path) as pieces:
                return _page(file_path, pieces, pieces.size or 0, offset, limit)
        except errors.ClientError as error:
            return ReadResult(error=f"File '{file_path}': {_code(error)}")

    def write(self, file_path: str, content: str) -> WriteResult:
        """Write a text; missing directories are made."""
        (response,) = self.upload_files([(file_path, content.encode("utf-8"))])
        if response.error:
            return WriteResult(error=f"Failed to write file '{file_path}': {response.error}")
        return WriteResult(path=file_path)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replace a text, as it is or with the other kind of line ends, which the new text then gets, too."""
        if not old_string:
            return EditResult(error=EMPTY_OLD_STRING_ERROR)
        candidates = [(old_string, new_string)]
        for end in ("\r\n", "\n"):
            candidates.append((_with_ends(old_string, end), _with_ends(new_string, end)))
        for old, new in dict(candidates).items():
            edit = {"path": file_path, "op": "replace", "old": old, "new": new, "count": "all"}
            if not replace_all:
                del edit["count"]
            try:
                (made,) = self._session.files.edit([edit])
                return EditResult(path=file_path, occurrences=made.replacements)
            except errors.Ambiguous:
                text = f"String '{old_string}' appears multiple times. Use replace_all=True to replace all occurrences."
                return EditResult(error=f"Error: {text}")
            except errors.Conflict:
                continue  # the text is not there
            except errors.FileNotFound:
                return EditResult(error=f"Error: File '{file_path}' not found")
            except errors.ClientError as error:
                return EditResult(error=f"Error editing file '{file_path}': {_code(error)}")
        return EditResult(error=f"Error: String not found in file: '{old_string}'")

    def delete(self, file_path: str) -> DeleteResult:
        """Remove a file, or a directory with all below it."""
        try:
            self._session.files.remove(file_path, recursive=True)
        except errors.FileNotFound:
            return DeleteResult(error=f"Error: '{file_path}' not found")
        except errors.ClientError as error:
            return DeleteResult(error=f"Error deleting file '{file_path}': {_code(error)}")
        return DeleteResult(path=file_path)

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """Search for a text; of several lines, for each that is not empty. Files with NUL bytes or above 16 MiB are
        left out."""
        most = MAX_MATCHES if max_count is None else min(max_count + 1, MAX_MATCHES)
        texts = [text for text in pattern.split("\n") if text]
        fits = None
        try:
            if glob is not None:
                fits = compile_grep_include_glob(glob)
                glob = glob.lstrip("/") if _PLAIN_GLOB.fullmatch(glob) else None
            root = self._session.files.stat(path or "/workspace", follow=True)
            found = self._session.files.search(
                "|".join(map(re.escape, texts)) if len(texts) > 1 else pattern.strip("\n"),
                root.path,
                regex=len(texts) > 1,
                glob=glob,
                max_matches=max(most, 1),
            )
        except (errors.ClientError, ValueError) as error:
            return GrepResult(error=f"Path '{path or '.'}': {error}")
        if fits is not None and root.is_dir:
            found.found = [each for each in found.found if fits(each.path.removeprefix(root.path).lstrip("/"))]
        is_cut = found.truncated or found.timed_out
        if max_count is not None and len(found.found) > max_count:
            found.found, is_cut = found.found[:max_count], True
        return GrepResult(matches=[_match(each) for each in found.found], truncated=is_cut)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """Find files by the framework's own rules for patterns; links count as files if they lead to one."""
        root = "/workspace" if not path else path if path.startswith("/") else f"/{path}"
        found: list[Any] = []  # the framework's FileInfo
        links: list[Any] = []
        is_cut = False
        try:
            fits = compile_grep_include_glob(pattern)
            chosen = pattern.lstrip("/") if _PLAIN_GLOB.fullmatch(pattern) else None
            real_root = self._session.files.stat(root, follow=True).path
            for each in self._session.files.walk(root, depth=_DEPTH, glob=chosen):
                name = each.path.removeprefix(real_root).lstrip("/")
                if each.type in ("file", "symlink") and fits(name):
                    if is_cut := len(found) + len(links) >= MAX_MATCHES:
                        break
                    entry = _entry(each) | {"path": f"{root.rstrip('/')}/{name}"}
                    (links if each.type == "symlink" else found).append(entry)
        except (errors.ClientError, ValueError) as error:
            code = _code(error, "path_not_found") if isinstance(error, errors.ClientError) else str(error)
            return GlobResult(error=f"Path '{root}': {code}")
        for start in range(0, len(links), 1000):
            part = links[start : start + 1000]
            targets = self._session.files.stat_many([each["path"] for each in part], follow=True)
            found += [each for each, target in zip(part, targets, strict=True) if target and target.type == "file"]
        matches = sorted(found, key=lambda each: each["path"])
        return GlobResult(matches=matches, truncated=is_cut, truncation_reason="budget" if is_cut else None)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files of any content; each has a result of its own."""
        responses = []
        for path, content in files:
            error = None
            try:
                self._session.files.write(path, content)
            except errors.ClientError as failure:
                error = _code(failure)
            responses.append(FileUploadResponse(path=path, error=error))
        return responses

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files of any content and up to `MAX_DOWNLOAD_BYTES`; each has a result of its own."""
        responses = []
        for path in paths:
            try:
                responses.append(FileDownloadResponse(path=path, content=self._whole(path)))
            except errors.ClientError as failure:
                responses.append(FileDownloadResponse(path=path, error=_code(failure)))
        return responses

    def _whole(self, path: str) -> bytes:
        data = bytearray()
        with self._session.files.open(path) as pieces:
            for piece in pieces:
                data += piece
                if max(len(data), pieces.size or 0) > MAX_DOWNLOAD_BYTES:
                    raise errors.TooLarge(f"the file has more than {MAX_DOWNLOAD_BYTES} bytes")
        return bytes(data)


_CODES: tuple[tuple[type[errors.ClientError], str], ...] = (
    (errors.FileNotFound, FILE_NOT_FOUND),
    (errors.PermissionDenied, PERMISSION_DENIED),
    (errors.IsADirectory, IS_DIRECTORY),
    (errors.NotADirectory, "not_a_directory"),
    (errors.NotAFile, "not_a_file"),
    (errors.InvalidRequest, INVALID_PATH),
    (errors.PathOutside, INVALID_PATH),
)


def _code(error: errors.ClientError, missing: str = FILE_NOT_FOUND) -> str:
    """Return the framework's word for an error, or the error's own text."""
    found = next((code for cls, code in _CODES if isinstance(error, cls)), str(error))
    return missing if found == FILE_NOT_FOUND else found


def _entry(info: FileInfo) -> Any:  # the framework's FileInfo
    entry = Entry(path=info.path, is_dir=info.is_dir, size=info.size)
    if info.modified_at:
        entry["modified_at"] = info.modified_at
    return entry


def _match(match: Match) -> Any:  # the framework's GrepMatch
    return {"path": match.path, "line": match.line, "text": match.text}


def _with_ends(text: str, end: Literal["\r\n", "\n"]) -> str:
    return text.replace("\r\n", "\n").replace("\n", end)


class _Pieces(io.RawIOBase):
    """File whose content is what an iterator gives."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # a writable buffer
        data = self._rest or next(self._pieces, b"")
        part, self._rest = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _page(path: str, pieces: Iterator[bytes], size: int, offset: int, limit: int) -> ReadResult:
    """Return a page of a file that is read from its begin, as the base class does by a program in the sandbox."""
    if size == 0:
        return ReadResult(file_data=FileData(content=EMPTY_FILE, encoding="utf-8"))
    buffered = io.BufferedReader(_Pieces(pieces), buffer_size=_PREFIX_BYTES)
    prefix = buffered.peek(_PREFIX_BYTES)[:_PREFIX_BYTES]
    if _get_backend_read_file_type(path) != "text" or not _is_text(prefix):
        if size > MAX_BINARY_BYTES:
            raise errors.TooLarge(f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes")
        content = base64.b64encode(buffered.read()).decode("ascii")
        return ReadResult(file_data=FileData(content=content, encoding="base64"))
    if limit == 0:
        return ReadResult(file_data=FileData(content="", encoding="utf-8"), no_lines_requested=True)
    lines = _PageLines(io.TextIOWrapper(buffered, encoding="utf-8", errors="replace", newline=None))
    while lines.number < offset and lines.next() is not None:
        pass
    shown: list[str] = []
    left = MAX_OUTPUT_BYTES - len(TRUNCATION_MSG)
    is_cut = False
    while len(shown) < limit and not is_cut and (line := lines.next()) is not None:
        data = line.encode("utf-8", "replace")
        is_cut = len(data) + 1 > left
        shown.append(line if not is_cut else data[: max(left, 0)].decode("utf-8", "ignore"))
        left -= len(data) + 1
    if not shown:
        raise errors.RangeNotSatisfiable(f"Line offset {offset} exceeds file length ({lines.number} lines)")
    # A line that was cut is read again with the next page, unless it is the page.
    end = offset + len(shown) - (is_cut and len(shown) > 1)
    if size <= _COUNTED_BYTES:
        while lines.next() is not None:
            pass
    total = lines.number if lines.is_at_end() else None
    return ReadResult(
        file_data=FileData(content="\n".join(shown) + TRUNCATION_MSG * is_cut, encoding="utf-8"),
        total_lines=total,
        start_line=offset + 1,
        end_line=end,
        next_offset=None if total == end else end,
    )


class _PageLines:
    """Lines of a text without their ends; of one that is too long for a page, the rest is skipped."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._ahead: str | None = None
        self.number = 0

    def next(self) -> str | None:
        line, self._ahead = self._ahead or self._text.readline(MAX_OUTPUT_BYTES), None
        if not line:
            return None
        self.number += 1
        rest = line
        while rest and not rest.endswith("\n"):
            rest = self._text.readline(MAX_OUTPUT_BYTES)
        return line.removesuffix("\n")

    def is_at_end(self) -> bool:
        self._ahead = self._ahead or self._text.readline(MAX_OUTPUT_BYTES)
        return not self._ahead


def _is_text(prefix: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(prefix)
    except UnicodeDecodeError:
        return False
    return True
