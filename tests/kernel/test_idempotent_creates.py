"""Idempotency keys over the end of sessions and of daemons."""

from __future__ import annotations

from contextlib import closing

import attrs
import pytest

from sandkasten.admission.plan import spec_digest
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import Conflict, SessionExpired
from sandkasten.model import EndReason, SessionSpec, Status
from sandkasten.store.database import open_database
from sandkasten.store.sessions import put_session
from tests.strategies import make_record

CUT_SHORT = "c" * 24


async def test_a_key_survives_its_daemon_and_is_spent_with_its_session(config: Config) -> None:
    """The next daemon answers a repeated key with the same session, refuses it for another request, and answers with
    the session's end once it has ended.
    """
    spec = SessionSpec(idempotency_key="k", env={"SECRET": "s"}, ttl_s=600)
    async with open_supervisor(attrs.evolve(config, sessions_on_stop="keep")) as supervisor:
        session = await supervisor.create(spec)
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.create(spec)).id == session.id
        for other in (attrs.evolve(spec, env={"SECRET": "t"}), attrs.evolve(spec, ttl_s=601)):
            with pytest.raises(Conflict):
                await supervisor.create(other)
        await supervisor.destroy(session.id)
        with pytest.raises(SessionExpired) as refused:
            await supervisor.create(spec)
        assert refused.value.details["end_reason"] == "user"


async def test_a_create_that_the_daemon_did_not_live_to_finish_can_be_repeated(config: Config) -> None:
    """A session whose create was cut off by the daemon's death ends as an error, and its idempotency key makes the next
    one.
    """
    spec = SessionSpec(idempotency_key="k")
    record = attrs.evolve(
        make_record(CUT_SHORT, status=Status.CREATING, idempotency_key="k"), spec_digest=spec_digest(spec)
    )
    with closing(open_database(config.db_path)) as database:
        put_session(database, record)
    async with open_supervisor(config) as supervisor:
        made = await supervisor.create(spec)
        assert made.id != CUT_SHORT
        found = await supervisor.get(CUT_SHORT)
        assert (found.status, found.end_reason) == (Status.CRASHED, EndReason.ERROR)
