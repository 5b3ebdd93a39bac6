"""Reads what the groups of one session say: the CPU time of each, and how many processes are in it.

A group is a cgroup below the session's, one for each program and named shell (`nsinit/cgroup/groups.py`). It has no controller
of its own, but in a v2 hierarchy, mounted alone or beside v1, the kernel keeps its CPU time all the same; v1 does not.
One file of each group that is asked for stays open until it is forgotten. Never writes, never raises.

Sources: Documentation/admin-guide/cgroup-v2.rst, "cpu.stat" (there whether the controller is enabled or not).
"""

from __future__ import annotations

import errno
import os

UNKNOWN = -1
_CPU_BYTES = 512
_MEMBERS_BYTES = 4096
_USAGE = b"usage_usec "


class GroupStats:
    """`directory` is the session's in the v2 hierarchy; None where there is none, and then nothing is known."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}

    @property
    def is_known(self) -> bool:
        """Whether CPU time is told apart at all."""
        return self._directory is not None

    def list(self) -> list[str]:
        """Return the names of the groups there are."""
        if self._directory is None:
            return []
        try:
            with os.scandir(self._directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def cpu_usec(self, name: str) -> int:
        """Return the CPU time that was ever used in a group, in µs; `UNKNOWN` when there is no such group."""
        try:
            _, found, rest = os.pread(self._open(name), _CPU_BYTES, 0).partition(_USAGE)
        except OSError:
            return UNKNOWN
        digits = rest.partition(b"\n")[0]
        return int(digits) if found and digits.isdigit() else UNKNOWN

    def count_processes(self, name: str | None) -> int:
        """Return how many processes are in a group, or with None in no group of the session; some hundred at most."""
        place = "cgroup.procs" if name is None else f"{name}/cgroup.procs"
        try:
            with open(self._path(place), "rb", buffering=0) as file:
                content = file.read(_MEMBERS_BYTES) or b""
        except OSError:
            return UNKNOWN
        return content.count(b"\n") if content else UNKNOWN

    def forget(self, name: str) -> None:
        """The group is gone, or nothing is asked of it any more."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for name in list(self._fds):
            self.forget(name)

    def _open(self, name: str) -> int:
        fd = self._fds.get(name)
        if fd is None:
            fd = self._fds[name] = os.open(self._path(f"{name}/cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
        return fd

    def _path(self, path: str) -> str:
        if self._directory is None:
            raise FileNotFoundError(errno.ENOENT, "no v2 hierarchy")
        return f"{self._directory}/{path}"
