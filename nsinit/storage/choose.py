"""Chooses the disk mechanism of a data directory: each is tried for real, in a process of its own.

A trial makes the disk of a session that never lives, in mount namespaces of its own and without the right to exceed
quotas, and must be refused more room than its limits. A trial that is killed leaves a session's directory, which the
next start removes. The two mechanisms without a file system of their own, `Memory` and `Plain`, are here, too.
Sources: fallocate(2); quotactl(2) (CAP_SYS_RESOURCE); Documentation/filesystems/tmpfs.rst (size, nr_inodes).
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar

from nsinit.kernel import capabilities, mounts, stage, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.slots import FIRST_BASE
from nsinit.steps import StepFailed
from nsinit.storage.btrfs import Btrfs
from nsinit.storage.loop import Loop
from nsinit.storage.mechanism import LAYERS, UNKNOWN, DiskFacts, Mechanism, MechanismUnavailable, Usage, make_layers
from nsinit.storage.paths import Layout
from nsinit.storage.project import Project
from nsinit.wire.protocol import DiskLimits, DiskMode, DiskSpec

_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Memory(Mechanism):
    """Mode `tmpfs`: layers lie in memory, on a tmpfs in the session's mount namespace alone, and go with its PID 1.

    Pages are charged to the session, so the disk is at most half as large as its memory: a full one must be "no space
    left", not an out-of-memory kill.
    """

    mode: ClassVar[DiskMode] = "tmpfs"

    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        """Make an empty session directory, for a start after a crash to find, and mount the layers' tmpfs."""
        os.mkdir(place.directory, 0o700)
        options: dict[str, str | int] = {"size": _size(place, limits), "nr_inodes": limits.inodes, "mode": "0700"}
        mount_fd = mounts.filesystem("tmpfs", mounts.NOSUID_NODEV, **options)
        mounts.attach(mount_fd, os.open(self.layers(place), _POINT))
        make_layers(self.layers(place), place.base)

    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        options = f"size={_size(place, limits)},nr_inodes={limits.inodes}"
        flags = k.MS_REMOUNT | k.MS_NOSUID | k.MS_NODEV
        syscalls.mount("sandkasten", self.layers(place), "tmpfs", flags, options)

    def layers(self, place: DiskFacts) -> str:
        return f"{place.layout.stage}/{stage.DISK}"


def _size(place: DiskFacts, limits: DiskLimits) -> int:
    return limits.size_bytes if place.memory_bytes is None else min(limits.size_bytes, place.memory_bytes // 2)


class Plain(Mechanism):
    """Mode `none`: layers are plain directories, limited by nothing but their file system."""

    mode: ClassVar[DiskMode] = "none"

    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        os.mkdir(place.directory, 0o700)
        make_layers(place.directory, place.base)

    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        return

    def change(self, place: DiskFacts, limits: DiskLimits) -> None:
        return

    def usage(self, place: DiskFacts, root_fd: int) -> Usage:
        return UNKNOWN


_MAX_REASON_BYTES = 400
_FULL = (errno.ENOSPC, errno.EDQUOT)

KINDS: tuple[type[Mechanism], ...] = (Project, Btrfs, Loop, Memory)
"""In the order of preference."""


def candidates(layout: Layout, asked: DiskSpec) -> list[Mechanism]:
    """Return the mechanisms to try, best first. Called while the whole machine is in sight."""
    if asked == "none":
        return []
    return [kind(layout) for kind in KINDS if asked in ("auto", kind.mode)]


def choose(layout: Layout, asked: DiskSpec, tried: list[Mechanism]) -> tuple[Mechanism, dict[str, str]]:
    """Return the first of `tried` that works, and why each one before it does not.

    Raises:
        StepFailed: the one that was asked for can't be had, or nothing can be tried: the disk is full.
    """
    refused: dict[str, str] = {}
    for mechanism in tried:
        try:
            mechanism.open()
            attempt(layout, mechanism)
        except (MechanismUnavailable, OSError, StepFailed) as error:
            if (
                getattr(error, "errno", None) in _FULL
            ):  # says nothing of the mechanism, and the next one is a weaker one
                raise StepFailed("disk", f"no disk limit can be tried: {error}", errno=errno.ENOSPC) from error
            refused[mechanism.mode] = str(error)[:_MAX_REASON_BYTES]
        else:
            return mechanism, refused
    if asked not in ("auto", "none"):
        raise StepFailed("disk", f"disk.mode {asked} can't be had here: {refused.get(asked, 'unknown')}")
    return Plain(layout), refused


def attempt(layout: Layout, mechanism: Mechanism) -> None:
    """Try a mechanism that is open. Raises `MechanismUnavailable` or `OSError`."""
    session_id = os.urandom(12).hex()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _attempt(mechanism, DiskFacts(layout, session_id, FIRST_BASE), write_fd)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        number, _, reason = pipe.read(_MAX_REASON_BYTES).decode("utf-8", "replace").partition(" ")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sessions_fd = os.open(layout.sessions, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mechanism.remove(sessions_fd, session_id)
    except FileNotFoundError:
        pass
    finally:
        os.close(sessions_fd)
    if number in map(str, _FULL):
        raise OSError(int(number), reason)
    if reason or status:
        raise MechanismUnavailable(reason or f"the trial ended with status {status}")


def _attempt(mechanism: Mechanism, place: DiskFacts, write_fd: int) -> None:
    """Make the trial, as its process, and write the reason of a failure. Never returns."""
    try:
        syscalls.unshare(k.CLONE_NEWNS)
        capabilities.give_up(k.CAP_SYS_RESOURCE)
        mechanism.make(place, mechanism.trial)
        mechanism.fit(place, mechanism.trial)
        _overfill(f"{mechanism.layers(place)}/{LAYERS[0]}/file", mechanism.trial)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is the finding
        reason = f"{getattr(error, 'errno', None) or 0} {error or type(error).__name__}"
        os.write(write_fd, reason.encode()[:_MAX_REASON_BYTES])
    finally:
        os._exit(0)


def _overfill(path: str, limits: DiskLimits) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, 2 * limits.size_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
    else:
        raise MechanismUnavailable("a file could grow beyond the limit")
    finally:
        os.close(fd)
