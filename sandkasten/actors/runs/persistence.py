"""What of a session's runs survives the daemon: gives each run its ticket, writes down in the background what it is,
wrote and ended with, and lets PID 1 forget what is written.

Nothing here is waited for by a run, but that one which writes faster than the disk takes it is held up: PID 1 keeps a
bounded part of each run's newest output, and what a daemon received and did not write must be within that. A disk that
fails costs the next daemon's knowledge, never a run.

Which ids may not be used again in a session: those that clients chose for runs that are not kept any more.

None is ever forgotten while the session lives, by this daemon or the next. When there are as many as may be, or nobody
knows any more which there were, the session takes no new id from a client: nothing is run twice for want of memory.
Ids that the server makes need no place here: a client that sends one can only mean a run that there was.

A run as it is written down, and a run made again from that. Knows `run_records`' values and `Run`, no file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import attrs
import trio

from runner.wire import protocol
from sandkasten.actors.runs.run import Run, RunObserver, RunRequest
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.model import DEFAULT_SHELL, ExecKind, ExecSpec, OnDisconnect, Output, Stream
from sandkasten.model.errors import ExecGone, ExecIdsExhausted, RunnerLost, SandkastenError
from sandkasten.model.run import is_made
from sandkasten.output.run_archive import RunNews, SessionArchive, Written
from sandkasten.output.run_records import Input, RunFacts, RunState, Seal, facts_to_json
from sandkasten.output.used_ids import UsedIds


class ExecIds:
    """See the module's docstring. The ids of runs that are kept are not in here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = UsedIds()
        self._unwritten: list[int] = []

    def check_new(self, run: Run) -> None:
        """Refuse a run of which nothing is kept, if its id was used or can't be remembered.

        Raises: ExecGone, ExecIdsExhausted.
        """
        if run.request.has_new_id:
            return
        if self.is_used(run.exec_id):
            raise gone(run.exec_id)
        if not self._used.is_whole:
            raise ExecIdsExhausted(
                "what this session had run was damaged on disk; it takes no exec_id any more, as it may have been used"
            )
        if len(self._used) >= self._limit:
            raise ExecIdsExhausted("this session remembers as many exec_ids as it may", max_exec_ids=self._limit)

    def is_used(self, exec_id: str) -> bool:
        """Whether a run had it of which nothing is kept, or may have had it."""
        return is_made(exec_id) or exec_id in self._used

    def is_remembered(self, exec_id: str) -> bool:
        """Whether a client chose it for a run of which nothing is kept."""
        return exec_id in self._used

    def note_gone(self, exec_id: str) -> None:
        """Nothing is kept any more of the run that had it."""
        digest = None if is_made(exec_id) else self._used.add(exec_id)
        if digest is not None:
            self._unwritten.append(digest)

    def recover(self, used: UsedIds, gone: Iterable[str]) -> None:
        """These are what earlier daemons wrote down."""
        self._used = used
        for exec_id in gone:
            self.note_gone(exec_id)

    # Writing them down

    def take_unwritten(self) -> Sequence[int]:
        """Return the digests to write down now; `not_written` gives them back."""
        taken, self._unwritten = self._unwritten, []
        return taken

    def not_written(self, digests: Sequence[int]) -> None:
        self._unwritten[:0] = digests


def gone(exec_id: str) -> ExecGone:
    return ExecGone("this run is not kept any more", exec_id=exec_id[:128])


def facts_of(run: Run, readings: tuple[int, ...]) -> RunFacts:
    """Return the facts of a run that do not change by its running. `readings`: the counters when its turn began."""
    request = run.request
    return RunFacts(
        exec_id=run.exec_id,
        kind=request.kind,
        shell=request.shell,
        digest=request.digest,
        command=request.command,
        created_at=request.created_at,
        timeout_ms=request.timeout_ms,
        is_detached=run.is_detached,
        keep_alive=request.keep_alive,
        is_interactive=request.interactive,
        size=run.size,
        input=_input_of(request.spec),
        group=run.cgroup,
        readings=readings,
    )


def state_of(run: Run) -> RunState:
    """Return what became of a run by now."""
    info = run.info
    return RunState(
        started_at=info.started_at,
        pid=info.pid,
        end=run.end,
        ended_at=info.ended_at,
        last_sequence=info.last_sequence,
        stdout_bytes=info.stdout_bytes,
        stderr_bytes=info.stderr_bytes,
    )


def restored(facts: RunFacts, state: RunState) -> Run:
    """Return the run that an earlier daemon wrote down, without its log."""
    spec = ExecSpec(
        command="",
        shell=facts.shell or DEFAULT_SHELL,
        stateless=facts.shell is None,
        stdin_open=facts.input == "open",
        terminal=facts.size,
        exec_id=facts.exec_id,
    )
    request = RunRequest(
        spec,
        timeout_ms=facts.timeout_ms,
        kind=facts.kind,
        on_disconnect=OnDisconnect.DETACH if facts.is_detached else OnDisconnect.CANCEL,
        interactive=facts.is_interactive,
        keep_alive=facts.keep_alive,
        digest=facts.digest,
        command=facts.command,
        created_at=facts.created_at,
    )
    run = Run(request)
    run.recover(cgroup=facts.group, started_at=state.started_at, ended_at=state.ended_at, pid=state.pid, end=state.end)
    return run


def is_orphan(run: Run, facts: RunFacts, *, input_ended: bool) -> bool:
    """Whether a run has nobody any more it could go on for: its caller or those who sat at its prompt went with their
    daemon, or the rest of its input did."""
    is_prompt = facts.kind is ExecKind.TERMINAL and not run.request.is_program
    return not run.is_detached or is_prompt or (facts.input == "given" and not input_ended)


def text_bytes(run: Run) -> int:
    """Return what the texts of an ended run take in memory, as long as its record is kept."""
    spec = run.request.spec
    texts = [run.exec_id, run.request.command, spec.command, *(spec.argv or ()), *spec.env.values()]
    if run.end is not None:
        texts += (run.end.cwd, run.end.victim)
    return sum(map(sys.getsizeof, [text for text in texts if text is not None]))


def age_s(run: Run) -> float:
    """Return how long ago it ended."""
    ended_at = run.clock.ended_at
    return 0.0 if ended_at is None else (datetime.now(UTC) - ended_at).total_seconds()


def _input_of(spec: ExecSpec) -> Input:
    if spec.stdin_open:
        return "open"
    return "none" if spec.stdin is None else "given"


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
    facts_json: bytes | None = None
    """The facts of the run as they are now; None if they have to be made anew."""
    stdout_offset: int = 0
    stderr_offset: int = 0
    pieces: list[Output] = attrs.field(factory=list)
    size_bytes: int = 0

    def note_state(self) -> None:
        """The state of the run has changed."""
        self.is_changed = True

    def note_facts(self) -> None:
        """The facts of the run have changed."""
        self.is_changed, self.facts_json = True, None

    def set_facts(self, facts_json: bytes) -> bytes:
        """Keep the facts, which were made for the run's ticket, until they are written; return them."""
        self.facts_json = facts_json
        return facts_json

    def add(self, piece: Output) -> None:
        """The run wrote `piece`, which is in its log."""
        if not self.pieces:
            log = self.run.log
            assert log is not None
            is_stdout = piece.stream is Stream.STDOUT
            self.stdout_offset = log.stdout_bytes - (len(piece.data) if is_stdout else 0)
            self.stderr_offset = log.stderr_bytes - (0 if is_stdout else len(piece.data))
        self.pieces.append(piece)
        self.size_bytes += len(piece.data) + _PIECE_COST_BYTES


class RunPersistence(RunObserver):
    """See the module's docstring. `known` gives all runs there are, `ids` has those not kept any more; `readings_of`
    gives the counters that a run's turn began with."""

    def __init__(
        self,
        host: SessionServices,
        keep: Keep,
        *,
        known: Callable[[], Iterable[Run]],
        ids: ExecIds,
        readings_of: Callable[[Run], tuple[int, ...]],
    ) -> None:
        self._host = host
        self._archive, self._seal, self._limiter = keep.archive, keep.seal, keep.writing
        self._known, self._ids = known, ids
        self._readings_of = readings_of
        self._news: dict[str, _News] = {}
        self._new_gone: list[str] = []
        self._refused: list[str] = []
        self._unwanted: dict[str, None] = {}
        self._is_due = self._is_working = False
        self._hurry = trio.Event()
        self._written = trio.Event()
        self._writing = trio.Lock()
        self._gives_tickets = False
        self._is_reachable = True

    @property
    def gives_tickets(self) -> bool:
        """Whether PID 1 keeps runs for the next daemon."""
        return self._gives_tickets

    def note_version(self, *, gives_tickets: bool) -> None:
        """PID 1 said which version of the protocol it speaks."""
        self._gives_tickets = gives_tickets

    def note_pause(self, *, is_paused: bool) -> None:
        """PID 1 of a paused session can't answer."""
        self._is_reachable = not is_paused

    def ticket(self, run: Run) -> str:
        """Return the ticket that PID 1 is given with a run, and shows to the next daemon."""
        if not self._gives_tickets:
            return ""
        news = self._news.get(run.exec_id)
        if news is None:
            return self._seal.ticket(self._facts(run))
        return self._seal.ticket(news.facts_json or news.set_facts(self._facts(run)))

    # What is observed -------------------------------------------------------------------------------------------

    def admitted(self, run: Run) -> None:
        self._add(run).note_state()

    def began(self, run: Run) -> None:
        (self._news.get(run.exec_id) or self._add(run)).note_state()

    def changed(self, run: Run) -> None:
        (self._news.get(run.exec_id) or self._add(run)).note_facts()

    def ended(self, run: Run) -> None:
        if run.end is not None:
            (self._news.get(run.exec_id) or self._add(run)).note_state()

    def wrote(self, run: Run, piece: Output) -> bool:
        news = self._news.get(run.exec_id) or self._add(run)
        news.add(piece)
        if news.size_bytes >= _HURRY_BYTES:
            self._hurry.set()
        return self._is_behind(news)

    async def wait_room(self, run: Run) -> None:
        """Wait until the output of the run is being written."""
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

    def _add(self, run: Run) -> _News:
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
                news.append(self._frozen(each))
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
            taken.setdefault(run.exec_id, _News(run)).note_state()
        return list(taken.values())

    async def _tell_runner(self) -> None:
        """Let PID 1 forget what is written down; what it can't be told now it is told later."""
        while self._unwanted and self._gives_tickets and self._is_reachable:
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

    def _frozen(self, news: _News) -> RunNews:
        run = news.run
        return RunNews(
            exec_id=run.exec_id,
            facts=(news.facts_json or self._facts(run)) if news.is_changed else None,
            state=state_of(run) if news.is_changed else None,
            stdout_offset=news.stdout_offset,
            stderr_offset=news.stderr_offset,
            pieces=news.pieces,
        )

    def _facts(self, run: Run) -> bytes:
        return facts_to_json(facts_of(run, self._readings_of(run)))
