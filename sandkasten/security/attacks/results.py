"""Attacks on results: a process of the session, not the shell, says how a shell's command has ended, where, with what
output and variables, or reads what other shells run.

The judgement is the result that the daemon reports for a command of the attacked shell. `docs/adr/0012-results.md` has
the reasons.
"""

from __future__ import annotations

import signal

import trio

from sandkasten.errors import SandkastenError
from sandkasten.model import ExecResult, ExecSpec, ShellSpec
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import Answers, attempt, collect

_TRUE = "its own"
_TOLD = "an end that says so"
_ATTACKED = "attacked"
_COMMAND = "export SECRET_OF_SHELL=kept; sleep 0.4; echo honest; cd /tmp; (exit 7)"

_JOB = """
import glob, os, sys, time
base = "/run/sandkasten/"
seen = b""
def use(path, flags, work):
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except OSError:
        return
    try:
        work(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
def read(fd):
    global seen
    data = os.read(fd, 65536)
    seen += data
    return data
end = time.monotonic() + 4
while time.monotonic() < end:
    for number in range(1, 5):
        own = f"{base}{number}/"
        names = [own + name for name in ("ctl", "cmd", "pre", "state", "status", "out", "err", "in")]
        names += glob.glob(own + "*")
        orders = []
        for path in names:
            use(path, os.O_RDONLY, lambda fd: orders.append(read(fd)))
        for order in {line.split()[0] for each in orders for line in each.splitlines() if line.split()} - {b"0"}:
            for path in names:
                text = b"forged\\n" if path.endswith(("out", "err")) else order + b" 0\\n"
                use(path, os.O_WRONLY, lambda fd: os.write(fd, text))
        use(own + "out", os.O_WRONLY, lambda fd: os.write(fd, b"forged\\n"))
        use(own + "state", os.O_WRONLY | os.O_TRUNC, lambda fd: os.write(fd, b"export FORGED=1\\n"))
    time.sleep(0.005)
print("SECRET_OF" + "_SHELL" if b"SECRET_OF" + b"_SHELL" in seen else "nothing")
"""

_FORK = r"""
( sleep 0.2; for fd in 9 10 11 12 13 14 15 16 17 49; do
  [ -S /proc/self/fd/$fd ] && kill -STOP $$ && read -r -n 11 name <&$fd && kill -CONT $$ &&
  printf '%s +\n%s 0\nexport FORGED=1\n%s .\n' $name $name $name >&$fd
done; kill -CONT $$ ) 2>/dev/null &
"""

_OPEN_ALL = """
import os, re, signal, stat, time
def strangers():
    return [pid for pid in range(2, 600) if pid != os.getpid()]  # not from /proc, which may hide some
end = time.monotonic() + 3
"""

_MEMORY = (
    _OPEN_ALL
    + """
changes = [(b"hon" + b"est", b"forged"), (b"exi" + b"t 7", b"exit 0"), (b"/t" + b"mp", b"/usr")]
def change(pid):
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for line in open(f"/proc/{pid}/maps"):
            found = re.match("([0-9a-f]+)-([0-9a-f]+) rw", line)
            if not found or "[v" in line:
                continue
            start, stop = (int(each, 16) for each in found.groups())
            try:
                data = os.pread(fd, min(stop - start, 1 << 24), start)
                for old, new in changes:
                    for place in re.finditer(re.escape(old), data):
                        os.pwrite(fd, new, start + place.start())
            except OSError:
                continue
    finally:
        os.close(fd)
while time.monotonic() < end:
    for pid in strangers():
        try:
            change(pid)
        except OSError:
            pass
    time.sleep(0.01)
"""
)
"""Changes the text of the attacked shell's command wherever it is in the memory of another process."""

_DESCRIPTORS = (
    _OPEN_ALL
    + """
while time.monotonic() < end:
    for pid in strangers():
        for number in (*range(20), 49):
            try:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"forged\\n")
            os.close(fd)
    time.sleep(0.01)
"""
)
"""Writes into each FIFO that another process has open."""

_SIGNALS = """
import os, signal, sys, time
time.sleep(0.2)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for number in map(int, sys.argv[1:]):
        for pid in range(2, 600):
            try:
                if pid != os.getpid():
                    os.kill(pid, number)
            except OSError:
                pass
        time.sleep(0.05)
"""

_BUSY = "i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done; echo honest; cd /tmp; (exit 7)"
"""A command that starts no program."""

_INNOCENT = "cd /tmp; /bin/sh -c 'echo honest; exit 7'"

_SPOILT = {
    "bash": (
        *("enable -n echo", "enable -n command", "enable -n pwd", "enable -n .", "enable -n printf unset test umask"),
        *("trap 'exit 0' DEBUG", "trap 'exit 0' USR1 EXIT", "trap '' 2 15 50", "readonly __sk_s=0", "set -e", "set -r"),
        *("readonly __sk_r=2 __sk_m=- __sk_a=", "exec 49>&1", "exec 49>&-", "IFS=0123456789abcdef", "ulimit -n 20"),
        *("enable -n eval", "enable -n shopt test; return 3", "shopt() { return 0; }; test() { return 1; }; return 3"),
        *("readonly __sk_text=true", "readonly __sk_lost=x; return 3", "readonly __sk_file=/tmp/none; return 3"),
        "command() { return 0; }; echo() { return 0; }; unset() { return 0; }; export -f command echo",
        "echo 'echo forged; exit 0' > /tmp/env; export BASH_ENV=/tmp/env ENV=/tmp/env; kill -9 $$",
    ),
    "sh": (
        *("trap 'exit 0' USR1 EXIT", "readonly __sk_s=0", "exec 9>&1", "exec 9>&-", "IFS=0123456789abcdef", "set -e"),
        *("alias command=: exit=: .=:", "ulimit -n 5", "PWD=/forged", "command() { return 0; }; echo() { return 0; }"),
        "echo 'echo forged; exit 0' > /tmp/env; export ENV=/tmp/env; kill -9 $$",
    ),
}
_SPOILT["busybox"] = _SPOILT["sh"]
"""Commands of a shell's own user, by shell, that take away from the shell what it reports with."""


async def _attacked_shell_says(field: Field, session_id: str) -> dict[str, str]:
    """Return what is told of a command of the attacked shell, and of the variables of its shell after a kill."""
    patience_ms = round(20_000 * field.patience)
    result = await field.supervisor.exec(session_id, ExecSpec(_COMMAND, shell=_ATTACKED, timeout_ms=patience_ms))
    await field.supervisor.exec(session_id, ExecSpec("kill -9 $$", shell=_ATTACKED, timeout_ms=patience_ms))
    after = await field.supervisor.exec(
        session_id, ExecSpec("echo ${FORGED-unset}", shell=_ATTACKED, timeout_ms=patience_ms)
    )
    found = {
        "status": (result.end.exit_code, 7),
        "output": (result.output, b"honest\n"),
        "directory": (result.end.cwd, "/tmp"),
        "variables": (after.output, b"unset\n"),
    }
    return {name: _TRUE if said == honest else repr(said)[:60] for name, (said, honest) in found.items()}


async def _beside_a_job(field: Field, attacked_user: str | None) -> Answers:
    async with field.session() as session_id:
        await field.supervisor.open_shell(session_id, ShellSpec(_ATTACKED, user=attacked_user))
        answers: dict[str, str] = {}

        async def judge() -> None:
            await trio.sleep(0.5)
            answers.update(await _attacked_shell_says(field, session_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(judge)
            job = await field.python(session_id, _JOB)
        answers["read"] = job.stdout.decode().strip()
        return answers


@attempt(
    "results.same-user",
    "forge the result of another shell's command",
    "finding H2",
    (_TRUE, "nothing"),
    users=("sandbox",),
)
async def forge_beside_the_same_user(field: Field) -> Answers:
    answers = await _beside_a_job(field, None)
    return {name: answer for name, answer in answers.items() if name != "read"}


@attempt(
    "results.other-user",
    "forge and read what the shell of root does",
    "finding H2",
    (_TRUE, "nothing"),
    users=("sandbox",),
)
async def forge_beside_root(field: Field) -> Answers:
    return await _beside_a_job(field, "root")


@attempt(
    "results.stolen-order", "answer an order in the place of the shell", "finding H2", (_TRUE,), users=("sandbox",)
)
async def steal_an_order(field: Field) -> Answers:
    """Stop the shell, read its next order in a fork of the shell, and report an end."""
    async with field.session() as session_id:
        await field.supervisor.open_shell(session_id, ShellSpec(_ATTACKED))
        await field.supervisor.exec(session_id, ExecSpec(_FORK, shell=_ATTACKED))
        await trio.sleep(0.5)
        return await _attacked_shell_says(field, session_id)


async def _beside(field: Field, job: str, command: str, *arguments: str) -> ExecResult:
    """Return the result of a command in a shell of the attacker's own user, while the job runs."""
    patience_ms = round(20_000 * field.patience)
    async with field.session() as session_id:
        await field.supervisor.open_shell(session_id, ShellSpec(_ATTACKED, user=field.exec_user))
        argv = ("python3", "-c", job, *arguments)
        async with trio.open_nursery() as nursery:
            program = ExecSpec(argv=argv, user=field.exec_user, timeout_ms=patience_ms)
            nursery.start_soon(field.supervisor.exec, session_id, program)
            await trio.sleep(0.4)
            result = await field.supervisor.exec(session_id, ExecSpec(command, shell=_ATTACKED, timeout_ms=patience_ms))
            nursery.cancel_scope.cancel()
    return result


def _tell(result: ExecResult) -> str:
    """Return what a result says of a command whose end is 7, in /tmp, with the output `honest`."""
    end = result.end
    if (end.exit_code, end.cwd, result.output) == (7, "/tmp", b"honest\n"):
        return _TRUE
    if end.shell_restarted or end.cause != "exited" or end.exit_code > 125:
        return _TOLD
    return repr((end.exit_code, end.cwd, result.output))[:60]


@attempt(
    "results.memory",
    "change a command in the memory of its shell, as the same user",
    "finding H2",
    (_TRUE,),
)
async def change_the_memory_of_a_shell(field: Field) -> Answers:
    return {"result": _tell(await _beside(field, _MEMORY, "sleep 1; echo honest; cd /tmp; (exit 7)"))}


@attempt(
    "results.descriptors",
    "write into the output of a shell through its open descriptors, as the same user",
    "finding H2",
    (_TRUE,),
)
async def write_to_the_descriptors_of_a_shell(field: Field) -> Answers:
    return {"result": _tell(await _beside(field, _DESCRIPTORS, _BUSY))}


@attempt(
    "results.signals",
    "end, stop and interrupt the shell of another command, as the same user",
    "finding H2",
    (_TRUE, _TOLD),
)
async def signal_a_shell(field: Field) -> Answers:
    answers = {}
    for name, numbers in {
        "stop": (signal.SIGSTOP, signal.SIGCONT),
        "end": (signal.SIGTERM,),
        "kill": (signal.SIGKILL,),
        "interrupt": (signal.SIGINT,),
        "own": (signal.SIGRTMIN + 16, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE),
    }.items():
        answers[name] = _tell(await _beside(field, _SIGNALS, _BUSY, *(str(int(number)) for number in numbers)))
    return answers


@attempt(
    "results.spoilt-shell",
    "take from a shell what it reports with: builtins, descriptors, variables, traps",
    "finding H2",
    (_TRUE, _TOLD),
    users=("sandbox",),
)
async def spoil_a_shell(field: Field) -> Answers:
    """The command after it is innocent, and is the one that is judged."""
    answers = {}
    async with field.session() as session_id:
        for shell, commands in _SPOILT.items():
            for number, command in enumerate(commands):
                name = f"{shell}-{number}"
                try:
                    await field.supervisor.open_shell(session_id, ShellSpec(name, shell=shell))
                except SandkastenError:
                    break  # the image has no such shell
                for each, limit_ms in ((command, 1000), (_INNOCENT, 6000)):
                    spec = ExecSpec(each, shell=name, timeout_ms=round(limit_ms * field.patience))
                    result = await field.supervisor.exec(session_id, spec)
                answers[f"{shell}: {command}"] = _tell(result)
                await field.supervisor.close_shell(session_id, name)
    return answers


RESULTS = collect(globals())
