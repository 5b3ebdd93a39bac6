"""Program of the tests: confines itself, tries what it must not be able to do, and prints what came of each attempt."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable

from egress import confinement

_PR_GET_DUMPABLE, _PTRACE_ATTACH, _AF_VSOCK, _CLONE_NEWUSER, _IPPROTO_MPTCP = 3, 16, 40, 0x10000000, 262
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def _outcome(attempt: Callable[[], object]) -> object:
    try:
        result = attempt()
    except OSError as error:
        return f"errno {error.errno}"
    return result if isinstance(result, str | int | list) else "done"


def _thread() -> list[int]:
    started: list[int] = []
    one = threading.Thread(target=lambda: started.append(1))
    one.start()
    one.join()
    return started


def main(user_id: int, bpf_number: int, *, dials: bool = True) -> None:
    """Print a JSON object."""
    with open("/proc/self/status") as status:
        confinement.confine(user_id, user_id, dials=dials)
        lines = [line.rstrip("\n").partition(":\t") for line in status]
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    attempts: dict[str, Callable[[], object]] = {
        "users": lambda: [*os.getresuid(), *os.getresgid()],
        "groups": os.getgroups,
        "descriptors": lambda: int(descriptors[0] == descriptors[1]),
        "core": lambda: resource.getrlimit(resource.RLIMIT_CORE)[1],
        "dumpable": lambda: _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0),
        "fork": os.fork,
        "spawn": lambda: subprocess.run(["/bin/true"]),
        "execve": lambda: os.execv("/bin/true", ["true"]),
        "memfd": lambda: os.memfd_create("x"),
        "root": lambda: os.setresuid(0, 0, 0),
        "ptrace": lambda: _call("ptrace", _PTRACE_ATTACH, os.getppid(), 0, 0),
        "kill": lambda: os.kill(os.getppid(), 0),
        "unshare": lambda: _call("unshare", _CLONE_NEWUSER),
        "setns": lambda: _call("setns", 0, 0),
        "mount": lambda: _call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
        "bpf": lambda: _call("syscall", bpf_number, 0, 0, 0),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "ping": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
        "mptcp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, _IPPROTO_MPTCP),
        "sctp": lambda: socket.socket(socket.AF_INET6, socket.SOCK_SEQPACKET, 0),
        "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
        "vsock": lambda: socket.socket(_AF_VSOCK, socket.SOCK_STREAM),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "internet": socket.socket,
        "internet6": lambda: socket.socket(socket.AF_INET6),
        "thread": _thread,
        "lookup": lambda: str(socket.getaddrinfo(b"localhost", 1)[0][4][0]),
        "hosts": lambda: os.close(os.open("/etc/hosts", os.O_RDONLY)),
        "proc": lambda: os.open("/proc/self/status", os.O_RDONLY),
        "tmp": lambda: os.open("/tmp/confined", os.O_WRONLY | os.O_CREAT),
        "etc": lambda: os.open("/etc/confined", os.O_WRONLY | os.O_CREAT),
        "tree": lambda: os.listdir("/"),
        "home": lambda: os.listdir("/root"),
    }
    found = {name: _outcome(attempt) for name, attempt in attempts.items()}
    print(json.dumps({**found, "status": {key: value for key, _, value in lines}}))
