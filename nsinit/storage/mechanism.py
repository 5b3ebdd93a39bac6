"""The interface of the mechanisms that limit a session's disk, and the place of its layers.

One mechanism is chosen, at start (`choose`). `make` and `fit` run in a builder, in the session's mount namespace before
the image is touched. The other methods run in nsinit and ask only the kernel and the disk about a session, so a session
of an earlier nsinit is like one of its own. No method names a path of an image.
Sources: Documentation/filesystems/overlayfs.rst (upperdir, workdir); statvfs(3).
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from nsinit.steps import StepFailed
from nsinit.storage import trash
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import DiskLimits, DiskMode

LAYERS = ("root", "usr")
"""The overlays of a session. Each has a directory of this name, and one for overlayfs to work in."""

CHANGE = "disk limits"
"""The name of the step that a refused change is the failure of."""

Usage = tuple[int, int, int, int]
"""Bytes used and allowed, inodes used and allowed; -1: not counted, or no limit."""

UNKNOWN: Usage = (-1, -1, -1, -1)


class MechanismUnavailable(Exception):
    """A mechanism can't be had on this machine or this file system; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The facts about a session that its disk depends on. `memory_bytes`: its memory limit, None while not known.

    `base`: the host id of its root, needed to make the disk.
    """

    layout: Layout
    session_id: str
    base: int = -1
    memory_bytes: int | None = None

    @property
    def directory(self) -> str:
        """The session's own directory in the data directory."""
        return self.layout.session(self.session_id)


class Mechanism(ABC):
    """A mechanism that limits a session's disk."""

    mode: ClassVar[DiskMode]
    trial: ClassVar[DiskLimits] = DiskLimits(size_bytes=16 << 20, inodes=1024)
    """Limits of the disk that is filled to try the mechanism."""

    def __init__(self, layout: Layout) -> None:
        """Called while the whole machine is in sight; must not fail."""
        self._layout = layout

    def open(self) -> None:
        """Get ready, once, in nsinit's own mount namespace. Raises `MechanismUnavailable`."""
        return

    @abstractmethod
    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        """Make the session's directory and in it, or mounted from it, directories for every layer."""

    @abstractmethod
    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        """Set exactly `limits`; `make` may have been called with others. No layer has been written to yet."""

    def layers(self, place: DiskFacts) -> str:
        """Return the directory that `LAYERS` are in, as the builder sees it."""
        return place.directory

    def change(self, place: DiskFacts, limits: DiskLimits) -> None:
        """Change the limits of a running session. Raises `StepFailed` or `OSError`."""
        raise StepFailed(CHANGE, f"a disk of mode {self.mode} keeps its size", errno=errno.EOPNOTSUPP)

    def usage(self, place: DiskFacts, root_fd: int) -> Usage:
        """Return use and limits; `root_fd` is the root directory of the running session (O_PATH)."""
        status = os.fstatvfs(root_fd)  # an overlay answers for the file system of its upper layer
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        return used_bytes, status.f_blocks * status.f_frsize, status.f_files - status.f_ffree, status.f_files

    def remove(self, parent_fd: int, name: str) -> None:
        """Delete the directory of a session, from the trash, in a process of its own. Raises `OSError`."""
        trash.remove_tree(parent_fd, name)

    def abandon(self, place: DiskFacts) -> None:
        """Called right before the session's processes are killed: nothing that they wrote needs to reach the disk any
        more."""
        return


def other_mechanism() -> OSError:
    """Return the refusal to touch the quota of a directory that another mechanism made: it would be the machine's."""
    return OSError(errno.EOPNOTSUPP, "the session's disk was made in another mode")


def make_layers(path: str, base: int) -> None:
    """Make the directories of every layer in `path`: the upper one belongs to the session's root."""
    for name in LAYERS:
        os.mkdir(f"{path}/{name}", 0o755)
        os.chown(f"{path}/{name}", base, base)
        os.mkdir(f"{path}/{name}-work", 0o700)
