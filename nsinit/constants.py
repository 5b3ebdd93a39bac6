"""Numbers of the kernel's interface, under the names and headers the kernel gives them.

Owns no behaviour. System call numbers are those of x86_64; where aarch64 differs, the table at the end of the
section has both. Everything from 424 up has one number on all architectures.
"""

from __future__ import annotations

import platform

# asm/unistd.h, asm-generic/unistd.h (aarch64)
_X86_64 = {"rt_sigaction": 13, "capset": 126, "pivot_root": 155, "keyctl": 250, "setfsuid": 122, "setfsgid": 123}
_AARCH64 = {"rt_sigaction": 134, "capset": 91, "pivot_root": 41, "keyctl": 219, "setfsuid": 151, "setfsgid": 152}
_NUMBERS = {"x86_64": _X86_64 | {"seccomp": 317}, "aarch64": _AARCH64 | {"seccomp": 277}}[platform.machine()]
SYS_rt_sigaction = _NUMBERS["rt_sigaction"]
SYS_capset = _NUMBERS["capset"]
SYS_pivot_root = _NUMBERS["pivot_root"]
SYS_keyctl = _NUMBERS["keyctl"]
SYS_setfsuid = _NUMBERS["setfsuid"]
SYS_setfsgid = _NUMBERS["setfsgid"]
SYS_seccomp = _NUMBERS["seccomp"]
SYS_pidfd_send_signal = 424
SYS_open_tree = 428
SYS_move_mount = 429
SYS_fsopen = 430
SYS_fsconfig = 431
SYS_fsmount = 432
SYS_clone3 = 435
SYS_close_range = 436
SYS_openat2 = 437
SYS_mount_setattr = 442

# linux/seccomp.h
SECCOMP_SET_MODE_FILTER = 1

# linux/sched.h
CLONE_VM = 0x00000100
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_PIDFD = 0x00001000
CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_INTO_CGROUP = 0x200000000

# linux/mount.h
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8
OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = 0o2000000
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_SET_FD = 5
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x100000
MOUNT_ATTR_SIZE_VER0 = 32

# linux/openat2.h
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

# linux/fcntl.h
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_NOFOLLOW = 0x100
AT_RECURSIVE = 0x8000

# linux/prctl.h, linux/securebits.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECBIT_NOROOT = 1 << 0
SECBIT_NOROOT_LOCKED = 1 << 1
SECBIT_NO_SETUID_FIXUP_LOCKED = 1 << 3
SECBIT_KEEP_CAPS_LOCKED = 1 << 5
SECBIT_NO_CAP_AMBIENT_RAISE = 1 << 6
SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED = 1 << 7

# linux/capability.h
LINUX_CAPABILITY_VERSION_3 = 0x20080522
CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_FOWNER = 3
CAP_FSETID = 4
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8

# linux/keyctl.h
KEYCTL_JOIN_SESSION_KEYRING = 1

# linux/fs.h
FS_IOC_GETFLAGS = 0x80086601
FS_IOC_SETFLAGS = 0x40086602
FS_TOPDIR_FL = 0x00020000

# linux/sockios.h, linux/if.h
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
