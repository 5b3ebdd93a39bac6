"""The built-in seccomp profiles, and the floor: rules that hold below every profile, an operator's own included.

Owns the lists of system calls and the reasons for refusals. `strict` allows the calls that programs need and refuses
every other, those of newer kernels included. `debug` adds the calls of gdb and strace. `mvp` refuses a list and allows
every other call, for programs that `strict` breaks. `off` stands for no filter, so it is no profile.

Numbers: asm/ioctls.h, linux/sched.h, linux/personality.h, linux/in.h, linux/socket.h, asm/socket.h, asm/resource.h,
asm-generic/mman.h, asm-generic/mman-common.h, linux/prctl.h, linux/memfd.h, linux/shm.h.
"""

from __future__ import annotations

import errno
from typing import Final

from nsinit.kernel.seccomp.profile import ArgTest, Profile, Rule

OFF: Final = "off"
"""The name that stands for no filter."""

_MOUNTS = """
mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr
"""
_NAMESPACES = "unshare setns"
_MACHINE = """
reboot kexec_load kexec_file_load init_module finit_module delete_module create_module get_kernel_syms query_module bpf
swapon swapoff acct quotactl quotactl_fd settimeofday clock_settime iopl ioperm syslog vhangup sethostname
setdomainname lookup_dcookie nfsservctl _sysctl uselib vserver fanotify_init lsm_set_self_attr
"""
_OTHERS_OBJECTS = "open_by_handle_at add_key request_key keyctl"
"""File handles and keys are looked up across the sandbox's walls."""

_DEBUGGING = "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp"
_RISKY = "io_uring_setup io_uring_enter io_uring_register userfaultfd perf_event_open"
"""Rich in holes, and io_uring's operations are seen by no filter."""

_FILES = """
read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 lseek close close_range fstat stat lstat
newfstatat statx access faccessat faccessat2 open openat openat2 creat dup dup2 dup3 fcntl flock ioctl truncate
ftruncate fallocate fsync fdatasync sync_file_range fadvise64 readahead copy_file_range sendfile splice tee
vmsplice rename renameat renameat2 mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat readlink readlinkat
mknod mknodat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes futimesat utimensat
getdents getdents64 getcwd chdir fchdir statfs fstatfs cachestat name_to_handle_at file_getattr setxattr lsetxattr
fsetxattr getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat removexattr
lremovexattr fremovexattr removexattrat inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
"""
_MEMORY = """
brk mmap munmap mprotect mremap msync mincore madvise mlock mlock2 munlock mlockall munlockall remap_file_pages mseal
memfd_create memfd_secret membarrier map_shadow_stack pkey_alloc pkey_free pkey_mprotect get_mempolicy
"""
_PROCESSES = """
fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid getsid
setsid getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid
setfsuid setfsgid setgroups capget capset prctl arch_prctl set_tid_address set_thread_area get_thread_area
set_robust_list get_robust_list rseq getrlimit getrusage times getpriority setpriority sched_yield
sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
sched_rr_get_interval sched_setaffinity sched_getaffinity sched_setattr sched_getattr ioprio_set ioprio_get getcpu
uname sysinfo getrandom restart_syscall pidfd_open process_mrelease seccomp landlock_create_ruleset landlock_add_rule
landlock_restrict_self uretprobe uprobe
"""
_SIGNALS = """
kill tkill tgkill pidfd_send_signal rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait
rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn sigaltstack signalfd signalfd4 pause alarm
"""
_TIME = """
time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep getitimer setitimer timer_create timer_settime
timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
"""
_WAITING = """
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
pipe pipe2 futex futex_waitv futex_wake futex_wait futex_requeue
"""
_TALKING = """
connect accept accept4 bind listen getsockname getpeername getsockopt setsockopt shutdown sendto sendmsg sendmmsg
recvfrom recvmsg recvmmsg semget semop semtimedop semctl shmget shmat shmdt shmctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""
STRICT_NAMES: Final = frozenset(" ".join((_FILES, _MEMORY, _PROCESSES, _SIGNALS, _TIME, _WAITING, _TALKING)).split())

_ENOSYS_NAMES = """
clone3 afs_syscall epoll_ctl_old epoll_wait_old getpmsg putpmsg security tuxcall listmount statmount listns file_setattr
lsm_get_self_attr lsm_list_modules set_mempolicy_home_node
"""
"""Calls that no kernel has any more, calls that programs do without, and clone3, whose flags no filter can see."""
_AIO = "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents"
"""Contexts come out of one pool of the machine, `fs.aio-max-nr`: 16 calls of one user can take all. Programs take
ENOSYS for a kernel without CONFIG_AIO and use threads."""

_OTHER = """
adjtimex clock_adjtime fanotify_mark mbind migrate_pages modify_ldt move_pages set_mempolicy sysfs ustat
"""
STRICT_REFUSED: Final = frozenset(" ".join((_DEBUGGING, _RISKY, _OTHER)).split())
"""Calls that `strict` refuses beyond the floor. `_OTHER` tunes the machine's clock and memory, or is of the past."""

TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
"""Type into a terminal, and paste; load a line discipline's module."""
_NAMESPACE_FLAGS = 0x7E020000
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_LOCKS_OF_FILES = (ArgTest(1, "masked_eq", 36, 0xFFFFFFFC), ArgTest(1, "masked_eq", 1024, 0xFFFFFFEF))
"""F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW; F_SETLEASE; F_SETDELEG."""
_RLIMIT_CORE = 4
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_OTHER_FAMILIES = (
    ArgTest(0, "eq", 3),
    ArgTest(0, "masked_eq", 4, 0xFFFFFFFC),
    ArgTest(0, "masked_eq", 8, 0xFFFFFFFE),
    ArgTest(0, "eq", 11),
    ArgTest(0, "masked_eq", 12, 0xFFFFFFFC),
    ArgTest(0, "gt", _AF_NETLINK),
)
"""Every address family but the four above: packets, virtual machines' sockets, the kernel's ciphers, keys of IPsec and
whatever else has a module to load."""
_NETLINK_ROUTE, _NETLINK_AUDIT = 0, 9
_INTERNET = ArgTest(0, "masked_eq", _AF_INET, 0xFFFFFFFF & ~(_AF_INET ^ _AF_INET6))
"""Both address families, which differ in one bit."""

_DATAGRAM = ArgTest(1, "masked_eq", 2, 0xF)
_COUNTED_PROTOCOLS = (ArgTest(2, "masked_eq", 0, 0xFFFFFFFE), *(ArgTest(2, "eq", each) for each in (6, 17, 58)))
"""Any and ICMP, TCP, UDP, ICMPv6."""
_SOL_SOCKET = 1
_UNCHARGED_OPTIONS = (7, 8, 37, 65)
"""SO_SNDBUF, SO_RCVBUF, SO_TIMESTAMPING (old, new): what waits in a larger buffer, or comes back with a time stamp, is
in memory that the kernel charges to no cgroup."""
_ATTACH_FILTER = 26
_PROTOCOLS = (0, 1, 6, 17, 58)
"""Any, ICMP, TCP, UDP, ICMPv6: no other one's module gets loaded."""
_OTHER_TYPES = (0x4, 0x8)
"""Bits that stream, datagram and raw lack, and every other type has one of: the kernel looks for modules by type, too
(DCCP, SCTP)."""
_LOADERS = (0x8940, 0x8941, 0x8982, 0x8983, 0x89A0, 0x89A1)
"""Requests about bridges and VLANs, for which the kernel loads modules before it asks who wants that."""
_MOST_POLLED = 2048
"""Descriptors that one call may wait for. The kernel charges nobody for up to 136 bytes for each."""
_LONGEST_ATTRIBUTE = 484
"""Bytes of an extended attribute. An access control list of that length takes 512, which are charged to nobody; the
file in memory that it belongs to takes twice as much, which is charged."""
_MERGEABLE = 12
_SET_MEMORY_MERGE = 67
_HUGETLB_MAPPING, _HUGETLB_MEMFD, _HUGETLB_SHM = 0x40000, 0x4, 0o4000
_PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
_ADDR_NO_RANDOMIZE = 0x40000


def _refuse(names: str, number: int = errno.EPERM) -> Rule:
    return Rule(tuple(sorted(names.split())), "errno", number)


def _when(name: str, *args: ArgTest, errno: int | None = None) -> Rule:
    return Rule((name,), "allow", args=args) if errno is None else Rule((name,), "errno", errno, args)


_CORE = ArgTest(1, "eq", _RLIMIT_CORE), ArgTest(2, "ne", 0)
_SOCKETS = (
    *(_when("socket", families, errno=errno.EPERM) for families in _OTHER_FAMILIES),
    _when("socketpair", ArgTest(0, "ne", _AF_UNIX), errno=errno.EPERM),  # no other family has pairs
    # As a kernel without auditing has it: useradd and passwd go on then, and end if the socket is forbidden.
    _when("socket", ArgTest(0, "eq", _AF_NETLINK), ArgTest(2, "eq", _NETLINK_AUDIT), errno=errno.EPROTONOSUPPORT),
    _when("socket", ArgTest(0, "eq", _AF_NETLINK), ArgTest(2, "ne", _NETLINK_ROUTE), errno=errno.EPERM),
    # What waits in them is charged to no cgroup, or is taken beyond its limit: only their number bounds it, and PID 1
    # counts. Datagrams of further protocols would escape the count.
    Rule(("socket",), "ask", args=(ArgTest(0, "eq", _AF_NETLINK),)),
    *(Rule(("socket",), "ask", args=(_INTERNET, each)) for each in _COUNTED_PROTOCOLS),
    _when("socket", _INTERNET, _DATAGRAM, ArgTest(2, "gt", 58), errno=errno.EPERM),
    # Success without effect: a server whose buffer stays small works, one that is refused may end.
    *(
        _when("setsockopt", ArgTest(1, "eq", _SOL_SOCKET), ArgTest(2, "eq", option), errno=0)
        for option in _UNCHARGED_OPTIONS
    ),
    # A classic filter has a copy that is charged to nobody, and takes more than the charged filter and its socket.
    _when("setsockopt", ArgTest(1, "eq", _SOL_SOCKET), ArgTest(2, "eq", _ATTACH_FILTER), errno=errno.EPERM),
)
FLOOR: Final = (
    _refuse(" ".join((_MOUNTS, _NAMESPACES, _MACHINE, _OTHERS_OBJECTS))),
    *(
        _when("ioctl", ArgTest(1, "eq", request), errno=errno.EPERM)
        for request in (TIOCSTI, TIOCLINUX, TIOCSETD, *_LOADERS)
    ),
    *(
        _when("clone", ArgTest(0, "masked_eq", flag, flag), errno=errno.EPERM)
        for flag in (1 << bit for bit in range(32))
        if flag & _NAMESPACE_FLAGS
    ),
    # Locks take memory that is charged to no cgroup. Those that a process holds are counted; others have no holder that
    # could be found: locks and leases of an open file, and locks of one process made by another with the same
    # descriptors. EINVAL is what a kernel before 3.15 says, and a file system without leases.
    _when("clone", ArgTest(0, "masked_eq", _CLONE_FILES, _CLONE_FILES | _CLONE_THREAD), errno=errno.EINVAL),
    *(_when("fcntl", each, errno=errno.EINVAL) for each in _LOCKS_OF_FILES),
    # With a piped core_pattern the kernel heeds only the limit 1, which is in force. Who turns dumps off gets success:
    # programs that keep secrets end when they can't.
    _when("prlimit64", *_CORE, errno=0),
    _when("setrlimit", ArgTest(0, "eq", _RLIMIT_CORE), errno=0),
    # They write every file of the host, or of the file system of all sessions, and all who write wait. A file that must
    # be on disk gets there by fsync(2); success, since package managers end when they fail.
    _refuse("sync syncfs", 0),
    # As a kernel without CONFIG_KSM. The time of a write tells whether a page was merged, so whoever offers pages finds
    # out what is in those of others.
    _when("madvise", ArgTest(2, "eq", _MERGEABLE), errno=errno.EINVAL),
    _when("process_madvise", ArgTest(3, "eq", _MERGEABLE), errno=errno.EINVAL),
    _when("prctl", ArgTest(0, "eq", _SET_MEMORY_MERGE), errno=errno.EINVAL),
    *_SOCKETS,
    # As the kernel does above RLIMIT_NOFILE.
    *(_when(name, ArgTest(1, "gt", _MOST_POLLED), errno=errno.EINVAL) for name in ("poll", "ppoll")),
    *(_when(name, ArgTest(0, "gt", _MOST_POLLED), errno=errno.EINVAL) for name in ("select", "pselect6")),
    # As a file system does that keeps short attributes. The newest call has its length in memory, which no filter sees.
    *(
        _when(name, ArgTest(3, "gt", _LONGEST_ATTRIBUTE), errno=errno.ENOSPC)
        for name in ("setxattr", "lsetxattr", "fsetxattr")
    ),
    _refuse("setxattrat", errno.ENOSYS),
)
"""Refused below every profile: nothing in a sandbox has any business with it."""

_INIT = """
read write pread64 openat openat2 close close_range newfstatat lseek getdents64 statfs fcntl ioctl dup2 dup3 pipe2
readlink readlinkat mknodat mkdir mkdirat unlink unlinkat chdir umask mmap munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn kill wait4 clone execve exit_group getpid setsid setfsuid setfsgid setgroups setresuid setresgid capset
prctl seccomp getrandom epoll_create1 epoll_ctl epoll_wait epoll_pwait poll ppoll sendmsg recvmsg sendto recvfrom
accept4 getsockopt getsockname
"""
INIT_NEEDS: Final = tuple(_INIT.split())
"""Calls that PID 1 needs, which lives under the profile of its session."""

_ARGUMENTS = (
    _when("clone", ArgTest(0, "masked_eq", 0, _NAMESPACE_FLAGS)),
    _when("socket", ArgTest(0, "eq", _AF_UNIX)),
    _when("socket", ArgTest(0, "eq", _AF_NETLINK), ArgTest(2, "eq", _NETLINK_ROUTE)),
    *(_when("socket", _INTERNET, ArgTest(2, "eq", protocol)) for protocol in _PROTOCOLS),
    _when("socketpair", ArgTest(0, "eq", _AF_UNIX)),  # no other family has pairs
    *(_when("socket", _INTERNET, ArgTest(1, "masked_eq", bit, bit), errno=errno.EPERM) for bit in _OTHER_TYPES),
    Rule(("prlimit64", "setrlimit"), "allow"),
)
_STRICT = (
    Rule(tuple(sorted(STRICT_NAMES)), "allow"),
    *_ARGUMENTS,
    _refuse(f"{_ENOSYS_NAMES} {_AIO}", errno.ENOSYS),
    # Huge pages come out of one pool of the machine and out of no session's memory (memory cgroups don't count them).
    _when("mmap", ArgTest(3, "masked_eq", _HUGETLB_MAPPING, _HUGETLB_MAPPING), errno=errno.ENOMEM),
    _when("memfd_create", ArgTest(1, "masked_eq", _HUGETLB_MEMFD, _HUGETLB_MEMFD), errno=errno.ENOMEM),
    _when("shmget", ArgTest(2, "masked_eq", _HUGETLB_SHM, _HUGETLB_SHM), errno=errno.ENOMEM),
)

STRICT: Final = Profile(
    "strict", "errno", (*_STRICT, *(_when("personality", ArgTest(0, "eq", each)) for each in _PERSONALITIES))
)
DEBUG: Final = Profile(
    "debug",
    "errno",
    (
        *STRICT.rules,
        Rule(tuple(sorted(_DEBUGGING.split())), "allow"),
        *(_when("personality", ArgTest(0, "eq", each | _ADDR_NO_RANDOMIZE)) for each in _PERSONALITIES[:-1]),
    ),
)
MVP: Final = Profile("mvp", "allow", (*FLOOR, _refuse(f"{_DEBUGGING} {_RISKY}"), _refuse(_ENOSYS_NAMES, errno.ENOSYS)))
BUILT_IN: Final = {profile.name: profile for profile in (STRICT, MVP, DEBUG)}
