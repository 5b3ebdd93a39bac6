"""What reading tells of the machine: who asks, which kernel, where the data directory is.

Facts a person can act on at once; what must be tried is `nsinit/probe.py`'s. Each function judges one text or one
number, so that a test can make it up; `read_all` reads them. Sources: capabilities(7), namespaces(7), proc(5).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from sandkasten.machine import Check, Verdict
from sandkasten.runtime.checks import fails, judged, works

MIN_KERNEL = (5, 15)
FULL_KERNEL = (5, 19)
MIN_FREE_BYTES = 1024**3

# linux/capability.h
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
_OPTIONS = {
    "cgroup": "CONFIG_CGROUPS",
    "ipc": "CONFIG_IPC_NS",
    "mnt": "CONFIG_NAMESPACES",
    "net": "CONFIG_NET_NS",
    "pid": "CONFIG_PID_NS",
    "user": "CONFIG_USER_NS",
    "uts": "CONFIG_UTS_NS",
}
_NAMESPACES = tuple(_OPTIONS)
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


def read_all(data_dir: Path) -> list[Check]:
    """Return these checks. `data_dir` need not exist."""
    return [
        check_root(os.geteuid()),
        check_capabilities(_read("/proc/self/status")),
        check_kernel(os.uname().release),
        check_namespaces(),
        check_filesystem(data_dir, _read("/proc/self/mountinfo")),
        check_space(data_dir),
    ]


def check_root(euid: int) -> Check:
    """Making namespaces with real ids, mounts and cgroups needs root."""
    return judged("root", euid == 0, "runs as root" if euid == 0 else f"runs as user {euid}")


def check_capabilities(status: str) -> Check:
    """Root in a container may have lost some of its power."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    effective = int(match[1], 16) if match else 0
    missing = [name for name, number in _CAPABILITIES.items() if not effective >> number & 1]
    if missing:
        return fails("capabilities", f"CAP_{', CAP_'.join(missing)} missing")
    return works("capabilities", "all that are needed")


def check_kernel(release: str) -> Check:
    """The version as the kernel tells it; distributions back-port, so what counts is the probe."""
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    needed = ".".join(map(str, MIN_KERNEL))
    if version < MIN_KERNEL:
        return fails("kernel", f"Linux {release} is older than {needed}")
    if version < FULL_KERNEL:
        full = ".".join(map(str, FULL_KERNEL))
        seen = f"Linux {release}: overlays on id-mapped layers came with {full}, if nobody put them back"
        return fails("kernel", seen, verdict=Verdict.FALLS_BACK)
    return works("kernel", f"Linux {release}")


def check_namespaces(proc: str = "/proc") -> Check:
    """A kernel may lack a kind of namespace, or a limit may forbid making any."""
    for name in _NAMESPACES:
        if not os.path.exists(f"{proc}/self/ns/{name}"):
            return fails("namespaces", f"this kernel has no {name} namespaces", fix=f"a kernel with {_OPTIONS[name]}=y")
        limit = _read(f"{proc}/sys/user/max_{name}_namespaces").strip()
        if limit == "0":
            fix = f"sysctl -w user.max_{name}_namespaces=65536"
            return fails("namespaces", f"user.max_{name}_namespaces is 0", fix=fix)
    return works("namespaces", ", ".join(_NAMESPACES))


def check_filesystem(data_dir: Path, mountinfo: str) -> Check:
    """Some file systems can't hold a session's writable layer whatever is tried."""
    point, fstype = find_filesystem(data_dir, mountinfo)
    if fstype in _FOREIGN or fstype.startswith("fuse"):
        what = _FOREIGN.get(fstype, "a file system in user space; keep the data directory on a disk")
        fix = "sandkasten serve --data-dir DIR, with DIR on a Linux disk (ext4, xfs, btrfs)"
        return fails("data_dir", f"{data_dir} is on {fstype} ({point}): {what}", fix=fix)
    return works("data_dir", f"{data_dir} is on {fstype}")


def find_filesystem(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return mount point and type of the file system that `path` is, or would be made, on."""
    best = ("/", "unknown")
    real = os.path.realpath(path)
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].encode().decode("unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, rest.split(" ")[0])
    return best


def check_space(data_dir: Path) -> Check:
    """A warning only: what is enough depends on the sessions."""
    free = shutil.disk_usage(nearest(data_dir)).free
    detail = f"{free / 1024**3:.1f} GiB free for images, sessions and workspaces"
    return judged("space", free >= MIN_FREE_BYTES, detail)


def nearest(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
