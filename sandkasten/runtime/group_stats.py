"""Reads what the groups of one session say: the CPU time of each, and how many processes are in it.

A group is a cgroup below the session's, one for each program and named shell (`nsinit/groups.py`). It has no controller
of its own, but in a v2 hierarchy, mounted alone or beside v1, the kernel keeps its CPU time all the same; v1 does not.
Groups come and go, so no file is kept open. Never writes, never raises.

Sources: Documentation/admin-guide/cgroup-v2.rst, "cpu.stat" (there whether the controller is enabled or not).
"""

from __future__ import annotations

import os

UNKNOWN = -1
_CPU_BYTES = 512
_MEMBERS_BYTES = 4096
_USAGE = b"usage_usec "


class GroupStats:
    """`directory` is the session's in the v2 hierarchy; None where there is none, and then nothing is known."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory

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
        content = self._read(f"{name}/cpu.stat", _CPU_BYTES)
        _, found, rest = content.partition(_USAGE)
        digits = rest.partition(b"\n")[0]
        return int(digits) if found and digits.isdigit() else UNKNOWN

    def count_processes(self, name: str | None) -> int:
        """Return how many processes are in a group, or with None in no group of the session; some hundred at most."""
        content = self._read("cgroup.procs" if name is None else f"{name}/cgroup.procs", _MEMBERS_BYTES)
        return content.count(b"\n") if content else UNKNOWN

    def _read(self, path: str, size: int) -> bytes:
        if self._directory is None:
            return b""
        try:
            with open(f"{self._directory}/{path}", "rb", buffering=0) as file:
                return file.read(size) or b""
        except OSError:
            return b""
