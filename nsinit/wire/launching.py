"""The start of nsinit for a daemon that is not root: the grant, the launcher's argument, the words on its socket.

A daemon without privilege must not choose on what a process with all privileges works. Root says so, in the one
argument of each process: the launcher's (`tools/launcher.py`) is a `LaunchForParent` or a `LaunchForUser`, and nsinit's
is the `Grant` that the launcher makes of it. nsinit holds each `Start` against its grant. Without an argument nsinit is
the child of a program that is root itself, and allows all. Values only; opens nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nsinit.wire.validate import InvalidName, check_data_dir

START, KILL = b"start", b"kill"
"""The daemon's words to the launcher. The answer to `START` is nsinit's pid in decimal, with its pidfd, or `FAILED`."""

READY, FAILED = b"ready", b"-"
"""The launcher's words: its first one, and that no nsinit could be started."""

MAX_WORD_BYTES = 16
FDS_OF_START = 2
"""nsinit's socket and the write end of its log."""

NOTIFY_FD = 4
"""The descriptor of the socket to the service manager, in a launcher that is a service."""

_ANY_CGROUP = "auto"


@dataclass(frozen=True, slots=True)
class Grant:
    """`gid`: the daemon's group, which may reach the sockets of sessions. `beside`: processes of the same service,
    which nsinit may move to another cgroup along with itself."""

    data_dir: str
    gid: int
    beside: tuple[int, ...] = ()

    def encode(self) -> str:
        """Return the argument for nsinit."""
        return json.dumps(asdict(self))

    def check(self, data_dir: str, cgroup_parent: str) -> None:
        """Raise `InvalidName` unless the grant covers what the daemon asks for."""
        if data_dir != self.data_dir:
            raise InvalidName(f"this daemon may not use the data directory {data_dir[:80]!r}")
        if cgroup_parent != _ANY_CGROUP:
            raise InvalidName("this daemon may not choose a cgroup")


def parse_grant(arguments: list[str]) -> Grant | None:
    """Return the grant in the process's arguments, None when there is none. Raises `ValueError`, `KeyError`."""
    if not arguments:
        return None
    fields = json.loads(arguments[0])
    data_dir, gid, beside = fields["data_dir"], fields["gid"], fields["beside"]
    check_data_dir(data_dir)
    if not isinstance(gid, int) or not 0 < gid < 2**32 - 1:
        raise ValueError(f"{gid!r} is no group for a daemon")
    return Grant(data_dir, gid, tuple(int(pid) for pid in beside))


@dataclass(frozen=True, slots=True)
class LaunchForParent:
    """The launcher's argument from a daemon that is its parent. `pid`: the daemon. `sockets`: paths that root bound for
    the daemon, with device and inode; the launcher removes them when the daemon ends."""

    data_dir: str
    gid: int
    pid: int
    sockets: tuple[tuple[str, int, int], ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class LaunchForUser:
    """The launcher's argument as a service. `uid`: the one user besides root who may connect. `notify_fd`: a datagram
    socket to the service manager (sd_notify(3)), -1: none. `beat_s`: seconds between signs of life, 0: none."""

    data_dir: str
    gid: int
    uid: int
    notify_fd: int = -1
    beat_s: float = 0.0

    def encode(self) -> str:
        return json.dumps(asdict(self))
