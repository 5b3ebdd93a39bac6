"""Causes and CPU time on the real kernel, with others in the same session: told of who did it, and of nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import SandkastenError
from sandkasten.model import Cause, EndReason, ExecEnd, ExecSpec, Limits, SessionSpec, ShellSpec, Status
from tests.kernel.processes import init_pid
from tests.leaks import descendants
from tests.waiting import patience, slowness, until

HOG = "python3 -c 'x = bytearray(300 << 20)'"
BURN = "python3 -c 'import time\nwhile time.process_time() < 0.3: pass'"
MANY = "for i in $(seq 60); do sleep 60 & done"
SMALL = Limits(memory_mb=64, pids=40)


class Box:
    """A session with three shells and a FIFO that an innocent command waits at."""

    def __init__(self, supervisor: LocalSupervisor, session_id: str) -> None:
        self.supervisor = supervisor
        self.session_id = session_id

    async def run(self, command: str, shell: str = "default", *, stateless: bool = False) -> ExecEnd:
        spec = ExecSpec(command, stateless=True) if stateless else ExecSpec(command, shell=shell)
        return (await self.supervisor.exec(self.session_id, spec)).end

    async def beside(self, innocent: str, culprit: Callable[[], Awaitable[ExecEnd]]) -> tuple[ExecEnd, ExecEnd]:
        """Run one command while another begins and ends; return both ends."""
        spec = ExecSpec(f"echo here; read x <fifo; {innocent}")
        async with self.supervisor.open_exec(self.session_id, spec) as stream:
            pieces = aiter(stream)
            assert (await anext(pieces)).data == b"here\n"
            blamed = await culprit()
            await self.run("echo >fifo", "bash")
            return await stream.wait_end(), blamed


@pytest.fixture
async def box(supervisor: LocalSupervisor) -> Box:
    session = await supervisor.create(SessionSpec(limits=SMALL))
    made = Box(supervisor, session.id)
    for name in ("bash", "dash"):
        await supervisor.open_shell(session.id, ShellSpec(name, shell=f"/bin/{name}"))
    assert (await made.run("mkfifo fifo over")).exit_code == 0
    return made


@pytest.mark.cgroup_v2
async def test_memory_is_blamed_on_who_ran_out_of_it(box: Box) -> None:
    """The kill for memory is the cause of: a program that came and went; a command that caught the death of its child;
    and, in bash, which tells of it on the next command's output, a job that was left behind.
    """
    innocent, culprit = await box.beside("false", lambda: box.run(HOG, stateless=True))
    assert (culprit.cause, culprit.victim) == (Cause.OOM, "python3")
    assert (innocent.cause, innocent.victim, innocent.exit_code) == (Cause.EXITED, None, 1)
    innocent, culprit = await box.beside("grep -q nothing /etc/passwd", lambda: box.run(f"{HOG}; exit 3", "bash"))
    assert (culprit.cause, culprit.victim, culprit.exit_code) == (Cause.OOM, "python3", 3)
    assert innocent.cause is Cause.EXITED
    assert (await box.run(f"(read x <fifo; {HOG}; echo >over) &")).cause is Cause.EXITED
    kills = (await box.supervisor.stats(box.session_id)).oom_kills or 0
    assert (await box.run("echo >fifo; read x <over; grep -q nothing /etc/passwd")).cause is Cause.EXITED
    assert (await box.supervisor.stats(box.session_id)).oom_kills == kills + 1
    assert (await box.run(f"{HOG} 2>/dev/null || false")).cause is Cause.OOM


@pytest.mark.cgroup_v2
async def test_the_pids_limit_is_blamed_on_who_hit_it(box: Box) -> None:
    """The run that hit the pids limit has it as the cause, alone and beside another run, which has not."""
    innocent, culprit = await box.beside("false", lambda: box.run(MANY, "dash"))
    assert (culprit.cause, innocent.cause) == (Cause.PIDS_LIMIT, Cause.EXITED)
    await box.supervisor.close_shell(box.session_id, "dash")
    alone = await box.run(f"dash -c '{MANY}' 2>/dev/null; pkill sleep; false")
    assert (alone.cause, alone.exit_code) == (Cause.PIDS_LIMIT, 1)


async def test_a_full_disk_is_blamed_on_who_met_it(box: Box) -> None:
    """A full disk is the cause of the run that could not write, even if there is room again, and not of a run that
    fails otherwise while the disk is full.
    """
    cleaned = await box.run("head -c 1G /dev/zero >/tmp/fill || { rm /tmp/fill; false; }")
    assert (cleaned.cause, cleaned.exit_code) == (Cause.DISK_FULL, 1)
    fill = "dd if=/dev/zero of=/tmp/fill bs=65536 2>/dev/null"
    assert (await box.run(f"sleep 0.1; {fill}")).cause is Cause.DISK_FULL
    for failing in ("false", "grep -q nothing /etc/passwd"):
        assert (await box.run(failing)).cause is Cause.EXITED
        assert (await box.run(failing, stateless=True)).cause is Cause.EXITED
    assert (await box.run("cat /dev/zero 2>&1 >>/tmp/fill")).cause is Cause.DISK_FULL
    await box.run("rm /tmp/fill")
    innocent, _ = await box.beside("false", lambda: box.run(fill, "bash"))
    assert innocent.cause is Cause.EXITED


@pytest.mark.cgroup_v2
async def test_cpu_time_is_that_of_the_command(box: Box) -> None:
    """CPU time is the command's own, in any shell, whatever computes beside it or before."""
    idle, busy = await box.beside(":", lambda: box.run(BURN, "bash"))
    assert busy.usage.cpu_ms >= 290
    assert 0 <= idle.usage.cpu_ms < 150
    output = f"head -c {200_000_000 // round(slowness())} /dev/zero; true"
    idle, busy = await box.beside(":", lambda: box.run(output, stateless=True))
    assert 0 <= idle.usage.cpu_ms < 150
    async with trio.open_nursery() as nursery:

        async def burn() -> None:
            assert (await box.run(BURN)).usage.cpu_ms >= 290

        nursery.start_soon(burn)

        async def is_running() -> bool:
            return (await box.supervisor.shells(box.session_id))[0].running is not None

        await until(is_running)
        waited = await box.run(":")
        assert 0 <= waited.usage.cpu_ms < 150


@pytest.mark.cgroup_v2
async def test_a_death_from_outside_is_not_put_down_to_a_command_that_ran_out_of_memory(box: Box) -> None:
    """A session killed from outside shortly after a command ran out of memory: the kernel's log names its victim, which
    was not PID 1.
    """
    init = init_pid(await box.supervisor.get(box.session_id))
    end = await box.run(HOG, stateless=True)
    os.kill(init, signal.SIGKILL)
    with trio.fail_after(patience()):
        ended = await box.supervisor.wait_ended(box.session_id)
    assert end.victim == "python3"
    assert (end.cause, ended.status) == (Cause.OOM, Status.CRASHED)
    assert (ended.end_reason, ended.reason) == (EndReason.CRASHED, "its init process ended")


@pytest.mark.cgroup_v2
async def test_a_session_whose_init_was_killed_for_memory_says_so(box: Box) -> None:
    """A session whose PID 1 the kernel killed for memory says so. The kernel takes PID 1 last; here it is made the
    first, once the command that uses up the memory has begun.
    """
    init = init_pid(await box.supervisor.get(box.session_id))
    program = "print(flush=True); input(); x = bytearray(300 << 20)"
    spec = ExecSpec(argv=("python3", "-c", program), stdin_open=True)
    with trio.fail_after(patience()), contextlib.suppress(SandkastenError):  # its session ended
        async with box.supervisor.open_exec(box.session_id, spec) as stream:
            await anext(aiter(stream))
            for pid, score in ((init, 1000), *((pid, 0) for pid, _ in descendants(init))):
                await trio.Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
            await stream.send_stdin(b"\n")
            await stream.wait_end()
    with trio.fail_after(patience()):
        ended = await box.supervisor.wait_ended(box.session_id)
    assert (ended.status, ended.end_reason) == (Status.CRASHED, EndReason.OOM)
    assert ended.reason == "out of memory: its init process ended"
