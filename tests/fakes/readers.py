"""Readers of a run in memory: `supervisor.ExecStream` and `supervisor.TerminalViewer` over `runs.Run`."""

from __future__ import annotations

from types import TracebackType

import trio

from sandkasten.model import ExecEnd, ExecInfo, Output, TerminalSize, errors
from tests.fakes.runs import Run


class Reader:
    """`ExecStream` on a run. The pipe waits for the slowest one."""

    def __init__(self, run: Run, *, after: int = 0, is_joined: bool = True) -> None:
        self._run = run
        self.position = after
        self.is_joined = is_joined
        self.is_detached = is_joined

    def __enter__(self) -> Reader:
        self._run.readers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.readers.discard(self)
        self._run.taken()

    @property
    def exec_id(self) -> str:
        return self._run.exec_id

    @property
    def info(self) -> ExecInfo:
        return self._run.info

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Output:
        await trio.lowlevel.checkpoint()
        while True:
            piece = self._run.piece_after(self.position)
            if piece is not None:
                self.position = piece.sequence
                self._run.taken()
                return piece
            if self._run.end is not None:
                raise StopAsyncIteration
            await self._run.advance()

    async def wait_end(self) -> ExecEnd:
        async for _ in self:
            pass
        assert self._run.end is not None
        return self._run.end

    def detach(self) -> None:
        self.is_detached = True

    async def cancel(self) -> None:
        await trio.lowlevel.checkpoint()
        self._run.cancel()

    async def send_stdin(self, data: bytes) -> None:
        await self._run.send(data)

    async def close_stdin(self) -> None:
        await trio.lowlevel.checkpoint()
        self._run.close_stdin()


class Viewer:
    """`TerminalViewer` on a run. `is_shell`: it watches a persistent shell instead of having one of its own."""

    def __init__(self, run: Run, *, read_only: bool, is_shell: bool) -> None:
        self._run = run
        self._read_only = read_only
        self._is_shell = is_shell
        self._position = 0
        self._taken_bytes = 0
        self.skipped_bytes = 0
        self.refusal: errors.SandkastenError | None = None
        self.turn: trio.Event | None = None

    @property
    def terminal_id(self) -> str:
        return f"shell:{self._run.spec.shell}" if self._is_shell else self._run.exec_id

    @property
    def info(self) -> ExecInfo:
        return self._run.info

    @property
    def is_taken_over(self) -> bool:
        return self in self._run.takers if self._is_shell else not self._read_only

    def __aiter__(self) -> Viewer:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            first = self._run.first_sequence
            if self._position + 1 < first:
                self.skipped_bytes = self._run.dropped_bytes - self._taken_bytes
                self._position = first - 1
            piece = self._run.piece_after(self._position)
            if piece is not None:
                self._position = piece.sequence
                self._taken_bytes += len(piece.data)
                return piece.data
            if self._run.end is not None:
                raise StopAsyncIteration
            await self._run.advance()

    async def send(self, data: bytes) -> None:
        self._need_control()
        await self._run.send(data)

    async def resize(self, size: TerminalSize) -> None:
        await trio.lowlevel.checkpoint()
        self._need_control()
        self._run.resize(size)

    async def take_over(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._read_only:
            raise errors.PermissionDenied("this viewer is read-only")
        if self.refusal is not None:
            raise self.refusal
        if self.turn is not None:
            await self.turn.wait()
        self._run.takers.add(self)

    async def give_back(self) -> None:
        await trio.lowlevel.checkpoint()
        self._run.takers.discard(self)

    async def wait_end(self) -> ExecEnd:
        return await self._run.wait_ended()

    def _need_control(self) -> None:
        if self._read_only:
            raise errors.PermissionDenied("this viewer is read-only")
        if not self.is_taken_over:
            raise errors.PermissionDenied("the shell is only watched")
