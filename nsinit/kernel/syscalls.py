"""System calls that the standard library does not offer, one thin wrapper each. The only file with `ctypes.CDLL`.

Owns bindings, no policy: every flag comes from the caller. All wrappers raise `OSError` (the fitting subclass, with the
call's name in its text and its object as `filename`) and return plain ints. Signatures are set once, at import;
variadic C functions get one full-width signature.
Sources: section 2 of the Linux manual; include/uapi/linux/{mount,openat2,sched,capability}.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_long, c_uint, c_uint64, c_ulong, c_void_p
from typing import Any

from nsinit.kernel import constants as k

_libc = ctypes.CDLL(None, use_errno=True)

_syscall = _libc.syscall
_syscall.restype = c_long
_syscall.argtypes = [c_long, *[c_void_p] * 6]
"""Full width. Each argument is a number, bytes (their address) or `byref` of a structure: no buffer is made for a call.
"""
_prctl = _libc.prctl
_prctl.restype = c_int
_prctl.argtypes = [c_int, c_void_p, c_ulong, c_ulong, c_ulong]
_mount = _libc.mount
_mount.argtypes = [c_char_p, c_char_p, c_char_p, c_ulong, c_void_p]
_umount2 = _libc.umount2
_umount2.argtypes = [c_char_p, c_int]
_unshare = _libc.unshare
_unshare.argtypes = [c_int]
_setns = _libc.setns
_setns.argtypes = [c_int, c_int]
_sethostname = _libc.sethostname
_sethostname.argtypes = [c_char_p, c_ulong]
_eventfd = _libc.eventfd
_eventfd.argtypes = [c_uint, c_int]

_clone = _libc.clone
_clone.restype = c_int
_clone.argtypes = [c_void_p, c_void_p, c_int, c_void_p, c_void_p]
_sleep_address = ctypes.cast(_libc.sleep, c_void_p)
_SLEEPER_STACK_BYTES = 64 * 1024

_LIBRARY_SIGNALS = (32, 33)

_gil_libc = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter lock across the call: the child of clone3 must own the lock, and `CDLL` would release it."""
_gil_syscall = _gil_libc.syscall
_gil_syscall.restype = c_long
_gil_syscall.argtypes = _syscall.argtypes
_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_child = ctypes.pythonapi.PyOS_AfterFork_Child
_after_fork_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
for _function in (_before_fork, _after_fork_child, _after_fork_parent):
    _function.restype = None
    _function.argtypes = []


def _error(number: int, call: str, detail: str = "") -> OSError:
    """Return the exception for a failed call: an instance of the fitting subclass (`FileNotFoundError`, ...)."""
    return OSError(number, f"{call}: {os.strerror(number)}", detail or None)


class CloneArgs(ctypes.Structure):
    """`struct clone_args`, size 88 (linux/sched.h)."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal"),
            *("stack", "stack_size", "tls", "set_tid", "set_tid_size", "cgroup"),
        )
    )


_CLONE_ARGS_SIZE = ctypes.sizeof(CloneArgs)


class OpenHow(ctypes.Structure):
    """`struct open_how` (linux/openat2.h)."""

    _fields_ = (("flags", c_uint64), ("mode", c_uint64), ("resolve", c_uint64))


class MountAttr(ctypes.Structure):
    """`struct mount_attr` (linux/mount.h)."""

    _fields_ = (("attr_set", c_uint64), ("attr_clr", c_uint64), ("propagation", c_uint64), ("userns_fd", c_uint64))


class LandlockRuleset(ctypes.Structure):
    """`struct landlock_ruleset_attr` (linux/landlock.h). Older kernels take this size if the fields they don't know are
    0."""

    _fields_ = (("handled_access_fs", c_uint64), ("handled_access_net", c_uint64), ("scoped", c_uint64))


class LandlockPath(ctypes.Structure):
    """`struct landlock_path_beneath_attr` (linux/landlock.h)."""

    _pack_ = 1
    _fields_ = (("allowed_access", c_uint64), ("parent_fd", c_int))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", c_uint), ("pid", c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", c_uint), ("permitted", c_uint), ("inheritable", c_uint))


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library, not that of the kernel."""

    _fields_ = (("handler", c_void_p), ("mask", c_ulong * 16), ("flags", c_int), ("restorer", c_void_p))


_Handler = ctypes.CFUNCTYPE(None, c_int, c_void_p, c_void_p)
_kept_handlers: list[object] = []
_sigaction = _libc.sigaction
_sigaction.argtypes = [c_int, c_void_p, c_void_p]
_SA_SIGINFO, _SYS_SECCOMP = 4, 1
_SI_CODE, _SI_SYSCALL = 8, 24
"""Places in `siginfo_t` (asm-generic/siginfo.h)."""
_RESULT_REGISTER = 184 if platform.machine() == "aarch64" else 144
"""The place of x0, or of rax, in `ucontext_t` (asm/ucontext.h, asm/sigcontext.h)."""


class _FilterHeader(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", c_void_p))


_FILTER_BYTES = 8


def _check(result: int, call: str, detail: str = "") -> int:
    if result == -1:
        raise _error(ctypes.get_errno(), call, detail)
    return result


def _call(call: str, number: int, *args: Any, detail: str = "") -> int:  # see `_syscall.argtypes`
    return _check(_syscall(number, *(*args, 0, 0, 0, 0, 0, 0)[:6]), call, detail)


# Processes --------------------------------------------------------------------------------------------------------


def clone3(flags: int) -> tuple[int, int]:
    """Fork the calling single-threaded process with clone3(2); return (pid, pidfd), in the child (0, -1)."""
    pidfd = c_int(-1)
    args = _clone_args(flags | k.CLONE_PIDFD)
    args.pidfd, args.exit_signal = ctypes.addressof(pidfd), signal.SIGCHLD
    pid = _fork(args)
    return pid, pidfd.value if pid else -1


def fork_into_cgroup(cgroup_fd: int) -> int:
    """Fork the calling single-threaded process by clone3(2), the child born in the cgroup v2 directory `cgroup_fd`;
    return the pid, 0 in the child."""
    args = _clone_args(k.CLONE_INTO_CGROUP)
    args.exit_signal, args.cgroup = signal.SIGCHLD, cgroup_fd
    return _fork(args)


def clone_sleeper(flags: int, seconds: int) -> tuple[int, int, object]:
    """Make a process that sleeps, then ends, and never runs a line of Python; return (pid, pidfd, its stack).

    The process shares this one's memory, so no page table is copied: a twentieth of a fork's time. The caller keeps the
    stack until the process was waited for.
    """
    pidfd, stack = c_int(-1), ctypes.create_string_buffer(_SLEEPER_STACK_BYTES)
    top = (ctypes.addressof(stack) + _SLEEPER_STACK_BYTES) & ~15  # stacks grow down and are aligned to 16 bytes
    pid = _clone(_sleep_address, top, flags | k.CLONE_VM | k.CLONE_PIDFD | signal.SIGCHLD, seconds, byref(pidfd))
    return _check(pid, "clone"), pidfd.value, stack


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent ends, and end at once if it has ended already, for then the
    kernel sends nothing. `parent_pid`: its pid from before the fork, in this process's pid namespace. prctl(2)
    PR_SET_PDEATHSIG."""
    prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class Cloner:
    """A prepared clone3(2) that forks children of the caller's *parent*, with the smallest foot-print in memory."""

    def __init__(self, flags: int) -> None:
        self._args = _clone_args(flags | k.CLONE_PARENT)
        self._flags = self._args.flags

    def clone(self, cgroup_fd: int) -> int:
        """Fork, into a cgroup unless that is -1; return the pid, 0 in the child."""
        args = self._args
        args.flags, args.cgroup = (self._flags, 0) if cgroup_fd < 0 else (self._flags | k.CLONE_INTO_CGROUP, cgroup_fd)
        return _fork(args)


def _clone_args(flags: int) -> CloneArgs:
    """Return arguments by which the kernel updates the C library's thread-id word in the child: `raise` and `abort` use
    it."""
    tid_address = c_uint64(0)
    _check(_prctl(k.PR_GET_TID_ADDRESS, byref(tid_address), 0, 0, 0), "prctl")
    return CloneArgs(flags=flags | k.CLONE_CHILD_SETTID | k.CLONE_CHILD_CLEARTID, child_tid=tid_address.value)


def _fork(args: CloneArgs) -> int:
    # What os.fork does around fork(2): locks of the interpreter are taken before and made anew in the child.
    _before_fork()
    pid: int = _gil_syscall(k.SYS_clone3, byref(args), _CLONE_ARGS_SIZE, 0, 0, 0, 0)
    if pid == 0:
        _after_fork_child()
        return 0
    error = ctypes.get_errno()
    _after_fork_parent()
    if pid == -1:
        raise _error(error, "clone3")
    return pid


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_unshare(flags), "unshare")


def setns(fd: int, nstype: int) -> None:
    """setns(2)."""
    _check(_setns(fd, nstype), "setns")


def bpf(command: int, attributes: bytes) -> int:
    """bpf(2). `attributes` is the beginning of `union bpf_attr`; the addresses in it must outlive the call."""
    return _call(f"bpf({command})", k.SYS_bpf, command, attributes, len(attributes))


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """pidfd_send_signal(2)."""
    _call("pidfd_send_signal", k.SYS_pidfd_send_signal, pidfd, signum)


def sethostname(name: str) -> None:
    """sethostname(2)."""
    encoded = os.fsencode(name)
    _check(_sethostname(encoded, len(encoded)), "sethostname", name)


def prctl(option: int, arg2: int = 0, arg3: int = 0) -> int:
    """prctl(2) with zeros for unused arguments."""
    return _check(_prctl(option, arg2, arg3, 0, 0), f"prctl({option})")


def set_name(name: str) -> None:
    """prctl(2), PR_SET_NAME: set the name in `/proc/<pid>/comm`, at most 15 bytes."""
    _check(_prctl(k.PR_SET_NAME, os.fsencode(name), 0, 0, 0), "prctl", name)


def join_session_keyring() -> None:
    """keyctl(2), KEYCTL_JOIN_SESSION_KEYRING: leave the inherited session keyring for a new anonymous one."""
    _call("keyctl", k.SYS_keyctl, k.KEYCTL_JOIN_SESSION_KEYRING, 0)


def capget() -> int:
    """capget(2): return the bit mask of the capabilities that this thread is permitted."""
    data = (_CapData * 2)()
    _call("capget", k.SYS_capget, byref(_CapHeader(k.LINUX_CAPABILITY_VERSION_3, 0)), byref(data))
    return int(data[0].permitted | data[1].permitted << 32)


def capset(effective: int, *, permitted: int | None = None, inheritable: int = 0) -> None:
    """capset(2): set all three sets to these bit masks. `permitted` is as `effective` unless given."""
    sets = effective, effective if permitted is None else permitted, inheritable
    header = _CapHeader(k.LINUX_CAPABILITY_VERSION_3, 0)
    data = (_CapData * 2)(_CapData(*(each & 0xFFFFFFFF for each in sets)), _CapData(*(each >> 32 for each in sets)))
    _call("capset", k.SYS_capset, byref(header), byref(data))


class FilterProgram:
    """A program of `struct sock_filter`s, kept where the kernel can read it (linux/filter.h, `struct sock_fprog`)."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))
        self._header = _FilterHeader(len(code) // _FILTER_BYTES, ctypes.addressof(self._code))
        self.reference = byref(self._header)


def set_filter(program: FilterProgram) -> None:
    """seccomp(2), SECCOMP_SET_MODE_FILTER: put this thread, and every process it starts, under the program for good."""
    _call("seccomp", k.SYS_seccomp, k.SECCOMP_SET_MODE_FILTER, 0, program.reference)


def set_asking_filter(program: FilterProgram) -> int:
    """Like `set_filter`, and return the descriptor on which the kernel asks about calls (seccomp_unotify(2)). The
    descriptor is close-on-exec and the caller's."""
    return _call(
        "seccomp",
        k.SYS_seccomp,
        k.SECCOMP_SET_MODE_FILTER,
        k.SECCOMP_FILTER_FLAG_NEW_LISTENER,
        program.reference,
    )


def on_trapped_call(tell: Callable[[int], None]) -> None:
    """Have each call that a filter traps fail with ENOSYS, after `tell` was called with its number.

    `signal.signal` won't do: its handler runs later, and can't set the result of the call. This one runs within the
    call, in the thread that made it, so `tell` may use no call that the filter traps, and take no lock.
    """

    def handle(_signum: int, information: int, context: int) -> None:
        if c_int.from_address(information + _SI_CODE).value == _SYS_SECCOMP:
            c_long.from_address(context + _RESULT_REGISTER).value = -errno.ENOSYS
            tell(c_int.from_address(information + _SI_SYSCALL).value)

    handler = _Handler(handle)
    _kept_handlers.append(handler)
    action = _Action(handler=ctypes.cast(handler, c_void_p), flags=_SA_SIGINFO)
    _check(_sigaction(signal.SIGSYS, byref(action), None), "sigaction")


def setfsuid(uid: int) -> None:
    """setfsuid(2). The call reports no error, so the change is read back."""
    _syscall(k.SYS_setfsuid, uid, 0, 0, 0, 0, 0)
    if _syscall(k.SYS_setfsuid, 0xFFFFFFFF, 0, 0, 0, 0, 0) != uid:
        raise _error(1, "setfsuid", str(uid))


def setfsgid(gid: int) -> None:
    """setfsgid(2), read back like `setfsuid`."""
    _syscall(k.SYS_setfsgid, gid, 0, 0, 0, 0, 0)
    if _syscall(k.SYS_setfsgid, 0xFFFFFFFF, 0, 0, 0, 0, 0) != gid:
        raise _error(1, "setfsgid", str(gid))


def landlock_abi() -> int:
    """landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION."""
    return _call("landlock_create_ruleset", k.SYS_landlock_create_ruleset, 0, 0, k.LANDLOCK_CREATE_RULESET_VERSION)


def landlock_create_ruleset(*, handled_access_fs: int = 0, scoped: int = 0) -> int:
    """landlock_create_ruleset(2), close-on-exec."""
    ruleset = LandlockRuleset(handled_access_fs, 0, scoped)
    return _call("landlock_create_ruleset", k.SYS_landlock_create_ruleset, byref(ruleset), ctypes.sizeof(ruleset), 0)


def landlock_add_path(ruleset_fd: int, path_fd: int, allowed_access: int) -> None:
    """landlock_add_rule(2), LANDLOCK_RULE_PATH_BENEATH."""
    rule = LandlockPath(allowed_access, path_fd)
    _call("landlock_add_rule", k.SYS_landlock_add_rule, ruleset_fd, k.LANDLOCK_RULE_PATH_BENEATH, byref(rule), 0)


def landlock_restrict_self(ruleset_fd: int) -> None:
    """landlock_restrict_self(2)."""
    _call("landlock_restrict_self", k.SYS_landlock_restrict_self, ruleset_fd, 0)


# Descriptors ------------------------------------------------------------------------------------------------------


def reset_library_signals() -> None:
    """Give the two signals that the C library keeps for itself their default disposition: rt_sigaction(2).

    glibc's posix_spawn(3) leaves them ignored in the child, and its sigaction(3) refuses to change them.
    """
    default = (ctypes.c_ulong * 4)()
    for signum in _LIBRARY_SIGNALS:
        _call("rt_sigaction", k.SYS_rt_sigaction, signum, byref(default), 0, 8)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    """close_range(2): close every descriptor from `first` to `last`."""
    _call("close_range", k.SYS_close_range, first, last, 0)


def openat2(dirfd: int, path: str | bytes, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2), close-on-exec. EAGAIN (a rename raced with `..`) is retried as the man page asks."""
    name = os.fsencode(path)
    how = OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    for attempt in range(8):
        try:
            return _call(
                *("openat2", k.SYS_openat2, dirfd, name, byref(how), ctypes.sizeof(how)),
                detail=os.fsdecode(path),
            )
        except BlockingIOError:
            if attempt == 7:
                raise
    raise AssertionError


def eventfd() -> int:
    """eventfd(2), non-blocking, close-on-exec."""
    return _check(_eventfd(0, os.O_NONBLOCK | os.O_CLOEXEC), "eventfd")


# Mounts -----------------------------------------------------------------------------------------------------------


def mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). `flags` are MS_* bits; `data` is the comma-separated option string."""
    encoded = [os.fsencode(each) or None for each in (source, target, fstype, data)]
    _check(_mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]), "mount", f"{source} -> {target}")


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_umount2(os.fsencode(target), flags), "umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)."""
    _call("pivot_root", k.SYS_pivot_root, os.fsencode(new_root), os.fsencode(put_old))


def open_tree(dirfd: int, path: str, flags: int) -> int:
    """open_tree(2), close-on-exec."""
    return _call("open_tree", k.SYS_open_tree, dirfd, os.fsencode(path), flags | k.OPEN_TREE_CLOEXEC, detail=path)


def move_mount(mount_fd: int, target_fd: int) -> None:
    """move_mount(2): attach the detached mount `mount_fd` on the object `target_fd`, both by descriptor."""
    flags = k.MOVE_MOUNT_F_EMPTY_PATH | k.MOVE_MOUNT_T_EMPTY_PATH
    _call("move_mount", k.SYS_move_mount, mount_fd, b"", target_fd, b"", flags)


def mount_setattr(mount_fd: int, *, attr_set: int = 0, attr_clr: int = 0, userns_fd: int = 0, flags: int = 0) -> None:
    """mount_setattr(2) on a descriptor; `userns_fd` goes with MOUNT_ATTR_IDMAP."""
    attr = MountAttr(attr_set, attr_clr, 0, userns_fd)
    _call(
        *("mount_setattr", k.SYS_mount_setattr, mount_fd, b""),
        *(k.AT_EMPTY_PATH | flags, byref(attr), k.MOUNT_ATTR_SIZE_VER0),
    )


def fsopen(fstype: str) -> int:
    """fsopen(2), close-on-exec."""
    return _call("fsopen", k.SYS_fsopen, os.fsencode(fstype), k.FSOPEN_CLOEXEC, detail=fstype)


def fsconfig_string(fs_fd: int, key: str, value: str) -> None:
    """fsconfig(2), FSCONFIG_SET_STRING."""
    text = os.fsencode(value)
    _call("fsconfig", k.SYS_fsconfig, fs_fd, k.FSCONFIG_SET_STRING, key.encode(), text, 0, detail=key)


def fsconfig_flag(fs_fd: int, key: str) -> None:
    """fsconfig(2), FSCONFIG_SET_FLAG."""
    _call("fsconfig", k.SYS_fsconfig, fs_fd, k.FSCONFIG_SET_FLAG, key.encode(), 0, 0, detail=key)


def fsconfig_fd(fs_fd: int, key: str, value_fd: int) -> None:
    """fsconfig(2), FSCONFIG_SET_FD."""
    _call("fsconfig", k.SYS_fsconfig, fs_fd, k.FSCONFIG_SET_FD, key.encode(), 0, value_fd, detail=key)


def fsmount(fs_fd: int, attributes: int) -> int:
    """Create the configured superblock and return a detached mount of it: fsconfig(2) CMD_CREATE, fsmount(2)."""
    _call("fsconfig", k.SYS_fsconfig, fs_fd, k.FSCONFIG_CMD_CREATE, 0, 0, 0, detail="create")
    return _call("fsmount", k.SYS_fsmount, fs_fd, k.FSMOUNT_CLOEXEC, attributes)


def quotactl_fd(fd: int, command: int, identity: int, buffer: bytearray) -> None:
    """quotactl_fd(2): on the file system of `fd`; the kernel reads and writes `buffer`."""
    address = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    _call("quotactl_fd", k.SYS_quotactl_fd, fd, command, identity, byref(address))


def inotify_init() -> int:
    """inotify_init1(2), non-blocking, close-on-exec."""
    return _call("inotify_init1", k.SYS_inotify_init1, os.O_NONBLOCK | os.O_CLOEXEC)


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    """inotify_add_watch(2); return the watch's number."""
    return _call("inotify_add_watch", k.SYS_inotify_add_watch, fd, path, mask, detail=os.fsdecode(path))


def inotify_rm_watch(fd: int, watch: int) -> None:
    """inotify_rm_watch(2)."""
    _call("inotify_rm_watch", k.SYS_inotify_rm_watch, fd, watch)


def renameat2(
    old: str | bytes, new: str | bytes, flags: int, *, old_dir: int = k.AT_FDCWD, new_dir: int = k.AT_FDCWD
) -> None:
    """renameat2(2) on absolute paths, or on names in open directories; `flags` are RENAME_*."""
    paths = old_dir, os.fsencode(old), new_dir, os.fsencode(new)
    _call("renameat2", k.SYS_renameat2, *paths, flags, detail=os.fsdecode(new))


def advise_all(advice: int) -> None:
    """madvise(2) on all memory that this process has mapped: ENOMEM tells of the holes between, after the rest was
    advised."""
    if _syscall(k.SYS_madvise, 0, _ALL_ADDRESSES, advice, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOMEM:
        raise _error(ctypes.get_errno(), "madvise")


_ALL_ADDRESSES = 1 << 48
"""Bytes that a process can map, at most, on x86-64 and aarch64 without hints."""


def syncfs(fd: int) -> None:
    """syncfs(2): the whole file system of `fd`."""
    _call("syncfs", k.SYS_syncfs, fd)
