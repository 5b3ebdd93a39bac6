"""A seed of the `sandkasten` command: a process that has imported what its verbs import, and forks for each start.

Two thirds of the processor time of a daemon's start, and nearly all of a client verb's, are the imports, the same each
time. A fork of the seed is a child of the test process, and goes on with `sandkasten.cli.main.main` as the console
script does: with the words, environment, directory and files of its own. The trials of the machine are the seed's, too:
a daemon makes them once, whatever its data directory, and there they take as long as a quarter of its start.
`/proc/PID/cmdline` and `environ` are the seed's: tests that look there, or are about the start itself, execute the
script, as does whoever has planted no seed.
"""

from __future__ import annotations

import array
import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandkasten.cli.main import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(sys.executable).parent / "sandkasten"
NAME = "tests-seed"
_SERVE, _CLIENT = "serve", "client"
_IMPORTED = {
    _SERVE: ("sandkasten.cli.operator", "sandkasten.cli.serve", "sandkasten.api.app"),
    _CLIENT: (
        *(
            f"sandkasten.cli.{name}"
            for name in ("runs", "sessions", "transfer", "nodes", "secrets", "output", "terminal")
        ),
        *("sandkasten.sdk", "asyncio", "anyio._backends._asyncio"),
    ),
}
"""Modules by kind: a client verb has none of the server's, and behaves as if some others were not installed."""
_HIGH_FD = 64

_seeds: dict[str, socket.socket] = {}


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Start commands of this process from seeds, which end with the block."""
    with contextlib.ExitStack() as stack:
        for kind in _IMPORTED:
            _seeds[kind] = stack.enter_context(_one_seed(kind))
            stack.callback(_seeds.pop, kind)
        yield


@contextlib.contextmanager
def _one_seed(kind: str) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            # Its standard files are pipes, as those of most forks will be: Python chooses the buffers at its start.
            seed = subprocess.Popen(
                [sys.executable, __file__, kind, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        with seed:
            yield ours
            ours.close()


def _seed_for(words: Sequence[str]) -> socket.socket | None:
    verb = words[0] if words else ""
    if verb not in VERBS or VERBS[verb][0] == "main":
        return None
    return _seeds.get(_CLIENT if VERBS[verb][0] != "operator" else _SERVE)


_EXECUTE_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Command(subprocess.Popen[Any]):
    """The command, as `subprocess.Popen` starts it, forked from a seed if there is one. A seed heeds the options for
    standard files, environment, directory and session."""

    def __init__(self, words: Sequence[str | Path], **options: Any) -> None:
        super().__init__([str(SCRIPT), *map(str, words)], **options)

    def _execute_child(self, *given: Any) -> None:
        named = _EXECUTE_CHILD.bind(self, *given).arguments
        words, environment = named["args"], dict(named["env"] or os.environ)
        seed = _seed_for(words[1:])
        if seed is None or named["preexec_fn"] is not None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        start = words, environment, str(named["cwd"] or os.getcwd()), named["start_new_session"]
        files = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        stdin, _, _, stdout, _, stderr = files
        descriptors = [fd if fd >= 0 else number for number, fd in enumerate((stdin, stdout, stderr))]
        socket.send_fds(seed, [json.dumps(start).encode()], descriptors)
        (self.pid,) = array.array("i", seed.recv(4))
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def completed(
    *words: str | Path, given: str | bytes = "", timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run the command to its end and return what it printed."""
    pipe = subprocess.PIPE
    with Command(words, stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, err = process.communicate(given, timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _main() -> None:
    import fcntl
    from importlib import import_module

    from nsinit.kernel import syscalls
    from sandkasten.cli import client

    sys.path.append(str(ROOT))
    from tests.forks import next_fork

    sys.path.pop()  # a fork finds what the script finds
    kind = sys.argv[1]
    if kind == _CLIENT:
        for name in client._NEEDLESS:
            sys.modules[name] = None  # type: ignore[assignment]  # as the verbs do
    for name in _IMPORTED[kind]:
        import_module(name)
    at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever types Ctrl-C means the tests
    if kind == _SERVE:
        import_module("sandkasten.host.examine").examine(Path(tempfile.gettempdir()))  # is made once by a process
        tempfile.tempdir = None  # a fork's is that of its own environment, and of its own rights
    if (made := next_fork(socket.socket(fileno=int(sys.argv[2])), NAME, 3)) is None:
        return
    data, fds = made
    words, environment, directory, new_session = json.loads(data)
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]):
        os.dup2(fd, number)
    syscalls.close_range(3)
    syscalls.set_name(SCRIPT.name)
    signal.signal(signal.SIGINT, at_interrupt)
    if new_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path[0] = str(SCRIPT.parent)
    sys.exit(main())


if __name__ == "__main__":
    _main()
