"""The watch over memory. A session over the bound on record locks ends, and says why; neighbours and databases do not
notice. Where memory is short for all, the session that uses most of its limit loses processes, and no neighbour."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.cgroup.tree import Tree
from nsinit.server.memory_watch import COUNT_PATH, MAX_LOCKS, find_over
from nsinit.wire.protocol import Adopt, FindOomKills, Ready, SetFrozen
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, data_directory, host_plan, new_node_id, running, wait_until
from tests.kernel.processes import oom_score

COUNT = Path(COUNT_PATH)
LOCK = """
import errno, fcntl, json, os, struct, sys, time
def lock(count):
    for _ in range(0, count, 256):
        fd = os.memfd_create("locked")
        for place in range(256):
            fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * place, 1, 0))
"""

counted = pytest.mark.skipif(not COUNT.exists(), reason="the kernel does not count the objects of its caches")


@pytest.fixture
def sandbox(server: Nsinit) -> Iterator[Sandbox]:
    box = server.build(host_plan())
    yield box
    box.teardown()


def _objects() -> int:
    """Return the count of the machine's locks, those of other programs among them."""
    return int(COUNT.read_text().split()[0])


def _locks(box: Sandbox) -> int:
    """Return how many record locks the processes of a session hold."""
    pids = set((_directory(box.owner) / box.session_id / "cgroup.procs").read_text().split())
    return sum(line.split()[4] in pids for line in Path("/proc/locks").read_text().splitlines() if " POSIX " in line)


@counted
def test_a_session_over_the_bound_ends_and_its_neighbour_does_not(server: Nsinit, sandbox: Sandbox) -> None:
    """The machine gets the memory back, and the session's end is told as that of a kill of its PID 1 for memory."""
    before = _objects()
    box = server.build(host_plan())
    sandbox.run(f"python3 -c '{LOCK}lock({MAX_LOCKS - 1024})\ntime.sleep(60)' >/dev/null 2>&1 &")
    wait_until(lambda: _locks(sandbox) >= MAX_LOCKS - 1024, "the neighbour holds its locks")
    with pytest.raises((EOFError, ConnectionError)):
        box.python(f"{LOCK}\nlock(1 << 30)")
    kills, _ = server.ask(FindOomKills, session_id=box.session_id)
    assert (kills.name, kills.pids) == ("record locks", (box.pid,))
    assert box.teardown().oom_kills == 1
    assert sandbox.run("echo here").out == "here\n"
    # A reader of /proc/locks may miss one while others go: it finds its place again by their number.
    wait_until(lambda: _locks(sandbox) >= MAX_LOCKS - 1024, "the neighbour has its locks")
    wait_until(lambda: _objects() - before < 2 * MAX_LOCKS, "the locks of the other are gone")
    assert server.ask(FindOomKills, session_id=sandbox.session_id)[0].kills == 0


@counted
def test_locks_of_others_do_not_count_twice(server: Nsinit, sandbox: Sandbox) -> None:
    """Locks that are made between two pages push a neighbour's behind the place of the reader, who meets them again."""
    sandbox.run(f"python3 -c '{LOCK}lock({MAX_LOCKS - 1024})\ntime.sleep(60)' >/dev/null 2>&1 &")
    wait_until(lambda: _locks(sandbox) >= MAX_LOCKS - 1024, "the neighbour holds its locks")
    processors = os.sched_getaffinity(0)
    found = []

    def look() -> Iterator[object]:
        found.append((yield from find_over(Tree(server.ready.cgroup_mode, server.ready.cgroup_dirs))))

    with ExitStack() as undo:
        undo.callback(os.sched_setaffinity, 0, processors)
        os.sched_setaffinity(0, {min(processors)})  # the kernel lists locks by the processors that made them
        for number, _ in enumerate(look()):
            for _ in range(4 if number % 20 == 0 and number < 160 else 0):
                fd = os.memfd_create("locked")
                undo.callback(os.close, fd)
                for place in range(256):
                    fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * place)
    assert found == [None]
    assert server.ask(FindOomKills, session_id=sandbox.session_id)[0].kills == 0
    assert sandbox.run("echo here").out == "here\n"


@counted
def test_many_processes_with_few_locks_each_are_one_session(server: Nsinit) -> None:
    """The bound is the session's: forty processes with 512 locks each are over it."""
    box = server.build(host_plan())
    with pytest.raises((EOFError, ConnectionError)):
        box.python(f"{LOCK}\nif all(os.fork() for _ in range(40)):\n    time.sleep(60)\nlock(512)\ntime.sleep(60)")
    assert box.teardown().oom_kills == 1


@counted
def test_a_restarted_nsinit_watches_the_sessions_that_it_finds() -> None:
    """The first nsinit ends while the session has the highest scores: the next one takes them back, and ends the
    session for its locks, though it is frozen by then."""
    node_id = new_node_id()
    with data_directory() as data_dir, running(data_dir, node_id) as first:
        box = first.build(host_plan())
        _fill(box, 100)
        _make_scarce(box, OFFERED, left_mib=8)
        first.kill()
        _limit(first, -1)
        with running(data_dir, node_id) as second:
            _adopt(second, box)
            assert _scores(box) == USUAL
            second.kill()
        script = f'{LOCK}lock({MAX_LOCKS + 1024})\nopen("/tmp/held", "w")\ntime.sleep(60)'
        box.run(f"python3 -c '{script}' >/dev/null 2>&1 & until [ -e /tmp/held ]; do sleep 0.01; done")
        with running(data_dir, node_id) as third:
            third.ask(SetFrozen, session_id=box.session_id, frozen=True)
            _adopt(third, box)
            wait_until(lambda: select.select([box.pidfd], [], [], 0)[0], "the session ended")
            box.release()
            assert third.teardown(box.session_id).oom_kills == 1


def _adopt(server: Nsinit, box: Sandbox) -> None:
    for fd in server.ask(Adopt, session_id=box.session_id)[1]:
        os.close(fd)


@pytest.mark.parametrize("profile", ["strict", "debug", "mvp"])
def test_locks_that_no_process_would_be_named_for_are_refused(server: Nsinit, profile: str) -> None:
    """Locks of an open file, leases, and a process that shares descriptors; locks of processes and flock are not."""
    box = server.build(host_plan(seccomp=profile))
    said = box.python(f"""{LOCK}
import ctypes
fd, said = os.memfd_create("locked"), {{}}
def trial(name, call):
    try:
        call()
        said[name] = "made"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
one = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)
for command in (36, 37, 38, fcntl.F_SETLK, fcntl.F_SETLKW):
    trial(str(command), lambda: fcntl.fcntl(fd, command, one))
for command in (1024, 1040):
    trial(str(command), lambda: fcntl.fcntl(fd, command, fcntl.F_RDLCK))
trial("flock", lambda: fcntl.flock(fd, fcntl.LOCK_EX))
libc = ctypes.CDLL(None, use_errno=True)
said["clone"] = libc.syscall(56, 0x400 | 17, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()]
print(json.dumps(said))
""")
    box.teardown()
    refused = dict.fromkeys(("36", "37", "38", "1024", "1040"), "EINVAL") | {"clone": [-1, "EINVAL"]}
    assert json.loads(said) == refused | dict.fromkeys(("6", "7", "flock"), "made")


def test_a_database_of_small_transactions_is_not_slower(server: Nsinit, sandbox: Sandbox) -> None:
    """100,000 transactions of sqlite, each with its locks, take as long beside the watch as beside a stopped one."""

    def taken_s() -> float:
        return float(
            sandbox.python("""
import sqlite3, time
made = sqlite3.connect("/tmp/db", isolation_level=None)
made.executescript("pragma synchronous=off; pragma journal_mode=memory; create table if not exists kept (n)")
began = time.monotonic()
for n in range(100_000):
    made.execute("insert into kept values (?)", (n,))
print(time.monotonic() - began)
""")
        )

    os.kill(server.pid, signal.SIGSTOP)
    try:
        without = min(taken_s() for _ in range(2))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert min(taken_s() for _ in range(3)) < without * 1.5


# Scores ---------------------------------------------------------------------------------------------------------------

MIB = 1 << 20
HOLD = "import signal; held = bytearray({} << 20); signal.pause()"


def _fill(box: Sandbox, *mib: int) -> None:
    """Have one process for each number hold so many MiB."""
    before = _used(box.owner, box.session_id)
    box.run("".join(f"python3 -c '{HOLD.format(each)}' >/dev/null 2>&1 & " for each in mib))
    wait_until(lambda: _used(box.owner, box.session_id) > before + sum(mib) * MIB, "it holds them")


def _directory(server: Nsinit) -> Path:
    assert isinstance(server.ready, Ready)
    return Path(server.ready.cgroup_dirs["memory"])


def _is_v2(server: Nsinit) -> bool:
    return (_directory(server) / "memory.max").exists()


def _used(server: Nsinit, session_id: str = "") -> int:
    name = "memory.current" if _is_v2(server) else "memory.usage_in_bytes"
    return int((_directory(server) / session_id / name).read_text())


def _held(server: Nsinit) -> int:
    """Return what all sessions use together but for caches, which the kernel frees first: an image's pages stay there
    after the sessions that read them."""
    fields = dict(each.split() for each in (_directory(server) / "memory.stat").read_text().splitlines())
    prefix = "" if _is_v2(server) else "total_"
    return _used(server) - sum(int(fields[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))


def _limit(server: Nsinit, amount: int) -> None:
    """Set a limit on all sessions together; negative: none."""
    name, text = ("memory.max", "max") if _is_v2(server) else ("memory.limit_in_bytes", "-1")
    (_directory(server) / name).write_text(text if amount < 0 else str(amount))


def _scores(box: Sandbox) -> dict[str, set[int]]:
    """Return the scores of the processes of a session, those of PID 1 and of its programs."""
    found: dict[str, set[int]] = {"init": set(), "programs": set()}
    for pid in (_directory(box.owner) / box.session_id / "cgroup.procs").read_text().split():
        found["init" if int(pid) == box.pid else "programs"].add(oom_score(int(pid)))
    return found


def _kills(box: Sandbox) -> int:
    return int(box.owner.ask(FindOomKills, session_id=box.session_id)[0].kills)


USUAL = {"init": {0}, "programs": {500}}
OFFERED = {"init": {900}, "programs": {1000}}


def _make_scarce(worst: Sandbox, offered: dict[str, set[int]], left_mib: int = 20) -> None:
    """Leave so little memory to all sessions together, until the scores of the worst are as expected. What is held is
    read at each look: it goes on changing for a moment after a program has ended."""

    def is_offered() -> bool:
        _limit(worst.owner, _held(worst.owner) + left_mib * MIB)
        return _scores(worst) == offered

    wait_until(is_offered, "the session that uses most is offered")


@pytest.fixture
def pair(server: Nsinit) -> Iterator[tuple[Sandbox, Sandbox]]:
    """Two sessions: a worse one, to be filled, and one whose limit is far away."""
    boxes = [server.build(host_plan(limits=replace(ROOMY, memory_bytes=mib * MIB))) for mib in (260, 400)]
    yield boxes[0], boxes[1]
    _limit(server, -1)
    for each in boxes:
        each.teardown()


def test_scores_follow_use_over_limit_while_memory_is_scarce(server: Nsinit, pair: tuple[Sandbox, Sandbox]) -> None:
    """Many small processes near the limit have higher scores than a large one far from it; and all the usual ones when
    there is memory again."""
    worse, neighbour = pair
    _fill(worse, *[15] * 12)
    _fill(neighbour, 150)
    assert (_scores(worse), _scores(neighbour)) == (USUAL, USUAL)
    _make_scarce(worse, OFFERED)
    assert _scores(neighbour) == USUAL
    assert worse.run("sleep 0.3; cat /proc/self/oom_score_adj").out == "1000\n"
    _limit(server, -1)
    wait_until(lambda: _scores(worse) == USUAL, "the usual scores are back")


def test_the_largest_process_is_no_victim_within_its_limit(server: Nsinit, pair: tuple[Sandbox, Sandbox]) -> None:
    """A limit above both sessions is passed: the small processes of the worse one end, one by one as it makes more."""
    worse, neighbour = pair
    _fill(worse, *[15] * 12)
    _fill(neighbour, 150)
    _make_scarce(worse, OFFERED)
    worse.run("".join(f"python3 -c '{HOLD.format(15)}' >/dev/null 2>&1 & " for _ in range(3)) + "sleep 1")
    wait_until(lambda: _kills(worse) > 0, "the kernel has ended some of it")
    assert _kills(neighbour) == 0
    assert neighbour.run("pgrep -c python3").out == "1\n"
    assert worse.run("echo still").out == "still\n"


def test_memory_that_no_program_holds_is_freed_by_the_end_of_its_session(
    server: Nsinit, pair: tuple[Sandbox, Sandbox]
) -> None:
    """A session filled with files in memory ends as a whole, when its neighbour needs memory within its own limit.
    While its files go the neighbour may lose a process as well, and asks again: then there is memory."""
    worse, neighbour = pair
    worse.run("head -c 60M /dev/zero >/dev/shm/a; head -c 120M /dev/zero >/tmp/b")
    _make_scarce(worse, OFFERED)
    neighbour.run(f"until python3 -c '{HOLD.format(100)}'; do sleep 0.1; done >/dev/null 2>&1 &")
    wait_until(lambda: worse.pid in server.ask(FindOomKills, session_id=worse.session_id)[0].pids, "PID 1 was killed")
    wait_until(lambda: _used(server, worse.session_id) < 20 * MIB, "its files are freed")
    wait_until(lambda: _used(server, neighbour.session_id) > 100 * MIB, "the neighbour has what it asked for")
    _fill(neighbour, 50)
