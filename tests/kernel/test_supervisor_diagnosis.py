"""The diagnosis of a session: what is known of it whatever state it is in, and whatever part of it does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from sandkasten.actors import diagnosis as diagnosing
from sandkasten.actors.core import Ref
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import SessionNotFound
from sandkasten.model import ExecSpec, PauseSpec, SessionSpec, Status
from sandkasten.model.node import Diagnosis, MissingPart
from tests.waiting import patience, until

SECRET = "hush-4711"


def part(diagnosis: Diagnosis, name: str) -> Mapping[str, Any]:
    """Return a part that must be there."""
    found = diagnosis.parts[name]
    assert not isinstance(found, MissingPart), f"{name}: {found.reason}"
    return found


def missing(diagnosis: Diagnosis) -> set[str]:
    return {name for name, each in diagnosis.parts.items() if isinstance(each, MissingPart)}


async def test_a_running_session_is_seen_in_all_its_parts(supervisor: LocalSupervisor) -> None:
    """Steps of its create, lease, runs and queues, PID 1, counters, events; and none of it is a command or a secret."""
    session = await supervisor.create(SessionSpec(env={"A": SECRET}))
    await supervisor.exec(session.id, ExecSpec(f": {SECRET}; echo {SECRET}", env={"B": SECRET}, exec_id="first"))
    async with trio.open_nursery() as nursery:

        async def is_known(count: int) -> bool:
            runs = {run.exec_id: run for run in await supervisor.execs(session.id)}
            return len(runs) == count and runs["runs"].started_at is not None

        for count, name in ((2, "runs"), (3, "waits")):
            nursery.start_soon(supervisor.exec, session.id, ExecSpec(f"sleep 1000 # {SECRET}", exec_id=name))
            await until(partial(is_known, count))
        before = (await supervisor.get(session.id)).epoch
        found = await supervisor.diagnose(session.id)
        assert missing(found) == set()
        assert (found.session.status, found.session.epoch) == (Status.RUNNING, before)
        assert {"build", "runner", "store"} <= part(found, "create")["phases_ms"].keys()
        assert (part(found, "lease")["activities"], part(found, "lease")["is_held"]) == (2, True)
        runs = part(found, "runs")
        assert (runs["running"], runs["queued"], runs["known"]) == (1, 1, 3)
        assert [each["exec_id"] for each in runs["newest"]] == ["first", "runs", "waits"]
        assert part(found, "shells")["open"][0] == {"name": "default", "running": "runs", "queued": ["waits"]}
        assert part(found, "runner")["answers"] is True
        assert part(found, "cgroup")["pids.current"] >= 2
        assert isinstance(part(found, "cgroup")["cpu.stat"], Mapping)
        assert part(found, "disk")["mode"]
        types = [event["type"] for event in part(found, "events")["newest"]]
        assert types[:3] == ["session.created", "exec.started", "exec.ended"]
        assert (part(found, "record")["is_live"], part(found, "record")["written_status"]) == (True, "running")
        assert SECRET not in repr(attrs.asdict(found))
        nursery.cancel_scope.cancel()


async def test_a_hung_init_and_a_stuck_database_cost_their_parts_only(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PID 1 stopped and the store gone all other parts are answered, within the deadline of a part."""
    monkeypatch.setattr(diagnosing, "PART_S", 0.3)
    session = await supervisor.create(SessionSpec())
    pid = part(await supervisor.diagnose(session.id), "record")["init"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with trio.fail_after(patience(5)):
            found = await supervisor.diagnose(session.id)
        assert missing(found) == {"runner"}
        assert found.parts["runner"] == MissingPart("no answer within 0.3 s")
        monkeypatch.setattr(supervisor._diagnosing, "_store", Ref("nobody"))
        assert missing(await supervisor.diagnose(session.id)) == {"record", "runner"}
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_looking_wakes_nobody_and_renews_nothing(supervisor: LocalSupervisor) -> None:
    """A diagnosis leaves a paused session paused and its lease as it was."""
    session = await supervisor.create(SessionSpec())
    before = await supervisor.get(session.id)
    await supervisor.diagnose(session.id)
    assert (await supervisor.get(session.id)).last_activity == before.last_activity
    await supervisor.pause(session.id, PauseSpec(auto_resume=True))
    found = await supervisor.diagnose(session.id)
    assert (missing(found), part(found, "runner")["answers"]) == (set(), None)
    assert found.session.pause is not None
    assert (await supervisor.get(session.id)).status is Status.PAUSED


async def test_an_ended_session_is_known_by_what_is_kept(config: Config) -> None:
    """The diagnosis of an ended session comes from memory for a while, from the database after a restart; an unknown id
    is not found.
    """
    async with open_supervisor(config) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.exec(session.id, ExecSpec("true", exec_id="mine"))
        await supervisor.destroy(session.id)
        found = await supervisor.diagnose(session.id)
        assert found.session.status is Status.DESTROYED
        assert {"build", "runner"} <= part(found, "create")["phases_ms"].keys()
        assert [each["exec_id"] for each in part(found, "runs")["newest"]] == ["mine"]
        assert missing(found) == {"actor", "cgroup", "lease", "runner"}
        for unknown in ("0" * 24, "../etc"):
            with pytest.raises(SessionNotFound):
                await supervisor.diagnose(unknown)
    async with open_supervisor(config) as supervisor:
        found = await supervisor.diagnose(session.id)
        assert found.session.status is Status.DESTROYED
        assert missing(found) == {"actor", "cgroup", "create", "lease", "runner", "runs", "shells"}
        assert part(found, "events")["newest"][-1]["type"] == "session.destroyed"
        assert part(found, "record")["ended_at"] is not None
