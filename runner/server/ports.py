"""TCP ports that processes of the sandbox listen on, and the requests that watch them.

The kernel has no event for a new listener that PID 1 could get, so PID 1 looks: often while a command runs and right
after, ever less often while a process from before lives on, and not at all without a watcher, or while nothing lives
but PID 1 and shells that wait. One look takes 0.4 ms of CPU (measured, with waking up): 0.8 % of one CPU at the most
frequent, for four seconds, and 0.02 % once nothing was begun for some minutes.

Listeners are asked for by sock_diag, for which the kernel walks the listening sockets alone (50 us). The session's
filter refuses sockets of that kind, so PID 1 has one from before the filter. Where the kernel has no such module, PID 1
reads `/proc/net/tcp`, for which the kernel walks all connections' buckets: 2 ms for the table of a machine with 262144
of them, if the session's network has none of its own (`nsinit.kernel.stage`). Parsing is pure.

Sources: sock_diag(7), netlink(7), include/uapi/linux/inet_diag.h, proc_net_tcp in proc_net(5).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator

from runner.loop.context import Context, Sink
from runner.loop.loop import Timer
from runner.process import process_set
from runner.wire.protocol import ANSWERS, Done, Kind, PortClosed, PortOpened, Started

MAX_LISTENERS = 256
"""Most listeners told of: those with the smallest ports, so that the choice is stable."""

Listener = tuple[int, str]
"""Port and address."""

_ADDRESS_BYTES: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}

_TCPDIAG_GETSOCK = 18
"""The older of two kinds of request: its answer has both address families, which takes half the time of two dumps."""
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TCP_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=Bxxx48xI4x")
"""Of inet_diag_req: family (any counts as both), states."""
_ANSWER = struct.Struct("=BBxx2s2x16s")
"""Of inet_diag_msg: family, state, source port, source address."""
_MAX_ANSWERS = 64
_ANSWER_BYTES = 32 * 1024

_TABLES: dict[int, str] = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_TABLE_BYTES = 256 * 1024
_PAGE_BYTES = 64 * 1024
_LINE = re.compile(rb" *[0-9]+: ((?:[0-9A-F]{8}){1,4}):([0-9A-F]{4}) [0-9A-F:]+ 0A ")


class NoAnswer(Exception):
    """The kernel answered with an error, or not as documented."""


def read_listeners(diag: socket.socket | None) -> frozenset[Listener]:
    """Return the listeners there are now. Never blocks. `diag`: a non-blocking socket of sock_diag, if there is one.

    Raises:
        OSError: the kernel has neither sock_diag nor its table.
    """
    try:
        found = set(_ask(diag)) if diag is not None else _read_tables()
    except (OSError, NoAnswer):
        found = _read_tables()
    return frozenset(sorted(found)[:MAX_LISTENERS])


def encode_request() -> bytes:
    """Return the request for every listening TCP socket."""
    body = _REQUEST.pack(socket.AF_INET, 1 << _TCP_LISTEN)
    return _HEADER.pack(_HEADER.size + len(body), _TCPDIAG_GETSOCK, _NLM_F_REQUEST_DUMP, 1, 0) + body


def parse_answer(data: bytes) -> tuple[list[Listener], bool]:
    """Return the listeners in one datagram, and whether it is the last one.

    Raises:
        NoAnswer
    """
    found: list[Listener] = []
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, offset)[:2]
        if length < _HEADER.size or offset + length > len(data) or kind == _NLMSG_ERROR:
            raise NoAnswer
        if kind == _NLMSG_DONE:
            return found, True
        if kind == _TCPDIAG_GETSOCK and length >= _HEADER.size + _ANSWER.size:
            found += _listener(data, offset + _HEADER.size)
        offset += (length + 3) & ~3
    if offset < len(data):
        raise NoAnswer
    return found, False


def parse_table(family: int, content: bytes) -> Iterator[Listener]:
    """Yield the listeners in the content of `/proc/net/tcp` or `tcp6`, whose words are in the machine's byte order."""
    for line in content.split(b"\n"):
        match = _LINE.match(line)
        if match is not None and len(match[1]) == 2 * _ADDRESS_BYTES[family]:
            words = (match[1][start : start + 8] for start in range(0, len(match[1]), 8))
            address = b"".join(struct.pack("=I", int(word, 16)) for word in words)
            yield int(match[2], 16), socket.inet_ntop(family, address)


def _listener(data: bytes, offset: int) -> list[Listener]:
    family, state, port, address = _ANSWER.unpack_from(data, offset)
    if family not in _ADDRESS_BYTES or state != _TCP_LISTEN:
        return []
    text = socket.inet_ntop(family, address[: _ADDRESS_BYTES[family]])
    return [(int.from_bytes(port, "big"), text)]


def _ask(diag: socket.socket) -> list[Listener]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MAX_ANSWERS):  # left of a request that failed: the kernel takes no other before its end
            diag.recv(_ANSWER_BYTES)
    diag.send(encode_request())
    found: list[Listener] = []
    for _ in range(_MAX_ANSWERS):
        more, is_last = parse_answer(diag.recv(_ANSWER_BYTES))
        found += more
        if is_last:
            break
    return found


def _read_tables() -> set[Listener]:
    return {each for family in _ADDRESS_BYTES for each in parse_table(family, read_table(family))}


def read_table(family: int) -> bytes:
    """Return the kernel's table, up to a bound; listeners come first. A read gives a page of it at most."""
    content = bytearray()
    fd = os.open(_TABLES[family], os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(content) < _TABLE_BYTES and (page := os.read(fd, _PAGE_BYTES)):
            content += page
    finally:
        os.close(fd)
    return bytes(content)


_SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_BUSY_SHARE = 1 / 80
_IDLE_SHARE = 1 / 8
_GREATEST_SHARE = 1 / 50
"""Of one CPU, where a look is dear."""


def pause_s(*, is_busy: bool, since_s: float) -> float:
    """Return the seconds until the next look: a share of the time since a command was last begun (`is_busy`: one still
    runs) or seen running."""
    return min(LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, since_s * (_BUSY_SHARE if is_busy else _IDLE_SHARE)))


class Watcher:
    """Job of one `Watch`. Remembers what the peer was told, so a peer that reads slowly gets the difference later, and
    no queue grows."""

    def __init__(self, sink: Sink, on_over: Callable[[Watcher], None]) -> None:
        self._sink = sink
        self._on_over = on_over
        self._told: frozenset[Listener] = frozenset()
        self._open: frozenset[Listener] = frozenset()

    def tell(self, listeners: frozenset[Listener]) -> None:
        """Tell the peer the changes, now or when the peer has room."""
        self._open = listeners
        if listeners == self._told or self._sink.is_full:
            return
        for port, address in sorted(self._told - listeners):
            self._sink.send(Kind.EVENT, ANSWERS.encode(PortClosed(port, address)))
        for port, address in sorted(listeners - self._told):
            self._sink.send(Kind.EVENT, ANSWERS.encode(PortOpened(port, address)))
        self._told = listeners

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_cancel(self) -> None:
        self._on_over(self)
        self._sink.finish(Done())

    def on_close(self) -> None:
        self._on_over(self)

    def on_drained(self) -> None:
        self.tell(self._open)

    @property
    def wants_input(self) -> bool:
        return True


class Ports:
    """Owns the watchers and the one timer."""

    def __init__(
        self, context: Context, *, shell_pids: Callable[[], frozenset[int]], diag: socket.socket | None
    ) -> None:
        self._context = context
        self._diag = diag
        self._shell_pids = shell_pids
        self._watchers: set[Watcher] = set()
        self._timer: Timer | None = None
        self._pause_s = 0.0
        self._begun_s = self._busy_s = time.monotonic()

    def watch(self, sink: Sink) -> Watcher:
        """Begin to tell a peer; the ports that are open now come first."""
        sink.start(Started(""))
        watcher = Watcher(sink, self._forget)
        self._watchers.add(watcher)
        self._look()
        return watcher

    def wake(self) -> None:
        """Look often again: a command begins."""
        self._begun_s = time.monotonic()
        if self._watchers and (self._timer is None or self._pause_s > _SHORTEST_PAUSE_S):
            self._set_timer(_SHORTEST_PAUSE_S)

    def _forget(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._cancel_timer()

    def _look(self) -> None:
        """Tell the watchers, and set the next look."""
        # Whether there will be one is decided before this look, so that the end of a process in between is seen.
        began_s, now_s = time.process_time(), time.monotonic()
        is_busy = not self._context.registry.is_empty
        if is_busy:
            self._busy_s = now_s
        may_change = is_busy or self._is_inhabited()
        wanted_s = pause_s(is_busy=is_busy, since_s=now_s - (self._begun_s if is_busy else self._busy_s))
        self._tell()
        if may_change:
            self._set_timer(max(wanted_s, (time.process_time() - began_s) / _GREATEST_SHARE))
        else:
            self._cancel_timer()

    def _tell(self) -> None:
        try:
            listeners = read_listeners(self._diag)
        except OSError:  # out of memory, say: the next look may succeed
            return
        for watcher in tuple(self._watchers):
            watcher.tell(listeners)

    def _is_inhabited(self) -> bool:
        """Return whether a process lives that could open or close a port."""
        known = self._shell_pids() | {os.getpid()}
        return any(each.pid not in known and not each.is_dead for each in process_set.scan().values())

    def _set_timer(self, delay_s: float) -> None:
        self._cancel_timer()
        self._pause_s = delay_s
        self._timer = self._context.loop.call_later(delay_s, self._look, lambda _error: self._set_timer(delay_s))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
