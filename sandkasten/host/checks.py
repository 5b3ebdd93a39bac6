"""The catalogue of checks: for each its title, the protection that rests on it, what its lack means, and the exact fix.

Owns wording and order; performs nothing. A check that fails has the verdict FALLS_BACK where the product then works in
another way, else MISSING. A fix is a line to type, to put into a file, or to click.

Settings of the machine that no sandbox rests on and that make an escape harder; each with the line that sets it.

Reading is all there is to try: a sysctl is what it says. A setting that this kernel does not have is left out.
Sources: Documentation/admin-guide/sysctl/{fs,kernel}.rst; Documentation/admin-guide/LSM/Yama.rst; tty_ioctl(4) TIOCSTI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from sandkasten.host.surroundings import read
from sandkasten.model.node import Check, Verdict


@attrs.frozen
class Subject:
    """What is known of a check beforehand. `consequence` and `fix` are told when it does not work."""

    title: str
    protection: str = ""
    consequence: str = ""
    fix: str = ""
    falls_back: bool = False


def _kernel(since: str, option: str = "") -> str:
    return f"a kernel from {since} on" + (f", with {option}=y" if option else "")


_DISK_FIX = "sandkasten serve --data-dir DIR, with DIR on a Linux disk (ext4, xfs, btrfs)"
_TRACE = "sessions would see each other and the machine"
_STRIP = "commands could get power back"
_ROOTFS = "no root filesystem can be put together"
_ALONE = "a session could use up the machine"

CATALOGUE: Mapping[str, Subject] = MappingProxyType(
    {
        # who asks, and where
        "root": Subject("root", "privilege", "nothing can be made", "run this as root (sudo)"),
        "capabilities": Subject("capabilities", "privilege", "root without these powers can't make sandboxes"),
        "sys_resource": Subject(
            "CAP_SYS_RESOURCE",
            consequence="hard limits can't be raised, and nothing can be protected from the out-of-memory killer",
            fix="in a container: docker run --cap-add SYS_RESOURCE ...",
            falls_back=True,
        ),
        "python": Subject("python", "privilege", "nsinit can't call the kernel", "Python 3.11 or newer with ctypes"),
        "kernel": Subject("kernel", "filesystem", "the calls a sandbox is built with came later", _kernel("5.15")),
        "container": Subject("container", consequence="a sandbox can be no stronger than the container around it"),
        "wsl": Subject("WSL", consequence="limits need control groups that WSL may leave in their old form"),
        "data_dir": Subject("data directory", "filesystem", "no session can have a writable layer there", _DISK_FIX),
        "data_dir_mode": Subject("its mode", consequence="others could change images and workspaces", falls_back=True),
        "space": Subject("its space", consequence="sessions and images will meet a full disk", falls_back=True),
        "probe": Subject("probe", "filesystem", "nothing could be tried", _DISK_FIX),
        # processes
        "clone3": Subject("clone3", "namespaces", "no process can be started where it belongs", _kernel("5.5")),
        "pidfd": Subject("pidfd", "namespaces", "a recycled pid could be killed", _kernel("5.4")),
        "close_range": Subject("close_range", "namespaces", "a descriptor could leak into a session", _kernel("5.9")),
        "openat2": Subject("openat2", "filesystem", "a link in an image could lead out of it", _kernel("5.6")),
        "namespaces": Subject("namespaces", "namespaces", _TRACE, "CONFIG_NAMESPACES=y and all kinds of them"),
        "user_namespace": Subject("user namespace", "user_ids", "sessions would share user ids", "CONFIG_USER_NS=y"),
        "id_ranges": Subject(
            "id ranges",
            consequence="ids for few sessions are left",
            fix="shorten the ranges in /etc/subuid and /etc/subgid between 524288 and 1879048191",
            falls_back=True,
        ),
        "capability_drop": Subject("giving power away", "capabilities", _STRIP, _kernel("5.15", "CONFIG_USER_NS")),
        "seccomp": Subject(
            "system call filter", "seccomp", "every system call is open to a session", "CONFIG_SECCOMP_FILTER=y"
        ),
        "landlock_scopes": Subject(
            "Landlock scopes",
            "landlock",
            "sockets and signals are kept apart by namespaces alone",
            f"{_kernel('6.12', 'CONFIG_SECURITY_LANDLOCK')} and landlock in the lsm= list of the kernel command line",
        ),
        "landlock_files": Subject(
            "Landlock file rules",
            "landlock",
            "sessions that ask for file rules are refused",
            f"{_kernel('6.2', 'CONFIG_SECURITY_LANDLOCK')} and landlock in the lsm= list of the kernel command line",
        ),
        "keyring": Subject("keyring", "user_ids", "a session would hold the operator's keyring", "CONFIG_KEYS=y"),
        # file systems
        "mounts": Subject("mount calls", "filesystem", _ROOTFS, _kernel("5.15")),
        "overlay": Subject(
            "overlayfs", "filesystem", "no session can have a layer over an image", _kernel("5.19", "CONFIG_OVERLAY_FS")
        ),
        "overlay_by_fd": Subject(
            "layers by descriptor", "", "names of layers show in a session's mount table", _kernel("6.13")
        ),
        "idmapped_tmpfs": Subject("mapped tmpfs", "", "device nodes show nobody as their owner", _kernel("6.3")),
        "tmpfs": Subject("tmpfs", "filesystem", _ROOTFS, "CONFIG_TMPFS=y"),
        "proc": Subject("proc", "filesystem", "commands would see PID 1", _kernel("5.8", "CONFIG_PROC_FS")),
        "devpts": Subject("devpts", "filesystem", "no terminal of a session's own", "CONFIG_UNIX98_PTYS=y"),
        "pivot_root": Subject("pivot_root", "filesystem", "the machine's root would stay in reach", _kernel("5.15")),
        # networks
        "loopback": Subject("network", "network", "sessions would share the machine's network", "CONFIG_NET_NS=y"),
        "nftables": Subject("nftables", "", "a session could not be let out through rules", "CONFIG_NF_TABLES=y"),
        "veth": Subject("veth", "", "a session could not be given a way out", "CONFIG_VETH=y or m"),
        # disks
        "disk": Subject("disk limit", "disk", "a session could fill the disk", "apt-get install e2fsprogs"),
        "disk_project": Subject(
            "project quota",
            "",
            "another mechanism is taken",
            "tune2fs -O project,quota DEVICE, and prjquota in the mount options (xfs: in the mount options alone)",
        ),
        "disk_btrfs": Subject("btrfs quota", "", "another mechanism is taken", "a data directory on btrfs"),
        "disk_loop": Subject(
            "loop image",
            "",
            "another mechanism is taken",
            "apt-get install e2fsprogs; modprobe loop; /dev/loop-control",
        ),
        "disk_tmpfs": Subject("disk in memory", "", "another mechanism is taken", "CONFIG_TMPFS=y"),
        # cgroups
        "cgroups": Subject("cgroups", "limits", _ALONE, _kernel("5.15", "CONFIG_CGROUPS")),
        "limits": Subject("limits", "limits", _ALONE, "CONFIG_MEMCG=y, CONFIG_CGROUP_PIDS=y, CONFIG_CFS_BANDWIDTH=y"),
        "pids_limit": Subject("process limit", "limits", "a fork bomb would take the machine", "CONFIG_CGROUP_PIDS=y"),
        "memory_limit": Subject("memory limit", "limits", _ALONE, "CONFIG_MEMCG=y"),
        "cpu_limit": Subject("cpu limit", "limits", _ALONE, "CONFIG_CFS_BANDWIDTH=y"),
        "swap": Subject(
            "swap limit",
            "swap",
            "a session could fill the swap beyond its memory limit",
            "swapaccount=1 on the kernel command line, or cgroup v2, or swapoff -a",
        ),
        "clone_into_cgroup": Subject("birth in a cgroup", "", "a create takes some ms longer", _kernel("5.7")),
        "cgroup_kill": Subject("cgroup.kill", "", "ends of sessions take longer", _kernel("5.14")),
        "cgroup_freeze": Subject("cgroup.freeze", "", "a session can't be held still", _kernel("5.2")),
        "pressure": Subject("pressure", "", "stats have no pressure", "CONFIG_PSI=y; psi=1 on the kernel command line"),
        # what helps to look after it
        "kernel_log": Subject(
            "kernel log", "", "a command that ran out of memory is not named", "in a container: --privileged"
        ),
        "descriptors": Subject("descriptors", "", "fewer sessions", "LimitNOFILE=1048576 in the unit", falls_back=True),
        "inotify": Subject(
            "inotify",
            "",
            "all sessions together may have no more instances",
            "sysctl -w fs.inotify.max_user_instances=8192",
            falls_back=True,
        ),
        "core_pattern": Subject("core dumps"),
        "clock": Subject("clock", "", "times in records are wrong", "timedatectl set-ntp true", falls_back=True),
    }
)
"""In the order in which they are shown. One without a protection matters to the operator alone."""


def works(check_id: str, seen: str) -> Check:
    """Return a check that went well."""
    subject = CATALOGUE[check_id]
    return Check(check_id, subject.title, Verdict.WORKS, seen, subject.protection)


def fails(check_id: str, seen: str, *, fix: str | None = None, verdict: Verdict | None = None) -> Check:
    """Return a check that did not; `fix` when it depends on what was seen."""
    subject = CATALOGUE[check_id]
    usual = Verdict.FALLS_BACK if subject.falls_back else Verdict.MISSING
    return Check(
        check_id,
        subject.title,
        verdict or usual,
        seen,
        subject.protection,
        consequence=subject.consequence,
        fix=subject.fix if fix is None else fix,
    )


def judged(check_id: str, ok: bool, seen: str) -> Check:
    """Return the one or the other."""
    return works(check_id, seen) if ok else fails(check_id, seen)


@attrs.frozen
class _Setting:
    """`wanted` is written by the fix; anything for which `is_good` holds is well, too."""

    name: str
    wanted: int
    consequence: str
    is_good: Callable[[int, int], bool] = int.__ge__


_SETTINGS = (
    _Setting("fs.protected_symlinks", 1, "links in shared directories such as /tmp can trick programs of the machine"),
    _Setting("fs.protected_hardlinks", 1, "users of the machine can keep a hard link to files they may not read"),
    _Setting("fs.protected_fifos", 1, "FIFOs in shared directories can trick programs of the machine"),
    _Setting("fs.protected_regular", 1, "files in shared directories can trick programs of the machine"),
    _Setting("kernel.dmesg_restrict", 1, "every user of the machine can read kernel addresses in its log"),
    _Setting("kernel.kptr_restrict", 1, "kernel addresses can be read in /proc"),
    _Setting("kernel.unprivileged_bpf_disabled", 1, "users of the machine can load BPF programs"),
    _Setting("kernel.yama.ptrace_scope", 1, "a user's programs can trace each other outside of sandboxes"),
    _Setting("dev.tty.legacy_tiocsti", 0, "a program can type into the terminal it was started from", int.__eq__),
    _Setting("kernel.io_uring_disabled", 1, "io_uring is open to users of the machine"),
)


def check_settings(proc: str = "/proc") -> list[Check]:
    """Return one check for each setting that this kernel has."""
    found = ((each, read(f"{proc}/sys/{each.name.replace('.', '/')}").strip()) for each in _SETTINGS)
    return [_check(each, int(text)) for each, text in found if text.isdigit()]


def _check(setting: _Setting, value: int) -> Check:
    if setting.is_good(value, setting.wanted):
        return Check(setting.name, setting.name, Verdict.WORKS, f"is {value}")
    fix = f"sysctl -w {setting.name}={setting.wanted} (and the same line in /etc/sysctl.d/60-sandkasten.conf)"
    return Check(
        setting.name,
        setting.name,
        Verdict.FALLS_BACK,
        f"is {value}",
        consequence=setting.consequence,
        fix=fix,
    )
