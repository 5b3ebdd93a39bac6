"""The mode `ask`, from a program inside to the one who answers: what waits goes on, is reset, or runs out of time."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio

from egress.state import MAX_ASKED
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.errors import SandkastenError
from sandkasten.model import Event, EventType, ExecResult, ProcessSpec, Session, SessionPatch, SessionSpec
from sandkasten.model.network import EgressDenial, EgressVerdict, Network, NetworkMode
from tests.kernel.test_network import CONNECT, FETCH, SITE, outside, python, served, supervisor, told
from tests.kernel.world import World
from tests.waiting import patience, until

__all__ = ["outside", "supervisor"]

ASK = Network(NetworkMode.ASK)
ALLOWING = Network(NetworkMode.ASK, allow=["site.example"])
FETCH_IN_THE_END = """
while True:
    try:
        print(urllib.request.urlopen('http://site.example/').read().decode(), end='')
        break
    except OSError:
        time.sleep(0.1)
"""
MANY = """
held = []
for number in range({}):
    try:
        held.append(socket.create_connection((f'n{{number}}.example', 80), timeout=20))
    except OSError:
        pass
import time
time.sleep(600)
"""


@asynccontextmanager
async def waiting(
    supervisor: LocalSupervisor, session: Session, code: str, *, after: str = "0"
) -> AsyncIterator[tuple[Event, Callable[[], Awaitable[ExecResult]]]]:
    """Run a program whose connection waits; give the event and a way to wait for the result."""
    found: list[ExecResult] = []
    has_ended = trio.Event()

    async def run() -> None:
        with suppress(SandkastenError):  # the session may end first
            found.append(await python(supervisor, session, code))
        has_ended.set()

    async def result() -> ExecResult:
        await has_ended.wait()
        return found[0]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        event = await told(supervisor, EventType.EGRESS_ASK, session.id, after=after)
        assert not found
        yield event, result


async def answered(
    supervisor: LocalSupervisor, session: Session, code: str, network: Network, *, after: str = "0"
) -> tuple[ExecResult, Event]:
    """Run a program whose connection waits, and change the network then; return its result and the event."""
    async with waiting(supervisor, session, code, after=after) as (event, result):
        await supervisor.update(session.id, SessionPatch(network=network))
        return await result(), event


async def test_a_connection_goes_on_when_its_host_is_allowed(supervisor: LocalSupervisor, outside: World) -> None:
    """The event says which run waits, and for what; the program knows of nothing, and was refused nothing."""
    session = await supervisor.create(SessionSpec(network=ASK))
    result, event = await answered(supervisor, session, FETCH.format("site.example"), ALLOWING)
    assert (result.stdout, result.end.egress_denied) == (b"hello\n", ()), result.stderr
    wanted = {"host": "site.example", "port": 80, "exec_id": result.end.exec_id, "remaining_s": 30}
    assert wanted.items() <= event.data.items()
    assert outside.heard == [(SITE, 80)]
    (entry,) = (await supervisor.egress_log(session.id, verdict=EgressVerdict.ASKED)).entries
    assert (entry.host, entry.port, entry.reason) == ("site.example", 80, None)
    assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"


async def test_a_connection_is_reset_when_its_host_is_denied(supervisor: LocalSupervisor, outside: World) -> None:
    """The run's result says so, and nobody outside heard of it; from then on there is no such name."""
    session = await supervisor.create(SessionSpec(network=ASK))
    denying = Network(NetworkMode.ASK, deny=["site.example"])
    result, _event = await answered(supervisor, session, CONNECT.format("site.example", 80), denying)
    assert b"Connection" in result.stdout, result.stdout
    assert result.end.egress_denied == (EgressDenial("site.example", 80, "denied"),)
    again = await python(supervisor, session, FETCH.format("site.example"))
    assert b"Name or service not known" in again.stderr
    assert outside.heard == []


async def test_nobody_answers(config: Config, outside: World) -> None:
    """After the operator's time the connection is refused, and the next one is asked about anew."""
    async with served(config, outside, ask_timeout_s=1) as supervisor:
        session = await supervisor.create(SessionSpec(network=ASK))
        for _ in range(2):
            result = await python(supervisor, session, CONNECT.format("site.example", 80))
            assert b"Connection" in result.stdout, result.stdout
            assert EgressDenial("site.example", 80, "unanswered") in result.end.egress_denied
        asked = (await supervisor.egress_log(session.id, verdict=EgressVerdict.ASKED)).entries
        assert len(asked) == 2
    assert outside.heard == []


async def test_a_process_that_ends_lets_go_of_what_it_holds(supervisor: LocalSupervisor, outside: World) -> None:
    """The connection is reset; the next one asks the next process, and is answered as ever."""
    session = await supervisor.create(SessionSpec(network=ASK))
    async with waiting(supervisor, session, CONNECT.format("site.example", 80)) as (event, result):
        os.kill(outside.egress_pid, signal.SIGKILL)
        assert b"Connection" in (await result()).stdout
    await told(supervisor, EventType.EGRESS_RESTARTED)
    again, _event = await answered(supervisor, session, FETCH.format("site.example"), ALLOWING, after=event.cursor)
    assert again.stdout == b"hello\n", again.stderr


async def test_the_end_of_a_session_lets_go_of_what_it_holds(supervisor: LocalSupervisor, outside: World) -> None:
    """Nothing waits for a connection that waits, and no descriptor is left."""
    await supervisor.destroy((await supervisor.create(SessionSpec(network=ASK))).id)
    before = len(os.listdir(f"/proc/{outside.egress_pid}/fd"))
    session = await supervisor.create(SessionSpec(network=ASK))
    async with waiting(supervisor, session, CONNECT.format("site.example", 80)):
        with trio.fail_after(patience()):
            await supervisor.destroy(session.id)

    async def is_let_go() -> bool:
        return len(os.listdir(f"/proc/{outside.egress_pid}/fd")) == before

    await until(is_let_go)


async def test_an_adopted_session_asks_again(config: Config, outside: World) -> None:
    """The end of a daemon resets what waits; the next daemon is told of the next connection."""
    async with served(config, outside, ends_sessions=False, ask_timeout_s=3) as supervisor:
        session = await supervisor.create(SessionSpec(network=ASK))
        spec = ProcessSpec(argv=("python3", "-c", f"import time, urllib.request\n{FETCH_IN_THE_END}"))
        process = await supervisor.start_process(session.id, spec)
        event = await told(supervisor, EventType.EGRESS_ASK, session.id)
        assert event.data["exec_id"] == process.exec_id
    async with served(config, outside) as supervisor:
        await told(supervisor, EventType.EGRESS_ASK, session.id, after=event.cursor)
        await supervisor.update(session.id, SessionPatch(network=ALLOWING))
        async with supervisor.attach_exec(session.id, process.exec_id) as run:
            with trio.fail_after(patience(60)):
                assert b"".join([chunk.data async for chunk in run]) == b"hello"
    assert outside.heard == [(SITE, 80)]


async def test_many_names_are_few_questions(supervisor: LocalSupervisor, outside: World) -> None:
    """Of 300, so many have an event; the others are refused as a limit, counted together."""
    session = await supervisor.create(SessionSpec(network=ASK))
    async with waiting(supervisor, session, MANY.format(300)):
        limited = await told(supervisor, EventType.EGRESS_LIMITED, session.id)
        assert limited.data["reason"] == "limit"

        async def are_all_refused() -> bool:
            denied = await supervisor.egress_log(session.id, verdict=EgressVerdict.DENIED)
            return len(denied.entries) == 300 - MAX_ASKED

        await until(are_all_refused)
        recent = supervisor._journal.recent(session.id, limit=1000)
        assert sum(each.type is EventType.EGRESS_ASK for each in recent) == MAX_ASKED
        await supervisor.destroy(session.id)
    assert outside.heard == []
