"""`run`, `exec` and `logs` on pipes: exit statuses, input, output, signals, and what is said of failures."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import httpx
import pytest
import trio

from sandkasten.cli import runs
from sandkasten.sdk import SandboxClient
from tests.cli.conftest import Command
from tests.e2e.daemon import KEY, SCRIPT, Daemon, running_daemon
from tests.waiting import patience

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("options", "words", "status", "said"),
    [
        ((), ("sh", "-c", "echo out; echo err >&2; exit 7"), 7, "err\n"),
        ((), ("sh", "-c", "kill -TERM $$"), 143, ""),
        (("--timeout", "1s"), ("sleep", "60"), 124, "sandkasten: out of time after 1 s\n"),
        ((), ("no-such-program",), 127, None),
        (("no-such-image",), ("true",), 125, None),
        (("-m", "0"), ("true",), 2, None),
        (("--network", "none"), ("cat", "/sys/class/net/eth0/mtu"), 1, None),
        (("--network", "host"), ("true",), 125, None),
        (("--network", "none", "--deny", "a.example"), ("true",), 125, None),
        (("--allow", "@nobody"), ("true",), 125, None),
        (("-l", "x"), ("true",), 2, "sandkasten: a label is NAME=VALUE, not 'x'\n"),
        (("-d", "-w", "/nowhere"), ("true",), 125, None),
    ],
)
def test_the_exit_status_is_the_command_s_unless_the_fault_is_ours(
    command: Command, options: tuple[str, ...], words: tuple[str, ...], status: int, said: str | None
) -> None:
    """124 out of time, 128 and a signal, 125 a fault of ours or the server's, 2 bad arguments; each session is gone."""
    done = command.run("run", *options, "--", *words)
    assert done.returncode == status, done
    assert said is None or done.stderr == said
    assert done.stdout == ("out\n" if "echo out" in words[-1] else "")
    assert [each for each in command.lines("ps") if each["labels"] == {}] == [], done


def test_a_run_needs_no_argument_but_its_command(command: Command) -> None:
    """The image is the server's, and what the command prints arrives as it is."""
    assert command.out("run", "--", "python3", "-c", "print(42)") == "42\n"
    done = command.run("run", "--", "head", "-c", "3", "/dev/zero")
    assert (done.returncode, done.stdout) == (0, "\0\0\0")
    assert command.run("run").returncode == 2
    done = command.run("run", "python")
    assert (done.returncode, done.stderr) == (
        *(2, "sandkasten: image 'python' has no command of its own: give one behind --\n"),
    )


def test_standard_input_is_passed_on_unless_it_is_not_to_be(command: Command, session: str) -> None:
    """To the last byte, whatever bytes; an empty one ends at once."""
    data = bytes(range(256)) * 1000
    digest = hashlib.sha256(data).hexdigest()
    assert command.run("run", "--", "sha256sum", stdin=data).stdout == f"{digest}  -\n"
    assert command.run("exec", session, "--", "sha256sum", stdin=data).stdout == f"{digest}  -\n"
    assert command.out("exec", session, "--", "wc -c", stdin="four") == "4\n"
    assert command.out("exec", "-n", session, "--", "wc -c", stdin="four") == "0\n"


def test_a_persistent_shell_keeps_its_state(command: Command, session: str) -> None:
    """One word is a script, of several each is an argument; `--stateless` and a user are beside the shell."""
    command.out("exec", session, "--", "cd /tmp; export WHO=world")
    assert command.out("exec", session, "--", "echo $WHO $PWD") == "world /tmp\n"
    assert command.out("exec", session, "--", "printf", "%s|", "a b", "$WHO") == "a b|$WHO|"
    assert command.out("exec", "--stateless", session, "--", "echo $WHO $PWD") == "/workspace\n"
    assert command.out("exec", "-u", "root", "-w", "/", session, "--", "id -u; pwd") == "0\n/\n"
    assert command.out("exec", "-e", "A=1", "-e", "HOME", session, "--", "echo $A $HOME").startswith("1 /")


def test_a_session_is_named_by_a_beginning_a_label_or_as_the_last(command: Command, session: str) -> None:
    """An ambiguous or unknown name is a sentence."""
    for name in (session, session[:6], "kind=shared", "-"):
        assert command.out("exec", name, "--", "echo here") == "here\n"
    other = command.out("run", "-d", "-l", "kind=shared").strip()
    done = command.run("exec", "kind=shared", "--", "true")
    assert (done.returncode, done.stderr.count("\n")) == (125, 1)
    assert "2 sessions fit" in done.stderr
    command.out("rm", other)
    for name, words in (("kind=none", "no live session"), ("ffffffffffff", "no live session"), ("x y", "names no")):
        assert words in command.run("exec", name, "--", "true").stderr


def test_json_is_one_object_with_the_output(command: Command, session: str) -> None:
    """For scripts: both streams, the status, the cause."""
    done = command.run("exec", "--json", session, "--", "echo out; echo err >&2; exit 3")
    result = json.loads(done.stdout)
    assert (done.returncode, result["exit_code"], result["stdout"], result["stderr"]) == (3, 3, "out\n", "err\n")
    for data, status, said in ((b"a\r\n", 0, '"stdout":"3\\n"'), (b"a\xff", 125, "standard input must be UTF-8")):
        done = command.run("exec", "--json", session, "--", "wc -c", stdin=data)
        assert (done.returncode, said in done.stdout + done.stderr, "Traceback" in done.stderr) == (status, True, False)
    assert command.json("run", "-d", "--", "true")["id"] != session
    command.out("rm", "-")


def test_a_detached_command_has_its_options_or_they_are_refused(
    command: Command, session: str, api: httpx.Client
) -> None:
    """A time limit counts, input is empty unless it is to stay open, and what no process has is said."""

    def ends(session: str, run: str, limit_ms: int = 20_000) -> str | None:
        api.post(f"/v1/sessions/{session}/execs/{run}/wait", json={"for": "exit", "timeout_ms": limit_ms})
        info = api.get(f"/v1/sessions/{session}/execs/{run}").json()
        return info["end"]["cause"] if info["state"] == "ended" else None

    for options, words, cause in (
        (("--timeout", "1s"), ("sleep", "60"), "timed_out"),
        ((), ("cat",), "exited"),
        (("--stateless",), ("exit 3",), "exited"),
        (("-i",), ("cat",), None),
    ):
        run = command.out("exec", "-d", *options, session, "--", *words).strip()
        assert ends(session, run, 20_000 if cause else 300) == cause, words
    made = command.out("run", "-d", "--timeout", "1s", "--", "sleep", "60").strip()
    (run,) = api.get(f"/v1/sessions/{made}/execs").json()["execs"]
    assert ends(made, run["exec_id"]) == "timed_out"
    for arguments, option in (
        (("exec", "-dt", session), "-t"),
        (("exec", "-d", "--shell", "x", session), "--shell"),
        (("run", "-dt"), "-t"),
        (("run", "-d", "--timeout", "1s"), "--timeout"),
    ):
        done = command.run(*arguments, *(() if "--timeout" in arguments else ("--", "true")))
        assert (done.returncode, f" {option} " in done.stderr) == (2, True), done


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_are_passed_on(command: Command, session: str, number: signal.Signals, status: int) -> None:
    """The command gets them, and its end is the answer."""
    script = "trap 'echo got it; exit 9' USR1; echo ready; while :; do sleep 0.1; done"
    with command.started("exec", session, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait() == status
    with command.started("exec", session, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == b"got it\n"
        assert process.wait() == 9


def test_a_command_that_takes_no_notice_is_given_up_and_killed(command: Command, session: str) -> None:
    """The third interrupt ends the wait, and the run."""
    script = "trap '' INT TERM; echo ready; while :; do sleep 0.1; done"
    with command.started("exec", session, "--stateless", "--", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(Exception, match="timed out"):
                process.wait(0.3)
        assert process.wait() == 143


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_hail_of_signals_leaves_no_session(command: Command, number: signal.Signals, status: int) -> None:
    """Signals behind the end of the wait do not end the clean-up."""
    script = "trap '' INT HUP; echo ready; while :; do sleep 0.1; done"
    with command.started("run", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.01)
        # One of them may meet the process once its verb is done; a shell says the same of both.
        assert process.returncode in (status, -number)
    assert command.lines("ps") == []


@pytest.mark.parametrize(
    "words", ["logs SESSION", "events -f --since 0", "exec --json SESSION -- true", "ps", "info -"]
)
def test_a_signal_counts_while_standard_output_takes_nothing(command: Command, session: str, words: str) -> None:
    """A reader that has stopped, and has not left, does not keep a verb alive that prints."""
    command.out("exec", session, "--", "echo line")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    arguments = words.replace("SESSION", session).split()
    process = subprocess.Popen([SCRIPT, *arguments], env=command.environment, stdin=subprocess.DEVNULL, stdout=writer)
    try:
        _wait_for_output(process.pid)
        process.terminate()
        assert process.wait(patience(3)) == 143
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def _wait_for_output(pid: int) -> None:
    """Wait until a thread of a process is in a call about standard output (proc_pid_syscall(5))."""
    deadline = time.monotonic() + patience(20)
    while time.monotonic() < deadline:
        for path in Path(f"/proc/{pid}/task").glob("*/syscall"):
            if path.read_text().split()[1:2] == ["0x1"]:
                return
        time.sleep(0.01)
    raise AssertionError("nothing is written")


def test_a_reader_that_leaves_ends_the_command(command: Command, session: str) -> None:
    """As SIGPIPE does in a shell: status 141, and no endless `yes` is left."""
    with command.started("exec", session, "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.read(6) == b"y\ny\ny\n"
        process.stdout.close()
        assert process.wait() == 141
    assert command.json("info", session)["runs"] == []


def test_what_is_closed_is_no_connection(command: Command, session: str) -> None:
    """Without standard input, output or error the command runs all the same, and its output goes nowhere."""
    script = f"'{SCRIPT}' exec {session} -- 'cat; echo out; echo err >&2; exit 3' <&- >&- 2>&-; echo $?"
    done = subprocess.run(["bash", "-c", script], env=command.environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")
    done = subprocess.run(
        ["bash", "-c", f"'{SCRIPT}' ps >&-; echo $?"],
        env=command.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_logs_have_the_output_of_all_runs_or_of_one(command: Command) -> None:
    """Each line behind its run; one run alone as it is; with -f until the session ends, new runs included."""
    session = command.out("run", "-d", "--", "sh", "-c", "echo one; echo two").strip()
    run = command.out("exec", "-d", session, "--", "printf 'a\\001b\\nlast'").strip()
    lines = command.out("logs", session).splitlines()
    assert [line.split(" | ")[1] for line in lines] == ["one", "two", "a\x01b", "last"]
    assert {line.split(" | ")[0] for line in lines if "last" in line} == {run[:12]}
    assert command.out("logs", session, run[:-3]) == "a\x01b\nlast"
    assert [each["line"] for each in command.lines("logs", session, run)] == ["a\x01b", "last"]
    assert command.out("logs", "--since", "1h", session, run) == "a\x01b\nlast"
    time.sleep(1.1)  # the shortest span is 1 s
    assert command.out("logs", "--since", "1s", session) == ""
    with command.started("logs", "-f", session) as process:
        assert process.stdout is not None
        while b"last" not in process.stdout.readline():
            pass
        command.out("exec", session, "--", "echo new")
        assert process.stdout.readline().endswith(b" | new\n")
        command.out("rm", session)
        assert process.wait() == 0


def test_logs_find_each_of_many_runs(command: Command, session: str, api: httpx.Client) -> None:
    """Beyond the thousand that a list of the API has by default; one run is found by its whole id, or its beginning."""
    first = api.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo first", "exec_id": "first"}).json()
    for _ in range(1001):
        assert api.post(f"/v1/sessions/{session}/exec", json={"cmd": ":"}).status_code == 200
    assert first["output"] == "first\n"
    assert command.out("logs", session) == "first | first\n"
    for name in ("first", "firs"):
        assert command.out("logs", session, name) == "first\n"
    assert "0 kept runs fit" in command.run("logs", session, "none").stderr


async def test_a_run_that_ended_while_logs_began_is_followed(daemon: Daemon, session: str) -> None:
    """One that began behind the list of runs, and ended before the events were open."""
    key = (daemon.data_dir / "api-key").read_text().strip()
    async with SandboxClient(base_url=daemon.wait_url(), api_key=key) as client:
        box = client.session(session)
        await box.exec("echo missed", exec_id="missed")
        ids = runs._new_runs(box, argparse.Namespace(run=None, since=None))
        async with contextlib.aclosing(cast("AsyncGenerator[str]", ids)):
            with trio.fail_after(patience()):
                assert await anext(ids) == "missed"


def test_a_server_may_be_started_anew_meanwhile(tmp_path: Path) -> None:
    """Killed in the midst of what `exec` and `logs -f` print: nothing is missing or twice, and the end is true."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        address = f"unix:{directory}/there"
        command = Command.of(tmp_path, SANDKASTEN_URL=address, SANDKASTEN_API_KEY=KEY)
        with running_daemon(Path(directory), "--listen", address) as first:
            first.wait_url()
            session = command.out("run", "-d").strip()
            script = "for n in $(seq 60); do echo $n; sleep 0.05; done; exit 7"
            with command.started("exec", "-n", session, "--", script) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"1\n"
                with command.started("logs", "-f", session) as log:
                    assert log.stdout is not None
                    assert log.stdout.readline().endswith(b" | 1\n")
                    first.process.kill()
                    first.process.wait()
                    with running_daemon(Path(directory), "--listen", address):
                        rest = [b"%d\n" % number for number in range(2, 61)]
                        assert process.stdout.readlines() == rest
                        assert process.wait() == 7
                        assert [log.stdout.readline().partition(b" | ")[2] for _ in rest] == rest
                        command.out("rm", session)
                        assert log.wait() == 0
