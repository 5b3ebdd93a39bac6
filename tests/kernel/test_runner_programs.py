"""Programs beside the shells: how they are started, what they get, and what comes back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from typing import Any

import pytest

from runner.loop.config import STDIN_BUFFER_BYTES
from runner.wire.protocol import (
    MAX_PROGRAMS,
    Done,
    Error,
    Kind,
    RunProgram,
    SetEnv,
    Setup,
    Signal,
    TerminalSize,
)
from tests.kernel.runner_harness import SHELLS, Client, Outcome, Sandbox, needs_namespaces, wait_until
from tests.waiting import patience

pytestmark = needs_namespaces


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    return sandbox.shell()


def run(client: Client, *argv: str, stdin: bytes | None = None, **options: Any) -> Outcome:
    """Run a program to its end."""
    client.request(RunProgram("p", argv, stdin=stdin is not None, **options))
    if stdin is not None:
        for start in range(0, len(stdin), 65536):
            client.send(Kind.DATA, stdin[start : start + 65536])
        client.send(Kind.END)
    return client.outcome()


def sh(client: Client, script: str, **options: Any) -> Outcome:
    return run(client, "sh", "-c", script, **options)


def descriptors(sandbox: Sandbox) -> int:
    """Return how many descriptors PID 1 has open."""
    return len(os.listdir(f"/proc/{sandbox.init_pid()}/fd"))


def test_it_has_two_streams_and_a_result(client: Client) -> None:
    """Output comes byte for byte on its own stream, and the reply says how it ended and where it ran."""
    outcome = sh(client, "printf 'a\\0b'; printf 'c\\377' >&2; exit 3")
    reply = outcome.reply
    assert (outcome.stdout, outcome.stderr, outcome.started) == (b"a\0b", b"c\xff", True)
    assert (reply.exit_code, reply.signal, reply.cause) == (3, None, "exited")
    assert (reply.cwd, reply.shell_restarted, reply.disk_full) == ("/mnt/workspace", False, False)


def test_started_tells_its_pid(client: Client) -> None:
    """The pid in STARTED is the one the program has inside; it leads a session and a process group."""
    client.request(RunProgram("p", ("sh", "-c", "echo $$ $(cut -d' ' -f5,6 /proc/$$/stat)")))
    started = client.next_message()
    pid = str(started.pid).encode()
    assert client.outcome().stdout.split() == [pid, pid, pid]


def test_usage_is_that_of_the_program_and_what_it_waited_for(client: Client) -> None:
    """CPU time and peak memory include children; bytes written reach storage or are zero."""
    hog = "x = bytearray(200_000_000)\nfor _ in range(1_000_000): pass"
    reply = sh(client, f"python3 -c '{hog}'; true").reply
    assert reply.cpu_us >= 20_000
    assert 200_000_000 <= reply.peak_bytes < 400_000_000
    assert reply.written_bytes >= 0


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("no-such-program", "x"), 127, b"sandkasten: no-such-program: No such file or directory\n"),
        (("/no/such/program",), 127, b"sandkasten: /no/such/program: No such file or directory\n"),
        (("/etc/passwd",), 126, b"sandkasten: /etc/passwd: Permission denied\n"),
        (("/tmp",), 126, b"sandkasten: /tmp: Permission denied\n"),
        (("true", "x" * 200_000), 126, b"sandkasten: true: Argument list too long\n"),
    ],
)
def test_what_cannot_be_executed_says_so(client: Client, argv: tuple[str, ...], status: int, message: bytes) -> None:
    """A program that can't be executed gives one line on standard error and status 127 if it is missing, else 126, as
    env(1) does.
    """
    outcome = run(client, *argv)
    assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stderr) == (status, "exited", message)


def test_it_is_searched_for_in_its_own_path(client: Client) -> None:
    """PATH of the request counts; a file that may not be executed does not hide a later one."""
    make = "mkdir a b; echo 'echo wrong' >a/tool; printf '#!/bin/sh\\necho $0 $1' >b/tool; chmod 755 b/tool"
    client.run(make)
    path = "/mnt/workspace/none:/mnt/workspace/a:/mnt/workspace/b:/usr/bin:/bin"
    assert run(client, "tool", "x", env={"PATH": path}).stdout == b"/mnt/workspace/b/tool x\n"


def test_a_script_without_a_first_line_is_given_to_sh(client: Client) -> None:
    """A script without `#!` is run by sh, as execvp(3) does; a relative path counts from the program's directory."""
    client.run("mkdir d; echo 'echo $1 $PWD' >d/script; chmod 755 d/script")
    assert run(client, "./script", "x", cwd="d").stdout == b"x /mnt/workspace/d\n"


def test_its_streams_can_be_opened_by_name(client: Client) -> None:
    """The pipes belong to the program's user, whoever that is."""
    for options in ({}, {"user": "nobody"}):
        outcome = sh(client, "cat /dev/stdin >/dev/stdout; echo e >/dev/stderr", stdin=b"in", **options)
        assert (outcome.stdout, outcome.stderr) == (b"in", b"e\n")


def test_it_starts_clean(client: Client) -> None:
    """A program has three descriptors, no capability, no blocked or ignored signal, and the usual mask for new
    files."""
    script = "ls /proc/self/fd; grep -E '^(SigBlk|SigIgn|CapEff|CapPrm):' /proc/self/status; umask"
    outcome = sh(client, script)
    values = [line.split()[-1] for line in outcome.stdout.splitlines()]
    assert values == [b"0", b"1", b"2", b"3", b"0" * 16, b"0" * 16, b"0" * 16, b"0" * 16, b"0022"]  # 3 is of `ls`


def test_the_environment_is_base_session_and_request(sandbox: Sandbox) -> None:
    """Later ones win; variables set after the set-up count; a shell's own exports don't."""
    client = sandbox.connect()
    client.ask(Setup(env={"A": "session", "B": "session", "C": "session"}))
    client.ask(SetEnv({"B": "changed", "C": None}))
    client.run("export D=shell A=shell")
    outcome = run(client, "env", env={"A": "request", "E": "a\nb"})
    assert b"E=a\nb\n" in outcome.stdout
    env = dict(line.split(b"=", 1) for line in outcome.stdout.replace(b"a\nb", b"").splitlines())
    assert (env[b"A"], env[b"B"], env.get(b"C"), env.get(b"D")) == (b"request", b"changed", None, None)
    assert (env[b"HOME"], env[b"USER"], env[b"PWD"]) == (b"/home/sandbox", b"sandbox", b"/mnt/workspace")
    assert env[b"TERM"] == b"dumb"


def test_a_directory_is_relative_to_the_workspace(client: Client) -> None:
    """The reply has its real path, and PWD too."""
    client.run("mkdir -p real/'a b'; ln -s real link")
    outcome = run(client, "sh", "-c", "echo $PWD; pwd -P", cwd="link/a b")
    assert outcome.stdout == b"/mnt/workspace/real/a b\n" * 2
    assert outcome.reply.cwd == "/mnt/workspace/real/a b"


@pytest.mark.parametrize("cwd", ["none", "file", "closed", "/proc/self/cwd", "/proc/1/root"])
def test_a_directory_that_cannot_be_entered_is_refused(client: Client, cwd: str) -> None:
    """A directory that is missing, is none, is forbidden, or leads into PID 1 is refused, and no program runs."""
    client.run("touch file; mkdir -m 000 closed")
    reply = run(client, "pwd", cwd=cwd).reply
    assert isinstance(reply, Error)
    assert reply.code == "FILE_NOT_FOUND"


def test_without_a_workspace_it_starts_at_home(client: Client) -> None:
    """No directory was asked for, so the next best is good enough."""
    assert run(client, "pwd", user="nobody").reply.cwd == "/mnt/workspace"
    client.run("cd /; chmod 700 /mnt/workspace")
    outcome = run(client, "pwd", user="nobody")
    assert (outcome.stdout, outcome.reply.cwd) == (b"/\n", "/")


def test_standard_input_is_empty_unless_asked_for(client: Client) -> None:
    """Standard input is /dev/null then, so nothing waits."""
    assert sh(client, "readlink /proc/self/fd/0; wc -c").stdout == b"/dev/null\n0\n"


def test_standard_input_comes_whole(client: Client) -> None:
    """Every byte of the input arrives, then end-of-file, also after no byte."""
    assert run(client, "cat", stdin=b"").stdout == b""
    data = os.urandom(5_000_000)
    assert run(client, "md5sum", stdin=data).stdout.split()[0].decode() == hashlib.md5(data).hexdigest()


def test_a_program_that_closes_its_input_ends_well(client: Client) -> None:
    """Input that nobody reads is dropped."""
    assert run(client, "head", "-c", "3", stdin=b"abc" * 1_000_000).stdout == b"abc"


def test_input_nobody_reads_fills_its_own_connection_only(sandbox: Sandbox, client: Client) -> None:
    """A connection whose program reads no input is not read once its buffer is full; others are, and the program can be
    ended there.
    """
    client.request(RunProgram("p", ("sleep", "1000"), stdin=True))
    client.next_message()
    client.sock.settimeout(2)
    sent = 0
    frame = b"\0\1\0\0\2" + b"x" * 65536
    with contextlib.suppress(TimeoutError):
        while sent < 4 * STDIN_BUFFER_BYTES:
            sent += client.sock.send(frame)
    assert STDIN_BUFFER_BYTES <= sent < 4 * STDIN_BUFFER_BYTES
    client.sock.settimeout(patience(20))
    assert sandbox.connect().ask(Signal("p", signal.SIGTERM)) == Done()
    assert client.outcome().reply.signal == signal.SIGTERM


def test_a_client_may_leave_with_its_input_unread(sandbox: Sandbox, client: Client) -> None:
    """The end of a connection is seen though nothing is read from it: the program ends."""
    other = sandbox.connect()
    other.request(RunProgram("p", ("sleep", "1234"), stdin=True))
    other.sock.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            other.send(Kind.DATA, b"x" * 65536)
    assert sh(client, "ps -C sleep -o args= | grep -v defunct").stdout == b"sleep 1234\n"
    other.sock.close()
    wait_until(lambda: sh(client, "ps -C sleep -o args= | grep -v defunct").stdout == b"")


def test_a_full_disk_is_told(client: Client) -> None:
    """The reply of a failed program says whether a file system that it may write to is full, and whether that had room
    when the program began; a program that failed with room left has no such note.
    """
    assert sh(client, "exit 1").reply.disk_full is False
    outcome = sh(client, "head -c 10000000 /dev/zero >/home/sandbox/big")
    assert (outcome.reply.exit_code, outcome.reply.disk_full, outcome.reply.disk_filled) == (1, True, True)
    later = sh(client, "exit 1").reply
    assert (later.disk_full, later.disk_filled) == (True, False)
    client.run("rm /home/sandbox/big")
    assert sh(client, "exit 1").reply.disk_full is False


def test_a_slow_reader_stops_its_own_program_only(sandbox: Sandbox, client: Client) -> None:
    """The pipe fills and the program waits; nothing is lost, and other programs run."""
    client.request(RunProgram("p", ("sh", "-c", "head -c 3000000 /dev/zero; echo end >&2")))
    client.next_message()
    other = sandbox.connect()
    assert run(other, "echo", "hi").stdout == b"hi\n"
    assert run(other, "ps", "-C", "head", "-o", "args=").stdout == b"head -c 3000000 /dev/zero\n"
    outcome = client.outcome()
    assert (len(outcome.stdout), outcome.stderr) == (3_000_000, b"end\n")


def test_what_it_leaves_running_does_not_hold_it_up(client: Client) -> None:
    """The reply comes when the program itself has ended; a job in the background lives on and can still write."""
    outcome = sh(client, "echo first; (while :; do echo late; sleep 0.01; done) & echo $! >pid")
    assert (outcome.stdout.split()[0], outcome.reply.exit_code) == (b"first", 0)
    for _ in range(3):
        assert sh(client, "kill -0 $(cat pid) && echo alive").stdout == b"alive\n"
    assert sh(client, "kill $(cat pid)").reply.exit_code == 0


def test_the_last_output_is_complete(client: Client) -> None:
    """Output in the pipes at the end of the program is all sent before the reply."""
    for size in (1, 65536, 300_000):
        outcome = sh(client, f"head -c {size} /dev/zero; head -c 5000 /dev/zero >&2")
        assert (len(outcome.stdout), len(outcome.stderr)) == (size, 5000)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_goes_to_a_fresh_shell(sandbox: Sandbox, shell: str) -> None:
    """The shell is of the session's kind, and shares nothing with the persistent one."""
    client = sandbox.shell(shell)
    client.run("x=1; cd /tmp")
    outcome = run(client, command='echo "$0 ${x-none} $PWD $SHELL"; kill -TERM $$')
    name = {"/bin/busybox": b"sh"}.get(shell, os.path.basename(shell).encode())
    assert outcome.stdout == b"%s none /mnt/workspace %s\n" % (name, shell.encode())
    assert (outcome.reply.exit_code, outcome.reply.signal, outcome.reply.cause) == (143, 15, "signalled")


def test_arguments_run_without_a_shell(sandbox: Sandbox) -> None:
    """Before the set-up there is no shell: `argv` works, `command` is refused."""
    client = sandbox.connect()
    assert run(client, "echo", "$HOME *").stdout == b"$HOME *\n"
    assert run(client, command="echo").reply.code == "NO_SHELL"


@pytest.mark.parametrize(
    ("user", "lines"),
    [
        ("daemon", [b"uid=1(daemon) gid=1(daemon) groups=1(daemon)", b"daemon daemon /usr/sbin"]),
        ("1", [b"uid=1(daemon) gid=1(daemon) groups=1(daemon)", b"daemon daemon /usr/sbin"]),
        ("54321", [b"uid=54321 gid=54321 groups=54321", b"54321 54321 /"]),
        ("54321:8", [b"uid=54321 gid=8(mail) groups=8(mail)", b"54321 54321 /"]),
    ],
)
def test_it_runs_as_another_user(client: Client, user: str, lines: list[bytes]) -> None:
    """A program runs as the user asked for by name or number; USER, LOGNAME and HOME are that user's, whatever the
    session says.
    """
    client.ask(SetEnv({"HOME": "/x", "USER": "x"}))
    assert sh(client, 'id; echo "$USER $LOGNAME $HOME"', user=user).stdout.splitlines() == lines


@pytest.mark.parametrize(
    "user", ["root", "0", "0:1", "1:0", "65535", "1:65535", "65536", "no-such-user", "", "-1", "1:"]
)
def test_nobody_becomes_root_or_pid_1(client: Client, user: str) -> None:
    """In a sandbox that was not built for root no program gets root's or PID 1's user or group, by name or by
    number.
    """
    assert run(client, "id", user=user).reply.code == "NO_SUCH_USER"


@pytest.mark.parametrize(
    "request_",
    [
        RunProgram("p"),
        RunProgram("p", ("a",), command="b"),
        RunProgram("p", ("",)),
        RunProgram("p", ("a\0b",)),
        RunProgram("p", command="a\0b"),
        RunProgram("p", ("a", "\ud800")),
        RunProgram("p", ("a",), cwd="a\0b"),
        RunProgram("p", ("a",), user="a\0b"),
        RunProgram("p", ("a",), env={"A=B": ""}),
        RunProgram("p", ("a",), env={"A": "\0"}),
        RunProgram("p", ("a",), timeout_ms=0),
        RunProgram("p", ("a",), timeout_ms=2**40),
        RunProgram("p", command="", interactive=True),
        RunProgram("p", command="a", interactive=True, terminal=TerminalSize(80, 24)),
        RunProgram("p", ("a",), interactive=True, terminal=TerminalSize(80, 24)),
        RunProgram("p", ("a",), terminal=TerminalSize(0, 24)),
        RunProgram("p", ("a",), terminal=TerminalSize(80, 1_000_000)),
    ],
)
def test_an_impossible_request_is_refused(sandbox: Sandbox, client: Client, request_: RunProgram) -> None:
    """An impossible request is refused before anything is started, and the connection goes on."""
    client.run("true")
    before = descriptors(sandbox)
    for _ in range(3):  # more often than PID 1 has descriptors of the command before to close
        answer = client.ask(request_)
        assert isinstance(answer, Error)
        assert answer.code == "BAD_REQUEST"
    assert descriptors(sandbox) <= before
    assert run(client, "echo", "hi").stdout == b"hi\n"


def test_there_is_a_bound_on_programs(sandbox: Sandbox) -> None:
    """One more than the most is refused, and welcome when another has ended."""
    clients = [sandbox.connect() for _ in range(MAX_PROGRAMS)]
    for number, each in enumerate(clients):
        each.request(RunProgram(f"p{number}", ("sleep", "1000")))
        each.next_message()
    last = sandbox.connect()
    assert run(last, "true").reply.code == "TOO_MANY"
    assert last.ask(Signal("p0", signal.SIGKILL)) == Done()
    assert clients[0].outcome().reply.signal == signal.SIGKILL
    assert run(last, "true").reply.exit_code == 0


def test_programs_leave_no_descriptor_behind(sandbox: Sandbox, client: Client) -> None:
    """PID 1 has as many descriptors afterwards as before, however the program ended."""
    client.run("true")
    before = descriptors(sandbox)
    for _ in range(3):
        run(client, "no-such-program")
        run(client, "cat", stdin=b"x")
        run(client, "head", "-c1", stdin=b"x" * 1_000_000)
        run(client, "true", cwd="/nowhere")
        run(client, "sleep", "1000", timeout_ms=10)
        run(client, "true", terminal=TerminalSize(80, 24))
        sh(client, "kill -9 $$")
        gone = sandbox.connect()
        gone.request(RunProgram("q", ("sleep", "1000"), stdin=True))
        gone.next_message()
        gone.sock.close()
    wait_until(lambda: descriptors(sandbox) == before)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exec 0<&- 1>&- 2>&-; sleep 0.05; exit 4", 4),
        ("exec 3</proc/self/fd/1; cat <&3 >/dev/null & echo x; sleep 0.05; echo y; exit 5", 5),
        ("exec 3<>/dev/stdout; echo x >&3; exit 6", 6),
        ("sleep 0.2 & exit 7", 7),
        ("kill -STOP $$; exit 8", 8),
    ],
)
def test_odd_uses_of_its_streams_do_not_hold_it_up(sandbox: Sandbox, client: Client, script: str, status: int) -> None:
    """Streams closed early, read back, opened both ways, or inherited; and a program that stops itself."""
    client.request(RunProgram("odd", ("sh", "-c", script)))
    if "STOP" in script:
        other = sandbox.connect()
        wait_until(lambda: run(other, "ps", "-o", "stat=", "-C", "sh").stdout.startswith(b"T"))
        assert other.ask(Signal("odd", signal.SIGCONT)) == Done()
    assert client.outcome().reply.exit_code == status
