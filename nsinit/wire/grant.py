"""What root allows nsinit's daemon: the one argument of the process, given by the keeper that started it.

A daemon without privilege must not choose what a process with all privileges works on. So who started both says which
data directory it is, which group may reach the sockets of sessions, and who else may be moved to another cgroup; what
the daemon sends is held against it. Without an argument nsinit is the child of a program that is root itself, and
believes it. Parses only; opens nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from nsinit.wire.validate import InvalidName, check_data_dir

_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Grant:
    """`gid`: the daemon's group. `beside`: processes of the same service, which go where nsinit goes."""

    data_dir: str
    gid: int
    beside: tuple[int, ...] = ()

    def encode(self) -> str:
        """Return the argument for nsinit."""
        return json.dumps({"data_dir": self.data_dir, "gid": self.gid, "beside": self.beside})

    def check(self, data_dir: str, cgroup_parent: str) -> None:
        """Raise `InvalidName` unless this is what the daemon asks for."""
        if data_dir != self.data_dir:
            raise InvalidName(f"this daemon may not use the data directory {data_dir[:80]!r}")
        if cgroup_parent != _AUTO:
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
