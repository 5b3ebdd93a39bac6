"""Commands that other execution layers trip over, and what comes of each, whichever shell runs it.

Data only; `test_exec_table.py` runs them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from runner.wire.protocol import Kind, encode_frame

WORKSPACE = "/mnt/workspace"
SHELLS = ("bash", "dash", "busybox")


@dataclass(frozen=True)
class Row:
    """A command and its end. Streams that are None are not compared; a stuck command has `timeout_ms`."""

    name: str
    command: str
    stdout: bytes | None = b""
    stderr: bytes | None = b""
    exit_code: int = 0
    signal: int | None = None
    cause: str = "exited"
    ends: tuple[str, ...] = ()
    """The shells that are ended by it and replaced."""
    stdin: bytes | None = None
    timeout_ms: int = 20_000
    file: bytes = b""
    """Content of `bytes` in the working directory."""
    cwd: bytes | None = None
    """Where the shell is afterwards, beneath its directory; None: where it was."""
    leaves: str = ""
    """The name of the processes that it may leave running."""


def ended(name: str, command: str, code: int, number: int | None = None, cause: str = "exited") -> Row:
    """A command that ends its shell."""
    return Row(name, command, b"", None, code, number, cause, ends=SHELLS)


def stuck(name: str, command: str, *, milliseconds: int = 150) -> Row:
    """A command that ends by its time limit alone, with all it started; what comes after it never runs."""
    script = f"echo before; {command}\necho no"
    return Row(name, script, b"before\n", None, 124, None, "timed_out", timeout_ms=milliseconds)


def broken(name: str, command: str) -> Row:
    """A command that the shell gives up, with a word on stderr and a status of the shell's choosing."""
    return Row(name, command, b"", None, exit_code=-1)


def sabotage(name: str, command: str, **fields: object) -> Row:
    """A command that changes its shell in a way that a driver inside that shell could stumble over."""
    return Row(name, command, None, None, exit_code=-1, **fields)  # type: ignore[arg-type]


_RANDOM = random.Random(3).randbytes(200_000)
_FRAMES = b"".join(encode_frame(kind, b"x" * 9) for kind in Kind) + b"1 0\n0 r\n0 0\n" * 9
_BOTH = "cat bytes >&2; cat bytes"
_HOSTILE_NAME = b"a b:c\n\xff\xe2\x80\xa8d"
_DAEMON = """setsid sh -c 'trap "" INT TERM HUP; sleep 1234 & wait; sleep 1235' &"""
_BOMB = "command eval ':() { : | : & }' 2>/dev/null"
"""Fork bomb for shells that let a function be named `:`."""
_SPECIAL = (
    *(":", ".", "break", "continue", "eval", "exec", "exit", "export", "readonly", "set", "shift", "times", "trap"),
    *("umask", "test", "cd", "shopt"),
)
_SUBSHELL_ERRORS = ("(: </nowhere)", "(. /nowhere)", "(echo ${unset?})", "x=$(: </nowhere)", "(echo $((08)))")

STREAMS = [
    Row("no output", "true"),
    Row("no command", ""),
    Row("random bytes and NUL", _BOTH, _RANDOM, _RANDOM, file=_RANDOM),
    Row("text like frames and statuses", _BOTH, _FRAMES, _FRAMES, file=_FRAMES),
    Row("one line of 1.4 MB", _BOTH, b"x" * 1_400_000, b"x" * 1_400_000, file=b"x" * 1_400_000),
    Row("100 MB", "head -c 100000000 /dev/zero; echo end >&2", bytes(100_000_000), b"end\n"),
    Row("invalid UTF-8", r"printf 'o\000\377'; printf 'e\376' >&2", b"o\0\xff", b"e\xfe"),
    Row("half a character", r"printf '\342\202'; printf '\254' >&2", b"\xe2\x82", b"\xac"),
    Row("no final newline", "printf a; printf b >&2", b"a", b"b"),
    Row("a progress bar", r"printf '10%%\r20%%\r'; printf 'done\n'", b"10%\r20%\rdone\n"),
    Row("separators and escapes", r"printf '\342\200\250\302\205\033[2J'", "\u2028\u0085\x1b[2J".encode()),
    Row("streams by name", "echo o >/proc/self/fd/1; echo e | tee /proc/self/fd/2 >/dev/null", b"o\n", b"e\n"),
    Row("a pipe that closes", "yes | head -n 1", b"y\n"),
    Row("a late job", "mkfifo go; { cat go; echo stray; echo stray >&2; } & echo now", b"now\n", leaves="cat"),
    Row("a job", "sleep 1234 & echo now", b"now\n", leaves="sleep"),
]

INPUT = [
    *(Row(f"eats input: {each}", f"{each}; echo done", b"done\n") for each in ("cat", "cat | cat", "head -c 1")),
    Row("eats input: read", "read x; echo $?", b"1\n"),
    Row("eats input: a loop's", "printf 'a\\nb\\n' | while read x; do cat >/dev/null; echo $x; done", b"a\n"),
    Row("eats input: python3", "python3 -c 'import sys; print(sys.stdin.read())'; echo done", b"\ndone\n"),
    Row("input", "cat; cat", _RANDOM, stdin=_RANDOM),
    Row("no input", "cat; echo none", b"none\n", stdin=b""),
    Row("input that nobody reads", "head -c 1", b"x", stdin=b"x" * 500_000),
]

ENDINGS = [
    Row("a status", "(exit 42)", exit_code=42),
    Row("return", "return 5", exit_code=5),
    Row("no such command", "no-such-command", None, None, 127),
    Row("a program that is killed", "sh -c 'kill -9 $$'", None, None, 137, 9, "signalled"),
    ended("exit", "exit 3", 3),
    ended("exec", "exec sleep 0.01", 0),
    ended("exec of a stubborn one", "exec sh -c 'trap \"\" INT TERM; exit 4'", 4),
    ended("kill -9 of the shell", "kill -9 $$", 137, 9, "shell_died"),
    ended("kill -TERM of the shell", "kill -TERM $$; sleep 1234", 143, 15, "shell_died"),
    ended("set -e", "set -e; false", 1),
    Row("set -u", "set -u; echo $unset; echo no", b"", None, exit_code=-1, ends=("bash",)),
    broken("an open quote", "echo 'unclosed"),
    broken("an open double quote", 'echo "unclosed $('),
    Row("an open heredoc", "cat <<X\nbody", None, None, exit_code=-1),
    broken("an open condition", "if true; then"),
    broken("an open brace", "{ echo no"),
    broken("an open bracket", "echo $((1"),
    broken("a bracket too many", "echo )"),
    broken("a stray keyword", "fi"),
    *(Row(f"an error in {each}", f"{each}; echo on", b"on\n", None) for each in _SUBSHELL_ERRORS),
    Row("a deleted directory", "mkdir gone; cd gone; rmdir ../gone", cwd=b"gone"),
    Row("a hostile directory", "d=$(cat bytes); mkdir \"$d\"; cd \"$d\"", file=_HOSTILE_NAME, cwd=_HOSTILE_NAME),
]  # fmt: skip

STUCK = [
    stuck("sleep", "sleep 1234"),
    stuck("a child", "sh -c 'sleep 1234'"),
    stuck("a builtin loop", "while :; do :; done"),
    stuck("a function's loop", "f() { :; }; while :; do f; done"),
    stuck("nested functions", "f() { sleep 1234; echo no; }; g() { f; echo no; }; g; echo no; g"),
    stuck("a loop of children", "while :; do sleep 1234; done"),
    stuck("a pipeline", "sleep 1234 | cat"),
    stuck("a substitution", "y=$(sleep 1234; echo no)"),
    stuck("a subshell", "(while :; do :; done)"),
    stuck("wait", "sleep 1234 & wait"),
    stuck("arithmetic", "i=0; while [ $i -lt 1000000000 ]; do i=$((i+1)); done"),
    stuck("eval", "eval 'while :; do sleep 1234; done'"),
    stuck("a sourced file", "echo 'while :; do :; done; echo no' >lib; . ./lib"),
    stuck("read", "mkfifo p; read x <p"),
    stuck("a condition", "if sleep 1234; then echo no; fi; sleep 1234 && echo no || echo no"),
    stuck("a stopped shell", "kill -STOP $$"),
    stuck("a stopped child", "sh -c 'kill -STOP $$'"),
    stuck("a child that ignores signals", "sh -c 'trap \"\" INT TERM; while :; do sleep 1234; done'"),
    stuck("a shell that ignores signals", "trap '' INT TERM; sleep 1234"),
    stuck("a shell that ignores signals and loops", "trap '' INT TERM; while :; do :; done"),
    stuck("a double fork", f"{_DAEMON} sleep 1236"),
    stuck("a fork bomb", "b() { b | b & }; (b); while :; do :; done", milliseconds=300),
    stuck("a fork bomb of the usual name", f"{_BOMB}; (:); while true; do true; done", milliseconds=300),
    stuck("traps", "trap 'echo no' EXIT; trap ':' INT TERM; sleep 1234"),
]

SABOTAGE = [
    *(sabotage(f"set {each}", f"set {each}") for each in ("-u; set -f", "-x", "-C", "-v", "-a")),
    sabotage("functions named command, read, echo", "command() { :; }; read() { echo no; }; echo() { :; }"),
    sabotage("functions named source, printf, builtin", "source() { :; }; printf() { :; }; builtin() { :; }"),
    *(
        sabotage(f"a function named {each}", f"command eval '{each}() {{ echo no; sleep 2; return 1; }}'")
        for each in _SPECIAL
    ),
    sabotage("aliases", "alias command=false read=false echo=false unset=false case=false"),
    sabotage("IFS", "IFS=0123456789"),
    sabotage("PATH", "PATH=/nowhere"),
    sabotage("an EXIT trap", "trap 'echo trapped' EXIT"),
    sabotage("a DEBUG trap", "trap ':' DEBUG"),
    sabotage("an ERR trap", "trap 'echo no' ERR"),
    sabotage("a RETURN trap", "trap 'echo no' RETURN"),
    sabotage("prompts", "PROMPT_COMMAND='echo no'; PS1='$(echo no)'; PS2=no; PS4=no"),
    sabotage("exec 3>&1", "exec 3>&1 4>&2; exec </dev/null >/dev/null 2>&1"),
    sabotage("exec >file", "exec >log; echo in-log"),
    sabotage("every descriptor closed", "exec 0<&- 1>&- 2>&-"),
    sabotage("every number taken", 'for fd in 3 4 5 6 7 8 9; do eval "exec $fd>&1"; done'),
    sabotage("a huge variable", 'big=$(head -c 100000 /dev/zero | tr "\\0" x)'),
]

ROWS = [*STREAMS, *INPUT, *ENDINGS, *STUCK, *SABOTAGE]
