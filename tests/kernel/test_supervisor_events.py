"""Events of real sessions: what is told, in which order, over restarts and through the death of actors."""

from __future__ import annotations

import os
import signal

import attrs
import pytest
import trio

from sandkasten.actors.core import Tell
from sandkasten.actors.services.events import EventReader
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import SessionNotFound
from sandkasten.model import Event, EventType, ExecSpec, Limits, ProcessSpec, SessionSpec, ShellSpec, TerminalSpec
from tests.kernel.processes import init_pid
from tests.waiting import patience, until

HOG = "b = bytearray()\nwhile True: b += bytes(1024 * 1024)"


async def read_until(reader: EventReader, type: EventType) -> list[Event]:
    """Return the events up to and with the first of a type."""
    events: list[Event] = []
    with trio.fail_after(patience()):
        async for event in reader:
            events.append(event)
            if event.type is type:
                break
    return events


def types(events: list[Event]) -> list[str]:
    return [event.type.value for event in events]


async def test_the_life_of_a_session_is_told_in_order(supervisor: LocalSupervisor) -> None:
    """Every kind of run with its id and its end; commands, their output and environments never."""
    async with supervisor.events() as reader:
        session = await supervisor.create(SessionSpec(env={"TOKEN": "hidden-word"}))
        done = await supervisor.exec(session.id, ExecSpec("echo hidden-word; (exit 3)"))
        await supervisor.exec(session.id, ExecSpec(argv=("true",)))
        await supervisor.open_shell(session.id, ShellSpec("second"))
        await supervisor.close_shell(session.id, "second")
        await supervisor.start_process(session.id, ProcessSpec(command="echo hidden-word", process_id="job"))
        events = await read_until(reader, EventType.PROCESS_EXITED)
        async with supervisor.open_terminal(session.id, TerminalSpec()) as viewer:
            await viewer.send(b"exit\n")
            await viewer.wait_end()
        await supervisor.destroy(session.id)
        events += await read_until(reader, EventType.SESSION_DESTROYED)
    assert types(events) == [
        "session.created",
        *("exec.started", "exec.ended", "exec.started", "exec.ended"),
        *("shell.opened", "shell.closed", "process.started", "process.exited"),
        *("terminal.opened", "terminal.closed", "session.destroyed"),
    ]
    assert {event.session_id for event in events} == {session.id}
    assert sorted(event.cursor for event in events) == [event.cursor for event in events]
    ended = events[2].data
    assert (ended["exec_id"], ended["exit_code"], ended["cause"]) == (done.end.exec_id, 3, "exited")
    assert (ended["shell"], ended["stdout_bytes"], ended["stderr_bytes"]) == ("default", 12, 0)
    assert events[8].data["exec_id"] == "job"
    assert "hidden-word" not in str(events)
    assert supervisor._journal.unknown_fields == set()


async def test_a_port_that_is_listened_on_is_told(supervisor: LocalSupervisor) -> None:
    """An event tells when a port is listened on, and another when it is no longer."""
    session = await supervisor.create(SessionSpec())
    async with supervisor.events(session_id=session.id) as reader:
        server = await supervisor.start_process(session.id, ProcessSpec(argv=("python3", "-m", "http.server", "8123")))
        opened = (await read_until(reader, EventType.PORT_OPENED))[-1]
        await supervisor.cancel_exec(session.id, server.exec_id)
        closed = (await read_until(reader, EventType.PORT_CLOSED))[-1]
    assert opened.data == closed.data == {"port": 8123, "address": "0.0.0.0"}


@pytest.mark.cgroup_v2
async def test_a_lack_of_memory_and_a_death_are_told(supervisor: LocalSupervisor) -> None:
    """Events name the kill for lack of memory, and a sandbox that died by itself."""
    session = await supervisor.create(SessionSpec(limits=Limits(memory_mb=64)))
    async with supervisor.events(session_id=session.id) as reader:
        await supervisor.exec(session.id, ExecSpec(argv=("python3", "-c", HOG)))
        events = await read_until(reader, EventType.OOM)
        assert events[-1].data["oom_kills"] >= 1
        if EventType.EXEC_ENDED.value not in types(events):
            events += await read_until(reader, EventType.EXEC_ENDED)
        assert next(each for each in events if each.type is EventType.EXEC_ENDED).data["cause"] == "oom"
        os.kill(init_pid(session), signal.SIGKILL)
        assert (await read_until(reader, EventType.SESSION_CRASHED))[-1].data["reason"]


async def test_events_go_on_where_a_stopped_supervisor_ended(config: Config) -> None:
    """A reader gets the last events of the old supervisor, the history of its sessions, and the new events, without a
    gap.
    """
    async with open_supervisor(config) as first, first.events() as reader:
        session = await first.create(SessionSpec())
        cursor = (await read_until(reader, EventType.SESSION_CREATED))[-1].cursor
        await first.exec(session.id, ExecSpec("true"))
    async with open_supervisor(config) as second:
        fresh = await second.create(SessionSpec())
        async with second.events(after=cursor) as reader:
            events = await read_until(reader, EventType.SESSION_CREATED)
            assert types(events) == ["exec.started", "exec.ended", "session.destroyed", "session.created"]
            assert [each.session_id for each in events] == [session.id] * 3 + [fresh.id]
        async with second.events(session_id=session.id, after="0") as reader:
            history = await read_until(reader, EventType.SESSION_DESTROYED)
            assert types(history) == ["session.created", "exec.started", "exec.ended", "session.destroyed"]
        with pytest.raises(SessionNotFound):
            await second.events(session_id="f" * 24).__aenter__()


@attrs.frozen
class Nonsense(Tell):
    """A message no actor knows; handling it is a bug and ends the actor."""


async def test_the_death_of_the_store_loses_no_event(supervisor: LocalSupervisor) -> None:
    """When the store dies readers stay, numbering goes on, and events that could not be written are written later."""
    session = await supervisor.create(SessionSpec())
    async with supervisor.events() as reader:
        supervisor._store.tell(Nonsense())
        await supervisor.exec(session.id, ExecSpec("true"))
        assert types(await read_until(reader, EventType.EXEC_ENDED)) == ["exec.started", "exec.ended"]

        async def is_written() -> bool:
            return supervisor._journal.rows == 3

        await until(is_written)
