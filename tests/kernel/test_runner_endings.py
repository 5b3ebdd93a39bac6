"""Ending commands that don't end: time limits, cancelling, clients that leave, and what must survive all that."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.wire.protocol import Error, Exec, ExecReply, Graces, Hello, Kind, Setup
from tests.kernel.runner_harness import Client, Sandbox, needs_namespaces, open_sandbox, wait_until

pytestmark = needs_namespaces

LONG_MS = 60_000


def count(client: Client, pattern: str) -> int:
    """Return how many processes have a command line that begins with `pattern`."""
    lines = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null"
    return int(client.stdout(f"{{ {lines}; }} | grep -c '^{pattern}'"))


def test_a_timeout_spares_jobs_of_earlier_commands(client: Client) -> None:
    """A server started before, and what it starts meanwhile, lives on."""
    client.run("sh -c 'while :; do sleep 0.02; done' & echo $! >pid; sleep 4321 & true")
    client.reply("sleep 1234", timeout_ms=100)
    assert client.stdout("kill -0 $(cat pid) && echo alive") == b"alive\n"
    assert count(client, "sleep 4321") == 1


def test_a_timeout_with_errexit_ends_like_a_script(client: Client) -> None:
    """Under `set -e` being interrupted ends the shell as it ends a script; exports are there in the next one."""
    client.run("set -e; export A=1")
    assert client.reply("sleep 1234", timeout_ms=50).cause == "timed_out"
    assert client.stdout("echo $A") == b"1\n"


def test_a_shell_that_became_a_program_is_replaced(client: Client) -> None:
    """After `exec`, a time limit ends the program; the shell that follows has the saved state."""
    client.run("export A=1")
    reply = client.reply("exec sleep 1234", timeout_ms=50)
    assert (reply.cause, reply.exit_code, reply.shell_restarted) == ("timed_out", 124, True)
    assert client.stdout("echo $A") == b"1\n"


def test_a_shell_that_became_a_stubborn_program_is_replaced(client: Client) -> None:
    """A program in the shell's place that ignores every signal is killed."""
    program = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15, 50)]; time.sleep(1234)"
    reply = client.reply(f"exec /usr/bin/python3 -ISc '{program}'", timeout_ms=300)
    assert (reply.cause, reply.shell_restarted) == ("timed_out", True)
    assert client.stdout("echo next") == b"next\n"


def test_output_so_far_is_kept(client: Client) -> None:
    """Output from before the time was over is delivered, the part that was still in the pipe included."""
    outcome = client.run("i=0; while [ $i -lt 500 ]; do echo line$i; i=$((i+1)); done; sleep 1234", timeout_ms=1000)
    assert outcome.stdout.count(b"\n") == 500
    assert outcome.reply.cause == "timed_out"


def test_the_limit_counts_from_the_start_not_the_queue(sandbox: Sandbox) -> None:
    """Waiting for the shell costs a command none of its time."""
    first, second = sandbox.shell(), sandbox.connect()
    first.begin("sleep 0.3")
    second.request(Exec("second", "echo done", timeout_ms=150))
    assert second.outcome().stdout == b"done\n"
    assert first.outcome().reply.exit_code == 0


def test_commands_of_many_connections_run_in_order(sandbox: Sandbox) -> None:
    """One shell runs one command at a time, first come first served."""
    clients = [sandbox.shell(), *(sandbox.connect() for _ in range(8))]
    witness = sandbox.connect()
    clients[0].begin("mkfifo go; cat go; echo 0 >>order")
    for number, each in enumerate(clients[1:], start=1):
        each.request(Exec("x", f"echo {number} >>order"))
        witness.ask(Hello())  # answered after the request before it was taken in
    clients[0].send(Kind.CANCEL)
    for each in clients:
        each.outcome()
    assert witness.stdout("cat order").split() == [b"%d" % number for number in range(1, 9)]


# Cancelling -------------------------------------------------------------------------------------------------------


def test_the_graces_are_the_sessions(sandbox: Sandbox) -> None:
    """With no grace a program that ignores signals is killed at once; with a long one it gets that time."""
    client = sandbox.connect()
    client.ask(Setup(graces=Graces(0, 0, 0)))
    stubborn = "sh -c 'trap \"\" INT TERM; while :; do sleep 0.01; done'"
    reply = client.reply(stubborn, timeout_ms=100)
    assert reply.cause == "timed_out"
    assert reply.duration_us < 400_000  # the usual ones are 500 ms before the kill
    with open_sandbox() as patient:
        client = patient.connect()
        client.ask(Setup(graces=Graces(interrupt_ms=20_000)))
        slow = "sh -c 'trap \"sleep 0.7; echo tidy; exit\" INT; while :; do sleep 0.01; done'"
        assert client.run(slow, timeout_ms=100).stdout == b"tidy\n"


def test_cancel_is_answered(client: Client) -> None:
    """CANCEL ends the command as a time limit would, with cause cancelled and status 130."""
    client.begin("echo before; sleep 1234; echo no", timeout_ms=LONG_MS)
    client.read_until(b"before\n")
    client.send(Kind.CANCEL)
    outcome = client.outcome()
    assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stdout) == (130, "cancelled", b"")
    assert count(client, "sleep 1234") == 0


@pytest.mark.parametrize("command", ["sleep 1234", "while :; do :; done", "true"])
def test_cancel_at_any_moment_keeps_the_shell(client: Client, command: str) -> None:
    """Cancelled before the shell read it, while it begins or after it ended: always an answer, never a lost shell.

    BusyBox's may be replaced when the signal comes in the very moment in which it forks; what it exported stays.
    """
    is_busybox = "busybox" in os.fsdecode(client.run("cat /proc/$$/cmdline").stdout)
    client.run("kept() { echo kept; }; export KEPT=kept")
    restarts = 0
    for round_number in range(40):
        client.request(Exec("x", command))
        for _ in range(round_number % 4):  # more or less time for the shell to get on
            os.sched_yield()
        client.send(Kind.CANCEL)
        reply = client.outcome().reply
        assert reply.cause in ("cancelled", "exited")
        restarts += reply.shell_restarted
    assert restarts <= (1 if is_busybox else 0)
    assert client.stdout("kept" if restarts == 0 else "echo $KEPT") == b"kept\n"


def test_cancel_of_a_queued_command_is_answered_at_once(sandbox: Sandbox) -> None:
    """A command that waits for the shell is withdrawn and never runs."""
    first, second = sandbox.shell(), sandbox.connect()
    first.begin("sleep 1234", timeout_ms=LONG_MS)
    second.request(Exec("x", "touch ran"))
    second.send(Kind.CANCEL)
    outcome = second.outcome()
    assert (outcome.reply.cause, outcome.started) == ("cancelled", False)
    first.send(Kind.CANCEL)
    first.outcome()
    assert first.reply("test -e ran").exit_code == 1


def test_cancel_after_the_end_is_ignored(client: Client) -> None:
    """A CANCEL, DATA or END that crosses the reply changes nothing for the next request."""
    client.run("true")
    for kind in (Kind.CANCEL, Kind.DATA, Kind.END):
        client.send(kind)
    assert client.stdout("echo next") == b"next\n"


def test_a_client_that_leaves_cancels_its_command(sandbox: Sandbox) -> None:
    """Closing the connection ends the running command and lets the next one in."""
    first, second = sandbox.shell(), sandbox.connect()
    first.begin("sleep 1234; touch ran", timeout_ms=LONG_MS)
    first.sock.close()
    began = time.monotonic()
    assert second.stdout("echo next; ls") == b"next\n"
    assert time.monotonic() - began < 10
    assert count(second, "sleep 1234") == 0


def test_a_client_that_leaves_the_queue_is_forgotten(sandbox: Sandbox) -> None:
    """A queued command whose client left never runs."""
    first, second = sandbox.shell(), sandbox.connect()
    first.begin("sleep 0.2")
    second.request(Exec("x", "touch ran"))
    second.sock.close()
    assert first.outcome().reply.exit_code == 0
    assert first.reply("test -e ran").exit_code == 1


# Processes --------------------------------------------------------------------------------------------------------


def test_orphans_are_reaped(client: Client) -> None:
    """Orphans that end leave no zombie once the shell has had its next child."""
    client.run("for i in 1 2 3 4 5; do sh -c 'sleep 0.02 & exit' ; done; sleep 0.1")
    states = client.stdout("sleep 0.01; cat /proc/[0-9]*/stat 2>/dev/null")
    assert b") Z" not in states


def test_a_dead_shell_leaves_no_zombie(client: Client) -> None:
    """Jobs of a shell that was killed go to PID 1, which reaps them."""
    reply = client.reply("sleep 0.05 & sleep 0.05 & kill -9 $$")
    assert isinstance(reply, ExecReply)
    assert b") Z" not in client.stdout("sleep 0.2; cat /proc/[0-9]*/stat 2>/dev/null")


# Limits -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_pids_cgroup(sandbox: Sandbox) -> Iterator[Path]:
    """Have a pids cgroup with PID 1 of the sandbox in it, so that its forks are limited as well."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        directory = Path(f"/sys/fs/cgroup/{controllers}{path}") / f"runner-test-{os.getpid()}"
        if controllers == "pids":
            break
    else:
        pytest.skip("no pids hierarchy of its own here")
    directory.mkdir()
    init_pid = sandbox.init_pid()
    (directory / "cgroup.procs").write_text(str(init_pid))
    try:
        yield directory
    finally:
        wait_until(lambda: _move_out(directory))
        directory.rmdir()


def _move_out(directory: Path) -> bool:
    """Move every process to the parent; return whether none is left."""
    for pid in (directory / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (directory.parent / "cgroup.procs").write_text(pid)
    return not (directory / "cgroup.procs").read_text()


def _refused_forks(pids_cgroup: Path) -> int:
    return int((pids_cgroup / "pids.events").read_text().split()[1])


def test_a_shell_that_cannot_be_forked_comes_later(sandbox: Sandbox) -> None:
    """At the process limit a dead shell has no successor; there is one as soon as there is room."""
    with open_pids_cgroup(sandbox) as pids_cgroup:
        client = sandbox.shell("/bin/dash")
        client.run("export A=1")
        (pids_cgroup / "pids.max").write_text("1")
        client.request(Exec("x", "kill -9 $$"))
        wait_until(lambda: _refused_forks(pids_cgroup) >= 2)
        (pids_cgroup / "pids.max").write_text("50")
        reply = client.outcome().reply
        assert (reply.cause, reply.shell_restarted) == ("shell_died", True)
        assert client.stdout("echo $A") == b"1\n"


def test_a_first_shell_that_cannot_be_forked_is_told_of_and_comes_later() -> None:
    """At the process limit the first command waits for room as long as a shell may take to start, and is refused then.
    The next command has a shell as soon as there is room."""
    with open_sandbox(start_grace_s=1.0) as sandbox, open_pids_cgroup(sandbox) as pids_cgroup:
        client = sandbox.connect()
        client.ask(Setup(shell="/bin/dash", unused_shell_ms=0))
        (pids_cgroup / "pids.max").write_text("1")
        told = "the shell cannot be started: Resource temporarily unavailable"
        assert client.run("echo x").reply == Error("SHELL_FAILED", told)
        refused = _refused_forks(pids_cgroup)
        client.request(Exec("x", "echo x"))
        wait_until(lambda: _refused_forks(pids_cgroup) > refused)
        (pids_cgroup / "pids.max").write_text("50")
        outcome = client.outcome()
        assert (outcome.stdout, outcome.reply.shell_restarted) == (b"x\n", False)
