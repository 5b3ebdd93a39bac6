"""The persistent shell: what stays between commands, how commands end, and what of it survives the shell itself."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.wire.protocol import (
    PROTOCOL_VERSION,
    Done,
    Error,
    Exec,
    ExecReply,
    HelloReply,
    Kind,
    RunProgram,
    SetEnv,
    Setup,
)
from tests.kernel.runner_harness import UID, Client, Sandbox, needs_namespaces, wait_until

pytestmark = needs_namespaces


# State ----------------------------------------------------------------------------------------------------------


def test_cd_persists_between_execs(client: Client) -> None:
    """A directory change is there for the next command and in both replies."""
    first = client.reply("mkdir 'a  b'; cd 'a  b'")
    second = client.run("pwd")
    assert (first.cwd, second.stdout) == ("/mnt/workspace/a  b", b"/mnt/workspace/a  b\n")


def test_variables_functions_and_options_persist(client: Client) -> None:
    """Exports, plain variables, functions and shell options are those of one shell."""
    client.run("export E=1; p=2; f() { echo f$1; }; set -f; umask 027")
    assert client.stdout("sh -c 'echo $E$p'; echo $p; f 3; echo *; umask") == b"1\n2\nf3\n*\n0027\n"


def test_aliases_work(client: Client) -> None:
    """An alias defined by one command is expanded in the next."""
    client.run("alias hello='echo hello world'")
    assert client.stdout("hello") == b"hello world\n"


def test_positional_parameters_and_status_persist(client: Client) -> None:
    """`set --` and `$?` carry over, as they would at a prompt."""
    client.run("set -- a b; (exit 7)")
    assert client.stdout("echo $? $2") == b"7 b\n"


def test_a_venv_stays_active(client: Client) -> None:
    """`. venv/bin/activate` changes which python later commands run."""
    assert client.reply("/usr/bin/python3 -m venv --without-pip v && . v/bin/activate").exit_code == 0
    assert client.stdout("command -v python; python -c 'import sys; print(sys.prefix)'") == (
        b"/mnt/workspace/v/bin/python\n/mnt/workspace/v\n"
    )


def test_background_jobs_survive_their_command(client: Client) -> None:
    """A job started with & runs on, known to the shell, while later commands come and go."""
    client.run("sleep 1000 & echo $! >pid")
    assert client.stdout("kill -0 $(cat pid) && kill $! && echo alive") == b"alive\n"


def test_bash_arrays_and_source_persist(sandbox: Sandbox) -> None:
    """Features of bash alone persist too; a variable declared at the top of a command is global."""
    client = sandbox.shell("bash")
    client.run("declare -A m=([k]=v); echo 'x=${BASH_SOURCE[0]}' >lib; source ./lib")
    assert client.stdout("echo ${m[k]} $x") == b"v ./lib\n"


# Streams ----------------------------------------------------------------------------------------------------------


def test_commands_see_only_three_descriptors(client: Client) -> None:
    """Neither a command nor a subshell inherits a control descriptor; the shell itself holds none in between."""
    listing = "exec /usr/bin/python3 -Sc 'import os; print(sorted(os.listdir(\"/proc/self/fd\")))'"
    seen = client.stdout(f"({listing}); sh -c '{listing.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'")
    assert seen == b"['0', '1', '2', '3']\n" * 2  # 3 is the listing's own


def test_redirecting_the_shell_ends_with_the_command(client: Client) -> None:
    """`exec >file` holds for the rest of its command and not for the next."""
    client.run("exec >log; echo in-log")
    assert client.stdout("cat log") == b"in-log\n"


# Process state ----------------------------------------------------------------------------------------------------


def test_signals_and_umask_are_default(client: Client) -> None:
    """Nothing is ignored or blocked although PID 1 was started with ignored signals; umask is 022."""
    status = client.stdout("/usr/bin/python3 -ISc 'print(open(\"/proc/self/status\").read())'; umask").decode()
    masks = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Sig")}
    python_ignores = (1 << 12) | (1 << 24)  # SIGPIPE and SIGXFSZ, by CPython itself
    assert int(masks["SigIgn"], 16) & ~python_ignores == 0
    assert int(masks["SigBlk"], 16) == 0
    assert status.endswith("0022\n")


def test_commands_have_the_user_and_no_capability(client: Client) -> None:
    """Uid, gid, groups and capability sets are those of the sandbox user."""
    status = client.stdout("grep -E '^(Uid|Gid|Groups|Cap(Inh|Prm|Eff|Amb))' /proc/self/status").split()
    assert set(status) == {
        b"Uid:", b"Gid:", b"Groups:", b"%d" % UID, b"1000",
        b"CapInh:", b"CapPrm:", b"CapEff:", b"CapAmb:", b"0000000000000000",
    }  # fmt: skip


@pytest.mark.parametrize(("shell", "of_its_own"), [("/bin/dash", {}), ("/bin/bash", {"SHLVL": "1"})])
def test_environment_is_the_documented_one(sandbox: Sandbox, shell: str, of_its_own: dict[str, str]) -> None:
    """Commands start from the base environment plus what Setup brought, and nothing of PID 1's own."""
    client = sandbox.shell(shell, env={"TOKEN": "a b\n'c'", "LANG": "C"})
    variables = dict(each.split("=", 1) for each in client.stdout("env -0").decode().split("\0") if each)
    variables.pop("_", None)  # of the program that was executed
    assert variables == of_its_own | {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/sandbox",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "SHELL": shell,
        "LANG": "C",
        "TERM": "dumb",
        "PWD": "/mnt/workspace",
        "TOKEN": "a b\n'c'",
    }


# Endings ------------------------------------------------------------------------------------------------------------


def ending(reply: ExecReply) -> tuple[int, int | None, str, bool]:
    return reply.exit_code, reply.signal, reply.cause, reply.shell_restarted


@pytest.mark.parametrize(
    "error", ["(: </nowhere)", "(. /nowhere)", "(echo ${unset?})", "x=$(: </nowhere)", "(echo $((08)))"]
)
def test_an_error_in_a_subshell_is_the_subshells(client: Client, error: str) -> None:
    """An error in a subshell, also in a command with variables of its own, leaves the shell as it was."""
    client.run(f"{error} && true", env={"A": "1"}, timeout_ms=5_000)
    assert client.reply("true").shell_restarted is False


def test_a_restarted_shell_has_directory_exports_and_umask(client: Client) -> None:
    """After `exit`, what the same command exported is restored: the shell saved it while it left."""
    client.run("mkdir d; export A='x y'")
    reply = client.reply('cd d; export B="it\'s"; umask 077; unset LANG; exit 3')
    assert reply.cwd == "/mnt/workspace/d"
    assert client.stdout('pwd; echo "$A $B ${LANG-unset}"; umask; echo "$OLDPWD"') == (
        b"/mnt/workspace/d\nx y it's unset\n0077\n/mnt/workspace\n"
    )


def test_a_killed_shell_has_the_state_of_the_last_command(client: Client) -> None:
    """SIGKILL leaves no time to save: the state is that after the command before."""
    client.run("mkdir d; cd d; export A=1")
    assert client.reply("export A=2; kill -9 $$").cwd == "/mnt/workspace/d"
    assert client.stdout("pwd; echo $A") == b"/mnt/workspace/d\n1\n"


def test_a_shell_killed_between_commands_is_replaced(client: Client) -> None:
    """A job that kills its shell costs no command; the next reply tells that the shell is a new one."""
    shell_pid = client.stdout("export A=1; echo $$; (sleep 0.01; kill -9 $$) & wait_for_reply=1").strip()
    reply = client.reply(f"while kill -0 {shell_pid.decode()} 2>/dev/null; do sleep 0.01; done", timeout_ms=15_000)
    assert reply.shell_restarted
    assert client.stdout("echo $A") == b"1\n"


@pytest.mark.parametrize("sabotage", ["readonly __sk_n", "readonly IFS", "ulimit -n 3", "trap '' 50; readonly __sk_s"])
def test_a_shell_broken_for_good_is_replaced(client: Client, sabotage: str) -> None:
    """A command that breaks the driver costs the shell, never the commands after it."""
    client.run(sabotage, timeout_ms=2000)  # a shell that can say nothing more is waited for so long
    assert client.run("echo works", timeout_ms=10_000).stdout == b"works\n"


def test_a_long_command_runs(client: Client) -> None:
    """A command of 1 MiB is taken whole."""
    text = "x" * (1024 * 1024 - 20)
    assert client.stdout(f"a='{text}'; echo ${{#a}}") == b"%d\n" % len(text)


def test_a_trapped_signal_between_commands_is_handled(client: Client) -> None:
    """A signal that the idle shell traps runs its trap; the shell goes on waiting, with all its state."""
    client.run("kept() { echo kept; }; trap 'caught=yes; echo x >caught' USR1; export SHELL_PID=$$")
    for _ in range(5):
        client.run("rm -f caught; caught=; { sleep 0.01; kill -USR1 $SHELL_PID; } &")
        wait_until(lambda: client.read_file("caught")[1] == b"x\n")  # without a command
        assert client.stdout("kept; echo $caught") == b"kept\nyes\n"


def test_a_storm_of_signals_costs_no_command(client: Client) -> None:
    """While a job signals the shell without end, which traps it, each command runs once and only once."""
    client.run(
        "kept() { echo kept; }; trap : USR1; SHELL_PID=$$; { while kill -USR1 $SHELL_PID; do :; done; } & job=$!"
    )
    for number in range(60):
        assert client.reply(f"echo {number} >>log", timeout_ms=15_000).cause == "exited"
    assert client.run("kill $job; kept", timeout_ms=15_000).stdout == b"kept\n"
    assert client.stdout("cat log").split() == [b"%d" % number for number in range(60)]


_THIEF = """
export A=1
( for fd in 9 10 11 12 13 14 15 16 49; do
  if [ -S /proc/self/fd/$fd ] && sleep 0.1 && kill -STOP $$ && echo >ready && read -r -n 11 name <&$fd; then
    kill -CONT $$
    printf '%s +\\n%s 0\\nexport A=forged\\n%s .\\n' $name $name $name >&$fd
    echo $name >stolen
  fi
done ) &
"""


def test_a_stolen_order_is_not_answered_by_the_thief(sandbox: Sandbox) -> None:
    """A fork of the shell that takes the order, and reports its beginning, its end and a state, is heard by nobody:
    another shell runs the command, once, and the result says so."""
    client = sandbox.shell("bash")
    client.run(_THIEF)
    wait_until(lambda: client.read_file("ready")[1] == b"\n")
    outcome = client.run("cat stolen; echo $A >>ran", timeout_ms=15_000)
    assert outcome.stdout != b""
    assert outcome.reply.shell_restarted
    assert (outcome.reply.cwd, client.stdout("cat ran; echo $A")) == ("/mnt/workspace", b"1\n1\n")


def test_a_report_of_another_process_is_dropped(client: Client) -> None:
    """Reports that a fork of the shell writes, in the name of the command itself, change nothing of its result."""
    outcome = client.run(
        "( for fd in 9 10 11 12 13 14 15 16 17 49; do"
        " eval \"printf '$__sk_n 0\\nexport A=forged\\n$__sk_n .\\n' >&$fd\"; done ) 2>err; wait; false"
    )
    assert (outcome.reply.exit_code, outcome.reply.cwd) == (1, "/mnt/workspace")
    client.run("kill -9 $$")
    assert client.stdout("echo ${A-unset}") == b"unset\n"


def test_a_program_has_no_copy_of_the_link(client: Client) -> None:
    """Of the shell's descriptors a program inherits its three streams, and the files of the shell are not for it."""
    assert client.stdout("ls -l /proc/self/fd | grep -c socket") == b"0\n"
    assert client.reply("ls /run/sandkasten/1").exit_code != 0


# One-command directory and variables ------------------------------------------------------------------------------


def test_env_and_cwd_hold_for_one_command(client: Client) -> None:
    """Directory and variables of a request are gone afterwards; what the command itself set stays."""
    client.run("export OLD='1  x'; PLAIN=2; mkdir sub")
    variables = {"OLD": "it's 2", "PLAIN": "3", "NEW": "\n"}
    outcome = client.run("pwd; sh -c 'echo $OLD $NEW'; export MINE=3; cd /tmp", cwd="sub", env=variables)
    assert outcome.stdout == b"/mnt/workspace/sub\nit's 2\n"
    assert outcome.reply.cwd == "/mnt/workspace"
    assert client.stdout("pwd; sh -c 'echo \"$OLD\" ${NEW-unset} ${PLAIN-unset} $MINE'; echo $PLAIN") == (
        b"/mnt/workspace\n1  x unset unset 3\n2\n"
    )


def test_env_and_cwd_do_not_outlive_the_shell(client: Client) -> None:
    """Variables of one command do not leak through the state that a restarted shell gets."""
    client.run("mkdir sub")
    assert client.reply("exit 1", cwd="sub", env={"NEW": "1"}).cwd == "/mnt/workspace"
    assert client.stdout("pwd; echo ${NEW-unset}") == b"/mnt/workspace\nunset\n"


@pytest.mark.parametrize(
    "env", [{"A": "1"}, {"A": "1", "B": "2"}, {"B": "2", "A": "1"}], ids=["alone", "first", "last"]
)
@pytest.mark.parametrize("cwd", [None, "/tmp"])
def test_a_read_only_variable_does_not_stop_the_command(client: Client, env: dict[str, str], cwd: str | None) -> None:
    """A read-only variable stays as it is in that shell, which says so; the others are set, and the shell lives on."""
    client.run("readonly A=mine; kept() { echo kept; }")
    outcome = client.run('echo "$A ${B-unset}"; pwd', env=env, cwd=cwd)
    assert outcome.stdout.decode() == f"mine {env.get('B', 'unset')}\n{cwd or '/mnt/workspace'}\n"
    assert re.search(rb"\bA: (is )?read ?-?only", outcome.stderr), outcome.stderr
    assert (outcome.reply.exit_code, outcome.reply.cause) == (0, "exited")
    assert client.stdout("kept; echo ${B-unset}; pwd") == b"kept\nunset\n/mnt/workspace\n"


def test_a_variable_that_its_command_makes_read_only_costs_no_other(client: Client) -> None:
    """A variable made read-only stays; the others of the request are gone."""
    client.run("kept() { echo kept; }; mkdir sub")
    client.run("readonly A", env={"A": "1", "B": "2"}, cwd="sub")
    assert client.stdout("kept; echo $A ${B-unset}; pwd") == b"kept\n1 unset\n/mnt/workspace\n"


def test_a_missing_cwd_is_refused(client: Client) -> None:
    """A directory that cannot be entered is an error, and the command does not run."""
    answer = client.run("echo ran", cwd="/nowhere")
    assert isinstance(answer.reply, Error)
    assert (answer.reply.code, answer.stdout) == ("FILE_NOT_FOUND", b"")


@pytest.mark.parametrize(
    "options", [{"command": "a\0b"}, {"command": "a", "env": {"a b": "c"}}, {"command": "a", "timeout_ms": 0}]
)
def test_impossible_commands_are_refused(client: Client, options: dict[str, object]) -> None:
    """A NUL, an impossible variable name or a non-positive time limit is BAD_REQUEST."""
    answer = client.run(**options).reply  # type: ignore[arg-type]
    assert isinstance(answer, Error)
    assert answer.code == "BAD_REQUEST"
    assert client.stdout("echo next") == b"next\n"


# Set-up -----------------------------------------------------------------------------------------------------------


def test_setup_tells_the_shell(sandbox: Sandbox) -> None:
    """Hello answers before and after Setup; an unknown preference falls back to what there is."""
    client = sandbox.connect()
    from runner.wire.protocol import Hello

    assert client.ask(Hello()) == HelloReply("", "/mnt/workspace", version=PROTOCOL_VERSION)
    assert client.ask(Setup(shell="zsh-not-here")) == HelloReply(
        "/bin/bash", "/mnt/workspace", version=PROTOCOL_VERSION
    )


def _children(sandbox: Sandbox) -> list[int]:
    """Return the children of PID 1."""
    pid = sandbox.init_pid()
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_empty(sandbox: Sandbox) -> bool:
    """Return whether PID 1 has no child."""
    return not _children(sandbox)


def test_the_first_command_starts_a_shell_that_nobody_waits_for(sandbox: Sandbox) -> None:
    """With 0 ms the set-up starts no process, a program needs none, and the first command has a new shell with the
    session's variables, which replaces no other."""
    client = sandbox.connect()
    assert isinstance(client.ask(Setup(env={"A": "1"}, unused_shell_ms=0)), HelloReply)
    assert isinstance(client.ask(SetEnv({"B": "2"})), Done)
    client.request(RunProgram("p", ("/bin/echo", "x")))
    assert client.outcome().stdout == b"x\n"
    wait_until(lambda: _is_empty(sandbox))
    outcome = client.run("echo $A$B")
    assert isinstance(outcome.reply, ExecReply)
    assert (outcome.stdout, outcome.reply.shell_restarted) == (b"12\n", False)


def test_a_shell_without_a_command_ends_and_comes_back(sandbox: Sandbox) -> None:
    """The process of an unused shell ends after its time. The next command starts another, is not told of a restart,
    and that one is kept."""
    client = sandbox.connect()
    client.ask(Setup(env={"A": "1"}, unused_shell_ms=150))
    wait_until(lambda: not _is_empty(sandbox))
    wait_until(lambda: _is_empty(sandbox))
    first = client.run("echo $A; b=2; cd /tmp")
    assert isinstance(first.reply, ExecReply)
    assert (first.stdout, first.reply.shell_restarted, first.reply.cwd) == (b"1\n", False, "/tmp")
    assert client.stdout("echo $b") == b"2\n"


def test_a_shell_that_is_ready_late_ends_at_once(sandbox: Sandbox) -> None:
    """The time of an unused shell is over before its process waits for a command."""
    client = sandbox.connect()
    client.ask(Setup(unused_shell_ms=1))
    time.sleep(0.1)
    wait_until(lambda: _is_empty(sandbox))
    assert client.stdout("echo x") == b"x\n"


def test_a_shell_with_a_command_is_kept(sandbox: Sandbox) -> None:
    """A command that has come in time keeps the shell beyond that time, with its variables."""
    client = sandbox.connect()
    client.ask(Setup(unused_shell_ms=150))
    client.run("a=$BASHPID")
    client.run("sleep 0.4")
    outcome = client.run("echo $((a == BASHPID))")
    assert isinstance(outcome.reply, ExecReply)
    assert (outcome.stdout, outcome.reply.shell_restarted) == (b"1\n", False)


@pytest.mark.parametrize("unused_ms", range(1, 20))
def test_a_command_may_come_while_its_shell_ends(sandbox: Sandbox, unused_ms: int) -> None:
    """A command that meets a shell which starts, waits or ends for want of use runs once, in a shell that stays."""
    client = sandbox.connect()
    client.ask(Setup(unused_shell_ms=unused_ms))
    time.sleep(unused_ms / 1000)
    outcome = client.run("echo x; a=1")
    assert isinstance(outcome.reply, ExecReply)
    assert (outcome.stdout, outcome.reply.exit_code, outcome.reply.shell_restarted) == (b"x\n", 0, False)
    assert client.stdout("echo $a") == b"1\n"


def _begin_first(sandbox: Sandbox, **options: Any) -> Client:
    """Send the first command of a session. Its shell is being started from then on, until there is a file `go`."""
    client = sandbox.connect()
    client.ask(Setup(env={"BASH_ENV": "$(until [ -e /mnt/workspace/go ]; do sleep 0.01; done)"}, unused_shell_ms=0))
    client.request(Exec("x", "echo x >>log; a=$BASHPID", **options))
    wait_until(lambda: not _is_empty(sandbox))
    return client


def _is_kept_for(sandbox: Sandbox, log: bytes) -> bool:
    """Let the shell start; return whether one command after the other has that shell, and what the log holds."""
    client = sandbox.connect()
    client.write_file("go", b"")
    client.run("touch log; b=$BASHPID")
    outcome = client.run("cat log; test $b = $BASHPID")
    return (outcome.stdout, outcome.reply.exit_code, outcome.reply.shell_restarted) == (log, 0, False)


def test_commands_wait_in_order_for_the_first_shell(sandbox: Sandbox) -> None:
    """Two commands have the same shell, which replaces no other."""
    first, second = _begin_first(sandbox), sandbox.connect()
    second.request(Exec("y", "echo y >>log; test $a = $BASHPID"))
    sandbox.connect().write_file("go", b"")
    replies = [each.outcome().reply for each in (first, second)]
    assert [(each.exit_code, each.shell_restarted) for each in replies] == [(0, False)] * 2
    assert _is_kept_for(sandbox, b"x\ny\n")


@pytest.mark.parametrize(
    ("options", "end", "told"),
    [
        ({}, lambda client: client.send(Kind.CANCEL), "cancelled"),
        ({"queue_timeout_ms": 50}, lambda client: None, "QUEUE_TIMEOUT"),
        ({}, lambda client: client.close(), None),
    ],
    ids=["cancelled", "not waited for", "client gone"],
)
def test_a_first_command_may_end_before_its_shell_has_started(
    sandbox: Sandbox, options: dict[str, Any], end: Callable[[Client], None], told: str | None
) -> None:
    """The command is answered at once and never runs, and the shell is there for the next one."""
    client = _begin_first(sandbox, **options)
    end(client)
    if told is not None:
        reply = client.outcome().reply
        assert told == (reply.code if isinstance(reply, Error) else reply.cause)
    assert _is_kept_for(sandbox, b"")


@pytest.mark.parametrize("kills", [1, 3])
def test_a_first_shell_that_is_killed_while_it_starts_has_successors(sandbox: Sandbox, kills: int) -> None:
    """A kill as for want of memory. The command runs in a later shell, or is told of SHELL_FAILED after the third; the
    next command is tried with another one."""
    client = _begin_first(sandbox)
    killed = list[int]()

    def kill_next() -> bool:
        for pid in _children(sandbox):
            if pid not in killed and os.getsid(pid) == pid:  # a shell, and no orphan of one
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
        return len(killed) == kills

    wait_until(kill_next)
    if kills < 3:
        sandbox.connect().write_file("go", b"")
    reply = client.outcome().reply
    told = reply.code if isinstance(reply, Error) else (reply.exit_code, reply.shell_restarted)
    assert told == ("SHELL_FAILED" if kills == 3 else (0, False))
    assert _is_kept_for(sandbox, b"" if kills == 3 else b"x\n")


def test_a_command_before_setup_is_refused(sandbox: Sandbox) -> None:
    """A command before Setup, when there is no shell, is refused with an error."""
    answer = sandbox.connect().run("echo").reply
    assert isinstance(answer, Error)
    assert answer.code == "BAD_REQUEST"


def test_a_shell_that_cannot_start_is_an_error(sandbox: Sandbox) -> None:
    """An image whose shell is no shell gives SHELL_FAILED, and PID 1 goes on."""
    client = sandbox.connect()
    client.ask(Setup(shell="/bin/true"))
    answer = client.run("echo").reply
    assert isinstance(answer, Error)
    assert answer.code == "SHELL_FAILED"
