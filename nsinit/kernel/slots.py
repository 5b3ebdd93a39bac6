"""User-id slots: 65536 host ids per session, and the user namespace that maps a session onto them.

Owns which ids are taken, by this nsinit and on this machine. A slot is handed out again only after its session is fully
dead. The namespace is made ahead (it costs a fork) and kept as a descriptor; nothing of a session is ever in it but the
session itself, which joins last.
Sources: user_namespaces(7); Documentation/admin-guide/sysctl/user.rst; subuid(5); fcntl(2), open file description
locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import struct
from collections import deque
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.files import write_file

SIZE = 65536
FIRST_BASE, LAST_BASE = 524288, 1878982656
"""The range systemd sets aside for containers (UIDS-GIDS.md)."""

LEASE_PATH = "/run/sandkasten-ids"

SANDBOX_ID = 1000
"""Uid and gid of commands inside, and of workspace files on disk."""
SQUASHED_ID = 100000
"""Disk ids that in-sandbox ids 0..999 get in a workspace, so that no file there is ever owned by a system user."""

SYSTEM_IDS = 1000
"""The machine's own files belong to ids below this one (adduser.conf(5), login.defs(5)); people come after."""

_LOCKED_AT_ONCE = 64
"""Ranges locked together, since a look for their ids takes a system call for every process of the machine."""

_SLEEP_S = 5
"""Seconds that a process holding a new namespace lives if nsinit dies before it opened the namespace."""

INOTIFY_INSTANCES, INOTIFY_WATCHES = 16, 16_384
"""Of each user of a session. Watches take the machine's memory."""
_KINDS = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")


@dataclass(frozen=True, slots=True)
class Slot:
    """`base`: the host id of the session's root. `userns_fd` maps 0..65535 from there on, `system_userns_fd` system ids
    only.

    The second is for files of the machine: a file that a person owns there is nobody's in a session, whatever its uid.
    """

    base: int
    userns_fd: int
    system_userns_fd: int


class RangeLocks:
    """The id ranges of this machine that its nsinits use: a file with a locked byte for each range.

    A lock ends with the nsinit that holds it, and its sessions may go on: a range that processes have ids of is taken
    as well. An nsinit in a container that has a `/run` or a pid namespace of its own is not seen.
    """

    def __init__(self, path: str = LEASE_PATH) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def lock(self, base: int) -> bool:
        """Lock a range; return whether no other nsinit has it."""
        # Locks of the open file description: a process that is forked and ends does not release them (fcntl(2)).
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, base))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, base: int) -> None:
        """Give a range back."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, base))

    def close(self) -> None:
        """Give every range back."""
        os.close(self._fd)


def _lock_of(kind: int, base: int) -> bytes:
    """Return the structure of fcntl(2) for the byte of a range."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, (base - FIRST_BASE) // SIZE, 1, 0)


def bases_in_use() -> set[int]:
    """Return the bases of the ranges that processes of this machine have effective ids of."""
    bases = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # The owner of this directory is the effective uid, of a process that is not dumpable, too
                # (`task_dump_owner` in fs/proc/base.c). To read `status` takes ten times as long.
                uid = os.stat(f"/proc/{name}").st_uid
            except FileNotFoundError:
                continue  # it has ended meanwhile
            bases.add(FIRST_BASE + (uid - FIRST_BASE) // SIZE * SIZE)
    return bases


class SlotTable:
    """The bases that are taken, and spare slots ready to be taken. Owns `lease`."""

    def __init__(self, lease: RangeLocks, *, reserved: tuple[tuple[int, int], ...], taken: frozenset[int]) -> None:
        self._lease = lease
        for base in taken:
            lease.lock(base)
        self._reserved = reserved
        self._taken = set(taken)
        self._spare: list[Slot] = []
        self._next = FIRST_BASE
        self._vacant: deque[int] = deque()
        """Bases that are locked, and of which no process has ids."""
        self._workspace_fds: dict[int, int] = {}

    @property
    def spare(self) -> int:
        """The number of slots that can be taken without making one."""
        return len(self._spare)

    @property
    def in_use(self) -> int:
        """The number of slots that sessions have."""
        return len(self._taken) - len(self._spare)

    def make_spare(self) -> None:
        """Make one more slot; costs about 3 ms."""
        base = self._free_base()
        userns_fd = make_user_namespace(base)
        try:
            system_userns_fd = make_id_map(f"0 {base} {SYSTEM_IDS}\n")
        except OSError:
            os.close(userns_fd)
            raise
        self._taken.add(base)
        self._spare.append(Slot(base, userns_fd, system_userns_fd))

    def take(self) -> Slot:
        """Return a slot no live session uses; give it back with `free`."""
        if not self._spare:
            self.make_spare()
        return self._spare.pop()

    def free(self, slot: Slot) -> None:
        """Take a slot back, after every process of its session is gone."""
        self._spare.append(slot)

    def reserve(self, base: int) -> None:
        """Mark the base of a session that an earlier nsinit built as taken."""
        self._taken.add(base)
        if base in self._vacant:
            self._vacant.remove(base)
        self._lease.lock(base)

    def forget(self, base: int) -> None:
        """Let a base be used again that was marked with `reserve`, after the end of its session."""
        self._taken.discard(base)
        self._lease.unlock(base)

    def close(self) -> None:
        """Give every range back to the machine."""
        self._lease.close()

    def workspace_userns(self, slot: Slot) -> int:
        """Return the user namespace that maps workspace files of this slot: owner and squashed ids, nothing else."""
        if slot.base not in self._workspace_fds:
            mapping = f"{SANDBOX_ID} {slot.base + SANDBOX_ID} 1\n{SQUASHED_ID} {slot.base} {SANDBOX_ID}\n"
            self._workspace_fds[slot.base] = make_id_map(mapping)
        return self._workspace_fds[slot.base]

    def _free_base(self) -> int:
        if not self._vacant:
            self._lock_ranges()
        return self._vacant.popleft()

    def _lock_ranges(self) -> None:
        """Lock the next ranges that nobody uses. Raises `OSError`: there are none."""
        locked: list[int] = []
        for _ in range(FIRST_BASE, LAST_BASE + 1, SIZE):
            base = self._next
            self._next = base + SIZE if base + SIZE <= LAST_BASE else FIRST_BASE
            if base in self._taken or any(start < base + SIZE and base < end for start, end in self._reserved):
                continue
            if self._lease.lock(base):
                locked.append(base)
            if len(locked) == _LOCKED_AT_ONCE:
                # After the locks: an nsinit that used a range has ended, so its sessions are all that can be left.
                self._keep_vacant(locked)
                if self._vacant:
                    return
                locked = []
        self._keep_vacant(locked)
        if not self._vacant:
            raise OSError(errno.EAGAIN, "every id slot is taken")

    def _keep_vacant(self, locked: list[int]) -> None:
        """Unlock those of the ranges that processes have ids of."""
        used = bases_in_use()
        for base in locked:
            if base in used:
                self._lease.unlock(base)
            else:
                self._vacant.append(base)


def parse_subordinate_ids(text: str) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) ranges of a subuid(5) file; lines that are no range are skipped."""
    ranges = []
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            ranges.append((int(fields[1]), int(fields[1]) + int(fields[2])))
    return tuple(ranges)


def read_reserved_ranges() -> tuple[tuple[int, int], ...]:
    """Return the ranges that belong to other users of this machine."""
    ranges: tuple[tuple[int, int], ...] = ()
    for path in ("/etc/subuid", "/etc/subgid"):
        try:
            with open(path, "rb") as file:
                ranges += parse_subordinate_ids(file.read().decode("utf-8", "replace"))
        except FileNotFoundError:
            pass
    return ranges


def make_id_map(mapping: str) -> int:
    """Return a descriptor of a new user namespace that only serves to map the ids of a mount; no process joins it."""
    pid, pidfd, _stack = syscalls.clone_sleeper(k.CLONE_NEWUSER, _SLEEP_S)
    try:
        # One write each, from the parent namespace, by a process with CAP_SETUID and CAP_SETGID there
        # (user_namespaces(7), "Defining user and group ID mappings").
        write_file(f"/proc/{pid}/uid_map", mapping)
        write_file(f"/proc/{pid}/gid_map", mapping)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        _end(pidfd)


def make_user_namespace(base: int) -> int:
    """Return a descriptor of a new user namespace that maps 0 to 65535 from `base` on, to be joined.

    `base` owns the namespace: objects that the kernel counts per user (inotify, signals, timers, message queues,
    processes) count in the machine's namespace for that id alone, not for the machine's root. No process in the
    namespace can ever make another namespace of any kind: the limits live in the namespace itself, so they hold for
    every process that joins.
    """
    mapping = f"0 {base} {SIZE}\n"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    pid, pidfd = syscalls.clone3(0)
    if pid == 0:
        _hold_namespace(theirs, base, parent_pid)
    try:
        theirs.close()
        if ours.recv(1) != b"n":
            raise OSError(1, "could not make a user namespace")
        write_file(f"/proc/{pid}/uid_map", mapping)
        write_file(f"/proc/{pid}/gid_map", mapping)
        ours.send(b"m")
        if ours.recv(1) != b"k":
            raise OSError(1, "could not limit the user namespace")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        _end(pidfd)


def _end(pidfd: int) -> None:
    syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)


def _hold_namespace(control: socket.socket, base: int, parent_pid: int) -> None:
    """Make the namespace and keep it alive, as the child, until nsinit has opened it. Never returns."""
    try:
        held = syscalls.capget()
        # A namespace's counts go on to the effective uid of its maker (Linux, kernel/ucount.c, `alloc_ucounts`).
        os.setresuid(-1, base, -1)
        # The change of uid took the effective set; some machines let only CAP_SYS_ADMIN make user namespaces.
        syscalls.capset(held)
        # After the change of uid, which clears the order to end with the parent (prctl(2), PR_SET_PDEATHSIG).
        syscalls.end_with_parent(parent_pid)
        syscalls.unshare(k.CLONE_NEWUSER)
        control.send(b"n")
        control.recv(1)
        for kind in _KINDS:
            # The limit of the caller's user namespace (sysctl/user.rst): 0 for every process in it, root included.
            write_file(f"/proc/sys/user/max_{kind}_namespaces", "0")
        write_file("/proc/sys/user/max_inotify_instances", str(INOTIFY_INSTANCES))
        write_file("/proc/sys/user/max_inotify_watches", str(INOTIFY_WATCHES))
        control.send(b"k")
        signal.pause()
    finally:
        os._exit(1)
