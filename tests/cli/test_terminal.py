"""`run -it`, `exec -it` and `shell` on a pseudo-terminal: the program has it, and it is always given back."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import httpx
import pytest
import trio

from tests.cli.conftest import Command, Terminal
from tests.e2e.daemon import Daemon
from tests.sdk.proxy import running_proxy
from tests.waiting import patience

pytestmark = pytest.mark.e2e

DETACH = b"\x10\x11"
ECHO_KEYS = (
    "import os, tty; tty.setraw(0); os.write(1, b'ready')\n"
    "while (keys := os.read(0, 100)) != b'q': os.write(1, keys.hex().encode() + b'|')"
)
"""A program that shows the bytes of keys, read by read, until `q`."""


def test_a_program_has_the_terminal_with_its_size_and_its_changes(command: Command) -> None:
    """Size at the start, a change of the window, keys, the exit status, and the settings from before."""
    script = "stty size; trap 'stty size' WINCH; echo ready; while ! read -t 0.1 x; do :; done; echo got $x; exit 5"
    with command.terminal("run", "-it", "--", "bash", "-c", script, cols=91, rows=33) as terminal:
        terminal.wait_for("33 91\r\nready")
        assert terminal.is_raw
        terminal.resize(100, 40)
        terminal.wait_for("40 100")
        terminal.type("hi\r")
        terminal.wait_for("got hi")
        assert terminal.wait() == 5
        assert terminal.is_restored


def test_keys_arrive_as_they_are(command: Command, session: str) -> None:
    """^C, ^Z, a sequence and a character cut in the middle, and a ^P without the ^Q with which it would detach."""
    with command.terminal("exec", "-it", session, "--", "python3", "-c", ECHO_KEYS) as terminal:
        terminal.wait_for("ready")
        for keys in (b"\x03", b"\x1a", b"\x1b[", b"1;5A", "ü".encode()[:1], "ü".encode()[1:], b"\x10", b"\x10x"):
            terminal.type(keys)
            terminal.wait_for(keys[-1:].hex() + r"\|")
        shown = terminal.seen.partition(b"ready")[2].replace(b"|", b"")
        assert bytes.fromhex(shown.decode()) == b"\x03\x1a\x1b[1;5A\xc3\xbc\x10\x10x"
        terminal.type(b"\x10")
        terminal.wait_for(r"1078\|10\|")
        terminal.type(b"q")
        assert terminal.wait() == 0
        assert terminal.is_restored


def test_the_two_keys_detach_and_the_run_goes_on(command: Command, session: str, api: httpx.Client) -> None:
    """Modes that the program left on are switched off, and the way back is told."""
    script = "import time; print('\\x1b[?1049;1000h\\x1b[?25l\\x1b]0;half a title', end='', flush=True); time.sleep(60)"
    with command.terminal("exec", "-it", session, "--", "python3", "-c", script) as terminal:
        terminal.wait_for("half a title")
        terminal.type(DETACH)
        assert terminal.wait() == 0
        assert terminal.is_restored
        ending = terminal.seen.partition(b"half a title")[2]
        assert ending.startswith(b"\x1b\\\x1b[0m\x1b[?25h\x1b[?1000l\x1b[?1049l"), ending
        assert b"sandkasten: detached" in ending
    (run,) = api.get(f"/v1/sessions/{session}/execs", params={"state": "running"}).json()["execs"]
    assert run["exec_id"].encode() in ending


def test_a_run_that_is_left_keeps_its_session(command: Command, api: httpx.Client) -> None:
    """A person who detaches comes back: the session is not ended, and is the last one used."""
    with command.terminal("run", "-it", "--", "cat") as terminal:
        terminal.wait_raw()
        terminal.type("abc\r")
        terminal.wait_for("abc\r\nabc")
        terminal.type(DETACH)
        assert terminal.wait() == 0
    assert command.out("logs", "-").count("abc") == 2
    assert [each["id"] for each in api.get("/v1/sessions").json()] == command.out("ps", "-q").split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_gives_the_terminal_back(command: Command, api: httpx.Client, number: signal.Signals) -> None:
    """The command and its session end, with the status of the signal."""
    with command.terminal("run", "-it", "--", "cat") as terminal:
        terminal.wait_raw()
        terminal.type("abc\r")
        terminal.wait_for("abc\r\nabc")
        terminal.send(number)
        assert terminal.wait() == 128 + number
        assert terminal.is_restored
    assert api.get("/v1/sessions").json() == []


def test_a_stop_gives_the_terminal_back_until_the_command_goes_on(command: Command, session: str) -> None:
    """SIGTSTP restores the settings before the process stops; SIGCONT makes it raw again, with the present size."""
    with command.terminal("shell", session) as terminal:
        terminal.wait_for(r"\$ ")
        terminal.send(signal.SIGTSTP)
        _wait_state(terminal, "T")
        assert terminal.is_restored
        terminal.resize(77, 30)
        terminal.send(signal.SIGCONT)
        terminal.wait_raw()
        _type_until(terminal, "stty size\r", "30 77")
        terminal.type("exit 3\r")
        assert terminal.wait() == 3
        assert terminal.is_restored


def _type_until(terminal: Terminal, keys: str, pattern: str) -> None:
    deadline = time.monotonic() + patience(20)
    while pattern.encode() not in terminal.seen:
        assert time.monotonic() < deadline, terminal.seen
        terminal.type(keys)
        terminal.read(0.3)


def _wait_state(terminal: Terminal, state: str) -> None:
    deadline = time.monotonic() + patience(20)
    while True:
        with open(f"/proc/{terminal.process.pid}/stat") as file:
            if file.read().rpartition(") ")[2].startswith(state):
                return
        assert time.monotonic() < deadline
        terminal.read(0.02)


def test_a_terminal_that_is_closed_ends_the_command(command: Command, api: httpx.Client) -> None:
    """The kernel hangs up, and neither the command nor its session stays."""
    with command.terminal("run", "-it", "--", "cat") as terminal:
        terminal.wait_raw()
        terminal.close()
        assert terminal.process.wait(patience(20)) == 128 + signal.SIGHUP
    assert api.get("/v1/sessions").json() == []


def test_output_faster_than_the_terminal_leaves_the_keys_alone(command: Command, session: str) -> None:
    """While the screen takes nothing more, the keys that detach work, and nothing grows without bound."""
    with command.terminal("exec", "-it", session, "--", "yes", "0123456789" * 10) as terminal:
        terminal.wait_raw()
        terminal.wait_for("0123456789")
        _wait_stuck(terminal)
        terminal.type(DETACH)
        assert terminal.process.wait(patience(20)) == 0
        assert terminal.is_restored
    run = command.json("info", session)["runs"][0]
    assert run["state"] == "running"
    assert run["stdout_bytes"] < 16 * 2**20


def test_keys_that_nobody_takes_leave_those_that_detach_alone(command: Command, session: str) -> None:
    """A program that reads nothing, and a person who types on and on."""
    script = "import tty, time; tty.setraw(0); print('ready', flush=True); time.sleep(60)"
    with command.terminal("exec", "-it", session, "--", "python3", "-c", script) as terminal:
        terminal.wait_for("ready")
        for keys in (*(b"x" * 4000,) * 600, DETACH):
            assert terminal.type_some(keys, patience(10))
        assert terminal.wait() == 0, terminal.seen
        assert terminal.is_restored


def _wait_stuck(terminal: Terminal) -> None:
    """Wait until the command has not run for a while: it waits for the terminal, which nobody reads."""
    before = -1
    while before != (now := _ticks(terminal.process.pid)):
        before = now
        time.sleep(patience(0.3))


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_lost_server_gives_the_terminal_back(command: Command, session: str, daemon: Daemon) -> None:
    """A failure in the middle is said on a terminal that is as it was."""
    key = (daemon.data_dir / "api-key").read_text().strip()
    with ExitStack() as stack:
        async with running_proxy(int(daemon.wait_url().rpartition(":")[2])) as proxy:
            elsewhere = Command.of(command.cwd, None, SANDKASTEN_URL=proxy.url, SANDKASTEN_API_KEY=key)
            terminal = stack.enter_context(elsewhere.terminal("shell", session))
            await trio.to_thread.run_sync(terminal.wait_for, r"\$ ")
        assert await trio.to_thread.run_sync(terminal.wait) == 125
        assert terminal.is_restored
        assert b"sandkasten: the connection" in terminal.seen


def test_a_shell_without_a_session_makes_one_that_goes_with_it(command: Command, api: httpx.Client) -> None:
    """With the options of `run`; its exit status is that of the shell."""
    with command.terminal("shell", "-l", "mine=yes", "-e", "WHO=me") as terminal:
        terminal.wait_for(r"\$ ")
        assert [each["labels"] for each in api.get("/v1/sessions").json()] == [{"mine": "yes"}]
        terminal.type("echo is-$WHO\r")
        terminal.wait_for("[\r\n]is-me")
        terminal.type("exit 4\r")
        assert terminal.wait() == 4
    assert api.get("/v1/sessions").json() == []


def test_a_terminal_that_was_left_is_joined_again(command: Command, session: str) -> None:
    """By the line that the detaching printed."""
    with command.terminal("shell", session) as terminal:
        terminal.wait_for(r"\$ ")
        terminal.type("MINE=kept\r" + DETACH.decode())
        assert terminal.wait() == 0
        told = terminal.wait_for(r"sandkasten shell (\w+) --join (\S+)`")
    with command.terminal("shell", told[1].decode(), "--join", told[2].decode()) as terminal:
        terminal.wait_raw()
        terminal.type("echo $MINE-$MINE\r")
        terminal.wait_for("kept-kept")
        terminal.type("exit\r")
        assert terminal.wait() == 0


def test_the_agent_s_shell_is_watched_and_taken_over(command: Command, session: str) -> None:
    """A viewer types nothing; who takes over types into the shell itself, and gives it back by leaving."""
    command.out("exec", session, "--", "AGENT=smith; echo agent at work")
    with command.terminal("shell", "--watch", session) as watcher:
        watcher.wait_for("agent at work")
        watcher.type("echo never\r")
        with command.terminal("shell", "--take-over", session) as taker:
            taker.wait_raw()
            taker.type("echo mister $AGENT; AGENT=jones\r")
            taker.wait_for("mister smith")
            taker.type(DETACH)
            assert taker.wait() == 0
        watcher.wait_for("mister smith")
        watcher.type(DETACH)
        assert watcher.wait() == 0
        assert b"never" not in watcher.seen
    assert command.out("exec", session, "--", "echo $AGENT") == "jones\n"


def test_a_terminal_that_is_none_is_refused(command: Command, session: str) -> None:
    """In a sentence, before anything is made."""
    for arguments in (("run", "-it", "--", "cat"), ("exec", "-t", session, "--", "cat"), ("shell",)):
        done = command.run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "terminal" in done.stderr
    assert os.path.basename(command.out("ps", "-q").strip()) == session
