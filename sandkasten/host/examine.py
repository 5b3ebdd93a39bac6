"""What reading tells of the machine: who asks, which kernel, where the data directory is.

Facts a person can act on at once; what must be tried is `nsinit/tools/probe.py`'s. Each function judges one text or one
number, so that a test can make it up; `read_all` reads them. Sources: capabilities(7), namespaces(7), proc(5).

Examines the machine: reads what can be read and lets `nsinit/tools/probe.py` try the rest. Changes nothing that stays.

Used at start, by `sandkasten doctor` and by `/v1/system`. Facts a person can act on (who runs this, where the data
directory is) come first, so that a failed system call is the last resort for an explanation, not the first.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from nsinit.wire import protocol as nsinit_protocol
from sandkasten.host import checks as hardening
from sandkasten.host.checks import CATALOGUE, fails, judged, works
from sandkasten.host.data_dir import SHARED_MODE
from sandkasten.host.surroundings import CONTAINER_FIX, Host, advise, read, read_host
from sandkasten.model.node import Check, Machine, Verdict

MIN_KERNEL = (5, 15)
FULL_KERNEL = (5, 19)
MIN_FREE_BYTES = 1024**3
MIN_FREE_INODES = 100_000
_MIN_DESCRIPTORS = 16_384
_MIN_INOTIFY = 1024
_DAY_S = 86_400
_CAP_SYS_RESOURCE = 24
_WSL_FIX = """\
put this into %UserProfile%\\.wslconfig in Windows, then `wsl --shutdown` (only if `cgroups` below is not v2):
[wsl2]
kernelCommandLine = cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1
and keep the data directory on the Linux disk, not below /mnt/c"""

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


def read_all(data_dir: Path, host: Host) -> list[Check]:
    """Return these checks. `data_dir` need not exist."""
    status = read("/proc/self/status")
    return [
        check_root(os.geteuid()),
        check_capabilities(status, host),
        check_sys_resource(status),
        check_python(),
        check_kernel(os.uname().release),
        check_container(host),
        check_wsl(host),
        check_filesystem(data_dir, read("/proc/self/mountinfo")),
        check_mode(data_dir),
        check_space(data_dir),
        check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        check_inotify(read("/proc/sys/fs/inotify/max_user_instances")),
        check_core_pattern(read("/proc/sys/kernel/core_pattern")),
        check_clock(time.time(), Path(__file__).stat().st_mtime),
    ]


def check_root(euid: int) -> Check:
    """Making namespaces with real ids, mounts and cgroups needs root."""
    return judged("root", euid == 0, "runs as root" if euid == 0 else f"runs as user {euid}")


def check_capabilities(status: str, host: Host) -> Check:
    """Root in a container may have lost some of its power."""
    effective = _effective(status)
    missing = [name for name, number in _CAPABILITIES.items() if not effective >> number & 1]
    if missing:
        fix = CONTAINER_FIX if host.container else "run this as root, outside of anything that takes capabilities away"
        return fails("capabilities", f"CAP_{', CAP_'.join(missing)} missing", fix=fix)
    return works("capabilities", "all that are needed")


def check_sys_resource(status: str) -> Check:
    """Wanted, not needed."""
    has_it = bool(_effective(status) >> _CAP_SYS_RESOURCE & 1)
    return judged("sys_resource", has_it, "there" if has_it else "missing")


def _effective(status: str) -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def check_python() -> Check:
    """nsinit is plain Python, and calls the kernel through ctypes."""
    has_ctypes = importlib.util.find_spec("_ctypes") is not None
    seen = f"Python {platform.python_version()}, {'with' if has_ctypes else 'without'} ctypes"
    return judged("python", has_ctypes and sys.version_info >= (3, 11), seen)


def check_container(host: Host) -> Check:
    """Works as long as the container was given what it takes."""
    if not host.container:
        return works("container", "none around this process")
    return fails("container", f"in {host.container}", verdict=Verdict.FALLS_BACK, fix=CONTAINER_FIX)


def check_wsl(host: Host) -> Check:
    """WSL 1 has no Linux kernel; WSL 2 has one, with the old control groups unless told otherwise."""
    if not host.is_wsl:
        return works("wsl", "not in WSL")
    return fails("wsl", "in WSL 2", verdict=Verdict.FALLS_BACK, fix=_WSL_FIX)


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


def check_filesystem(data_dir: Path, mountinfo: str) -> Check:
    """Some file systems can't hold a session's writable layer whatever is tried."""
    point, fstype = find_filesystem(data_dir, mountinfo)
    if fstype in _FOREIGN or fstype.startswith("fuse"):
        what = _FOREIGN.get(fstype, "a file system in user space; keep the data directory on a disk")
        return fails("data_dir", f"{data_dir} is on {fstype} ({point}): {what}")
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
    space = os.statvfs(nearest(data_dir))
    free_bytes, has_inodes = space.f_bavail * space.f_frsize, space.f_files > 0  # btrfs counts none
    seen = f"{free_bytes / 1024**3:.1f} GiB free for images, sessions and workspaces"
    if has_inodes:
        seen += f", {space.f_favail} inodes"
    is_enough = free_bytes >= MIN_FREE_BYTES and (not has_inodes or space.f_favail >= MIN_FREE_INODES)
    return judged("space", is_enough, seen)


def check_mode(data_dir: Path) -> Check:
    """Nobody but its owner may make names in it, or, where it is root's and sticky, its owner and the daemon."""
    if not data_dir.exists():
        return works("data_dir_mode", "made with mode 0700 at the first start")
    status = data_dir.stat()
    seen = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"
    fix = f"chmod go-w {shlex.quote(str(data_dir))}"
    is_shared = stat.S_IMODE(status.st_mode) == SHARED_MODE and status.st_uid == 0
    if is_shared or not status.st_mode & 0o022:
        return works("data_dir_mode", seen)
    return fails("data_dir_mode", seen, fix=fix)


def check_descriptors(hard: int) -> Check:
    """A session takes about a dozen of the daemon's."""
    seen = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} per process"
    return judged("descriptors", hard == resource.RLIM_INFINITY or hard >= _MIN_DESCRIPTORS, seen)


def check_inotify(text: str) -> Check:
    """The kernel charges what is used in a user namespace to who made it as well: for all sessions that is root."""
    instances = int(text) if text.strip().isdigit() else 0
    return judged("inotify", instances >= _MIN_INOTIFY, f"{instances} instances for a user, all sessions together")


def check_core_pattern(text: str) -> Check:
    """With a handler the kernel would start it as root, outside; a limit of one byte keeps sandboxes from that."""
    pattern = text.strip()
    seen = "a handler" if pattern.startswith("|") else f"files ({pattern})"
    return works("core_pattern", f"{seen}; sandboxes dump none: their limit is one byte")


def check_clock(now_s: float, installed_s: float) -> Check:
    """It can't be earlier than this file was written."""
    seen = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return judged("clock", now_s >= installed_s - _DAY_S, seen)


def nearest(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


_PROBE = Path(nsinit_protocol.__file__).parents[1] / "tools" / "probe.py"
_PROBE_S = 120
"""Longer than every trial's own deadline together; a healthy machine takes a third of a second."""

_REFUSED = (errno.EPERM, errno.EACCES)


@attrs.frozen
class Probed:
    """What the probe answered."""

    checks: list[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


def examine(data_dir: Path, *, thorough: bool = False) -> Machine:
    """Return the examination of this machine for that data directory, which need not exist.

    A process tries once for each file system: what a kernel can do does not change while it runs. With `thorough`
    everything is tried afresh, and also what takes a moment or writes to the kernel's log.
    """
    host = read_host()
    directory = _place(data_dir)
    if thorough:
        tried = probe(directory, host, thorough=True)
    else:
        tried = _try_once(_Place(directory.stat().st_dev, directory, host))
    checks = [*read_all(data_dir, host), *tried.checks]
    order = list(CATALOGUE)
    checks.sort(key=lambda check: order.index(check.id))
    facts = {"container": host.container, "wsl": host.is_wsl, **tried.facts}
    return Machine(datetime.now(UTC), [*checks, *hardening.check_settings()], facts)


def _place(data_dir: Path) -> Path:
    """Return where trials may write: on the data directory's file system, or where an ordinary user may."""
    found = nearest(data_dir)
    is_ours = os.geteuid() == 0 or os.access(found, os.W_OK | os.X_OK)
    return found if is_ours else Path(tempfile.gettempdir())


@attrs.frozen
class _Place:
    """Directories on one file system are the same place."""

    device: int
    path: Path = attrs.field(eq=False)
    host: Host = attrs.field(eq=False)


class _Lacks(Exception):
    """Something does not work; not remembered, so that it can be mended and tried again."""

    def __init__(self, probed: Probed) -> None:
        super().__init__()
        self.probed = probed


def _try_once(place: _Place) -> Probed:
    try:
        return _tried(place)
    except _Lacks as lacks:
        return lacks.probed


@functools.lru_cache(maxsize=8)
def _tried(place: _Place) -> Probed:
    probed = probe(place.path, place.host)
    if any(check.verdict in (Verdict.MISSING, Verdict.NOT_TRIED) for check in probed.checks):
        raise _Lacks(probed)
    return probed


def probe(directory: Path, host: Host | None = None, *, thorough: bool = False) -> Probed:
    """Let nsinit's probe make its trials in a directory of its own below `directory`."""
    host = read_host() if host is None else host
    command = [sys.executable, "-I", "-S", "-B", str(_PROBE), str(directory), *(["thorough"] if thorough else [])]
    try:
        done = subprocess.run(command, capture_output=True, cwd="/", env={"LANG": "C.UTF-8"}, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probed([fails("probe", f"the probe did not answer: {error}")])
    try:
        answers = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Probed([fails("probe", f"nothing can be tried in {directory}: {reason}")])
    facts = {name: value for answer in answers.values() for name, value in answer["facts"].items()}
    return Probed([_judge(check_id, answer, host) for check_id, answer in answers.items()], facts)


def _judge(check_id: str, answer: Mapping[str, Any], host: Host) -> Check:  # JSON values
    verdict, seen, number = Verdict(answer["verdict"]), str(answer["seen"]), int(answer["errno"])
    if verdict is Verdict.WORKS:
        return works(check_id, seen)
    fix = advise(check_id, number, host, CATALOGUE[check_id].fix)
    if verdict is Verdict.MISSING and number in _REFUSED and host.euid != 0:
        return fails(
            check_id, f"not tried: takes root ({seen})", fix="run this as root (sudo)", verdict=Verdict.NOT_TRIED
        )
    return fails(check_id, seen, fix=fix, verdict=verdict)
