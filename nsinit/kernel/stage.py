"""nsinit's own namespaces, and the private tmpfs in them with the templates that sessions get clones of.

Owns `<data_dir>/stage`: a `/dev` with real device nodes, one empty unreadable file, one empty directory, files that
replace some of /proc, and empty mount points. All of it is made before any session exists and never written again.
Sources: mount_namespaces(7); mount(2); null(4), random(4), tty(4); Documentation/networking/ip-sysctl.rst.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.files import write_file
from nsinit.kernel.mountinfo import mounts_to_keep, parse_mountinfo

DEV = "dev"
EMPTY_FILE = "file"
EMPTY_DIRECTORY = "directory"
OWN_DEV = "own-dev"
PROC = "proc"
ROOT = "root"
DISK = "disk"
DEVICES = "devices"
VOLUME = "volume"
SYS = "sys"
"""A `/sys` with mount points for a session's cgroups and its list of processors."""
CGROUPS = f"{SYS}/fs/cgroup"
CPUSET = "cpuset"
"""A directory with the values of the machine's own cpuset, and the name of the mount point that it covers."""
_CPUSET_FILES = ("cpuset.cpus", "cpuset.mems", "cpuset.effective_cpus", "cpuset.effective_mems")
_SYS = SYS, f"{SYS}/fs", CGROUPS, *(f"{SYS}/{each}" for each in ("devices", "devices/system", "devices/system/cpu"))
_ONLINE = f"{_SYS[-1]}/online"
STAGED_ROOT = "merged"
MAX_LOWERS = 128
LOWER = tuple(f"{number:x}" for number in range(MAX_LOWERS))
UPPER = "upper"
"""Mount points, relative to the stage, for kernels that take no layers by descriptor; the names show in the sandbox.
All options of a mount have one page, so those of lower layers are short (mount(2))."""

REPLACED = {"stat": "stat", "vmstat": "vmstat", "boot-id": "sys/kernel/random/boot_id"}
"""Templates by name, relative to the stage, and the files of /proc that each session has them for. Programs need the
files; the real ones tell about the work of neighbours, or name the machine."""

_NEW_UUID = "sys/kernel/random/uuid"
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_DIRECTORIES = ("pts", "shm")

_TCP_BUCKETS = 1024
"""Of a session's network, 8 KiB. Half as many connections may wait for their last packets (tcp_max_tw_buckets), in
memory that is charged to nobody; the kernel ends others at once."""


def enter_own_namespaces(needed: tuple[str, ...], unwanted: Collection[str]) -> None:
    """Leave the host's network, IPC, host name and mount namespaces, and drop every mount that holds none of the
    `needed` paths or is on an `unwanted` point. nsinit and its helpers have no network at all.

    The clone of each session copies the mounts that are left, so a host with hundreds of mounts must not cost every
    session those.
    """
    syscalls.unshare(k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
    with contextlib.suppress(OSError):  # before Linux 6.1: /proc/net/tcp and the end of a network take longer there
        # Networks made from here have a TCP table of their own, and nobody walks the machine's for them.
        write_file("/proc/sys/net/ipv4/tcp_child_ehash_entries", str(_TCP_BUCKETS))
    # Slave: no mount or unmount made here reaches the host (mount_namespaces(7)), so nsinit leaves none behind there.
    # Not private: a disk that the operator mounts later still shows up here.
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_SLAVE)
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = parse_mountinfo(os.fsdecode(file.read()))
    keep = mounts_to_keep(mounts, needed)
    for mount in reversed(mounts):
        # Where propagation is private, ours on an unwanted point would outlive the host's own and keep its disk busy.
        if mount.mount_id not in keep or mount.point in unwanted:
            _detach(mount.point)


def make_stage(stage: str, *, hierarchies: Collection[str] = (), cpuset: str = "") -> None:
    """Mount the private tmpfs, fill it and make it read-only: clones of its parts inherit the flag without another
    call. `hierarchies`: the names that cgroup hierarchies have in a session's `/sys/fs/cgroup`; `cpuset`: the directory
    of that one, if there is one."""
    inert = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC
    syscalls.mount("sandkasten", stage, "tmpfs", inert, "mode=0700,size=1m,nr_inodes=256")
    mask = os.umask(0)
    try:
        for name in (DEV, OWN_DEV, PROC, ROOT, DISK, DEVICES, VOLUME, STAGED_ROOT, *LOWER, UPPER):
            os.mkdir(f"{stage}/{name}", 0o755)
        os.mkdir(f"{stage}/{EMPTY_DIRECTORY}", 0o555)
        for name in (*_SYS, *(f"{CGROUPS}/{each}" for each in hierarchies)):
            os.mkdir(f"{stage}/{name}", 0o755)
        if cpuset:
            for name in (f"{CGROUPS}/{CPUSET}", CPUSET):
                os.mkdir(f"{stage}/{name}", 0o755)
            for name in _CPUSET_FILES:
                with open(f"{cpuset}/{name}", "rb") as source, open(f"{stage}/{CPUSET}/{name}", "xb") as file:
                    file.write(source.read())
                os.chmod(f"{stage}/{CPUSET}/{name}", 0o444)
        os.close(os.open(f"{stage}/{_ONLINE}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o444))
        os.close(os.open(f"{stage}/{EMPTY_FILE}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o000))
        for name, lines in zip(REPLACED, (_calm_stat(), _calm_vmstat(), _proc_lines(_NEW_UUID)), strict=True):
            with open(os.open(f"{stage}/{name}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o444), "wb") as file:
                file.writelines(line + b"\n" for line in lines)
        syscalls.mount("sandkasten", f"{stage}/{DEV}", "tmpfs", k.MS_NOSUID | k.MS_NOEXEC, "mode=0755,nr_inodes=64")
        _make_devices(f"{stage}/{DEV}")
        # With MS_BIND the flag is set on this mount, which clones copy, and not on the file system (mount(2)).
        syscalls.mount("", stage, flags=k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | inert)
    finally:
        os.umask(mask)


def _calm_stat() -> list[bytes]:
    """Return /proc/stat as it would be if every processor had been idle since the boot, and nothing had happened."""
    idle = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    lines = []
    for line in _proc_lines("stat"):
        name, *values = line.split()
        if name.startswith(b"cpu"):
            count = (os.cpu_count() or 1) if name == b"cpu" else 1
            values = [*[b"0"] * 3, b"%d" % (count * idle), *[b"0"] * (len(values) - 4)]
        elif name in (b"processes", b"procs_running"):
            values = [b"1"]
        elif name != b"btime":  # ps(1) computes the start of each process from the moment of the boot
            values = [b"0"] * (1 if name == b"intr" else len(values))
        lines.append(b" ".join((name, *values)))
    return lines


def _calm_vmstat() -> list[bytes]:
    return [line.split()[0] + b" 0" for line in _proc_lines("vmstat")]


def _proc_lines(name: str) -> list[bytes]:
    with open(f"/proc/{name}", "rb") as file:
        return file.read().splitlines()


def _make_devices(directory: str) -> None:
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"{directory}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    for name, target in _LINKS.items():
        os.symlink(target, f"{directory}/{name}")
    for name in _DIRECTORIES:
        os.mkdir(f"{directory}/{name}", 0o755)


def _detach(point: str) -> None:
    try:
        syscalls.umount2(point, k.MNT_DETACH | k.UMOUNT_NOFOLLOW)
    except (FileNotFoundError, OSError):
        pass  # it went with the mount below it, or is out of reach: then it costs a few µs a session, no more
