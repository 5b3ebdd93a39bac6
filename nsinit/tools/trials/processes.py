"""Trials of the guards of a process: namespaces, ids, capabilities, filters, and the calls that handle processes.

Sources: clone(2), pidfd_open(2), close_range(2), openat2(2), seccomp(2), landlock(7), keyrings(7), capabilities(7).
"""

from __future__ import annotations

import errno
import os
import signal
import socket

from nsinit.kernel import capabilities, landlock, slots, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.seccomp.filters import prepare
from nsinit.kernel.seccomp.profiles import STRICT
from nsinit.server.memory_watch import COUNT_PATH
from nsinit.tools.trials.attempt import FallsBack, Room, Seen

_KINDS = {
    "mnt": k.CLONE_NEWNS,
    "pid": k.CLONE_NEWPID,
    "uts": k.CLONE_NEWUTS,
    "ipc": k.CLONE_NEWIPC,
    "net": k.CLONE_NEWNET,
    "cgroup": k.CLONE_NEWCGROUP,
}
_MIN_FREE_RANGES = 1000
_FILE = "file"


def clone3(_room: Room) -> str:
    pid, pidfd = syscalls.clone3(0)
    if pid == 0:
        os._exit(0)
    os.close(pidfd)
    os.waitpid(pid, 0)
    return "made a process by clone3"


def namespaces(_room: Room) -> Seen:
    """Make namespaces of one kind at a time, so that the answer names the kind that fails; then all as a session has
    them."""
    for name, flag in _KINDS.items():
        _clone(flag, name)
    _clone(sum(_KINDS.values()) & ~k.CLONE_NEWCGROUP, "all kinds together")
    return Seen(f"made a process in new {', '.join(_KINDS)} namespaces")


def _clone(flags: int, name: str) -> None:
    try:
        pid, pidfd = syscalls.clone3(flags)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from error
    if pid == 0:
        os._exit(0)
    os.close(pidfd)
    os.waitpid(pid, 0)


def user_namespace(_room: Room) -> str:
    os.close(slots.make_user_namespace(slots.FIRST_BASE))
    return f"made one with ids {slots.FIRST_BASE} to {slots.FIRST_BASE + slots.SIZE - 1} in which none can be made"


def id_ranges(_room: Room) -> str:
    """Count the ranges of ids that belong to no other user of the machine."""
    reserved = slots.read_reserved_ranges()
    bases = range(slots.FIRST_BASE, slots.LAST_BASE + 1, slots.SIZE)
    free = sum(not any(start < base + slots.SIZE and base < end for start, end in reserved) for base in bases)
    seen = f"{free} of {len(bases)} ranges of {slots.SIZE} ids are nobody's"
    if free < _MIN_FREE_RANGES:
        raise FallsBack(seen)
    return seen


def pidfd(_room: Room) -> str:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    try:
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(pidfd)
    return "ended a process by its descriptor"


def close_range(_room: Room) -> str:
    fd = os.dup(0)
    syscalls.close_range(fd)
    try:
        os.fstat(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return "closed every descriptor from one on"
        raise
    raise OSError(0, "a descriptor stayed open")


def openat2(room: Room) -> str:
    os.symlink("/proc/self/status", f"{room.directory}/link")
    root_fd = os.open(room.directory, os.O_PATH | os.O_DIRECTORY)
    try:
        flags = k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS
        os.close(syscalls.openat2(root_fd, "link", os.O_RDONLY, resolve=flags))
    except FileNotFoundError:
        return "a link to a place outside led nowhere"
    finally:
        os.close(root_fd)
        os.unlink(f"{room.directory}/link")
    raise OSError(0, "a link led out of the directory")


def drop_capabilities(_room: Room) -> str:
    """Drop capabilities as PID 1 of a sandbox does, in a user namespace like a session's."""
    last = capabilities.read_last_capability()
    status_fd = os.open("/proc/self/status", os.O_RDONLY)
    userns_fd = slots.make_user_namespace(slots.FIRST_BASE)
    syscalls.setns(userns_fd, k.CLONE_NEWUSER)
    capabilities.drop_bounding_set(last, root_inside=True)
    capabilities.become_runner()
    capabilities.keep_runner_capabilities(root_inside=True)
    fields = dict(line.split(":\t") for line in os.pread(status_fd, 65536, 0).decode().splitlines() if ":\t" in line)
    if int(fields["CapBnd"], 16) or fields["NoNewPrivs"] != "1":
        raise OSError(0, "the bounding set is not empty")
    return "joined a session's user namespace and gave all of it away: empty bounding set, no new privileges"


def seccomp(_room: Room) -> str:
    """Check that the filter of sandboxes refuses a call that was allowed without it, and lets others pass."""
    filters = prepare()
    program = filters.programs[filters.number(STRICT.name)]
    assert program is not None
    syscalls.unshare(0)
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.set_filter(program)
    try:
        syscalls.unshare(0)
    except PermissionError:
        return "put a process under the filter of sandboxes, and it held"
    raise OSError(0, "the filter was accepted and did nothing")


def landlock_scopes(_room: Room) -> Seen:
    """Check that a listener outside of the domain is out of reach from inside."""
    abi = landlock.probe_abi()
    if abi < landlock.SCOPES_ABI:
        seen = f"ABI {abi}: sockets and signals are kept apart by namespaces alone" if abi else "this kernel has none"
        raise FallsBack(seen, landlock_abi=abi) if abi else OSError(errno.ENOSYS, seen)
    name = f"\0sandkasten-probe-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            _reach(client, name)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != errno.EPERM:
        raise OSError(status if status > 0 else 0, "a socket outside was not refused")
    return Seen(f"ABI {abi}: a socket outside was out of reach", {"landlock_abi": abi})


def _reach(client: socket.socket, name: str) -> None:
    """Connect from inside the domain. Never returns; the status is the errno."""
    try:
        syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
        landlock.keep_inside(landlock.probe_abi())
        client.connect(name)
    except OSError as error:
        os._exit(error.errno or 255)
    finally:
        os._exit(0)


def landlock_files(room: Room) -> str:
    """Check that a rule that lets no file be written holds."""
    abi = landlock.probe_abi()
    if abi < landlock.FILES_ABI:
        raise FallsBack(f"ABI {abi} knows no complete rules for files")
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.landlock_restrict_self(landlock.make_file_rules(None, []))
    try:
        os.close(os.open(f"{room.directory}/{_FILE}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))
    except PermissionError:
        return "a file that must not be written was not"
    os.unlink(f"{room.directory}/{_FILE}")
    raise OSError(0, "a file was written against the rule")


def keyring(_room: Room) -> str:
    syscalls.join_session_keyring()
    return "left the session keyring for one of its own"


def record_locks(_room: Room) -> str:
    with open(COUNT_PATH, "rb") as file:
        return f"the kernel counts its locks, {int(file.read().split()[0])} now"


def kernel_log(_room: Room) -> str:
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise FallsBack(f"/dev/kmsg: {error.strerror}") from error
    try:
        os.read(fd, 8192)
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise FallsBack(f"/dev/kmsg: {error.strerror}") from error
    finally:
        os.close(fd)
    return "read the kernel's log: processes killed for memory can be named"
