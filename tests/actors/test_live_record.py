"""Records of leases in the database, on a virtual clock: never far from the truth, and never written too often."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime, timedelta

import attrs
import trio
import trio.testing

from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.store import Do
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.record import LiveRecord
from sandkasten.model import FOREVER_S, EndReason
from sandkasten.store.sessions import Clocked, SessionRecord
from tests.strategies import make_record

ID = "a" * 24


class _Notes(Actor):
    """In the place of the store: remembers what it was to write, and when."""

    def __init__(self) -> None:
        super().__init__(Ref("store"))
        self.written: list[tuple[float, SessionRecord]] = []

    async def handle(self, message: Do[None]) -> None:
        self.written.append((trio.current_time(), message.args[0]))


class _Session:
    """A live record with its lease, and whatever goes on in the session."""

    def __init__(self, record: SessionRecord, notes: _Notes) -> None:
        self.lease, self.followers = Lease(), 0
        self.own = LiveRecord(record, self.lease, store=notes.ref, directory=SessionDirectory())

    def begin(self) -> None:
        self.lease.begin_activity()

    async def follow(self) -> None:
        self.followers += 1
        await self.own.put_while_busy()
        self.followers -= 1

    def end(self) -> None:
        self.lease.end_activity()
        self.own.renew()
        self.own.put_lease()


async def _notes(nursery: trio.Nursery) -> _Notes:
    notes = _Notes()
    await nursery.start(notes.run)
    return notes


async def _recorded(nursery: trio.Nursery, *, ttl_s: float) -> tuple[_Notes, _Session]:
    """Return a session whose record was just written, and the notes of that and later writes."""
    notes = await _notes(nursery)
    session = _Session(make_record(ID, ttl_s=ttl_s), notes)
    await session.own.put()
    return notes, session


async def test_a_long_command_is_written_now_and_then(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Every ten seconds: the record says that the session is busy and ends no sooner than it would; then no more."""
    notes, session = await _recorded(nursery, ttl_s=60.0)
    session.begin()
    nursery.start_soon(session.own.put_while_busy)
    await trio.sleep(35)
    session.end()
    await trio.sleep(100)
    moments = [round(moment - notes.written[0][0]) for moment, _ in notes.written]
    assert moments == [0, 10, 20, 30, 35]
    assert [record.is_busy for _, record in notes.written] == [False, True, True, True, False]
    assert all(
        record.session.expires_at - record.session.last_activity >= timedelta(seconds=59)
        for _, record in notes.written[1:]
        if record.session.expires_at
    )


async def test_short_leases_are_written_more_often(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The recorded end is never near while the session is in use."""
    notes, session = await _recorded(nursery, ttl_s=4.0)
    session.begin()
    nursery.start_soon(session.own.put_while_busy)
    await trio.sleep(10)
    moments = [moment for moment, _ in notes.written]
    assert all(later - earlier <= 1.001 for earlier, later in itertools.pairwise(moments))
    session.end()


async def test_many_commands_cost_few_writes(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """Ten a second for half a minute."""
    notes, session = await _recorded(nursery, ttl_s=1800.0)
    for _ in range(300):
        session.begin()
        await trio.sleep(0.05)
        session.end()
        await trio.sleep(0.05)
    assert len(notes.written) <= 8


async def test_a_command_now_and_then_costs_one_write(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Each with its end, as the last one of several does; not one more for its begin, and none afterwards."""
    notes, session = await _recorded(nursery, ttl_s=1800.0)
    for pause_s in (60, 60, 5, 1, 60):
        session.begin()
        if session.followers == 0:
            nursery.start_soon(session.follow)
        await trio.sleep(0.002)
        session.end()
        await trio.sleep(pause_s)
    assert [round(moment - notes.written[0][0]) for moment, _ in notes.written] == [0, 10, 60, 120, 130]
    assert not any(record.is_busy for _, record in notes.written)


async def test_a_busy_session_shows_an_end_that_is_to_come(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A command that runs longer than the time to live never makes its session look expired; the hard end is shown."""
    notes = await _notes(nursery)
    now = datetime.now(UTC)
    session = _Session(make_record(ID, ttl_s=10.0, max_lifetime_s=100.0, created_at=now), notes)
    session.begin()
    await trio.sleep(50)
    view = session.own.session
    assert view.expires_at is not None
    assert timedelta(seconds=9) < view.expires_at - datetime.now(UTC) <= timedelta(seconds=10)
    await trio.sleep(45)
    view = session.own.session
    assert view.expires_at is not None
    assert timedelta(seconds=4) < view.expires_at - datetime.now(UTC) <= timedelta(seconds=5)
    assert (session.lease.has_ended, session.lease.reason) == (False, EndReason.MAX_LIFETIME)


def _adopted(record: SessionRecord, notes: _Notes, *, idle_s: float, is_busy: bool = False) -> _Session:
    """Return the session of a record whose last use was so long ago."""
    then = datetime.now(UTC) - timedelta(seconds=idle_s)
    recorded = attrs.evolve(record.session, last_activity=then, expires_at=then + timedelta(seconds=60))
    session = _Session(attrs.evolve(record, session=recorded, is_busy=is_busy), notes)
    session.own.restore_lease()
    return session


async def test_a_restart_neither_renews_nor_shortens_a_lease(nursery: trio.Nursery) -> None:
    """A lease has the same time left after a restart; a clock that was set back makes it no longer than its ttl."""
    notes = await _notes(nursery)
    record = make_record(ID, ttl_s=60.0)
    for idle_s, left_s in ((20, 40), (59, 1), (100, -40), (-3600, 60)):
        lease = _adopted(record, notes, idle_s=idle_s).lease
        assert abs(lease.end - trio.current_time() - left_s) < 0.5
        assert lease.reason is EndReason.IDLE


async def test_a_clock_that_is_set_moves_no_lease(nursery: trio.Nursery) -> None:
    """The time of day jumps by a day, either way, while no daemon runs: idle end and hard end come when they would
    have, and what is shown of them is by the clock as it is now."""
    notes = await _notes(nursery)
    for jump in (timedelta(days=1), timedelta(days=-1)):
        before = _Session(make_record(ID, ttl_s=60.0, max_lifetime_s=600.0), notes)
        before.own.renew()
        await before.own.put()
        written = notes.written[-1][1]
        moved = {name: getattr(written.session, name) - jump for name in ("created_at", "last_activity", "expires_at")}
        after = _Session(attrs.evolve(written, session=attrs.evolve(written.session, **moved)), notes)
        after.own.restore_lease()
        now = datetime.now(UTC)
        assert abs(after.lease.end - trio.current_time() - 60) < 0.5
        view = after.own.session
        assert view.expires_at is not None
        assert abs(view.expires_at - now - timedelta(seconds=60)) < timedelta(seconds=0.5)
        after.lease.begin_activity()
        assert abs(after.lease.end - trio.current_time() - 600) < 0.5


async def test_what_is_written_goes_on_where_it_was(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Idle for a while, then written: the next daemon counts that, and the age."""
    notes = await _notes(nursery)
    before = _Session(make_record(ID, ttl_s=60.0, max_lifetime_s=600.0), notes)
    before.own.renew()
    await trio.sleep(20)
    await before.own.put()
    after = _Session(notes.written[-1][1], notes)
    after.own.restore_lease()
    assert abs(after.lease.end - trio.current_time() - 40) < 0.5
    after.lease.begin_activity()
    assert abs(after.lease.end - trio.current_time() - 580) < 0.5


async def test_a_session_that_was_busy_is_not_found_expired(nursery: trio.Nursery) -> None:
    """A busy session's command counts as running until its daemon left, so the lease is whole; the session's age counts
    all the same.
    """
    notes = await _notes(nursery)
    busy = _adopted(make_record(ID, ttl_s=60.0), notes, idle_s=3600, is_busy=True)
    assert abs(busy.lease.end - trio.current_time() - 60) < 0.5
    old = datetime.now(UTC) - timedelta(seconds=3600)
    aged = make_record(ID, ttl_s=60.0, max_lifetime_s=3500.0, created_at=old)
    over = _adopted(aged, notes, idle_s=3600, is_busy=True)
    assert (over.lease.has_ended, over.lease.reason) == (True, EndReason.MAX_LIFETIME)


async def test_a_lease_without_end_survives_a_restart(nursery: trio.Nursery) -> None:
    """No end is shown."""
    notes = await _notes(nursery)
    record = make_record(ID, ttl_s=FOREVER_S)
    session = _Session(attrs.evolve(record, session=attrs.evolve(record.session, expires_at=None)), notes)
    session.own.restore_lease()
    assert session.lease.end == FOREVER_S
    session.own.renew()
    assert session.own.session.expires_at is None


async def test_what_fell_due_while_no_daemon_ran_is_announced(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The warning of an end whose minute has begun comes with the restart; a short lease still has none."""
    notes = await _notes(nursery)
    warned: list[tuple[EndReason, int]] = []

    async def end() -> None:
        await trio.sleep_forever()

    for ttl_s, idle_s in ((600.0, 570), (600.0, 100), (30.0, 5)):
        before = attrs.evolve(make_record(ID, ttl_s=ttl_s), clocked=Clocked(time.monotonic(), idle_s, idle_s))
        lease = _adopted(before, notes, idle_s=idle_s).lease
        nursery.start_soon(lease.watch, end, lambda reason, left_s: warned.append((reason, round(left_s))))
    await trio.sleep(1)
    assert warned == [(EndReason.IDLE, 30)]
    await trio.sleep(500)
    assert warned == [(EndReason.IDLE, 30), (EndReason.IDLE, 60)]
