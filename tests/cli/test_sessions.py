"""`ps`, `info`, `top`, `rm`, `pause`, `resume`, `extend`: sessions by name, in tables that obey nobody."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.cli.conftest import Command

pytestmark = pytest.mark.e2e

HOSTILE = "\x1b[2J\x1b]0;pwned\x07\u202eevil\r\n"


def test_a_hostile_label_is_shown_and_not_obeyed(command: Command, api: httpx.Client) -> None:
    """Escape sequences, line ends and bidirectional controls are text, also on a terminal; JSON has them whole."""
    session = api.post("/v1/sessions", json={"labels": {"a": HOSTILE}}).json()["id"]
    shown = r"a=\x1b[2J\x1b]0;pwned\x07\u202eevil\r\n"
    assert command.out("ps").splitlines()[1].endswith(shown)
    assert shown in command.out("info", session)
    assert command.lines("ps")[0]["labels"] == {"a": HOSTILE}
    assert command.out("ps", "--json").isascii()
    with command.terminal("ps", cols=200) as terminal:
        assert terminal.wait() == 0
    assert re.sub(rb"\x1b\[(2|32|0)m", b"", terminal.seen).decode().splitlines()[1].endswith(shown)


def test_hostile_output_is_shown_where_lines_of_several_runs_stand(command: Command, session: str) -> None:
    """On a terminal `logs` shows escape sequences as text, unless it is told otherwise; so do commands in `info`."""
    script = "printf '\\033]0;pwned\\007\\033[2Jhere\\n'; : \x1b[2J"
    command.out("exec", session, "--", script)
    for options, seen in (((), rb"| \x1b]0;pwned\x07\x1b[2Jhere"), (("--raw",), b"| \x1b]0;pwned\x07\x1b[2Jhere")):
        with command.terminal("logs", *options, session, cols=200) as terminal:
            assert terminal.wait() == 0
        assert seen in terminal.seen
    command.out("exec", "-d", session, "--", f"sleep 60; {script}")
    assert "\x1b" not in command.out("info", session)


def test_colour_is_for_terminals_that_want_it(command: Command, session: str) -> None:
    """Not on a pipe, not with NO_COLOR, not with --json; a narrow window cuts the last column."""
    assert "\x1b" not in command.out("ps")
    for variables, arguments, is_coloured in (
        ({}, (), True),
        ({"NO_COLOR": "1"}, (), False),
        ({"TERM": "dumb"}, (), False),
        ({}, ("--json",), False),
    ):
        here = Command({**command.environment, **variables}, command.cwd)
        with here.terminal("ps", *arguments, cols=80) as terminal:
            assert terminal.wait() == 0
        assert (b"\x1b[32mrunning\x1b[0m" in terminal.seen) is is_coloured, terminal.seen
    api_line = terminal.seen.splitlines()[0]
    assert json.loads(api_line)["id"] == session


def test_a_list_has_live_sessions_and_those_that_were(command: Command, session: str) -> None:
    """By label, by status, as ids alone; in the table the beginning of an id is enough to name the session."""
    other = command.out("run", "-d", "-l", "a=1", "-l", "b=2").strip()
    assert command.out("ps", "-q").split() == [other, session]
    assert command.out("ps", "-q", "-l", "a", "-l", "b=2").split() == [other]
    row = command.out("ps", "-l", "a=1").splitlines()[1].split()
    assert row[1:3] == ["python", "running"]
    assert command.out("rm", row[0]) == f"{other}\n"
    assert command.out("ps", "-q").split() == [session]
    assert {other, session} <= set(command.out("ps", "-aq").split())
    assert command.json("info", other)["status"] == "destroyed"
    assert "end_reason" in command.json("info", other[:10])


def test_what_is_shown_of_a_session(command: Command, session: str) -> None:
    """Settings, use, and the runs that go on."""
    run = command.out("exec", "-d", session, "--", "exec sleep 60").strip()
    shown = command.out("info", session)
    assert re.search(r"^status +running$", shown, re.MULTILINE)
    assert re.search(r"^limits +\S+ cpu, \d+ MiB memory", shown, re.MULTILINE)
    assert re.search(r"^network +none$", shown, re.MULTILINE)
    assert re.search(rf"^{run} +process +running +\w+ +exec sleep 60$", shown, re.MULTILINE)
    info = command.json("info", session)
    assert (info["id"], info["runs"][0]["exec_id"]) == (session, run)
    assert info["stats"]["memory_bytes"] > 0
    assert command.out("top").splitlines()[1].startswith(session[:12])
    assert command.lines("top")[0]["pids"] >= 1


def test_top_draws_again_until_it_is_interrupted(command: Command, session: str) -> None:
    """On a terminal; ^C ends it with 130."""
    with command.terminal("top", "-n", "0.2") as terminal:
        for _ in range(2):
            terminal.wait_for(session[:12], after=len(terminal.seen))
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert terminal.is_restored


def test_no_image_is_made_of_the_machines_own(command: Command, session: str) -> None:
    """`image commit` asks the server, which says why it refuses the image `host`."""
    done = command.run("image", "commit", session, "--name", "copy")
    assert (done.returncode, "'host' is the machine's own /usr" in done.stderr) == (125, True)


def test_a_session_is_paused_resumed_and_extended(command: Command, session: str, api: httpx.Client) -> None:
    """By name, each with its answer."""
    assert command.out("pause", "--no-auto-resume", session) == f"{session}\n"
    done = command.run("exec", session, "--", "true")
    assert (done.returncode, "paused" in done.stderr) == (125, True)
    assert command.json("resume", "-")["status"] == "running"
    assert command.json("extend", session, "2h")["idle_timeout_seconds"] == 7200
    assert "never" in command.out("extend", session, "never")
    assert command.json("extend", "--lifetime", session, "30d")["max_lifetime_seconds"] == 30 * 86_400
    assert command.run("extend", session, "soon").returncode == 2


def test_rules_are_added_to_a_network(command: Command, session: str) -> None:
    """Each that is given; without any the network is shown. The mode `none` takes none, and says so."""
    assert command.out("network", session) == f"{session[:12]} none\n"
    done = command.run("network", session, "--allow", "a.example:443", "--deny", "b.example")
    assert (done.returncode, "network.allow" in done.stderr) == (125, True), done
    assert command.json("network", session)["revision"] == 1


def test_all_sessions_end_only_if_a_person_says_so(command: Command, api: httpx.Client) -> None:
    """With a label those that have it; nobody to ask is a refusal, and `--yes` is an answer."""
    made = [api.post("/v1/sessions", json={"labels": {"n": str(number % 2)}}).json()["id"] for number in range(3)]
    done = command.run("rm", "--all")
    assert (done.returncode, "--yes" in done.stderr) == (2, True)
    for answer, status in (("no\r", 125), ("\r", 125), ("\x03", 130), ("y\r", 0)):
        with command.terminal("rm", "--all", "-l", "n=1") as terminal:
            terminal.wait_for(r"End 1 sessions\? \[y/N\] ")
            assert made[1][:12].encode() in terminal.seen
            terminal.type(answer)
            assert terminal.wait() == status
    assert {each["id"] for each in api.get("/v1/sessions").json()} == {made[0], made[2]}
    assert len(command.out("rm", "--all", "--yes").split()) == 2
    assert command.out("rm", "--all", "--yes") == ""
    for arguments in ((), ("--all", made[0]), ("-l", "n=1")):
        assert command.run("rm", *arguments).returncode == 2


def test_one_of_several_that_fails_does_not_spare_the_others(command: Command, session: str) -> None:
    """Every session is tried, and the status tells of the one that failed."""
    done = command.run("pause", "0" * 24, session)
    assert (done.returncode, done.stdout) == (125, f"{session}\n")
    assert done.stderr.startswith(f"sandkasten: {'0' * 24}: ")
