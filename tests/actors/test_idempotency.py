"""Repeated creates: the answer about the session that the same key made, at any moment of that session's life."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from sandkasten.actors.core import Ref
from sandkasten.actors.node.sessions import IdempotentCreates
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.store import Store, do
from sandkasten.admission.plan import spec_digest
from sandkasten.errors import Conflict, SessionExpired
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.store.sessions import SessionRecord, put_session
from tests.strategies import make_record
from tests.waiting import patience

SPEC = SessionSpec(idempotency_key="k")
BEFORE, NEW = "a" * 24, "b" * 24


@pytest.fixture
async def store(tmp_path: Path, nursery: trio.Nursery) -> Ref:
    ref: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db").run)
    return ref


@pytest.fixture
def directory() -> SessionDirectory:
    return SessionDirectory()


@pytest.fixture
def creates(store: Ref, directory: SessionDirectory) -> IdempotentCreates:
    async def make(spec: SessionSpec, digest: str) -> Session:
        record = attrs.evolve(make_record(NEW, idempotency_key=spec.idempotency_key), spec_digest=digest)
        await store.ask(do(put_session, record))
        return record.session

    return IdempotentCreates(store, directory, make)


def made_before(status: Status) -> SessionRecord:
    return attrs.evolve(make_record(BEFORE, status=status, idempotency_key="k"), spec_digest=spec_digest(SPEC))


async def test_a_session_that_nobody_was_told_of_is_told_to_nobody(
    store: Ref, creates: IdempotentCreates, nursery: trio.Nursery
) -> None:
    """A session that an earlier daemon had begun is being undone when the repeat comes: the repeat waits, and makes
    another one.
    """
    begun = made_before(Status.CREATING)
    await store.ask(do(put_session, begun))
    made: list[str] = []

    async def create() -> None:
        made.append((await creates.create(SPEC)).id)

    async with trio.open_nursery() as repeats:
        repeats.start_soon(create)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked(0.02)
        assert made == []
        with pytest.raises(Conflict):
            await creates.create(attrs.evolve(SPEC, image="other"))
        undone = attrs.evolve(begun.session, status=Status.CRASHED)
        ended = attrs.evolve(begun, session=undone, ended_at=datetime.now(UTC), idempotency_key=None)
        await store.ask(do(put_session, ended))
        repeats.cancel_scope.deadline = trio.current_time() + patience()
    assert made == [NEW]


@pytest.mark.parametrize("status", [Status.DESTROYING, Status.DESTROYED, Status.LOST])
async def test_a_session_that_ends_or_has_ended_is_said_to(
    store: Ref, creates: IdempotentCreates, status: Status
) -> None:
    """The repeated create itself is answered with the end, not only the first command after it."""
    await store.ask(do(put_session, made_before(status)))
    with pytest.raises(SessionExpired) as told:
        await creates.create(SPEC)
    assert told.value.details["status"] == status.value


async def test_an_end_that_the_database_did_not_take_counts(
    store: Ref, creates: IdempotentCreates, directory: SessionDirectory
) -> None:
    """The database says that the session runs, and is wrong."""
    record = made_before(Status.RUNNING)
    await store.ask(do(put_session, record))
    assert (await creates.create(SPEC)).id == BEFORE
    ended = attrs.evolve(record.session, status=Status.EXPIRED)
    directory.unwritten[BEFORE] = attrs.evolve(record, session=ended)
    with pytest.raises(SessionExpired):
        await creates.create(SPEC)
