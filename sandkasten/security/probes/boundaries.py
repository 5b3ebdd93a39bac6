"""Attempts on namespaces, capabilities, mounts and keyrings.

Runs inside a session; standard library only. A call that needs a privilege is made with arguments that do no harm where
the privilege is there. Sources: namespaces(7), user_namespaces(7), capabilities(7), mount(2), fsopen(2), keyrings(7).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import time

from sandkasten.security.probes.attempt import Answers, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, buffer, call, calls, get, number, opening, raw, reading

_NO_NAMESPACE = ("EPERM", "ENOSPC", "ENOSYS")
_NO_PRIVILEGE = ("EPERM", "ENOSYS")
_KINDS = {"mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
          "pid": 0x20000000, "net": 0x40000000}  # fmt: skip
_MS_REMOUNT, _MS_BIND, _MS_MOVE, _MS_PRIVATE = 32, 4096, 8192, 1 << 18
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702

_OF_ROOT_INSIDE = 0b1111_1011
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: powers over the session's own objects alone."""


@attempt("namespaces.unshare", "make a namespace of each kind", "CVE-2022-0185", _NO_NAMESPACE, control="host")
def unshare(target: OutsideFacts) -> Answers:
    """In a user namespace of its own a program has every capability over the others, and reaches the kernel's bugs
    there.
    """
    return {name: call("unshare", flag) for name, flag in _KINDS.items()}


@attempt(
    "namespaces.clone",
    "be born into a new user namespace, by clone and by clone3",
    "CVE-2023-32233",
    _NO_NAMESPACE,
    control="host",
)
def clone(target: OutsideFacts) -> Answers:
    arguments = struct.pack("<11Q", _KINDS["user"], 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)

    def born(name: str, *rest: object) -> str:
        try:
            pid = raw(number(name), *rest)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "ok"

    return {
        "clone": born("clone", _KINDS["user"] | signal.SIGCHLD, 0, 0, 0, 0),
        "clone3": born("clone3", arguments, len(arguments)),
    }


@attempt(
    "namespaces.enter",
    "enter a namespace by its file",
    "namespace escape",
    ("EPERM", "EINVAL", "ENOSYS", "ENOENT", "EACCES"),
    control="host",
)
def enter(target: OutsideFacts) -> Answers:
    """A process that is in that user namespace already gets EINVAL."""
    answers = {}
    for pid in ("self", "1"):
        for name in _KINDS:
            path = f"/proc/{pid}/ns/{name}"
            try:
                fd = os.open(path, os.O_RDONLY)
            except OSError as error:
                answers[f"{pid}/{name}"] = errno.errorcode[error.errno or 0]
                continue
            answers[f"{pid}/{name}"] = call("setns", fd, 0)
            os.close(fd)
    return answers


@attempt(
    "namespaces.owner",
    "reach the user namespace that owns the session's namespaces",
    "namespace escape",
    ("EPERM", "ENOTTY", "EACCES"),
)
def reach_owner(target: OutsideFacts) -> Answers:
    def ask(name: str, request: int) -> None:
        fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        try:
            os.close(fcntl.ioctl(fd, request))
        finally:
            os.close(fd)

    answers = {name: answer(ask, name, _NS_GET_USERNS) for name in _KINDS if name != "user"}
    answers |= {f"parent of {name}": answer(ask, name, _NS_GET_PARENT) for name in ("user", "pid")}
    return answers


@attempt("namespaces.name", "change the host name", "tampering", _NO_PRIVILEGE, control="host")
def rename_host(target: OutsideFacts) -> Answers:
    return calls(("sethostname", b"evil", 4), ("setdomainname", b"evil", 4))


@attempt("namespaces.clock", "set the machine's clock", "tampering", ("EPERM", "ENOSYS"))
def set_clock(target: OutsideFacts) -> Answers:
    """Set the clock to the present time and one of its estimates to its present value: success does no harm."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    estimate = struct.pack("I", 8) + bytes(204)
    return calls(
        ("settimeofday", struct.pack("qq", seconds, nanoseconds // 1000), 0),
        ("clock_settime", 0, struct.pack("qq", seconds, nanoseconds)),
        ("adjtimex", estimate),
    )


# Capabilities -----------------------------------------------------------------------------------------------------


@attempt(
    "capabilities.present",
    "have a capability that reaches beyond the session",
    "over-privileged root",
    ("none",),
    control="host",
)
def have_capabilities(target: OutsideFacts) -> Answers:
    allowed = _OF_ROOT_INSIDE if os.getuid() == 0 else 0
    with open("/proc/self/status") as file:
        found = {line.split(":")[0]: int(line.split()[1], 16) for line in file if line.startswith("Cap")}
    return {name: f"{value:x}" if value & ~allowed else "none" for name, value in found.items()}


@attempt(
    "capabilities.gain",
    "raise capabilities, the ambient set and the securebits",
    "privilege escalation",
    ("EPERM", "EINVAL", "ENOSYS"),
)
def gain_capabilities(target: OutsideFacts) -> Answers:
    header = struct.pack("<Ii", 0x20080522, 0)
    data = struct.pack("<6I", *[0xFFFFFFFF] * 6)
    sys_admin, ambient_raise = 21, 2
    return {
        "capset": call("capset", header, data),
        "ambient": call("prctl", 47, ambient_raise, sys_admin, 0, 0),
        "securebits": call("prctl", 28, 0, 0, 0, 0),
        "no_new_privs off": call("prctl", 38, 0, 0, 0, 0),
    }


@attempt(
    "capabilities.root",
    "become root by setuid(0)",
    "privilege escalation",
    ("EPERM", "EINVAL"),
    users=("sandbox",),
    control="host",
)
def become_root(target: OutsideFacts) -> Answers:
    return {
        "setresuid": answer(os.setresuid, 0, 0, 0),
        "setresgid": answer(os.setresgid, 0, 0, 0),
        "setgroups": answer(os.setgroups, [0]),
    }


@attempt(
    "capabilities.runner",
    "become the user of PID 1",
    "runner impersonation",
    ("EPERM", "EINVAL"),
    users=("sandbox",),
)
def become_runner(target: OutsideFacts) -> Answers:
    """The runner's uid could signal the runner, and open the files that only the runner may."""
    return {
        "setresuid": answer(os.setresuid, 65535, 65535, 65535),
        "setresgid": answer(os.setresgid, 65535, 65535, 65535),
    }


@attempt(
    "capabilities.as-runner",
    "become PID 1's user, and reach PID 1 as that user",
    "runner impersonation",
    ("EPERM", "EACCES", "ENOENT", "ESRCH", "ENOSYS"),
    users=("root",),
)
def reach_as_runner(target: OutsideFacts) -> Answers:
    """The uid is refused, and would not be enough: PID 1 is not dumpable, and its memory belongs to the initial user
    namespace."""
    os.setgroups([65535])
    os.setresgid(65535, 65535, 65535)
    became = calls(("setreuid", 65535, 65535), ("setuid", 65535), ("setresuid", 65535, 65535, 65535))
    local = buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(local), 8)
    answers = opening(
        [f"/proc/1/{name}" for name in ("mem", "environ", "maps", "exe", "fd/3", "root", "ns/mnt")], os.O_RDONLY
    )
    return (
        became
        | answers
        | {
            "ptrace": call("ptrace", 16, 1, 0, 0),
            "process_vm_readv": call("process_vm_readv", 1, vector, 1, vector, 1, 0),
            "setns": call("setns", get("pidfd_open", 1, 0), _KINDS["mnt"]),
            "pidfd_getfd": call("pidfd_getfd", get("pidfd_open", 1, 0), 3, 0),
        }
    )


# Mounts -----------------------------------------------------------------------------------------------------------


@attempt("mounts.mount", "mount, remount, bind, move and unmount", "mount escape", _NO_PRIVILEGE, control="host")
def mount(target: OutsideFacts) -> Answers:
    return {
        "tmpfs": call("mount", b"x", b"/tmp", b"tmpfs", 0, 0),
        "proc": call("mount", b"x", b"/tmp", b"proc", 0, 0),
        "overlay": call("mount", b"x", b"/tmp", b"overlay", 0, b"lowerdir=/etc:/usr"),
        "bind": call("mount", b"/", b"/tmp", 0, _MS_BIND, 0),
        "remount": call("mount", b"x", b"/", 0, _MS_REMOUNT | _MS_BIND, 0),
        "private": call("mount", b"x", b"/", 0, _MS_PRIVATE, 0),
    }


@attempt("mounts.uncover", "take away a mask or a read-only bind", "CVE-2025-31133", _NO_PRIVILEGE)
def uncover(target: OutsideFacts) -> Answers:
    places = ("/proc/kcore", "/proc/keys", "/proc/sys", "/proc", "/dev", "/run", "/workspace")
    return {place: call("umount2", place.encode(), 2) for place in places if os.path.exists(place)}


@attempt(
    "mounts.new-api",
    "open a file system, clone and change mounts by the new calls",
    "CVE-2022-0185",
    _NO_PRIVILEGE,
    control="host",
)
def mount_new_api(target: OutsideFacts) -> Answers:
    at_fdcwd, open_tree_clone, at_empty_path = -100, 1, 0x1000
    attributes = struct.pack("<4Q", 1, 0, 0, 0)
    return {
        "fsopen": call("fsopen", b"tmpfs", 0),
        "open_tree": call("open_tree", at_fdcwd, b"/", open_tree_clone),
        "fspick": call("fspick", at_fdcwd, b"/proc", 0),
        "mount_setattr": call("mount_setattr", at_fdcwd, b"/proc/self", at_empty_path, attributes, len(attributes)),
    }


@attempt("mounts.roots", "change the root directory", "chroot escape", _NO_PRIVILEGE, control="host")
def change_root(target: OutsideFacts) -> Answers:
    return {"pivot_root": call("pivot_root", b"/tmp", b"/tmp"), "chroot": call("chroot", b"/tmp")}


@attempt("mounts.propagation", "find a mount that events travel to or from", "mount propagation", ("none",))
def find_shared(target: OutsideFacts) -> Answers:
    with open("/proc/self/mountinfo") as file:
        found = [
            line.split()[4] for line in file if "shared:" in line.split(" - ")[0] or "master:" in line.split(" - ")[0]
        ]
    return {"shared mounts": ", ".join(found) or "none"}


@attempt(
    "mounts.overlay-attributes",
    "mark files for the overlay that is below",
    "CVE-2023-0386",
    ("EPERM", "EOPNOTSUPP", "ENOTSUP"),
    control="host",
)
def set_overlay_attributes(target: OutsideFacts) -> Answers:
    """Attributes of overlays could show files of another place, or merge removed ones back."""
    path = f"/tmp/overlay-{os.getpid()}"
    os.mkdir(path)
    try:
        return {
            name: answer(os.setxattr, path, f"trusted.overlay.{name}", b"/etc")
            for name in ("redirect", "opaque", "metacopy")
        }
    finally:
        os.rmdir(path)


@attempt("mounts.swap", "switch swap and accounting of the host", "tampering", ("EPERM", "ENOSYS"))
def switch_host_services(target: OutsideFacts) -> Answers:
    return calls(
        ("swapon", b"/tmp", 0),
        ("swapoff", b"/tmp"),
        ("acct", 0),
    )


# Keyrings ---------------------------------------------------------------------------------------------------------


@attempt(
    "keyrings.read", "list and read keys by way of /proc", "information leak", ("empty", "ENOENT", "EACCES", "EPERM")
)
def list_keys(target: OutsideFacts) -> Answers:
    return reading(("/proc/keys", "/proc/key-users"))


@attempt(
    "keyrings.calls", "use the kernel's key management at all", "CVE-2016-0728", ("EPERM", "ENOSYS"), layer="seccomp"
)
def use_keys(target: OutsideFacts) -> Answers:
    process_keyring, get_keyring_id = -2, 0
    return calls(
        ("add_key", b"user", b"sandkasten", b"x", 1, process_keyring),
        ("keyctl", get_keyring_id, process_keyring, 1, 0, 0),
        ("keyctl", 1, b"sandkasten", 0, 0, 0),
        ("request_key", b"user", b"sandkasten", 0, process_keyring),
    )


@attempt(
    "keyrings.neighbour",
    "find a key or an IPC object of another session",
    "leak between sessions",
    ("ENOENT", "EPERM", "ENOSYS", "ENOKEY"),
    control="neighbour",
)
def find_neighbour_ipc(target: OutsideFacts) -> Answers:
    return {
        "shared memory": answer(get, "shmget", target.ipc_key, 0, 0),
        "message queue": answer(get, "msgget", target.ipc_key, 0),
        "posix queue": answer(get, "mq_open", b"sk-canary-queue", os.O_RDONLY, 0, buffer(64)),
    }


BOUNDARIES = collect(globals())
