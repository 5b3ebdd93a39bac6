"""Attacks that use up processes, memory, disk, inodes, logs or time, while another session must go on answering.

Each attack is made in a session with small limits, so that the machine's size does not matter. "answers" means that a
witness, a session without part in the attack, answers meanwhile. Sources: cgroups(7), tmpfs(5), getrlimit(2).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import trio

from sandkasten.model import Cause, ExecSpec, OnDisconnect
from sandkasten.security.attacks.field import SMALL, Field
from sandkasten.security.attacks.workspaces import new_workspace
from sandkasten.security.probes.attempt import Answers, NotApplicable, attempt, collect

_MIB = 1 << 20
_FULL, _HELD = ("ENOSPC", "EDQUOT"), ("answers", "within the limit")
_FILL = """
import errno, os
written = 0
try:
    with open({path!r}, "wb", buffering=0) as file:
        while written < {limit}:
            written += file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    print(written >> 20, "MiB written")
except OSError as error:
    print(errno.errorcode[error.errno])
if os.path.exists({path!r}):
    os.unlink({path!r})
"""
_FILL_INODES = """
import errno, os
os.makedirs({path!r}, exist_ok=True)
os.chdir({path!r})
made = 0
try:
    while made < {limit}:
        os.close(os.open(str(made), os.O_CREAT | os.O_WRONLY))
        made += 1
    print(made, "files made")
except OSError as error:
    print(errno.errorcode[error.errno])
for name in range(made):
    os.unlink(str(name))
"""
_ALLOCATE = """
import errno, os
fd = os.open("/workspace/big", os.O_CREAT | os.O_WRONLY)
try:
    for start in range(0, {limit}, {step}):
        os.posix_fallocate(fd, start, {step})
    print("all of it allocated")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
_WEDGE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for become in (libc.setresuid, libc.setreuid, libc.setuid):
    become(65535, 65535, 65535)
room = bytes(16)
for kind in (7, 9, 6):
    libc.prlimit(1, kind, room, None)
libc.setpriority(0, 1, 19)
print(errno.errorcode[ctypes.get_errno()])
"""
"""Program that takes PID 1's uid, and then PID 1's descriptors, memory, processes and priority."""
_SLACK = 64 * _MIB
"""Bytes that others may write meanwhile; far below the attempt's excess."""
_FORK_BOMB = """
import os, time
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
time.sleep(60)
"""


async def _during(field: Field, session_id: str, argv: tuple[str, ...], *, run_s: float) -> str:
    """Return the witness's answer while a program runs in a session for some seconds; then end the program."""
    spec = ExecSpec(argv=argv, user=field.exec_user, timeout_ms=round(30_000 * field.patience))
    async with field.supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.CANCEL) as stream:
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                async for _ in stream:
                    pass

            nursery.start_soon(drain)
            await trio.sleep(run_s)
            witness = await field.ask_witness()
            nursery.cancel_scope.cancel()
        await stream.cancel()
    return witness


async def _still_answers(field: Field, session_id: str) -> str:
    """Return `answers` if the attacked session works again."""
    for _ in range(20):
        result = await field.supervisor.exec(session_id, ExecSpec("echo here", timeout_ms=round(5000 * field.patience)))
        if result.stdout == b"here\n":
            return "answers"
        await trio.sleep(0.05)
    return f"says {result.output[:60]!r}"


def _python(program: str) -> tuple[str, ...]:
    return ("python3", "-I", "-S", "-c", program)


def _counted(counter: int | None) -> int:
    """Return a counter to compare with its limit, huge if unknown: an unknown count is no proof that the limit held."""
    return 1 << 63 if counter is None else counter


@attempt("exhaustion.fork-bomb", "use up all processes", "fork bomb", ("answers", "within the limit"))
async def bomb_with_forks(field: Field) -> Answers:
    async with field.session(SMALL) as session_id:
        witness = await _during(field, session_id, _python(_FORK_BOMB), run_s=1.0)
        stats = await field.supervisor.stats(session_id)
        return {
            "witness": witness,
            "processes": "within the limit" if _counted(stats.pids) <= SMALL.pids else str(stats.pids),
            "session": await _still_answers(field, session_id),
        }


@attempt("exhaustion.memory", "use up the machine's memory", "memory bomb", ("answers", "oom", "within the limit"))
async def bomb_memory(field: Field) -> Answers:
    async with field.session(SMALL) as session_id:
        program = "x = [bytearray(b'x' * (8 << 20)) for _ in range(200)]"
        result = await field.python(session_id, program)
        stats = await field.supervisor.stats(session_id)
        peak = _counted(stats.memory_peak_bytes)
        return {
            "program": "oom" if result.end.cause in (Cause.OOM, Cause.SIGNALLED) else str(result.end.cause),
            "peak": "within the limit" if peak <= SMALL.memory_mb * _MIB else f"{peak // _MIB} MiB",
            "witness": await field.ask_witness(),
            "session": await _still_answers(field, session_id),
        }


@attempt("exhaustion.swap", "push memory into the machine's swap", "memory bomb", ("within the limit",))
async def use_swap(field: Field) -> Answers:
    """Use twice the memory limit, which would fit into a swap that is not counted."""
    async with field.session(SMALL) as session_id:
        size = 2 * SMALL.memory_mb * _MIB
        result = await field.python(
            session_id, f"x = bytearray({size}); x[::4096] = b'x' * len(x[::4096]); print('had it')"
        )
        return {"twice the limit": "within the limit" if b"had it" not in result.stdout else "had it"}


@attempt("exhaustion.cpu", "use up the machine's processors", "starvation", ("answers", "within the limit"))
async def spin(field: Field) -> Answers:
    async with field.session(SMALL) as session_id:
        before, started = await field.supervisor.stats(session_id), trio.current_time()
        program = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
        witness = await _during(field, session_id, _python(program), run_s=1.0)
        after = await field.supervisor.stats(session_id)
        used = _counted(after.cpu_usage_usec) - (before.cpu_usage_usec or 0)
        share = used / 1e6 / (trio.current_time() - started)
        bound = SMALL.cpu * 1.5 + 0.2  # the kernel counts in periods of 100 ms
        return {"witness": witness, "share": "within the limit" if share <= bound else f"{share:.2f} cores"}


@attempt("exhaustion.disk", "fill the host's disk", "disk filling", (*_FULL, "answers"), layer="disk")
async def fill_disk(field: Field) -> Answers:
    return await _fill(field, _FILL.format(path="/workspace/big", limit=3 * SMALL.disk_mb * _MIB))


@attempt("exhaustion.workspace", "fill the host's disk by way of a workspace", "disk filling", (*_FULL, *_HELD))
async def fill_workspace(field: Field) -> Answers:
    """Allocate and write more in a workspace made without a quota than the configured default; the host's disk counts.

    Raises:
        NotApplicable: workspaces are switched off, or the operator gave them no quota.
    """
    quota_mb = field.config.workspace_quota_mb
    if not quota_mb:
        raise NotApplicable("the configuration gives workspaces no quota")
    before = await trio.to_thread.run_sync(_taken_bytes, field.config.data_dir)
    async with new_workspace(field) as workspace_id, field.session(SMALL, workspace_id=workspace_id) as session_id:
        result = await field.python(session_id, _ALLOCATE.format(step=quota_mb << 17, limit=quota_mb << 21))
        taken = await trio.to_thread.run_sync(_taken_bytes, field.config.data_dir) - before
        return {
            "file": result.stdout.decode().strip() or f"{result.end.cause}: {result.stderr[-80:].decode()}",
            "disk": "within the limit" if taken <= quota_mb * _MIB + _SLACK else f"{taken // _MIB} MiB taken",
            "witness": await field.ask_witness(),
            "session": await _still_answers(field, session_id),
        }


def _taken_bytes(directory: Path) -> int:
    """Return the blocks of the machine's disk that a directory has, in bytes; what others write there does not count.

    Raises:
        PermissionError: a part of it can't be looked at.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # it has ended since
            raise error

    blocks = 0
    for place, _, names in os.walk(directory, onerror=refuse):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(f"{place}/{name}").st_blocks
    return 512 * blocks


@attempt(
    "exhaustion.inodes", "use up the inodes of the host's disk", "inode filling", (*_FULL, "answers"), layer="disk"
)
async def fill_inodes(field: Field) -> Answers:
    return await _fill(field, _FILL_INODES.format(path="/workspace/many", limit=3 * SMALL.disk_inodes))


@attempt(
    "exhaustion.tmp", "fill memory by way of /tmp, /dev/shm and /run", "memory bomb", (*_FULL, "EACCES", "answers")
)
async def fill_tmp(field: Field) -> Answers:
    """Fill `/tmp` and `/dev/shm`, whose pages are the session's memory: the result must be an error, not the death of
    PID 1.
    """
    answers: dict[str, str] = {}
    for path in ("/tmp/big", "/dev/shm/big", "/run/big"):
        found = await _fill(field, _FILL.format(path=path, limit=200 * _MIB))
        answers |= {f"{name} {path}": each for name, each in found.items()}
    return answers


@attempt("exhaustion.tmp-inodes", "use up memory by files without content", "inode filling", (*_FULL, "answers"))
async def fill_tmp_inodes(field: Field) -> Answers:
    return await _fill(field, _FILL_INODES.format(path="/tmp/many", limit=200_000))


async def _fill(field: Field, program: str) -> Answers:
    async with field.session(SMALL) as session_id:
        result = await field.python(session_id, program, timeout_s=15)
        lines = result.stdout.split()
        said = " ".join(each.decode() for each in lines) or f"{result.end.cause}: {result.stderr[-80:].decode()}"
        return {
            "file": said,
            "witness": await field.ask_witness(),
            "session": await _still_answers(field, session_id),
        }


@attempt("exhaustion.log-flood", "flood the daemon with output", "log flooding", ("answers", "bounded"))
async def flood(field: Field) -> Answers:
    async with field.session(SMALL) as session_id:
        spec = ExecSpec("yes flood | head -c 200000000", stateless=True, user=field.exec_user)
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                await field.supervisor.exec(session_id, spec)
                nursery.cancel_scope.cancel()

            nursery.start_soon(write)
            await trio.sleep(0.3)
            witness = await field.ask_witness()
            nursery.cancel_scope.cancel()
        kept = (await field.supervisor.stats(session_id)).spool_bytes
        bound = (field.config.runs.keep_mb + 8) * _MIB
        return {
            "witness": witness,
            "kept": "bounded" if kept <= bound else f"{kept // _MIB} MiB",
            "session": await _still_answers(field, session_id),
        }


@attempt("exhaustion.orphans", "leave PID 1 a thousand dead children", "zombie flood", ("answers", "reaped"))
async def leave_orphans(field: Field) -> Answers:
    program = """
import os
for _ in range(1000):
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    async with field.session(SMALL) as session_id:
        result = await field.python(session_id, program, timeout_s=15)
        stats = await field.supervisor.stats(session_id)
        return {
            "children": "reaped"
            if result.end.exit_code == 0 and _counted(stats.pids) < SMALL.pids // 2
            else f"{stats.pids} left",
            "session": await _still_answers(field, session_id),
        }


@attempt("exhaustion.everyone", "signal every process there is, SIGKILL and SIGSTOP", "denial of service", ("answers",))
async def signal_everyone(field: Field) -> Answers:
    async with field.session(SMALL) as session_id:
        for name in ("STOP", "KILL"):
            await field.run(session_id, f"kill -{name} -1", timeout_s=2)
        return {"session": await _still_answers(field, session_id), "witness": await field.ask_witness()}


@attempt(
    "exhaustion.root-signals",
    "send PID 1 every signal there is, with the capability to",
    "denial of service",
    ("answers",),
    users=("root",),
)
async def signal_pid_1(field: Field) -> Answers:
    """Send every signal to PID 1: from its own namespace none may end or stop it."""
    program = """
import os
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
"""
    async with field.session(SMALL) as session_id:
        await field.python(session_id, program)
        return {"session": await _still_answers(field, session_id), "witness": await field.ask_witness()}


@attempt("exhaustion.wedge", "stop PID 1 by its limits", "denial of service", ("EPERM", "EACCES", "ESRCH", "answers"))
async def wedge(field: Field) -> Answers:
    async with field.session() as session_id:
        result = await field.python(session_id, _WEDGE)
        return {
            "call": result.stdout.decode().strip() or f"{result.end.cause}",
            "session": await _still_answers(field, session_id),
            "witness": await field.ask_witness(),
        }


@attempt(
    "exhaustion.deep-tree", "leave a tree that can't be removed", "denial of service by clean-up", ("gone", "answers")
)
async def leave_deep_tree(field: Field) -> Answers:
    """Leave a tree of three thousand nested directories, with some locked by their owner."""
    program = """
import os
os.chdir("/workspace")
os.mkdir("locked"); os.mkdir("locked/in"); os.chmod("locked", 0)
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
"""
    async with field.session() as session_id:
        await field.python(session_id, program)
    place = trio.Path(field.config.data_dir) / "sessions" / session_id
    with trio.move_on_after(10 * field.patience):
        while await place.exists():  # noqa: ASYNC110 - removed in the background, by a process that tells nobody
            await trio.sleep(0.02)
        return {"session directory": "gone", "witness": await field.ask_witness()}
    return {"session directory": "still there"}


EXHAUSTION = collect(globals())
