"""Run cgroups and kills for memory as the daemon asks for them: by the nsinit client, with a real nsinit behind it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from nsinit.wire.protocol import FindOomKills, Ready, RemoveRunCgroup
from sandkasten.actors.core import Ask, Ref
from sandkasten.actors.services.nsinit import (
    Describe,
    NsinitClient,
    build,
    call,
    make_run_cgroup,
    recent_name,
    set_limits,
    teardown,
)
from sandkasten.errors import BuildFailed, BuildInterrupted
from tests.kernel.harness import ROOMY, data_directory, host_plan


@asynccontextmanager
async def _started(crash_at: str = "") -> AsyncIterator[tuple[Ref, Path]]:
    """An nsinit client, and where it keeps its sessions' groups."""
    with data_directory() as data_dir:
        async with trio.open_nursery() as nursery:
            ref = Ref("nsinit")
            await nursery.start(NsinitClient(ref, data_dir, secrets.token_hex(8), crash_at=crash_at).run)
            ready = await ref.ask(Describe())
            assert isinstance(ready, Ready)
            yield ref, Path(ready.cgroup_dirs.get("unified", ready.cgroup_dirs["pids"]))
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _session(ref: Ref) -> AsyncIterator[str]:
    """A session without a daemon around it."""
    plan = host_plan(limits=replace(ROOMY, memory_bytes=48 << 20))
    sandbox = await ref.ask(build(plan))
    sandbox.close_unused()
    yield plan.session_id
    torn_down = await ref.ask(teardown(plan.session_id))
    assert torn_down.leftovers == ()


@asynccontextmanager
async def _sleeper() -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(["/bin/sleep", "1000"])
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.cgroup_v2
async def test_a_group_is_handed_over_with_its_descriptor() -> None:
    """The descriptor is the receiver's; the run cgroup goes when a request says so."""
    async with _started() as (ref, directory), _session(ref) as session_id:
        handle = await ref.ask(make_run_cgroup(session_id, "p-1"))
        assert (handle.name, handle.membership) == ("p-1", "clone")
        path = directory / session_id / "p-1"
        with handle.fd:
            assert os.fstat(handle.fd.fileno()).st_ino == path.stat().st_ino
        await ref.ask(call(RemoveRunCgroup, session_id, "p-1", kill=True))
        assert not path.exists()


@pytest.mark.parametrize("step", ["group", "raise_limits"])
async def test_who_dies_of_every_order_makes_a_request_worth_another_try(step: str) -> None:
    """A cgroup maker that dies of every order: the request fails as retryable, neither by the session's fault nor the
    caller's, and a run cgroup that was not handed out is removed.
    """
    async with _started(f"cgroup_maker.{step}") as (ref, directory), _session(ref) as session_id:
        raised = replace(ROOMY, memory_bytes=ROOMY.memory_bytes * 2)
        request: Ask[object] = make_run_cgroup(session_id, "p-1") if step == "group" else set_limits(session_id, raised)
        with pytest.raises(BuildInterrupted):
            await ref.ask(request)
        assert not (directory / session_id / "p-1").exists()


async def test_a_refusal_says_why() -> None:
    """A refused request has the errno of the kernel or of the rule that refused it."""
    async with _started() as (ref, _), _session(ref) as session_id:
        (await ref.ask(make_run_cgroup(session_id, "twice"))).close_unused()
        with pytest.raises(BuildFailed, match="File exists"):
            await ref.ask(make_run_cgroup(session_id, "twice"))
        with pytest.raises(BuildFailed, match="invalid name of a run cgroup"):
            await ref.ask(make_run_cgroup(session_id, "../x"))


@pytest.mark.cgroup_v2
async def test_a_group_in_use_stays_and_that_is_told() -> None:
    """A run cgroup that holds a process is not removed: the request fails, unless it asks to kill the members."""
    async with _started() as (ref, directory), _session(ref) as session_id:
        (await ref.ask(make_run_cgroup(session_id, "busy"))).close_unused()
        async with _sleeper() as member:
            (directory / session_id / "busy/cgroup.procs").write_text(str(member.pid))
            with pytest.raises(BuildFailed, match="lives on"):
                await ref.ask(call(RemoveRunCgroup, session_id, "busy"))
            await ref.ask(call(RemoveRunCgroup, session_id, "busy", kill=True))
            assert await member.wait() == -9


async def test_a_group_nobody_waits_for_any_more_leaves_no_descriptor() -> None:
    """The caller is cancelled before nsinit has made it; the answer that comes later is thrown away."""
    async with _started() as (ref, directory), _session(ref) as session_id:
        before = len(os.listdir("/proc/self/fd"))
        nsinit_pid = (await ref.ask(Describe())).pid
        os.kill(nsinit_pid, signal.SIGSTOP)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ref.ask, make_run_cgroup(session_id, "lost"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        finally:
            os.kill(nsinit_pid, signal.SIGCONT)
        await ref.ask(call(RemoveRunCgroup, session_id, "other"))
        assert (directory / session_id / "lost").is_dir()
        assert len(os.listdir("/proc/self/fd")) == before


async def test_without_a_kill_there_is_no_victim() -> None:
    """Kills asked for when nothing was killed: the answer is empty, and no error."""
    async with _started() as (ref, _), _session(ref) as session_id:
        assert recent_name(await ref.ask(call(FindOomKills, session_id))) is None
