"""A seed of nsinit: a process that has imported what nsinit imports, and forks for each start that a test asks for.

Two thirds of a start are the imports, the same each time, and some 600 kernel tests start an nsinit. A fork of the seed
is a child of the test process, and goes on with `nsinit.__main__.main` as if it had just been executed: by the same
interpreter with the same flags, environment, descriptors and signals. Tests over the command line, those that give
nsinit other surroundings, and the attempts of an attack's own process start it as a program. The keeper of a runner
without nsinit (`keeper.py`) is forked in the same way: a fork of the test process, and each fork of PID 1, would copy
the page tables of all that the tests have imported.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NSINIT = str(ROOT / "nsinit")
KEEPER = str(ROOT / "tests/kernel/keeper.py")
NAME = "tests-seed"
"""The seed's own process name; a fork has that of the interpreter."""

_CHANNEL_FD, _HIGH_FD = 3, 64

Spawn = Callable[..., int]


@contextlib.contextmanager
def planted(spawn: Spawn) -> Iterator[Spawn]:
    """Yield what starts nsinit from a seed; `spawn` starts that one, and every other program. The seed ends with the
    block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        seed = spawn(__file__, theirs.fileno(), 2)
        theirs.close()

        def start(program: str, channel_fd: int, log_fd: int, *arguments: str) -> int:
            if program not in (NSINIT, KEEPER):
                return spawn(program, channel_fd, log_fd, *arguments)
            socket.send_fds(ours, [json.dumps([program, *arguments]).encode()], [channel_fd, log_fd])
            (pid,) = array.array("i", ours.recv(4))
            return pid

        yield start
        ours.close()
        os.waitpid(seed, 0)


def _main() -> None:
    sys.path.append(str(ROOT))
    import fcntl

    from nsinit import __main__ as entry
    from nsinit.kernel import syscalls
    from nsinit.sandbox import child  # noqa: F401 - these and what they import is what `entry.main` does
    from nsinit.server import server  # noqa: F401
    from runner.server import main  # noqa: F401
    from tests.forks import next_fork
    from tests.kernel import keeper

    if (made := next_fork(socket.socket(fileno=_CHANNEL_FD), NAME, 2)) is None:
        return
    data, fds = made
    channel_fd, log_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds)
    syscalls.set_name(os.path.basename(sys.executable))
    os.dup2(channel_fd, _CHANNEL_FD)
    os.dup2(log_fd, 2)
    os.setsid()
    sys.argv = json.loads(data)
    if sys.argv[0] == KEEPER:
        keeper.main()
    entry.__file__ = f"{NSINIT}/__main__.py"
    entry.main()


if __name__ == "__main__":
    _main()
