"""An id that a client chose runs once in the life of its session, whatever is forgotten, restarted or damaged."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, RunsSettings
from sandkasten.errors import ExecGone, ExecIdsExhausted, ExecNotFound
from sandkasten.model import ExecSpec, SessionSpec

ONCE = ExecSpec("echo x >>/tmp/log", exec_id="once")
COUNT = ExecSpec("wc -l </tmp/log")


@pytest.fixture
def forgetful(config: Config) -> Config:
    """A daemon that keeps about a hundred ended runs, remembers ten ids, and leaves sessions to the next one."""
    return attrs.evolve(config, sessions_on_stop="keep", runs=RunsSettings(keep_mb=1, max_exec_ids=10))


async def forget_all(supervisor: LocalSupervisor, session_id: str) -> None:
    """Run so much that nothing is kept of what ran before."""
    before = {each.exec_id for each in await supervisor.execs(session_id)}
    while before & {each.exec_id for each in await supervisor.execs(session_id)}:
        for _ in range(20):
            await supervisor.exec(session_id, ExecSpec(":"))


async def test_a_run_that_is_forgotten_is_not_run_again(forgetful: Config) -> None:
    """An id runs once: neither any number of later runs nor a restart, after which ids come from a file, lets it run
    again.
    """
    async with open_supervisor(forgetful) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.exec(session.id, ONCE)
        await forget_all(supervisor, session.id)
        with pytest.raises(ExecGone):
            await supervisor.exec(session.id, ONCE)
        assert (await supervisor.stats(session.id)).spool_bytes > 500_000  # runs that it kept instead
    for _ in range(2):
        async with open_supervisor(forgetful) as supervisor:
            for wanted in (supervisor.exec(session.id, ONCE), supervisor.get_exec(session.id, "once")):
                with pytest.raises(ExecGone):
                    await wanted
            assert (await supervisor.exec(session.id, COUNT)).stdout == b"1\n"
    async with open_supervisor(attrs.evolve(forgetful, sessions_on_stop="destroy")) as supervisor:
        await supervisor.destroy(session.id)
        assert not list((forgetful.data_dir / "spool").iterdir())


async def test_at_the_bound_no_new_id_is_taken(forgetful: Config) -> None:
    """At the bound of remembered ids a new id is refused rather than an old one forgotten; runs without an id go on,
    and so does a repeat of a kept run.
    """
    async with open_supervisor(attrs.evolve(forgetful, sessions_on_stop="destroy")) as supervisor:
        session = await supervisor.create(SessionSpec())
        for number in range(10):
            await supervisor.exec(session.id, ExecSpec(":", exec_id=f"chosen-{number}"))
        await supervisor.exec(session.id, ONCE)
        await forget_all(supervisor, session.id)
        with pytest.raises(ExecIdsExhausted) as refused:
            await supervisor.exec(session.id, ExecSpec(":", exec_id="one-more"))
        assert refused.value.details == {"max_exec_ids": 10}
        with pytest.raises(ExecNotFound):
            await supervisor.get_exec(session.id, "one-more")
        with pytest.raises(ExecGone):
            await supervisor.exec(session.id, ONCE)
        assert (await supervisor.exec(session.id, COUNT)).stdout == b"1\n"


async def test_an_id_that_the_server_made_can_be_joined_and_not_chosen(forgetful: Config) -> None:
    """An id made by the server can be joined while its run is kept; afterwards a client's request with that id runs
    nothing.
    """
    async with open_supervisor(attrs.evolve(forgetful, sessions_on_stop="destroy")) as supervisor:
        session = await supervisor.create(SessionSpec())
        made = (await supervisor.exec(session.id, attrs.evolve(ONCE, exec_id=None))).end.exec_id
        repeat = attrs.evolve(ONCE, exec_id=made)
        assert (await supervisor.exec(session.id, repeat)).end.exec_id == made
        await forget_all(supervisor, session.id)
        with pytest.raises(ExecGone):
            await supervisor.exec(session.id, repeat)
        with pytest.raises(ExecGone):
            await supervisor.exec(session.id, attrs.evolve(ONCE, exec_id="run-" + "0" * 16))
        assert (await supervisor.exec(session.id, COUNT)).stdout == b"1\n"


async def test_with_damaged_records_no_id_is_taken_that_may_have_been_used(forgetful: Config, data_dir: Path) -> None:
    """With the record of used ids damaged, a client's id is refused with a typed error; a run without an id works."""
    async with open_supervisor(forgetful) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.exec(session.id, ONCE)
        await forget_all(supervisor, session.id)
    for path in (data_dir / "spool").glob("*.runs"):
        content = bytearray(path.read_bytes())
        content[4] ^= 0xFF
        path.write_bytes(content)
    async with open_supervisor(attrs.evolve(forgetful, sessions_on_stop="destroy")) as supervisor:
        with pytest.raises((ExecIdsExhausted, ExecGone)):
            await supervisor.exec(session.id, ONCE)
        with pytest.raises(ExecIdsExhausted, match="damaged"):
            await supervisor.exec(session.id, ExecSpec(":", exec_id="new"))
        assert (await supervisor.exec(session.id, COUNT)).stdout == b"1\n"
