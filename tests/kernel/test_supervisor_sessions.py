"""Sessions on the real kernel: life, death, lease, limits on the way in, and what a restart finds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ConfigError, ServerSettings
from sandkasten.errors import (
    Capacity,
    Conflict,
    InvalidImage,
    InvalidRequest,
    SandkastenError,
    SessionExpired,
    SessionNotFound,
)
from sandkasten.model import (
    Cause,
    EndReason,
    ExecSpec,
    Limits,
    ProcessSpec,
    Session,
    SessionPatch,
    SessionSpec,
    ShellSpec,
    Status,
    WaitFor,
)
from tests.kernel.processes import init_pid, nsinit_pid, oom_score
from tests.waiting import patience, until


async def _wait_for(supervisor: LocalSupervisor, session: Session, status: Status) -> Session:
    async def has_it() -> bool:
        return (await supervisor.get(session.id)).status is status

    await until(has_it)
    return await supervisor.get(session.id)


async def test_a_session_runs_commands_and_ends(supervisor: LocalSupervisor) -> None:
    """Create, exec with state, destroy; afterwards its id answers how it ended."""
    session = await supervisor.create(SessionSpec())
    assert session.status is Status.RUNNING
    first = await supervisor.exec(session.id, ExecSpec("cd /tmp && export WHO=world"))
    second = await supervisor.exec(session.id, ExecSpec('echo "hello $WHO"; echo oops >&2; pwd'))
    assert (first.end.exit_code, first.end.cwd) == (0, "/tmp")
    assert second.stdout == b"hello world\n/tmp\n"
    assert second.stderr == b"oops\n"
    ended = await supervisor.destroy(session.id)
    assert (ended.status, ended.end_reason) == (Status.DESTROYED, EndReason.USER)
    assert (await supervisor.get(session.id)).status is Status.DESTROYED
    assert (await supervisor.destroy(session.id)).status is Status.DESTROYED
    with pytest.raises(SessionExpired) as refused:
        await supervisor.exec(session.id, ExecSpec("true"))
    assert refused.value.details["status"] == "destroyed"


async def test_ids_that_never_were_are_not_found(supervisor: LocalSupervisor) -> None:
    """An unknown id is not found, and neither is one of a wrong form."""
    for session_id in ("f" * 24, "../../etc", "", "A" * 24, "f" * 1000):
        with pytest.raises(SessionNotFound):
            await supervisor.get(session_id)


async def test_bad_requests_are_refused_before_anything_is_built(supervisor: LocalSupervisor) -> None:
    """Image, workspace and ttl are checked first; nothing is recorded."""
    with pytest.raises(InvalidImage):
        await supervisor.create(SessionSpec(image="no-such-image"))
    with pytest.raises(InvalidImage):
        await supervisor.create(SessionSpec(image="../etc"))
    with pytest.raises(InvalidRequest):
        await supervisor.create(SessionSpec(workspace_id="../x"))
    with pytest.raises(InvalidRequest):
        await supervisor.create(SessionSpec(ttl_s=-1))
    assert await supervisor.list(ended=True) == []


@pytest.mark.parametrize("env", [{"__sk_unset": "1"}, {"A=B": "1"}, {"A": "\0"}])
async def test_variables_that_no_shell_can_have_are_refused(supervisor: LocalSupervisor, env: dict[str, str]) -> None:
    """Variables that belong to the runner are refused as well; nothing is left of the session."""
    with pytest.raises(InvalidRequest) as refused:
        await supervisor.create(SessionSpec(env=env))
    assert list(refused.value.details) == ["env"]
    assert await supervisor.list() == []


async def test_an_idle_session_expires_and_a_busy_one_does_not(supervisor: LocalSupervisor) -> None:
    """A running command counts as activity; afterwards the time to live starts anew."""
    session = await supervisor.create(SessionSpec(ttl_s=0.4))
    result = await supervisor.exec(session.id, ExecSpec("sleep 0.8; echo done"))
    assert result.stdout == b"done\n"
    expired = await _wait_for(supervisor, session, Status.EXPIRED)
    assert (expired.reason, expired.end_reason) == ("its time to live ran out", EndReason.IDLE)


async def test_a_maximum_lifetime_ends_even_a_busy_session(supervisor: LocalSupervisor) -> None:
    """The hard end is hard: the running command is cut short and says so."""
    session = await supervisor.create(SessionSpec(max_lifetime_s=0.5))
    result = await supervisor.exec(session.id, ExecSpec("echo begun; sleep 60"))
    assert result.end.cause is Cause.SANDBOX_DIED
    assert result.stdout == b"begun\n"
    expired = await _wait_for(supervisor, session, Status.EXPIRED)
    assert expired.end_reason is EndReason.MAX_LIFETIME


async def test_a_patched_ttl_is_the_sessions_own(supervisor: LocalSupervisor) -> None:
    """A changed time to live is the one that activity renews from then on."""
    session = await supervisor.create(SessionSpec(ttl_s=60))
    patched = await supervisor.update(session.id, SessionPatch(ttl_s=3600, labels={"a": "b"}))
    assert patched.expires_at is not None
    assert 3590 < (patched.expires_at - patched.last_activity).total_seconds() <= 3600
    assert patched.labels == {"a": "b"}


async def test_a_sandbox_whose_init_dies_is_crashed_with_a_reason(supervisor: LocalSupervisor) -> None:
    """Death is an event: within a second, and the running command ends with it."""
    session = await supervisor.create(SessionSpec())
    results = []

    async def run() -> None:
        results.append(await supervisor.exec(session.id, ExecSpec("echo begun; sleep 60")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await until(lambda: _is_running(supervisor, session))
        os.kill(init_pid(session), signal.SIGKILL)
        began = trio.current_time()
        crashed = await _wait_for(supervisor, session, Status.CRASHED)
        assert trio.current_time() - began < 1.0
    assert (crashed.reason, crashed.end_reason) == ("its init process ended", EndReason.CRASHED)
    assert results[0].end.cause is Cause.SANDBOX_DIED


async def test_an_idempotency_key_makes_one_session(supervisor: LocalSupervisor) -> None:
    """Creates with one key, at the same time, later, or after the end, mean one session; another spec with the key is a
    conflict.
    """
    spec = SessionSpec(idempotency_key="k1")
    sessions: list[Session] = []

    async def create() -> None:
        sessions.append(await supervisor.create(spec))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(create)
    assert len({session.id for session in sessions}) == 1
    assert (await supervisor.create(spec)).id == sessions[0].id
    with pytest.raises(Conflict):
        await supervisor.create(attrs.evolve(spec, ttl_s=5))


async def test_admission_is_bounded(config: Config) -> None:
    """A create beyond the maximum is refused as retryable; the place of an ended session is given again."""
    async with open_supervisor(
        attrs.evolve(config, server=ServerSettings(max_sessions=2, pool_sandboxes=0))
    ) as supervisor:
        outcomes: list[str] = []

        async def create() -> None:
            try:
                outcomes.append((await supervisor.create(SessionSpec())).id)
            except Capacity as refused:
                outcomes.append(f"refused {refused.retry_after_s}")

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(create)
        refused = [each for each in outcomes if each.startswith("refused")]
        assert len(refused) == 2
        assert all(int(each.removeprefix("refused ")) >= 1 for each in refused)
        await supervisor.destroy(next(each for each in outcomes if not each.startswith("refused")))
        await supervisor.create(SessionSpec())


async def test_a_failed_build_answers_and_leaves_nothing(supervisor: LocalSupervisor, data_dir: Path) -> None:
    """An image that vanished under the catalog: the create fails, its record says crashed, nothing is left."""
    (data_dir / "images/host/rootfs").rename(data_dir / "images/host/hidden")
    with pytest.raises(SandkastenError):
        await supervisor.create(SessionSpec())
    (record,) = await supervisor.list(ended=True)
    assert (record.status, record.end_reason) == (Status.CRASHED, EndReason.ERROR)
    assert os.listdir(data_dir / "sessions") == []


async def test_stats_show_the_limits_and_the_use(supervisor: LocalSupervisor) -> None:
    """Memory, cpu and pids of this session's own cgroup."""
    session = await supervisor.create(SessionSpec(limits=Limits(cpu=0.5, memory_mb=64, pids=32)))
    await supervisor.exec(session.id, ExecSpec("for i in $(seq 200); do :; done"))
    stats = await supervisor.stats(session.id)
    assert stats.memory_limit == 64 * 1024 * 1024
    assert stats.pids_limit == 32
    assert 0 < (stats.memory_bytes or 0) <= stats.memory_limit
    assert (stats.cpu_usage_usec or 0) > 0
    assert (stats.pids or 0) >= 2
    assert stats.cpu_limit == 0.5


async def test_a_memory_hog_is_killed_named_and_the_shell_lives(supervisor: LocalSupervisor) -> None:
    """A memory hog under bash, dash and BusyBox has out of memory as its cause; the shell and its state live on."""
    session = await supervisor.create(SessionSpec(limits=Limits(memory_mb=48)))
    told = "kept=yes; echo ${BASH_VERSION:+bash}"
    for name in ("bash", "dash", "busybox"):
        await supervisor.open_shell(session.id, ShellSpec(name, shell=f"/bin/{name}"))
        which = await supervisor.exec(session.id, ExecSpec(told, shell=name))
        assert which.stdout.decode().strip() == ("bash" if name == "bash" else "")
        hog = await supervisor.exec(session.id, ExecSpec("python3 -c 'x = bytearray(200 << 20)'", shell=name))
        assert hog.end.cause is Cause.OOM
        assert hog.end.exit_code == 137
        after = await supervisor.exec(session.id, ExecSpec("echo $kept", shell=name))
        assert after.stdout == b"yes\n"
        await supervisor.close_shell(session.id, name)


SMALL = 'import time; x = bytearray(2 << 20); print("held", flush=True); time.sleep(1000)'


@pytest.mark.parametrize("kind", ["commands", "processes"])
async def test_a_start_in_a_full_session_costs_a_program_and_not_the_session(
    supervisor: LocalSupervisor, kind: str
) -> None:
    """Each of many small programs is smaller than PID 1: the memory of its fork is taken from them all the same. A
    program has what it asks for, or is gone, before the next is started: where none of those that were killed gets a
    processor in time to end, the kernel goes on to kill."""
    session = await supervisor.create(SessionSpec(limits=Limits(memory_mb=64)))
    if kind == "commands":
        await supervisor.open_shell(session.id, ShellSpec("other"))
        fill = f"i=0; while [ $i -lt 40 ]; do python3 -c '{SMALL}' & i=$((i + 1)); done; sleep 2"
        await supervisor.exec(session.id, ExecSpec(fill, shell="other"))
    else:
        for _ in range(30):
            started = await supervisor.start_process(session.id, ProcessSpec(argv=("python3", "-c", SMALL)))
            await supervisor.wait_process(session.id, started.exec_id, WaitFor(pattern="held"), timeout_s=patience(10))
    for _ in range(20):
        await supervisor.exec(session.id, ExecSpec(argv=("true",)))
    assert ((await supervisor.stats(session.id)).oom_kills or 0) > 0
    assert (await supervisor.get(session.id)).status is Status.RUNNING
    with trio.fail_after(patience(10)):
        assert (await supervisor.exec(session.id, ExecSpec("echo next"))).stdout == b"next\n"


@pytest.mark.parametrize("user", [None, "root", "nobody"])
async def test_whatever_runs_is_ended_before_pid_1(supervisor: LocalSupervisor, user: str | None) -> None:
    """Processes of shells and programs, of any user, are killed before PID 1 when memory is short."""
    session = await supervisor.create(SessionSpec())
    await supervisor.open_shell(session.id, ShellSpec("own", user=user))
    look = "sleep 0.3; cat /proc/self/oom_score_adj"
    command = await supervisor.exec(session.id, ExecSpec(look, shell="own"))
    program = await supervisor.exec(session.id, ExecSpec(look, stateless=True, user=user))
    assert (command.stdout, program.stdout) == (b"500\n", b"500\n")
    assert oom_score(init_pid(session)) == 0


@pytest.mark.cgroup_v2
async def test_a_fork_bomb_hits_its_limit_and_the_next_command_works(supervisor: LocalSupervisor) -> None:
    """The pids limit holds, is the cause of what it made fail, and the timeout kills the whole tree."""
    session = await supervisor.create(SessionSpec(limits=Limits(pids=40)))
    bomb = await supervisor.exec(session.id, ExecSpec("b() { b | b & }; b; sleep 60", timeout_ms=500))
    assert bomb.end.cause is Cause.TIMED_OUT
    assert (await supervisor.stats(session.id)).pids_refused
    many = await supervisor.exec(session.id, ExecSpec("sh -c 'for i in $(seq 60); do sleep 60 & done'"))
    assert (many.end.cause, many.end.exit_code) == (Cause.PIDS_LIMIT, 2)
    assert (await supervisor.exec(session.id, ExecSpec("kill $(pgrep sleep)"))).end.exit_code == 0
    after = await supervisor.exec(session.id, ExecSpec("echo alive"))
    assert after.stdout == b"alive\n"


async def test_an_abandoned_command_is_cancelled_and_the_next_one_works(supervisor: LocalSupervisor) -> None:
    """A client that leaves in the middle takes its command along, not the shell."""
    session = await supervisor.create(SessionSpec())
    with trio.move_on_after(0.3):
        await supervisor.exec(session.id, ExecSpec("kept=1; sleep 60"))
    after = await supervisor.exec(session.id, ExecSpec("echo $kept; pgrep -c sleep"))
    assert after.stdout == b"1\n0\n"


async def test_two_daemons_do_not_share_a_data_directory(supervisor: LocalSupervisor, config: Config) -> None:
    """The second one is refused with a sentence."""
    with pytest.raises(ConfigError, match="another daemon"):
        async with open_supervisor(config):
            pass


async def test_the_fork_server_may_die_and_sessions_go_on(supervisor: LocalSupervisor) -> None:
    """Running sandboxes don't notice; new ones wait for the next incarnation; teardown still works."""
    session = await supervisor.create(SessionSpec())
    os.kill(nsinit_pid(), signal.SIGKILL)
    result = await supervisor.exec(session.id, ExecSpec("echo still here"))
    assert result.stdout == b"still here\n"

    async def can_create() -> bool:
        try:
            await supervisor.create(SessionSpec())
        except SandkastenError:
            return False
        return True

    await until(can_create)
    assert (await supervisor.destroy(session.id)).status is Status.DESTROYED


async def test_kept_sessions_are_adopted_by_the_next_daemon_with_shell_state(config: Config) -> None:
    """`sessions_on_stop: keep`: the same shell answers after a restart."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(workspace_id="ws-1"))
        await supervisor.exec(session.id, ExecSpec("kept=state; cd /tmp; echo data > /workspace/file"))
    async with open_supervisor(config) as supervisor:
        found = await supervisor.get(session.id)
        assert found.status is Status.RUNNING
        result = await supervisor.exec(session.id, ExecSpec("echo $kept; pwd; cat /workspace/file"))
        assert result.stdout == b"state\n/tmp\ndata\n"
        assert (await supervisor.get(session.id)).acquire_detail == "adopted"  # at the first request, if not before


async def test_commands_of_a_stateless_session_share_no_shell(config: Config) -> None:
    """Commands of a stateless session share a shell only on request; the mode survives the daemon."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(exec_mode="stateless"))
        await supervisor.open_shell(session.id, ShellSpec("named"))
    async with open_supervisor(config) as supervisor:
        for spec, seen in (
            (ExecSpec("x=1"), b""),
            (ExecSpec("echo ${x-none}"), b"none\n"),
            (ExecSpec("x=2", stateless=False), b""),
            (ExecSpec("echo ${x-none}"), b"none\n"),
            (ExecSpec("echo ${x-none}", stateless=False), b"2\n"),
            (ExecSpec("x=3", shell="named"), b""),
            (ExecSpec("echo ${x-none}", shell="named"), b"3\n"),
            (ExecSpec("id -un", user="nobody"), b"nobody\n"),
        ):
            assert (await supervisor.exec(session.id, spec)).stdout == seen
        assert (await supervisor.get(session.id)).options.exec_mode == "stateless"
        with pytest.raises(InvalidRequest):
            await supervisor.exec(session.id, ExecSpec("id", user="nobody", stateless=False))


async def test_a_workspace_outlives_its_sessions_and_belongs_to_the_sandbox_user(
    supervisor: LocalSupervisor, data_dir: Path
) -> None:
    """Destroying a session never touches what it had mounted."""
    session = await supervisor.create(SessionSpec(workspace_id="project"))
    await supervisor.exec(session.id, ExecSpec("echo precious > file; mkdir d; touch d/x"))
    await supervisor.destroy(session.id)
    assert (data_dir / "workspaces/project/file").read_text() == "precious\n"
    assert (data_dir / "workspaces/project/d/x").exists()
    again = await supervisor.create(SessionSpec(workspace_id="project"))
    result = await supervisor.exec(again.id, ExecSpec("cat file; stat -c '%u %a' file"))
    assert result.stdout == b"precious\n1000 644\n"


async def test_a_hundred_sessions_at_once(supervisor: LocalSupervisor) -> None:
    """Concurrent creates and destroys neither fail nor share anything."""
    sessions: list[Session] = []

    async def create() -> None:
        sessions.append(await supervisor.create(SessionSpec(limits=Limits(memory_mb=32, pids=16))))

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(create)
    uids = set()
    for session in sessions[::10]:
        result = await supervisor.exec(session.id, ExecSpec("cat /proc/self/uid_map"))
        uids.add(result.stdout.split()[1])
    assert len({session.id for session in sessions}) == 100
    assert len(uids) == 10
    async with trio.open_nursery() as nursery:
        for session in sessions:
            nursery.start_soon(supervisor.destroy, session.id)
    assert await supervisor.list() == []


async def _is_running(supervisor: LocalSupervisor, session: Session) -> bool:
    return ((await supervisor.stats(session.id)).pids or 0) >= 3
