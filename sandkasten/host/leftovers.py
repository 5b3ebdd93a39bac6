"""Sessions and leftovers of a data directory, seen from outside by root, without touching them. Blocking.

`nsinit/tools/leftovers.py`, a program of its own, looks. Here are the call of that program, the test for a daemon at
work in the directory, and the move of a process to the place of the sessions' cgroups: an nsinit that is started
elsewhere would not find them.

Sources: proc_locks(5); cgroups(7), "cgroup.procs"; cgroup-v2.rst, "No Internal Process Constraint" (EBUSY).
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import attrs

from nsinit.wire import protocol as nsinit_protocol
from nsinit.wire.protocol import Found, Identity, Leftover
from sandkasten.host.paths import DataPaths

_LOOK = Path(nsinit_protocol.__file__).parents[1] / "tools" / "leftovers.py"
_LOOK_S = 60
_NO_PROCESSES = (errno.EBUSY, errno.EOPNOTSUPP)


class CantLook(Exception):
    """Sessions and leftovers can't be looked for; the text says why."""


@attrs.frozen
class Survey:
    """Sessions and leftovers found. `homes`: for each cgroup directory that the sessions live in, two files, of which
    the first that accepts a process moves it there. `rivals`: further directories in which recorded sessions run.
    """

    found: Sequence[Found] = ()
    leftovers: Sequence[Leftover] = ()
    homes: Sequence[tuple[str, str]] = ()
    rivals: Sequence[str] = ()


def look(data_dir: Path, node_id: str, recorded: Collection[str]) -> Survey:
    """Return sessions and leftovers of a node; `recorded` are the ids of live sessions in the database. Raises
    `CantLook`.
    """
    command = [sys.executable, "-I", "-S", "-B", str(_LOOK), os.path.realpath(data_dir), node_id]
    asked = json.dumps({"recorded": sorted(recorded), "nsinit": holder_of(data_dir / "run") or 0})
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, cwd="/", env={"LANG": "C.UTF-8"}, timeout=_LOOK_S
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CantLook(str(error)) from error
    except ValueError:
        raise CantLook(done.stderr.decode(errors="replace").strip().rpartition("\n")[2]) from None
    return Survey(
        [Found(**each | {"identity": each["identity"] and Identity(**each["identity"])}) for each in answer["found"]],
        [Leftover(**each) for each in answer["leftovers"]],
        [(first, second) for first, second in answer["homes"]],
        answer["rivals"],
    )


def has_daemon(data_dir: Path) -> bool:
    """Whether a daemon is at work in the directory. Raises `CantLook`."""
    return holder_of(DataPaths(data_dir).lock) is not None


def holder_of(path: Path) -> int | None:
    """Return the pid of the holder of a flock(2) on a file, None if there is none.

    The file is known by its inode alone, since some file systems report two devices; a mistake errs on the safe side. A
    trial lock would keep a daemon from starting at that moment.

    Raises:
        CantLook: `/proc/locks` or the file can't be read.
    """
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return None
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError as error:
        raise CantLook(str(error)) from error
    for fields in map(str.split, lines):
        # proc_locks(5): number, kind, mode, access, pid, major:minor:inode, ...
        if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode:
            return int(fields[4])
    return None


def move_to(homes: Sequence[tuple[str, str]]) -> None:
    """Move this process to the sessions' cgroups, so that an nsinit it starts finds them. Raises `OSError`."""
    pid = f"{os.getpid()}\n".encode("ascii")
    for beside, inside in homes:
        try:
            _put(beside, pid)
        except OSError as error:
            if error.errno not in _NO_PROCESSES:
                raise
            # v2: a cgroup with controllers for its children takes no process, a leaf below it does
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            _put(inside, pid)


def _put(path: str, pid: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, pid)
    finally:
        os.close(fd)
