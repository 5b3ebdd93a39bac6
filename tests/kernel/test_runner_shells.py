"""Several shells in one sandbox: what each has of its own, what they share, and how one is closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from runner.wire.protocol import (
    MAX_SHELLS,
    PROTOCOL_VERSION,
    Cancel,
    CloseShell,
    Done,
    Error,
    Exec,
    Hello,
    HelloReply,
    Kind,
    OpenShell,
    RunProgram,
    SetEnv,
    ShellInfo,
)
from tests.kernel.runner_harness import Client, Sandbox, code, needs_namespaces, wait_until
from tests.kernel.test_runner_groups import open_group, send

pytestmark = needs_namespaces

WORKSPACE = "/mnt/workspace"


@pytest.fixture
def other(client: Client, sandbox: Sandbox) -> Client:
    """A second connection, and a shell `two` of the same kind beside the default one."""
    connection = sandbox.connect()
    shell = client.ask(Hello()).shell
    assert connection.ask(OpenShell("two", shell=shell)) == ShellInfo("two", shell, WORKSPACE)
    return connection


# State of one shell ---------------------------------------------------------------------------------------------------


def test_each_shell_has_its_own_state(client: Client, other: Client) -> None:
    """Directory, exports, variables and functions of one are not the other's; files are shared."""
    client.run("export A=1; b=2; f() { echo 3; }; echo 4 >file; mkdir dir; cd dir")
    assert other.stdout('echo "$A$b"; f 2>/dev/null; cat file; pwd', shell="two") == b"\n4\n/mnt/workspace\n"
    other.run("cd /tmp", shell="two")
    assert client.stdout("pwd; echo $A$b; f") == b"/mnt/workspace/dir\n12\n3\n"
    assert other.stdout("pwd", shell="two") == b"/tmp\n"


def test_a_command_that_waits_too_long_is_refused_and_never_begins(client: Client, sandbox: Sandbox) -> None:
    """The wait is bounded behind other commands only: what has begun has all its time, and the queue goes on."""
    waiting, opener = sandbox.connect(), sandbox.connect()
    client.run("mkfifo go")
    client.begin("read x <go; echo $x", queue_timeout_ms=1)
    waiting.request(Exec("late", "touch ran", queue_timeout_ms=50))
    refused = waiting.next_message()
    assert (type(refused), refused.code) == (Error, "QUEUE_TIMEOUT")
    waiting.request(Exec("in-time", "ls", queue_timeout_ms=20_000))
    opener.request(RunProgram("opener", ("/bin/sh", "-c", "echo word >/mnt/workspace/go")))
    assert client.outcome().stdout == b"word\n"
    assert waiting.outcome().stdout == b"go\n"


def test_shells_run_at_the_same_time(client: Client, other: Client) -> None:
    """A command of one shell does not wait for the other's."""
    client.run("mkfifo fifo")
    client.begin("read x <fifo; echo $x")
    other.run("echo through >fifo", shell="two")
    assert client.outcome().stdout == b"through\n"


def test_a_shell_starts_where_and_with_what_was_asked(sandbox: Sandbox) -> None:
    """A shell starts in the directory asked for, with its own variables beside the session's; so does its successor."""
    client = sandbox.shell(env={"A": "1", "B": "2"})
    client.run("mkdir -p in/side")
    assert client.ask(OpenShell("two", cwd="in/side", env={"B": "3"})) == ShellInfo(
        "two", "/bin/bash", f"{WORKSPACE}/in/side"
    )
    assert client.stdout("echo $A$B; pwd; kill -9 $$", shell="two") == b"13\n/mnt/workspace/in/side\n"
    assert client.stdout("echo $A$B; pwd", shell="two") == b"13\n/mnt/workspace/in/side\n"


def test_shells_may_be_of_different_kinds(sandbox: Sandbox) -> None:
    """Each shell is of the kind asked for."""
    client = sandbox.shell("bash")
    assert client.ask(OpenShell("two", shell="sh")).path == "/bin/sh"
    assert client.stdout('echo "${BASH_VERSION:+bash}"') == b"bash\n"
    assert client.stdout('echo "${BASH_VERSION:+bash}"', shell="two") == b"\n"


def test_hello_lists_the_shells(client: Client, other: Client) -> None:
    """The answer to Hello lists each shell with its present directory."""
    other.run("cd /tmp", shell="two")
    reply = client.ask(Hello())
    assert reply == HelloReply(reply.shell, WORKSPACE, (ShellInfo("two", reply.shell, "/tmp"),), PROTOCOL_VERSION)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (OpenShell("two"), "EXISTS"),
        (OpenShell("default"), "EXISTS"),
        (OpenShell(""), "BAD_REQUEST"),
        (OpenShell("x" * 65), "BAD_REQUEST"),
        (OpenShell("x", cwd="nowhere"), "FILE_NOT_FOUND"),
        (OpenShell("x", cwd="a\0b"), "BAD_REQUEST"),
        (OpenShell("x", shell="/mnt"), "NO_SHELL"),
        (OpenShell("x", env={"a-b": ""}), "BAD_REQUEST"),
        (Exec("x", "true", shell="x"), "NO_SUCH_SHELL"),
        (CloseShell("x"), "NOT_RUNNING"),
        (CloseShell("default"), "BAD_REQUEST"),
    ],
)
def test_impossible_shells_are_refused(sandbox: Sandbox, request_: object, expected: str) -> None:
    """Each reason has its own code, and the connection goes on."""
    client = sandbox.shell()
    client.ask(OpenShell("two"))
    assert code(client.ask(request_)) == expected
    assert client.stdout("echo on") == b"on\n"


def test_shells_are_bounded(sandbox: Sandbox) -> None:
    """One more than there may be is refused; a closed one makes room."""
    client = sandbox.shell()
    for number in range(MAX_SHELLS - 1):
        assert isinstance(client.ask(OpenShell(str(number))), ShellInfo)
    assert code(client.ask(OpenShell("more"))) == "TOO_MANY"
    assert client.ask(CloseShell("3")) == Done()
    assert isinstance(client.ask(OpenShell("more")), ShellInfo)


# Closing ------------------------------------------------------------------------------------------------------------


def test_closing_ends_all_that_a_shell_started(client: Client, other: Client, sandbox: Sandbox) -> None:
    """Jobs and daemons of the closed shell are gone, its commands end as cancelled, the other shell lives on."""
    client.run("x=1; sleep 4321 &")
    other.run("trap '' INT TERM; sleep 1234 & setsid sleep 1235 &", shell="two")
    running, queued = sandbox.connect(), sandbox.connect()
    running.begin("echo begun; sleep 1236", shell="two")
    assert running.read_until(b"begun") == b"begun\n"
    queued.request(Exec("q", "echo never", shell="two"))
    other.ask(Hello())  # by now the queued one has arrived too
    assert other.ask(CloseShell("two")) == Done()
    for each in (running, queued):
        outcome = each.outcome()
        assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stdout) == (130, "cancelled", b"")
    assert client.stdout("/usr/bin/ps -C sleep -o args= | grep -v defunct; echo $x") == b"sleep 4321\n1\n"
    assert code(other.ask(Exec("x", "true", shell="two"))) == "NO_SUCH_SHELL"
    assert client.ask(Hello()).shells == ()


def test_a_closed_shell_leaves_nothing(client: Client, other: Client, sandbox: Sandbox) -> None:
    """A closed shell leaves neither its directory nor a descriptor in PID 1."""
    client.run("true")
    other.run("true", shell="two")
    other.ask(CloseShell("two"))
    directory = f"/proc/{sandbox.init_pid()}"
    before = len(os.listdir(f"{directory}/fd"))
    for _ in range(3):
        assert isinstance(other.ask(OpenShell("two")), ShellInfo)
        other.run("true", shell="two")
        assert other.ask(CloseShell("two")) == Done()
    assert len(os.listdir(f"{directory}/fd")) == before
    assert os.listdir(f"{directory}/root/run/sandkasten") == ["1"]


def test_a_shell_can_be_closed_while_it_starts(sandbox: Sandbox) -> None:
    """A shell that is closed while it starts leaves nothing, and another of its name can be opened."""
    client = sandbox.shell()
    for _ in range(10):
        client.ask(OpenShell("two"))
        assert client.ask(CloseShell("two")) == Done()
    client.ask(OpenShell("two"))
    assert client.stdout("echo there", shell="two") == b"there\n"


@pytest.mark.parametrize("membership", ["clone", "join"])
def test_a_shell_with_a_group_is_born_in_it(sandbox: Sandbox, membership: Any) -> None:
    """A shell and its successor are born in their run cgroup; closing kills all of it, including processes that left
    the shell's tree.
    """
    client = sandbox.shell()
    with open_group(membership) as opened:
        assert opened.group is not None
        send(client, OpenShell("two", group=opened.group), opened.fd)
        assert isinstance(client.next_message(), ShellInfo)
        command = f"grep -c {opened.group.name} /proc/self/cgroup"
        assert client.stdout(f"{command}; kill -9 $$", shell="two") == b"1\n"
        assert client.stdout(f"setsid sleep 1234 & {command}; kill -9 $$", shell="two") == b"1\n"
        assert client.stdout("/usr/bin/ps -C sleep -o args= | grep -v defunct", shell="two") == b"sleep 1234\n"
        assert client.stdout(f"{command}; true") == b"0\n"
        assert client.ask(CloseShell("two")) == Done()
        assert client.stdout("/usr/bin/ps -C sleep -o args= | grep -v defunct") == b""


def test_a_group_needs_its_descriptor(sandbox: Sandbox) -> None:
    """A shell is never started outside of the group it was given."""
    client = sandbox.shell()
    with open_group("clone") as opened:
        assert code(client.ask(OpenShell("two", group=opened.group))) == "BAD_REQUEST"
    assert client.ask(Hello()).shells == ()


# Whose is an orphan? ------------------------------------------------------------------------------------------------


def test_a_timeout_spares_what_another_shell_left_behind(sandbox: Sandbox) -> None:
    """When a shell dies its orphans hang below PID 1; another shell's command is not blamed for them."""
    client, other = sandbox.shell(), sandbox.connect()
    with open_group("clone") as opened:
        send(other, OpenShell("two", group=opened.group), opened.fd)
        other.next_message()
        client.begin("echo begun; sleep 1234", timeout_ms=600)
        client.read_until(b"begun")
        other.run("sleep 4321 & kill -9 $$", shell="two")
        assert client.outcome().reply.cause == "timed_out"
        assert other.stdout("/usr/bin/ps -C sleep -o args= | grep -v defunct", shell="two") == b"sleep 4321\n"
        other.ask(CloseShell("two"))


def test_a_timeout_in_a_group_ends_the_orphans_of_its_own_shell(sandbox: Sandbox) -> None:
    """A process left behind as the shell died is the command's, and a job of an earlier command is not."""
    client = sandbox.shell()
    with open_group("clone") as opened:
        send(client, OpenShell("two", group=opened.group), opened.fd)
        client.next_message()
        client.run("sleep 4321 &", shell="two")
        client.run("sleep 1234 & exec sh -c 'sleep 1235; :'", shell="two", timeout_ms=100)
        assert client.stdout("/usr/bin/ps -C sleep -o args= | grep -v defunct") == b"sleep 4321\n"
        client.ask(CloseShell("two"))


def test_a_timeout_spares_another_shell_that_began_later(client: Client, sandbox: Sandbox) -> None:
    """A shell opened, or replaced, during a command is not the command's."""
    other = sandbox.connect()
    client.begin("echo begun; sleep 1234", timeout_ms=400)
    client.read_until(b"begun")
    other.ask(OpenShell("two"))
    other.run("x=1; sleep 4321 &", shell="two")
    assert client.outcome().reply.cause == "timed_out"
    assert other.stdout("echo $x; /usr/bin/ps -C sleep -o args= | grep -v defunct", shell="two") == b"1\nsleep 4321\n"


# The session's variables -------------------------------------------------------------------------------------------


def test_a_change_of_the_environment_reaches_every_shell(client: Client, other: Client) -> None:
    """A change of the environment, with values of any kind, is made before the next command of each shell and in its
    children; null removes a variable.
    """
    assert client.ask(SetEnv({"A": "it's $A\n`b`", "LANG": None})) == Done()
    show = 'printf "%s|" "$A" "${LANG-none}"; sh -c \'printf "%s" "$A"\''
    expected = b"it's $A\n`b`|none|it's $A\n`b`"
    assert (client.stdout(show), other.stdout(show, shell="two")) == (expected, expected)


def test_a_change_of_the_environment_reaches_later_shells(client: Client) -> None:
    """A shell that is opened after a change has the changed environment from its birth."""
    client.ask(SetEnv({"A": "1", "LANG": None}))
    client.ask(OpenShell("two"))
    assert client.stdout('echo "$A ${LANG-none}"', shell="two") == b"1 none\n"


def test_what_commands_set_is_kept(client: Client) -> None:
    """A change is taken over once; what a command made of it afterwards stays, as do variables nobody changed."""
    client.run("export A=mine B=mine")
    client.ask(SetEnv({"A": "theirs"}))
    assert client.stdout("echo $A $B; export A=again") == b"theirs mine\n"
    client.ask(SetEnv({"C": "1"}))
    assert client.stdout("echo $A $B $C") == b"again mine 1\n"


@pytest.mark.parametrize("end", ["kill -9 $$", "exit"])
def test_a_change_of_the_environment_survives_the_shell(client: Client, end: str) -> None:
    """A change holds in the shell's successor, whether the shell died with the command that took it over or before."""
    client.run("export B=1")
    client.ask(SetEnv({"A": "1"}))
    client.run(f"export B=2; {end}")
    assert client.stdout("echo $A") == b"1\n"
    client.run(end)
    client.ask(SetEnv({"A": "2"}))
    assert client.stdout("echo $A") == b"2\n"


def test_a_change_made_again_by_the_command_that_ends_the_shell_is_not_undone(client: Client) -> None:
    """A successor knows that its shell had taken a change over, and does not apply it again over the last command's
    values.
    """
    client.ask(SetEnv({"A": "theirs"}))
    client.run("export A=mine; exit")
    assert client.stdout("echo $A") == b"mine\n"


def test_a_change_and_one_commands_variables_go_together(client: Client) -> None:
    """Variables of one command win over a change while the command runs."""
    client.ask(SetEnv({"A": "session", "B": "session"}))
    assert client.stdout("echo $A $B", env={"A": "command"}) == b"command session\n"
    assert client.stdout("echo $A $B") == b"session session\n"


def test_a_read_only_variable_does_not_stop_commands(client: Client) -> None:
    """A change to a read-only variable is not made in that shell; its commands run."""
    client.run("readonly A=mine")
    client.ask(SetEnv({"A": "theirs", "B": "1"}))
    assert client.run("echo $A $B").stdout == b"mine 1\n"


@pytest.mark.parametrize("env", [{"a b": "1"}, {"__sk_n": "1"}, {"A": "\0"}, {"A": "x" * 600_000}])
def test_impossible_changes_are_refused(sandbox: Sandbox, env: dict[str, str | None]) -> None:
    """An impossible change is refused as a whole, and the shell stays as it was."""
    client = sandbox.shell()
    assert code(client.ask(SetEnv({"B": "1", **env}))) == "BAD_REQUEST"
    assert client.stdout("echo ${B-none}") == b"none\n"


# Storage and commands ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told(client: Client) -> None:
    """A command that failed while there was no room says so, and whether there was some when it began; one that failed
    otherwise does not."""
    assert client.reply("false").disk_full is False
    full = client.reply("sleep 0.1; dd if=/dev/zero of=/home/sandbox/big bs=65536 2>/dev/null")
    assert (full.exit_code, full.disk_full, full.disk_filled) == (1, True, True)
    for command in ("false", "sleep 0.1; false"):
        later = client.reply(command)
        assert (later.disk_full, later.disk_filled) == (True, False)
    assert client.reply("true").disk_full is False
    assert client.reply("rm /home/sandbox/big; false").disk_full is False


def test_written_bytes_are_counted(sandbox: Sandbox, tmp_path_on_disk: str) -> None:
    """Bytes that a command and its children wrote to a real file system count, and none of the next command's."""
    client = sandbox.shell()
    client.run("true")
    reply = client.reply(f"dd if=/dev/zero of={tmp_path_on_disk}/f bs=65536 count=16 2>/dev/null")
    assert reply.written_bytes >= 1 << 20
    assert client.reply("true").written_bytes == 0
    last = client.reply(f"dd if=/dev/zero of={tmp_path_on_disk}/f bs=65536 count=16 2>/dev/null; exit")
    assert last.shell_restarted
    assert last.written_bytes >= 1 << 20
    assert client.reply("true").written_bytes == 0


@pytest.fixture
def tmp_path_on_disk() -> Iterator[str]:
    """A directory of the sandbox user's on a file system that has storage behind it."""
    path = f"/var/tmp/sandkasten-test-{os.getpid()}"
    os.mkdir(path, 0o777)
    os.chmod(path, 0o777)
    yield path
    for name in os.listdir(path):
        os.unlink(f"{path}/{name}")
    os.rmdir(path)


# By id, from another connection -----------------------------------------------------------------------------------


def test_a_command_is_cancelled_by_its_id(client: Client, sandbox: Sandbox) -> None:
    """A running or queued command is cancelled by its id, and its own reply says so; one that has ended is not
    running.
    """
    running, queued = sandbox.connect(), sandbox.connect()
    running.request(Exec("first", "sleep 1234"))
    assert running.next_frame()[0] is Kind.STARTED
    queued.request(Exec("second", "echo never"))
    wait_until(lambda: client.ask(Cancel("second")) == Done())
    assert client.ask(Cancel("first", now=True)) == Done()
    assert [each.outcome().reply.cause for each in (queued, running)] == ["cancelled", "cancelled"]
    assert code(client.ask(Cancel("first"))) == "NOT_RUNNING"


def test_cancelling_now_skips_the_graces(client: Client, sandbox: Sandbox) -> None:
    """A cancel with `now` gives no process the time to clean up, also when a slower end had begun."""
    for first in ([], [Cancel("x")]):
        client.begin("sh -c 'trap \"\" INT TERM; echo begun; while :; do sleep 1; done'")
        client.read_until(b"begun")
        other = sandbox.connect()
        for request in (*first, Cancel("x", now=True)):
            assert other.ask(request) == Done()
        reply = client.outcome().reply
        assert (reply.exit_code, reply.cause) == (130, "cancelled")
        assert reply.duration_us < 450_000  # interrupt and terminate would take 500 ms
    assert client.stdout("echo on") == b"on\n"
