"""What a caller holds of a run: its claim on it, and its place in the output. It gives back what it holds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio

from sandkasten.actors.runs.run import Run
from sandkasten.model import ExecEnd, ExecInfo, Output
from sandkasten.model.errors import SandkastenError
from sandkasten.output.spool import LogReader, ReaderMode


class Joined(SandkastenError):
    """Another run has the id: to be waited for by who asked. Never leaves this package."""


class Hold:
    """One caller's claim on a run: on the one it asked for, or on the one that had its id already."""

    def __init__(self, wish: Run) -> None:
        self.run = wish
        self._is_owner = False
        self._is_taken = False
        self._is_left = False

    def take(self, run: Run) -> None:
        """Hold that run; a caller who has left meanwhile leaves it at once."""
        self._is_owner = run is self.run
        self.run, self._is_taken = run, True
        run.hold()
        if self._is_left:
            run.leave(as_owner=self._is_owner)

    def leave(self) -> None:
        """Care no more; never blocks, never raises, and more than once is fine."""
        if not self._is_left:
            self._is_left = True
            if self._is_taken:
                self.run.leave(as_owner=self._is_owner)


class RunReader:
    """A reader of one run; implements `supervisor.ExecStream`."""

    def __init__(self, run: Run, *, after: int = 0, is_joined: bool = True) -> None:
        """Raises `ExecGone` when what follows `after` is not kept any more."""
        assert run.log is not None
        self._run = run
        self.is_joined = is_joined
        self._pieces: LogReader = run.log.reader(after=after, mode=ReaderMode.HOLDING)

    @property
    def exec_id(self) -> str:
        return self._run.exec_id

    @property
    def info(self) -> ExecInfo:
        return self._run.info

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._pieces.__aiter__()

    async def wait_end(self) -> ExecEnd:
        """See `supervisor.ExecStream`."""
        self._pieces.close()
        return await self._run.ended.wait()

    def detach(self) -> None:
        """See `supervisor.ExecStream`."""
        self._run.detach()

    async def cancel(self) -> None:
        """See `supervisor.ExecStream`."""
        self._run.cancel()
        await trio.lowlevel.checkpoint()

    async def send_stdin(self, data: bytes) -> None:
        """See `supervisor.ExecStream`."""
        await self._run.send_stdin(data)

    async def close_stdin(self) -> None:
        """See `supervisor.ExecStream`."""
        await self._run.send_stdin(b"", close=True)

    def close(self) -> None:
        """Stop holding the run up."""
        self._pieces.close()
