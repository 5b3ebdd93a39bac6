"""The part of a session's runs that survives the daemon.

`RunPersistence` observes runs. It gives each run its ticket, has records and output written in the background, and lets
PID 1 forget a run that is written. PID 1 keeps a bounded part of the newest output of each run:

- The output of a run that goes on is written soon after it came. A run that writes faster than the disk takes its
  output is held up, so that what the daemon has received and not written is within what PID 1 keeps. Otherwise no run
  waits for the disk.
- The output of a run that has ended stays with PID 1 while there is little of it (`LOAN_BYTES`): most short runs have
  only their facts and their end written. More of it is written, and PID 1 is told to forget the run. So is all output
  of a session that is paused, or left by a daemon that stops.

A disk that fails costs the next daemon's knowledge, never a run.

`ExecIds` refuses ids that clients chose for runs that are not kept any more. No such id is ever forgotten while the
session lives, by this daemon or the next. When there are as many as may be, or some may be missing, the session takes
no new id from a client, so that no command is run twice. Ids that the server makes are not remembered: a client that
sends one can only mean an earlier run.

The functions turn a run into its records, and records into a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Final

import attrs
import trio

from runner.wire import protocol
from sandkasten.actors.runs.run import Run, RunObserver, RunRequest
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.errors import ExecGone, ExecIdsExhausted, RunnerLost, SandkastenError
from sandkasten.model import DEFAULT_SHELL, ExecKind, ExecSpec, OnDisconnect, Output
from sandkasten.model.run import is_made
from sandkasten.output.records import RunFacts, RunState, Seal, facts_to_json
from sandkasten.output.store import Records, SessionOutput


class ExecIds:
    """The ids that a client may not use for a new run of a session. The ids of runs that are kept are not in here."""

    def __init__(self, output: SessionOutput, limit: int) -> None:
        self._output = output
        self._limit = limit

    def check_new(self, run: Run) -> None:
        """Refuse a run of which nothing is kept, if the id was used or can't be remembered.

        Raises: ExecGone, ExecIdsExhausted.
        """
        if run.request.has_new_id:
            return
        if self.is_used(run.exec_id):
            raise gone(run.exec_id)
        used = self._output.used
        if not used.is_whole:
            raise ExecIdsExhausted(
                "what this session had run was damaged on disk; it takes no exec_id any more, as it may have been used"
            )
        if len(used) >= self._limit:
            raise ExecIdsExhausted("this session remembers as many exec_ids as it may", max_exec_ids=self._limit)

    def is_used(self, exec_id: str) -> bool:
        """Whether a run of which nothing is kept had the id, or may have had it."""
        return is_made(exec_id) or exec_id in self._output.used

    def is_remembered(self, exec_id: str) -> bool:
        """Whether a client chose the id for a run of which nothing is kept."""
        return exec_id in self._output.used


def gone(exec_id: str) -> ExecGone:
    return ExecGone("this run is not kept any more", exec_id=exec_id[:128])


def facts_of(run: Run, readings: tuple[int, ...]) -> RunFacts:
    """Return the facts of a run, which its running does not change. `readings`: the counters when its turn began."""
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
        input=request.input,
        group=run.cgroup,
        readings=readings,
    )


def state_of(run: Run) -> RunState:
    """Return the state of a run at this moment. A run that is left to the next daemon has no end, nor a time of it."""
    info = run.info
    return RunState(
        started_at=info.started_at,
        pid=info.pid,
        end=run.end,
        ended_at=None if run.end is None else info.ended_at,
        last_sequence=info.last_sequence,
        stdout_bytes=info.stdout_bytes,
        stderr_bytes=info.stderr_bytes,
        last_line=info.last_line,
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
        input=facts.input,
        command=facts.command,
        created_at=facts.created_at,
    )
    run = Run(request)
    run.recover(cgroup=facts.group, started_at=state.started_at, ended_at=state.ended_at, pid=state.pid, end=state.end)
    return run


def is_orphan(run: Run, facts: RunFacts, *, input_ended: bool) -> bool:
    """Whether a run would go on for nobody: the earlier daemon had the connection of its caller, of its terminal's
    viewers or of the rest of its input.
    """
    is_prompt = facts.kind is ExecKind.TERMINAL and not run.request.is_program
    return not run.is_detached or is_prompt or (facts.input == "given" and not input_ended)


def text_bytes(run: Run) -> int:
    """Return the bytes of memory that the texts of an ended run take while its record is kept."""
    spec = run.request.spec
    texts = [run.exec_id, run.request.command, spec.command, *(spec.argv or ()), *spec.env.values()]
    if run.end is not None:
        texts += (run.end.cwd, run.end.victim, *(each.host for each in run.end.egress_denied))
    return sum(map(sys.getsizeof, [text for text in texts if text is not None]))


def age_s(run: Run) -> float:
    """Return how long ago a run ended."""
    ended_at = run.clock.ended_at
    return 0.0 if ended_at is None else (datetime.now(UTC) - ended_at).total_seconds()


log = logging.getLogger(__name__)

LOAN_BYTES: Final = 256 * 1024
LOAN_RUNS: Final = 32
"""Bounds of the output that is left with PID 1: bytes of all runs that PID 1 keeps, and the number of those that have
ended. Beyond either, output of ended runs is written. PID 1 itself gives such output up at four times these."""

_BEHIND_BYTES: Final = 1024 * 1024
_ALL_BEHIND_BYTES: Final = 4 * 1024 * 1024
"""A run is held up when it has more than this to be written, or more than its equal part of the session's bound. Half
as much is written at once, and less at the next round."""

_UNTOLD_RUNS: Final = 16
"""Ended runs without output that PID 1 is not told to forget: to tell of each would wake it as often as the runs did.
"""

_FORGET_AT_ONCE: Final = 256
_MAX_UNWANTED: Final = 4096
_PIECE_COST_BYTES: Final = 160


@attrs.frozen
class Keep:
    """Settings of a session's persistence: the seal of its tickets, how long ended runs are kept, and how many ids of
    runs that are not kept."""

    seal: Seal
    retention_s: float
    max_exec_ids: int


class RunPersistence(RunObserver):
    """Writer of the records of a session's runs. `find` returns a run that is kept, `active` are those that wait or
    run; `readings_of` gives the counters that a run's turn began with."""

    def __init__(
        self,
        host: SessionServices,
        keep: Keep,
        output: SessionOutput,
        *,
        find: Callable[[str], Run | None],
        active: Collection[Run],
        readings_of: Callable[[Run], tuple[int, ...]],
    ) -> None:
        self._host = host
        self._output, self._seal = output, keep.seal
        self._find, self._active = find, active
        self._readings_of = readings_of
        self._due: dict[str, int] = {}
        """Bytes of output of each run since the last write; 0 for a run of which only a record is to be written."""
        self._facts: dict[str, bytes] = {}
        """Facts that were made for a ticket and are to be written."""
        self._ended: dict[str, Run] = {}
        """Ended runs that PID 1 was not told to forget."""
        self.incomplete: dict[str, tuple[Run, RunState]] = {}
        """Ended runs of an earlier daemon of which PID 1 may have output that is in no file, with the state that was
        written: no later record says less than that."""
        self._unwanted: dict[str, None] = {}
        self._is_due = self._is_queued = self._is_working = False
        self._must_tell = False
        self._is_failing = False
        """Whether the last write failed, which is told once."""
        self._written = trio.Event()
        self._is_reachable = True
        output.describe_with(self._describe)

    def note_pause(self, *, is_paused: bool) -> None:
        """Note a pause or its end. PID 1 of a paused session can't answer, so output that it alone holds is written."""
        self._is_reachable = not is_paused
        if self._ended:
            self._schedule()

    def ticket(self, run: Run) -> str:
        """Return the ticket of a run: its sealed facts. PID 1 keeps the ticket and shows it to the next daemon."""
        facts = facts_to_json(facts_of(run, self._readings_of(run)))
        if run.exec_id in self._due:
            self._facts[run.exec_id] = facts
        return self._seal.ticket(facts)

    # What is observed -------------------------------------------------------------------------------------------

    def admitted(self, run: Run) -> None:
        self._unwanted.pop(run.exec_id, None)  # a run that was refused had the id before
        self.changed(run)

    def began(self, run: Run) -> None:
        self._note_due(run)

    def changed(self, run: Run) -> None:
        self._facts.pop(run.exec_id, None)
        self._note_due(run)

    def ended(self, run: Run) -> None:
        if run.end is not None:
            self._ended[run.exec_id] = run
            self._note_due(run)

    def wrote(self, run: Run, piece: Output) -> bool:
        if run.exec_id not in self._due:
            self._due[run.exec_id] = 0
            self._schedule()
        self._due[run.exec_id] += len(piece.data) + _PIECE_COST_BYTES
        if self._is_much(run.exec_id):
            self._begin_work()
        return self._is_behind(run)

    async def wait_room(self, run: Run) -> None:
        """Wait until so much of the run's output was written that the run may go on."""
        while run.exec_id in self._due and self._is_behind(run):
            await self._written.wait()

    def _is_much(self, exec_id: str) -> bool:
        return 2 * self._due[exec_id] >= self._most_bytes

    def _is_behind(self, run: Run) -> bool:
        return self._due[run.exec_id] >= self._most_bytes

    @property
    def _most_bytes(self) -> int:
        """Unwritten output with which a run is held up."""
        return min(_BEHIND_BYTES, _ALL_BEHIND_BYTES // len(self._due))

    def forget(self, exec_id: str) -> None:
        """Forget a run that is not kept any more: nobody will ask PID 1 for its output."""
        self._due.pop(exec_id, None)
        self._facts.pop(exec_id, None)
        had = self._ended.pop(exec_id, None) or self.incomplete.pop(exec_id, None)
        self.unwanted((exec_id,) if had else ())

    def discard(self, exec_id: str) -> None:
        """Forget a run that was refused, or whose end will never be known; PID 1 is told to forget it."""
        self._due.pop(exec_id, None)
        self._facts.pop(exec_id, None)
        self.unwanted((exec_id,))

    def lend(self, run: Run) -> None:
        """Note an ended run with output that PID 1 has and the disk has not."""
        self._ended[run.exec_id] = run
        self._output.note_changed(run.exec_id)
        self._schedule()

    def unwanted(self, exec_ids: Iterable[str]) -> None:
        """Have PID 1 told to forget these runs. A run that goes on there is ended."""
        self._unwanted.update(dict.fromkeys(exec_ids))
        self._must_tell = True
        while len(self._unwanted) > _MAX_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]
        self._schedule()

    def _note_due(self, run: Run) -> None:
        self._due.setdefault(run.exec_id, 0)
        self._output.note_changed(run.exec_id)
        self._schedule()

    # Writing ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._is_due = True
        if not (self._is_queued or self._is_working):
            self._is_queued = True
            self._output.write_soon(self._take_turn)

    def _take_turn(self) -> Records | None:
        """Return the records that are due, if they are all that there is to do; else have a task do it."""
        self._is_queued = False
        if self._is_working:
            return None
        has_output = any(self._due.get(run.exec_id) for run in self._active)
        if not (has_output or self._has_to_tell) and self._lends():
            written = [exec_id for exec_id, run in self._ended.items() if _is_written(run)]
            if (records := self._output.take_records(partial(self._settle, written))) is not None:
                self._is_due, self._is_working = False, True
                self._begin_write()
                return records
        self._begin_work()
        return None

    def _settle(self, written: Sequence[str], error: OSError | None) -> None:
        if error is not None:
            self._tell_failure(error)
        else:
            self._note_written(written)
            self._is_due = self._is_due or self._has_to_tell
        self._finish_work()

    def _begin_work(self) -> None:
        if not self._is_working:
            self._is_working = True
            self._host.start_task(self._work)

    async def _work(self) -> None:
        self._is_due = False
        await self.write()
        await self._tell_runner()
        self._finish_work()

    def _finish_work(self) -> None:
        self._is_working = False
        if any(map(self._is_much, self._due)):
            self._begin_work()
        elif self._is_due:
            self._schedule()

    def _begin_write(self) -> dict[str, int]:
        due, self._due = self._due, {}
        self._written.set()
        self._written = trio.Event()
        return due

    async def write(self, *, is_last: bool = False) -> bool:
        """Write all records that are due, and the output that PID 1 may not keep. With `is_last` all output. True:
        there is more to write, and the disk takes it."""
        if self._output.is_recovering:
            return False  # the files have everything still, and PID 1 is told to forget nothing
        due = self._begin_write()
        ended = {} if not is_last and self._lends() else dict(self._ended)
        going = [run.exec_id for run in self._active if due.get(run.exec_id)]
        written = {exec_id: run for exec_id, run in self._ended.items() if exec_id in ended or _is_written(run)}
        try:
            has_more = await self._output.write(None if is_last else (*ended, *going))
        except OSError as error:
            self._tell_failure(error)
            return False
        self._note_written(written)
        return has_more

    def _note_written(self, exec_ids: Iterable[str]) -> None:
        """Note that records and output of ended runs are written, unless more of the output came meanwhile."""
        self._is_failing = False
        for exec_id in exec_ids:
            run = self._ended.get(exec_id)
            if run is None:
                continue
            if not _is_written(run):
                self._is_due = True
                continue
            del self._ended[exec_id]
            self._unwanted[exec_id] = None
            self._must_tell = self._must_tell or run.output_bytes > 0

    def _tell_failure(self, error: OSError) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        log.error("runs_not_written", extra={"session_id": self._host.session_id, "error": str(error)})

    async def leave(self) -> None:
        """Leave the runs to the next daemon: write all records and all output, and close the session's output."""
        try:
            while await self.write(is_last=True):
                await trio.lowlevel.checkpoint()
        finally:
            self._output.close()

    def _lends(self) -> bool:
        """Whether PID 1 can be relied on to keep the output of the runs that have ended."""
        if not self._is_reachable or len(self._ended) > LOAN_RUNS:
            return False
        runs = (*self._active, *self._ended.values())
        return sum(map(_kept_bytes, runs)) <= LOAN_BYTES

    def _describe(self, exec_id: str) -> tuple[RunFacts | bytes, RunState] | None:
        run = self._find(exec_id)
        if run is None:
            return None
        _, state = self.incomplete.get(exec_id) or (run, state_of(run))
        return self._facts.pop(exec_id, None) or facts_of(run, self._readings_of(run)), state

    async def _tell_runner(self) -> None:
        """Let PID 1 forget the runs that it need not keep. After an error, those that are left are told later."""
        while self._has_to_tell and self._is_reachable:
            exec_ids = tuple(islice(self._unwanted, _FORGET_AT_ONCE))
            try:
                await self._host.ask_runner(protocol.ForgetRuns(exec_ids), protocol.Done)
            except RunnerLost:  # dead, about to be, or too busy: the session's actor notices by itself
                return
            except SandkastenError as error:
                log.warning("runs_not_forgotten", extra={"session_id": self._host.session_id, "error": str(error)})
                return
            for exec_id in exec_ids:
                self._unwanted.pop(exec_id, None)
            self._must_tell = self._must_tell and bool(self._unwanted)

    @property
    def _has_to_tell(self) -> bool:
        return bool(self._unwanted) and (self._must_tell or len(self._unwanted) > _UNTOLD_RUNS)


def _is_written(run: Run) -> bool:
    return run.log is None or run.log.is_written


def _kept_bytes(run: Run) -> int:
    """Return the room that a run's output takes with PID 1."""
    pieces = 0 if run.log is None else run.log.last_sequence
    return min(run.output_bytes + protocol.KEPT_PIECE_BYTES * pieces, protocol.KEPT_RUN_BYTES)
