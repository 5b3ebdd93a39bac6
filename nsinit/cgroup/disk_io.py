"""A session's share of the disk: its weight, and the most that it may read and write in a second.

The settings are the same for all sessions of a node and are written once, before the session has a process. v2 has the
controller `io`, which counts the writes of pages back to the disk as the session's; v1 has `blkio`, which sees only
reads and direct writes. Weights have an effect where the disk's scheduler is bfq or, in v2, the disk has a cost model.
Sources: Documentation/admin-guide/cgroup-v2.rst, "IO"; cgroup-v1/blkio-controller.rst; block/bfq-iosched.rst.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import Tree
from nsinit.kernel.files import write_file
from nsinit.wire.protocol import DEFAULT_WEIGHT, IoLimits

_V1_MAX_WEIGHT = 1000


def find_disk(path: str) -> str:
    """Return MAJOR:MINOR of the whole disk under `path`; empty where the file system names none (btrfs, overlay).
    A directory that does not exist yet is going to be where its parent is."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    directory = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if os.path.exists(f"{directory}/partition"):
        directory = os.path.dirname(directory)  # the kernel limits whole disks only
    try:
        with open(f"{directory}/dev", "rb") as file:
            return file.read().decode().strip()
    except OSError:
        return ""


def check(tree: Tree, io: IoLimits, disk: str) -> None:
    """Raise `OSError` unless limits of this kind can be set here."""
    if io == IoLimits():
        return
    if not tree.dirs.keys() & {"io", "blkio"}:
        raise OSError(errno.EOPNOTSUPP, "disk limits need the cgroup controller io (v2) or blkio (v1)")
    if any(amount for _, amount in _amounts(io)) and not disk:
        raise OSError(errno.EOPNOTSUPP, "the data directory's file system names no disk whose speed could be limited")


def write(cgroup: SessionCgroup, io: IoLimits, disk: str) -> None:
    """Write what differs from the kernel's defaults. Raises `OSError`."""
    if cgroup.tree.mode == "v2":
        directory, wanted = cgroup.directory("unified"), [f"{name}={amount}" for name, amount in _amounts(io) if amount]
        if wanted:
            write_file(f"{directory}/io.max", f"{disk} {' '.join(wanted)}")
        weights = {"io.weight": f"default {io.weight}", "io.bfq.weight": f"default {min(io.weight, _V1_MAX_WEIGHT)}"}
    else:
        directory = cgroup.directory("blkio") if "blkio" in cgroup.tree.dirs else ""
        for name, amount in _amounts(io):
            if amount:
                kind, unit = ("read" if name[0] == "r" else "write"), name[1:]
                write_file(f"{directory}/blkio.throttle.{kind}_{unit}_device", f"{disk} {amount}")
        weights = {"blkio.bfq.weight": str(min(io.weight, _V1_MAX_WEIGHT))}
    for name, text in weights.items():
        if io.weight != DEFAULT_WEIGHT and os.path.exists(f"{directory}/{name}"):
            write_file(f"{directory}/{name}", text)


def _amounts(io: IoLimits) -> Iterator[tuple[str, int]]:
    """Return the maxima by the names of `io.max`; 0 is no limit."""
    yield "rbps", io.read_bps
    yield "wbps", io.write_bps
    yield "riops", io.read_iops
    yield "wiops", io.write_iops
