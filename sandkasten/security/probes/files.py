"""Attempts on /proc, /sys, devices and files that are not the session's.

Runs inside a session; standard library only. Sources: proc(5), sysfs(5), null(4), random(4), mknod(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess

from sandkasten.security.probes.attempt import CANARY, Answers, NotApplicable, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, opening, reading

_REFUSED = ("EPERM", "EACCES", "EROFS", "ENOENT", "ENOTDIR")
_CGROUPS = "/sys/fs/cgroup"
_PRIVATE = ("kcore", "kallsyms", "kmsg", "keys", "key-users", "timer_list", "sched_debug", "slabinfo", "vmallocinfo",
            "pagetypeinfo", "zoneinfo", "iomem", "ioports", "interrupts", "modules", "cmdline", "config.gz",
            "kpagecount", "kpageflags", "kpagecgroup", "latency_stats", "diskstats", "buddyinfo", "locks", "partitions",
            "schedstat", "softirqs", "pressure/cpu", "pressure/io", "pressure/memory")  # fmt: skip
_DEVICES = ("mem", "kmem", "port", "kmsg", "console", "tty0", "vcs", "sda", "vda", "nvme0n1", "loop0", "loop-control",
            "mapper/control", "fuse", "kvm", "net/tun", "vhost-net", "vhost-vsock", "uinput", "cpu/0/msr", "snapshot",
            "userfaultfd", "dri/card0", "btrfs-control", "hwrng", "rtc0", "hpet", "nvram", "ppp", "autofs", "cuse",
            "vfio/vfio", "watchdog", "ashmem", "binder")  # fmt: skip
_HARMLESS = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
"""Devices of a session: null, zero, full, random, urandom, tty, ptmx."""


@attempt(
    "proc.kernel-memory", "read what /proc tells about the kernel and the host", "CVE-2025-31133", ("empty", *_REFUSED)
)
def read_kernel(target: OutsideFacts) -> Answers:
    return reading(f"/proc/{name}" for name in _PRIVATE)


@attempt("proc.sysrq", "reboot the host by /proc/sysrq-trigger", "CVE-2025-52881", _REFUSED)
def trigger_sysrq(target: OutsideFacts) -> Answers:
    """Opens the files for writing only, and writes nothing."""
    return opening(["/proc/sysrq-trigger"])


@attempt("proc.handlers", "name a program for the host's kernel to run as root", "CVE-2025-52881", _REFUSED)
def set_handlers(target: OutsideFacts) -> Answers:
    names = ("core_pattern", "modprobe", "hotplug", "poweroff_cmd", "usermodehelper/bset")
    return opening([*(f"/proc/sys/kernel/{name}" for name in names), "/proc/sys/fs/binfmt_misc/register"])


@attempt("proc.settings", "write kernel settings", "tampering", _REFUSED)
def write_settings(target: OutsideFacts) -> Answers:
    names = ("kernel/hostname", "kernel/randomize_va_space", "kernel/yama/ptrace_scope", "vm/drop_caches",
             "vm/overcommit_memory", "net/ipv4/ip_forward", "net/core/somaxconn", "fs/file-max",
             "fs/protected_symlinks", "user/max_user_namespaces", "kernel/dmesg_restrict")  # fmt: skip
    return opening(f"/proc/sys/{name}" for name in names)


@attempt("proc.own-map", "map more ids into the own user namespace", "CVE-2018-18955", ("EPERM", "EACCES"))
def widen_map(target: OutsideFacts) -> Answers:
    def write(name: str) -> None:
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(fd, b"0 0 4294967295")
        finally:
            os.close(fd)

    return {name: answer(write, name) for name in ("uid_map", "gid_map")}


@attempt(
    "proc.mount-table", "learn the host's paths from the mount table", "information leak", ("no path of the host",)
)
def read_mount_table(target: OutsideFacts) -> Answers:
    with open("/proc/self/mountinfo") as file:
        table = file.read()
    found = [path for path in target.outside_paths if path in table]
    return {"mountinfo": ", ".join(found) or "no path of the host"}


@attempt(
    "proc.cgroup-path",
    "learn the place in the host's cgroup tree",
    "information leak",
    ("its own tree",),
    control="host",
)
def read_cgroup(target: OutsideFacts) -> Answers:
    """At most one level shows: the command's own run cgroup, below the session's root."""
    with open("/proc/self/cgroup") as file:
        paths = {line.split(":")[1] or "v2": line.strip().split(":")[2] for line in file}
    return {name: "its own tree" if path.count("/") == 1 and ".." not in path else path for name, path in paths.items()}


@attempt("proc.page-frames", "learn physical addresses", "Rowhammer", ("no frame number", "EPERM", "EACCES", "ENOENT"))
def read_page_frames(target: OutsideFacts) -> Answers:
    def read() -> int:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            entry: int = struct.unpack("Q", os.pread(fd, 8, (id(target) >> 12) * 8))[0]
        finally:
            os.close(fd)
        return entry & ((1 << 55) - 1)

    try:
        frame = read()
    except OSError as error:
        return {"pagemap": errno.errorcode[error.errno or 0]}
    return {"pagemap": f"frame {frame:#x}" if frame else "no frame number"}


# /sys -------------------------------------------------------------------------------------------------------------


@attempt("sys.visible", "look at the host's hardware and firmware", "information leak", ("of the session", "ENOENT"))
def look_at_sys(target: OutsideFacts) -> Answers:
    """The session's own cgroups and its list of processors are there, and else nothing."""
    try:
        found = {os.path.join(place, name) for place, places, names in os.walk("/sys") for name in (*places, *names)}
    except OSError as error:
        return {"/sys": errno.errorcode[error.errno or 0]}
    shown = ("/sys/devices/system/cpu/online", f"{_CGROUPS}/")
    strange = [path for path in sorted(found) if not path.startswith(shown)]
    strange = [path for path in strange if not any(each.startswith(f"{path}/") for each in shown)]
    return {"/sys": ", ".join(strange) or "of the session"}


@attempt("sys.helpers", "have the kernel run a helper, by uevent_helper or release_agent", "CVE-2022-0492", _REFUSED)
def set_helpers(target: OutsideFacts) -> Answers:
    names = ("/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent",
             "/sys/kernel/security/apparmor/.replace", "/sys/kernel/debug/sched/features", "/sys/kernel/tracing/trace",
             "/sys/firmware/efi/efivars", "/sys/module/overlay/parameters/metacopy", "/sys/power/state")  # fmt: skip
    return opening(names)


@attempt("sys.mounts", "reach the kernel's own file systems", "CVE-2022-0492", ("none",))
def find_kernel_mounts(target: OutsideFacts) -> Answers:
    with open("/proc/self/mountinfo") as file:
        mounts = [line for line in file if line.partition(" - ")[2].startswith(("sysfs", "debugfs", "tracefs"))]
    return {"mounts": "; ".join(mounts) or "none"}


@attempt("sys.cgroup-files", "change the own limits by a cgroup file system", "CVE-2022-0492", ("none",))
def write_cgroup_files(target: OutsideFacts) -> Answers:
    """No file can be opened for writing, and no directory made."""
    taken = []
    for place, _, names in os.walk(_CGROUPS):
        opened = opening(os.path.join(place, name) for name in names)
        taken += [path for path, found in opened.items() if found not in _REFUSED]
        if answer(os.mkdir, f"{place}/own") not in _REFUSED:
            taken.append(f"{place}/own")
    return {"files": ", ".join(taken) or "none"}


@attempt("sys.cgroup-tree", "see a neighbour's cgroup, or a process in it", "information leak", ("none",))
def look_at_cgroup_tree(target: OutsideFacts) -> Answers:
    """The processes listed are the session's own; a process of another pid namespace would be listed as 0."""
    strange = []
    for place, _, names in os.walk(_CGROUPS):
        if place.rpartition("/")[2].startswith("sandkasten"):
            strange.append(place)
        for name in {"cgroup.procs", "tasks"} & set(names):
            with open(os.path.join(place, name)) as file:
                strange += [f"{place}: {pid.strip()}" for pid in file if int(pid) == 0]
    return {"tree": ", ".join(strange) or "none"}


# Devices ----------------------------------------------------------------------------------------------------------


@attempt(
    "devices.make",
    "make nodes of disks and of memory",
    "container escape by mknod",
    ("EPERM", "EACCES", "ENOSYS"),
    control="host",
)
def make_devices(target: OutsideFacts) -> Answers:
    def make(kind: int, major: int, minor: int) -> None:
        path = f"/tmp/node-{os.getpid()}-{major}-{minor}"
        os.mknod(path, kind | 0o600, os.makedev(major, minor))
        os.unlink(path)

    return {
        "disk 8:0": answer(make, stat.S_IFBLK, 8, 0),
        "loop 7:0": answer(make, stat.S_IFBLK, 7, 0),
        "memory 1:1": answer(make, stat.S_IFCHR, 1, 1),
        "fuse 10:229": answer(make, stat.S_IFCHR, 10, 229),
    }


@attempt("devices.dangerous", "open the devices of the host", "device access", ("ENOENT", "ENXIO"))
def open_devices(target: OutsideFacts) -> Answers:
    return opening((f"/dev/{name}" for name in _DEVICES), os.O_RDONLY)


@attempt("devices.listed", "find any device node that is not harmless, anywhere", "device access", ("none",))
def find_devices(target: OutsideFacts) -> Answers:
    found = []
    for root in ("/dev", "/tmp", "/run", "/var", "/etc", "/workspace"):
        for directory, _, names in os.walk(root):
            for name in names:
                status = os.lstat(os.path.join(directory, name))
                numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
                is_terminal = numbers[0] in range(136, 144)
                if stat.S_ISBLK(status.st_mode) or (
                    stat.S_ISCHR(status.st_mode) and numbers not in _HARMLESS and not is_terminal
                ):
                    found.append(f"{directory}/{name}")
    return {"nodes": ", ".join(found) or "none"}


@attempt("devices.replace", "replace /dev/null or add to /dev", "CVE-2025-31133", _REFUSED)
def replace_null(target: OutsideFacts) -> Answers:
    return {
        "unlink": answer(os.unlink, "/dev/null"),
        "rename": answer(os.rename, "/dev/null", "/dev/old"),
        "create": opening(["/dev/new"], os.O_CREAT | os.O_WRONLY)["/dev/new"],
        "chmod": answer(os.chmod, "/dev/null", 0o777),
        "symlink": answer(os.symlink, "/proc/sysrq-trigger", "/dev/link"),
    }


@attempt("devices.entropy", "empty or forge the kernel's entropy pool", "tampering", ("EPERM", "ENOTTY", "EACCES"))
def forge_entropy(target: OutsideFacts) -> Answers:
    rndaddtoentcnt, rndclearpool = 0x40045201, 0x5206
    fd = os.open("/dev/random", os.O_RDONLY)
    return {
        "RNDADDTOENTCNT": answer(fcntl.ioctl, fd, rndaddtoentcnt, struct.pack("i", 8)),
        "RNDCLEARPOOL": answer(fcntl.ioctl, fd, rndclearpool, 0),
    }


# Files of others --------------------------------------------------------------------------------------------------


@attempt(
    "leaks.host-files",
    "open the host's files by their paths",
    "file system escape",
    ("ENOENT", "EACCES", "ENOTDIR"),
    control="host",
)
def open_host_files(target: OutsideFacts) -> Answers:
    return reading(target.outside_paths)


@attempt(
    "leaks.accounts",
    "read the host's password hashes and keys",
    "file system escape",
    ("ENOENT", "EACCES", "empty", "ENOTDIR", "no password opens an account"),
)
def read_accounts(target: OutsideFacts) -> Answers:
    """The image may have accounts of its own, which no password opens."""
    names = ("/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key", "/etc/machine-id",
             "/root/.ssh/id_rsa", "/root/.bash_history", "/var/lib/sandkasten/api-key", "/var/log/syslog")  # fmt: skip
    return reading(names) | {path: _read_hashes(path) for path in ("/etc/shadow", "/etc/gshadow")}


def _read_hashes(path: str) -> str:
    try:
        with open(path) as file:
            entries = [line.split(":") for line in file]
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    hashes = [name for name, hashed, *_ in entries if hashed.strip("!*")]
    return f"hashes of {', '.join(hashes)}" if hashes else "no password opens an account"


@attempt(
    "leaks.secrets",
    "find a secret of the daemon or a neighbour in files and the environment",
    "information leak",
    ("none",),
    control="neighbour",
)
def find_secrets(target: OutsideFacts) -> Answers:
    """The API key, a neighbour's variables and files, a file of the host: each holds the pattern."""
    found = [name for name, value in os.environ.items() if CANARY in value]
    for root in ("/etc", "/run", "/tmp", "/var", "/root", "/home", "/workspace", "/dev/shm"):
        for directory, _, names in os.walk(root):
            found += [path for path in (os.path.join(directory, name) for name in names) if _holds_secret(path)]
    return {"secrets": ", ".join(found) or "none"}


def _holds_secret(path: str) -> bool:
    if not os.path.isfile(path) or path.endswith("probes.zip"):
        return False
    try:
        with open(path, "rb") as file:
            return CANARY.encode() in file.read(1 << 16)
    except OSError:
        return False


# Setuid -----------------------------------------------------------------------------------------------------------


@attempt(
    "setuid.own-file",
    "become another user by a setuid program",
    "setuid escalation",
    ("same user",),
    users=("sandbox",),
)
def run_setuid(target: OutsideFacts) -> Answers:
    program, copy = shutil.which("id"), f"/tmp/id-{os.getpid()}"
    if program is None:
        raise NotApplicable("the image has no id program")
    shutil.copy(program, copy)
    os.chmod(copy, 0o6755)
    try:
        shown = subprocess.run([copy, "-u"], capture_output=True, text=True, check=False).stdout.strip()
    finally:
        os.unlink(copy)
    return {"euid": "same user" if shown == str(os.getuid()) else f"uid {shown}"}


@attempt("setuid.every-mount", "find a mount where setuid bits count", "CVE-2021-4034", ("nosuid",), control="host")
def find_suid_mounts(target: OutsideFacts) -> Answers:
    """PwnKit needs a setuid pkexec: on a nosuid mount, and without new privileges, it is an ordinary program."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split() for line in file]
    return {fields[1]: "nosuid" if "nosuid" in fields[3].split(",") else "suid counts" for fields in mounts}


@attempt("setuid.no-new-privileges", "gain privileges by exec", "setuid escalation", ("1",), control="host")
def read_no_new_privileges(target: OutsideFacts) -> Answers:
    with open("/proc/self/status") as file:
        found = [line.split()[1] for line in file if line.startswith("NoNewPrivs:")]
    return {"NoNewPrivs": found[0] if found else "the kernel has none"}


@attempt(
    "setuid.file-capabilities",
    "give a file capabilities",
    "CVE-2021-3493",
    ("EPERM", "EOPNOTSUPP", "ENOTSUP", "ENOSYS"),
    control="host",
)
def set_file_capabilities(target: OutsideFacts) -> Answers:
    """On an overlay, the bug let the write through to the host's file system."""
    path = f"/workspace/caps-{os.getpid()}" if os.path.isdir("/workspace") else f"/tmp/caps-{os.getpid()}"
    with open(path, "w"):
        pass
    every = struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
    try:
        return {"security.capability": answer(os.setxattr, path, "security.capability", every)}
    finally:
        os.unlink(path)


FILES = collect(globals())
