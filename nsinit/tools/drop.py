"""Drops root for good. A daemon does so once, after everything that needs root is open.

The one part of nsinit that runs in the daemon's own process, while that process has a single thread: credentials belong
to threads (credentials(7)). No capability, group, key ring or way back is left; privilege that can't be given away is
an error. Paths that the new user could not walk to, because a directory above them is private to root (`/root`,
a user's home), are bound below an empty directory that covers the private one, in a mount namespace of this process.

Sources: capabilities(7); credentials(7); setresuid(2); prctl(2) PR_SET_DUMPABLE; mount_namespaces(7); open_tree(2).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Sequence

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.capabilities import drop_bounding_set, read_last_capability
from nsinit.own_filters import DAEMON, PartFilters

THREADS_END_S = 5.0
_COVER = "mode=0755,size=64k,nr_inodes=64"
_NOTHING = f"{0:016x}"


class NotDropped(Exception):
    """Some privilege is left or can't be given away: the process must not serve anybody."""


def drop_privilege(uid: int, gid: int, *, keep_reachable: Sequence[str] = ()) -> None:
    """Become user `uid` and group `gid` without any privilege. `keep_reachable`: directories the daemon must get to.

    Raises:
        NotDropped, OSError: the process must end.
    """
    wait_alone()
    if uid <= 0 or gid <= 0:
        raise NotDropped(f"user {uid} and group {gid} are no place to go to")
    show_only(find_hidden(keep_reachable, uid, gid))
    os.umask(0o077)
    # The bounding set first: dropping it takes CAP_SETPCAP. Groups before the uid: setgroups(2) takes CAP_SETGID.
    drop_bounding_set(read_last_capability(), root_inside=False)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    syscalls.capset(0)
    # Not dumpable: a process of the same user can neither trace this one nor read its memory (ptrace(2)).
    syscalls.prctl(k.PR_SET_DUMPABLE, 0)
    syscalls.join_session_keyring()
    check_dropped(uid, gid)


def wait_alone() -> None:
    """Return once this process has a single thread.

    `Thread.join` waits for the interpreter's end of a thread, and the kernel's comes a moment later: until then
    /proc/self/task has it (proc(5)). Raises `NotDropped` when a thread stays.
    """
    until_s = time.monotonic() + THREADS_END_S
    while len(os.listdir("/proc/self/task")) != 1:
        if time.monotonic() > until_s:
            raise NotDropped("there is more than one thread")
        time.sleep(0.001)


def confine() -> None:
    """Put this process, a daemon without privilege that has one thread, under the filter of the calls that it makes."""
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)  # or a daemon that was never root may not set a filter (seccomp(2))
    PartFilters(DAEMON).enter(DAEMON)


def check_dropped(uid: int, gid: int) -> None:
    """Raise `NotDropped` unless the kernel shows no id, group or capability but the new ones."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    expected = {"Uid": "\t".join([str(uid)] * 4), "Gid": "\t".join([str(gid)] * 4), "Groups": "", "NoNewPrivs": "1"}
    expected |= dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), _NOTHING)
    wrong = [
        f"{name}: {status.get(name, '')}" for name, value in expected.items() if status.get(name, "").strip() != value
    ]
    if wrong:
        raise NotDropped(", ".join(wrong))


def find_hidden(paths: Iterable[str], uid: int, gid: int) -> dict[str, list[str]]:
    """Return the paths that `uid` can't reach, by the topmost directory on their way that it can't enter."""
    hidden: dict[str, list[str]] = {}
    for path in sorted({os.path.realpath(path) for path in paths}):
        parents = [path[:end] for end, char in enumerate(path) if char == "/" and end]
        wall = next((parent for parent in parents if not _may_enter(parent, uid, gid)), None)
        if wall is not None:
            hidden.setdefault(wall, []).append(path)
    return hidden


def show_only(hidden: dict[str, list[str]]) -> None:
    """Cover each directory of `hidden` with an empty one and bind its paths there, in a mount namespace of this
    process.
    """
    if not hidden:
        return
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_SLAVE)
    flags = k.OPEN_TREE_CLONE | k.AT_RECURSIVE
    trees = [
        (wall, [(path, syscalls.open_tree(k.AT_FDCWD, path, flags)) for path in paths])
        for wall, paths in hidden.items()
    ]
    for wall, inside in trees:
        syscalls.mount("sandkasten", wall, "tmpfs", k.MS_NOSUID | k.MS_NODEV, _COVER)
        for path, tree_fd in inside:  # a path comes before those below it
            _make_way(path)
            target_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                syscalls.move_mount(tree_fd, target_fd)
            finally:
                os.close(target_fd)
                os.close(tree_fd)


def _make_way(path: str) -> None:
    """Make a directory with its parents, open to all. Directories below a path shown before exist already."""
    mask = os.umask(0o022)
    try:
        os.makedirs(path, exist_ok=True)
    finally:
        os.umask(mask)


def _may_enter(directory: str, uid: int, gid: int) -> bool:
    status = os.stat(directory)
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH))
