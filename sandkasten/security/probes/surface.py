"""Attempts on parts of the kernel that a session does not need: io_uring, bpf, userfaultfd, modules, old interfaces.

Runs inside a session; standard library only. Attempts that only a system call filter refuses say so (`layer`): the
kernel's own privilege checks let them through. Sources: seccomp(2), bpf(2), userfaultfd(2), io_uring_setup(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import pty
import signal
import struct
import termios

from sandkasten.security.probes.attempt import Answers, NotApplicable, OutsideFacts, attempt, collect
from sandkasten.security.probes.kernel import answer, buffer, call, calls, raw

_REFUSED = ("EPERM", "ENOSYS")


@attempt(
    "io_uring.setup", "set up an io_uring, whose operations no filter sees", "CVE-2022-29582", _REFUSED, layer="seccomp"
)
def set_up_io_uring(target: OutsideFacts) -> Answers:
    return calls(("io_uring_setup", 4, buffer(120)))


@attempt(
    "userfaultfd.open",
    "halt the kernel at a page of one's choice",
    "use-after-free exploitation aid",
    _REFUSED,
    layer="seccomp",
)
def open_userfaultfd(target: OutsideFacts) -> Answers:
    user_mode_only = 1
    return {"user mode": call("userfaultfd", user_mode_only), "kernel faults": call("userfaultfd", 0)}


@attempt("bpf.load", "load a program and make a map", "CVE-2021-3490", _REFUSED, control="host")
def load_bpf(target: OutsideFacts) -> Answers:
    map_create, prog_load, array, socket_filter = 0, 5, 2, 1
    code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    program = struct.pack("<IIQQ", socket_filter, 2, ctypes.addressof(code), ctypes.addressof(licence)) + bytes(48)
    table = struct.pack("<IIII", array, 4, 4, 1) + bytes(56)
    return {"map": call("bpf", map_create, table, 72), "program": call("bpf", prog_load, program, 72)}


@attempt(
    "kernel.perf", "measure with the performance counters", "CVE-2013-2094", (*_REFUSED, "EACCES"), layer="seccomp"
)
def open_perf(target: OutsideFacts) -> Answers:
    software, cpu_clock, exclude_kernel_and_hv = 1, 0, 1 << 5 | 1 << 6
    attributes = struct.pack("<IIQQQQQ", software, 112, cpu_clock, 0, 0, 0, exclude_kernel_and_hv) + bytes(64)
    return {
        "own process": call("perf_event_open", attributes, 0, -1, -1, 0),
        "machine": call("perf_event_open", attributes, -1, 0, -1, 0),
    }


@attempt("kernel.modules", "load and remove kernel modules", "kernel code execution", _REFUSED)
def load_modules(target: OutsideFacts) -> Answers:
    return calls(("init_module", buffer(4), 4, b""), ("finit_module", 0, b"", 0), ("delete_module", b"none", 0))


@attempt("kernel.boot", "reboot the machine, load another kernel", "denial of service", _REFUSED)
def reboot(target: OutsideFacts) -> Answers:
    """Uses numbers that name no action: a privileged caller is told EINVAL."""
    return calls(("reboot", 0, 0, 0, 0), ("kexec_load", 0, 0, 0, 1 << 30))


@attempt("kernel.ports", "reach hardware by I/O ports", "device access", _REFUSED)
def reach_ports(target: OutsideFacts) -> Answers:
    return calls(("iopl", 3), ("ioperm", 0x70, 2, 1))


@attempt("kernel.log", "read and clear the kernel's log", "information leak", _REFUSED)
def read_log(target: OutsideFacts) -> Answers:
    read_all, clear = 3, 5
    return {"read": call("syslog", read_all, buffer(4096), 4096), "clear": call("syslog", clear, 0, 0)}


@attempt(
    "kernel.personality",
    "switch off address randomisation, make all memory executable",
    "exploitation aid",
    _REFUSED,
    layer="seccomp",
)
def change_personality(target: OutsideFacts) -> Answers:
    return {"ADDR_NO_RANDOMIZE": call("personality", 0x0040000), "READ_IMPLIES_EXEC": call("personality", 0x0400000)}


@attempt("kernel.fanotify", "watch and block every open on the machine", "denial of service", _REFUSED, control="host")
def watch_opens(target: OutsideFacts) -> Answers:
    class_content, class_pre_content = 4, 8
    return {
        "content": call("fanotify_init", class_content, 0),
        "pre-content": call("fanotify_init", class_pre_content, 0),
    }


@attempt(
    "kernel.foreign-calls",
    "make 32-bit system calls from a 64-bit program",
    "filter bypass",
    ("SIGSYS", "SIGSEGV"),
    layer="seccomp",
)
def call_as_i386(target: OutsideFacts) -> Answers:
    """The numbers of the 32-bit table mean other calls, so a filter that ignores the architecture lets wrong ones
    through.
    """
    if platform.machine() != "x86_64":
        raise NotApplicable("int 0x80 is x86's")
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    pid = os.fork()
    if pid == 0:
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return {"int 0x80": signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "ok"}


@attempt("kernel.x32", "make system calls of the x32 kind", "filter bypass", _REFUSED)
def call_as_x32(target: OutsideFacts) -> Answers:
    if platform.machine() != "x86_64":
        raise NotApplicable("x32 is x86's")
    x32_bit, getpid, ptrace = 0x40000000, 39, 521
    return {
        "getpid": answer(raw, x32_bit | getpid),
        "ptrace": answer(raw, x32_bit | ptrace, 0, 0, 0, 0),
    }


@attempt("kernel.filter", "run without a system call filter", "kernel attack surface", ("2",), layer="seccomp")
def look_for_filter(target: OutsideFacts) -> Answers:
    with open("/proc/self/status") as file:
        found = [line.split()[1] for line in file if line.startswith("Seccomp:")]
    return {"Seccomp": found[0] if found else "the kernel has none"}


@attempt("kernel.dirty-pipe", "overwrite a file that is open for reading only", "CVE-2022-0847", ("unchanged",))
def write_by_pipe(target: OutsideFacts) -> Answers:
    """The flaw itself: a pipe whose pages keep the flag that lets the next write merge into them."""
    path = f"/tmp/pipe-{os.getpid()}"
    with open(path, "wb") as file:
        file.write(b"A" * 64)
    fd = os.open(path, os.O_RDONLY)
    reader, writer = os.pipe()
    size = 65536
    os.write(writer, bytes(size))
    os.read(reader, size)
    try:
        os.splice(fd, writer, 1, offset_src=0)
    except AttributeError:
        raise NotApplicable("this Python has no os.splice") from None
    os.write(writer, b"BBBB")
    content = os.pread(fd, 64, 0)
    os.unlink(path)
    return {"file": "unchanged" if content == b"A" * 64 else "overwritten"}


# Terminals --------------------------------------------------------------------------------------------------------

_TIOCSTI, _TIOCSETD, _TIOCLINUX, _TIOCCONS, _TIOCVHANGUP = 0x5412, 0x5423, 0x541C, 0x541D, 0x5437


@attempt(
    "ttys.inject", "type on the terminal for whoever reads it next", "CVE-2019-10063", ("EPERM", "EIO"), layer="seccomp"
)
def inject_input(target: OutsideFacts) -> Answers:
    """The second number differs in bits that the kernel ignores, and a careless filter does not."""
    controlling_fd = _own_terminal()
    return {
        "TIOCSTI": call("ioctl", controlling_fd, _TIOCSTI, b"x"),
        "TIOCSTI + 2^32": call("ioctl", controlling_fd, 1 << 32 | _TIOCSTI, b"x"),
    }


@attempt("ttys.paste", "paste with the console's selection", "CVE-2023-1523", ("EPERM", "ENOTTY"))
def paste(target: OutsideFacts) -> Answers:
    paste_selection = b"\x03" + bytes(16)
    return {"TIOCLINUX": call("ioctl", _own_terminal(), _TIOCLINUX, paste_selection)}


@attempt("ttys.line-discipline", "load a line discipline of the kernel", "CVE-2017-2636", ("EPERM",), layer="seccomp")
def change_discipline(target: OutsideFacts) -> Answers:
    """Line discipline 0 is the present one: only a filter refuses to set it. 13 and 21 had the bugs."""
    terminal = _own_terminal()
    return {
        f"N_{name}": call("ioctl", terminal, _TIOCSETD, struct.pack("i", line))
        for name, line in (("TTY", 0), ("HDLC", 13), ("GSM", 21))
    }


@attempt(
    "ttys.console", "take the machine's console output, hang a terminal up", "tampering", ("EPERM", "ENOTTY", "EIO")
)
def take_console(target: OutsideFacts) -> Answers:
    terminal = _own_terminal()
    return {"TIOCCONS": call("ioctl", terminal, _TIOCCONS, 0), "TIOCVHANGUP": call("ioctl", terminal, _TIOCVHANGUP, 0)}


@attempt("ttys.foreign", "open a terminal of somebody else", "terminal hijacking", ("none",))
def open_foreign(target: OutsideFacts) -> Answers:
    """Commands have no controlling terminal, and the session's terminals are its own."""
    found = [f"/dev/pts/{name}" for name in os.listdir("/dev/pts") if name.isdigit()]
    answers = {"/dev/pts": ", ".join(found) or "none"}
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        answers["/dev/tty"] = "opened"
    except OSError as error:
        answers["/dev/tty"] = "none" if error.errno in (errno.ENXIO, errno.EACCES) else str(error)
    return answers


def _own_terminal() -> int:
    """Open a new terminal, make it this session's controlling one, return its descriptor."""
    _, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    except OSError:
        pass
    return terminal


SURFACE = collect(globals())
