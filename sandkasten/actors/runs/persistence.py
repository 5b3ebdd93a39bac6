"""What of a session's runs survives the daemon: gives each run its ticket, writes down in the background what it is,
wrote and ended with, and lets PID 1 forget what is written.

Nothing here is waited for by a run, but that one which writes faster than the disk takes it is held up: PID 1 keeps a
bounded part of each run's newest output, and what a daemon received and did not write must be within that. A disk that
fails costs the next daemon's knowledge, never a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import attrs
import trio

from runner.wire import protocol
from sandkasten.actors.runs.exec_ids import ExecIds
from sandkasten.actors.runs.run import Run
from sandkasten.actors.runs.run_facts import facts_of, state_of
from sandkasten.model import Output, Stream
from sandkasten.model.errors import RunnerLost, SandkastenError
from sandkasten.output.run_archive import RunNews, SessionArchive, Written
from sandkasten.output.run_records import Seal, facts_to_json

if TYPE_CHECKING:
    from sandkasten.actors.runs.runs import Host

log = logging.getLogger(__name__)

WRITE_EVERY_S: Final = 0.1
"""Longer nothing stays unwritten, unless the disk is slow."""

_HURRY_BYTES: Final = 64 * 1024
_BEHIND_BYTES: Final = 1024 * 1024
_ALL_BEHIND_BYTES: Final = 4 * 1024 * 1024
"""With more than this to be written, of a run or its equal part of all that there is of its session, it is held up."""

_FORGET_AT_ONCE: Final = 256
_MAX_UNWANTED: Final = 4096
_PIECE_COST_BYTES: Final = 160
_RUNS_PER_CHECKPOINT: Final = 128


@attrs.frozen
class Keep:
    """What is needed to have the runs of a session outlive the daemon: where they are written down, under which seal,
    by how many at a time; how many sessions may take over theirs at a time, which takes memory; how long ended runs are
    kept, and how many ids of those that are not."""

    archive: SessionArchive
    seal: Seal
    writing: trio.CapacityLimiter
    recovering: trio.CapacityLimiter
    retention_s: float
    max_exec_ids: int


@attrs.define(eq=False)
class _News:
    """What is not written yet of one run."""

    run: Run
    is_changed: bool = False
    stdout_offset: int = 0
    stderr_offset: int = 0
    pieces: list[Output] = attrs.field(factory=list)
    size_bytes: int = 0


class RunKeeping:
    """See the module's docstring. `known` gives all runs there are, `ids` has those not kept any more."""

    def __init__(self, host: Host, keep: Keep, *, known: Callable[[], Iterable[Run]], ids: ExecIds) -> None:
        self._host = host
        self._archive, self._seal, self._limiter = keep.archive, keep.seal, keep.writing
        self._known, self._ids = known, ids
        self._news: dict[str, _News] = {}
        self._new_gone: list[str] = []
        self._refused: list[str] = []
        self._unwanted: dict[str, None] = {}
        self._is_due = self._is_working = False
        self._hurry = trio.Event()
        self._written = trio.Event()
        self._writing = trio.Lock()
        self.gives_tickets = False
        """Whether PID 1 knows what to do with one."""
        self.is_reachable = True
        """Whether PID 1 can answer: not while the session stands still."""

    # What happens to runs ---------------------------------------------------------------------------------------

    def ticket(self, run: Run) -> str:
        """Return what PID 1 is to be given with a run, to be told again."""
        return self._seal.ticket(_facts(run)) if self.gives_tickets else ""

    def changed(self, run: Run) -> None:
        """It was admitted, has begun or ended, or is detached now."""
        self._of(run).is_changed = True

    def put(self, run: Run, piece: Output) -> bool:
        """It wrote something; return whether it has to be held up (`wait_written`)."""
        news = self._of(run)
        if not news.pieces:
            assert run.log is not None
            is_stdout = piece.stream is Stream.STDOUT
            news.stdout_offset = run.log.stdout_bytes - (len(piece.data) if is_stdout else 0)
            news.stderr_offset = run.log.stderr_bytes - (0 if is_stdout else len(piece.data))
        news.pieces.append(piece)
        news.size_bytes += len(piece.data) + _PIECE_COST_BYTES
        if news.size_bytes >= _HURRY_BYTES:
            self._hurry.set()
        return self._is_behind(news)

    async def wait_written(self, run: Run) -> None:
        """Wait until what it wrote is being written."""
        while (news := self._news.get(run.exec_id)) is not None and self._is_behind(news):
            await self._written.wait()

    def _is_behind(self, news: _News) -> bool:
        return news.size_bytes >= min(_BEHIND_BYTES, _ALL_BEHIND_BYTES // len(self._news))

    def forget(self, exec_id: str) -> None:
        """It is not kept any more: its id alone is remembered."""
        self._news.pop(exec_id, None)
        self._new_gone.append(exec_id)
        self._schedule()

    def discard(self, exec_id: str) -> None:
        """It was refused, or its end will never be known: whatever PID 1 has of it is not wanted."""
        self._news.pop(exec_id, None)
        self._refused.append(exec_id)
        self.unwanted((exec_id,))

    def unwanted(self, exec_ids: Iterable[str]) -> None:
        """PID 1 is to forget these; what still runs is ended."""
        self._unwanted.update(dict.fromkeys(exec_ids))
        while len(self._unwanted) > _MAX_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]
        self._schedule()

    def _of(self, run: Run) -> _News:
        news = self._news.get(run.exec_id)
        if news is None:
            news = self._news[run.exec_id] = _News(run)
            self._schedule()
        return news

    # Writing ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._is_due = True
        if not self._is_working:
            self._is_working = True
            self._host.start_task(self._work)

    async def _work(self) -> None:
        while self._is_due:
            with trio.move_on_after(WRITE_EVERY_S):
                await self._hurry.wait()
            self._hurry = trio.Event()
            self._is_due = False
            await self.write()
            await self._tell_runner()
        self._is_working = False

    async def write(self) -> None:
        """Write down all there is to write by now."""
        async with self._writing:
            is_all = self._archive.wants_all
            taken, self._news = self._news, {}
            new_gone, self._new_gone = self._new_gone, []
            refused, self._refused = self._refused, []
            used = self._ids.take_unwritten()
            self._written.set()
            self._written = trio.Event()
            if not taken and not new_gone and not refused and not used:
                return
            everything = self._all(taken) if is_all else list(taken.values())
            news = []
            for each in everything:
                news.append(_frozen(each))
                if len(news) % _RUNS_PER_CHECKPOINT == 0:
                    await trio.lowlevel.checkpoint()
            try:
                await trio.to_thread.run_sync(
                    lambda: self._archive.write(news, new_gone, refused=refused, used=used, is_all=is_all),
                    limiter=self._limiter,
                    abandon_on_cancel=True,
                )
            except OSError as error:
                self._ids.not_written(used)
                log.error("runs_not_written", extra={"session_id": self._host.session_id, "error": str(error)})
                return
            except BaseException:
                self._ids.not_written(used)  # the thread that was left alone may still write them: twice does no harm
                raise
            self._unwanted.update(dict.fromkeys(each.exec_id for each in news if each.has_ended))

    def _all(self, taken: dict[str, _News]) -> Sequence[_News]:
        """Return the news of all runs, those included of which there are none."""
        for run in self._known():
            taken.setdefault(run.exec_id, _News(run)).is_changed = True
        return list(taken.values())

    async def _tell_runner(self) -> None:
        """Let PID 1 forget what is written down; what it can't be told now it is told later."""
        while self._unwanted and self.gives_tickets and self.is_reachable:
            exec_ids = tuple(islice(self._unwanted, _FORGET_AT_ONCE))
            try:
                await self._host.ask_runner(protocol.ForgetRuns(exec_ids), protocol.Done)
            except RunnerLost:  # dead, about to be, or too busy: who watches over it will know
                return
            except SandkastenError as error:
                log.warning("runs_not_forgotten", extra={"session_id": self._host.session_id, "error": str(error)})
                return
            for exec_id in exec_ids:
                self._unwanted.pop(exec_id, None)

    # The next daemon --------------------------------------------------------------------------------------------

    async def read(self) -> Written:
        """Return what earlier daemons wrote down."""
        return await trio.to_thread.run_sync(self._archive.read, limiter=self._limiter, abandon_on_cancel=True)

    async def destroy(self) -> None:
        """The session has ended: nothing of its runs stays."""
        await trio.to_thread.run_sync(self._archive.discard, limiter=self._limiter, abandon_on_cancel=True)


def _frozen(news: _News) -> RunNews:
    run = news.run
    return RunNews(
        exec_id=run.exec_id,
        facts=_facts(run) if news.is_changed else None,
        state=state_of(run) if news.is_changed else None,
        stdout_offset=news.stdout_offset,
        stderr_offset=news.stderr_offset,
        pieces=news.pieces,
    )


def _facts(run: Run) -> bytes:
    if run.facts_json is None:
        run.facts_json = facts_to_json(facts_of(run))
    return run.facts_json
