"""The jail of a program that reads what strangers made: an archive (`unpack.py`), or a tree of files (`pack.py`).

A process of its own for one piece of work, which lives no longer than its parent, an nsinit. Its root directory is one
tree, and nothing else; so a name or a link of any kind can only reach that tree. The process has its own mount, pid,
network, IPC and user namespace, the capabilities and the system calls that its work needs, and can't import any module.
Sources: user_namespaces(7); pivot_root(2); prctl(2); setrlimit(2).
"""

from __future__ import annotations

import codecs
import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from nsinit.kernel import capabilities, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.seccomp.filters import list_filter
from nsinit.wire import verdict
from nsinit.wire.verdict import ArchiveRefused

CODECS = ("utf-8", "ascii", "latin-1")
VERDICT_FD, ROOT_FD = 1, 3
CPU_S = 3600
CHUNK_BYTES = 256 * 1024
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""The errors that are no fault of what is read."""
_MOUNT_FLAGS = k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV | k.MOUNT_ATTR_NOEXEC


@dataclass(frozen=True, slots=True)
class Jail:
    """The rights of a jail. `calls`: the system calls that the filter lets pass; `kept_fds`: the number of descriptors
    after the root's that stay open; `base`: the host id that the jail's root is."""

    calls: frozenset[str]
    capabilities: tuple[int, ...]
    memory_bytes: int
    kept_fds: int = 0
    base: int = 0
    read_only: bool = False


def run(jail: Jail, parent_pid: int, prepare: Callable[[], int], work: Callable[[], bytes]) -> NoReturn:
    """Make the jail, work in it, and leave the verdict that `work` returns. `prepare` returns the detached mount that
    becomes the root; it is called with all that this process may do."""
    syscalls.end_with_parent(parent_pid)
    capabilities.keep_only(capabilities.IMPORT_CAPABILITIES, capabilities.read_last_capability())
    for name in CODECS:
        codecs.lookup(name)
    program = list_filter(jail.calls)
    ours, theirs = os.pipe(), os.pipe()
    syscalls.unshare(k.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        _close(ours[0], theirs[1])
        _map_ids(pid, f"0 {jail.base} 65536", wait_fd=theirs[0], answer_fd=ours[1])
    _close(ours[1], theirs[0])
    try:
        _enter(jail, program, prepare, wait_fd=ours[0], answer_fd=theirs[1])
        said = work()
    except OSError as error:
        said = verdict.refused(ArchiveRefused(f"the jail can't be made: {error}"))
    while said:
        said = said[os.write(VERDICT_FD, said) :]
    os._exit(0)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _map_ids(pid: int, id_map: str, *, wait_fd: int, answer_fd: int) -> NoReturn:
    """Write the id maps, as the parent, when the child has its user namespace, and end after the child."""
    if os.read(wait_fd, 1):
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(id_map)
        os.write(answer_fd, b"1")
    os.close(answer_fd)
    os.waitpid(pid, 0)
    os._exit(0)


def clone_root() -> int:
    """Return a copy of the mount of the root's directory, for `run`."""
    return syscalls.open_tree(ROOT_FD, "", k.AT_EMPTY_PATH | k.OPEN_TREE_CLONE)


def _enter(
    jail: Jail, program: syscalls.FilterProgram, prepare: Callable[[], int], *, wait_fd: int, answer_fd: int
) -> None:
    """Change to a root that is one tree, with no descriptors but those that belong to it. Every step must succeed."""
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)
    root_fd = prepare()
    syscalls.mount_setattr(root_fd, attr_set=_MOUNT_FLAGS | (k.MOUNT_ATTR_RDONLY if jail.read_only else 0))
    syscalls.unshare(k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
    syscalls.mount("", "/", "", k.MS_REC | k.MS_PRIVATE)
    syscalls.move_mount(root_fd, os.open("/", os.O_PATH))
    os.fchdir(root_fd)
    syscalls.mount("", ".", "", k.MS_PRIVATE)  # a copy of a shared mount is shared, and no root can be
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    os.chdir("/")
    syscalls.unshare(k.CLONE_NEWUSER)
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)  # a new user namespace may have cleared it
    os.write(answer_fd, b"1")
    if not os.read(wait_fd, 1):
        raise OSError(errno.EPERM, "the id maps were not written")
    os.close(ROOT_FD)
    syscalls.close_range(ROOT_FD + 1 + jail.kept_fds)
    os.umask(0o022)
    os.setgroups([])
    _drop_power(jail.capabilities)
    limits = (resource.RLIMIT_AS, jail.memory_bytes), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 1)
    for name, value in limits:
        resource.setrlimit(name, (value, value))
    sys.path[:], sys.meta_path[:], sys.path_hooks[:] = [], [], []
    sys.path_importer_cache.clear()
    syscalls.set_filter(program)


def _drop_power(kept: tuple[int, ...]) -> None:
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if capability not in kept:
            try:
                syscalls.prctl(k.PR_CAPBSET_DROP, capability)
            except OSError:  # EINVAL: past the kernel's last capability
                break
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(sum(1 << capability for capability in kept))
    syscalls.prctl(k.PR_SET_DUMPABLE, 0)
