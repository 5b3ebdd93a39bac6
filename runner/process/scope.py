"""What belongs to one command, shell or program: found anew at every look, and killed as a whole.

It must not remember processes between calls, nor decide when to end them (`ladder`).

A command's processes are those that began after it below its shell, and orphans of that time which hang below PID 1
(the shell adopts orphans, so that is after its death only). An orphan counts as the command's own if it is in the same
cgroup as the command's shell and does not descend from another shell or program.

Sources: cgroups(7) "/proc/pid/cgroup"; PR_SET_CHILD_SUBREAPER(2const).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from runner.process import process_set
from runner.process.process_set import Moment, Process

_MEMBERSHIP_BYTES = 65536


class Scope(Protocol):
    """A set of processes that only the kernel knows."""

    def find(self) -> list[Process]:
        """Return the live processes of the set as of now."""

    def kill(self) -> None:
        """SIGKILL all of them, a fork bomb included; what was born meanwhile is found by the next `find`."""


class CommandScope:
    """What a command of a shell, or a program without a group, has started since `began`.

    `root` tells the pid of the shell now, or None between two; `leaders` the pids of all shells and programs.
    """

    def __init__(
        self,
        began: Moment,
        root: Callable[[], int | None],
        *,
        leaders: Callable[[], frozenset[int]] = frozenset,
        group: str | None = None,
    ) -> None:
        self._began = began
        self._root = root
        self._leaders = leaders
        self._group = group

    def find(self) -> list[Process]:
        root = self._root()
        init = os.getpid()
        roots = frozenset({init, root or init})
        table = process_set.scan()
        found = process_set.started_since(self._began, roots, table, foreign=self._leaders() - roots)
        return [each for each in found if process_set.hangs_below(each, root, table) or self._is_own(each.pid)]

    def kill(self) -> None:
        process_set.kill_all(self.find)

    def _is_own(self, orphan_pid: int) -> bool:
        if self._group is not None:
            return is_member(orphan_pid, self._group)
        return read_membership(orphan_pid) == read_membership(os.getpid())


class GroupScope:
    """Every process in the cgroup whose path ends in `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find(self) -> list[Process]:
        init = os.getpid()
        return [
            process
            for process in process_set.scan().values()
            if not process.is_dead and process.pid != init and is_member(process.pid, self._name)
        ]

    def kill(self) -> None:
        process_set.kill_all(self.find)


class TreeScope:
    """One process and all below it: a shell or program that has no group of its own."""

    def __init__(self, root: Callable[[], int | None]) -> None:
        self._root = root

    def find(self) -> list[Process]:
        root = self._root()
        table = process_set.scan()
        return [each for each in table.values() if not each.is_dead and process_set.hangs_below(each, root, table)]

    def kill(self) -> None:
        process_set.kill_all(self.find)


def read_membership(pid: int) -> bytes:
    """Return the content of `/proc/<pid>/cgroup`, empty if the process has ended."""
    try:
        fd = os.open(f"/proc/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _MEMBERSHIP_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def is_member(pid: int, group: str) -> bool:
    """Return whether one of the cgroups of a process is called `group`."""
    name = b"/" + os.fsencode(group)
    return any(line.endswith(name) for line in read_membership(pid).splitlines())
