"""Attempts on other processes: PID 1, the neighbour's, the host's; tracing, signals, scheduling.

Runs inside a session; standard library only. Sources: ptrace(2), kill(2), pidfd_open(2), fcntl(2) F_SETOWN,
capabilities(7), core(5).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import struct

from sandkasten.security.probes.attempt import CANARY, Answers, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, buffer, call, calls, get

_GONE = ("EPERM", "ENOENT", "ESRCH", "EACCES")
_FILTERED = ("EPERM", "ENOSYS")
_PTRACE_TRACEME, _PTRACE_ATTACH, _PTRACE_SEIZE = 0, 16, 0x4206
_KILLING = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGUSR1, signal.SIGSEGV)


@attempt("processes.pid1", "find PID 1 in /proc, its environment, memory and program", "CVE-2019-5736", _GONE)
def find_pid_1(target: OutsideFacts) -> Answers:
    names = ("", "/environ", "/mem", "/exe", "/root", "/cwd", "/maps", "/fd", "/cmdline")
    return {f"/proc/1{name}": answer(_look, f"/proc/1{name}") for name in names}


def _look(path: str) -> None:
    if os.path.isdir(path):
        os.listdir(path)
    else:
        os.close(os.open(path, os.O_RDONLY))


@attempt("processes.strangers", "list processes of another user", "information leak", ("none",))
def list_strangers(target: OutsideFacts) -> Answers:
    """hidepid hides whom one may not trace."""
    owners = {pid: os.stat(f"/proc/{pid}").st_uid for pid in os.listdir("/proc") if pid.isdigit() and _exists(pid)}
    strangers = [pid for pid, uid in owners.items() if uid != os.getuid()]
    return {"processes": f"pids {', '.join(strangers)}" if strangers else "none"}


def _exists(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}/stat")


@attempt(
    "processes.neighbour",
    "find another session's secret in any command line or environment",
    "leak between sessions",
    ("none",),
    control="neighbour",
)
def find_secrets(target: OutsideFacts) -> Answers:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if CANARY.encode() in file.read():
                        found.append(f"{pid}/{name}")
            except OSError:
                continue
    return {"secrets": ", ".join(found) or "none"}


@attempt(
    "processes.host",
    "signal, trace and open a process of the host by its pid",
    "pid namespace escape",
    ("ESRCH", "ENOENT", "EPERM", "ENOSYS"),
    control="host",
)
def reach_host_process(target: OutsideFacts) -> Answers:
    pid = target.outside_pid
    return {
        "kill": answer(os.kill, pid, 0),
        "pidfd_open": call("pidfd_open", pid, 0),
        "/proc": answer(os.stat, f"/proc/{pid}/status"),
    }


@attempt(
    "processes.privileged-scheduling",
    "take real-time priority, a negative nice value, real-time disk priority",
    "starvation of the host",
    ("EPERM", "EACCES", "ENOSYS"),
    control="host",
)
def take_priority(target: OutsideFacts) -> Answers:
    ioprio_realtime = 1 << 13
    return {
        "SCHED_FIFO": answer(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)),
        "nice": answer(os.setpriority, os.PRIO_PROCESS, 0, -5),
        "ioprio_set": call("ioprio_set", 1, 0, ioprio_realtime),
    }


@attempt(
    "processes.steer-pid1", "change PID 1's priority, cpus, limits and memory placement", "tampering", _GONE + _FILTERED
)
def steer_pid_1(target: OutsideFacts) -> Answers:
    limits = struct.pack("QQ", 1, 1)
    return {
        "setpriority": answer(os.setpriority, os.PRIO_PROCESS, 1, 5),
        "sched_setaffinity": answer(os.sched_setaffinity, 1, {0}),
        "prlimit64": call("prlimit64", 1, resource.RLIMIT_NOFILE, limits, 0),
        "migrate_pages": call("migrate_pages", 1, 0, 0, 0),
        "move_pages": call("move_pages", 1, 1, buffer(8), buffer(8), buffer(8), 2),
    }


@attempt("processes.oom-shield", "escape the out-of-memory killer", "starvation of PID 1", ("EACCES", "EPERM"))
def shield_from_oom(target: OutsideFacts) -> Answers:
    return {"oom_score_adj -1000": answer(_write, "/proc/self/oom_score_adj", "-1000")}


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@attempt("processes.raise-limits", "raise hard limits", "exhaustion", ("unchanged",))
def raise_limits(target: OutsideFacts) -> Answers:
    return {name: _raise_limit(name) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE")}


def _raise_limit(name: str) -> str:
    kind = getattr(resource, name, 12)  # RLIMIT_MSGQUEUE has no name in older versions of the module
    before = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (before[0], 1 << 30))
    except (ValueError, OSError):
        pass
    return "unchanged" if resource.getrlimit(kind) == before else f"{resource.getrlimit(kind)[1]}"


@attempt(
    "processes.core-handler",
    "set the core limit to 0, with which a piped core_pattern runs its handler as root of the host",
    "CVE-2025-4598",
    ("still 1",),
    layer="seccomp",
)
def call_core_handler(target: OutsideFacts) -> Answers:
    """0 means no core file, and a pipe is none; 1 is the kernel's sign for no dump at all. The test is whether the
    limit changes: a filter may tell programs that want no dumps that they got their way.
    """
    nothing = struct.pack("QQ", 0, 0)
    calls(("prlimit64", 0, resource.RLIMIT_CORE, nothing, 0), ("setrlimit", resource.RLIMIT_CORE, nothing))
    return {"RLIMIT_CORE": "still 1" if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) else "changed"}


# Tracing ----------------------------------------------------------------------------------------------------------


@attempt("ptrace.pid1", "attach to and seize PID 1", "process injection", _GONE + _FILTERED)
def trace_pid_1(target: OutsideFacts) -> Answers:
    return {
        "PTRACE_ATTACH": call("ptrace", _PTRACE_ATTACH, 1, 0, 0),
        "PTRACE_SEIZE": call("ptrace", _PTRACE_SEIZE, 1, 0, 0),
    }


@attempt("ptrace.at-all", "be traced", "CVE-2019-13272", _FILTERED, layer="seccomp")
def be_traced(target: OutsideFacts) -> Answers:
    return {"PTRACE_TRACEME": call("ptrace", _PTRACE_TRACEME, 0, 0, 0)}


@attempt("ptrace.memory", "read, write and advise the memory of PID 1", "process_vm attacks", _GONE + _FILTERED)
def reach_memory(target: OutsideFacts) -> Answers:
    local = buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(local), 8)
    pidfd = _pidfd_of_init()
    return {
        "process_vm_readv": call("process_vm_readv", 1, vector, 1, vector, 1, 0),
        "process_vm_writev": call("process_vm_writev", 1, vector, 1, vector, 1, 0),
        "process_madvise": call("process_madvise", pidfd, vector, 1, 20, 0) if pidfd >= 0 else "EPERM",
    }


@attempt("ptrace.descriptor", "take descriptors out of PID 1", "pidfd_getfd theft", _GONE + _FILTERED)
def steal_descriptor(target: OutsideFacts) -> Answers:
    pidfd = _pidfd_of_init()
    if pidfd < 0:
        return {"pidfd_open": "EPERM"}
    return {f"fd {fd}": call("pidfd_getfd", pidfd, fd, 0) for fd in range(3, 9)}


@attempt("ptrace.kcmp", "compare kernel objects with PID 1's", "information leak", _GONE + _FILTERED)
def compare_objects(target: OutsideFacts) -> Answers:
    return calls(("kcmp", os.getpid(), 1, 2, 0, 0))


def _pidfd_of_init() -> int:
    try:
        return get("pidfd_open", 1, 0)
    except OSError:
        return -1


# Signals ----------------------------------------------------------------------------------------------------------


@attempt("signals.kill-pid1", "send PID 1 signals of every kind", "denial of service", _GONE, users=("sandbox",))
def kill_pid_1(target: OutsideFacts) -> Answers:
    return {each.name: answer(os.kill, 1, each) for each in _KILLING}


@attempt(
    "signals.other-ways",
    "signal PID 1 through a pidfd, its thread, a queued signal",
    "denial of service",
    _GONE + _FILTERED,
    users=("sandbox",),
)
def signal_other_ways(target: OutsideFacts) -> Answers:
    info, pidfd = buffer(128), _pidfd_of_init()
    return {
        "pidfd_send_signal": call("pidfd_send_signal", pidfd, signal.SIGKILL, 0, 0) if pidfd >= 0 else "EPERM",
        "tgkill": call("tgkill", 1, 1, signal.SIGKILL),
        "rt_sigqueueinfo": call("rt_sigqueueinfo", 1, signal.SIGKILL, info),
    }


@attempt("signals.owner", "have the kernel signal PID 1 when a pipe is written to", "signal forgery", ("PID 1 lives",))
def own_by_pid_1(target: OutsideFacts) -> Answers:
    """F_SETOWN takes any pid; the test is whether the signal is delivered. A dead PID 1 would answer nothing."""
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
        fcntl.fcntl(reader, 10, signal.SIGKILL)  # F_SETSIG
    except OSError:
        pass
    os.write(writer, b"x")
    return {"after F_SETOWN": "PID 1 lives"}


PROCESSES = collect(globals())
