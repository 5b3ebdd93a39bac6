"""Stands in a session's place where its PID 1 is: the same cgroup, namespaces and user id, and no capability at all.

Started by a test with [session's cgroup directory, host pid of PID 1, descriptors of groups]; prints as JSON what the
kernel let it do with each descriptor. Run it with nothing of value: whatever it manages, it leaves behind.
"""

from __future__ import annotations

import json
import os
import sys

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.capabilities import RUNNER_ID
from nsinit.kernel.files import write_file


def main() -> None:
    """Become as powerless as PID 1 and try each descriptor."""
    directory, pid, *fds = sys.argv[1:]
    write_file(f"{directory}/cgroup.procs", "0")
    pidfd = os.pidfd_open(int(pid))
    syscalls.setns(pidfd, k.CLONE_NEWCGROUP)
    syscalls.setns(pidfd, k.CLONE_NEWUSER)
    os.setgroups([])
    os.setresgid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    os.setresuid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    syscalls.capset(0)
    print(json.dumps([{"clone": _clone(int(fd)), "open": _open(int(fd))} for fd in fds]))


def _clone(group_fd: int) -> str:
    """Return the cgroup a child finds itself in, as PID 1's namespace shows it, or why there is none."""
    read_fd, write_fd = os.pipe()
    try:
        child = syscalls.Cloner(0).clone(group_fd)
    except OSError as error:
        return type(error).__name__
    if child == 0:
        with open("/proc/self/cgroup", "rb") as file:
            os.write(write_fd, file.read())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as answer:
        lines = answer.read().decode().splitlines()
    return next(line.removeprefix("0::") for line in lines if line.startswith("0::"))


def _open(group_fd: int) -> dict[str, object]:
    """Return what opening things beneath and above the descriptor gives."""
    above_fd = os.open("../../../../..", os.O_PATH | os.O_DIRECTORY, dir_fd=group_fd)
    result: dict[str, object] = {"above is itself": os.path.sameopenfile(above_fd, group_fd)}
    for name in ("cgroup.procs", "../cgroup.procs", "cgroup.type", "cgroup.kill"):
        try:
            os.close(os.open(name, os.O_WRONLY, dir_fd=group_fd))
            result[name] = "opened"
        except OSError as error:
            result[name] = error.strerror
    try:
        os.mkdir("inner", dir_fd=group_fd)
        result["mkdir"] = "made"
    except OSError as error:
        result["mkdir"] = error.strerror
    return result


if __name__ == "__main__":
    main()
