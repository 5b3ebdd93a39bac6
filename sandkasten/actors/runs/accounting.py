"""The account of a run: what the run used, and why it ended.

**Usage.** The session's counters are read when the turn of a run begins and when it ends. A turn begins when the shell
takes the run; a run that waits for its shell uses nothing. Another run, a file transfer or a new shell during a turn is
company, and so is a run that waits for the same shell: then the session's counters say nothing of one run. The
CPU time of a command is that of its shell: a named shell has a run cgroup, and the default shell has the session's CPU
time without the run cgroups and, once others have work for PID 1, without PID 1.

**Cause.** That the kernel killed for memory, refused a fork or has no room left is known of the session as a whole. A
run that was alone for its whole turn did that. Beside company, or beside processes that earlier runs left, it is said
only of a run that shows a sign of it: a death by SIGKILL, or the words of the C library in its output. Otherwise the
cause is the one that the runner reported. A run can forge its own signs, and thereby its own cause, never the cause of
another run.

Sources: strerror(3); bash(1), dash(1), "EXIT STATUS" and diagnostics; make(1).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

import attrs

from runner.wire.protocol import ExecReply
from sandkasten.actors.runs.cgroups import RunCgroups
from sandkasten.actors.runs.run import Run, RunObserver, Shell
from sandkasten.counters.cgroup import UNKNOWN, CgroupStats
from sandkasten.errors import ExecGone
from sandkasten.journal.egress import SessionDenials
from sandkasten.model import DEFAULT_SHELL, Cause, ExecEnd, Stream, Usage
from sandkasten.output.log import OutputLog

_SIGKILL = 9
_KILLED_STATUS = 128 + _SIGKILL
_CAN_NOT_FORK_STATUS = 254
"""The exit status of bash when it has given up forking."""
_OWN_CAUSES = (Cause.TIMED_OUT, Cause.CANCELLED)
"""Causes that the daemon brought about: the counters do not matter then."""

_TAIL_BYTES = 16 * 1024
"""The end of each stream that is searched for signs."""

_KILLED = re.compile(
    rb"^ *Killed *\r?$|\d +Killed\b|\] Killed\b|\bKilled signal\b|\bSIGKILL\b|\bError 137\b", re.MULTILINE
)
"""The words of shells, make, gcc and Python for a child that was killed."""
_NO_PROCESS = re.compile(
    rb"resource temporarily unavailable|can(?:no|')t fork|can't start new thread"
    rb"|unable to create (?:new )?native thread|\bEAGAIN\b",
    re.IGNORECASE,
)
_NO_ROOM = re.compile(rb"no space left on device|disk quota exceeded", re.IGNORECASE)


@attrs.frozen
class Facts:
    """The facts about an end besides the runner's report. `kills`, `refusals`: how often the kernel killed for memory
    and refused a fork in the session during the run's turn. `is_alone`: the run had no company. `is_clean`: no process
    of earlier commands was in its shell, which would report the death of that process now. `was_sent_kill`: a caller
    sent the run SIGKILL."""

    kills: int
    refusals: int
    is_alone: bool
    is_clean: bool
    was_sent_kill: bool


Says = Callable[[Stream, re.Pattern[bytes]], Awaitable[bool]]
"""Tells whether the end of a stream matches a pattern."""


async def find_cause(reply: ExecReply, facts: Facts, says: Says) -> Cause:
    """Return the cause of an end that the runner reported."""
    cause = Cause(reply.cause)
    if reply.exit_code == 0 or cause in _OWN_CAUSES:
        return cause
    if facts.kills > 0 and (facts.is_alone or await _was_killed(reply, facts, says)):
        return Cause.OOM
    if facts.refusals > 0 and (facts.is_alone or await _could_not_fork(reply, says)):
        return Cause.PIDS_LIMIT
    return Cause.DISK_FULL if await _had_no_room(reply, facts, says) else cause


async def _was_killed(reply: ExecReply, facts: Facts, says: Says) -> bool:
    if reply.exit_code == _KILLED_STATUS:
        return not facts.was_sent_kill
    return facts.is_clean and (await says(Stream.STDERR, _KILLED) or await says(Stream.STDOUT, _KILLED))


async def _could_not_fork(reply: ExecReply, says: Says) -> bool:
    is_told = await says(Stream.STDERR, _NO_PROCESS) or await says(Stream.STDOUT, _NO_PROCESS)
    return is_told or reply.exit_code == _CAN_NOT_FORK_STATUS


async def _had_no_room(reply: ExecReply, facts: Facts, says: Says) -> bool:
    """The kernel counts no refused writes, so words count on standard error alone, unless there still is no room."""
    if reply.disk_filled and facts.is_alone:
        return True
    return await says(Stream.STDERR, _NO_ROOM) or (reply.disk_full and await says(Stream.STDOUT, _NO_ROOM))


def reader_of(log: OutputLog) -> Says:
    """Return a search in the output of a failed run; output that is not kept any more matches nothing."""

    async def says(stream: Stream, words: re.Pattern[bytes]) -> bool:
        start = max(log.kept.total(stream) - _TAIL_BYTES, log.kept.first_offset(stream))
        try:
            tail = await log.read(stream, start, _TAIL_BYTES)
        except ExecGone:
            return False
        return words.search(tail.data) is not None

    return says


_READINGS = 8


class Reading(NamedTuple):
    """The counters at one moment. `cpu_usec` is the CPU time of the run's shell."""

    cpu_usec: int
    memory_bytes: int
    memory_peak_bytes: int
    oom_kills: int
    pids_refused: int


@attrs.define
class RunAccount:
    """The readings of one run. `is_alone`: the run has had no company since its turn began. `is_clean`: earlier
    commands left no process in the run's shell. `init_usec`: PID 1's CPU time when company came, -1 before."""

    opened: Reading
    is_alone: bool
    is_clean: bool
    init_usec: int = UNKNOWN
    closed: Reading | None = None
    init_spent_usec: int = 0
    was_sent_kill: bool = False
    is_restored: bool = False
    exec_id: str = ""
    began: float = attrs.field(factory=time.time)
    ended: float = math.inf
    egress_mark: int = 0
    """The newest entry of the session's egress log when the turn began; 0 is before all of them, for a restored run."""

    @classmethod
    def of_numbers(cls, numbers: tuple[int, ...]) -> RunAccount | None:
        """Return the account of a run that an earlier daemon began; None if `numbers` are not those of an account."""
        if len(numbers) != _READINGS:
            return None
        *opened, is_alone, is_clean, init_usec = numbers
        return cls(Reading(*opened), bool(is_alone), bool(is_clean), init_usec, is_restored=True)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The account as numbers, to be written down."""
        return (*self.opened, int(self.is_alone), int(self.is_clean), self.init_usec)

    def end_solitude(self, init_usec: int) -> None:
        """Record that company has come."""
        self.is_alone, self.init_usec = False, init_usec

    def note_kill(self) -> None:
        """Record that a caller sent the run SIGKILL."""
        self.was_sent_kill = True

    def close(self, reading: Reading, *, init_spent_usec: int) -> None:
        """Record the end of the run's turn."""
        self.closed, self.init_spent_usec = reading, init_spent_usec
        self.end_turn()

    def end_turn(self) -> None:
        """Record the time of the end, once."""
        self.ended = min(self.ended, time.time())

    def mark(self, denials: SessionDenials) -> None:
        """Record where the session's egress log is now."""
        self.egress_mark = denials.begin(self)


class Accounts(RunObserver):
    """The accounts of one session's runs; see the module's docstring."""

    def __init__(
        self,
        stats: CgroupStats,
        cgroups: RunCgroups,
        *,
        active: Collection[Run],
        count_shells: Callable[[], int],
        denials: SessionDenials,
    ) -> None:
        """`active` are the runs that wait or run, as of whenever they are looked at."""
        self._stats = stats
        self._cgroups = cgroups
        self._active = active
        self._count_shells = count_shells
        self._denials = denials
        self._accounts: dict[str, RunAccount] = {}
        self._left: WeakKeyDictionary[Shell, Reading] = WeakKeyDictionary()
        """The readings at the end of the last run of each shell in which the next run waited."""

    def readings_of(self, run: Run) -> tuple[int, ...]:
        """Return the account of a run as numbers, to be written down; empty before its turn and after its end."""
        account = self._accounts.get(run.exec_id)
        return () if account is None else account.numbers

    # Turns ------------------------------------------------------------------------------------------------------

    def note_company(self) -> None:
        """Record that all runs have company: a run, a file transfer or a new shell."""
        init_usec = UNKNOWN
        for run in self._active:
            account = self._accounts.get(run.exec_id)
            if account is not None and account.is_alone and account.closed is None:
                init_usec = self._stats.read_init_cpu() if init_usec < 0 else init_usec
                account.end_solitude(init_usec)
                run.note_change()

    def admitted(self, run: Run) -> None:
        """Begin the turn of a run that need not wait. Costs a few microseconds when the run is the only one."""
        if len(self._active) > 1:
            self.note_company()
        if run.shell is None or run.shell.runs[0] is run:
            self._open(run, self._read(run))

    def began(self, run: Run) -> None:
        """Begin the turn of a run that waited, and end that of the run before it, whose output may still be coming."""
        if run.exec_id in self._accounts or run.shell is None:
            return
        reading = self._left.pop(run.shell, None)
        for earlier in run.shell.runs[: run.shell.runs.index(run)]:
            account = self._accounts.get(earlier.exec_id)
            if account is not None and account.closed is None:
                reading = self._close(earlier, account)
        self._open(run, reading or self._read(run))
        run.note_change()

    def ended(self, run: Run) -> None:
        if run.end is not None:  # else the run may go on without this daemon, and is to be written down
            self.forget(run)

    def forget(self, run: Run) -> None:
        """Drop the account of a run that has ended."""
        if (account := self._accounts.pop(run.exec_id, None)) is not None:
            account.end_turn()

    def note_kill(self, run: Run) -> None:
        """Record that a caller sent the run SIGKILL."""
        account = self._accounts.get(run.exec_id)
        if account is not None:
            account.note_kill()

    def restore(self, run: Run, numbers: tuple[int, ...]) -> None:
        """Take over the account of a run that an earlier daemon began."""
        account = RunAccount.of_numbers(numbers)
        if account is not None:
            self._accounts[run.exec_id] = account

    def resume(self, run: Run) -> None:
        """Go on with the account of a restored run, now that it is known which other runs go on."""
        account = self._accounts.get(run.exec_id)
        if account is not None and len(self._active) > 1:
            account.end_solitude(account.init_usec)

    def _settle(self, run: Run, *, has_failed: bool) -> RunAccount | None:
        """Take the last reading of a run that has ended, unless the next run in its shell has begun already."""
        account, shell = self._accounts.get(run.exec_id), run.shell
        if account is None or account.closed is not None:
            return account
        is_followed = shell is not None and len(shell.runs) > 1
        reading = self._close(run, account, is_full=has_failed or is_followed)
        if shell is not None and is_followed:
            self._left[shell] = reading
        elif shell is not None and self._left:
            self._left.pop(shell, None)
        return account

    def _open(self, run: Run, reading: Reading) -> None:
        processes, idle = self._stats.read_processes(), 1 + self._count_shells()
        is_quiet = 0 < processes <= idle
        is_alone = len(self._active) == 1 and is_quiet
        init_usec = UNKNOWN if is_alone else self._stats.read_init_cpu()
        is_clean = is_quiet or self._is_clean(run)
        account = self._accounts[run.exec_id] = RunAccount(reading, is_alone, is_clean, init_usec, exec_id=run.exec_id)
        account.mark(self._denials)

    def _is_clean(self, run: Run) -> bool:
        """Whether earlier commands left nothing in the run's shell. The default shell shares its cgroup with PID 1."""
        if run.shell is None:
            return True
        is_default = run.shell.name == DEFAULT_SHELL
        return 0 < self._stats.groups.count_processes(run.shell.cgroup) <= (2 if is_default else 1)

    # Readings ---------------------------------------------------------------------------------------------------

    def _read(self, run: Run) -> Reading:
        return Reading(*self._read_usage(run), self._stats.read_oom_kills(), self._stats.read_pids_refused())

    def _read_usage(self, run: Run) -> tuple[int, int, int]:
        usage, shell = self._stats.read_usage(), run.shell
        cpu_usec = usage.cpu_usec
        if shell is not None and self._stats.groups.is_known:
            cpu_usec = self._cpu_usec(shell, cpu_usec)
        return cpu_usec, usage.memory_bytes, usage.memory_peak_bytes

    def _cpu_usec(self, shell: Shell, session_usec: int) -> int:
        if shell.name == DEFAULT_SHELL:
            return session_usec - self._cgroups.read_cpu()
        return UNKNOWN if shell.cgroup is None else self._stats.groups.cpu_usec(shell.cgroup)

    def _close(self, run: Run, account: RunAccount, *, is_full: bool = True) -> Reading:
        """Take the last reading of a run. The counters that explain a failure are read only if `is_full`."""
        opened, init_spent_usec = account.opened, 0
        reading = self._read(run) if is_full else Reading(*self._read_usage(run), opened.oom_kills, opened.pids_refused)
        if account.init_usec >= 0 and run.shell is not None and run.shell.name == DEFAULT_SHELL:
            init_spent_usec = max(0, self._stats.read_init_cpu() - account.init_usec)
        account.close(reading, init_spent_usec=init_spent_usec)
        return reading

    # Ends -------------------------------------------------------------------------------------------------------

    async def end_of(self, run: Run, reply: ExecReply, find_victim: Callable[[], Awaitable[str | None]]) -> ExecEnd:
        """Close the run's account and return the end that the runner reported. A victim is named when there can be no
        other."""
        account = self._settle(run, has_failed=reply.exit_code != 0)
        cause, is_named = Cause(reply.cause), False
        if reply.exit_code != 0:
            assert run.log is not None
            facts = _facts(account)
            cause = await find_cause(reply, facts, reader_of(run.log))
            is_named = cause is Cause.OOM and (facts.is_alone or facts.kills == 1)
        return ExecEnd(
            exec_id=run.exec_id,
            exit_code=reply.exit_code,
            signal=reply.signal,
            cause=cause,
            cwd=reply.cwd,
            duration_ms=round(reply.duration_us / 1000),
            timeout_ms=run.request.timeout_ms,
            shell_restarted=reply.shell_restarted,
            usage=_own_usage(reply) if run.shell is None else self._shell_usage(run.shell, account, reply, cause),
            victim=await find_victim() if is_named else None,
            queued_ms=run.clock.queued_ms,
            egress_denied=() if account is None else self._denials.since(account.egress_mark),
        )

    def _shell_usage(self, shell: Shell, account: RunAccount | None, reply: ExecReply, cause: Cause) -> Usage:
        """The peak is exact when the session's highest mark rose meanwhile or the limit was hit; otherwise the higher
        of the two readings is a lower bound."""
        if account is None or account.closed is None:
            return Usage(written_bytes=reply.written_bytes)
        before, after = account.opened, account.closed
        is_told_apart = self._stats.groups.is_known and (shell.cgroup is not None or not account.is_restored)
        cpu_usec = UNKNOWN
        if min(before.cpu_usec, after.cpu_usec) >= 0 and (account.is_alone or is_told_apart):
            cpu_usec = max(0, after.cpu_usec - before.cpu_usec - account.init_spent_usec)
        is_exact = cause is Cause.OOM or after.memory_peak_bytes > before.memory_peak_bytes
        peak = after.memory_peak_bytes if is_exact else max(before.memory_bytes, after.memory_bytes)
        return Usage(_ms(cpu_usec), peak, reply.written_bytes)


def _facts(account: RunAccount | None) -> Facts:
    if account is None or account.closed is None:
        return Facts(0, 0, is_alone=False, is_clean=False, was_sent_kill=False)
    before, after = account.opened, account.closed
    return Facts(
        kills=after.oom_kills - before.oom_kills,
        refusals=after.pids_refused - before.pids_refused,
        is_alone=account.is_alone,
        is_clean=account.is_clean,
        was_sent_kill=account.was_sent_kill,
    )


def cut_short(run: Run, cause: Cause, cwd: str) -> ExecEnd:
    """Return the end of a run that no runner will report."""
    return ExecEnd(
        exec_id=run.exec_id,
        exit_code=128 + _SIGKILL,
        signal=_SIGKILL,
        cause=cause,
        cwd=cwd,
        duration_ms=run.clock.age_ms,
        timeout_ms=run.request.timeout_ms,
        shell_restarted=False,
        usage=Usage(),
        queued_ms=run.clock.queued_ms,
    )


def _own_usage(reply: ExecReply) -> Usage:
    """Return the usage of a program and of the processes that it waited for, as PID 1 measured it."""
    cpu_ms = reply.cpu_us // 1000 if reply.cpu_us >= 0 else -1
    return Usage(cpu_ms=cpu_ms, peak_memory_bytes=reply.peak_bytes, written_bytes=reply.written_bytes)


def _ms(usec: int) -> int:
    return usec // 1000 if usec >= 0 else UNKNOWN
