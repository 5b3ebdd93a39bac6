"""Accounts of runs: the counters of a run's turn and shell, and the runs beside it. On files as a cgroup has them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from egress import protocol
from runner.wire.protocol import ExecReply
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.accounting import Accounts, RunAccount
from sandkasten.actors.runs.cgroups import RunCgroups
from sandkasten.actors.runs.run import Run, RunObserver, RunRequest, Shell
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.journal.egress import EgressLogs, SessionDenials
from sandkasten.model import DEFAULT_SHELL, Cause, ExecEnd, ExecSpec
from sandkasten.model.network import EgressLogging
from sandkasten.output.blocks import Ledger, OutputAccount
from sandkasten.output.log import OutputLog

SESSION = "s" * 24


class Session(RunObserver):
    """Shells, runs and the files of a cgroup; PID 1 and the default shell are in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / SESSION
        self.directory.mkdir()
        self.stats = CgroupStats({"unified": str(directory)}, SESSION)
        self.cgroups = RunCgroups(Ref("nsinit"), SESSION, self.stats.groups)
        self.runs: list[Run] = []
        self.default = Shell(DEFAULT_SHELL)
        self.notes: list[str] = []
        self.logs = EgressLogs()
        self.logs.open(SESSION, EgressLogging.ALL)
        self.accounts = Accounts(
            *(self.stats, self.cgroups),
            active=self.runs,
            count_shells=lambda: 1,
            denials=SessionDenials(self.logs, SESSION),
        )
        self.set(cpu_usec=1000, kills=0, refused=0, processes=2)

    def set(
        self, *, cpu_usec: int | None = None, kills: int | None = None, refused: int = 0, processes: int = 2
    ) -> None:
        if cpu_usec is not None:
            self._write("cpu.stat", f"usage_usec {cpu_usec}\nuser_usec 1\n")
        if kills is not None:
            self._write("memory.events", f"low 0\noom 1\noom_kill {kills}\n")
        self._write("pids.events", f"max {refused}\n")
        self._write("pids.current", f"{processes}\n")
        for name in ("memory.current", "memory.peak"):
            self._write(name, "4096\n")

    def group(self, name: str, *, cpu_usec: int, processes: int) -> None:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        (directory / "cpu.stat").write_text(f"usage_usec {cpu_usec}\n")
        (directory / "cgroup.procs").write_text("7\n" * processes)

    def start(self, exec_id: str, *, shell: Shell | None = None) -> Run:
        """A run is admitted: a program, or a command of a shell."""
        run = self.make(exec_id, shell)
        self.runs.append(run)
        run.admit(shell)
        return run

    def make(self, exec_id: str, shell: Shell | None) -> Run:
        run = Run(RunRequest(ExecSpec(":", stateless=shell is None, exec_id=exec_id), timeout_ms=None))
        log = OutputLog(exec_id, Ledger(1 << 20), OutputAccount(1 << 20, lambda: None))
        run.join(log, observers=(self.accounts, self), cancel=lambda run, now: None, wake=trio.lowlevel.checkpoint)
        return run

    def changed(self, run: Run) -> None:
        self.notes.append(run.exec_id)

    async def end(self, run: Run, exit_code: int = 1) -> ExecEnd:
        end = await self.report(run, exit_code)
        self.leave(run)
        return end

    async def report(self, run: Run, exit_code: int = 1) -> ExecEnd:
        reply = ExecReply(run.exec_id, exit_code, None, "exited", "/", 1, shell_restarted=False, cpu_us=5000)
        return await self.accounts.end_of(run, reply, _victim)

    def leave(self, run: Run) -> None:
        self.runs.remove(run)
        self.accounts.forget(run)
        if run.shell is not None:
            run.shell.remove(run)

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)


async def _victim() -> str | None:
    return "hog"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(tmp_path)
    yield made
    made.stats.close()


async def test_alone_all_of_the_session_is_the_run_s(session: Session) -> None:
    """A run alone in its session gets the session's CPU time, kill and victim."""
    run = session.start("a", shell=session.default)
    session.set(cpu_usec=31_000, kills=1)
    end = await session.end(run)
    assert (end.cause, end.victim, end.usage.cpu_ms) == (Cause.OOM, "hog", 30)


async def test_a_run_that_came_and_went_was_there(session: Session) -> None:
    """Beside neither at its begin nor at its end: still nothing is said of the innocent one."""
    innocent = session.start("a", shell=session.default)
    culprit = session.start("b")
    session.set(kills=1)
    blamed = await session.end(culprit, 137)
    assert (blamed.cause, blamed.victim) == (Cause.OOM, "hog")
    assert (await session.end(innocent)).cause is Cause.EXITED
    assert session.notes == ["a"]


async def test_what_earlier_runs_left_was_there(session: Session) -> None:
    """As many processes as PID 1 and the shells are nobody's; one more is somebody's."""
    session.set(processes=3)
    run = session.start("a", shell=session.default)
    session.set(kills=1)
    assert (await session.end(run)).cause is Cause.EXITED


async def test_a_file_transfer_counts_as_beside(session: Session) -> None:
    """A file transfer is company of a run, because transfers run in the sandbox, too."""
    run = session.start("a")
    session.accounts.note_company()
    session.set(refused=1)
    assert (await session.end(run)).cause is Cause.EXITED


async def test_two_kills_beside_others_name_no_victim(session: Session) -> None:
    """The last one may be that of another."""
    run = session.start("a")
    session.start("b")
    session.set(kills=2)
    end = await session.end(run, 137)
    assert (end.cause, end.victim) == (Cause.OOM, None)


async def test_what_waits_has_no_part_in_what_happens(session: Session) -> None:
    """A waiting run's turn begins when the run before it is over: kills and CPU time before that are not its own."""
    first = session.start("a", shell=session.default)
    second = session.start("b", shell=session.default)
    session.set(cpu_usec=501_000, kills=1)
    assert (await session.end(first, 137)).usage.cpu_ms == 500
    second.begin(0)
    session.set(cpu_usec=511_000)
    end = await session.end(second)
    assert (end.cause, end.usage.cpu_ms) == (Cause.EXITED, 10)


async def test_a_turn_ends_when_the_next_begins(session: Session) -> None:
    """The output of the first is still on its way, which takes as long as a reader likes."""
    first = session.start("a", shell=session.default)
    second = session.start("b", shell=session.default)
    session.set(cpu_usec=21_000)
    second.begin(0)
    session.set(cpu_usec=91_000)
    assert (await session.end(first, 0)).usage.cpu_ms == 20
    assert (await session.end(second, 0)).usage.cpu_ms == 70


async def test_a_run_that_never_had_its_turn_used_nothing_known(session: Session) -> None:
    """The CPU time of a run that was cancelled while it waited is unknown (-1)."""
    session.start("a", shell=session.default)
    second = session.start("b", shell=session.default)
    assert (await session.end(second)).usage.cpu_ms == -1


async def test_cpu_time_is_that_of_the_run_s_own_shell(session: Session) -> None:
    """A named shell has its group; the default one has what is left, groups that came meanwhile included."""
    named = Shell("b", cgroup="gb")
    session.cgroups._live.update(("gb", "gc"))
    session.group("gb", cpu_usec=100, processes=1)
    mine = session.start("a", shell=session.default)
    other = session.start("b", shell=named)
    session.group("gb", cpu_usec=40_100, processes=1)
    session.group("gc", cpu_usec=50_000, processes=1)
    session.set(cpu_usec=1000 + 40_000 + 50_000 + 3000)
    assert (await session.end(other, 0)).usage.cpu_ms == 40
    assert (await session.end(mine, 0)).usage.cpu_ms == 3


async def test_a_program_has_used_what_the_runner_says(session: Session) -> None:
    """wait4 counts it, whoever was beside it."""
    run = session.start("a")
    session.set(cpu_usec=9_000_000)
    assert (await session.end(run, 0)).usage.cpu_ms == 5


async def test_groups_that_are_found_again_are_counted(session: Session) -> None:
    """The CPU time of groups that an earlier daemon made is counted."""
    session.group("gold", cpu_usec=700, processes=1)
    assert session.cgroups.read_cpu() == 0
    session.cgroups.recover()
    assert session.cgroups.read_cpu() == 700


async def test_a_group_that_is_gone_is_no_open_file(session: Session) -> None:
    """CPU time of such a group is not known any more."""
    session.group("gone", cpu_usec=700, processes=1)
    stats, open_before = session.stats.groups, len(os.listdir("/proc/self/fd"))
    assert (stats.cpu_usec("gone"), stats.count_processes("gone")) == (700, 1)
    assert len(os.listdir("/proc/self/fd")) == open_before + 1
    stats.forget("gone")
    shutil.rmtree(session.directory / "gone")
    assert (stats.cpu_usec("gone"), stats.count_processes("gone")) == (-1, -1)
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_a_connection_is_of_the_run_that_could_have_made_it(session: Session) -> None:
    """A run that was alone, also when its entry is told after the run's end; of none where it may be of another: before
    and between runs, beside company, and beside processes that earlier runs left.
    """

    def run_at(moment: float) -> str | None:
        entry = session.logs.add(protocol.EgressEntry(SESSION, moment, "tcp", "a.example", 443, "allowed"))
        assert entry is not None
        return entry.exec_id

    before = time.time()
    first = session.start("first")
    during = time.time()
    assert run_at(during) == "first"
    await session.end(first, 0)
    between = time.time()
    second = session.start("second")
    assert [run_at(each) for each in (before, during, between, time.time())] == [None, "first", None, "second"]
    lost = session.start("lost")
    session.leave(second)
    assert run_at(time.time()) is None
    session.leave(lost)
    session.set(processes=3)
    session.start("beside what was left")
    assert run_at(time.time()) is None


async def test_an_account_outlives_its_daemon(session: Session) -> None:
    """The account of a run alone is exact after a restart. Beside others its CPU time is not known, for groups may have
    come and gone.
    """
    for company, cause, cpu_ms in ((False, Cause.OOM, 30), (True, Cause.EXITED, -1)):
        session.set(cpu_usec=1000, kills=0)
        before = session.start("a", shell=session.default)
        if company:
            session.accounts.note_company()
        readings = session.accounts.readings_of(before)
        session.leave(before)
        run = session.make("a", session.default)
        session.runs.append(run)
        session.accounts.restore(run, readings)
        run.enter(session.default)
        session.accounts.resume(run)
        session.set(cpu_usec=31_000, kills=1)
        end = await session.report(run)
        assert (end.cause, end.usage.cpu_ms) == (cause, cpu_ms)
        session.leave(run)
    assert RunAccount.of_numbers((1, 2, 3)) is None
