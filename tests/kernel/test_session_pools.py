"""Session pools on the real kernel: a claimed session is as any other, and every way to lose a member."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.node import session_pools
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, PoolSettings, PoolSize, ServerSettings
from sandkasten.errors import InvalidRequest
from sandkasten.model import ExecSpec, Session, SessionSpec, Status
from tests.kernel.processes import init_pid
from tests.waiting import until


@asynccontextmanager
async def open_pool(config: Config, size: int) -> AsyncIterator[LocalSupervisor]:
    pool = PoolSettings(enabled=True, images={"python": PoolSize(size)})
    async with open_supervisor(attrs.evolve(config, pool=pool)) as supervisor:
        await until_ready(supervisor, size)
        yield supervisor


async def until_ready(supervisor: LocalSupervisor, size: int) -> None:
    async def is_ready() -> bool:
        return (await supervisor.pools())[0].ready == size

    await until(is_ready)


async def members(supervisor: LocalSupervisor) -> list[Session]:
    """Return the members, the newest first: in the order of their hand-out."""
    return list(await supervisor.list(status=Status.POOL_IDLE))


async def output(supervisor: LocalSupervisor, session: Session, command: str) -> str:
    return (await supervisor.exec(session.id, ExecSpec(command))).stdout.decode().strip()


def inside_of(pid: int) -> tuple[str, str]:
    """Return the processes and the mounts of a sandbox."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(), Path(f"/proc/{pid}/mountinfo").read_text()


async def test_a_claimed_session_is_as_one_that_was_made_for_its_client(config: Config) -> None:
    """The variables are in shells and programs, a file rule of nobody else is in the way, and a session made cold with
    the same settings sees the same of itself."""
    look = "id -u; pwd; ulimit -n; ls /; df -k --output=size / /tmp /dev/shm | tail -n +2; umask; env | sort"
    async with open_pool(config, 1) as supervisor:
        spec = SessionSpec(env={"SECRET": "s e c"}, ttl_s=60)
        claimed = await supervisor.create(spec)
        cold = await supervisor.create(
            attrs.evolve(spec, root_inside=None, limits=config.defaults.limits, shell="bash")
        )
        while cold.acquire_source == "pool":  # the refill was faster
            cold = await supervisor.create(spec)
        assert (claimed.acquire_source, cold.acquire_source) == ("pool", "cold")
        assert await output(supervisor, claimed, "echo $SECRET") == "s e c"
        program = await supervisor.exec(claimed.id, ExecSpec(argv=("/bin/sh", "-c", "echo $SECRET")))
        assert program.stdout == b"s e c\n"
        assert await output(supervisor, claimed, look) == await output(supervisor, cold, look)
        assert claimed.limits == cold.limits
        assert claimed.options == cold.options


async def test_a_claim_starts_and_mounts_nothing(config: Config) -> None:
    """PID 1, its processes and its mounts are those of the member."""
    async with open_pool(config, 1) as supervisor:
        (member,) = await members(supervisor)
        pid = init_pid(member)
        before = inside_of(pid)
        session = await supervisor.create(SessionSpec())
        assert session.id == member.id
        assert inside_of(pid) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
async def test_a_member_lost_at_hand_out_is_passed_over(config: Config, how: signal.Signals) -> None:
    """The next one is handed out, and the lost one removed whole. The variables are more than a socket holds."""
    env = {"A": "1", **dict.fromkeys("BCD", "b" * 100_000)}
    async with open_pool(config, 2) as supervisor:
        (first, second) = await members(supervisor)
        os.kill(init_pid(first), how)
        session = await supervisor.create(SessionSpec(idempotency_key="k", env=env))
        assert session.id == second.id
        await until_ready(supervisor, 2)

        async def is_gone() -> bool:
            return not (supervisor._config.data_dir / "sessions" / first.id).exists()

        await until(is_gone)
        assert await output(supervisor, session, "echo $A") == "1"
        assert first.id not in {each.id for each in await supervisor.list(ended=True)}


async def test_a_member_killed_while_it_idles_is_replaced(config: Config) -> None:
    """Before anybody asks for it."""
    async with open_pool(config, 1) as supervisor:
        (member,) = await members(supervisor)
        os.kill(init_pid(member), signal.SIGKILL)

        async def is_replaced() -> bool:
            return [each.id for each in await members(supervisor)] not in ([], [member.id])

        await until(is_replaced)
        await until_ready(supervisor, 1)
        assert (await supervisor.create(SessionSpec())).acquire_source == "pool"


async def test_a_frozen_member_is_thawed_by_its_claim(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time that a hand-out has."""
    monkeypatch.setattr(session_pools, "FREEZE_AFTER_S", 0.1)
    async with open_pool(config, 3) as supervisor:

        async def are_frozen() -> bool:
            return (await supervisor.pools())[0].frozen == 3

        await until(are_frozen)
        for _ in range(3):
            session = await supervisor.create(SessionSpec())
            assert session.acquire_source == "pool"
            assert await output(supervisor, session, "echo awake") == "awake"


async def test_variables_that_pid_1_refuses_are_the_clients_fault(config: Config) -> None:
    """As in a cold create; the member that was tried ends, and no session is left."""
    async with open_pool(config, 1) as supervisor:
        with pytest.raises(InvalidRequest):
            await supervisor.create(SessionSpec(env={"not a name": "x"}, idempotency_key="k"))
        assert await supervisor.list(ended=True) == []
        await until_ready(supervisor, 1)
        assert (await supervisor.create(SessionSpec(idempotency_key="k", env={"A": "1"}))).acquire_source == "pool"


async def test_members_outlive_their_daemon_and_serve_the_next_one(config: Config) -> None:
    """A member is adopted as it is, frozen or not; without the setting it is removed."""
    config = attrs.evolve(config, sessions_on_stop="keep")
    async with open_pool(config, 2) as supervisor:
        before = {each.id: init_pid(each) for each in await members(supervisor)}
    async with open_pool(config, 2) as supervisor:
        assert {each.id: init_pid(each) for each in await members(supervisor)} == before
        session = await supervisor.create(SessionSpec(env={"A": "1"}))
        assert session.id in before
        assert await output(supervisor, session, "echo $A") == "1"
    async with open_supervisor(attrs.evolve(config, sessions_on_stop="destroy")) as supervisor:

        async def is_settled() -> bool:
            return set(os.listdir(supervisor._config.data_dir / "sessions")) == {session.id}

        await until(is_settled)
        assert await output(supervisor, session, "echo $A") == "1"


async def test_a_full_node_gives_members_up_for_clients(config: Config) -> None:
    """A create that does not fit beside them waits until one is gone, and is not refused."""
    config = attrs.evolve(config, server=ServerSettings(pool_sandboxes=0, max_sessions=2))
    async with open_pool(config, 2) as supervisor:
        made = [await supervisor.create(SessionSpec(root_inside=False)) for _ in range(2)]
        assert [each.acquire_detail for each in made] == ["pool_mismatch"] * 2
        with trio.move_on_after(0.5):
            await until_ready(supervisor, 1)
        assert (await supervisor.pools())[0].ready == 0
