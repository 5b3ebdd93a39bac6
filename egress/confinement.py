"""The egress process gives away what it was started with, for good, before it reads its first foreign byte.

In order: descriptors as many as the hard limit grants, no core dumps, no spared place when memory runs out; no groups,
a user and a group of its own, and with them no capability; no new privileges; not dumpable; Landlock, where the kernel
has it; a system call filter. A step that fails is an OSError, and its caller ends the process: only Landlock, where a
kernel lacks it, is left out.

The filter refuses what a taken-over process would go on with: other programs and processes, mounts, namespaces, BPF,
other processes' memory, io_uring, keys, sockets other than TCP and UDP, of the machine and of routing. Threads go on,
for names are looked up in them. Landlock leaves to be read what getaddrinfo(3) reads, and nothing to be written. The
preview gateway looks up no name and is handed its sockets: it makes none, and reads no file.

Sources: capabilities(7) (a change of user ids from 0 clears the capabilities); prctl(2); seccomp(2); landlock(7);
linux/filter.h, linux/seccomp.h, linux/landlock.h; arch/x86/entry/syscalls/syscall_64.tbl, scripts/syscall.tbl.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1

ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table below, and `seccomp_data.arch` (linux/audit.h)."""

NUMBERS: Final = {
    "seccomp": (317, 277),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
REFUSED: Final = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "personality": (135, 92),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "memfd_create": (319, 279),
    "ioperm": (173, None),
    "iopl": (172, None),
    "modify_ldt": (154, None),
}
"""Calls that fail with EPERM, by name, with their numbers on x86_64 and aarch64."""

MAP_UPDATE_ELEM = 2
"""The one command of bpf(2) that a process which dials keeps (linux/bpf.h): `barrier.LaterAddresses` adds by it. The
kernel takes the command for an int, so its lower half is compared."""

_X32_BIT = 0x40000000
"""Numbers from here on are the x32 ABI's, another way to the same calls (linux/unistd.h, __X32_SYSCALL_BIT)."""

_CLONE_THREAD = 0x10000
_LOCAL_FAMILIES, _INTERNET_FAMILIES = (1, 16), (2, 10)
"""AF_UNIX and AF_NETLINK, which getaddrinfo(3) needs; AF_INET and AF_INET6 (linux/socket.h)."""
_TYPE_MASK, _TYPES, _PROTOCOLS = 0xF, (1, 2), (0, 6, 17)
"""SOCK_STREAM and SOCK_DGRAM without flags (linux/net.h), of TCP and UDP (linux/in.h). Others, MPTCP among them,
connect without asking the programs of a cgroup."""

_LD_ABS, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # linux/bpf_common.h
_NR, _ARCH, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2 = 0, 4, 16, 24, 32
"""Places in struct seccomp_data; both architectures are little-endian."""
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
"""Directories of name service modules: a change of nsswitch.conf(5) loads another."""

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3  # LANDLOCK_ACCESS_FS_*
_REPLACE_FILES = _READ_FILE | _READ_DIR | 1 << 1 | 1 << 5 | 1 << 8  # and WRITE_FILE, REMOVE_FILE, MAKE_REG
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock to the number of file rights it knows: REFER came with 2, TRUNCATE with 3, IOCTL_DEV with 5."""
_LANDLOCK_VERSION = 1 << 0  # LANDLOCK_CREATE_RULESET_VERSION
_BIND_TCP = 1 << 0  # LANDLOCK_ACCESS_NET_BIND_TCP, since 4
_SCOPES = 0b11  # LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and _SIGNAL, since 6
_PATH_BENEATH = 1


def confine(user_id: int, group_id: int, *, dials: bool = True, own_directory: int | None = None) -> None:
    """Give everything away. Irrevocable; to be called with one thread, when all modules are imported.

    A process that was not started as root keeps its user. `dials`: it makes sockets and looks names up. Files in
    `own_directory`, a descriptor, can be replaced.

    Raises:
        OSError: a step failed; the process must end.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < 0:  # that of a service which the kernel spares (proc_pid_oom_score_adj(5))
        score.write_text("0")
    if os.geteuid() == 0:
        os.setgroups(())
        os.setresgid(group_id, group_id, group_id)
        os.setresuid(user_id, user_id, user_id)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _check_nothing_is_left()
    if landlock_version():
        _keep_files(readable_paths() if dials else (), own_directory)
    enter_filter(dials=dials)


def _check_nothing_is_left() -> None:
    """Look at what the kernel says of this process: a user other than root without capabilities."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    powers = {status[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")}
    if "0" in status["Uid"] or powers != {"0" * 16} or status["NoNewPrivs"] != ["1"]:
        raise OSError(errno.EPERM, f"the process has capabilities {sorted(powers)} as user {status['Uid']}")


# Landlock -----------------------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """Return the version of Landlock of this kernel, 0 if it has none or has it switched off."""
    try:
        return call("landlock_create_ruleset", None, 0, _LANDLOCK_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def readable_paths() -> list[str]:
    """Return the directories that getaddrinfo(3) reads in: /etc, where its resolv.conf(5) really is, and libraries."""
    resolver = os.path.dirname(os.path.realpath("/etc/resolv.conf"))
    return [path for path in dict.fromkeys(("/etc", resolver, *_LIBRARIES)) if os.path.isdir(path) and path != "/"]


def _keep_files(readable: Iterable[str], own_directory: int | None) -> None:
    version = landlock_version()
    files = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    attributes = struct.pack("=QQQ", files, _BIND_TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    # struct landlock_ruleset_attr has grown: a kernel takes a longer one if what it does not know is 0 (E2BIG else).
    ruleset = call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path in readable:
            directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, directory)  # packed, linux/landlock.h
                call("landlock_add_rule", ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(directory)
        if own_directory is not None:
            own = struct.pack("=Qi", _REPLACE_FILES & files, own_directory)
            call("landlock_add_rule", ruleset, _PATH_BENEATH, own, 0)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


# The filter ---------------------------------------------------------------------------------------------------------


def filter_program(machine: str, *, dials: bool = True) -> bytes:
    """Return the filter in classic BPF for an architecture, a key of `ARCHITECTURES`."""
    column, arch = ARCHITECTURES[machine]
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program = [(_LD_ABS, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, _KILL_PROCESS), (_LD_ABS, 0, 0, _NR)]
    program += [(_JGE, 0, 1, _X32_BIT), (_RET, 0, 0, eperm)]
    if dials:
        adds = [(_LD_ABS, 0, 0, _ARGUMENT_0), *_one_of((MAP_UPDATE_ELEM,), _ALLOW), (_RET, 0, 0, eperm)]
        program += [(_JEQ, 0, len(adds), REFUSED["bpf"][column] or 0), *adds]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(_JEQ, 0, 1, number), (_RET, 0, 0, eperm)]
    # No filter sees the flags of clone3(2), they are in memory; the C library goes on with clone(2).
    program += [(_JEQ, 0, 1, NUMBERS["clone3"][column]), (_RET, 0, 0, enosys)]
    thread = [(_LD_ABS, 0, 0, _ARGUMENT_0), (_JSET, 0, 1, _CLONE_THREAD), (_RET, 0, 0, _ALLOW), (_RET, 0, 0, eperm)]
    program += [(_JEQ, 0, len(thread), NUMBERS["clone"][column]), *thread]
    is_socket = NUMBERS["socket"][column]
    if not dials:
        program += [(_JEQ, 0, 1, is_socket), (_RET, 0, 0, eperm), (_RET, 0, 0, _ALLOW)]
        return _encode(program)
    sockets = [(_LD_ABS, 0, 0, _ARGUMENT_0), *_one_of(_LOCAL_FAMILIES, _ALLOW), *_none_of(_INTERNET_FAMILIES, eperm)]
    sockets += [(_LD_ABS, 0, 0, _ARGUMENT_1), (_AND, 0, 0, _TYPE_MASK), *_none_of(_TYPES, eperm)]
    sockets += [(_LD_ABS, 0, 0, _ARGUMENT_2), *_none_of(_PROTOCOLS, eperm)]
    return _encode([*program, (_JEQ, 0, len(sockets), is_socket), *sockets, (_RET, 0, 0, _ALLOW)])


_Instruction = tuple[int, int, int, int]


def _one_of(values: Sequence[int], answer: int) -> list[_Instruction]:
    """Return instructions that give the answer if the accumulator is one of the values."""
    return [each for value in values for each in ((_JEQ, 0, 1, value), (_RET, 0, 0, answer))]


def _none_of(values: Sequence[int], answer: int) -> list[_Instruction]:
    """Return instructions that give the answer if the accumulator is none of the values."""
    tests = [(_JEQ, len(values) - each, 0, value) for each, value in enumerate(values)]
    return [*tests, (_RET, 0, 0, answer)]


def _encode(program: Iterable[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def enter_filter(*, dials: bool = True) -> None:
    """Put all threads of this process under the filter, for good. Needs no_new_privs."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no system call filter for {platform.machine()}")
    program = ctypes.create_string_buffer(filter_program(platform.machine(), dials=dials))
    size = (len(program) - 1) // 8  # struct sock_filter; create_string_buffer adds a byte
    fprog = struct.pack("@HP", size, ctypes.addressof(program))
    if call("seccomp", _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, fprog):
        raise OSError(errno.EBUSY, "a thread has a filter of its own")


# Calls --------------------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3))


def call(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call of one of the tables by its name. Raises `OSError`."""
    number = {**NUMBERS, **REFUSED}[name][ARCHITECTURES[platform.machine()][0]]
    assert number is not None
    return _check(
        _libc.syscall(number, *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    )


def _check(result: int) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
