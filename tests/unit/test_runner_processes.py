"""Processes of a command, found in a table without a kernel."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.process.process_set import (
    Moment,
    Process,
    hangs_below,
    heeds,
    kill_all,
    now,
    parse_stat,
    scan,
    started_since,
)

SHELL, EARLIER_JOB = 10, 20
BEGAN = Moment(tick=100, last_pid=30)


def table(*processes: tuple[int, int, int]) -> dict[int, Process]:
    """Return a process table with PID 1, the shell and an earlier job, plus (pid, ppid, start tick) each."""
    base = ((1, 0, 1), (SHELL, 1, 50), (EARLIER_JOB, SHELL, 90))
    return {pid: Process(pid, ppid, tick, is_dead=False) for pid, ppid, tick in (*base, *processes)}


def found(*processes: tuple[int, int, int]) -> list[int]:
    return [each.pid for each in started_since(BEGAN, frozenset({1, SHELL}), table(*processes))]


def test_nothing_was_started() -> None:
    """PID 1, the shell and what ran before are not the command's."""
    assert found() == []


def test_children_and_grandchildren_are_found() -> None:
    """A child of the shell and what hangs below it."""
    assert found((31, SHELL, 100), (32, 31, 105)) == [31, 32]


def test_what_hangs_below_another_shell_is_not_found() -> None:
    """One that began during the command, and all it started, is somebody else's."""
    processes = table((31, SHELL, 100), (40, 1, 101), (41, 40, 102))
    left = started_since(BEGAN, frozenset({1, SHELL}), processes, foreign=frozenset({40}))
    assert [each.pid for each in left] == [31]


def test_a_tree_is_its_root_and_all_below() -> None:
    """Orphans are not of it, nor is anything without a root."""
    processes = table((31, SHELL, 100), (32, 31, 105), (33, 1, 101))
    assert [pid for pid, each in processes.items() if hangs_below(each, SHELL, processes)] == [
        SHELL,
        EARLIER_JOB,
        31,
        32,
    ]
    assert not any(hangs_below(each, None, processes) for each in processes.values())


def test_a_kill_reaches_what_is_born_meanwhile() -> None:
    """A kill looks until nothing new is found, and kills all that was stopped."""
    child = os.fork()
    if child == 0:
        signal.pause()
    found = [Process(child, os.getpid(), 1, is_dead=False)]
    looks = []

    def find() -> list[Process]:
        looks.append(len(found))
        return found

    kill_all(find)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(looks) == 2


@pytest.mark.parametrize(("disposition", "expected"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_an_ignored_signal_is_seen(disposition: signal.Handlers, expected: bool) -> None:
    """From outside, in /proc; a process that is gone heeds nothing."""
    before = signal.signal(signal.SIGUSR2, disposition)
    try:
        assert heeds(os.getpid(), signal.SIGUSR2) is expected
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not heeds(2**22, signal.SIGUSR2)


def test_orphans_are_found() -> None:
    """A daemon whose parents ended hangs below the shell or PID 1."""
    assert found((33, 1, 101), (34, SHELL, 102)) == [33, 34]


def test_what_an_earlier_job_starts_is_its_own() -> None:
    """A child that an earlier job starts meanwhile is spared, with all below it."""
    assert found((31, EARLIER_JOB, 101), (32, 31, 102)) == []


def test_pids_decide_within_one_tick() -> None:
    """In the tick the command began in, only pids handed out after it are the command's."""
    assert found((29, SHELL, 100), (30, SHELL, 100), (31, SHELL, 100)) == [31]


def test_a_reused_low_pid_is_found() -> None:
    """After the pid counter wrapped, the start tick tells."""
    assert found((5, SHELL, 101)) == [5]


def test_the_dead_and_the_unrooted_are_left_out() -> None:
    """Zombies need no signal; a process whose parent is not in the table is not ours."""
    processes = table((31, SHELL, 101), (32, 99, 101))
    processes[31] = Process(31, SHELL, 101, is_dead=True)
    assert started_since(BEGAN, frozenset({1, SHELL}), processes) == []


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(101, 103)), max_size=8))
def test_any_table_gives_an_answer(processes: list[tuple[int, int, int]]) -> None:
    """A table that changed while it was read, cycles included, ends in an answer."""
    assert set(found(*processes)) <= {pid for pid, _, _ in processes}


@pytest.mark.parametrize("name", [b"sleep", b"a) R 1 (b", b") Z 1 2 3", b"\xff\n"])
def test_a_name_cannot_forge_the_line(name: bytes) -> None:
    """A process chooses its name, with parentheses and spaces; it cannot choose its parent."""
    fields = b" ".join(b"%d" % number for number in range(4, 60))
    line = b"7 (" + name + b") S " + fields.replace(b"4", b"42", 1)
    assert parse_stat(7, line) == Process(7, 42, 22, is_dead=False)


def test_this_process_is_in_the_scan() -> None:
    """The kernel's own lines are understood, and a process started now is after an earlier moment."""
    moment = now()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    child = scan()[pid]
    os.waitpid(pid, 0)
    assert (child.ppid, moment.precedes(child)) == (os.getpid(), True)
