"""Programs on a terminal of their own: what they see of it, what keys do, and that real ones work."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.wire.protocol import Cancel, Done, Error, Kind, Resize, RunProgram, Signal, TerminalSize
from tests.kernel import harness
from tests.kernel.runner_harness import SHELLS, Client, Outcome, Sandbox, needs_namespaces

pytestmark = needs_namespaces

SIZE = TerminalSize(cols=100, rows=30)
INTERRUPT, END_OF_FILE, STOP, ERASE, ESCAPE = b"\x03", b"\x04", b"\x1a", b"\x7f", b"\x1b"
READY = b"\x1b[?2004h"
"""Prompt of bash."""
JOB = b"sh -c 'echo u''p; exec sleep 1234'\n"
"""Says `up` when it is in the foreground."""
STOPPABLE = b"""bash -c 'trap "echo con""tinued" CONT; echo u""p; while :; do sleep 0.05; done'\n"""
"""Says, too, when it goes on. (dash starts programs by vfork: a stop that hits one before execve leaves dash waiting.)
"""


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    return sandbox.shell()


def begin(client: Client, *argv: str, exec_id: str = "t", **options: Any) -> None:
    client.request(RunProgram(exec_id, argv, terminal=SIZE, **options))


def begin_shell(client: Client, **options: Any) -> None:
    begin(client, command="", interactive=True, **options)


def type_(client: Client, keys: bytes) -> None:
    client.send(Kind.DATA, keys)


def run(client: Client, script: str, **options: Any) -> Outcome:
    begin(client, "sh", "-c", script, **options)
    return client.outcome()


def lines(output: bytes) -> list[bytes]:
    return output.replace(b"\r\n", b"\n").splitlines()


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not Path("/usr/bin", program).exists(), reason=f"no {program} here")


def test_all_streams_are_one_terminal(client: Client) -> None:
    """Standard streams are one terminal of the size asked for and of a type that real programs know; both outputs
    arrive on it.
    """
    outcome = run(client, "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo yes; stty size; echo $TERM; echo error >&2")
    assert lines(outcome.stdout) == [b"yes", b"30 100", b"xterm-256color", b"error"]
    assert outcome.stderr == b""


def test_its_settings_are_those_of_a_text_terminal(client: Client) -> None:
    """Lines are edited and echoed, keys make signals, and erasing takes a whole UTF-8 character."""
    settings = run(client, "stty -a").stdout.split()
    assert {b"icanon", b"isig", b"echo", b"icrnl", b"onlcr", b"iutf8"} <= set(settings)


def test_it_is_the_controlling_terminal(client: Client) -> None:
    """/dev/tty opens, and the program leads the session and the foreground."""
    script = "echo tty >/dev/tty; exec python3 -c 'import os; print(os.getsid(0) == os.getpid() == os.tcgetpgrp(0))'"
    assert lines(run(client, script).stdout) == [b"tty", b"True"]


def test_pid_1_has_no_controlling_terminal(sandbox: Sandbox, client: Client) -> None:
    """Making terminals gives it none, and a program without one has none."""
    run(client, "true")
    stat = Path(f"/proc/{sandbox.init_pid()}/stat").read_text()
    assert stat.rpartition(")")[2].split()[4] == "0"
    client.request(RunProgram("p", ("sh", "-c", "echo x >/dev/tty")))
    assert b"/dev/tty" in client.outcome().stderr


@pytest.mark.parametrize("user", [None, "nobody"])
def test_it_belongs_to_the_user_of_the_program(client: Client, user: str | None) -> None:
    """The terminal's user may open it again by name, as `/dev/stderr` and as `/dev/tty`."""
    script = '[ -O "$(tty)" ] && echo mine >"$(tty)"; echo a >/dev/stderr; echo b >/dev/tty'
    assert lines(run(client, script, user=user).stdout) == [b"mine", b"a", b"b"]


def test_what_is_typed_is_its_input(client: Client) -> None:
    """Input is echoed by the terminal and handed over a line at a time, until the end-of-file key."""
    begin(client, "cat")
    type_(client, b"one\n")
    assert client.read_until(b"one\r\none\r\n")
    type_(client, "twä".encode() + ERASE + b"o\n")
    assert client.read_until(b"\r\ntwo\r\n")
    type_(client, END_OF_FILE)
    assert client.outcome().reply.exit_code == 0


def test_a_long_paste_arrives_whole(client: Client) -> None:
    """The terminal takes a little at a time, and the rest waits."""
    text = b"".join(b"line %d\n" % number for number in range(20_000))
    begin(client, "sh", "-c", "stty -echo; echo ready; cat >pasted; md5sum <pasted; wc -c <pasted")
    client.read_until(b"ready")
    for start in range(0, len(text), 65536):
        type_(client, text[start : start + 65536])
    type_(client, END_OF_FILE)
    assert lines(client.outcome().stdout)[-1] == b"%d" % len(text)


def test_much_output_arrives_whole(client: Client) -> None:
    """All output arrives, also the part that was still in the terminal when the program ended."""
    for count in (1, 1000, 50_000):
        assert lines(run(client, f"seq {count}").stdout) == [b"%d" % number for number in range(1, count + 1)]


def test_a_slow_reader_stops_its_own_terminal_only(sandbox: Sandbox, client: Client) -> None:
    """A program that writes for ever waits for its reader, and can be ended meanwhile."""
    begin(client, "yes")
    other = sandbox.connect()
    assert lines(run(other, "echo hi", exec_id="o").stdout) == [b"hi"]
    assert other.ask(Cancel("t")) == Done()
    assert client.outcome().reply.cause == "cancelled"


def test_the_interrupt_key_ends_the_program(client: Client) -> None:
    """The interrupt key ends the program by SIGINT."""
    begin(client, "sh", "-c", "echo ready; exec sleep 1000")
    client.read_until(b"ready")
    type_(client, INTERRUPT)
    reply = client.outcome().reply
    assert (reply.exit_code, reply.signal, reply.cause) == (130, signal.SIGINT, "signalled")


def test_a_new_size_is_announced(sandbox: Sandbox, client: Client) -> None:
    """The program gets SIGWINCH and reads the new size."""
    begin(client, "sh", "-c", "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done")
    client.read_until(b"ready")
    assert sandbox.connect().ask(Resize("t", TerminalSize(cols=132, rows=43))) == Done()
    assert lines(client.outcome().stdout)[-1] == b"43 132"


def test_only_a_terminal_has_a_size(sandbox: Sandbox, client: Client) -> None:
    """A program on pipes can't be resized, nor can one that isn't there; nobody gets an impossible size."""
    client.request(RunProgram("p", ("sh", "-c", "echo ready; exec sleep 1000")))
    client.read_until(b"ready")
    other = sandbox.connect()
    for exec_id in ("p", "nobody"):
        assert other.ask(Resize(exec_id, SIZE)).code == "NOT_RUNNING"
    begin(sandbox.connect(), "cat")
    for size in (TerminalSize(0, 1), TerminalSize(1, -1), TerminalSize(70_000, 1)):
        assert other.ask(Resize("t", size)).code == "BAD_REQUEST"


def test_a_password_is_not_shown(client: Client) -> None:
    """A prompt on /dev/tty with the echo off, as sudo and ssh ask."""
    begin(client, "python3", "-c", "import getpass; print('got', len(getpass.getpass('password: ')))")
    client.read_until(b"password: ")
    type_(client, b"secret\n")
    outcome = client.outcome()
    assert lines(outcome.stdout)[-1] == b"got 6"
    assert b"secret" not in outcome.stdout


@needs("vim")
def test_vim_edits_a_file(client: Client) -> None:
    """An editor draws its screen, takes keys, saves, and ends well."""
    begin(client, "vim", "-u", "NONE", "-i", "NONE", "note.txt")
    client.read_until(b"note.txt")
    type_(client, b"ihello from vim" + ESCAPE)
    client.read_until(b"hello from vim")
    type_(client, b":wq\r")
    assert client.outcome().reply.exit_code == 0
    assert client.stdout("cat note.txt") == b"hello from vim\n"


@needs("top")
def test_top_shows_processes(client: Client) -> None:
    """The program redraws until it is told to quit."""
    begin(client, "top", "-d", "0.1")
    client.read_until(b"COMMAND")
    client.read_until(b"load average")
    type_(client, b"q")
    assert client.outcome().reply.exit_code == 0


@needs("less")
def test_less_pages_through_a_file(client: Client) -> None:
    """A page of the terminal's height, the last line on demand, and the quit key."""
    client.run("seq -f 'line %g' 1000 >long.txt")
    begin(client, "less", "long.txt")
    page = client.read_until(b"line 29")
    assert b"line 31" not in page
    type_(client, b"G")
    client.read_until(b"line 1000")
    type_(client, b"q")
    assert client.outcome().reply.exit_code == 0


@pytest.mark.parametrize("shell", SHELLS)
def test_an_interactive_shell_has_a_prompt(sandbox: Sandbox, shell: str) -> None:
    """An interactive shell reads lines, keeps its state between them, survives interrupts, and ends with the given
    status."""
    client = sandbox.shell(shell)
    begin_shell(client)
    client.read_until(b":/mnt/workspace$ ")
    type_(client, b"cd /tmp\n")
    client.read_until(b":/tmp$ ")
    type_(client, b"x=4$((1+1)); echo $TERM-$x\n")
    client.read_until(b"xterm-256color-42\r\n")
    type_(client, JOB)
    client.read_until(b"up\r\n")
    type_(client, INTERRUPT)
    client.read_until(b":/tmp$ ")
    type_(client, b"echo $?-$x\n")
    client.read_until(b"130-42\r\n")
    type_(client, b"exit 3\n")
    reply = client.outcome().reply
    assert (reply.exit_code, reply.cause) == (3, "exited")


def test_job_control_works_in_bash(client: Client) -> None:
    """Stop a job, take it back, stop it again, let it go on in the background; interrupt another. The shell stays."""
    begin_shell(client)
    client.read_until(READY)
    type_(client, STOPPABLE)
    client.read_until(b"up\r\n")
    for command in (b"fg\n", b"bg\n"):
        type_(client, STOP)
        client.read_until(b"Stopped")
        type_(client, command)
        client.read_until(b"continued")
    type_(client, b"jobs\n")
    client.read_until(b"Running")
    type_(client, JOB)
    client.read_until(b"up\r\n")
    type_(client, INTERRUPT)
    client.read_until(READY)
    type_(client, b"echo $?-alive; kill %1; exit 4\n")
    client.read_until(b"130-alive")
    assert client.outcome().reply.exit_code == 4


def test_a_signal_by_id_goes_to_the_foreground(sandbox: Sandbox, client: Client) -> None:
    """A signal by id acts as its key does: the foreground job ends, the shell stays."""
    begin_shell(client)
    client.read_until(READY)
    type_(client, JOB)
    client.read_until(b"up\r\n")
    assert sandbox.connect().ask(Signal("t", signal.SIGINT)) == Done()
    client.read_until(READY)
    type_(client, b"echo still $((40+2))\n")
    client.read_until(b"still 42")


def test_an_interactive_shell_can_be_ended(sandbox: Sandbox, client: Client) -> None:
    """An interactive shell ignores interrupts and terminations, but not a hang-up; its children end, too."""
    begin_shell(client)
    client.read_until(READY)
    type_(client, b"sleep 1234 & \n")
    client.read_until(READY)
    other = sandbox.connect()
    assert other.ask(Cancel("t")) == Done()
    reply = client.outcome().reply
    assert reply.cause == "cancelled"
    other.request(RunProgram("p", ("ps", "-C", "sleep")))
    assert other.outcome().reply.exit_code == 1


def test_the_terminal_goes_with_its_program(client: Client) -> None:
    """The reply does not wait for a job that still has it open; that job is hung up on and can go on without."""
    job = "trap '' HUP; >up; until [ -e go ]; do sleep 0.01; done; echo x 2>/dev/null || echo gone >result; >done"
    outcome = run(client, f'(setsid sh -c "{job}" &) ; until [ -e up ]; do sleep 0.01; done; echo end')
    assert lines(outcome.stdout) == [b"end"]
    assert client.stdout(">go; until [ -e done ]; do sleep 0.01; done; cat result") == b"gone\n"


def test_a_session_has_a_bounded_number_of_bytes_to_say(client: Client) -> None:
    """A job that writes for ever after the end of its program does not hold up the reply."""
    outcome = run(client, "trap '' HUP; (trap '' HUP; yes) & sleep 0.05")
    assert outcome.reply.exit_code == 0
    assert client.stdout("ps -C yes -o args= | grep -vc defunct") == b"0\n"


def test_typing_ahead_is_kept(client: Client) -> None:
    """Keys that come before the program reads are there when it does."""
    begin(client, "sh", "-c", "sleep 0.2; read a; read b; echo $b $a")
    type_(client, b"first\nsecond\n")
    assert lines(client.outcome().stdout)[-1] == b"second first"


def test_no_terminal_is_left_behind(sandbox: Sandbox, client: Client) -> None:
    """PID 1 closes its side of a terminal, whatever the program's end."""

    def masters() -> int:
        directory = f"/proc/{sandbox.init_pid()}/fd"
        return sum("ptmx" in os.readlink(f"{directory}/{name}") for name in os.listdir(directory))

    run(client, "exit 1")
    run(client, "sleep 1000", timeout_ms=10)
    begin(client, "no-such-program")
    assert re.fullmatch(rb"sandkasten: no-such-program: .*\r\n", client.outcome().stdout)
    refused = sandbox.connect()
    begin(refused, "true", user="no-such-user")
    assert isinstance(refused.next_message(), Error)
    assert masters() == 0


def test_terminals_in_a_real_sandbox() -> None:
    """Terminals work in a sandbox with its own devpts and a PID 1 without power over files, for the sandbox user and
    another one.
    """
    with harness.data_directory() as data_dir, harness.running(data_dir) as server:
        box = server.build(harness.host_plan())
        client = Client(harness.connect(data_dir, box.session_id))
        script = '[ -O "$(tty)" ] && echo "$(tty)" >/dev/tty; stty size >/dev/stderr; id -u'
        for user, uid in ((None, b"1000"), ("65534", b"65534")):
            assert lines(run(client, script, user=user).stdout) == [b"/dev/pts/0", b"30 100", uid]
        begin(client, "sh", "-c", "echo ready; exec sleep 1000")
        client.read_until(b"ready")
        type_(client, INTERRUPT)
        assert client.outcome().reply.signal == signal.SIGINT
        client.sock.close()
        box.teardown()


HOARD = """
import os, signal
try:
    while True:
        os.openpty()
except OSError:
    print("full", flush=True)
signal.pause()
"""


def test_a_sandbox_without_terminals_left_says_so() -> None:
    """The sandbox's devpts is bounded: with no terminal left a run fails before anything is started."""
    with harness.data_directory() as data_dir, harness.running(data_dir) as server:
        box = server.build(harness.host_plan())
        client = Client(harness.connect(data_dir, box.session_id))
        other = Client(harness.connect(data_dir, box.session_id))
        other.request(RunProgram("hoard", ("python3", "-c", HOARD)))
        other.read_until(b"full")
        assert run(client, "true").reply == Error("IO_ERROR", "cannot start the program: No space left on device")
        assert client.ask(Signal("hoard", signal.SIGKILL)) == Done()
        other.outcome()
        assert run(client, "true").reply.exit_code == 0
        for each in (client, other):
            each.sock.close()
        box.teardown()
