"""What the keeper is told when it starts, and the few words between it and the daemon. The process is `keeper.py`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

START, KILL = b"start", b"kill"
"""What the daemon may say; the answer to `START` is nsinit's pid in decimal, with its pidfd, or `FAILED`."""

NOTIFY_FD = 4
"""Where the keeper of a service finds its socket to the service manager."""

READY, FAILED = b"ready", b"-"
"""The keeper's own words: the first one of all, and that no nsinit could be started."""

MAX_WORD_BYTES = 16
FDS_OF_START = 2
"""nsinit's socket and the write end of its log."""


@dataclass(frozen=True, slots=True)
class KeepForParent:
    """`pid`: the daemon. `sockets`: paths that root bound for it, with device and inode, which go when it goes."""

    data_dir: str
    gid: int
    pid: int
    sockets: tuple[tuple[str, int, int], ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class KeepForUser:
    """`uid`: the one user besides root who may connect. `notify_fd`: a datagram socket to the service manager, whose
    watchdog wants to hear of the keeper every `beat_s` seconds; 0: it does not."""

    data_dir: str
    gid: int
    uid: int
    notify_fd: int = -1
    beat_s: float = 0.0

    def encode(self) -> str:
        return json.dumps(asdict(self))
