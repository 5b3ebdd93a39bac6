"""Attacks on results: a process of the session, not the shell, says how a shell's command has ended, where, with what
output and variables, or reads what other shells run.

The victim judges: the result that the daemon reports for its command. `docs/adr/0012-results.md` has the reasons.
"""

from __future__ import annotations

import trio

from sandkasten.model import ExecSpec, ShellSpec
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import Answers, attempt, collect

_TRUE = "its own"
_VICTIM = "victim"
_COMMAND = "export SECRET_OF_VICTIM=kept; sleep 0.4; echo honest; cd /tmp; (exit 7)"

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
print("SECRET_OF" + "_VICTIM" if b"SECRET_OF" + b"_VICTIM" in seen else "nothing")
"""

_FORK = r"""
( sleep 0.2; for fd in 9 10 11 12 13 14 15 16 17 49; do
  [ -S /proc/self/fd/$fd ] && kill -STOP $$ && read name rest <&$fd && kill -CONT $$ &&
  printf '%s +\n/forged\n%s 0\nexport FORGED=1\n%s .\n' $name $name $name >&$fd
done; kill -CONT $$ ) 2>/dev/null &
"""


async def _victim_says(field: Field, session_id: str) -> dict[str, str]:
    """Return what is told of a command of the victim, and of the variables of its shell after a kill."""
    patience_ms = round(20_000 * field.patience)
    result = await field.supervisor.exec(session_id, ExecSpec(_COMMAND, shell=_VICTIM, timeout_ms=patience_ms))
    await field.supervisor.exec(session_id, ExecSpec("kill -9 $$", shell=_VICTIM, timeout_ms=patience_ms))
    after = await field.supervisor.exec(
        session_id, ExecSpec("echo ${FORGED-unset}", shell=_VICTIM, timeout_ms=patience_ms)
    )
    found = {
        "status": (result.end.exit_code, 7),
        "output": (result.output, b"honest\n"),
        "directory": (result.end.cwd, "/tmp"),
        "variables": (after.output, b"unset\n"),
    }
    return {name: _TRUE if said == honest else repr(said)[:60] for name, (said, honest) in found.items()}


async def _beside_a_job(field: Field, victim_user: str | None) -> Answers:
    async with field.session() as session_id:
        await field.supervisor.open_shell(session_id, ShellSpec(_VICTIM, user=victim_user))
        answers: dict[str, str] = {}

        async def judge() -> None:
            await trio.sleep(0.5)
            answers.update(await _victim_says(field, session_id))

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
        await field.supervisor.open_shell(session_id, ShellSpec(_VICTIM))
        await field.supervisor.exec(session_id, ExecSpec(_FORK, shell=_VICTIM))
        await trio.sleep(0.5)
        return await _victim_says(field, session_id)


RESULTS = collect(globals())
