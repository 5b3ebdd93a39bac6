"""A person at the agent's own shell: prompt, lines, Ctrl-C, and that the shell stays what it was."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from runner.wire.protocol import Cancel, Done, Error, Exec, ExecReply, Kind, Signal, TerminalSize
from tests.kernel.runner_harness import Client, Sandbox, needs_namespaces

pytestmark = needs_namespaces

SIZE = TerminalSize(100, 30)
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"
PROMPT = b"sandbox:/mnt/workspace$ "
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\r|\x07")

Begin = Callable[[], None]


def ending(reply: ExecReply) -> tuple[int, int | None, str, bool]:
    return reply.exit_code, reply.signal, reply.cause, reply.shell_restarted


def read_until(client: Client, text: bytes) -> bytes:
    """Return what the screen showed, without escape sequences, once that ends in `text`."""
    seen = b""
    while not _ESCAPES.sub(b"", seen).endswith(text):
        kind, body = client.next_frame()
        assert kind in (Kind.STDOUT, Kind.STARTED), (kind, body)
        seen += body if kind is Kind.STDOUT else b""
    return _ESCAPES.sub(b"", seen)


def sit_down(client: Client, prompt: bytes = PROMPT) -> None:
    client.request(Exec("x", "", terminal=SIZE, interactive=True))
    read_until(client, prompt)


def enter(client: Client, line: str, prompt: bytes = PROMPT) -> bytes:
    """Type a line and return what came before the next prompt, without its own echo."""
    client.send(Kind.DATA, line.encode() + b"\r")
    shown = read_until(client, prompt)
    return shown.removesuffix(prompt).partition(b"\n")[2]


def leave(client: Client) -> ExecReply:
    client.send(Kind.DATA, CTRL_D)
    reply = client.outcome().reply
    assert isinstance(reply, ExecReply)
    return reply


def test_it_is_the_agents_shell(client: Client) -> None:
    """Variables, functions, aliases and directory go both ways; the shell process is the same."""
    pid = client.stdout("a=1; f() { echo f$1; }; alias hi='echo hello'; echo $$")
    sit_down(client)
    assert enter(client, "echo $a; f 2; hi; echo $$") == b"1\nf2\nhello\n" + pid
    assert enter(client, "export B=3; c=4; g() { echo g; }; cd /tmp", b"sandbox:/tmp$ ") == b""
    assert ending(leave(client)) == (0, None, "exited", False)
    assert client.stdout("echo $B$c $PWD $$; g") == b"34 /tmp " + pid + b"g\n"


def test_the_status_of_a_line_is_the_next_ones(client: Client) -> None:
    """The status of a line is `$?` in the next one; that of the last line is the reply's."""
    client.run("(exit 3)")
    sit_down(client)
    assert enter(client, "echo $?; (exit 4)") == b"3\n"
    assert enter(client, "echo $?; (exit 5)") == b"4\n"
    assert ending(leave(client)) == (5, None, "exited", False)


@pytest.mark.parametrize(("line", "code"), [("exit", 7), ("exit 9", 9), ("logout", 7)])
def test_exit_leaves_the_terminal_and_keeps_the_shell(client: Client, line: str, code: int) -> None:
    """`exit` at the prompt ends the visit and not the agent's shell."""
    client.run("x=kept")
    sit_down(client)
    enter(client, "(exit 7)")
    client.send(Kind.DATA, line.encode() + b"\r")
    reply = client.outcome().reply
    assert ending(reply) == (code, None, "exited", False)
    assert client.stdout("echo $x") == b"kept\n"


def test_an_exit_inside_a_line_ends_the_shell(client: Client) -> None:
    """`exit` within a longer line ends the shell, as in any command; the next shell has the saved state."""
    sit_down(client)
    client.send(Kind.DATA, b"export A=1; exit 6\r")
    assert ending(client.outcome().reply) == (6, None, "exited", True)
    assert client.stdout("echo $A") == b"1\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["if true", "then echo yes", "fi"], b"yes\n"),
        (["for i in 1 2", "do", "echo $i", "done"], b"1\n2\n"),
        (["echo 'a", "b'"], b"a\nb\n"),
        (['echo "a', 'b"'], b"a\nb\n"),
        (["echo a\\", "b"], b"ab\n"),
        (["h() {", "echo h", "}; h"], b"h\n"),
        (["echo $(", "echo in", ")"], b"in\n"),
        (["true &&", "echo and"], b"and\n"),
    ],
)
def test_an_unfinished_text_goes_on(client: Client, lines: list[str], expected: bytes) -> None:
    """An unfinished line is continued at the second prompt."""
    sit_down(client)
    for line in lines[:-1]:
        assert enter(client, line, b"> ") == b""
    assert enter(client, lines[-1]) == expected
    assert ending(leave(client)) == (0, None, "exited", False)


def test_a_here_document_goes_on_in_bash(sandbox: Sandbox) -> None:
    """An unfinished here-document is continued in bash; the other shells can't tell that it is unfinished."""
    client = sandbox.shell("bash")
    sit_down(client)
    for line in ("cat <<X", "in", "it"):
        enter(client, line, b"> ")
    assert enter(client, "X") == b"in\nit\n"


@pytest.mark.parametrize("line", ["fi", "echo )", "nosuchcommand", ". /nowhere", "cd /nowhere"])
def test_an_error_brings_the_prompt_back(client: Client, line: str) -> None:
    """The error is told, and the shell and its terminal stay."""
    client.run("y=kept")
    sit_down(client)
    assert enter(client, line) != b""
    assert enter(client, "echo $y") == b"kept\n"
    leave(client)
    assert client.stdout("echo $y") == b"kept\n"


@pytest.mark.parametrize(
    "line", ["sleep 1234", "while :; do :; done", "f() { while :; do g; done; }; g() { :; }; f", "sleep 1234; echo no"]
)
def test_ctrl_c_leaves_the_line(client: Client, line: str) -> None:
    """The prompt is back, the status is 130, and the rest of the line has not run."""
    sit_down(client)
    client.send(Kind.DATA, f"echo go; {line}\r".encode())
    read_until(client, b"go\n")
    client.send(Kind.DATA, CTRL_C)
    assert b"no\n" not in _until_prompt(client)
    assert enter(client, "echo $?") == b"130\n"
    assert ending(leave(client)) == (0, None, "exited", False)


def _until_prompt(client: Client) -> bytes:
    """Wait for the prompt, pressing the key again if it came between two programs."""
    patience_s = client.sock.gettimeout()
    client.sock.settimeout(1)
    for _ in range(10):
        try:
            shown = read_until(client, PROMPT)
        except TimeoutError:
            client.send(Kind.DATA, CTRL_C)
        else:
            client.sock.settimeout(patience_s)
            return shown
    raise AssertionError("the key did nothing")


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "in two"])
def test_what_is_typed_right_after_ctrl_c_is_not_hit_by_it(client: Client, *, at_once: bool) -> None:
    """Input right after Ctrl-C, a line or the end-of-file key, is not dropped: pasted text and programs type fast."""
    sit_down(client)
    pieces = [CTRL_C, b"sleep 0.05; echo o''k\r"]
    for piece in [b"".join(pieces)] if at_once else pieces:
        client.send(Kind.DATA, piece)
    assert b"ok\n" in read_until(client, b"ok\n" + PROMPT)
    client.send(Kind.DATA, CTRL_C + CTRL_D if at_once else CTRL_C)
    assert leave(client).cause == "exited"


def test_keys_right_after_ctrl_c_wait_for_the_prompt(sandbox: Sandbox) -> None:
    """A key is not typed while bash makes its prompt: the terminal edits lines then, and readline would miss it."""
    client = sandbox.shell("bash")
    client.run("export PS1='$(sleep 0.05)> '")
    sit_down(client, b"> ")
    for piece in (CTRL_C, CTRL_C + b"echo o''k\r"):
        client.send(Kind.DATA, piece)
        client.read_until(b"\r\n")
    assert b"ok\n" in read_until(client, b"ok\n> ")
    client.send(Kind.DATA, CTRL_C)
    client.read_until(b"\r\n")
    assert leave(client).cause == "exited"


def test_ctrl_c_at_the_prompt_drops_what_was_typed(client: Client) -> None:
    """Ctrl-C at the prompt drops this line and the unfinished text before it."""
    sit_down(client)
    enter(client, "if true", b"> ")
    client.send(Kind.DATA, b"then oops")
    read_until(client, b"then oops")
    client.send(Kind.DATA, CTRL_C)
    read_until(client, PROMPT)
    assert enter(client, "echo on") == b"on\n"


def test_bash_has_a_history_and_editing(sandbox: Sandbox) -> None:
    """Lines can be edited and recalled, also those of an earlier visit."""
    client = sandbox.shell("bash")
    sit_down(client)
    assert enter(client, "echo one") == b"one\n"
    leave(client)
    sit_down(client)
    client.send(Kind.DATA, UP + b"\x17two\r")
    assert read_until(client, PROMPT).endswith(b"two\n" + PROMPT)


def test_the_prompt_is_the_users(client: Client) -> None:
    """The prompts are PS1 and PS2 as the shell has them."""
    client.run("export PS1='me> ' PS2='more> '")
    sit_down(client, b"me> ")
    enter(client, "echo 'a", b"more> ")
    assert enter(client, "b'", b"me> ") == b"a\nb\n"


def test_a_bash_prompt_is_expanded(sandbox: Sandbox) -> None:
    """Escapes in a prompt are expanded as bash itself does."""
    client = sandbox.shell("bash")
    client.run("export PS1='\\[\\e[1m\\][\\w $((1+1))]\\$ '; cd /tmp")
    sit_down(client, b"[/tmp 2]$ ")


def test_cancelling_keeps_the_shell(client: Client, sandbox: Sandbox) -> None:
    """A visit cancelled at the prompt or within a line keeps the shell; a later visit works like the first."""
    client.run("x=kept")
    for line in (b"", b"half a l", b"sleep 1234\r", b"while :; do :; done\r"):
        sit_down(client)
        client.send(Kind.DATA, line)
        if line:
            read_until(client, line.rstrip() + (b"\n" if line.endswith(b"\r") else b""))
        assert sandbox.connect().ask(Cancel("x")) == Done()
        assert ending(client.outcome().reply) == (130, None, "cancelled", False)
    sit_down(client)
    assert enter(client, "echo $x") == b"kept\n"
    leave(client)
    assert client.stdout("set | grep -c '^__sk_[dpquvwy]='") == b"0\n"


def test_an_interrupt_by_id_is_a_ctrl_c(client: Client, sandbox: Sandbox) -> None:
    """Ctrl-C ends the line, not the visit."""
    sit_down(client)
    client.send(Kind.DATA, b"echo go; sleep 1234\r")
    read_until(client, b"go\n")
    assert sandbox.connect().ask(Signal("x", signal.SIGINT)) == Done()
    _until_prompt(client)
    assert enter(client, "echo $?") == b"130\n"


@pytest.mark.parametrize("option", ["set -e", "set -u"])
def test_strict_shells_can_be_visited(client: Client, option: str) -> None:
    """The options of the agent's shell are not turned against the prompt."""
    client.run(f"{option}; x=kept")
    sit_down(client)
    assert enter(client, "echo on") == b"on\n"
    assert ending(leave(client)) == (0, None, "exited", False)
    assert client.stdout("echo $x") == b"kept\n"


def test_a_program_has_the_terminal(client: Client) -> None:
    """The program reads keys, knows the size, and ends with its line."""
    sit_down(client)
    assert enter(client, "stty size") == b"30 100\n"
    client.send(Kind.DATA, b"echo ready; cat\r")
    read_until(client, b"cat\nready\n")
    client.send(Kind.DATA, b"typed\n")
    read_until(client, b"typed\ntyped\n")
    client.send(Kind.DATA, CTRL_D)
    read_until(client, PROMPT)
    leave(client)


def test_nobody_reads_lines_without_a_terminal(sandbox: Sandbox) -> None:
    """The request is refused, not hung."""
    client = sandbox.shell()
    answer = client.ask(Exec("x", "", interactive=True))
    assert isinstance(answer, Error)
    assert answer.code == "BAD_REQUEST"
