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
from collections.abc import Callable
from typing import NoReturn

_CHANNEL_FD = 3
_CODECS = ("utf-8", "ascii", "latin-1", "idna")


def main() -> None:
    """Prepare the process and serve."""
    gc.disable()  # until all is imported: each collection looks at all of it again
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.path.append(os.path.dirname(here))  # last: no module of nsinit can shadow the standard library's
    import codecs
    import ctypes
    import socket
    import traceback  # noqa: F401 - printing an error inside the sandbox would import it
    from dataclasses import replace

    from nsinit.kernel import constants as k
    from nsinit.kernel import syscalls
    from nsinit.sandbox.child import RunnerKernel
    from nsinit.sandbox.init_steps import Init, lock_imports
    from nsinit.server.server import serve
    from nsinit.wire.launching import parse_grant
    from runner.loop.config import RunnerConfig
    from runner.server import main as runner_main
    from runner.server.sockets import Asked

    grant = parse_grant(sys.argv[1:])
    for name in _CODECS:
        codecs.lookup(name)
    ctypes.CDLL("libgcc_s.so.1")  # pthread_cancel(3) loads it late, from the root directory of that time
    kernels = RunnerKernel(filters_commands=False), RunnerKernel(filters_commands=True)
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
    gc.collect()
    gc.freeze()
    gc.enable()
    channel = socket.socket(fileno=_CHANNEL_FD)
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

    serve(channel, SandboxRunner(), grant)
    os._exit(0)  # to take each object apart would take a tenth of a start, and copy pages that helpers share


if __name__ == "__main__":
    main()
