"""System calls by name, for attempts: each returns `ok` or the name of the errno, so that refusals can be compared.

Raw numbers instead of the C library's wrappers, so that the kernel gets exactly the intended call. Runs inside a
session; standard library only. Sources: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Iterable, Mapping

from sandkasten.security.probes.attempt import NotApplicable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_NUMBERS: Mapping[str, tuple[int, int]] = {  # x86_64, aarch64; -1: that machine has none
    "ioctl": (16, 29),
    "clone": (56, 220),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "setuid": (105, 146),
    "setreuid": (113, 145),
    "setresuid": (117, 147),
    "capset": (126, 91),
    "personality": (135, 92),
    "modify_ldt": (154, -1),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "adjtimex": (159, 171),
    "setrlimit": (160, 164),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "setxattr": (188, 5),
    "clock_settime": (227, 112),
    "tgkill": (234, 131),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "rt_sigqueueinfo": (129, 138),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "prlimit64": (302, 261),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
}
MACHINES = ("x86_64", "aarch64")


def number(name: str) -> int:
    """Return the number of a system call on this machine. Raises `NotApplicable`."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise NotApplicable(f"no table of system calls for {machine}")
    found = _NUMBERS[name][MACHINES.index(machine)]
    if found < 0:
        raise NotApplicable(f"{machine} has no {name}")
    return found


def raw(nr: int, *arguments: object) -> int:
    """Make a call by number and return its result. Integers go in full width. Raises OSError."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = _libc.syscall(ctypes.c_long(nr), *wide)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def get(name: str, *arguments: object) -> int:
    """Make a call by name and return its result. Raises OSError, `NotApplicable`."""
    return raw(number(name), *arguments)


def answer(function: Callable[..., object], *arguments: object) -> str:
    """Run a function; return `ok` or the name of the errno."""
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "ok"


def call(name: str, *arguments: object) -> str:
    """Make a call by name; return `ok` or the name of the errno. Raises `NotApplicable`."""
    nr = number(name)
    return answer(raw, nr, *arguments)


def calls(*tried: tuple[object, ...]) -> dict[str, str]:
    """Make several calls; each is its name and its arguments."""
    return {str(name): call(str(name), *arguments) for name, *arguments in tried}


def reading(paths: Iterable[str], *, n_bytes: int = 4096) -> dict[str, str]:
    """Read the beginning of each file; `empty`, the name of the errno, or `N bytes` that should not have come."""
    return {path: _read(path, n_bytes) for path in paths}


def _read(path: str, n_bytes: int) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.read(fd, n_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    return f"{len(found)} bytes" if found.strip() else "empty"


def opening(paths: Iterable[str], flags: int = os.O_WRONLY) -> dict[str, str]:
    """Open each file and close it again."""
    return {path: answer(_open, path, flags | os.O_NONBLOCK | os.O_NOCTTY) for path in paths}


def _open(path: str, flags: int) -> None:
    os.close(os.open(path, flags))


def buffer(n_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return zeroed memory for the kernel to read or write."""
    return ctypes.create_string_buffer(n_bytes)
