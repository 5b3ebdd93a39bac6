"""Names looked up outside, and the addresses that are this machine's own.

getaddrinfo(3), which honours hosts(5) and nsswitch.conf(5), has no deadline of its own, so it runs in threads: a
bounded number for all. What a session may have depends on how many the others leave, and on how its look-ups end; a
free one goes to the session that has the fewest. So sessions whose names are never answered leave threads for others:
16 of them a third of all, 64 new ones a fifth, and 100 of them a fifth when each has waited in vain once. Who asks
waits `DEADLINE_S`; the thread is counted until it really ends.

Sessions that ask for one name at a time share the look-up, unless it waits for another session's threads. Answers are
kept for a short while; what a session dials is pinned by `names.py` and checked by its caller.

The machine's own addresses come from rtnetlink(7): a dump at the start, and again when the kernel tells of a change.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

import attrs
import trio

from egress.policy import Address

DEADLINE_S = 5.0
KEPT_S = 60.0
KEPT_NOTHING_S = 5.0
"""A name that does not exist, or a resolver that fails, is asked for again after this time."""

MAX_THREADS = 128
MAX_THREADS_OF_SESSION = 8
_PART_OF_QUICK, _PART_OF_NEW = 16, 32
"""Parts that the threads which others leave are divided into; a session may have one part, but always one thread."""
_QUICK_S = 1.0

MAX_WAITING_OF_SESSION = 128
_MAX_KEPT = 10_000

Lookup = Callable[[str], Sequence[Address]]
"""Return the addresses of a canonical name, or raise NoSuchName or LookupFailed. Called in a thread; may block."""


class NoSuchName(Exception):
    """The name does not exist."""


class LookupFailed(Exception):
    """The resolver outside failed, or did not answer in time."""


def ask_machine(name: str) -> Sequence[Address]:
    """Look a name up as the machine's own programs do; LOCALDOMAIN="" in the environment keeps search domains off."""
    try:
        # Bytes, for a text goes through a codec that is imported late. AI_ADDRCONFIG is off: only a dial tells.
        found = socket.getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NODATA:
            return ()
        raise (NoSuchName if error.errno == socket.EAI_NONAME else LookupFailed)(name) from None
    texts = dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)
    return [ip_address(text) for text in texts]


@attrs.define(eq=False)
class LookupShare:
    """A session's share of the threads. `waiting`: its look-ups that have not ended; `running`: those with a thread;
    `queue`: the others, in order. `is_quick`: the one that ended last took less than `_QUICK_S`; None before any.
    `spend` accounts for the bytes of a name that goes outside, and may raise."""

    spend: Callable[[int], None] = attrs.field(default=lambda _size: None)
    waiting: int = 0
    running: int = 0
    queue: list[trio.Event] = attrs.field(factory=list)  # short, and a deque of every session has 0.6 KiB
    is_quick: bool | None = None

    def may_run(self, free: int) -> bool:
        """Whether the session may have one of these free threads."""
        left = 0 if self.is_quick is False else free + self.running
        part = left // (_PART_OF_QUICK if self.is_quick else _PART_OF_NEW)
        return self.running < max(1, min(MAX_THREADS_OF_SESSION, part))


@attrs.define(eq=False)
class _Asked:
    queued_by: LookupShare | None
    """The session whose threads the look-up waits for; None once it has one. Others do not wait for those."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    addresses: Sequence[Address] = ()
    error: type[NoSuchName | LookupFailed] | None = None
    until: float = 0.0


class NameResolver:
    """Looks names up, for all sessions. Look-ups run in `nursery`, for who asked first may go before the others."""

    def __init__(self, nursery: trio.Nursery, lookup: Lookup = ask_machine, kept_s: float = KEPT_S) -> None:
        self._nursery = nursery
        self._lookup = lookup
        self._kept_s = kept_s
        self._threads = trio.CapacityLimiter(MAX_THREADS)
        self._running = 0
        self._queues: dict[LookupShare, None] = {}
        """Shares with a queue, the one that began to wait first before others."""
        self._asked: dict[str, _Asked] = {}

    async def resolve(self, name: str, share: LookupShare) -> Sequence[Address]:
        """Return the addresses of a name, unchecked.

        Raises:
            NoSuchName: there is no such name.
            LookupFailed: nobody could say within `DEADLINE_S`, or too many look-ups of the session have not ended.
            Refusal: as `share.spend` says.
        """
        asked = self._asked.get(name)
        is_over = asked is not None and asked.ended.is_set() and asked.until <= trio.current_time()
        if asked is None or is_over or asked.queued_by not in (None, share):
            if share.waiting >= MAX_WAITING_OF_SESSION:
                raise LookupFailed("too many look-ups at once")
            share.spend(len(name))
            asked = self._asked[name] = _Asked(share)
            share.waiting += 1
            self._nursery.start_soon(self._ask, name, asked, share)
        if not asked.ended.is_set():  # what is kept is given without a checkpoint: a question is answered or not taken
            with trio.move_on_after(DEADLINE_S):
                await asked.ended.wait()
        if not asked.ended.is_set():
            raise LookupFailed("no answer in time")
        if asked.error is not None:
            raise asked.error(name)
        return asked.addresses

    async def _ask(self, name: str, asked: _Asked, share: LookupShare) -> None:
        try:
            async with self._thread(share):
                asked.queued_by = None
                asked.addresses = await trio.to_thread.run_sync(
                    self._lookup, name, limiter=self._threads, abandon_on_cancel=True
                )
        except (NoSuchName, LookupFailed) as error:
            asked.error = type(error)
        except Exception:  # noqa: BLE001 - whatever a name makes the C library's binding raise: no answer, no address
            asked.error = LookupFailed
        finally:
            share.waiting -= 1
        asked.until = trio.current_time() + (self._kept_s if asked.addresses else min(self._kept_s, KEPT_NOTHING_S))
        asked.ended.set()
        while len(self._asked) > _MAX_KEPT:
            oldest = next(iter(self._asked))
            kept = self._asked.pop(oldest)
            if not kept.ended.is_set():
                self._asked[oldest] = kept  # hangs: among the newest now
                break

    @asynccontextmanager
    async def _thread(self, share: LookupShare) -> AsyncIterator[None]:
        """Wait for a thread, and count it as the session's for the block."""
        granted = trio.Event()
        share.queue.append(granted)
        self._queues.setdefault(share)
        self._grant()
        await granted.wait()
        began = trio.current_time()
        try:
            yield
        finally:
            share.is_quick = trio.current_time() - began < _QUICK_S
            share.running -= 1
            self._running -= 1
            self._grant()

    def _grant(self) -> None:
        """Give threads that are free to those who wait."""
        while free := MAX_THREADS - self._running:
            able = [each for each in self._queues if each.may_run(free)]
            if not able:
                return
            share = min(able, key=lambda each: each.running)
            share.queue.pop(0).set()
            share.running += 1
            self._running += 1
            del self._queues[share]
            if share.queue:
                self._queues[share] = None


# Own addresses ------------------------------------------------------------------------------------------------------

_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR, _NLMSG_ERROR, _NLMSG_DONE = 20, 21, 22, 2, 3  # linux/rtnetlink.h, netlink.h
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_IFA_ADDRESS, _IFA_LOCAL = 1, 2  # linux/if_addr.h; on a link to one peer, IFA_ADDRESS is the peer's
_GROUPS = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_IFADDRMSG_BYTES = 8
_MAX_ANSWER_BYTES = 64 * 1024


def own_addresses() -> frozenset[Address]:
    """Return all addresses of this network namespace's interfaces.

    Raises:
        OSError: the kernel refuses, or the addresses changed in each of several attempts.
    """
    for _ in range(5):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
            request = _HEADER.pack(_HEADER.size + _IFADDRMSG_BYTES, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0)
            sock.send(request + bytes(_IFADDRMSG_BYTES))
            found = _read_dump(sock)
        if found is not None:
            return found
    raise OSError(errno.EINTR, "the machine's addresses change all the time")


def _read_dump(sock: socket.socket) -> frozenset[Address] | None:
    """Return the addresses of a dump; None if they changed meanwhile."""
    found: set[Address] = set()
    is_whole = True
    while True:
        for kind, flags, body in _messages(sock.recv(_MAX_ANSWER_BYTES)):
            is_whole &= not flags & _NLM_F_DUMP_INTR
            if kind == _NLMSG_ERROR:
                (code,) = struct.unpack_from("=i", body)
                raise OSError(-code, os.strerror(-code))
            if kind == _NLMSG_DONE:
                return frozenset(found) if is_whole else None
            if kind == _RTM_NEWADDR:
                found |= _addresses(body)


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    while len(data) >= _HEADER.size:
        size, kind, flags, _sequence, _port = _HEADER.unpack_from(data)
        yield kind, flags, data[_HEADER.size : size]
        data = data[(size + 3) & ~3 :]


def _addresses(body: bytes) -> set[Address]:
    family = body[0]
    found: dict[int, Address] = {}
    attributes = body[_IFADDRMSG_BYTES:]
    while len(attributes) >= 4:
        size, kind = struct.unpack_from("=HH", attributes)
        value = attributes[4:size]
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            found[kind] = IPv4Address(value) if family == socket.AF_INET else IPv6Address(value)
        attributes = attributes[max(4, (size + 3) & ~3) :]
    local = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
    return set() if local is None else {local}


async def watch_own_addresses(
    changed: Callable[[frozenset[Address]], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `changed` with the machine's own addresses: once, then the task has started; then after each change."""
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
    ) as sock:
        sock.bind((0, _GROUPS))  # before the dump: a change in between is told of
        is_started = False
        while True:
            changed(own_addresses())
            if not is_started:
                task_status.started()
                is_started = True
            await trio.lowlevel.wait_readable(sock)
            _empty(sock)


def _empty(sock: socket.socket) -> None:
    """Read all notices; which ones is of no interest, nor is that the kernel dropped some (ENOBUFS)."""
    while True:
        try:
            sock.recv(_MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
