"""Freezes and thaws all processes of a session at once, those in run cgroups included.

In a v2 tree, with or without controllers, by `cgroup.freeze` of the session's directory; in v1 by the `freezer`
hierarchy. A frozen process dies of SIGKILL at once in v2, but in v1 only when it is thawed: code that kills there thaws
as well.
Sources: Documentation/admin-guide/cgroup-v2.rst, "Core Interface Files"; cgroup-v1/freezer-subsystem.rst.
"""

from __future__ import annotations

import errno
from collections.abc import Generator

from nsinit.cgroup.session import SessionCgroup
from nsinit.kernel.files import write_file
from nsinit.scheduler import Wait
from nsinit.steps import StepFailed

_LOOK_AGAIN_S = (*(0.0005,) * 4, *(0.002,) * 10, *(0.01,) * 50, *(0.05,) * 40)
"""Pauses between two readings of the state, in seconds: a task in the middle of a system call freezes at its end."""


def set_frozen(cgroup: SessionCgroup, *, frozen: bool) -> Generator[Wait, bool, None]:
    """Freeze or thaw, and wait until the kernel says so.

    Raises:
        StepFailed: this machine has no freezer (ENOTSUP), or not every task froze in time (ETIMEDOUT); then all run
            again.
        OSError: the session has no cgroup.
    """
    freezer = _find(cgroup)
    freezer.ask(frozen=frozen)
    for pause_s in _LOOK_AGAIN_S:
        if freezer.is_so(frozen=frozen):
            return
        yield Wait(timeout_s=pause_s)
        if frozen:
            freezer.remind()
    freezer.ask(frozen=False)
    raise StepFailed("freeze", "not all processes stand still", errno=errno.ETIMEDOUT)


def is_frozen(cgroup: SessionCgroup) -> bool:
    """Whether no process of a session can run. Raises `StepFailed`: this machine has no freezer; `OSError`: the session
    has no cgroup."""
    return _find(cgroup).is_so(frozen=True)


def thaw_dying(cgroup: SessionCgroup) -> None:
    """Thaw a session whose processes were killed, where only that lets them die. Without cgroup or freezer nothing is
    done."""
    if cgroup.tree.mode == "v1" and "freezer" in cgroup.tree.dirs:
        try:
            _V1(cgroup).ask(frozen=False)
        except FileNotFoundError:
            pass  # removed before


class _V2:
    def __init__(self, directory: str) -> None:
        self._directory = directory

    def ask(self, *, frozen: bool) -> None:
        write_file(f"{self._directory}/cgroup.freeze", "1" if frozen else "0")

    def remind(self) -> None:
        """Do nothing: the kernel freezes tasks that are added later by itself."""

    def is_so(self, *, frozen: bool) -> bool:
        return f"frozen {int(frozen)}" in _read(f"{self._directory}/cgroup.events").splitlines()


class _V1:
    def __init__(self, cgroup: SessionCgroup) -> None:
        self._path = f"{cgroup.directory('freezer')}/freezer.state"

    def ask(self, *, frozen: bool) -> None:
        write_file(self._path, "FROZEN" if frozen else "THAWED")

    def remind(self) -> None:
        """Ask again: a fork that raced with the first write may have been missed."""
        self.ask(frozen=True)

    def is_so(self, *, frozen: bool) -> bool:
        return _read(self._path).strip() == ("FROZEN" if frozen else "THAWED")


def _find(cgroup: SessionCgroup) -> _V1 | _V2:
    if cgroup.birth_directory is not None:
        return _V2(cgroup.birth_directory)
    if "freezer" in cgroup.tree.dirs:
        return _V1(cgroup)
    raise StepFailed("freeze", "no freezer: mount the v1 hierarchy of that name, or cgroup v2", errno=errno.ENOTSUP)


def _read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096).decode()
