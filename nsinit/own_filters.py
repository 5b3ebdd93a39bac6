"""The system call filters of our own processes: what each part may call, by name, and nothing else.

The lists come from traces of every part at all of its work, with calls of the same use added, so that another C
library or interpreter finds what it needs. A call that is not on the list fails with ENOSYS, as on an older kernel, and
its name is logged, once in each process. A number that this version knows no name of fails alike, without a line.

A filter is inherited for good. The launcher, and what becomes PID 1 of a sandbox, have therefore the short list of
refusals `MACHINE` alone: calls that no sandbox could use, whatever its profile. docs/adr/0013-filters-of-our-own.md has
the reasons.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.netlink import NETLINK_NETFILTER, NETLINK_ROUTE
from nsinit.kernel.seccomp.bpf import encode
from nsinit.kernel.seccomp.compile import TRAP, compile_list, compile_refusals
from nsinit.kernel.seccomp.filters import ARCH
from nsinit.kernel.seccomp.profile import ArgTest, Rule
from nsinit.kernel.seccomp.profiles import TIOCLINUX, TIOCSETD, TIOCSTI
from nsinit.kernel.seccomp.table import NUMBERS, Arch
from nsinit.log import log

_LIFE = """
brk mmap munmap mprotect mremap madvise membarrier futex rseq set_robust_list set_tid_address sched_yield
sched_getaffinity getpid gettid getppid getpgrp getpgid getuid geteuid getgid getegid getresuid getresgid getgroups
getrusage getrlimit prlimit64 uname sysinfo getrandom arch_prctl prctl getcpu restart_syscall exit exit_group
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack tgkill
time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep times
"""
_FILES = """
read write pread64 pwrite64 readv writev lseek close close_range open openat openat2 fstat stat lstat newfstatat statx
access faccessat faccessat2 readlink readlinkat getdents64 getcwd dup dup2 dup3 fcntl ioctl pipe pipe2 umask statfs
fstatfs mkdir mkdirat rmdir unlink unlinkat
"""
_WAITING = """
poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2
"""
_TALKING = "sendmsg recvmsg sendto recvfrom getsockopt setsockopt getsockname getpeername shutdown"
_CONNECTIONS = "socketpair connect bind listen accept accept4"
_KEEPING = """
rename renameat renameat2 chmod fchmod fchmodat fchmodat2 utimensat fsync fdatasync sync_file_range ftruncate truncate
fallocate fadvise64 copy_file_range sendfile flock
"""
_OWNING = """
chown fchown lchown fchownat link linkat symlink symlinkat mknod mknodat setxattr lsetxattr fsetxattr getxattr lgetxattr
fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr syncfs chdir fchdir
"""
_PROCESSES = """
fork vfork clone clone3 execve wait4 waitid kill pidfd_open pidfd_send_signal setsid setpgid getsid alarm pause
setpriority getpriority setrlimit
"""
_POWERS = "capget capset setresuid setresgid setgroups setfsuid setfsgid seccomp sethostname keyctl"
_MOUNTS = """
mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount mount_setattr unshare setns quotactl_fd
"""

_NAMES: Final = {number: name for name, number in NUMBERS[ARCH].items()}

_THREAD = 0x10000
_AF_UNIX, _AF_INET, _AF_NETLINK, _AF_INET6 = 1, 2, 16, 10
_STEERING = (k.BPF_MAP_CREATE, k.BPF_MAP_UPDATE_ELEM, k.BPF_PROG_LOAD, k.BPF_LINK_CREATE)
_NO_TYPING = tuple(Rule(("ioctl",), "trap", args=(ArgTest(1, "eq", each),)) for each in (TIOCSTI, TIOCLINUX, TIOCSETD))
"""A terminal that a part was started from is often root's: nobody types there in the person's place."""


def _families(*families: int) -> tuple[Rule, ...]:
    return tuple(Rule(("socket",), "allow", args=(ArgTest(0, "eq", each),)) for each in families)


def _names(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


@dataclass(frozen=True, slots=True)
class Part:
    """A process of ours. `name`: in the log; `calls`: those that it may make; `rules` about arguments come before."""

    name: str
    calls: frozenset[str]
    rules: tuple[Rule, ...] = ()


DAEMON: Final = Part(
    "daemon",
    _names(_LIFE, _FILES, _WAITING, _TALKING, _CONNECTIONS, _KEEPING, "sendmmsg recvmmsg wait4 waitid kill")
    | _names("pidfd_open pidfd_send_signal alarm setitimer getpriority mincore msync fchown"),
    (
        *_NO_TYPING,
        *_families(_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK),  # netlink: a look-up of names asks for addresses
        Rule(("clone",), "allow", args=(ArgTest(0, "masked_eq", _THREAD, _THREAD),)),
        # No filter sees the flags of clone3; the C library goes on with clone. To start a process libraries block all
        # signals, and a call that is trapped while SIGSYS is blocked kills: so these fail without a line in the log.
        Rule(("clone", "clone3", "fork", "vfork"), "errno", errno.ENOSYS),
    ),
)
"""Threads and no processes: nothing is executed."""

NSINIT: Final = Part(
    "nsinit",
    _names(_LIFE, _FILES, _WAITING, _TALKING, _CONNECTIONS, _KEEPING, _OWNING, _PROCESSES, _POWERS, _MOUNTS, "chroot")
    | _names("sync sched_setaffinity landlock_create_ruleset landlock_add_rule landlock_restrict_self"),
    (*_NO_TYPING, *_families(_AF_UNIX, _AF_INET)),  # the internet's for the loopback of a sandbox
)
"""nsinit, its chores, and mke2fs, e2fsck and resize2fs."""

BUILDER: Final = Part(
    "builder",
    _names(_LIFE, _FILES, _TALKING, _KEEPING, _OWNING, _MOUNTS, "capget capset sethostname seccomp poll ppoll chroot")
    | _names("vfork clone clone3 execve wait4 waitid pidfd_open alarm setrlimit setpriority sync"),
    (*_NO_TYPING, *_families(_AF_UNIX, _AF_INET)),
)
"""A builder of sandboxes, with the tools that it executes; it signals nobody."""

CGROUP_MAKER: Final = Part(
    "cgroup maker",
    _names(_LIFE, _FILES, _TALKING, "chown fchown fchownat lchown capset poll ppoll chdir fchdir"),
    _NO_TYPING,
)
"""Files of cgroups, and the socket to nsinit: no process, no mount, no socket of its own."""

NETWORK_MAKER: Final = Part(
    "network maker",
    _names(_LIFE, _TALKING, "read write close close_range fstat lseek fcntl poll ppoll setns bind listen"),
    (
        *_NO_TYPING,
        *_families(_AF_INET),
        Rule(("socket",), "allow", args=(ArgTest(0, "eq", _AF_NETLINK), ArgTest(2, "eq", NETLINK_ROUTE))),
        *(Rule(("bpf",), "allow", args=(ArgTest(0, "eq", each),)) for each in _STEERING),
    ),
)
"""Sockets, address and route of a session's network, and the program that steers there: no process, no file. The one
part that calls bpf(2), for four of its commands."""

BRIDGE_MAKER: Final = Part(
    "bridge maker",
    _names(
        _LIFE,
        _TALKING,
        "read write open openat close close_range fstat newfstatat lseek fcntl ioctl poll ppoll setns bind",
    ),
    (
        *_NO_TYPING,
        *_families(_AF_UNIX, _AF_INET),  # the C library asks for the number of an interface over one of these
        *(
            Rule(("socket",), "allow", args=(ArgTest(0, "eq", _AF_NETLINK), ArgTest(2, "eq", each)))
            for each in (NETLINK_ROUTE, NETLINK_NETFILTER)
        ),
    ),
)
"""Links, routes, rules of packets, and settings of networks: no process, no file but of /proc/sys."""

PARTS: Final = (DAEMON, NSINIT, BUILDER, CGROUP_MAKER, NETWORK_MAKER, BRIDGE_MAKER)

MACHINE: Final = _names(
    "init_module finit_module delete_module create_module get_kernel_syms query_module kexec_load kexec_file_load",
    "swapon swapoff acct settimeofday clock_settime iopl ioperm open_by_handle_at lookup_dcookie nfsservctl quotactl",
    "_sysctl uselib vserver",
)
"""Calls with power over the machine: in the kernel they ask for a capability in the machine's own user namespace."""


def compile_part(part: Part, arch: Arch) -> bytes:
    """Return the program of a part."""
    return encode(compile_list(part.calls, arch, rules=part.rules, refused=TRAP))


class PartFilters:
    """The programs of parts that a process will put itself or its forks under, compiled before."""

    def __init__(self, *parts: Part) -> None:
        self._programs = {part.name: syscalls.FilterProgram(compile_part(part, ARCH)) for part in parts}

    def enter(self, part: Part) -> None:
        """Put this process, which has one thread, under the filter of a part. Needs no_new_privs, or CAP_SYS_ADMIN."""
        told: set[int] = set()

        def tell(number: int) -> None:
            if number not in told:
                told.add(number)
                log("warning", "system call refused", part=part.name, call=_NAMES[number])

        syscalls.on_trapped_call(tell)
        syscalls.set_filter(self._programs[part.name])


def refuse_machine() -> None:
    """Put this process, and every one that it starts, under the refusals of `MACHINE`."""
    syscalls.set_filter(syscalls.FilterProgram(encode(compile_refusals(MACHINE, ARCH))))
