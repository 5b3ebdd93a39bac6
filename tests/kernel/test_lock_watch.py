"""The bound on record locks: a session over it ends, and says why; neighbours and databases do not notice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.server.lock_watch import MAX_LOCKS
from nsinit.wire.protocol import FindOomKills
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, running, wait_until

COUNT = Path("/sys/kernel/slab/file_lock_cache/objects")
LOCK = """
import errno, fcntl, json, os, struct, sys, time
def lock(count):
    for _ in range(0, count, 256):
        fd = os.memfd_create("locked")
        for place in range(256):
            fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * place, 1, 0))
"""

pytestmark = pytest.mark.skipif(not COUNT.exists(), reason="the kernel does not count the objects of its caches")


@pytest.fixture(scope="module")
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as running_server:
        yield running_server


@pytest.fixture
def sandbox(server: Nsinit) -> Iterator[Sandbox]:
    box = server.build(host_plan())
    yield box
    box.teardown()


def _objects() -> int:
    return int(COUNT.read_text().split()[0])


def test_a_session_over_the_bound_ends_and_its_neighbour_does_not(server: Nsinit, sandbox: Sandbox) -> None:
    """The machine gets the memory back, and the session's end is told as that of a kill of its PID 1 for memory."""
    before = _objects()
    box = server.build(host_plan())
    sandbox.run(f"python3 -c '{LOCK}lock({MAX_LOCKS - 1000})\ntime.sleep(60)' >/dev/null 2>&1 &")
    wait_until(lambda: _objects() > before + MAX_LOCKS - 1100, "the neighbour holds its locks")
    with pytest.raises((EOFError, ConnectionError)):
        box.python(f"{LOCK}\nlock(1 << 30)")
    kills, _ = server.ask(FindOomKills, session_id=box.session_id)
    assert (kills.name, kills.pids) == ("record locks", (box.pid,))
    assert box.teardown().oom_kills == 1
    assert sandbox.run("echo here").out == "here\n"
    assert MAX_LOCKS - 1100 < _objects() - before < 2 * MAX_LOCKS
    assert server.ask(FindOomKills, session_id=sandbox.session_id)[0].kills == 0


def test_many_processes_with_few_locks_each_are_one_session(server: Nsinit) -> None:
    """The bound is the session's: forty processes with 512 locks each are over it."""
    box = server.build(host_plan())
    with pytest.raises((EOFError, ConnectionError)):
        box.python(f"{LOCK}\nif all(os.fork() for _ in range(40)):\n    time.sleep(60)\nlock(512)\ntime.sleep(60)")
    assert box.teardown().oom_kills == 1


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
