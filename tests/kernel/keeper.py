"""Program that runs the runner as PID 1 of small namespaces of its own, without nsinit (`runner_harness.py`).

The keeper holds the namespaces and ends as PID 1 ends. Descriptor 3 is the runner's listening socket; what is said of
the start goes to the standard error: the pid of PID 1, READY, or why there is none.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
from typing import Any

MAX_PROCESSES = 100
"""RLIMIT_NPROC of commands, which counts every process of their uid on the machine."""
READY = b"R"
_TOLD_FD = 2
_TMPFS = (
    ("/run", b"size=64m,mode=755"),
    ("/tmp", b"size=64m,mode=1777"),
    ("/mnt", b"size=64m,mode=755"),
    ("/home", b"size=2m,mode=755"),  # small, to be filled
)
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Enter new mount and pid namespaces."""
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))


def main() -> None:
    """Fork the process that is PID 1 in new namespaces, and end as it ends. The argument: fields of `RunnerConfig`."""
    fields = json.loads(sys.argv[1])
    unshare()
    _check(_libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
    pid = os.fork()
    if pid == 0:
        _become_init(fields)
    os.write(_TOLD_FD, b"%d " % pid)
    _libc.close_range(_TOLD_FD, 2**31 - 1, 0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


def _become_init(fields: dict[str, Any]) -> None:
    from nsinit.kernel.syscalls import reset_library_signals
    from nsinit.sandbox.child import RunnerKernel
    from runner.loop.config import RunnerConfig
    from runner.server import main as runner_main

    try:
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PDEATHSIG: PID 1 does not outlive the keeper
        os.setsid()
        _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
        for path, options in _TMPFS:
            _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, options))
        config = RunnerConfig(workspace="/mnt/workspace", outside_peers_only=True, **fields)
        os.makedirs(config.private_dir, 0o711)
        for directory in (config.home, config.workspace):
            os.makedirs(directory, 0o755)
            os.chown(directory, config.uid, config.gid)
        os.chmod(config.private_dir, 0o711)
        os.dup2(_TOLD_FD, 4)
        devnull = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(devnull, fd)
        os.chdir("/")
        for fd in (3, 4):
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        _libc.close_range(5, 2**31 - 1, 0)
        for signal_number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signal_number, signal.SIG_IGN)  # ignored signals, as a daemon started by nohup hands down
        reset_library_signals()  # as nsinit does for what it forks
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
        _lock_imports()
        runner_main.run(3, -1, RunnerKernel(filters_commands=False), on_ready=_tell_ready, config=config)
    finally:
        os._exit(1)


def _tell_ready() -> None:
    os.write(4, READY + b" ")
    os.close(4)


def _lock_imports() -> None:
    """Forbid further imports, as the sandbox build does."""
    sys.path[:] = []
    sys.meta_path[:] = []
    sys.path_hooks[:] = []
    sys.path_importer_cache.clear()
    builtins.__import__ = _refuse_import


def _refuse_import(name: str, *_rest: Any, **_more: Any) -> Any:
    if name in sys.modules:  # the C library of Python asks for `resource` at every wait4
        return sys.modules[name]
    raise ImportError(f"{name}: PID 1 imports nothing once it runs")


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    main()
