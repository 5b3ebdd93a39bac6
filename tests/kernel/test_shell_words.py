"""Errors and traces of a shell are those that it would write of the same text after `-c`.

Tried in the shell of the session, in named shells, as programs of their own, and on each of the ways on which a command
comes to its shell: plain, with variables and a directory of its own, with input.
"""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from runner.wire.protocol import OpenShell, RunProgram, ShellInfo
from tests.kernel.runner_harness import SHELLS, Client, Sandbox, needs_namespaces

pytestmark = needs_namespaces

INTERNALS = (b"/run/sandkasten", b"__sk_", b"/dev/fd")
WAYS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"env": {"V": "1"}, "cwd": "/tmp"}, id="env"),
    pytest.param({"stdin": b"x"}, id="stdin"),
    pytest.param({"env": {"V": "1"}, "stdin": b"x"}, id="both"),
]

TEXTS = [
    "nosuch",
    "\n\nnosuch",
    "true &&\n  nosuch",
    "for i in 1 2; do\n  nosuch $i\ndone",
    "cd /nowhere",
    "echo $((08))",
    "readonly R=1; R=2",
    "cat </nowhere",
    "sh -c 'kill -9 $$'; true",
    "echo a; echo ${unset?}",
    "cat <<X\nbody",
    "set -u\necho $unset",
    "type nosuch; kill %9; shift 9",
    "x=$(nosuch)\n\n(nosuch)",
]
"""Texts of which bash writes the same here and after `-c`."""


def _of_bash(text: str) -> bytes:
    """Return what `bash -c` writes to standard error, without the pids in it."""
    run = subprocess.run(["bash", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, env={"LC_ALL": "C"})
    return _without_pids(run.stderr)


def _without_pids(text: bytes) -> bytes:
    return re.sub(rb": +[0-9]+ +Killed", b": Killed", text)


@pytest.fixture
def bash(sandbox: Sandbox) -> Client:
    return sandbox.shell("bash", env={"LC_ALL": "C"})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", TEXTS)
def test_bash_writes_what_it_would_write_after_c(bash: Client, text: str, way: dict[str, Any]) -> None:
    """Name, line and words are the same."""
    said = bash.run(text, **way).stderr
    assert said.startswith(b"bash: line ")
    assert _without_pids(said) == _of_bash(text)


@pytest.mark.parametrize("text", ["echo a\necho 'b", "echo a\nif then\nfi", "echo )", "case x in"])
def test_bash_names_the_line_of_a_syntax_error(bash: Client, text: str) -> None:
    """As after `-c`, in the name of `eval`."""
    assert bash.run(text).stderr == _of_bash(text).replace(b"bash: -c: ", b"bash: eval: ")


def test_a_function_of_an_earlier_command_has_the_lines_of_that(bash: Client) -> None:
    """bash counts the lines of a function from the text that has defined it, a sourced file by the file's name."""
    bash.run("\nf() {\n  nosuch\n}\necho nosuch >lib; echo 'g() { nosuch; }' >>lib")
    assert bash.run("true\nf").stderr == b"bash: line 3: nosuch: command not found\n"
    assert bash.run(". ./lib").stderr == b"./lib: line 1: nosuch: command not found\n"
    assert bash.run("g").stderr == b"./lib: line 2: nosuch: command not found\n"


def test_bash_knows_its_lines_and_files(bash: Client) -> None:
    """`$LINENO`, `$0`, `$BASH_SOURCE`, `caller` and a trap on ERR; a text that asks whether it was sourced was not."""
    assert bash.stdout('echo $LINENO\necho $LINENO $0 "${BASH_SOURCE[@]}"') == b"1\n2 bash bash\n"
    assert bash.stdout("f() { caller 0; }\n\nf") == b"3 source bash\n"
    assert bash.stdout('[ "$0" = "${BASH_SOURCE[0]}" ] && dirname "${BASH_SOURCE[0]}"') == b".\n"
    assert bash.stdout("trap 'echo failed in line $LINENO of $BASH_SOURCE' ERR\n\nfalse") == (
        b"failed in line 3 of bash\n"
    )


def test_the_status_of_the_last_command_sets_no_trap_off(bash: Client) -> None:
    """A command finds the status of the one before; that is no failure of its own."""
    bash.run("trap 'echo ERR' ERR; (exit 3)")
    assert bash.stdout("echo $?") == b"3\n"
    assert bash.reply("trap - ERR; return 4").exit_code == 4
    bash.run("set +e; (exit 5)")
    assert bash.stdout("echo $?; set -e; true") == b"5\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", SHELLS)
def test_a_trace_that_stays_on_shows_commands_alone(sandbox: Sandbox, path: str, way: dict[str, Any]) -> None:
    """Nothing of the driver, whatever comes before and after the command; `$?` is that of the last command."""
    shell = sandbox.shell(path)
    shell.run("set -x; (exit 3)")
    outcome = shell.run("echo $?\necho two", **way)
    lines = outcome.stderr.splitlines()
    assert (outcome.stdout, [line.lstrip(b"+") for line in lines]) == (b"3\ntwo\n", [b" echo 3", b" echo two"])
    shell.run("set +x", **way)
    assert shell.run("echo quiet", **way).stderr == b""


@pytest.mark.parametrize("path", SHELLS)
def test_a_trace_survives_a_command_that_never_ran(sandbox: Sandbox, path: str) -> None:
    """A directory that can't be entered by the shell: the option stays what it was."""
    shell = sandbox.shell(path)
    shell.run("set -x; cd() { return 1; }")
    shell.run("echo ran", cwd="/tmp", env={"A": "1"})
    assert shell.stdout("case $- in *x*) echo on;; esac") == b"on\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", SHELLS)
def test_no_shell_tells_of_files_that_are_not_the_users(sandbox: Sandbox, path: str, way: dict[str, Any]) -> None:
    """In none of the shells, whatever goes wrong, and at the line that the command has it in."""
    shell = sandbox.shell(path)
    shell.run("readonly V=0")
    for text in ("\nnosuch", "\nif then", "\ncd /nowhere", "\n: ${unset?}", "\n. ./missing"):
        said = shell.run(text, **way).stderr
        assert b"2" in said, said
        assert not any(word in said for word in INTERNALS), said


@pytest.mark.parametrize(
    "lose", ["return 3", "OLDPWD=/etc; break", "mkdir d; cd d; return", "set -o posix; return", "cd /; return"]
)
def test_a_command_that_leaves_its_shells_loop_changes_no_word(bash: Client, lose: str) -> None:
    """bash reads its loop anew after a `return`, wherever it is; directories, options and aliases are as before."""
    bash.run(f"alias case=false; {lose.replace('return', 'OLDPWD=/etc; return')}")
    assert bash.run("\nnosuch").stderr.removeprefix(b"./") == b"bash: line 2: nosuch: command not found\n"
    assert bash.stdout("shopt expand_aliases sourcepath | grep -c on; cd -").endswith(b"2\n/etc\n")


def test_after_an_interrupt_the_words_are_the_same(bash: Client) -> None:
    """A command that its time limit ends."""
    bash.run("while :; do :; done", timeout_ms=50)
    assert bash.run("nosuch").stderr == b"bash: line 1: nosuch: command not found\n"


def test_a_named_shell_and_a_program_say_the_same(bash: Client) -> None:
    """A stateless command is a shell of its own."""
    assert isinstance(bash.ask(OpenShell("other", shell="bash")), ShellInfo)
    assert bash.run("\nnosuch", shell="other").stderr == b"bash: line 2: nosuch: command not found\n"
    bash.request(RunProgram("y", command="\nnosuch"))
    assert bash.outcome().stderr == b"bash: line 2: nosuch: command not found\n"


def test_all_bytes_of_a_text_arrive(bash: Client) -> None:
    """A text is handed over as one quoted word; bash has control characters of its own for quotes."""
    text = "".join(chr(code) for code in range(1, 256) if chr(code) != "'") + "'\"'\"'"
    assert bash.stdout(f"printf %s '{text}'") == (text[:-5] + "'").encode()


def test_a_text_is_no_variable_of_programs(bash: Client) -> None:
    """With every variable exported, a long command can still start programs."""
    bash.run("set -a")
    assert bash.stdout(f": {'x' * 200_000}\nenv | grep -c __sk_text") == b"0\n"
