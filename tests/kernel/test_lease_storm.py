"""Many leases that run out together, requests that come at that very moment, and what is said of a death."""

from __future__ import annotations

import os
import signal
from collections import Counter

import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import SessionExpired
from sandkasten.model import Cause, EndReason, ExecSpec, Limits, Session, SessionPatch, SessionSpec, Status
from tests.kernel.processes import init_pid
from tests.waiting import patience, until

MANY = 40
MAX_LAG_S = 0.5
"""Longest time that the event loop may be busy with one thing; far above the usual one, to allow for a busy machine."""

SMALL = Limits(memory_mb=32, pids=16)


async def _create_many(supervisor: LocalSupervisor, number: int) -> list[Session]:
    sessions: list[Session] = []

    async def create() -> None:
        sessions.append(await supervisor.create(SessionSpec(ttl_s=600, limits=SMALL)))

    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(create)
    return sessions


async def _watch_loop(lags: list[float]) -> None:
    """Note how late the event loop comes back, again and again."""
    while True:
        began = trio.current_time()
        await trio.sleep(0.01)
        lags.append(trio.current_time() - began - 0.01)


async def test_a_storm_of_expiries_ends_all_and_the_daemon_answers(supervisor: LocalSupervisor) -> None:
    """Leases that end at the same moment: each session ends as idle, the event loop goes on, and a session can be made
    meanwhile.
    """
    sessions = await _create_many(supervisor, MANY)
    lags: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_loop, lags)
        for session in sessions:
            nursery.start_soon(supervisor.update, session.id, SessionPatch(ttl_s=0.3))

        async def has_begun() -> bool:
            return len(await supervisor.list()) < MANY

        await until(has_begun)
        made = await supervisor.create(SessionSpec())

        async def is_over() -> bool:
            return [each.id for each in await supervisor.list()] == [made.id]

        await until(is_over)
        nursery.cancel_scope.cancel()
    ended = [await supervisor.get(session.id) for session in sessions]
    assert {(each.status, each.end_reason) for each in ended} == {(Status.EXPIRED, EndReason.IDLE)}
    assert max(lags) < patience(MAX_LAG_S)


async def test_a_command_at_the_moment_of_expiry_is_served_or_finds_it_ended(supervisor: LocalSupervisor) -> None:
    """The message that came first into the mailbox decides: no command is begun and then lost with its session."""
    sessions = await _create_many(supervisor, 16)
    outcomes: Counter[str] = Counter()

    async def race(session: Session, delay_s: float) -> None:
        await supervisor.update(session.id, SessionPatch(ttl_s=0.3))
        await trio.sleep(0.3 + delay_s)
        try:
            result = await supervisor.exec(session.id, ExecSpec("echo served"))
        except SessionExpired:
            ended = await supervisor.wait_ended(session.id)
            assert (ended.status, ended.end_reason) == (Status.EXPIRED, EndReason.IDLE)
            outcomes["gone"] += 1
        else:
            assert (result.stdout, result.end.cause) == (b"served\n", Cause.EXITED)
            outcomes["served"] += 1

    async with trio.open_nursery() as nursery:
        for number, session in enumerate(sessions):
            nursery.start_soon(race, session, (number - 4) * 0.02)
    assert outcomes.total() == len(sessions)
    assert outcomes["gone"] > 0


async def test_a_death_long_after_a_kill_for_memory_is_not_put_down_to_it(supervisor: LocalSupervisor) -> None:
    """A session that lived on after a kill for memory and whose PID 1 dies later was not ended by a lack of memory."""
    session = await supervisor.create(SessionSpec(limits=Limits(memory_mb=48)))
    hog = await supervisor.exec(session.id, ExecSpec("python3 -c 'x = bytearray(200 << 20)'"))
    assert hog.end.cause is Cause.OOM
    await supervisor.exec(session.id, ExecSpec("sleep 2.5"))
    os.kill(init_pid(session), signal.SIGKILL)
    ended = await supervisor.wait_ended(session.id)
    assert (ended.end_reason, ended.reason) == (EndReason.CRASHED, "its init process ended")
