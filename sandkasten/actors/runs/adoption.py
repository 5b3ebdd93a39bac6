"""Finding the runs of an earlier daemon again: first in its files, then with PID 1.

The files are trusted, PID 1 is not: PID 1 is believed about which of the known runs it has, about output of theirs that
is not in the files, and about other runs only what a ticket of ours says. PID 1 is told to forget what it should not
have. A run that neither has an end nor is found ends with `daemon_restarted`. So does, after being cancelled, a run
that has nobody left: its caller, or those who sat at its prompt, went with their daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from runner.wire import protocol
from sandkasten.actors.runs.driver import CONTROL_S, fetch_output
from sandkasten.actors.runs.persistence import Keep, age_s, is_orphan, restored
from sandkasten.actors.runs.run import Run
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.errors import RunnerLost, RunnerProtocolError, SandkastenError
from sandkasten.model import ExecKind, Stream
from sandkasten.output.disk import WrittenRun
from sandkasten.output.records import BadRecord, RunFacts, RunState
from sandkasten.output.store import SessionOutput

log = logging.getLogger(__name__)

_MAX_LISTED = 1024
"""More than PID 1 may keep."""


class RunAdoption:
    """Adoption of one session's runs: `recover` when the session is taken over, `resume` when its PID 1 can answer."""

    def __init__(
        self,
        host: SessionServices,
        runs: Runs,
        keep: Keep,
        output: SessionOutput,
        *,
        on_terminal: Callable[[Run], Awaitable[None]],
    ) -> None:
        """`on_terminal` is called for a terminal beside the shells, before more output of that terminal comes."""
        self._host = host
        self._runs = runs
        self._keep, self._output = keep, output
        self._on_terminal = on_terminal
        self._facts: dict[str, RunFacts] = {}
        self._written: frozenset[str] = frozenset()
        """Ids of all runs in the files, those included that are not kept any more: no ticket begins them again."""

    async def recover(self) -> None:
        """Take over the runs in the files, with their output. A run without an end seems to go on."""
        self._runs.cgroups.recover()
        written = await self._output.read()
        if written.damaged_files:
            facts = {"session_id": self._host.session_id, "files": written.damaged_files}
            log.warning("run_records_damaged", extra=facts)
        self._written = frozenset((*written.runs, *written.gone))
        for each in sorted(written.runs.values(), key=lambda each: each.facts.created_at):
            await self._recover(each)
        self._output.recovered_all()

    async def _recover(self, written: WrittenRun) -> None:
        run, state = restored(written.facts, written.state), written.state
        if run.has_ended and age_s(run) > self._keep.retention_s:
            self._output.note_gone(run.exec_id)
            return
        self._runs.recover(run, written.facts.readings)
        assert run.log is not None
        await run.log.recover(written.parts, state.last_line)
        if not run.has_ended:
            self._facts[run.exec_id] = written.facts
        elif (run.log.stdout_bytes, run.log.stderr_bytes) == (state.stdout_bytes, state.stderr_bytes):
            self._runs.recovered(run)
        else:
            self._runs.persistence.incomplete[run.exec_id] = run, state

    async def resume(self) -> None:
        """Go on with the runs that PID 1 has, and end the others. Raises `RunnerLost`, `RunnerProtocolError`."""
        entries = await self._list()
        incomplete = self._runs.persistence.incomplete
        listed = [entry.exec_id for entry in entries if entry.has_ended and entry.exec_id in incomplete]
        for exec_id in incomplete.keys() - set(listed):
            self._close(*incomplete[exec_id])
        unwanted = await self._complete_all(listed)
        waiting = {run.exec_id: run for run in self._runs.active}
        over = []
        for entry in entries:
            if entry.exec_id in listed:
                continue
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
                self._runs.resume(run, is_orphan=orphan, is_over=entry.has_ended)
                if entry.has_ended:
                    over.append(run)
        for run in waiting.values():
            self._runs.give_up(run)
        self._facts.clear()
        self._written = frozenset()
        self._runs.persistence.unwanted(unwanted)
        with trio.move_on_after(CONTROL_S):  # they count as active until they are fetched, and would refuse new runs
            for run in over:
                await run.ended.wait_done()

    async def _complete_all(self, exec_ids: Sequence[str]) -> list[str]:
        """Get the rest of the output of ended runs, and return those of which PID 1 refused to give it.

        Output that does not come in time is missing here, and the next daemon asks for it again.

        Raises: RunnerProtocolError.
        """
        incomplete = self._runs.persistence.incomplete
        refused = []
        is_lost = False
        for exec_id in exec_ids:
            run, state = incomplete[exec_id]
            is_whole = True
            try:
                if not is_lost:
                    await self._complete(run, state)
            except RunnerProtocolError:
                raise
            except RunnerLost as error:  # dead, or too busy: the others don't wait as long again
                is_lost = True
                log.warning("output_not_fetched", extra={"session_id": self._host.session_id, "error": str(error)})
            except trio.TooSlowError:
                is_whole = False
            except SandkastenError:  # PID 1 gave it up, or does not serve the request: there is no more to be had
                refused.append(exec_id)
            self._close(run, state, is_final=is_whole and not is_lost)
            if exec_id not in (*refused, *incomplete):
                self._runs.persistence.lend(run)
        return refused

    async def _complete(self, run: Run, state: RunState) -> None:
        """Get the rest of the output of an ended run, whose end is known; PID 1 goes on keeping it.

        Raises:
            trio.TooSlowError: a reader of the run is too slow.
            RunnerLost, RunnerProtocolError, SandkastenError: as `fetch_output`.
        """
        output = run.log
        assert output is not None
        attached, pieces = await fetch_output(run, self._host.link)
        begin = {"stdout_bytes": attached.stdout_offset, "stderr_bytes": attached.stderr_offset}
        output.skip_to(**begin, sequence=max(output.last_sequence, state.last_sequence - len(pieces)))
        with trio.fail_after(CONTROL_S):  # a reader of a paused session's run may be slow
            for stream, data in pieces:
                total = state.stdout_bytes if stream is Stream.STDOUT else state.stderr_bytes
                if rest := data[: max(0, total - output.kept.total(stream))]:
                    await output.append(stream, rest)

    def _close(self, run: Run, state: RunState, *, is_final: bool = True) -> None:
        """No more of an ended run's output comes to this daemon, and to the next one neither if that is final."""
        assert run.log is not None
        totals = {"stdout_bytes": state.stdout_bytes, "stderr_bytes": state.stderr_bytes}
        run.log.skip_to(**totals, sequence=state.last_sequence)
        if is_final:
            del self._runs.persistence.incomplete[run.exec_id]
            self._output.note_changed(run.exec_id)
        self._runs.recovered(run)

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
        if self._runs.is_used(entry.exec_id) or entry.exec_id in self._written:
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
