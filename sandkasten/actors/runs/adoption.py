"""Finding the runs of an earlier daemon again: what it wrote down, and then what PID 1 has.

What was written down is trusted, PID 1 is not: it is believed which of the known runs it has, and of others only what a
ticket of ours says. What it has and should not have, it is told to forget. A run that neither has an end nor is found
ends with `daemon_restarted`; so does one that nobody is left for, cancelled now: its caller, or those who sat at its
prompt, went with their daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from runner.wire import protocol
from sandkasten.actors.runs.persistence import Keep, age_s, is_orphan, restored
from sandkasten.actors.runs.run import Run
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.model import ExecKind
from sandkasten.model.errors import RunnerProtocolError
from sandkasten.output.run_archive import Written, WrittenRun
from sandkasten.output.run_records import BadRecord, RunFacts, RunState

log = logging.getLogger(__name__)

_MAX_LISTED = 1024
"""More than PID 1 may keep."""


class RunAdoption:
    """See the module's docstring. `recover` when the session is taken over, `resume` when its PID 1 can answer."""

    def __init__(
        self,
        host: SessionServices,
        runs: Runs,
        keep: Keep,
        *,
        on_terminal: Callable[[Run], Awaitable[None]],
    ) -> None:
        """`on_terminal` is called for a terminal of its own, before more comes from it."""
        self._host = host
        self._runs = runs
        self._keep = keep
        self._on_terminal = on_terminal
        self._facts: dict[str, RunFacts] = {}
        self._gone: frozenset[str] = frozenset()

    async def recover(self) -> None:
        """Know the runs that were written down again, with their output. Those without an end seem to run."""
        self._runs.cgroups.recover()
        async with self._keep.recovering:
            await self._take_over(await self._runs.persistence.read())

    async def _take_over(self, written: Written) -> None:
        if written.damaged_files:
            facts = {"session_id": self._host.session_id, "files": written.damaged_files}
            log.warning("run_records_damaged", extra=facts)
        self._gone = frozenset(written.gone)
        self._runs.ids.recover(written.used, written.gone)
        for each in sorted(written.runs.values(), key=lambda each: each.facts.created_at):
            await self._recover(each)

    async def _recover(self, written: WrittenRun) -> None:
        run = restored(written.facts, written.state)
        if run.has_ended and age_s(run) > self._keep.retention_s:
            self._runs.ids.note_gone(run.exec_id)
            return
        self._runs.recover(run, written.facts.readings)
        await _fill(run, written)
        if run.has_ended:
            assert run.log is not None
            end = written.state
            run.log.skip_to(stdout_bytes=end.stdout_bytes, stderr_bytes=end.stderr_bytes, sequence=end.last_sequence)
            self._runs.recovered(run)
        else:
            self._facts[run.exec_id] = written.facts

    async def resume(self) -> None:
        """Go on with what PID 1 has, and end what it hasn't. Raises `RunnerLost`, `RunnerProtocolError`."""
        entries = await self._list() if self._runs.persistence.gives_tickets else ()
        waiting = {run.exec_id: run for run in self._runs.active}
        unwanted = []
        for entry in entries:
            run = waiting.pop(entry.exec_id, None) or self._recognize(entry)
            if run is None:
                unwanted.append(entry.exec_id)
            else:
                facts = self._facts.pop(run.exec_id)
                if entry.input_ended:
                    run.input.note_ended()
                if run.request.kind is ExecKind.TERMINAL and run.request.is_program:
                    await self._on_terminal(run)
                orphan = not entry.has_ended and is_orphan(run, facts, input_ended=entry.input_ended)
                self._runs.resume(run, is_orphan=orphan)
        for run in waiting.values():
            self._runs.give_up(run)
        self._facts.clear()
        self._gone = frozenset()
        self._runs.persistence.unwanted(unwanted)

    async def _list(self) -> Sequence[protocol.RunEntry]:
        entries: list[protocol.RunEntry] = []
        more = True
        while more:
            after = entries[-1].number if entries else 0
            answer = await self._host.ask_runner(protocol.ListRuns(after), protocol.RunList)
            more = answer.more
            entries += answer.runs
            numbers = [after, *(entry.number for entry in answer.runs)]
            if numbers != sorted(set(numbers)) or len(entries) > _MAX_LISTED or (more and not answer.runs):
                raise RunnerProtocolError("a list of runs that can't be")
        if len({entry.exec_id for entry in entries}) != len(entries):
            raise RunnerProtocolError("two runs of one id")
        return entries

    def _recognize(self, entry: protocol.RunEntry) -> Run | None:
        """Return a run that there was no time to write down; None for one that is written down as ended, is gone or
        was never ours."""
        if self._runs.is_used(entry.exec_id) or entry.exec_id in self._gone:
            return None
        try:
            facts = self._keep.seal.read(entry.ticket)
        except BadRecord as error:
            log.warning("unknown_run", extra={"session_id": self._host.session_id, "error": str(error)})
            return None
        run = restored(facts, RunState())
        if facts.exec_id != entry.exec_id or self._runs.is_full:
            return None
        self._runs.recover(run, facts.readings)
        self._facts[run.exec_id] = facts
        return run


async def _fill(run: Run, written: WrittenRun) -> None:
    """Put into its log what was written down of the output; of damaged output nothing."""
    output = run.log
    assert output is not None
    for number, chunk in enumerate(written.chunks):
        try:
            pieces = chunk.pieces()
        except BadRecord:
            break
        if number == 0:
            place = {"stdout_bytes": chunk.stdout_start, "stderr_bytes": chunk.stderr_start}
            output.skip_to(**place, sequence=chunk.first_sequence - 1)
        for piece in pieces:
            await output.append(piece.stream, piece.data)
        await trio.lowlevel.checkpoint()
