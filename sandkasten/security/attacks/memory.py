"""Attacks that make the kernel take memory for a session, object by object; the judge is the machine's free memory.

A session's own counters prove nothing here: memory that no cgroup is charged for is in none of them. An attempt fills
objects of one class until it is refused or killed. Its figure is what the session is charged for, and what the machine
misses beyond that while the session lives. Each is bounded: the session ends as soon as the figure is surely above what
it may be, and that alone is a verdict.

The machine has other programs. What their cgroups are charged for is taken off, since the processes beside a session
may use more within a second than the session may at all. What is charged to nobody is heard, whoever made it: moments
do not count, and an attempt that seems to pass the limit is made three times, of which two must be over it. An attempt
begins when the machine gets nothing more back from the one before, and what seems to be above the limit is looked at
again, in a pause, when the machine gets nothing more back from it.

The session's root has no capability that counts here, so the sandbox user alone makes the attempts.

Sources: socket(7), udp(7), netlink(7), unix(7), pipe(7), epoll(7), fcntl(2), poll(2), acl(5), inotify(7), sysvipc(7);
Documentation/admin-guide/cgroup-v2.rst "memory.stat"; Documentation/admin-guide/cgroup-v1/memory.rst "stat file";
proc_meminfo(5), cgroups(7).
"""

from __future__ import annotations

import resource
from contextlib import suppress
from functools import cache
from glob import glob

import attrs
import trio

from sandkasten.actors.runs.run import RunReader
from sandkasten.errors import SessionExpired
from sandkasten.model import ExecSpec, OnDisconnect, Output
from sandkasten.security.attacks.field import SANDBOX, SMALL, Field
from sandkasten.security.probes.attempt import Answers, Attempt, attempt, collect

_LIMITS = attrs.evolve(SMALL, cpu=2.0)
"""Two processors: a busy neighbour on the only one would slow the attempt down, and hide what it takes."""
_LIMIT_MIB = _LIMITS.memory_mb or 0
_MOST_MIB, _LAYER_MOST_MIB = _LIMIT_MIB * 2, _LIMIT_MIB * 3 // 2
"""More is broken; the second is for attempts that one layer alone holds, which must show without it. On a loaded
machine what the kernel has yet to free is a third of the limit and more."""
_FILL_S, _LAYER_FILL_S = 2.0, 8.0
"""The second is for attempts that one layer alone holds: without the layer they must have the time."""
_FREE_S = 1.5
"""Time that the kernel takes to give memory back after the last process has ended."""
_MOMENT_S = 0.05
_HELD = "within the limit"
_MIB = 1 << 20

_FILL = """
import array, ctypes, fcntl, os, resource, select, signal, socket, struct, time
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
for kind in range(12):
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
"""Says that all is full when each of the processes has been refused something, or was killed."""


def _uncharged() -> int:
    """Return the MiB that the machine can't get back without ending a program, and that no cgroup is charged for.

    Root's cgroup is charged for nothing, so what its own processes use is among them.
    """
    with open("/proc/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    with open("/proc/zoneinfo") as file:  # free pages that a processor keeps; MemFree lacks up to hundreds of MiB
        kept = sum(int(line.split()[1]) for line in file if line.lstrip().startswith("count:"))
    used = kib["MemTotal"] - kib["MemFree"] - kib["Buffers"] - kib["Cached"] + kib["Shmem"]
    charged = 0
    for directory in glob(f"{_memory_hierarchy()}/*/"):
        with suppress(OSError):  # removed meanwhile
            charged += _charged(directory)
    return (used >> 10) - ((kept * resource.getpagesize() + charged) >> 20)


def _charged(directory: str) -> int:
    """Return the bytes that a cgroup and those below it are charged for, page cache apart.

    Caches that the kernel can give back, such as names of files, are in it, and in the sum that it is taken off.
    """
    with open(f"{directory}memory.stat") as file:
        of_v2 = {name: int(value) for name, value in map(str.split, file)}
    if "total_rss" not in of_v2:
        return of_v2.get("anon", 0) + of_v2.get("shmem", 0) + of_v2.get("kernel", 0) + of_v2.get("sock", 0)
    with open(f"{directory}memory.kmem.usage_in_bytes") as file:
        return of_v2["total_rss"] + of_v2["total_shmem"] + int(file.read())


@cache
def _memory_hierarchy() -> str:
    """Return where the hierarchy of the memory controller is mounted: v1's, or v2's."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split() for line in file]
    v1 = [point for _, point, kind, options, *_ in mounts if kind == "cgroup" and "memory" in options.split(",")]
    return next(iter([*v1, *(point for _, point, kind, *_ in mounts if kind == "cgroup2")]))


async def _missing() -> int:
    """Return the least that was uncharged within a twentieth of a second: no moment of another program counts."""
    seen = [_uncharged()]
    end = trio.current_time() + _MOMENT_S
    while trio.current_time() < end:
        await trio.sleep(0.01)
        seen.append(_uncharged())
    return min(seen)


async def _fill(field: Field, program: str, most_mib: int, fill_s: float) -> tuple[int, str]:
    """Return how many MiB a session that runs the program takes from the machine, and the witness's answer; more than
    `most_mib` is looked at again."""
    argv = ("python3", "-I", "-S", "-c", _FILL.format(program=program))
    spec = ExecSpec(argv=argv, user=field.exec_user, timeout_ms=round(30_000 * field.patience))
    async with field.session(_LIMITS) as session_id:
        before = await _missing()
        with trio.move_on_after(_FREE_S * field.patience):
            while (now := await _missing()) < before - 1:
                before = now
        most, has_begun, is_full = 0, False, False

        async def listen(stream: RunReader) -> None:
            nonlocal is_full
            with suppress(SessionExpired):
                async for event in stream:
                    if isinstance(event, Output) and event.data != b"full\n":
                        raise RuntimeError(event.data.decode(errors="replace"))
                    is_full = True
            is_full = True

        try:
            async with (
                field.supervisor.open_exec(session_id, spec, on_disconnect=OnDisconnect.CANCEL) as stream,
                trio.open_nursery() as nursery,
            ):
                has_begun = True
                nursery.start_soon(listen, stream)
                end = trio.current_time() + fill_s * field.patience
                while most <= most_mib:
                    charged_mib, was_killed = await _own(field, session_id)
                    is_last = is_full or was_killed or trio.current_time() > end
                    missing = await _missing()
                    if charged_mib + missing - before > most_mib:
                        missing = await _settled(field, session_id, missing)
                    most = max(most, charged_mib + missing - before)
                    if is_last:
                        break
                nursery.cancel_scope.cancel()
        except SessionExpired:  # PID 1 was killed, too
            if not has_begun:
                raise
        # Above it there is no time to ask.
        return most, "not asked" if most > most_mib else await field.ask_witness()


async def _settled(field: Field, session_id: str, missing: int) -> int:
    """Return what is missing once the kernel has freed what it frees by itself: what a program gave back stays for a
    grace period of RCU, a fifth of a second on a loaded machine. The session is paused meanwhile: it keeps what it has.
    """
    with suppress(SessionExpired):  # PID 1 was killed
        await field.supervisor.pause(session_id)
        with trio.move_on_after(_FREE_S * field.patience):
            while (now := await _missing()) < missing - 1:
                missing = now
        await field.supervisor.resume(session_id)
    return missing


async def _own(field: Field, session_id: str) -> tuple[int, bool]:
    """Return the MiB that the session is charged for, and whether it has as much as it gets: charged memory was at its
    limit once a process was killed."""
    try:
        stats = await field.supervisor.stats(session_id)
    except SessionExpired:  # PID 1 was
        return _LIMIT_MIB, True
    return _LIMIT_MIB if stats.memory_bytes is None else stats.memory_bytes >> 20, bool(stats.oom_kills)


def _attempt(name: str, what: str, program: str, *, layer: str = "") -> Attempt:
    @attempt(f"memory.{name}", what, "memory limit bypass", (_HELD, "answers"), users=(SANDBOX,), layer=layer)
    async def fill(field: Field) -> Answers:
        most_mib, fill_s = (_LAYER_MOST_MIB, _LAYER_FILL_S) if layer else (_MOST_MIB, _FILL_S)
        tries = [await _fill(field, program, most_mib, fill_s)]
        while tries[0][0] > most_mib and len(tries) < 3:
            tries.append(await _fill(field, program, most_mib, fill_s))
        held = sorted(mib for mib, _ in tries)[len(tries) // 2]  # whatever else starts counts: two of three decide
        witness = min(answer for _, answer in tries)
        return {"machine": _HELD if held <= most_mib else f"{held} MiB of {_LIMIT_MIB}", "witness": witness}

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
    pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
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
    "make timers, and leave signals undelivered",
    """
def prepare():
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
def one():
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_int())) < 0 and libc.sigqueue(os.getpid(), 40, None) < 0:
        raise OSError
""",
)
descriptors = _attempt(
    "descriptors",
    "open descriptors of timers, events, signals and Landlock's rules, each with an owner for signals",
    """
def one():
    made = (
        lambda: libc.timerfd_create(1, 0),
        lambda: libc.eventfd(0, 0),
        lambda: libc.signalfd(-1, bytes(128), 0),
        lambda: libc.syscall(444, struct.pack("QQQ", 1, 0, 0), 8, 0),
    )[kind % 4]()
    if made < 0:
        raise OSError
    fcntl.fcntl(made, fcntl.F_SETOWN, os.getpid())
""",
)
threads = _attempt(
    "threads",
    "start threads that wait for many descriptors",
    """
import _thread
def prepare():
    global asked, number
    time.sleep(0.1)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    keep.extend(pair)
    number = most
    asked = struct.pack("ihh", pair[0].fileno(), 0, 0) * most
    while number > 1 and libc.poll(asked, number, 0) < 0:
        number //= 2
def one():
    try:
        _thread.start_new_thread(libc.poll, (asked, number, -1))
    except RuntimeError:
        time.sleep(0.3)
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
    layer="seccomp",
)

mappings = _attempt(
    "mappings",
    "split a mapping into as many as there can be",
    """
def one():
    area = libc.mmap(None, ctypes.c_size_t(60000 << 13), 0, 0x4022, -1, ctypes.c_long(0))
    if area in (None, 2**64 - 1):
        raise OSError
    for start in range(area, area + (60000 << 13), 1 << 13):
        if libc.mprotect(ctypes.c_void_p(start), 4096, 1) < 0:
            raise OSError
""",
)
shared_memory = _attempt(
    "shared-memory",
    "fill /tmp, /dev/shm, files without a name and System V shared memory",
    """
libc.shmat.restype = ctypes.c_void_p
def prepare():
    global file
    file = os.memfd_create("") if kind % 4 == 0 else os.open(("/tmp", "/dev/shm")[kind % 2], os.O_TMPFILE | os.O_RDWR)
def one():
    if kind % 4 < 3:
        os.write(file, bytes(1 << 20))
        return
    area = libc.shmat(libc.shmget(0, 1 << 20, 0o1600), None, 0)
    if area in (None, 2**64 - 1):
        raise OSError
    ctypes.memset(area, 1, 1 << 20)
""",
)
messages = _attempt(
    "messages",
    "leave System V messages unread",
    """
def one():
    made = libc.msgget(0, 0o1600)
    if made < 0:
        raise OSError
    while libc.msgsnd(made, bytes([1] * 8) + bytes(8000), 8000, 0o4000) >= 0:
        pass
""",
)
semaphores = _attempt(
    "semaphores",
    "make System V semaphores, each to be undone",
    """
def one():
    made = libc.semget(0, 250, 0o1600)
    if made < 0 or libc.semop(made, struct.pack("HhH", 1, 1, 0x1000), 1) < 0:
        raise OSError
""",
)
posix_queues = _attempt(
    "posix-queues",
    "leave messages unread in POSIX queues",
    """
attributes = struct.pack("8l", 0, 10, 8192, 0, 0, 0, 0, 0)
count = 0
def one():
    global count
    count += 1
    made = libc.mq_open(b"/%d-%d" % (os.getpid(), count), os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600, attributes)
    if made < 0:
        raise OSError
    while libc.mq_send(made, bytes(8192), 8192, 0) >= 0:
        pass
""",
)
inotify_watches = _attempt(
    "inotify-watches",
    "watch many files with many inotify instances",
    """
def prepare():
    global names
    names = [b"/usr/bin/" + name for name in os.listdir(b"/usr/bin")[:1000]]
def one():
    made = libc.inotify_init1(0)
    if made < 0:
        raise OSError
    for name in names:
        if libc.inotify_add_watch(made, name, 0xFFF) < 0:
            raise OSError
""",
)
inotify_events = _attempt(
    "inotify-events",
    "leave inotify's events unread",
    """
count = 0
def prepare():
    os.mkdir(f"/tmp/{kind}")
    os.chdir(f"/tmp/{kind}")
    for _ in range(10):
        libc.inotify_add_watch(libc.inotify_init1(0), b".", 0x20)
def one():
    global count
    count += 1
    os.close(os.open("%0240d" % (count % 2), os.O_CREAT))
    if count > 16384:
        raise OSError
""",
)
files = _attempt(
    "files",
    "make empty files and attributes in /tmp, and look for files that there are not",
    """
count = 0
def prepare():
    os.makedirs(f"/tmp/{kind}")
    os.chdir(f"/tmp/{kind}" if kind % 3 else "/workspace")
def one():
    global count
    count += 1
    name = "%d-%0200d" % (kind, count)
    if kind % 3 == 0:
        os.access(name, 0)
    else:
        os.close(os.open(name, os.O_CREAT))
    for number in range(100 if kind % 3 == 1 else 0):
        os.setxattr(name, f"user.{number}", bytes(400))
    if count > 30000:
        raise OSError
""",
)
access_lists = _attempt(
    "access-lists",
    "give files in memory long access control lists",
    """
def prepare():
    global longest
    longest = 8180
    while longest > 1:
        try:
            return one()
        except OSError:
            longest //= 2
def one():
    tags = (1, *[2] * longest, 4, 16, 32)
    entries = (struct.pack("<HHI", tag, 7, 1000 if tag == 2 else 2**32 - 1) for tag in tags)
    value = struct.pack("<I", 2) + b"".join(entries)
    if kind % 2:
        os.setxattr(os.memfd_create(""), "system.posix_acl_access", value)
        return
    name = f"/tmp/{kind}-{time.monotonic_ns()}"
    os.mkdir(name)
    os.setxattr(name, "system.posix_acl_access", value)
    os.setxattr(name, "system.posix_acl_default", value)
""",
    layer="seccomp",
)
terminals = _attempt(
    "terminals",
    "open terminals, and leave their input and output unread",
    """
def one():
    made = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    libc.unlockpt(made)
    number, = struct.unpack("i", fcntl.ioctl(made, 0x80045430, bytes(4)))
    for end in made, os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY):
        os.set_blocking(end, False)
        until_full(os.write, end, b"x" * 4000 + b"\\n")
""",
)
refused = _attempt(
    "refused",
    "make keys, namespaces and mounts",
    """
add_key = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
def one():
    made = (
        libc.syscall(add_key, b"user", b"%d" % time.monotonic_ns(), bytes(16000), 16000, -2),
        libc.unshare(0x10000000),
        libc.unshare(0x40000000),
        libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
    )
    if max(made) < 0:
        raise OSError
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
    layer="seccomp",
)

MEMORY = collect(globals())
