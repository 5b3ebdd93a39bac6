"""Attempts through descriptors, and on places that only a leaked descriptor could reach.

Runs inside a session; standard library only. Sources: proc(5), open_by_handle_at(2), unix(7) SCM_CREDENTIALS.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

from sandkasten.security.probes.attempt import Answers, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, buffer, call, get, opening

_HARMLESS = ("/dev/null", "pipe:", "socket:")


@attempt(
    "descriptors.inherited", "find an open descriptor that was not meant for a command", "CVE-2024-21626", ("none",)
)
def find_inherited(target: OutsideFacts) -> Answers:
    """Descriptors 0, 1 and 2 are the command's streams; any other came by mistake, a directory of the host at worst."""
    wrong = [
        f"{fd} -> {name}"
        for fd, name in target.inherited.items()
        if (int(fd) > 2 and not name.startswith(f"/proc/{os.getppid()}/")) or not _is_harmless(name)
    ]
    return {"descriptors": ", ".join(wrong) or "none"}


def _is_harmless(name: str) -> bool:
    return name.startswith((*_HARMLESS, "/run/sandkasten/", "/proc/"))


@attempt(
    "descriptors.working-directory",
    "leave the root by way of the working directory",
    "CVE-2024-21626",
    ("the session's root",),
)
def leave_by_cwd(target: OutsideFacts) -> Answers:
    """A directory outside of the root has no end at `/`: going up from it leads elsewhere."""
    top = os.stat("/")
    up = "/proc/self/cwd" + "/.." * 40
    answers = {}
    for name, path in (("cwd", up), ("root", "/proc/self/root/../.."), ("dots", "/" + "../" * 40)):
        found = os.stat(path)
        same = (found.st_dev, found.st_ino) == (top.st_dev, top.st_ino)
        answers[name] = "the session's root" if same else f"inode {found.st_ino}"
    return answers


@attempt(
    "descriptors.of-others",
    "reach a directory through the descriptors of any visible process",
    "CVE-2024-21626",
    ("none",),
)
def find_directories(target: OutsideFacts) -> Answers:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
                if name.startswith("/") and not name.startswith(("/proc", "/dev/", "/run/sandkasten/")) and int(fd) > 2:
                    found.append(f"{pid}:{fd} -> {name}")
        except OSError:
            continue
    return {"directories": ", ".join(found) or "none"}


@attempt(
    "descriptors.file-handle",
    "open the host's root by a file handle",
    "shocker (open_by_handle_at)",
    ("EPERM", "ENOSYS"),
)
def open_by_handle(target: OutsideFacts) -> Answers:
    """The handle of inode 2, the root of most disks, as the well-known exploit makes it."""
    handle = buffer(16)
    handle.raw = struct.pack("IiQ", 8, 1, 2)
    mount_fd = os.open("/", os.O_RDONLY)
    return {"open_by_handle_at": call("open_by_handle_at", mount_fd, handle, os.O_RDONLY)}


@attempt(
    "descriptors.own-program",
    "overwrite the running program by /proc/self/exe",
    "CVE-2019-5736",
    ("EACCES", "ETXTBSY", "EROFS", "EPERM"),
)
def overwrite_program(target: OutsideFacts) -> Answers:
    return opening(["/proc/self/exe"])


@attempt(
    "descriptors.false-credentials",
    "claim on a socket to be PID 1 or root of the host",
    "forged SCM_CREDENTIALS",
    ("EPERM", "EINVAL"),
)
def claim_credentials(target: OutsideFacts) -> Answers:
    """Claim other credentials over a socket (unix(7), SCM_CREDENTIALS). Root of a sandbox may claim any id of the
    session; no socket of the runner can be reached with them."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def send(pid: int, uid: int) -> None:
        ids = struct.pack("iII", pid, uid, uid)
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, ids)])  # SCM_CREDENTIALS

    with left, right:
        answers = {"pid 1": answer(send, 1, os.getuid()), "uid that is none": answer(send, os.getpid(), 1 << 20)}
        if os.getuid():
            answers["uid of PID 1"] = answer(send, os.getpid(), 65535)
    return answers


@attempt(
    "descriptors.runner-connection", "connect to the runner's socket by any name", "runner impersonation", ("no name",)
)
def reach_runner(target: OutsideFacts) -> Answers:
    """The runner's socket was bound outside; inside it has neither a path nor an entry. Root may read its directory."""
    with open("/proc/net/unix") as file:
        bound = [line.split()[7] for line in file.readlines()[1:] if len(line.split()) > 7]
    names = [name for name in bound if "sock" in name or "sandkasten" in name]
    answers = {"/proc/net/unix": ", ".join(names) or "no name"}
    for path in ("/run/sandkasten/r.sock", "/run/r.sock"):
        with socket.socket(socket.AF_UNIX) as client:
            reason = client.connect_ex(path)
        answers[path] = "no name" if reason in (errno.ENOENT, errno.EACCES) else errno.errorcode.get(reason, "ok")
    answers["directory"] = _sockets_in("/run/sandkasten")
    return answers


def _sockets_in(path: str) -> str:
    try:
        names = os.listdir(path)
    except PermissionError:
        return "no name"
    if os.getuid():
        return f"{len(names)} entries may be listed"
    sockets = [name for name in names if stat.S_ISSOCK(os.lstat(f"{path}/{name}").st_mode)]
    return ", ".join(sockets) or "no name"


@attempt(
    "descriptors.pidfd-of-pid1",
    "enter the namespaces of PID 1 through a pidfd",
    "namespace theft",
    ("EPERM", "EACCES", "ENOSYS", "ESRCH"),
)
def enter_by_pidfd(target: OutsideFacts) -> Answers:
    everything = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
    try:
        pidfd = get("pidfd_open", 1, 0)
    except OSError as error:
        return {"pidfd_open": errno.errorcode[error.errno or 0]}
    return {"setns": call("setns", pidfd, everything)}


DESCRIPTORS = collect(globals())
