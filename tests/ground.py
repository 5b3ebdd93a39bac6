"""The ground of one test process: mounts, a cgroup in each hierarchy and a directory for temporary files of its own.

Everything that its tests start is found within it. So a leak is never another run's, several runs on one machine do not
disturb each other, and the remains of a killed run can be removed without touching others. A process that lacks the
power for a part goes without that part. In a pure v2 tree a cgroup below one that holds processes could have no
controllers: there the process stays where it was started.
Sources: mount_namespaces(7), cgroups(7), cgroup-v2.rst "No Internal Process Constraint".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MNT_DETACH = 2
_CONTROLLERS = frozenset(("cpu", "cpuacct", "memory", "pids", "freezer", "blkio", ""))
"""Hierarchies that sandboxes use; the empty name is the unified one."""
_SHARES = "65536"
"""Processor shares of the ground in v1: as many as a group of many processes, for those outside of any group compete
singly.
"""
_PREFIX = "tests-"
_MEMORY = "memory"
_GET_FLAGS, _SET_FLAGS, _TOP_DIRECTORY = 0x80086601, 0x40086602, 0x00020000
_PATIENCE_S = 5.0
_PAUSE_S = 0.02
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ground:
    """Where everything of this process and of its descendants is."""

    directory: Path
    outer_directory: str | None
    cgroups: tuple[Path, ...]
    """Own ones in each hierarchy, whether they were made or found."""
    made: tuple[Path, ...]

    @classmethod
    def claim(cls) -> Ground:
        """Take this process to a ground of its own; orphans among its descendants become its children."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if _libc.unshare(_CLONE_NEWNS) == 0:
            _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        made, found = _enter_cgroups()
        outer = os.environ.get("TMPDIR")
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        directory.chmod(0o711)  # a daemon without root passes through
        _spread_below(directory)
        memory = directory / _MEMORY
        memory.mkdir(0o711)
        _libc.mount(b"tmpfs", os.fsencode(memory), b"tmpfs", 0, b"mode=711")  # without root: a plain directory
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own stay, to be looked at
        _set_temporary_directory(os.fspath(directory))
        return cls(directory, outer, (*made, *found), made)

    def release(self) -> None:
        """Remove the ground with all that is left in it."""
        for cgroup in self.made:
            with contextlib.suppress(OSError):
                (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
            _remove_cgroups(cgroup)
        _set_temporary_directory(self.outer_directory)
        for point in _mounts_below(self.directory):
            _libc.umount2(os.fsencode(point), _MNT_DETACH)
        shutil.rmtree(self.directory, ignore_errors=True)


def in_memory() -> Path | None:
    """Return the ground's directory for what needs no kernel feature: nothing in it waits for a disk."""
    path = Path(tempfile.gettempdir(), _MEMORY)
    return path if path.is_dir() else None


def _spread_below(directory: Path) -> None:
    """Let ext4 place each directory that is made in this one by itself (chattr(1), `T`). Near the others, each new file
    would be tried with every inode that was freed in the last minutes, where ext4 has no journal (a quarter of a
    daemon's start). Other file systems refuse."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(struct.calcsize("l"))))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _TOP_DIRECTORY))
    os.close(fd)


def _remove_cgroups(top: Path) -> None:
    """Remove a cgroup and those below it, as far as they are empty; the kernel may need a moment for a process."""
    deadline = time.monotonic() + _PATIENCE_S
    while top.exists() and time.monotonic() < deadline:
        for path, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
        time.sleep(_PAUSE_S)


def _enter_cgroups() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the cgroups that were made for this process, and the ones it stays in."""
    own = dict(_own_cgroups())
    if "memory" not in own:
        return (), tuple(own.values())
    made: dict[Path, Path] = {}
    for base in dict.fromkeys(own[name] for name in own if name in _CONTROLLERS):
        directory = base / f"{_PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):
            directory.mkdir(exist_ok=True)
            if (directory / "cpu.shares").exists():
                (directory / "cpu.shares").write_text(_SHARES)
            (directory / "cgroup.procs").write_text(str(os.getpid()))
            made[base] = directory
    return tuple(made.values()), tuple(base for base in dict.fromkeys(own.values()) if base not in made)


def _own_cgroups() -> Iterator[tuple[str, Path]]:
    """Return the directory of this process in every mounted hierarchy, by controller."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        for name in {"cgroup2": [""], "cgroup": options.split(",")}.get(kind, []):
            if name in paths and paths[name].startswith(root.rstrip("/")):
                yield name, Path(mount_point + paths[name][len(root.rstrip("/")) :])


def _mounts_below(directory: Path) -> list[str]:
    """Return mount points, the newest first; a path with blanks is none of ours."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(f"{directory}/")]


def _set_temporary_directory(path: str | None) -> None:
    if path is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = path
    tempfile.tempdir = None
