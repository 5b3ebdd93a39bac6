"""Leases on the real kernel: what keeps a session, what does not, and how it can be changed while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, Maximum
from sandkasten.errors import InvalidRequest
from sandkasten.model import (
    FOREVER_S,
    EndReason,
    ExecSpec,
    ProcessSpec,
    Session,
    SessionPatch,
    SessionSpec,
    Status,
    TerminalSpec,
    WaitFor,
)
from tests.waiting import until

TTL_S = 0.5


async def _ended(supervisor: LocalSupervisor, session_id: str) -> Session:
    async def has_ended() -> bool:
        return (await supervisor.get(session_id)).status is Status.EXPIRED

    await until(has_ended)
    return await supervisor.get(session_id)


async def _hold(
    supervisor: LocalSupervisor, session_id: str, what: str, stack: AsyncExitStack, nursery: trio.Nursery
) -> None:
    """Do what is to keep the session, and go on with it until the stack is left."""
    idle = ProcessSpec(argv=("sleep", "60"))
    match what:
        case "command":
            await stack.enter_async_context(supervisor.open_exec(session_id, ExecSpec("sleep 60")))
        case "keep-alive process":
            kept = await supervisor.start_process(session_id, attrs.evolve(idle, keep_alive=True))
            stack.push_async_callback(supervisor.cancel_exec, session_id, kept.exec_id, now=True)
        case "stream":
            process = await supervisor.start_process(session_id, idle)
            await stack.enter_async_context(supervisor.attach_exec(session_id, process.exec_id))
        case "viewer":
            spec = TerminalSpec(shell="default", read_only=True)
            await stack.enter_async_context(supervisor.open_terminal(session_id, spec))
        case "client":
            await stack.enter_async_context(supervisor.attend(session_id))
        case "wait":
            process = await supervisor.start_process(session_id, idle)

            async def wait() -> None:
                await supervisor.wait_process(session_id, process.exec_id, WaitFor(exit=True), timeout_s=60)

            nursery.start_soon(wait)


async def test_what_is_activity_keeps_a_session_and_looking_at_it_does_not(supervisor: LocalSupervisor) -> None:
    """A command, a keep-alive process, a stream, a terminal's viewer, a connection and a wait keep a session for as
    long as they last. Meanwhile a session with twice the time to live expires, although requests look at it all the
    time.
    """
    kinds = ("command", "keep-alive process", "stream", "viewer", "client", "wait")
    looked_at = (await supervisor.create(SessionSpec(ttl_s=60))).id
    process = await supervisor.start_process(looked_at, ProcessSpec(argv=("sleep", "60")))
    async with trio.open_nursery() as nursery:
        async with AsyncExitStack() as stack:
            kept = {}
            for kind in kinds:
                kept[kind] = (await supervisor.create(SessionSpec(ttl_s=60))).id
                await _hold(supervisor, kept[kind], kind, stack, nursery)
                await supervisor.update(kept[kind], SessionPatch(ttl_s=TTL_S))
            await supervisor.update(looked_at, SessionPatch(ttl_s=2 * TTL_S))

            async def has_expired() -> bool:
                if (await supervisor.get(looked_at)).status is not Status.RUNNING:
                    return True
                await _look(supervisor, looked_at, process.exec_id)
                return False

            await until(has_expired)
            states = {kind: (await supervisor.get(session_id)).status for kind, session_id in kept.items()}
            assert states == dict.fromkeys(kinds, Status.RUNNING)
        nursery.cancel_scope.cancel()
    assert (await _ended(supervisor, looked_at)).end_reason is EndReason.IDLE
    assert {(await _ended(supervisor, each)).end_reason for each in kept.values()} == {EndReason.IDLE}


async def _look(supervisor: LocalSupervisor, session_id: str, exec_id: str) -> None:
    """Ask all that can be asked about a session without doing anything to it; it may end meanwhile."""
    looks: list[Callable[[], Awaitable[object]]] = [
        lambda: supervisor.stats(session_id),
        lambda: supervisor.execs(session_id),
        lambda: supervisor.get_exec(session_id, exec_id),
        lambda: supervisor.read_output(session_id, exec_id),
        lambda: supervisor.shells(session_id),
        lambda: supervisor.ports(session_id),
        supervisor.list,
    ]
    for look in looks:
        if (await supervisor.get(session_id)).status is Status.RUNNING:
            await look()


async def test_a_running_lease_is_shortened_and_extended(supervisor: LocalSupervisor) -> None:
    """Both limits of a lease can be shortened, extended, removed and set again; timers that run already follow."""
    session = await supervisor.create(SessionSpec(ttl_s=0.6, max_lifetime_s=3600))
    await supervisor.update(session.id, SessionPatch(ttl_s=600))
    endless = await supervisor.update(session.id, SessionPatch(ttl_s=FOREVER_S, max_lifetime_s=FOREVER_S))
    assert (endless.expires_at, endless.ttl_s, endless.max_lifetime_s) == (None, FOREVER_S, FOREVER_S)
    bounded = await supervisor.update(session.id, SessionPatch(max_lifetime_s=1000))
    assert bounded.expires_at is not None
    assert abs(bounded.expires_at - session.created_at - timedelta(seconds=1000)) < timedelta(seconds=1)
    with pytest.raises(InvalidRequest):
        await supervisor.update(session.id, SessionPatch(ttl_s=1, max_lifetime_s=-1.0))
    assert (await supervisor.get(session.id)).ttl_s == FOREVER_S

    async def is_older_than_its_first_lease() -> bool:
        found = await supervisor.get(session.id)
        return (found.last_activity - found.created_at).total_seconds() > 0.6 or bool(
            await supervisor.exec(session.id, ExecSpec("sleep 0.2"))
        )

    await until(is_older_than_its_first_lease)
    await supervisor.update(session.id, SessionPatch(ttl_s=0.2))
    assert (await _ended(supervisor, session.id)).end_reason is EndReason.IDLE


async def test_a_life_that_is_made_shorter_than_it_was_ends_at_once(supervisor: LocalSupervisor) -> None:
    """A maximum lifetime below the session's age ends the session at once, whatever runs, and is the end's reason."""
    session = await supervisor.create(SessionSpec(ttl_s=600))
    async with supervisor.attend(session.id):
        await supervisor.update(session.id, SessionPatch(max_lifetime_s=0.001))
        ended = await _ended(supervisor, session.id)
    assert (ended.end_reason, ended.reason) == (EndReason.MAX_LIFETIME, "it reached its maximum lifetime")


async def test_the_operator_s_maximum_holds_for_creates_and_changes(config: Config) -> None:
    """A session without a lifetime gets the operator's maximum; a longer or endless one is refused, nothing is made."""
    bounded = attrs.evolve(config, maximum=Maximum(idle_timeout_seconds=3600, max_lifetime_seconds=60))
    async with open_supervisor(bounded) as supervisor:
        session = await supervisor.create(SessionSpec())
        assert session.max_lifetime_s == 60
        for spec in (SessionSpec(ttl_s=FOREVER_S), SessionSpec(max_lifetime_s=61), SessionSpec(ttl_s=3601)):
            with pytest.raises(InvalidRequest):
                await supervisor.create(spec)
        for patch in (SessionPatch(ttl_s=FOREVER_S), SessionPatch(max_lifetime_s=FOREVER_S)):
            with pytest.raises(InvalidRequest):
                await supervisor.update(session.id, patch)
        assert len(await supervisor.list(ended=True)) == 1


async def test_a_session_without_end_outlives_its_daemon(config: Config) -> None:
    """A session without end is adopted by the next daemon; a stop of the daemon that ends sessions is recorded as a
    user's request.
    """
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(ttl_s=FOREVER_S))
    async with open_supervisor(config) as supervisor:
        found = await supervisor.get(session.id)
        assert (found.status, found.expires_at, found.ttl_s) == (Status.RUNNING, None, FOREVER_S)
    async with open_supervisor(config) as supervisor:
        stopped = await supervisor.get(session.id)
        assert (stopped.end_reason, stopped.reason) == (EndReason.USER, "the daemon was stopped")
