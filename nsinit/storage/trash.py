"""Removes the files of sessions: a rename now, the deletion in the background.

Owns the one function that deletes session files. `remove_tree` works beneath directory descriptors, never follows a
link, refuses to cross a mount, and needs neither recursion nor depth: a deep directory is first moved to the top. A
workspace gets here only as a whole, by one rename (`workspaces.py`).
Sources: openat2(2) RESOLVE_NO_XDEV; rename(2); Documentation/filesystems/overlayfs.rst (work/work).
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.mountinfo import is_below
from nsinit.log import log
from nsinit.storage.paths import SOCKET_NAME, USE_NAME, Layout

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_BENEATH = k.RESOLVE_BENEATH | k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_XDEV
_NICENESS = 19

Remove = Callable[[int, str], None]
"""Deletes a directory of this name below that descriptor: `remove_tree`, or a disk mechanism's own way."""


def discard_session(layout: Layout, session_id: str, mounts: Collection[str]) -> bool:
    """Move the session's directories into the trash; True if there is something to delete now.

    Raises:
        OSError: EBUSY: one of `mounts`, points in the machine's mount namespace, is on or below the directory in `run`;
            nothing was moved.
    """
    moved, run = False, layout.session_run(session_id)
    if any(is_below(point, run) for point in mounts):
        # rmdir(2) would detach it from the machine, if nsinit's own namespace does not show it.
        raise OSError(errno.EBUSY, "a mount is on it or below it", run)
    for name in (SOCKET_NAME, USE_NAME):
        try:
            os.unlink(f"{run}/{name}")
        except FileNotFoundError:
            pass
    try:
        os.rmdir(run)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        moved = _move(layout, run, session_id)
    return _move(layout, layout.session(session_id), session_id) or moved


def discard(layout: Layout, path: str) -> None:
    """Move an entry that is no session's into the trash."""
    _move(layout, path, "foreign")


def start_deletion(layout: Layout, remove: Remove, mounts: Collection[str] = ()) -> int:
    """Delete the entries of the trash by `remove`, in a process of its own; return its pidfd. An entry with one of
    `mounts`, points in the machine's mount namespace, in it stays."""
    pid = os.fork()
    if pid == 0:
        _delete_all(layout, remove, mounts)
    return os.pidfd_open(pid)


def remove_tree(parent_fd: int, name: str) -> None:
    """Delete `name` below `parent_fd`.

    Raises:
        OSError: some entry can't be deleted (EXDEV or EBUSY: a mount); all others are gone.
    """
    if _removed_at_once(parent_fd, name):
        return
    top_fd = syscalls.openat2(parent_fd, name, _DIRECTORY, resolve=_BENEATH)
    prefix = os.urandom(8).hex()
    numbers = itertools.count()
    stuck: dict[str, OSError] = {}
    try:
        while entries := [entry for entry in os.listdir(top_fd) if entry not in stuck]:
            for entry in entries:
                try:
                    _remove_level(top_fd, entry, prefix, numbers)
                except OSError as error:
                    stuck[entry] = error
    finally:
        os.close(top_fd)
    if stuck:
        raise next(iter(stuck.values()))
    os.rmdir(name, dir_fd=parent_fd)


def _remove_level(top_fd: int, entry: str, prefix: str, numbers: Iterator[int]) -> None:
    """Delete one entry of the top; directories in it that aren't empty are moved up to the top first."""
    if _removed_at_once(top_fd, entry):
        return
    fd = syscalls.openat2(top_fd, entry, _DIRECTORY, resolve=_BENEATH)
    stuck: OSError | None = None
    try:
        for inner in os.listdir(fd):
            try:
                if not _removed_at_once(fd, inner):
                    os.rename(inner, f"{prefix}.{next(numbers)}", src_dir_fd=fd, dst_dir_fd=top_fd)
            except OSError as error:
                stuck = error
    finally:
        os.close(fd)
    if stuck is not None:
        raise stuck
    os.rmdir(entry, dir_fd=top_fd)


def _removed_at_once(dir_fd: int, name: str) -> bool:
    """Delete a file or an empty directory; False if it is a directory with entries."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        pass
    else:
        return True
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _move(layout: Layout, path: str, session_id: str) -> bool:
    try:
        os.rename(path, f"{layout.trash}/{session_id}-{os.urandom(4).hex()}")
    except FileNotFoundError:
        return False
    return True


def _delete_all(layout: Layout, remove: Remove, mounts: Collection[str]) -> None:
    """Try to delete each entry once, at lowest priority. Ends the process, always."""
    status = 1
    try:
        syscalls.close_range(3)
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        trash_fd = os.open(layout.trash, _DIRECTORY | os.O_CLOEXEC)
        status = 0
        for name in os.listdir(trash_fd):
            try:
                # A mount that nsinit's namespace does not show would go with the directory it is on (rmdir(2) detaches
                # it in other namespaces), and a person may need it.
                if any(is_below(point, f"{layout.trash}/{name}") for point in mounts):
                    raise OSError(errno.EBUSY, "a mount is in it")
                remove(trash_fd, name)
            except FileNotFoundError:
                continue  # a layer, which the end of its image is removing as well
            except OSError as error:
                status = 2  # the entry stays in the trash, and is a leftover
                log("error", "trash not deleted", name=name, reason=str(error))
    finally:
        os._exit(status)
