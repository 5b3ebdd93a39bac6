"""The catalogue of checks: one table with the trial, the protection that rests on it, and the fix.

`CATALOGUE` holds the checks of `doctor` and `/v1/system` in the order they are shown, `SYSCTLS` the settings that make
an escape harder and that no sandbox rests on. A row without a `read` function is tried by `nsinit/tools/probe.py`; the
functions of the others judge the facts in a `Host`, which `read_host` collects and a test can make up. A failed check
has the verdict FALLS_BACK where the product then works in another way, else MISSING. A fix is a command in backquotes,
a line to put into a file, or a place to click. Reads files and changes nothing.

Sources: capabilities(7), namespaces(7), user_namespaces(7), proc(5), seccomp(2), core(5); tty_ioctl(4) TIOCSTI;
Documentation/admin-guide/sysctl/{fs,kernel,user,vm}.rst; Documentation/admin-guide/LSM/Yama.rst; Ubuntu's notes on
restricted user namespaces.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import platform
import re
import resource
import shlex
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from ipaddress import IPv4Network
from pathlib import Path
from types import MappingProxyType

import attrs

from egress.policy import parse_proxy
from nsinit.wire.protocol import BRIDGE_LINKS, MAX_TERMINALS
from sandkasten.admission.budget import SessionRoom
from sandkasten.counters.node import NAMESPACES, NAMESPACES_RESERVED
from sandkasten.host.data_dir import SHARED_MODE
from sandkasten.host.remedies import runnable
from sandkasten.model.node import Check, Verdict

_MIN_KERNEL = (5, 15)
_FULL_KERNEL = (5, 19)
_MIN_FREE_BYTES = 1024**3
_MIN_FREE_INODES = 100_000
_MIN_DESCRIPTORS = 19_200
_MIN_INOTIFY = 128
_DAY_S = 86_400
_DESCRIPTORS_OF_A_SESSION = 512 * 1024**2 // 256
"""Open files that the default memory limit pays for: the kernel charges some 256 bytes for each."""

# The facts

_USERNS_SYSCTLS = ("kernel.unprivileged_userns_clone", "kernel.apparmor_restrict_unprivileged_userns")
_MAX_NAMESPACES = tuple(f"user.max_{kind}_namespaces" for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"))


@attrs.frozen
class Host:
    """Facts about this process and its surroundings.

    `container` is the kind of container, empty outside of one; `status` is the text of `/proc/self/status`; `sysctls`
    maps names of this kernel's sysctls to their values; `merging` is the text of `_MERGING`, empty without the file;
    `installed_s` is the modification time of this program.
    """

    data_dir: Path = Path("/")
    euid: int = 0
    release: str = ""
    container: str = ""
    status: str = ""
    mountinfo: str = ""
    sysctls: Mapping[str, str] = attrs.field(factory=dict)
    max_descriptors: int = 0
    merging: str = ""
    now_s: float = 0
    installed_s: float = 0

    @property
    def is_wsl(self) -> bool:
        return "microsoft" in self.release.lower()

    @property
    def is_filtered(self) -> bool:
        """Whether a system call filter is in force on this process."""
        return re.search(r"^Seccomp:\s*2", self.status, re.MULTILINE) is not None

    def number(self, sysctl: str) -> int | None:
        """Return a sysctl's value, None if this kernel does not have it."""
        text = self.sysctls.get(sysctl, "")
        return int(text) if re.fullmatch(r"-?[0-9]+", text) else None

    def has_capability(self, number: int) -> bool:
        match = re.search(r"^CapEff:\s*([0-9a-f]+)", self.status, re.MULTILINE)
        return match is not None and bool(int(match[1], 16) >> number & 1)


_MERGING = "sys/kernel/mm/ksm/run"
"""Says 1 while the kernel merges pages (Documentation/admin-guide/mm/ksm.rst)."""


def read_host(data_dir: Path, root: str = "/") -> Host:
    """Collect the facts for a data directory, which need not exist. `root` is where the machine's files are."""
    named = ("fs.inotify.max_user_instances", "kernel.core_pattern", *_USERNS_SYSCTLS, *_MAX_NAMESPACES)
    names = (*named, *(each.name for each in SYSCTLS), *(each.name for each in POOLS))
    values = {name: read(f"{root}proc/sys/{name.replace('.', '/')}").strip() for name in names}
    return Host(
        data_dir=data_dir,
        euid=os.geteuid(),
        release=read(f"{root}proc/sys/kernel/osrelease").strip(),
        container=_container_kind(root),
        status=read(f"{root}proc/self/status"),
        mountinfo=read(f"{root}proc/self/mountinfo"),
        sysctls={name: value for name, value in values.items() if value},
        max_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        merging=read(f"{root}{_MERGING}").strip(),
        now_s=time.time(),
        installed_s=Path(__file__).stat().st_mtime,
    )


def _container_kind(root: str) -> str:
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if os.path.exists(f"{root}{name}"):
            return kind
    named = read(f"{root}run/systemd/container").strip()
    match = re.search(r"(?:^|\0)container=([\w.-]+)", read(f"{root}proc/1/environ"))
    found = named or (match[1] if match else "")
    return "" if found == "wsl" else found


def read(path: str) -> str:
    """Return the text of a file, empty if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


@attrs.frozen
class PathMount:
    point: str
    fstype: str
    options: tuple[str, ...]


def find_mount(path: Path, mountinfo: str) -> PathMount | None:
    """Return the mount that `path` is on, or would be made on; None if the text names none."""
    best: PathMount | None = None
    real = os.path.realpath(path)
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        point = fields[4].encode().decode("unicode_escape")
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        if is_above and (best is None or len(point) >= len(best.point)):  # of equals the later mount hides the earlier
            best = PathMount(point, after.split(" ")[0], tuple(fields[5].split(",")))
    return best


def nearest(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


# The rows


@attrs.frozen
class CheckRow:
    """One check: its title, the protection that rests on it, and the consequence and the fix of a failure.

    `read` judges the facts; None: nsinit's probe tries the check, under the same id.
    """

    title: str
    protection: str = ""
    consequence: str = ""
    fix: str = ""
    falls_back: bool = False
    read: Callable[[Host], Check] | None = None


def works(check_id: str, seen: str) -> Check:
    """Return a check that succeeded. `seen`: the finding, in words."""
    row = CATALOGUE[check_id]
    return Check(check_id, row.title, Verdict.WORKS, seen, row.protection)


def fails(check_id: str, seen: str, *, fix: str | None = None, verdict: Verdict | None = None) -> Check:
    """Return a failed check; `fix` and `verdict` replace those of the catalogue."""
    row = CATALOGUE[check_id]
    return Check(
        check_id,
        row.title,
        verdict or (Verdict.FALLS_BACK if row.falls_back else Verdict.MISSING),
        seen,
        row.protection,
        consequence=row.consequence,
        fix=runnable(row.fix if fix is None else fix),
    )


def _judged(check_id: str, ok: bool, seen: str) -> Check:
    return works(check_id, seen) if ok else fails(check_id, seen)


CONTAINER_FIX = (
    "run this on the machine itself or in a virtual machine; no container around the daemon is tested, and one without "
    "privilege can't make sandboxes"
)
_WSL_FIX = """\
put this into %UserProfile%\\.wslconfig in Windows, then wsl --shutdown there (only if `cgroups` below is not v2):
[wsl2]
kernelCommandLine = cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1
and keep the data directory on the Linux disk, not below /mnt/c"""

# linux/capability.h
_CAP_SYS_RESOURCE = 24
_CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "MKNOD": 27,
}
_FOREIGN = {
    "9p": "a Windows drive or a shared folder; keep the data directory on the Linux disk (in WSL not below /mnt/c)",
    "v9fs": "a Windows drive or a shared folder; keep the data directory on the Linux disk",
    "drvfs": "a Windows drive; keep the data directory on the Linux disk (in WSL not below /mnt/c)",
    "virtiofs": "a folder shared with the host of this machine; keep the data directory on its own disk",
    "nfs": "a network file system; overlayfs can't write there",
    "nfs4": "a network file system; overlayfs can't write there",
    "cifs": "a network file system; overlayfs can't write there",
    "overlay": "an overlay itself (a container's own file system); put the data directory on a volume",
    "vfat": "a file system without owners and links",
    "exfat": "a file system without owners and links",
    "ntfs3": "a file system without owners and links",
}


def _root(host: Host) -> Check:
    """Namespaces with real ids, mounts and cgroups need root."""
    return _judged("root", host.euid == 0, f"runs as user {host.euid}" if host.euid else "runs as root")


def _capabilities(host: Host) -> Check:
    """Root in a container may lack capabilities."""
    missing = [name for name, number in _CAPABILITIES.items() if not host.has_capability(number)]
    if missing:
        fix = CONTAINER_FIX if host.container else "run this as root, outside of anything that takes capabilities away"
        return fails("capabilities", f"CAP_{', CAP_'.join(missing)} missing", fix=fix)
    return works("capabilities", "all that are needed")


def _sys_resource(host: Host) -> Check:
    has_it = host.has_capability(_CAP_SYS_RESOURCE)
    return _judged("sys_resource", has_it, "there" if has_it else "missing")


def _python(host: Host) -> Check:
    """nsinit is plain Python, and calls the kernel through ctypes."""
    has_ctypes = importlib.util.find_spec("_ctypes") is not None
    seen = f"Python {platform.python_version()}, {'with' if has_ctypes else 'without'} ctypes"
    return _judged("python", has_ctypes and sys.version_info >= (3, 11), seen)


def _kernel(host: Host) -> Check:
    """The version is a hint, since distributions back-port; the probe decides."""
    match = re.match(r"(\d+)\.(\d+)", host.release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _MIN_KERNEL:
        return fails("kernel", f"Linux {host.release} is older than {'.'.join(map(str, _MIN_KERNEL))}")
    if version < _FULL_KERNEL:
        full = ".".join(map(str, _FULL_KERNEL))
        seen = f"Linux {host.release}: overlays on id-mapped layers came with {full}, if nobody put them back"
        return fails("kernel", seen, fix=_since(full), verdict=Verdict.FALLS_BACK)
    return works("kernel", f"Linux {host.release}")


def _container(host: Host) -> Check:
    """A container is fine as long as it was given the privileges that building takes."""
    if not host.container:
        return works("container", "none around this process")
    return fails("container", f"in {host.container}", verdict=Verdict.FALLS_BACK, fix=CONTAINER_FIX)


def _wsl(host: Host) -> Check:
    """WSL 1 has no Linux kernel; WSL 2 has one, with the old control groups unless told otherwise."""
    if not host.is_wsl:
        return works("wsl", "not in WSL")
    return fails("wsl", "in WSL 2", verdict=Verdict.FALLS_BACK, fix=_WSL_FIX)


def _data_dir(host: Host) -> Check:
    """Several file systems can't hold a session's writable layer."""
    mount = find_mount(host.data_dir, host.mountinfo) or PathMount("/", "unknown", ())
    if mount.fstype in _FOREIGN or mount.fstype.startswith("fuse"):
        kind = _FOREIGN.get(mount.fstype, "a file system in user space; keep the data directory on a disk")
        return fails("data_dir", f"{host.data_dir} is on {mount.fstype} ({mount.point}): {kind}")
    return works("data_dir", f"{host.data_dir} is on {mount.fstype}")


def _data_dir_mode(host: Host) -> Check:
    """Only the owner may make names in the data directory; in one that is root's and sticky the daemon may, too."""
    if not host.data_dir.exists():
        return works("data_dir_mode", "made with mode 0700 at the first start")
    status = host.data_dir.stat()
    mode = stat.S_IMODE(status.st_mode)
    seen = f"mode {mode:04o}, owner {status.st_uid}"
    if (mode == SHARED_MODE and status.st_uid == 0) or not mode & 0o022:
        return works("data_dir_mode", seen)
    return fails("data_dir_mode", seen, fix=f"`chmod go-w {shlex.quote(str(host.data_dir))}`")


def _space(host: Host) -> Check:
    """A warning only: the space needed depends on the sessions."""
    space = os.statvfs(nearest(host.data_dir))
    free_bytes, has_inodes = space.f_bavail * space.f_frsize, space.f_files > 0  # btrfs counts none
    seen = f"{free_bytes / 1024**3:.1f} GiB free for images, sessions and workspaces"
    if has_inodes:
        seen += f", {space.f_favail} inodes"
    is_enough = free_bytes >= _MIN_FREE_BYTES and (not has_inodes or space.f_favail >= _MIN_FREE_INODES)
    return _judged("space", is_enough, seen)


def disk_notices(data_dir: Path, disk_mb: int) -> list[str]:
    """Return a sentence for a data directory that a reboot empties, and for one without room for a session's disk of
    `disk_mb` MiB."""
    place, notices = nearest(data_dir), []
    mount = find_mount(data_dir, Path("/proc/self/mountinfo").read_text())
    if mount is not None and mount.fstype in ("tmpfs", "ramfs"):
        notices.append(
            f"data_dir: {data_dir} is on {mount.fstype}: images, workspaces and keys are gone after a reboot"
        )
    space = os.statvfs(place)
    free_mb = space.f_bavail * space.f_frsize // 1024**2
    if free_mb < disk_mb:
        notices.append(
            f"data_dir: {free_mb} MiB are free at {place}, less than the {disk_mb} MiB that one session may write "
            "(defaults.disk_limit_mb)"
        )
    return notices


def _descriptors(host: Host) -> Check:
    """A session takes 5 to 19 of the daemon's descriptors."""
    hard = math.inf if host.max_descriptors == resource.RLIM_INFINITY else host.max_descriptors
    seen = "no limit" if hard == math.inf else f"{hard} per process"
    return _judged("descriptors", hard >= _MIN_DESCRIPTORS, seen)


def _inotify(host: Host) -> Check:
    """The kernel counts the instances of all users of a session together, and each session for itself."""
    instances = host.number("fs.inotify.max_user_instances") or 0
    return _judged("inotify", instances >= _MIN_INOTIFY, f"{instances} instances for each session")


def _clock(host: Host) -> Check:
    """The time can't be earlier than this file was written."""
    seen = datetime.fromtimestamp(host.now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _judged("clock", host.now_s >= host.installed_s - _DAY_S, seen)


def _sysctl_fix(name: str, value: int) -> str:
    return f"`sysctl -w {name}={value}` (and {name}={value} in /etc/sysctl.d/60-sandkasten.conf)"


def _since(version: str, option: str = "") -> str:
    return f"a kernel from {version} on" + (f", with {option}=y" if option else "")


_DISK_FIX = "`sandkasten serve --data-dir DIR`, with DIR on a Linux disk (ext4, xfs, btrfs)"
_TRACE = "sessions would see each other and the machine"
_STRIP = "commands could get power back"
_ROOTFS = "no root filesystem can be put together"
_ALONE = "a session could use up the machine"

CATALOGUE: Mapping[str, CheckRow] = MappingProxyType(
    {
        # the process and its place
        "root": CheckRow("root", "privilege", "nothing can be made", "run this as root (sudo)", read=_root),
        "capabilities": CheckRow(
            "capabilities", "privilege", "root without these powers can't make sandboxes", read=_capabilities
        ),
        "sys_resource": CheckRow(
            "CAP_SYS_RESOURCE",
            consequence="hard limits can't be raised, and nothing can be protected from the out-of-memory killer",
            fix="in a container: start it with --cap-add SYS_RESOURCE",
            falls_back=True,
            read=_sys_resource,
        ),
        "python": CheckRow(
            "python", "privilege", "nsinit can't call the kernel", "Python 3.11 or newer with ctypes", read=_python
        ),
        "kernel": CheckRow(
            "kernel", "filesystem", "the calls a sandbox is built with came later", _since("5.15"), read=_kernel
        ),
        "container": CheckRow(
            "container", consequence="a sandbox can be no stronger than the container around it", read=_container
        ),
        "wsl": CheckRow(
            "WSL", consequence="limits need control groups that WSL may leave in their old form", read=_wsl
        ),
        "data_dir": CheckRow(
            "data directory", "filesystem", "no session can have a writable layer there", _DISK_FIX, read=_data_dir
        ),
        "data_dir_mode": CheckRow(
            "its mode", consequence="others could change images and workspaces", falls_back=True, read=_data_dir_mode
        ),
        "space": CheckRow(
            "its space", consequence="sessions and images will meet a full disk", falls_back=True, read=_space
        ),
        "probe": CheckRow("probe", "filesystem", "nothing could be tried", _DISK_FIX),
        # processes
        "clone3": CheckRow("clone3", "namespaces", "no process can be started where it belongs", _since("5.5")),
        "pidfd": CheckRow("pidfd", "namespaces", "a recycled pid could be killed", _since("5.4")),
        "close_range": CheckRow("close_range", "namespaces", "a descriptor could leak into a session", _since("5.9")),
        "openat2": CheckRow("openat2", "filesystem", "a link in an image could lead out of it", _since("5.6")),
        "namespaces": CheckRow("namespaces", "namespaces", _TRACE, "CONFIG_NAMESPACES=y and all kinds of them"),
        "user_namespace": CheckRow("user namespace", "user_ids", "sessions would share user ids", "CONFIG_USER_NS=y"),
        "id_ranges": CheckRow(
            "id ranges",
            consequence="ids for few sessions are left",
            fix="shorten the ranges in /etc/subuid and /etc/subgid between 524288 and 1879048191",
            falls_back=True,
        ),
        "capability_drop": CheckRow("giving power away", "capabilities", _STRIP, _since("5.15", "CONFIG_USER_NS")),
        "seccomp": CheckRow(
            "system call filter", "seccomp", "every system call is open to a session", "CONFIG_SECCOMP_FILTER=y"
        ),
        "landlock_scopes": CheckRow(
            "Landlock scopes",
            "landlock",
            "sockets and signals are kept apart by namespaces alone",
            f"{_since('6.12', 'CONFIG_SECURITY_LANDLOCK')} and landlock in the lsm= list of the kernel command line",
        ),
        "landlock_files": CheckRow(
            "Landlock file rules",
            "landlock",
            "sessions that ask for file rules are refused",
            f"{_since('6.2', 'CONFIG_SECURITY_LANDLOCK')} and landlock in the lsm= list of the kernel command line",
        ),
        "keyring": CheckRow("keyring", "user_ids", "a session would hold the operator's keyring", "CONFIG_KEYS=y"),
        # file systems
        "mounts": CheckRow("mount calls", "filesystem", _ROOTFS, _since("5.15")),
        "overlay": CheckRow(
            "overlayfs", "filesystem", "no session can have a layer over an image", _since("5.19", "CONFIG_OVERLAY_FS")
        ),
        "overlay_by_fd": CheckRow(
            "layers by descriptor", "", "names of layers show in a session's mount table", _since("6.13")
        ),
        "idmapped_tmpfs": CheckRow("mapped tmpfs", "", "device nodes show nobody as their owner", _since("6.3")),
        "tmpfs": CheckRow("tmpfs", "filesystem", _ROOTFS, "CONFIG_TMPFS=y"),
        "proc": CheckRow("proc", "filesystem", "commands would see PID 1", _since("5.8", "CONFIG_PROC_FS")),
        "devpts": CheckRow("devpts", "filesystem", "no terminal of a session's own", "CONFIG_UNIX98_PTYS=y"),
        "pivot_root": CheckRow("pivot_root", "filesystem", "the machine's root would stay in reach", _since("5.15")),
        # networks
        "loopback": CheckRow("network", "network", "sessions would share the machine's network", "CONFIG_NET_NS=y"),
        "socket_diag": CheckRow(
            "socket diagnosis",
            "",
            "PID 1 finds a session's ports by a walk through the machine's table of connections, which costs ten times "
            "as much while processes live in the background",
            "`modprobe -a inet_diag tcp_diag` (CONFIG_INET_DIAG, CONFIG_INET_TCP_DIAG)",
        ),
        "sk_lookup": CheckRow(
            "way out",
            "",
            "a session with a network has a proxy, for programs that obey its variables, and no other connection",
            _since("5.9", "CONFIG_BPF_SYSCALL=y, CONFIG_INET"),
        ),
        "bridge": CheckRow(
            "mode bridge",
            "",
            "no session can have the network mode bridge: UDP and ICMP do not leave",
            "`modprobe -a veth nf_tables nft_ct nft_masq nft_fib_ipv4` (CONFIG_VETH, CONFIG_NF_TABLES_NETDEV, "
            "CONFIG_NFT_CT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4)",
        ),
        # disks
        "disk": CheckRow("disk limit", "disk", "a session could fill the disk", "`apt-get install e2fsprogs`"),
        "disk_project": CheckRow(
            "project quota",
            "",
            "another mechanism is taken",
            "`tune2fs -O project,quota DEVICE`, and prjquota in the mount options (xfs: in the mount options alone)",
        ),
        "disk_btrfs": CheckRow("btrfs quota", "", "another mechanism is taken", "a data directory on btrfs"),
        "disk_loop": CheckRow(
            "loop image",
            "",
            "another mechanism is taken",
            "`apt-get install e2fsprogs`, `modprobe loop`, and /dev/loop-control in a container",
        ),
        "disk_tmpfs": CheckRow("disk in memory", "", "another mechanism is taken", "CONFIG_TMPFS=y"),
        # cgroups
        "cgroups": CheckRow("cgroups", "limits", _ALONE, _since("5.15", "CONFIG_CGROUPS")),
        "limits": CheckRow("limits", "limits", _ALONE, "CONFIG_MEMCG=y, CONFIG_CGROUP_PIDS=y, CONFIG_CFS_BANDWIDTH=y"),
        "pids_limit": CheckRow("process limit", "limits", "a fork bomb would take the machine", "CONFIG_CGROUP_PIDS=y"),
        "memory_limit": CheckRow("memory limit", "limits", _ALONE, "CONFIG_MEMCG=y"),
        "cpu_limit": CheckRow("cpu limit", "limits", _ALONE, "CONFIG_CFS_BANDWIDTH=y"),
        "swap": CheckRow(
            "swap limit",
            "swap",
            "a session could fill the swap beyond its memory limit",
            "swapaccount=1 on the kernel command line, or cgroup v2, or `swapoff -a`",
        ),
        "clone_into_cgroup": CheckRow("birth in a cgroup", "", "a create takes some ms longer", _since("5.7")),
        "address_programs": CheckRow(
            "address programs",
            "",
            "what a way out may reach is checked by the process that carries it, and not by the kernel as well",
            _since("4.18", "CONFIG_CGROUP_BPF=y, and a cgroup v2 tree"),
        ),
        "cgroup_kill": CheckRow("cgroup.kill", "", "ends of sessions take longer", _since("5.14")),
        "cgroup_freeze": CheckRow("cgroup.freeze", "", "a session can't be held still", _since("5.2")),
        "pressure": CheckRow(
            "pressure", "", "stats have no pressure", "CONFIG_PSI=y; psi=1 on the kernel command line"
        ),
        "record_locks": CheckRow(
            "record locks", "", "a session can fill the machine's memory with record locks", "CONFIG_SLUB_DEBUG=y"
        ),
        # aids of the operator
        "kernel_log": CheckRow(
            "kernel log", "", "a command that ran out of memory is not named", "run this outside of a container"
        ),
        "descriptors": CheckRow(
            "descriptors",
            "",
            "fewer sessions",
            "`ulimit -Hn 1048576` before the start; under systemd LimitNOFILE=1048576 in the unit",
            falls_back=True,
            read=_descriptors,
        ),
        "inotify": CheckRow(
            "inotify",
            "",
            "a session may have no more instances",
            _sysctl_fix("fs.inotify.max_user_instances", 8192),
            falls_back=True,
            read=_inotify,
        ),
        "clock": CheckRow(
            "clock", "", "times in records are wrong", "`date -s TIME`, or a time service", falls_back=True, read=_clock
        ),
    }
)
"""Checks by id, in the order in which they are shown. One without a protection matters to the operator alone."""

# The fix that fits where the process runs

REFUSED = (errno.EPERM, errno.EACCES)


def advise(check_id: str, number: int, host: Host) -> str:
    """Return the fix of a check that failed with an errno: EPERM has another cure in a container, under AppArmor and
    behind a sysctl."""
    usual = CATALOGUE[check_id].fix
    if check_id in ("namespaces", "user_namespace", "capability_drop", "loopback") and (fix := _namespace_fix(host)):
        return fix
    if number == errno.ENOSYS and host.is_filtered:
        return f"a filter around this process refuses the call: run this outside of its container; or {usual}"
    if number in REFUSED and host.container:
        return CONTAINER_FIX
    return usual


def _namespace_fix(host: Host) -> str:
    for name in _MAX_NAMESPACES:
        if host.number(name) == 0:
            return _sysctl_fix(name, 65536)
    if host.number("kernel.unprivileged_userns_clone") == 0:
        return _sysctl_fix("kernel.unprivileged_userns_clone", 1)
    if host.number("kernel.apparmor_restrict_unprivileged_userns") == 1:
        return f"""\
put this into /etc/apparmor.d/sandkasten and run `apparmor_parser -r /etc/apparmor.d/sandkasten`:
abi <abi/4.0>,
include <tunables/global>
profile sandkasten {os.path.realpath(sys.executable)} flags=(unconfined) {{
  userns,
}}"""
    return ""


# The settings that no sandbox rests on


@attrs.frozen
class Sysctl:
    """A setting, its good values (`at_least` to `at_most`), and the consequence of a bad one.

    `in_doctor`: a check of `doctor`. `severity`: that of the finding of `sandkasten security`, empty for none.
    """

    name: str
    at_least: int
    at_most: int
    consequence: str
    severity: str = "low"
    in_doctor: bool = True

    def wanted(self, value: int) -> int:
        """Return the good value that is nearest to `value`."""
        return min(max(value, self.at_least), self.at_most)


SYSCTLS = (
    Sysctl("fs.protected_symlinks", 1, 1, "links in shared directories such as /tmp can trick programs of the machine"),
    Sysctl("fs.protected_hardlinks", 1, 1, "users of the machine can keep a hard link to files they may not read"),
    Sysctl("fs.protected_fifos", 1, 2, "FIFOs in shared directories can trick programs of the machine"),
    Sysctl("fs.protected_regular", 1, 2, "files in shared directories can trick programs of the machine", severity=""),
    Sysctl("kernel.dmesg_restrict", 1, 1, "every user of the machine can read kernel addresses in its log"),
    Sysctl("kernel.kptr_restrict", 1, 2, "kernel addresses, which exploits need, can be read in /proc"),
    Sysctl(
        "kernel.unprivileged_bpf_disabled", 1, 2, "users of the machine can load BPF programs (CVE-2021-3490)", "medium"
    ),
    Sysctl("kernel.yama.ptrace_scope", 1, 3, "a user's programs can trace each other outside of sandboxes"),
    Sysctl("dev.tty.legacy_tiocsti", 0, 0, "a program can type into the terminal it was started from (CVE-2019-10063)"),
    Sysctl("kernel.io_uring_disabled", 1, 2, "io_uring is open to users of the machine", severity=""),
    Sysctl(
        "kernel.randomize_va_space", 2, 2, "addresses can be guessed, so a bug is an exploit", "high", in_doctor=False
    ),
    Sysctl("kernel.perf_event_paranoid", 2, 9, "unprivileged programs measure the kernel", in_doctor=False),
    Sysctl("vm.unprivileged_userfaultfd", 0, 0, "exploits halt the kernel where they want to", in_doctor=False),
    Sysctl(
        "fs.suid_dumpable",
        0,
        0,
        "core dumps of privileged programs can be read (CVE-2025-4598)",
        "medium",
        in_doctor=False,
    ),
)
"""In the order of `doctor`. A sysctl that this kernel does not have is left out."""


def check_sysctls(host: Host) -> list[Check]:
    """Return one check for each setting of `doctor` that this kernel has."""
    found = ((each, host.number(each.name)) for each in SYSCTLS if each.in_doctor)
    return [_check_sysctl(each, value) for each, value in found if value is not None]


@attrs.frozen
class SharedPool:
    """A setting that bounds what all sessions take together: what one session may take (for each of its processes, with
    `for_each_process`), and what remains for the machine."""

    name: str
    of_a_session: int
    reserved: int = 0
    for_each_process: bool = False

    def needed(self, sessions: int, processes: int) -> int:
        """Return the value for so many sessions with so many processes each."""
        return sessions * self.of_a_session * (processes if self.for_each_process else 1) + self.reserved


POOLS = (
    SharedPool("kernel.pid_max", 1, 4096, for_each_process=True),
    SharedPool("kernel.threads-max", 1, 4096, for_each_process=True),
    SharedPool("kernel.pty.max", MAX_TERMINALS, 1024),
    SharedPool("fs.file-max", _DESCRIPTORS_OF_A_SESSION, 65_536),
    # Those that only map the ids of a mount are the machine's root's: of system files, and of a workspace.
    *(SharedPool(name, each, NAMESPACES_RESERVED) for name, each in NAMESPACES.items()),
)
"""The pools of the machine that are not divided by the kernel; see docs/security.md for the objects that are."""


def check_pools(host: Host, sessions: int, processes: int) -> list[Check]:
    """Return one check for each pool that is too small for so many sessions, with so many processes each."""
    found = ((each.name, host.number(each.name), each.needed(sessions, processes)) for each in POOLS)
    return [_small_pool(name, value, needed) for name, value, needed in found if value is not None and value < needed]


def check_room(room: SessionRoom, wanted: int) -> Check:
    """Return the check that tells how many sessions with default limits this machine admits, and what bounds them."""
    seen = f"{room.sessions} with default limits, bounded by {room.bound}"
    if room.sessions >= wanted:
        return Check("sessions", "sessions", Verdict.WORKS, seen)
    lacks = f"creates beyond {room.sessions} sessions are refused, although server.max_sessions is {wanted}"
    return Check("sessions", "sessions", Verdict.FALLS_BACK, seen, consequence=lacks, fix=room.fix)


def check_merging(host: Host) -> Check:
    """Return the check of `isolation.merge_pages`, for an installation that asks for it."""
    if host.merging == "1":
        return Check("merge_pages", "merging of pages", Verdict.WORKS, f"/{_MERGING} is 1")
    fix = f"`echo 1 > /{_MERGING}` (and once after each start of the machine)" if host.merging else "CONFIG_KSM=y"
    return Check(
        "merge_pages",
        "merging of pages",
        Verdict.FALLS_BACK,
        f"/{_MERGING} is {host.merging}" if host.merging else "this kernel can't merge pages",
        consequence="isolation.merge_pages has no effect: sessions take as much memory as without",
        fix=runnable(fix),
    )


_ROUTE_FIELDS, _REJECT = 8, 0x200


def check_bridge_way(sessions: str, root: str = "/") -> Check:
    """Return the check of `isolation.bridge_range`, for an installation that allows the mode `bridge`: whether packets
    of such a session find their way out of this machine, and answers back. As nsinit looks for each new link."""
    ours, taken, ways = IPv4Network(sessions), [], []
    for line in read(f"{root}proc/net/route").splitlines()[1:]:  # proc(5); numbers are in the machine's order
        link, destination, _, flags, _, _, metric, mask = line.split()[:_ROUTE_FIELDS]
        place, bits = (struct.pack("=I", int(each, 16)) for each in (destination, mask))
        network = IPv4Network((place, int.from_bytes(bits).bit_count()))
        if not network.prefixlen:
            ways += [] if int(flags, 16) & _REJECT else [(int(metric), link)]
        elif network.overlaps(ours) and not link.startswith(BRIDGE_LINKS):
            taken.append(str(network))
    link = min(ways)[1] if ways else ""
    setting = f"net.ipv4.conf.{link}.forwarding"
    if not link:
        seen, fix = "this machine has no default route by one interface", "`ip route add default via GATEWAY`"
    elif taken:
        seen, fix = f"{ours} overlaps the route to {taken[0]}", "isolation.bridge_range: a network that is nobody's"
    elif read(f"{root}proc/sys/net/ipv4/conf/{link}/forwarding").strip() != "1":
        seen, fix = f"{setting} is not 1: answers to sessions are not taken", _sysctl_fix(setting, 1)
    else:
        return Check("bridge_way", "way of bridges", Verdict.WORKS, f"by {link}, with addresses of {ours}")
    lacks = "a request for the network mode bridge is refused"
    return Check("bridge_way", "way of bridges", Verdict.MISSING, seen, consequence=lacks, fix=runnable(fix))


def check_upstream(url: str) -> Check:
    """Return the check of `egress.upstream_proxy`: whether something listens there. Waits for at most 3 s."""
    address, port = parse_proxy(url)
    try:
        socket.create_connection((str(address), port), timeout=3).close()
    except OSError as error:
        seen, lacks = f"{url}: {error.strerror or 'no answer'}", "no session with a way out reaches anything"
        fix = "start the proxy, or set egress.upstream_proxy to one that this machine reaches"
        return Check("upstream_proxy", "upstream proxy", Verdict.MISSING, seen, consequence=lacks, fix=fix)
    return Check("upstream_proxy", "upstream proxy", Verdict.WORKS, f"{url} takes connections")


def _small_pool(name: str, value: int, needed: int) -> Check:
    return Check(
        name,
        name,
        Verdict.FALLS_BACK,
        f"is {value}",
        consequence="fewer sessions than max_sessions, or sessions that get less than their limits",
        fix=runnable(_sysctl_fix(name, needed)),
    )


def _check_sysctl(setting: Sysctl, value: int) -> Check:
    seen = f"is {value}"
    if setting.wanted(value) == value:
        return Check(setting.name, setting.name, Verdict.WORKS, seen)
    fix = runnable(_sysctl_fix(setting.name, setting.wanted(value)))
    return Check(setting.name, setting.name, Verdict.FALLS_BACK, seen, consequence=setting.consequence, fix=fix)
