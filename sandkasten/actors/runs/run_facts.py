"""A run as it is written down, and a run made again from that. Knows `run_records`' values and `Run`, no file."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from sandkasten.actors.runs.run import Run
from sandkasten.model import DEFAULT_SHELL, ExecKind, ExecSpec, OnDisconnect
from sandkasten.output.run_records import Input, RunFacts, RunState


def facts_of(run: Run) -> RunFacts:
    """Return what is known of a run before it begins."""
    return RunFacts(
        exec_id=run.exec_id,
        kind=run.kind,
        shell=None if run.is_program else run.spec.shell,
        digest=run.digest,
        command=run.command,
        created_at=run.created_at,
        timeout_ms=run.timeout_ms,
        is_detached=run.is_detached,
        keep_alive=run.keep_alive,
        is_interactive=run.interactive,
        size=run.size,
        input=_input_of(run),
        group=run.group,
        readings=run.readings,
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
    run = Run(
        spec,
        timeout_ms=facts.timeout_ms,
        kind=facts.kind,
        on_disconnect=OnDisconnect.DETACH if facts.is_detached else OnDisconnect.CANCEL,
        interactive=facts.is_interactive,
        keep_alive=facts.keep_alive,
    )
    run.digest, run.command, run.created_at = facts.digest, facts.command, facts.created_at
    run.group, run.readings = facts.group, facts.readings
    run.recover(started_at=state.started_at, ended_at=state.ended_at, pid=state.pid, end=state.end)
    return run


def is_orphan(run: Run, facts: RunFacts, *, input_ended: bool) -> bool:
    """Whether a run has nobody any more it could go on for: its caller or those who sat at its prompt went with their
    daemon, or the rest of its input did."""
    is_prompt = facts.kind is ExecKind.TERMINAL and not run.is_program
    return not run.is_detached or is_prompt or (facts.input == "given" and not input_ended)


def text_bytes(run: Run) -> int:
    """Return what the texts of an ended run take in memory, as long as its record is kept."""
    spec = run.spec
    texts = [run.exec_id, run.command, spec.command, *(spec.argv or ()), *spec.env.values()]
    if run.end is not None:
        texts += (run.end.cwd, run.end.victim)
    return sum(sys.getsizeof(text) for text in texts if text is not None) + sys.getsizeof(run.facts_json)


def age_s(run: Run) -> float:
    """Return how long ago it ended."""
    ended_at = run.info.ended_at
    return 0.0 if ended_at is None else (datetime.now(UTC) - ended_at).total_seconds()


def _input_of(run: Run) -> Input:
    if run.spec.stdin_open:
        return "open"
    return "none" if run.spec.stdin is None else "given"
