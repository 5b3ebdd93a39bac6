"""Attacks that make the kernel take memory for a session, object by object; the judge is the machine's free memory.

A session's own counters prove nothing here: memory that no cgroup is charged for is in none of them. An attempt fills
objects of one class until it is refused or killed, and counts what the machine gets back when the session ends. Each is
bounded: the session ends as soon as the machine misses four times its limit, and that alone is a verdict, as the kernel
may take long to give so much back. Other programs of the machine are heard in the same figures, so a bad one is tried
again.

The session's root has no capability that counts here, so the sandbox user alone makes the attempts.

Sources: socket(7), udp(7), netlink(7), unix(7), pipe(7), epoll(7), fcntl(2); Documentation/admin-guide/cgroup-v2.rst
"memory.stat"; proc_meminfo(5) MemAvailable.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from sandkasten.model import ExecSpec, OnDisconnect, Output
from sandkasten.security.attacks.field import SANDBOX, SMALL, Field
from sandkasten.security.probes.attempt import Answers, Attempt, attempt, collect

_LIMITS = attrs.evolve(SMALL, cpu=1.0)
_LIMIT_MIB = _LIMITS.memory_mb or 0
_MOST_MIB = _LIMIT_MIB * 3 // 2
_STOP_MIB = _LIMIT_MIB * 4
_FILL_S = 2.0
_FREE_S = 1.5
"""Time that the kernel takes to give memory back after the last process has ended."""
_STILL_S = 0.4
"""Time without a change of more than a MiB after which none is expected."""
_MOST_PATIENCE = 3
"""The kernel gives and frees memory no more slowly than so many times the usual, on an emulated processor either."""
_TRIES = 3
_HELD = "within the limit"
_LOCKS_PATH, _LOCK_BYTES = "/sys/kernel/slab/file_lock_cache/objects", 192

_FILL = """
import array, ctypes, fcntl, os, resource, select, socket, struct, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
keep = []
def internet(kind, protocol=0):
    made = socket.socket(socket.AF_INET, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.setblocking(False)
    keep.append(made)
    return made
def until_full(send, *arguments, most=2000):
    try:
        for _ in range(most):
            send(*arguments)
    except OSError:
        pass
def prepare():
    pass
{program}
refused, refusal = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        try:
            prepare()
            while True:
                one()
        except (OSError, MemoryError):
            os.close(refusal)
            time.sleep(60)
        os._exit(0)
os.close(refusal)
os.read(refused, 1)
print("full", flush=True)
time.sleep(60)
"""
"""Says that all is full when each of the eight processes has been refused something, or was killed."""


def _available_mib() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) // 1024


def _less_locks_mib() -> int:
    """Return what is available less what locks take, on an own scale: the kernel's count of locks, negative. Memory of
    hundreds of thousands of freed locks comes back too slowly to be seen."""
    try:
        with open(_LOCKS_PATH) as file:
            return -int(file.read().split()[0]) * _LOCK_BYTES // (1 << 20)
    except OSError:  # not root, or another allocator
        return _available_mib()


async def _held_mib(field: Field, program: str, available_mib: Callable[[], int]) -> tuple[int, str]:
    """Return how much memory a session that ran the program took from the machine, and the witness's answer."""
    argv = ("python3", "-I", "-S", "-c", _FILL.format(program=program))
    spec = ExecSpec(argv=argv, user=field.exec_user, timeout_ms=round(30_000 * field.patience))
    witness = ""
    async with field.session(_LIMITS) as session_id:
        before = held = available_mib()
        async with field.supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.CANCEL) as stream:

            async def fill(filled: trio.CancelScope) -> None:
                async for event in stream:
                    if isinstance(event, Output):
                        if event.data != b"full\n":
                            raise RuntimeError(event.data.decode(errors="replace"))
                        filled.cancel()

            with trio.move_on_after(_FILL_S * min(field.patience, _MOST_PATIENCE)) as filled:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fill, filled)
                    while before - held < _STOP_MIB:
                        await trio.sleep(0.01)
                        held = available_mib()
                    nursery.cancel_scope.cancel()
            taken = before - held
            if taken < _STOP_MIB:  # otherwise there is no time to ask
                witness = await field.ask_witness()
                held = available_mib()
    if taken >= _STOP_MIB:
        return taken, "not asked"
    return await _most_available_mib(field, available_mib) - held, witness


async def _most_available_mib(field: Field, available_mib: Callable[[], int]) -> int:
    """Return what the machine has when it gets nothing more back."""
    most, changed_at = available_mib(), trio.current_time()
    with trio.move_on_after(_FREE_S * field.patience):
        while trio.current_time() < changed_at + _STILL_S * min(field.patience, _MOST_PATIENCE):
            await trio.sleep(0.02)
            if (now := available_mib()) > most + 1:
                most, changed_at = now, trio.current_time()
    return most


def _attempt(
    name: str, what: str, program: str, *, layer: str = "", available_mib: Callable[[], int] = _available_mib
) -> Attempt:
    @attempt(f"memory.{name}", what, "memory limit bypass", (_HELD, "answers"), users=(SANDBOX,), layer=layer)
    async def fill(field: Field) -> Answers:
        held, witness = await _held_mib(field, program, available_mib)
        for _ in range(_TRIES - 1):
            if held > _MOST_MIB:
                held, witness = min((held, witness), await _held_mib(field, program, available_mib))
        return {"machine": _HELD if held <= _MOST_MIB else f"{held} MiB of {_LIMIT_MIB}", "witness": witness}

    return fill


icmp = _attempt(
    "icmp",
    "leave pings unread",
    """
def one():
    made = internet(socket.SOCK_DGRAM, 1)
    until_full(made.sendto, b"\\x08\\0\\0\\0\\0\\0\\0\\1" + bytes(40000), ("127.0.0.1", 0))
""",
)
udp_unread = _attempt(
    "udp-unread",
    "leave datagrams unread",
    """
def one():
    made = internet(socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.connect(made.getsockname())
    until_full(made.send, bytes(40000))
""",
)
udp_begun = _attempt(
    "udp-begun",
    "begin datagrams and never send them",
    """
def one():
    made = internet(socket.SOCK_DGRAM)
    made.connect(("127.0.0.1", 9))
    until_full(made.send, bytes(930), socket.MSG_MORE, most=70)
""",
    layer="seccomp",
)
udp_errors = _attempt(
    "udp-errors",
    "leave the errors of datagrams unread",
    """
def one():
    made = internet(socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IP, 11, 1)
    for _ in range(600):
        until_full(made.sendto, bytes(500), ("127.0.0.1", 9), most=1)
""",
)
netlink = _attempt(
    "netlink",
    "leave answers of netlink unread, each with the request in it",
    """
request = struct.pack("IHHII", 16 + 60000, 9999, 5, 1, 0) + bytes(60000)
def one():
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.setblocking(False)
    keep.append(made)
    until_full(made.send, request, most=100)
""",
    layer="seccomp",
)
tcp = _attempt(
    "tcp",
    "leave both ends of connections unread",
    """
def prepare():
    global listener
    listener = socket.create_server(("127.0.0.1", 0))
def one():
    made = internet(socket.SOCK_STREAM)
    made.setblocking(True)
    made.connect(listener.getsockname())
    keep.append(listener.accept()[0])
    for end in keep[-2:]:
        end.setblocking(False)
        until_full(end.send, bytes(65536))
""",
    layer="seccomp",
)
tcp_stamped = _attempt(
    "tcp-stamped",
    "ask for every packet's time stamp, and leave the packets that come back",
    """
stamped = [(socket.SOL_SOCKET, 37, struct.pack("I", 0x302))]
def prepare():
    global listener
    listener = socket.create_server(("127.0.0.1", 0))
def one():
    made = internet(socket.SOCK_STREAM)
    made.setblocking(True)
    made.connect(listener.getsockname())
    other = listener.accept()[0]
    keep.append(other)
    for _ in range(6):
        made.sendmsg([bytes(32000)], stamped)
        other.recv(65536)
""",
)
unix = _attempt(
    "unix",
    "leave local messages unread",
    """
def one():
    for made in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        made.setblocking(False)
        keep.append(made)
        until_full(made.send, bytes(60000))
""",
)
in_flight = _attempt(
    "in-flight",
    "leave descriptors in flight",
    """
def one():
    pair = socket.socketpair()
    keep.extend(pair)
    pair[0].setblocking(False)
    fds = [fd for _ in range(120) for fd in os.pipe()]
    until_full(pair[0].sendmsg, [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    for fd in fds:
        os.close(fd)
""",
)
pipes = _attempt(
    "pipes",
    "leave pipes unread",
    """
def one():
    writer = os.pipe()[1]
    os.set_blocking(writer, False)
    until_full(fcntl.fcntl, writer, fcntl.F_SETPIPE_SZ, 1 << 20, most=1)
    until_full(os.write, writer, bytes(65536))
""",
)
epoll = _attempt(
    "epoll",
    "watch many descriptors with many sets",
    """
def prepare():
    global watched
    watched = [os.pipe()[0] for _ in range(400)]
def one():
    made = select.epoll()
    keep.append(made)
    for fd in watched:
        made.register(fd)
""",
)
timers = _attempt(
    "timers",
    "make timers of both kinds",
    """
def one():
    if libc.timerfd_create(1, 0) < 0 and libc.timer_create(1, None, ctypes.byref(ctypes.c_int())) < 0:
        raise OSError
""",
)
page_tables = _attempt(
    "page-tables",
    "read one byte of every two MiB of a large mapping",
    """
def one():
    area = libc.mmap(None, ctypes.c_size_t(1 << 40), 1, 0x4022, -1, ctypes.c_long(0))
    if area in (None, 2**64 - 1):
        raise OSError
    for offset in range(0, 1 << 40, 1 << 21):
        ctypes.c_char.from_address(area + offset).value
""",
)
filters = _attempt(
    "socket-filters",
    "attach programs to sockets",
    """
code = struct.pack("HBBI", 0, 0, 0, 0) * 2400 + struct.pack("HBBI", 6, 0, 0, 65535)
kept = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", 2401, ctypes.addressof(kept))
def one():
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    keep.append(made)
    made.setsockopt(socket.SOL_SOCKET, 26, program)
""",
)
locks = _attempt(
    "locks",
    "lock every other byte of many files",
    """
places = [struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * each, 1, 0) for each in range(128)]
def one():
    fd = os.memfd_create("locked")
    for place in places:
        fcntl.fcntl(fd, fcntl.F_SETLK, place)
""",
    available_mib=_less_locks_mib,
)
locks_of_files = _attempt(
    "locks-of-files",
    "the same, with locks that belong to the open file and to no process",
    """
places = [struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * each, 1, 0) for each in range(128)]
def one():
    fd = os.memfd_create("locked")
    for place in places:
        fcntl.fcntl(fd, 37, place)
""",
    available_mib=_less_locks_mib,
    layer="seccomp",
)

MEMORY = collect(globals())
