"""Can this machine run sandboxes? Each check has a name and one sentence; used at start and by `sandkasten doctor`.

Reads /proc and asks `nsinit/probe.py` to try the privileged steps; changes nothing that stays. The facts a person can
act on (who runs this, where the data directory is) are looked at first, so that a failed system call is the last resort
for an explanation, not the first. Sources: capabilities(7), namespaces(7), proc(5).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from nsinit import protocol as nsinit_protocol

MIN_KERNEL = (5, 15)
FULL_KERNEL = (5, 19)
MIN_FREE_BYTES = 1024**3
_PROBE = Path(nsinit_protocol.__file__).with_name("probe.py")
_PROBE_S = 30

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
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
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


@attrs.frozen
class Check:
    """One finding. `required`: without it no sandbox can be made."""

    name: str
    ok: bool
    detail: str
    required: bool = True


def run(data_dir: Path) -> list[Check]:
    """Return all findings. `data_dir` need not exist; the privileged part is tried as root only."""
    checks = [
        check_root(os.geteuid()),
        check_capabilities(_read("/proc/self/status")),
        check_kernel(os.uname().release),
        check_namespaces(),
        check_filesystem(data_dir, _read("/proc/self/mountinfo")),
        check_space(data_dir),
    ]
    if all(check.ok or not check.required for check in checks):
        checks += probe(_nearest(data_dir))
    return checks


def check_root(euid: int) -> Check:
    """Making namespaces with real ids, mounts and cgroups needs root."""
    return Check("root", euid == 0, "runs as root" if euid == 0 else "run this as root (sudo)")


def check_capabilities(status: str) -> Check:
    """Root in a container may have lost some of its power."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    effective = int(match[1], 16) if match else 0
    missing = [name for name, number in _CAPABILITIES.items() if not effective >> number & 1]
    if missing:
        return Check("capabilities", False, f"CAP_{', CAP_'.join(missing)} missing; in a container, run it privileged")
    return Check("capabilities", True, "all that are needed")


def check_kernel(release: str) -> Check:
    """The version as the kernel tells it; distributions back-port, so what counts is the probe."""
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    needed = ".".join(map(str, MIN_KERNEL))
    if version < MIN_KERNEL:
        return Check("kernel", False, f"Linux {release} is older than {needed}")
    if version < FULL_KERNEL:
        full = ".".join(map(str, FULL_KERNEL))
        return Check("kernel", False, f"Linux {release}: overlays on id-mapped layers came with {full}", required=False)
    return Check("kernel", True, f"Linux {release}")


def check_namespaces(proc: str = "/proc") -> Check:
    """A kernel may lack a kind of namespace, or a limit may forbid making any."""
    for name in _NAMESPACES:
        if not os.path.exists(f"{proc}/self/ns/{name}"):
            return Check("namespaces", False, f"this kernel has no {name} namespaces")
        limit = _read(f"{proc}/sys/user/max_{name}_namespaces").strip()
        if limit == "0":
            return Check("namespaces", False, f"user.max_{name}_namespaces is 0; raise it with sysctl")
    return Check("namespaces", True, ", ".join(_NAMESPACES))


def check_filesystem(data_dir: Path, mountinfo: str) -> Check:
    """Some file systems can't hold a session's writable layer whatever is tried."""
    point, fstype = find_filesystem(data_dir, mountinfo)
    if fstype in _FOREIGN or fstype.startswith("fuse"):
        what = _FOREIGN.get(fstype, "a file system in user space; keep the data directory on a disk")
        return Check("data directory", False, f"{data_dir} is on {fstype} ({point}): {what}")
    return Check("data directory", True, f"{data_dir} is on {fstype}")


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
    free = shutil.disk_usage(_nearest(data_dir)).free
    detail = f"{free / 1024**3:.1f} GiB free for images, sessions and workspaces"
    return Check("disk space", free >= MIN_FREE_BYTES, detail, required=False)


def probe(directory: Path) -> list[Check]:
    """Let nsinit's probe try the privileged steps in a directory of its own below `directory`."""
    command = [sys.executable, "-I", "-S", "-B", str(_PROBE), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, cwd="/", env={"LANG": "C.UTF-8"}, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Check("probe", False, f"the probe did not answer: {error}")]
    try:
        results = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return [Check("probe", False, f"nothing can be tried in {directory}: {reason}")]
    return [Check(name, bool(found["ok"]), str(found["detail"])) for name, found in results.items()]


def _nearest(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
