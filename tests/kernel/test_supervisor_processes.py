"""Background processes on the real kernel: started, watched, waited for, fed, ended with all they started."""

from __future__ import annotations

import re

import attrs
import pytest
import trio

from runner.server.ports import pause_s
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import InvalidRequest
from sandkasten.model import (
    Cause,
    EventType,
    ExecSpec,
    ExecState,
    Port,
    ProcessSpec,
    SessionSpec,
    Status,
    TerminalSize,
    WaitFor,
)
from tests.kernel.processes import init_pids
from tests.waiting import patience, slowness, until

SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', 8123)); print('up', flush=True); time.sleep(60)"


@pytest.fixture
async def session_id(supervisor: LocalSupervisor) -> str:
    return (await supervisor.create(SessionSpec())).id


async def test_a_process_outlives_its_caller_and_tells_its_end(supervisor: LocalSupervisor, session_id: str) -> None:
    """A process that has ended keeps its log, status and usage."""
    info = await supervisor.start_process(session_id, ProcessSpec(command="echo out; echo err >&2; exit 3"))
    waited = await supervisor.wait_process(session_id, info.exec_id, WaitFor(exit=True), timeout_s=10)
    assert waited.happened
    assert waited.run.end is not None
    assert (waited.run.end.exit_code, waited.run.end.cause) == (3, Cause.EXITED)
    assert waited.run.end.usage.cpu_ms >= 0
    assert (await supervisor.read_output(session_id, info.exec_id)).data in (b"out\nerr\n", b"err\nout\n")


async def test_a_port_is_waited_for_listed_and_told(supervisor: LocalSupervisor, session_id: str) -> None:
    """A port is told as opened when its server listens and as closed when the server ends."""
    async with supervisor.events(session_id=session_id) as events:
        process = await supervisor.start_process(session_id, ProcessSpec(argv=("python3", "-c", SERVER)))
        waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(port=8123), timeout_s=10)
        assert waited.happened
        assert list(await supervisor.ports(session_id)) == [Port(8123, "127.0.0.1")]
        await supervisor.cancel_exec(session_id, process.exec_id, now=True)
        seen = []
        with trio.fail_after(patience(10)):
            async for event in events:
                seen.append(event.type)
                if {EventType.PORT_CLOSED, EventType.PROCESS_EXITED} <= set(seen):
                    break
    assert set(seen) == {
        EventType.PROCESS_STARTED,
        EventType.PORT_OPENED,
        EventType.PORT_CLOSED,
        EventType.PROCESS_EXITED,
    }
    assert seen.index(EventType.PORT_OPENED) < seen.index(EventType.PORT_CLOSED)


@pytest.mark.cgroup_v2
async def test_a_look_at_the_ports_is_cheap(supervisor: LocalSupervisor, session_id: str) -> None:
    """Under the strict filter, too, PID 1 reads no table of the machine: a look takes not one read(2), and less than
    0.5 ms of processor time. Beside a process that has run for long, looks take less than 0.05 % of a processor. Where
    the kernel has tables by network (Linux 6.1), a session's own is small (ip-sysctl.rst)."""
    if await trio.Path("/proc/sys/net/ipv4/tcp_child_ehash_entries").exists():
        read = await supervisor.exec(session_id, ExecSpec("cat /proc/sys/net/ipv4/tcp_ehash_entries"))
        assert read.output == b"1024\n"
    await supervisor.start_process(session_id, ProcessSpec(argv=("sleep", "60")))
    (pid,) = init_pids()
    await trio.sleep(0.2)  # what the start of a process reads is over
    looks_s = []
    for _ in range(4):
        before = await _spent(pid)
        while (after := await _spent(pid)).wakings < before.wakings + 5:  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert after.reads == before.reads
        looks_s.append((after.cpu_s - before.cpu_s) / (after.wakings - before.wakings))
    assert min(looks_s) < 0.0005 * slowness()
    assert min(looks_s) / pause_s(is_busy=True, since_s=3600) < 0.0005 * slowness()


@attrs.frozen
class Spent:
    """Work of a process so far: processor time in seconds, calls of read(2) and its like, sleeps that ended."""

    cpu_s: float
    reads: int
    wakings: int


async def _spent(pid: int) -> Spent:
    files = [await trio.Path(f"/proc/{pid}/{name}").read_text() for name in ("schedstat", "io", "status")]
    cpu_ns = int(files[0].split()[0])
    reads, wakings = (
        int(re.search(rf"^{name}:\s*(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        for name, text in (("syscr", files[1]), ("voluntary_ctxt_switches", files[2]))
    )
    return Spent(cpu_ns / 1e9, reads, wakings)


async def test_a_line_of_output_is_waited_for(supervisor: LocalSupervisor, session_id: str) -> None:
    """A wait ends with a line that matches the regular expression, whether the line came before the wait or comes
    later.
    """
    process = await supervisor.start_process(
        session_id, ProcessSpec(command="printf 'port: '; sleep 0.2; echo 80; cat")
    )
    for _ in range(2):
        waited = await supervisor.wait_process(
            session_id, process.exec_id, WaitFor(pattern=r"port: \d+$"), timeout_s=10
        )
        assert (waited.happened, waited.line) == (True, "port: 80")
    missing = await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="never"), timeout_s=0.1)
    assert not missing.happened
    with pytest.raises(InvalidRequest) as refused:
        await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="(unclosed"), timeout_s=1)
    assert refused.value.details == {"pattern": "missing ): (unclosed"}


async def test_a_prompt_is_waited_for(supervisor: LocalSupervisor, session_id: str) -> None:
    """A prompt without an end of line matches while the process lives; when its line goes on, the whole line is
    matched.
    """
    process = await supervisor.start_process(session_id, ProcessSpec(command="printf 'ready> '; cat"))
    waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="^ready> $"), timeout_s=10)
    assert (waited.happened, waited.line) == (True, "ready> ")
    await supervisor.send_stdin(session_id, process.exec_id, b"go\nnext> ", close=False)
    waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="(go|next> )$"), timeout_s=10)
    assert waited.line == "ready> go"
    waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="^next"), timeout_s=10)
    assert (waited.line, waited.run.state) == ("next> ", ExecState.RUNNING)


async def test_a_wait_ends_with_the_process(supervisor: LocalSupervisor, session_id: str) -> None:
    """A wait for a process that has ended is over at once, before its time."""
    process = await supervisor.start_process(session_id, ProcessSpec(command="exit 1"))
    with trio.fail_after(patience(10)):
        for condition in (WaitFor(port=9999), WaitFor(pattern="never")):
            waited = await supervisor.wait_process(session_id, process.exec_id, condition, timeout_s=60)
            assert (waited.happened, waited.run.state) == (False, ExecState.ENDED)


async def test_a_hostile_pattern_takes_no_time(supervisor: LocalSupervisor, session_id: str) -> None:
    """A pattern that would keep a backtracking matcher busy for years does not delay the end of the wait."""
    process = await supervisor.start_process(session_id, ProcessSpec(command=f"echo {'a' * 3000}b; cat"))
    with trio.fail_after(patience(10)):
        waited = await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="(a+)+$"), timeout_s=0.5)
    assert not waited.happened


@pytest.mark.cgroup_v2
async def test_killing_a_process_kills_its_tree(supervisor: LocalSupervisor, session_id: str) -> None:
    """Killing a process kills its daemons that left its session too, and nothing else."""
    await supervisor.exec(session_id, ExecSpec("sleep 1001 &"))
    command = "sleep 1002 & (setsid sleep 1003 &) ; trap '' INT TERM; echo up; while :; do sleep 1; done"
    process = await supervisor.start_process(session_id, ProcessSpec(command=command))
    await supervisor.wait_process(session_id, process.exec_id, WaitFor(pattern="up"), timeout_s=10)
    ended = await supervisor.cancel_exec(session_id, process.exec_id, now=True)
    assert ended.end is not None
    assert ended.end.cause is Cause.CANCELLED
    left = await supervisor.exec(session_id, ExecSpec("pgrep -a sleep | cut -d' ' -f2-"))
    assert left.output == b"sleep 1001\n"


async def test_what_an_ended_process_left_can_be_killed(supervisor: LocalSupervisor, session_id: str) -> None:
    """A daemon outlives the process that started it, until the process is killed after all."""
    process = await supervisor.start_process(session_id, ProcessSpec(command="(setsid sleep 1001 &)"))
    await supervisor.wait_process(session_id, process.exec_id, WaitFor(exit=True), timeout_s=10)
    count = ExecSpec("pgrep -c sleep")

    async def is_there() -> bool:
        return (await supervisor.exec(session_id, count)).output == b"1\n"

    await until(is_there)
    await supervisor.cancel_exec(session_id, process.exec_id, now=True)
    assert (await supervisor.exec(session_id, count)).output == b"0\n"


async def test_a_process_takes_input_and_a_terminal(supervisor: LocalSupervisor, session_id: str) -> None:
    """A pipe by default, a terminal if asked for, whose size can change."""
    piped = await supervisor.start_process(session_id, ProcessSpec(argv=("cat",)))
    await supervisor.send_stdin(session_id, piped.exec_id, b"over\n", close=True)
    await supervisor.wait_process(session_id, piped.exec_id, WaitFor(exit=True), timeout_s=10)
    assert (await supervisor.read_output(session_id, piped.exec_id)).data == b"over\n"
    spec = ProcessSpec(command="stty size; read line; stty size", terminal=TerminalSize(40, 10))
    typed = await supervisor.start_process(session_id, spec)
    await supervisor.wait_process(session_id, typed.exec_id, WaitFor(pattern="10 40"), timeout_s=10)
    await supervisor.resize_exec(session_id, typed.exec_id, TerminalSize(100, 30))
    await supervisor.send_stdin(session_id, typed.exec_id, b"\r")
    waited = await supervisor.wait_process(session_id, typed.exec_id, WaitFor(pattern="30 100"), timeout_s=10)
    assert waited.happened


async def test_only_a_process_that_keeps_alive_holds_the_lease_off(supervisor: LocalSupervisor) -> None:
    """One session expires over its idle process, the other lives as long as its process."""
    idle, kept = [(await supervisor.create(SessionSpec(ttl_s=1))).id for _ in range(2)]
    await supervisor.start_process(idle, ProcessSpec(argv=("sleep", "60")))
    process = await supervisor.start_process(kept, ProcessSpec(argv=("sleep", "60"), keep_alive=True))

    async def has_expired() -> bool:
        return (await supervisor.get(idle)).status is Status.EXPIRED

    await until(has_expired)
    assert (await supervisor.get(kept)).status is Status.RUNNING
    await supervisor.cancel_exec(kept, process.exec_id, now=True)


async def test_many_programs_leave_no_group_behind(supervisor: LocalSupervisor, session_id: str) -> None:
    """More programs in a row than may run at a time: run cgroups are given back, and programs that leave a daemon each
    do not block later ones.
    """
    for number in range(110):
        command = "(setsid sleep 1001 &)" if number < 5 else ":"
        assert (await supervisor.exec(session_id, ExecSpec(command, stateless=True))).end.exit_code == 0


async def test_a_program_s_user_is_looked_up_inside(supervisor: LocalSupervisor, session_id: str) -> None:
    """A program's user is found by name or number among the image's users, and is never the runner's."""
    named = await supervisor.exec(session_id, ExecSpec(argv=("id", "-un"), user="nobody"))
    assert named.output == b"nobody\n"
    numbered = await supervisor.exec(session_id, ExecSpec("id -u; id -g; echo $HOME", stateless=True, user="1234:99"))
    assert numbered.output.split()[:2] == [b"1234", b"99"]
    for user in ("65535", "1:0", "70000", "no such", "-1", ""):
        with pytest.raises(InvalidRequest):
            await supervisor.exec(session_id, ExecSpec(argv=("id",), user=user))
