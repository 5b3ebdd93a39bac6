"""Files of a scripted sandbox: they lie in directories of this machine, and PID 1's own functions find, list, pack and
remove them.
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import trio

from nsinit.sandbox.child import RunnerKernel
from runner.files.operations import FileWork, perform
from runner.files.paths import Resolver, refusal
from runner.files.tree import is_of_kernel, never_ends
from runner.loop.config import RunnerConfig
from runner.loop.context import Refused
from runner.wire import protocol
from runner.wire.protocol import CHUNK_BYTES, Kind

WORKSPACE = "/workspace"
ROOTS = (WORKSPACE, "/tmp", "/home/sandbox")

FileRequest = protocol.FileRequest
Receive = Callable[[], Awaitable[protocol.Frame | None]]
Send = Callable[[bytes], Awaitable[None]]


_TAKES_CONTENT = (protocol.PutFile, protocol.AppendUpload, protocol.EditFiles, protocol.Unpack)


class ScriptedFiles:
    """Files in `top`, the sandbox's root; the workspace may lie elsewhere. `files_only`: no program runs there, and `/`
    is the workspace."""

    def __init__(self, top: Path, workspace: Path | None = None, *, files_only: bool = False) -> None:
        self._top, self._workspace, self._files_only = top, workspace, files_only
        self._kernel = RunnerKernel(filters_commands=False)
        self.gate, self.write_gate = trio.Event(), trio.Event()
        """Whether requests are performed, and whether content is taken."""
        self.gate.set()
        self.write_gate.set()
        self.bytes_written = 0
        self.is_keeping = True
        """Whether the content of files is kept, or only counted."""
        self.changes = [
            protocol.FileChange("rename", "/workspace/\udcff", "/workspace/b"),
            protocol.FileChange("overflow", "/workspace"),
            protocol.FileChange("remove", "/workspace"),
        ]
        """Changes that a watch tells."""

    @cached_property
    def _places(self) -> dict[str, str]:
        """Directories by the roots that they are, made with the first use of a file: most sandboxes see none."""
        places = {root: self._top / root[1:] for root in ROOTS}
        if self._workspace is not None:
            places[WORKSPACE] = self._workspace
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        return {root: str(place.resolve()) for root, place in places.items()}

    @cached_property
    def _resolver(self) -> Resolver:
        config = RunnerConfig(workspace=self._places[WORKSPACE], files_only=self._files_only)
        return Resolver(config, self._kernel)

    def path(self, path: str) -> Path:
        """Return the place of a file on this machine. What is outside of a workspace has one place, outside of it."""
        if self._files_only and not f"{path}/".startswith(f"{WORKSPACE}/"):
            path = path.lstrip("/")
        inside = posixpath.normpath(posixpath.join(WORKSPACE, path))
        for root, place in self._places.items():
            if inside == root or inside.startswith(f"{root}/"):
                return Path(place + inside.removeprefix(root))
        if self._files_only:
            return Path(self._places[WORKSPACE]) / ".."
        return Path(inside) if is_of_kernel(os.fsencode(inside)) else self._top / inside[1:]

    def content(self) -> dict[str, bytes]:
        """Return the files by their paths inside."""
        return {
            self._inside(str(path)): path.read_bytes()
            for place in self._places.values()
            for path in Path(place).rglob("*")
            if path.is_file()
        }

    async def serve(self, request: FileRequest, receive: Receive, send: Send) -> object:
        """Perform a request, whose DATA frames come by `receive`; send STARTED and the DATA frames of the answer.
        Return the last answer, None if the daemon has left.
        """
        await self.gate.wait()
        path = getattr(request, "path", "")
        request = self._placed(request)
        with tempfile.TemporaryFile() as spool:
            try:
                if isinstance(request, _TAKES_CONTENT) and not await self._take(spool, receive):
                    return None
                if isinstance(request, protocol.WatchFiles):
                    return await self._watch(request, send)
                heads: list[object] = []
                answer: Any = self._perform(request, spool, heads.append)
            except Refused as refused:
                return refused.error
            except OSError as error:
                return refusal(error, path).error
            for head in heads:
                await send(protocol.encode_frame(Kind.STARTED, protocol.ANSWERS.encode(self._named(head))))
            if not isinstance(request, _TAKES_CONTENT):
                await _send_all(spool, send)
        return self._named(answer)

    def _perform(self, request: protocol.FileRequest, spool: IO[bytes], start: Callable[[object], None]) -> object:
        """Perform a request whose input is in `spool`, which holds the output afterwards."""
        with tempfile.TemporaryFile() as out:
            source, target = (io.FileIO(each.fileno(), "r+b", closefd=False) for each in (spool, out))
            work = FileWork(self._resolver, self._kernel, start, source, target, lambda _step: None, never_ends)
            answer = perform(request, work)
            if not isinstance(request, _TAKES_CONTENT):
                spool.seek(0)
                spool.truncate()
                out.seek(0)
                shutil.copyfileobj(out, spool)
                spool.flush()
        return answer

    async def _watch(self, request: protocol.WatchFiles, send: Send) -> protocol.Done:
        """Tell the scripted changes, and then that the file is gone."""
        fd, real = self._resolver.open_existing(self._resolver.encode(request.path))
        os.close(fd)
        path = self._inside(os.fsdecode(real))
        await send(protocol.encode_frame(Kind.STARTED, protocol.ANSWERS.encode(protocol.Watching(path))))
        for change in self.changes:
            await send(protocol.encode_frame(Kind.DATA, protocol.ANSWERS.encode(change) + b"\n"))
        await send(protocol.encode_frame(Kind.DATA, b"\n"))
        return protocol.Done(path)

    def _placed(self, request: FileRequest) -> FileRequest:
        """Return a request with the places of its paths on this machine."""
        places: dict[str, Any] = {}
        for name in ("path", "source", "target"):
            if hasattr(request, name):
                places[name] = str(self.path(getattr(request, name)))
        if isinstance(request, protocol.StatFiles):
            places["paths"] = tuple(str(self.path(path)) for path in request.paths)
        return replace(request, **places)

    def _named(self, answer: Any) -> object:
        """Return an answer with paths inside."""
        changes: dict[str, Any] = {}
        if getattr(answer, "path", ""):
            changes["path"] = self._inside(answer.path)
        if isinstance(answer, protocol.FileStats):
            changes["entries"] = tuple(each and self._named(each) for each in answer.entries)
        return replace(answer, **changes)

    async def _take(self, spool: IO[bytes], receive: Receive) -> bool:
        while True:
            await self.write_gate.wait()
            frame = await receive()
            if frame is None:
                return False
            if frame[0] is Kind.END:
                spool.seek(0)
                return True
            self.bytes_written += len(frame[1])
            if self.is_keeping:
                spool.write(frame[1])

    def _inside(self, path: str) -> str:
        for root, place in (*self._places.items(), ("", str(self._top.resolve()))):
            if path == place or path.startswith(f"{place}/"):
                return root + path.removeprefix(place) or "/"
        raise AssertionError(path)


async def _send_all(file: IO[bytes], send: Send) -> None:
    file.seek(0)
    while data := file.read(CHUNK_BYTES):
        await send(protocol.encode_frame(Kind.DATA, data))
