"""Commands that would leave, end or silence the program which runs them in the shell."""

from __future__ import annotations

from typing import Any

import pytest

from runner.wire.protocol import ExecReply
from tests.kernel.runner_harness import Client, needs_namespaces

pytestmark = needs_namespaces


def ending(reply: ExecReply) -> tuple[int, int | None, str, bool]:
    return reply.exit_code, reply.signal, reply.cause, reply.shell_restarted


@pytest.mark.parametrize("options", [{}, {"cwd": "/tmp", "env": {"V": "1"}}, {"stdin": b"x"}], ids=["", "env", "stdin"])
@pytest.mark.parametrize("leave", ["continue", "break", "break 2", "continue 5", "[ -d /nope ] || break", "eval break"])
def test_break_and_continue_outside_a_loop_end_the_command(client: Client, leave: str, options: dict[str, Any]) -> None:
    """`break` and `continue` outside a loop end the command with status 0; the shell and its state live on."""
    client.run("kept() { echo kept; }; cd /tmp; V=0")
    outcome = client.run(
        f"echo before; for i in 1 2; do continue; done; {leave}\necho no", timeout_ms=10_000, **options
    )
    assert (outcome.stdout, ending(outcome.reply)) == (b"before\n", (0, None, "exited", False))
    assert client.stdout("kept; pwd; echo $V") == b"kept\n/tmp\n0\n"


def test_breaking_again_and_again_keeps_the_shell(client: Client) -> None:
    """No number of commands that leave a loop which isn't there wears the shell out."""
    client.run("x=1")
    for _ in range(20):
        assert ending(client.reply("break 3", timeout_ms=10_000)) == (0, None, "exited", False)
    assert client.stdout("echo $x") == b"1\n"


def test_breaking_out_of_every_loop_ends_the_shell(client: Client) -> None:
    """A `break` with a number that leaves all loops of the driver ends the shell as `exit` does."""
    assert ending(client.reply("export A=1; break 99", timeout_ms=10_000)) == (0, None, "exited", True)
    assert client.stdout("echo $A") == b"1\n"


def test_an_exit_trap_runs_when_the_shell_ends(client: Client) -> None:
    """Output of a trap on EXIT is the command's, the status stays, and the state before the command is kept."""
    client.run("mkdir d; cd d; export A=1")
    outcome = client.run("trap 'echo bye' EXIT; echo hello; export A=2; exit 4", timeout_ms=10_000)
    assert (outcome.stdout, ending(outcome.reply)) == (b"hello\nbye\n", (4, None, "exited", True))
    assert client.stdout("pwd; echo $A") == b"/mnt/workspace/d\n1\n"


def test_an_exit_trap_set_before_runs_at_the_end(client: Client) -> None:
    """A trap outlives its command and runs in the one that ends the shell."""
    client.run("trap 'echo bye' EXIT; export A=1")
    assert client.run("(exit 0); exit", timeout_ms=10_000).stdout == b"bye\n"
    assert client.stdout("echo $A") == b"1\n"


@pytest.mark.parametrize("option", ["n", "r"])
def test_a_shell_that_runs_or_writes_nothing_is_replaced(client: Client, option: str) -> None:
    """`set -n` and `set -r` may cost their command its time; afterwards there is a shell that works."""
    client.run("export A=1; mkdir d; cd d")
    client.reply(f"set -{option}", timeout_ms=200)
    assert client.stdout("pwd; echo $A", timeout_ms=10_000) == b"/mnt/workspace/d\n1\n"


def test_noclobber_does_not_keep_the_state_from_being_saved(client: Client) -> None:
    """`set -C` is for the files of commands."""
    client.run("set -C; export A=1")
    client.run("export A=2")
    client.run("kill -9 $$")
    assert client.stdout("echo $A") == b"2\n"


@pytest.mark.parametrize("command", ["set -x; true", "true"])
def test_a_trace_shows_the_command_alone(client: Client, command: str) -> None:
    """A trace by `set -x` shows nothing of the driver that runs the command."""
    client.run("set -x")
    lines = client.run(command).stderr.splitlines()
    assert lines[-1].endswith(b"+ true")
    assert not any(b"__sk_r" in line or b"exec" in line or b"status" in line for line in lines)


def test_a_job_of_an_earlier_command_cannot_end_a_later_one(client: Client) -> None:
    """Reports with numbers that may be guessed are dropped: the later command has its own end and status."""
    client.run('( n=0; while [ $n -lt 3000 ]; do n=$((n + 1)); echo "$n 0"; done >/run/sandkasten/1/status ) &')
    outcome = client.run("sleep 0.4; (exit 7)", timeout_ms=10_000)
    assert ending(outcome.reply) == (7, None, "exited", False)
