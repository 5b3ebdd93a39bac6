"""A command of a persistent shell on a terminal: keys, signals, size, and that nothing of the terminal stays."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

import pytest

from runner.wire.protocol import Cancel, Done, Error, Exec, ExecReply, Kind, Resize, TerminalSize
from tests.kernel.runner_harness import Client, Outcome, Sandbox, needs_namespaces, wait_until
from tests.leaks import descendants
from tests.waiting import patience

pytestmark = needs_namespaces

SIZE = TerminalSize(100, 30)
CTRL_C, CTRL_D, CTRL_BACKSLASH = b"\x03", b"\x04", b"\x1c"
INTERRUPTED = (130, 2, "signalled", False)


def ending(reply: ExecReply) -> tuple[int, int | None, str, bool]:
    return reply.exit_code, reply.signal, reply.cause, reply.shell_restarted


def on_terminal(client: Client, command: str, **options: Any) -> Outcome:
    return client.run(command, terminal=SIZE, **options)


def begin(client: Client, command: str, until: bytes = b"ready\r\n") -> None:
    """Begin a command on a terminal and return when it has said that it is ready."""
    client.begin(command, terminal=SIZE)
    client.read_until(until)


def press(client: Client, keys: bytes) -> None:
    client.send(Kind.DATA, keys)


def test_all_three_streams_are_the_terminal(client: Client) -> None:
    """Standard streams are the controlling terminal, of the size asked for and a type that programs know, owned by the
    user.
    """
    command = "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM && test -O $(tty) && echo hi >/dev/tty"
    outcome = on_terminal(client, command)
    assert (outcome.reply.exit_code, outcome.stdout, outcome.stderr) == (0, b"30 100\r\nxterm-256color\r\nhi\r\n", b"")


def test_it_is_the_same_shell(client: Client) -> None:
    """State of earlier commands is there on the terminal, and state set on the terminal is there in later commands."""
    client.run("a=1; f() { echo f$1; }; cd /tmp")
    assert on_terminal(client, "echo $a $PWD; f 2; export B=3; cd /; (exit 7)").stdout == b"1 /tmp\r\nf2\r\n"
    assert client.stdout("echo $? $B $PWD $TERM") == b"7 3 / dumb\n"


def test_a_later_command_has_no_terminal(client: Client) -> None:
    """A command after the one on the terminal has neither its streams nor /dev/tty, and a job left behind has lost the
    terminal.
    """
    begin(client, "setsid -w cat </dev/tty >got & (sleep 0.01; cat /dev/tty >/dev/null; echo lost >lost) & echo ready")
    client.outcome()
    outcome = client.run("test -t 0 || test -t 1 || test -t 2 || echo none; cat /dev/tty")
    assert outcome.stdout == b"none\n"
    assert b"No such device or address" in outcome.stderr
    wait_until(lambda: client.stdout("cat lost") == b"lost\n")


def test_keys_are_its_input(client: Client) -> None:
    """Lines and end-of-file are the command's input, echoed, also those typed before it began."""
    client.request(Exec("x", "read line; echo got $line; cat", terminal=SIZE))
    press(client, b"early\n")
    client.read_until(b"got early\r\n")
    press(client, b"more\n")
    client.read_until(b"more\r\nmore\r\n")
    press(client, CTRL_D)
    assert ending(client.outcome().reply) == (0, None, "exited", False)


def test_input_is_taken_as_fast_as_it_is_read(client: Client) -> None:
    """More than a terminal holds arrives whole and in order at a program that takes its time."""
    begin(client, "stty raw -echo; echo ready; head -c 300000 | md5sum", b"ready")
    typed = b"".join(b"%05d" % number for number in range(60_000))
    for start in range(0, len(typed), 50_000):
        press(client, typed[start : start + 50_000])
    digest = hashlib.md5(typed, usedforsecurity=False).hexdigest().encode()
    assert digest in client.outcome().stdout


def test_all_output_comes_before_the_answer(client: Client) -> None:
    """All of a large output comes before the reply."""
    outcome = on_terminal(client, "seq 1 40000")
    assert outcome.stdout == b"".join(b"%d\r\n" % n for n in range(1, 40_001))


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1234",
        "while :; do :; done",
        "while :; do sleep 0.01; done",
        "read y",
        "sleep 1234 | cat",
        "f() { while :; do g; done; }; g() { :; }; f",
        "sleep 1234 & while :; do :; done",
    ],
)
def test_ctrl_c_leaves_the_command(sandbox: Sandbox, client: Client, command: str) -> None:
    """Ctrl-C ends a command in a program, a builtin loop or a read: its next lines do not run, and the shell is the
    same. The key is pressed when the programs run: one that was forked and has not called execve lives through it, as
    at any terminal.
    """
    client.run("x=kept")
    begin(client, f"echo ready; {command}; echo no")
    programs = {name for name in ("sleep", "cat") if f"{name} " in f"{command} " and "0.01" not in command}
    wait_until(lambda: programs <= {name for _, name in descendants(sandbox.pid)})
    outcome = _pressed(client, CTRL_C)
    assert (ending(outcome.reply), outcome.stdout.replace(b"^C", b"").strip()) == (INTERRUPTED, b"")
    assert client.stdout("echo $x") == b"kept\n"


def _pressed(client: Client, key: bytes) -> Outcome:
    """Press a key until the command has ended: as at any terminal, it can come between two programs."""
    patience_s = client.sock.gettimeout()
    press(client, key)
    client.sock.settimeout(patience(1))  # a key more than it takes would reach the next command
    try:
        for _ in range(10):
            with contextlib.suppress(TimeoutError):
                return client.outcome()
            press(client, key)
    finally:
        client.sock.settimeout(patience_s)
    raise AssertionError("the key did nothing")


def test_a_program_that_lives_through_ctrl_c_lets_the_command_go_on(client: Client) -> None:
    """A program that handles the interrupt goes on, and so does its command, as in any shell."""
    waits = "print('ready', flush=True)\n while True: time.sleep(0.01)"
    program = f"import time\ntry:\n {waits}\nexcept KeyboardInterrupt: print('handled')"
    begin(client, f'/usr/bin/python3 -Sc "{program}"; echo next')
    press(client, CTRL_C)
    outcome = client.outcome()
    assert (ending(outcome.reply), outcome.stdout) == ((0, None, "exited", False), b"^Chandled\r\nnext\r\n")


def test_ctrl_c_runs_the_users_trap(client: Client) -> None:
    """A trap set before the command or in it runs at Ctrl-C, and stays for later commands."""
    client.run("trap 'echo mine' INT")
    begin(client, "echo ready; i=0; while [ -z $done ]; do sleep 0.01; done; trap 'done=1; echo new' INT")
    press(client, CTRL_C)
    client.read_until(b"mine")
    client.send(Kind.CANCEL)
    client.outcome()
    assert client.stdout("kill -INT $$") == b"mine\n"


def test_ctrl_backslash_leaves_the_command_too(client: Client) -> None:
    """The quit key ends the command with the status of SIGQUIT."""
    begin(client, "ulimit -c 0; echo ready; sleep 1234; echo no")
    assert ending(_pressed(client, CTRL_BACKSLASH).reply) == (131, 3, "signalled", False)


def test_ctrl_z_is_an_ordinary_key(client: Client) -> None:
    """Ctrl-Z is no signal: without job control it would stop the shell for ever."""
    begin(client, "echo ready; read x; echo got $x")
    press(client, b"\x1aabc\n")
    assert b"got \x1aabc\r\n" in client.outcome().stdout


def test_the_size_can_be_changed(client: Client, sandbox: Sandbox) -> None:
    """The foreground is told a new size, which another connection sets by id."""
    other = sandbox.connect()
    begin(client, "trap 'stty size' WINCH; echo ready; while [ ! -e done ]; do sleep 0.01; done")
    assert other.ask(Resize("x", TerminalSize(81, 25))) == Done()
    client.read_until(b"25 81\r\n")
    other.write_file("/mnt/workspace/done", b"")
    assert client.outcome().reply.exit_code == 0


@pytest.mark.parametrize("size", [TerminalSize(0, 24), TerminalSize(80, -1), TerminalSize(70000, 24)])
def test_impossible_sizes_are_refused(sandbox: Sandbox, size: TerminalSize) -> None:
    """An impossible size is refused at the start and later."""
    client = sandbox.shell()
    for request in (Exec("x", "true", terminal=size), Resize("x", size)):
        answer = client.ask(request)
        assert isinstance(answer, Error)
        assert answer.code == "BAD_REQUEST"


def test_only_a_running_terminal_has_a_size(sandbox: Sandbox) -> None:
    """A command on pipes, or an ended one, is not running on a terminal."""
    client, other = sandbox.shell(), sandbox.connect()
    client.begin("echo begun; sleep 1234")
    client.read_until(b"begun")
    for request in (Resize("x", SIZE), Resize("y", SIZE)):
        answer = other.ask(request)
        assert isinstance(answer, Error)
        assert answer.code == "NOT_RUNNING"


# Ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", (0, None, "exited", False)),
        ("(exit 3)", (3, None, "exited", False)),
        ("exit 4", (4, None, "exited", True)),
        ("exec sh -c 'exit 5'", (5, None, "exited", True)),
        ("kill -9 $$", (137, 9, "shell_died", True)),
        ("set -e; false", (1, None, "exited", True)),
        ("exec 0<&- 1>&- 2>&-", (0, None, "exited", False)),
        ("cd /nowhere", None),
    ],
)
def test_endings_are_told_apart(
    client: Client, command: str, expected: tuple[int, int | None, str, bool] | None
) -> None:
    """Ends on a terminal have the same causes as without one; the next command works on a terminal and without."""
    reply = on_terminal(client, command).reply
    assert ending(reply) == (expected or (reply.exit_code, None, "exited", False))
    assert on_terminal(client, "echo on").stdout == b"on\r\n"
    assert client.stdout("echo off") == b"off\n"


@pytest.mark.parametrize("command", ["sleep 1234", "while :; do :; done", "read y", "cat", "trap '' INT; sleep 1234"])
def test_a_timeout_keeps_the_shell(client: Client, command: str) -> None:
    """A time limit ends a command on a terminal, whatever the command waits for."""
    client.run("x=kept")
    reply = on_terminal(client, command, timeout_ms=200).reply
    assert ending(reply) == (124, None, "timed_out", False)
    assert client.stdout("echo $x; trap - INT") == b"kept\n"


def test_the_traps_of_the_user_are_given_back(client: Client) -> None:
    """HUP is ignored only while the terminal goes; INT, QUIT and HUP are what they were, with actions of any kind."""
    client.run("trap 'echo \"it'\\''s\n  HUP\"' HUP; trap '' QUIT")
    on_terminal(client, "true")
    on_terminal(client, "true")
    assert client.stdout("kill -QUIT $$; kill -HUP $$; trap - HUP QUIT") == b"it's\n  HUP\n"
    on_terminal(client, "true")
    assert client.reply("kill -HUP $$").cause == "shell_died"


def test_a_job_of_before_outlives_the_terminal(client: Client) -> None:
    """The hang-up of a terminal spares a job that was started before it."""
    client.run("sleep 4321 & echo $! >pid")
    on_terminal(client, "true")
    assert client.stdout("kill -0 $(cat pid) && echo alive") == b"alive\n"


def test_a_background_job_does_not_hold_up_the_end(client: Client) -> None:
    """A background job loses the terminal and lives on."""
    assert on_terminal(client, "sleep 4321 & echo $! >pid; echo done").stdout == b"done\r\n"
    assert client.stdout("kill -0 $(cat pid) && echo alive") == b"alive\n"


def test_a_reader_that_stopped_does_not_hold_up_the_shell(client: Client, sandbox: Sandbox) -> None:
    """The command waits for its reader; it can be cancelled, and what it wrote last is there."""
    client.begin("yes", terminal=SIZE)
    wait_until(lambda: sandbox.connect().ask(Cancel("x")) == Done())
    assert client.outcome().reply.cause == "cancelled"
    assert client.stdout("echo on") == b"on\n"


def test_nothing_of_a_terminal_stays_open(client: Client, sandbox: Sandbox) -> None:
    """PID 1 gives every descriptor back."""
    on_terminal(client, "true")
    client.run("true")
    directory = f"/proc/{sandbox.init_pid()}/fd"
    before = len(os.listdir(directory))
    for _ in range(5):
        on_terminal(client, "echo x; sleep 4321 &")
    client.run("true")
    assert len(os.listdir(directory)) == before


def test_variables_and_directory_hold_for_one_command(client: Client) -> None:
    """Variables and directory of a request hold for its command alone, as without a terminal."""
    assert on_terminal(client, "echo $A $PWD", env={"A": "1"}, cwd="/tmp").stdout == b"1 /tmp\r\n"
    assert client.stdout("echo ${A-none} $PWD") == b"none /mnt/workspace\n"


def test_output_of_a_full_screen_program_is_exact(client: Client) -> None:
    """A full-screen program has the terminal to itself; keys come raw."""
    begin(client, "stty raw -echo; printf 'ready\\r\\n'; head -c 3 | od -An -tx1; stty sane")
    press(client, b"\x03\x1a\x04")
    assert b"03 1a 04" in client.outcome().stdout
