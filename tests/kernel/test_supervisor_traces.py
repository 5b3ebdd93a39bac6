"""Traces reach what runs only if that is asked for, and are no part of what was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from sandkasten import logcontext
from sandkasten import logcontext as tracing
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, RunsSettings
from sandkasten.model import ExecSpec, ProcessSpec, SessionSpec, WaitFor

SHOW = ExecSpec("echo ${TRACEPARENT-none}")


@pytest.fixture
def requests() -> Iterator[list[tracing.Trace]]:
    """Traces of requests; the first is the current one."""
    traces = [tracing.begin(None), tracing.begin(None)]
    before = logcontext.origin.set(logcontext.Origin("r", traces[0]))
    yield traces
    logcontext.origin.reset(before)


async def output(supervisor: LocalSupervisor, session_id: str, spec: ExecSpec) -> str:
    return (await supervisor.exec(session_id, spec)).stdout.decode().strip()


async def test_what_runs_is_told_its_trace_if_the_operator_wants_it(
    config: Config, requests: list[tracing.Trace]
) -> None:
    """With the operator's setting a command in the shell, one beside it and a process get their own trace; a variable
    of the request wins.
    """
    first, second = requests
    async with open_supervisor(attrs.evolve(config, runs=RunsSettings(pass_traceparent=True))) as supervisor:
        session = await supervisor.create(SessionSpec())
        logcontext.origin.set(logcontext.Origin("r", first))
        assert await output(supervisor, session.id, SHOW) == first.header
        assert await output(supervisor, session.id, attrs.evolve(SHOW, stateless=True)) == first.header
        own = attrs.evolve(SHOW, env={"TRACEPARENT": "mine"}, exec_id="repeated")
        assert await output(supervisor, session.id, own) == "mine"
        logcontext.origin.set(logcontext.Origin("r2", second))
        assert await output(supervisor, session.id, own) == "mine"
        assert (await supervisor.get_exec(session.id, "repeated")).trace_id == first.trace_id
        process = await supervisor.start_process(session.id, ProcessSpec(command="echo $TRACEPARENT"))
        waited = await supervisor.wait_process(session.id, process.exec_id, WaitFor(exit=True), timeout_s=10)
        assert waited.run.last_line == second.header
        logcontext.origin.set(logcontext.NOBODY)
        assert await output(supervisor, session.id, SHOW) == "none"


async def test_unasked_nothing_inside_knows_of_a_trace_and_events_do(
    supervisor: LocalSupervisor, requests: list[tracing.Trace]
) -> None:
    """Events that a request causes carry its trace id; commands that did not ask for it find no trace in their
    environment.
    """
    async with supervisor.events() as events:
        session = await supervisor.create(SessionSpec())
        assert await output(supervisor, session.id, SHOW) == "none"
        logcontext.origin.set(logcontext.Origin("r2", requests[1]))
        await supervisor.destroy(session.id)
        told = [await anext(events) for _ in range(4)]
    assert [event.type.value for event in told] == [
        "session.created",
        "exec.started",
        "exec.ended",
        "session.destroyed",
    ]
    expected = [requests[0].trace_id] * 3 + [requests[1].trace_id]
    assert [event.data.get("trace_id") for event in told] == expected
