"""Attacks on what the kernel counts per user or for the whole machine: one session takes all it can get.

The verdict is the neighbour's and the host's: while the attacker holds its objects, another session and the machine's
root must still get theirs. The attacker's own answers say only how far it came.
Sources: inotify(7); mq_overview(7); timer_create(2); io_setup(2); pty(7); Linux, kernel/ucount.c.
"""

from __future__ import annotations

import os
import subprocess
import sys

import trio

from sandkasten.model import ProcessSpec, WaitFor
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import Answers, attempt, collect

_HOLDS = "holds:"
_ASK_S = 20.0
_CALLS = """
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("flags", "maxmsg", "msgsize", "curmsgs", "a", "b", "c", "d")]
def inotify(n):
    return libc.inotify_init1(0)
def queue(n):
    name = ctypes.c_char_p(b"/q%d-%d" % (os.getpid(), n))
    found = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(Attributes(0, 10, 8192)))
    if found >= 0 and n < 0:
        libc.mq_unlink(name)
    return found
def timer(n):
    return libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))
def context(n):
    numbers = {"x86_64": 206, "aarch64": 0}
    return libc.syscall(numbers[os.uname().machine], 4096, ctypes.byref(ctypes.c_ulong()))
def terminal(n):
    return libc.open(b"/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
"""
_TAKE = (
    _CALLS
    + """
kind, most, uids = globals()[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
total = 0
for number in range(uids):
    reading, writing = os.pipe()
    if os.fork() == 0:
        if uids > 1:
            os.setresgid(2000 + number, 2000 + number, 2000 + number)
            os.setresuid(2000 + number, 2000 + number, 2000 + number)
        taken = 0
        while taken < most and kind(taken) >= 0:
            taken += 1
        os.write(writing, b"%d" % taken)
        time.sleep(600)
    total += int(os.read(reading, 20))
    os.close(reading), os.close(writing)
print("holds:", total, flush=True)
time.sleep(600)
"""
)
_ASK = (
    _CALLS
    + """
print("ok" if globals()[sys.argv[1]](-1) >= 0 else errno.errorcode[ctypes.get_errno()])
"""
)
"""Ends with its objects."""


async def _take(field: Field, session_id: str, kind: str, most: int, uids: int) -> int:
    """Have the session take all it can get, and hold it; return the number of objects."""
    argv = ("python3", "-I", "-S", "-c", _TAKE, kind, str(most), str(uids))
    process = await field.supervisor.start_process(session_id, ProcessSpec(argv=argv, user=field.exec_user))
    waited = await field.supervisor.wait_process(
        session_id, process.exec_id, WaitFor(pattern=_HOLDS), timeout_s=_ASK_S * field.patience
    )
    if not waited.happened:
        raise RuntimeError(f"the attacker took nothing: {waited.run.last_line}")
    return int(waited.run.last_line.rpartition(":")[2])


async def _ask(field: Field, kind: str) -> Answers:
    """Return whether the witness and, where this process is the machine's root, the host get one such object."""
    answers = {}
    argv = (sys.executable, "-I", "-S", "-c", _ASK, kind)
    if os.geteuid() == 0:
        done = await trio.run_process(argv, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
        answers["host"] = done.stdout.decode().strip()
    result = await field.python(field.witness, f"import sys; sys.argv[1:] = [{kind!r}, {kind!r}]\n{_ASK}")
    return {"witness": result.stdout.decode().strip() or result.stderr[-60:].decode(), **answers}


async def _exhaust(field: Field, kind: str, *, most: int = 1000, uids: int = 1) -> Answers:
    async with field.session() as session_id:
        await _take(field, session_id, kind, most, uids)
        return await _ask(field, kind)


@attempt("quotas.inotify", "use up inotify instances", "denial of service", ("ok",))
async def take_inotify(field: Field) -> Answers:
    return await _exhaust(field, "inotify")


@attempt("quotas.message-queues", "use up POSIX message queues", "denial of service", ("ok",))
async def take_queues(field: Field) -> Answers:
    return await _exhaust(field, "queue")


@attempt("quotas.timers", "use up POSIX timers", "denial of service", ("ok",), users=("root",))
async def take_timers(field: Field) -> Answers:
    """Use many users, since each has a limit of its own besides the one of the session."""
    return await _exhaust(field, "timer", most=100_000, uids=40)


@attempt("quotas.aio", "use up contexts of asynchronous I/O", "denial of service", ("ok", "ENOSYS"), layer="seccomp")
async def take_contexts(field: Field) -> Answers:
    """Use up `fs.aio-max-nr`, which the kernel counts for the whole machine. A session gets no context at all, so only
    the host's answer counts where there is one."""
    return await _exhaust(field, "context")


@attempt("quotas.terminals", "use up terminals", "denial of service", ("ok", "within the limit"))
async def take_terminals(field: Field) -> Answers:
    """Take terminals. All sessions that the node admits must be able to do so at once."""
    async with field.session() as session_id:
        taken = await _take(field, session_id, "terminal", 1000, 1)
        sessions = (await field.supervisor.capacity()).totals.sessions or sys.maxsize
        pool, reserve = [
            int(await trio.Path(f"/proc/sys/kernel/pty/{name}").read_text()) for name in ("max", "reserve")
        ]
        fits = taken * sessions <= pool - reserve
        all_sessions = "within the limit" if fits else f"{taken} each for {sessions} sessions out of {pool - reserve}"
        return {**await _ask(field, "terminal"), "all sessions": all_sessions}


QUOTAS = collect(globals())
