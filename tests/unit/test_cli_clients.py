"""Parts of the client verbs that need no server: contexts, the local installation, tables, keys, completion."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.cli import output
from sandkasten.cli.client import is_elsewhere
from sandkasten.cli.main import VERBS, main
from sandkasten.cli.terminal import PLAIN, Keys, Modes, heeding
from sandkasten.contexts import (
    NamedServer,
    changed_contexts,
    choose_server,
    contexts_path,
    own_directory,
    read_contexts,
)
from sandkasten.installation import (
    LISTENING_NAME,
    ConfigError,
    find_local,
    forget_listening,
    plain_settings,
    tell_listening,
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own configuration or of the person's is seen."""
    for name in [name for name in os.environ if name.startswith(("SANDKASTEN_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


# Contexts and the local installation


def test_the_first_that_is_given_is_the_server(tmp_path: Path) -> None:
    """Arguments, a URL, a context or a configuration in the environment, the chosen context, this machine. A key in the
    environment goes to no server of a context."""
    _write({"a": {"url": "http://a"}, "b": {"url": "http://b"}}, current="a")
    (tmp_path / "data").mkdir()
    tell_listening(tmp_path / "data", ["http://0.0.0.0:1", "unix:/x"])
    here = {"HOME": str(tmp_path)}
    local = here | {"SANDKASTEN_DATA_DIR": str(tmp_path / "data")}
    url = {"SANDKASTEN_URL": "http://u"}
    named = {"SANDKASTEN_CONTEXT": "b"}
    assert choose_server(here).url == "http://a"
    assert choose_server(local).url == "http://127.0.0.1:1"
    assert choose_server(local | named).url == "http://b"
    assert choose_server(local | named | url).url == "http://u"
    assert choose_server(local | url, context="a").url == "http://a"
    assert choose_server(url | named, data_dir=tmp_path / "data").url == "http://127.0.0.1:1"
    assert choose_server(named | {"SANDKASTEN_API_KEY": "of another"}).api_key is None
    assert choose_server(local, context="local").url == "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="no context 'c'"):
        choose_server(here, context="c")


@pytest.mark.parametrize(
    ("variables", "arguments", "is_there"),
    [
        ({}, {}, True),
        ({"SANDKASTEN_CONFIG": "c.yaml"}, {}, False),
        ({"SANDKASTEN_DATA_DIR": "data"}, {}, False),
        ({"SANDKASTEN_DATA_DIR": "data", "SANDKASTEN_CONTEXT": "a"}, {}, True),
        ({"SANDKASTEN_URL": "http://u"}, {}, True),
        ({"SANDKASTEN_URL": "http://u"}, {"context": "local"}, False),
        ({"SANDKASTEN_URL": "http://u"}, {"data_dir": "data"}, False),
    ],
)
def test_lists_are_this_machine_s_where_its_server_is_meant(
    variables: dict[str, str], arguments: dict[str, str], is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`image list` and `key list` choose as every client verb does."""
    _write({"a": {"url": "http://a"}}, current="a")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_elsewhere(argparse.Namespace(**arguments)) == is_there


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HOME": "/home/a"}, "/home/a/.config/sandkasten"),
        ({"HOME": "/home/a", "XDG_CONFIG_HOME": "/etc/a"}, "/etc/a/sandkasten"),
        ({"HOME": "/home/a", "XDG_CONFIG_HOME": "relative"}, "/home/a/.config/sandkasten"),
        ({"HOME": "relative"}, "/nonexistent/.config/sandkasten"),
    ],
)
def test_own_files_are_below_the_home_or_nowhere(environ: dict[str, str], path: str) -> None:
    """A relative path counts for nothing: no file of ours is made wherever somebody happens to be."""
    assert str(own_directory(environ, "XDG_CONFIG_HOME", ".config")) == path


def _write(contexts: object, *, current: str | None = None) -> Path:
    path = contexts_path(os.environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"current": current, "contexts": contexts}))
    path.chmod(0o600)
    return path


def test_the_commands_of_contexts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is chosen, names are checked, and no key is shown."""
    for arguments, key in ((("lab", "http://lab:8080"), "secret\n"), (("lan", "unix:/run/x"), "")):
        monkeypatch.setattr("sys.stdin", _Input(key))
        assert main(["context", "add", *arguments]) == 0
    assert main(["context", "list"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert [line.split() for line in shown.splitlines()[3:]] == [
        ["*", "lab", "http://lab:8080", "in", "the", "file"],
        ["-", "lan", "unix:/run/x", "-"],
        ["-", "local", "the", "installation", "of", "this", "machine", "-"],
    ]
    tried: tuple[tuple[tuple[str, ...], int], ...] = (
        (("use", "lan"), 0),
        (("rm", "lan"), 0),
        (("use", "lan"), 125),
        (("rm", "local"), 125),
        (("add", "local", "http://x"), 2),
        (("add", "x/y", "http://x"), 2),
        (("add", "x", "x:80"), 2),
        (("use", "local"), 0),
    )
    for words, status in tried:
        assert main(["context", *words]) == status, words
    assert main(["context", "list", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(each["name"], each["current"]) for each in lines] == [("lab", False), ("local", True)]


def test_changes_at_the_same_time_are_all_kept() -> None:
    """A process that changes the file waits for another that does."""

    def add(name: str) -> None:
        with changed_contexts(os.environ) as contexts:
            contexts.by_name[name] = NamedServer(f"http://{name}")

    with changed_contexts(os.environ) as contexts:
        other = threading.Thread(target=add, args=("b",))
        other.start()
        other.join(0.2)
        contexts.by_name["a"] = NamedServer("http://a")
    other.join()
    assert set(read_contexts(os.environ).by_name) == {"a", "b"}


class _Input:
    def __init__(self, text: str) -> None:
        self._text = text

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        return self._text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"contexts": []}', '{"contexts": {"a": 1}, "current": null}', '{"contexts": {}}', "\xff"]
)
def test_a_damaged_file_is_refused(text: str) -> None:
    """In a sentence that names the file."""
    path = _write({})
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"contexts\.json is damaged"):
        choose_server(os.environ)


def test_a_file_that_others_may_use_is_refused() -> None:
    """The file has keys, and commands that are run."""
    path = _write({"a": {"url": "http://a"}}, current="a")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            choose_server(os.environ)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 1000, -1)
        with pytest.raises(ConfigError, match="belongs to user 1000"):
            choose_server(os.environ)


def test_the_daemon_tells_where_it_listens(tmp_path: Path) -> None:
    """For its user alone, whatever was there before; the key is the environment's, the configuration's, the file's."""
    with pytest.raises(ConfigError, match="no server runs here"):
        find_local(None, tmp_path, {})
    (tmp_path / "listening.new").symlink_to("/etc/passwd")
    tell_listening(tmp_path, ["http://[::]:8080"])
    assert (tmp_path / LISTENING_NAME).stat().st_mode & 0o777 == 0o600
    (tmp_path / "api-key").write_text("of the file\n")
    config = tmp_path / "c.yaml"
    config.write_text(f"data_dir: {tmp_path}\napi_key: of the configuration\nlisten: ignored\n")
    assert find_local(None, tmp_path, {}).api_key == "of the file"
    found = find_local(config, None, {})
    assert (found.url, found.api_key) == ("http://[::1]:8080", "of the configuration")
    assert find_local(config, None, {"SANDKASTEN_API_KEY": "given"}).api_key == "given"
    config.chmod(0o666)
    with pytest.raises(ConfigError, match="other users may write"):
        find_local(config, None, {})
    for text in ("", "[]", '{"addresses": []}', '{"addresses": 1}'):
        (tmp_path / LISTENING_NAME).write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            find_local(None, tmp_path, {})
    (tmp_path / LISTENING_NAME).unlink()
    os.mkfifo(tmp_path / LISTENING_NAME)
    with pytest.raises(ConfigError, match="damaged"):
        find_local(None, tmp_path, {})
    forget_listening(tmp_path)
    forget_listening(tmp_path)


_LINES = st.lists(
    st.one_of(
        st.sampled_from(["# words: of \ta person", "listen: 127.0.0.1:8080", "data_dir: /srv/a-b_c.d+e ", "---", ""]),
        st.sampled_from(
            ["  b", "data_dir: .data", "data_dir: 0x1f", "api_key: 0123", "data_dir: /:", "data_dir: /x #"]
        ),
        st.text("ad_: /.#'\"-\t\r\x0c\x85\u2028", max_size=12),
    )
)


@given(_LINES)
def test_plain_lines_are_read_as_yaml_reads_them(lines: list[str]) -> None:
    """Without PyYAML, or not at all."""
    text = "\n".join(lines)
    if (settings := plain_settings(text.encode().decode("latin-1"))) is not None:
        tree = yaml.safe_load(text) or {}
        assert tree.keys() == settings.keys()
        assert [tree.get(name) for name in ("data_dir", "api_key")] == [settings.get("data_dir"), None]


# Tables and figures


@pytest.mark.parametrize(
    ("size", "shown"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (1e18, "909495 TiB")],
)
def test_sizes_are_for_people(size: float | None, shown: str) -> None:
    """In the unit that leaves a few digits."""
    assert output.size_text(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h"), (90_000, "1d 1h"), (86_405, "1d")]
)
def test_spans_are_for_people(seconds: float, shown: str) -> None:
    """In their largest units; a clock that went backwards is no time at all."""
    assert output.span_text(seconds) == shown


@pytest.mark.parametrize("seconds", [-90.5, 90.5])
def test_a_moment_is_told_by_the_clock_of_this_machine(seconds: float) -> None:
    """The distance from now, also of a moment that is ahead, as where the server's clock is ahead of ours."""
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    assert output.since_text(moment.isoformat()) == "1m 30s"
    assert output.since_text(None) == "never"


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_a_table_has_a_line_for_each_row_and_obeys_no_cell(rows: Sequence[tuple[str, str]]) -> None:
    """Text of any kind may be in the cells."""
    lines = output.table(("A", "B"), rows)
    assert len(lines) == len(rows) + 1
    assert all(line.isprintable() for line in lines)


def test_columns_stand_below_each_other() -> None:
    """Also of wide and of combining characters."""
    assert output.table(("A", "B"), [("漢字", "x"), ("e\u0301", "y"), ("", "z")]) == [
        "A     B",
        "漢字  x",
        "e\u0301     y",
        "-     z",
    ]


class _Listing(BaseHTTPRequestHandler):
    """A server whose sessions have ids of its own choice."""

    ids = ("0123456789abcdef01234567", "$(touch ran)", "\x1b[2J", "0123456789abcdef01234567\n-rf")

    def do_GET(self) -> None:
        fields = dict.fromkeys(("image", "status", "cwd"), "x") | {"created_at": "2026-01-01T00:00:00Z"}
        body = json.dumps([fields | {"id": each, "expires_at": None} for each in self.ids]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


def test_ids_alone_are_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell splits and expands what `ps -q` prints, and a terminal obeys it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Listing) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            monkeypatch.setenv("SANDKASTEN_URL", f"http://127.0.0.1:{server.server_port}")
            done = subprocess.run(
                [sys.executable, "-m", "sandkasten", "ps", "-q"], capture_output=True, text=True, check=True
            )
        finally:
            server.shutdown()
    assert done.stdout.split("\n") == [_Listing.ids[0], ""]


@pytest.mark.parametrize(("sign", "width"), [("x", 1), ("漢", 2), ("e\u0301", 1)])
def test_a_text_is_cut_to_its_cells_at_once(sign: str, width: int) -> None:
    """However long another user made it."""
    assert output.cut(sign * 5, 5 * width) == sign * 5
    assert output.cut(sign * 5, 4 * width) == sign * (4 - 1) + "…"
    began = time.process_time()
    output.cut(sign * 100_000, 80)
    assert time.process_time() - began < 5


# The terminal


@given(st.lists(st.binary(max_size=6)))
def test_keys_come_through_whole_but_for_the_two_that_detach(pieces: Sequence[bytes]) -> None:
    """Readings may be cut anywhere."""
    keys, sent, typed = Keys(), b"", b"".join(pieces)
    for piece in pieces:
        more, is_over = keys.feed(piece)
        sent += more
        if is_over:
            break
    assert sent + keys.flush() == typed.partition(b"\x10\x11")[0]


@pytest.mark.parametrize(
    ("written", "undone"),
    [
        (b"plain \x1b[31mred", b""),
        (b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"),
        (b"\x1b[?1049h vim \x1b[?1049l", b""),
        (b"\x1b[?25l\x1b[?25h\x1b[?7h\x1b[?12l", b""),
        (b"\x1b[?1000;1006h\x1b[?1006l\x1b[?2004h", b"\x1b[?1000l\x1b[?2004l"),
        (b"\x1b[?;h\x1b[?999999999999h\x1b[?h\x1b[?" + b"1" * 100 + b"h", b""),
    ],
)
def test_modes_that_are_left_on_are_switched_off(written: bytes, undone: bytes) -> None:
    """Wherever the output is cut."""
    for at in range(len(written)):
        modes = Modes()
        modes.feed(written[:at])
        modes.feed(written[at:])
        assert modes.undo() == b"\x1b\\\x1b[0m" + undone + PLAIN
        assert modes.undo() == b"\x1b\\\x1b[0m" + PLAIN


def test_an_answer_of_the_terminal_is_no_input_of_the_shell() -> None:
    """A program that asks where the cursor is, and ends, types nothing to whoever reads next."""
    code = (
        "import select\nfrom sandkasten.cli.terminal import RawTerminal\n"
        "with RawTerminal():\n  print('ready', flush=True); select.select([0], [], [])\n"
        "print(select.select([0], [], [], 0)[0])"
    )
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave) as process:
        os.close(slave)
        seen = b""
        while b"ready" not in seen:
            seen += os.read(master, 100)
        os.write(master, b"\x1b[1;1R")
        while b"]\r\n" not in seen:
            seen += os.read(master, 100)
        assert process.wait() == 0
    os.close(master)
    assert seen.endswith(b"[]\r\n")


def test_a_signal_of_an_inner_block_is_the_outer_one_s_again() -> None:
    """The process lives on, and behind the last block has the disposition from before; an ignored signal stays so."""
    number, told = signal.SIGHUP, list[str]()
    before = signal.signal(number, signal.SIG_DFL)

    async def send() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)

    async def nested() -> None:
        with heeding(lambda _number: told.append("outer"), number):
            for _ in range(2):
                with heeding(lambda _number: told.append("inner"), number):
                    await send()
                await send()
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with heeding(lambda _number: told.append("ignored"), number):
            await send()

    try:
        asyncio.run(nested())
    finally:
        signal.signal(number, before)
    assert told == ["inner", "outer"] * 2


# The command as a whole


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_loads_nothing_heavy(verb: str) -> None:
    """A page at once, without the SDK or a package of the server."""
    code = (
        "import sys, contextlib\nfrom sandkasten.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main([{verb!r}, '--help'])\n"
        "print(sorted({'trio', 'attrs', 'yaml', 'asyncio', 'anyio', 'sandkasten.sdk.client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(f"usage: sandkasten {verb}")
    assert last == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_of_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell itself finds no fault with it, where it is installed."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert {verb for verb in VERBS if verb not in script} == set()
    if (program := shutil.which(shell)) is not None:
        checked = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_runs_nothing_that_a_server_answers(shell: str, tmp_path: Path) -> None:
    """Words are no commands, whatever signs they have."""
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    script = (
        'eval "$(python -m sandkasten completion bash)"; complete() { :; }\n'
        "sandkasten() { echo '$(touch ran) `touch ran` abc'; echo abd; }\n"
        'try() { COMP_WORDS=(sandkasten exec "$1"); COMP_CWORD=2; _sandkasten; echo "${COMPREPLY[*]}"; }\n'
        "try ab; try '$'; try x; try"
    )
    begin = "" if shell == "bash" else "emulate -L sh; setopt kshglob kshzerosubscript ksharrays; complete() { :; }\n"
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [program, "-c", begin + script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["abc abd", "$(touch", "", "$(touch ran) `touch ran` abc abd -"]
    assert not (tmp_path / "ran").exists()


def test_words_behind_the_double_dash_are_the_command_s() -> None:
    """None of them is an option of ours, and a second double dash is one of them."""
    done = subprocess.run(
        [sys.executable, "-m", "sandkasten", "run", "--context", "none", "--", "--help", "--", "-x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("sandkasten: there is no context 'none'")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """The status is that of SIGPIPE."""
    command = f"{sys.executable} -m sandkasten completion fish | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) in (("141\n", ""), ("0\n", ""))


def test_steps_are_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of the step that began, its name, and the time so far; the last state stays."""
    master, slave = pty.openpty()
    try:
        termios.tcsetwinsize(slave, (24, 80))
        with open(slave, "w", closefd=False) as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            bar = output.StepProgress("python")
            bar.step = "installing\x1b[2J"
            bar(5, 8)
            bar.close()
        drawn = b""
        while not drawn.endswith(b"\n"):
            drawn += os.read(master, 4096)
        assert re.sub(r"\d+s", "0s", drawn.decode()) == (
            "\rpython  ████████████░░░░░░░░ 5/8  installing\\x1b[2J  0s\x1b[K" * 2 + "\r\n"
        )
    finally:
        os.close(master)
        os.close(slave)
    monkeypatch.undo()
    quiet = output.StepProgress("python", is_off=True)
    quiet(5, 8)
    quiet.close()
    assert capsys.readouterr().err == ""
