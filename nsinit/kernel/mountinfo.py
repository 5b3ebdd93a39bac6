"""Reads `/proc/self/mountinfo` and `/proc/self/cgroup`. Pure: text in, values out.

Sources: proc_pid_mountinfo(5); cgroups(7), "/proc/pid/cgroup".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo. `root` is the directory of the file system that is mounted at `point`."""

    mount_id: int
    parent_id: int
    root: str
    point: str
    fstype: str
    super_options: frozenset[str]


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Return the mounts in order."""
    return tuple(_parse_line(line) for line in text.splitlines() if line)


def parse_points(text: str) -> Iterator[tuple[int, str]]:
    """Yield id and point of each mount, in order."""
    for line in text.splitlines():
        fields = line.split(" ", 5)
        yield int(fields[0]), _unescape(fields[4])


def parse_own_cgroups(text: str) -> dict[str, str]:
    """Return {controller: path} of `/proc/self/cgroup`; the key of the v2 line is the empty string."""
    own: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update((name, path) for name in controllers.split(","))
    return own


def mounts_to_keep(mounts: tuple[Mount, ...], needed: tuple[str, ...]) -> frozenset[int]:
    """Return the ids of the mounts on, in and above the `needed` paths."""
    by_id = {mount.mount_id: mount for mount in mounts}
    keep = {mount.mount_id for mount in mounts for path in needed if path != "/" and is_below(mount.point, path)}
    for path in needed:
        holder: Mount | None = _holder(mounts, path)
        while holder is not None:
            keep.add(holder.mount_id)
            holder = by_id.get(holder.parent_id)
    return frozenset(keep)


def _holder(mounts: tuple[Mount, ...], path: str) -> Mount | None:
    """Return the mount that `path` is on: the longest mount point above it, the last of several on one point."""
    above = [mount for mount in mounts if is_below(path, mount.point)]
    return max(above, key=lambda mount: (len(mount.point), mount.mount_id), default=None)


def is_below(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or something in it."""
    return directory == "/" or path == directory or path.startswith(f"{directory}/")


def _parse_line(line: str) -> Mount:
    head, tail = line.split(" - ", 1)
    fields, rest = head.split(" "), tail.split(" ")
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        root=_unescape(fields[3]),
        point=_unescape(fields[4]),
        fstype=rest[0],
        super_options=frozenset(rest[2].split(",")),
    )


def _unescape(field: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
