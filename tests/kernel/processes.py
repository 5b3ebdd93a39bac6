"""Processes seen from outside: those behind a supervisor of this test process, and one that only sits in a cgroup."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandkasten.model import Session
from tests.kernel.seed import NAME as SEED_NAME
from tests.leaks import descendants


def init_pid(session: Session) -> int:
    """Return the host's pid of the sandbox's PID 1, found by the host name in its own namespace."""
    wanted = f"sk-{session.id[:8]}"
    for pid, _ in descendants(os.getpid()):
        if is_init(pid) and _hostname(pid) == wanted:
            return pid
    raise AssertionError(f"no init process of {session.id}")


def oom_score(pid: int) -> int:
    """Return what the kernel adds to a process when it looks for one to end, -1000 to 1000."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def is_init(pid: int) -> bool:
    """Whether a process is PID 1 of a pid namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # the process ended meanwhile
        return False
    namespace_pids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid"))
    return len(namespace_pids) > 1 and namespace_pids[-1] == "1"


def _hostname(pid: int) -> str:
    """Return the host name of a process by a helper that joins its UTS namespace."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        import ctypes

        fd = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY)
        ctypes.CDLL(None).setns(fd, 0)
        os.write(write_fd, os.uname().nodename.encode())
        os._exit(0)
    os.close(write_fd)
    os.waitpid(child, 0)
    with os.fdopen(read_fd, "rb") as pipe:
        return pipe.read().decode()


def nsinit_pid() -> int:
    """Return the pid of the fork server that this process started."""
    for pid, name in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process ended meanwhile
            continue
        is_nsinit = name != SEED_NAME and any(part.endswith((b"nsinit", b"seed.py")) for part in command)
        if parent == os.getpid() and is_nsinit:
            return pid
    raise AssertionError("nsinit is not running")


def init_pids(root: int | None = None) -> list[int]:
    """Return the pids of all PID 1s, of pool sandboxes too, that supervisors of this process, or of `root`, started."""
    found = descendants(root or os.getpid())
    return [pid for pid, name in found if name == "sandkasten-init" and is_init(pid)]


def stop_serving(pid: int) -> None:
    """Stop a PID 1 and its file workers, so that no request is answered. A signal sent takes effect later than `kill`
    returns: the workers are looked up when PID 1 makes no more of them.
    """
    _stop(pid)
    for worker in file_workers(pid):
        _stop(worker)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.001)


def file_workers(pid: int) -> list[int]:
    """Return the pids of the file workers of a PID 1."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return [worker for worker, its_name in descendants(pid) if its_name == name]


@contextmanager
def sleeper_in(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of this machine in a cgroup, where it sleeps."""
    process = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        (directory / "cgroup.procs").write_text(str(process.pid))
        yield process
    finally:
        process.kill()
        process.wait()
