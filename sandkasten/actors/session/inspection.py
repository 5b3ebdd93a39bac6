"""What a session's actor can be seen doing, read at once and without asking it.

Metrics and diagnoses are wanted most when an actor does not answer, so they look from outside, in one go between two
of its steps. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import trio

from sandkasten.actors.services.directory import Inspection
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.work import SessionWork
from sandkasten.links.runner import RunnerLink
from sandkasten.model import ExecInfo, ShellInfo
from sandkasten.store.sessions import SessionRecord

MAX_RUNS = 50
"""The newest that are shown."""


def inspect(
    record: SessionRecord,
    create_ms: Mapping[str, float],
    lease: Lease,
    work: SessionWork,
    controls: trio.CapacityLimiter,
    link: RunnerLink | None,
) -> Inspection:
    """Return what is to be seen now."""
    waiting = controls.statistics().tasks_waiting
    return Inspection(
        record=record,
        create_ms=dict(create_ms),
        lease=_lease(lease),
        runs=_runs(work),
        shells=[_shell(info) for info in work.runs.shells.infos()],
        controls={"requests": controls.borrowed_tokens, "requests_waiting": waiting},
        link=link,
    )


def _lease(lease: Lease) -> Mapping[str, Any]:
    remaining_s = lease.end - trio.current_time()
    is_endless = math.isinf(remaining_s)
    return {
        "activities": lease.active,
        "is_held": lease.is_held,
        "ends_in_s": None if is_endless else round(remaining_s, 3),
        "ends_by": None if is_endless else lease.reason.value,
    }


def _runs(work: SessionWork) -> Mapping[str, Any]:
    return {
        "running": work.runs.running,
        "queued": work.runs.queued,
        "known": work.runs.known,
        "kept_bytes": work.kept_bytes,
        "newest": [_run(info) for info in work.runs.newest(MAX_RUNS)],
    }


def _run(info: ExecInfo) -> Mapping[str, Any]:
    """Return a run without what it is about: a diagnosis is sent around."""
    return {
        "exec_id": info.exec_id,
        "kind": info.kind.value,
        "state": info.state.value,
        "shell": info.shell,
        "created_at": info.created_at,
        "started_at": info.started_at,
        "ended_at": info.ended_at,
        "cause": None if info.end is None else info.end.cause.value,
        "exit_code": None if info.end is None else info.end.exit_code,
        "stdout_bytes": info.stdout_bytes,
        "stderr_bytes": info.stderr_bytes,
        "trace_id": info.trace_id,
    }


def _shell(info: ShellInfo) -> Mapping[str, Any]:
    running = None if info.running is None else info.running.exec_id
    return {"name": info.name, "running": running, "queued": list(info.queued)}
