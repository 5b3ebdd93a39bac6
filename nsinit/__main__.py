"""Entry of the fork server: `python -I -S -B <directory of this file> [GRANT]`. Descriptor 3 leads to the daemon.

Owns the state of the process before its first fork: every module imported that PID 1 of a sandbox will ever need (no
import works there), no descriptor inherited, not dumpable, one thread. Holds no secret. The argument comes from root,
and says what a daemon that is not root may ask for (`wire/launching.py`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsinit.sandbox.child import Runner
    from nsinit.sandbox.init_steps import Init

_CHANNEL_FD = 3
_CODECS = ("utf-8", "ascii", "latin-1", "idna")


def main() -> None:
    """Prepare the process and serve."""
    gc.disable()  # until all is imported: each collection looks at all of it again
    _find_modules()
    import socket

    from nsinit.server.server import serve
    from nsinit.wire.launching import parse_grant

    grant = parse_grant(sys.argv[1:])
    _load_for_later()
    runner = _make_runner()
    _shut_off()
    gc.collect()
    gc.freeze()
    gc.enable()
    serve(socket.socket(fileno=_CHANNEL_FD), runner, grant)
    os._exit(0)  # to take each object apart would take a tenth of a start, and copy pages that helpers share


def _find_modules() -> None:
    """Have the packages beside this directory found, instead of the modules in it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.path.append(os.path.dirname(here))  # last: no module of nsinit can shadow the standard library's


def _load_for_later() -> None:
    """Load the modules and the library that Python would load when they are first used, inside the sandbox."""
    import codecs
    import ctypes
    import traceback  # noqa: F401 - printing an error inside the sandbox would import it

    for name in _CODECS:
        codecs.lookup(name)
    ctypes.CDLL("libgcc_s.so.1")  # pthread_cancel(3) loads it late, from the root directory of that time


def _make_runner() -> Runner:
    """Return the program of PID 1, with everything made of which a fork may share the pages."""
    from dataclasses import replace

    from nsinit.sandbox.child import RunnerKernel
    from runner.loop.config import RunnerConfig
    from runner.server import main as runner_main
    from runner.server.sockets import Asked

    kernels = RunnerKernel(filters_commands=False), RunnerKernel(filters_commands=True)
    configs = {possible: RunnerConfig(root_inside=possible) for possible in (False, True)}
    files_config = RunnerConfig(files_only=True)

    class SandboxRunner:
        def rehearse(self) -> None:
            runner_main.rehearse(kernels[True], configs[True])

        def enter(self, init: Init, on_ready: Callable[[], None]) -> NoReturn:
            kernel = kernels[init.filter is not None]
            kernel.take_oom_file(init.oom_fd, init.oom_score)
            if init.merge_pages:
                kernel.merge_pages()
            config = files_config if init.files_only else configs[init.root_inside]
            if init.crash is not None:
                config = replace(config, passing=init.crash.passing)
            asked = Asked(*init.asked) if init.asked is not None else None
            fds = init.listener_fd, init.shells_fd
            runner_main.run(*fds, kernel, on_ready=on_ready, config=config, asked=asked, diag_fd=init.diag_fd)

    return SandboxRunner()


def _shut_off() -> None:
    """Give up what was inherited of the starter: descriptors, signals, session, keyring. No import works afterwards."""
    from nsinit.kernel import constants as k
    from nsinit.kernel import syscalls
    from nsinit.sandbox.init_steps import lock_imports

    syscalls.close_range(_CHANNEL_FD + 1)
    syscalls.reset_library_signals()
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    if os.getpid() != os.getpgrp():
        os.setsid()
    syscalls.prctl(k.PR_SET_DUMPABLE, 0)
    syscalls.join_session_keyring()
    os.umask(0o022)
    assert len(os.listdir("/proc/self/task")) == 1
    lock_imports()


if __name__ == "__main__":
    main()
