"""The egress process as its daemon sees it: requests on a socket, answers, log entries, and the sessions' ways out.

Requests are served one after the other. Everything ends, with an error, when bytes arrive that are no request. A daemon
that does not read stops nothing that is carried: log entries are dropped, and counted. Entries of a session come before
the answer to `SetPolicy` and `DetachSession` that they belong to, and a refusal before the session can know of it,
unless the session has many.

When a daemon's socket ends, sessions are served on as it said last, and log entries are kept for the next daemon, as
many as the queue holds. Without a session there is nothing to wait for; no daemon for `ORPHAN_S` seconds ends it all.

Sources: unix(7) (SOCK_SEQPACKET, SCM_RIGHTS), recvmsg(2).
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import struct
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import TypeVar

import attrs
import trio

from egress import protocol as p
from egress import relay
from egress.addresses import AddressCheck
from egress.handed import HandOverLink
from egress.policy import Address, EgressRule, InvalidRule, Policy, parse_policy, parse_rule
from egress.resolver import KEPT_S, Lookup, NameResolver, ask_machine, watch_own_addresses
from egress.state import HostSecret, SharedState, WayOutState
from egress.way_out import WayOut

M = TypeVar("M")

_FD_BYTES = array.array("i").itemsize
_ANSWER_S = 30.0
"""The longest time that the daemon may take to read an answer it has asked for."""

ORPHAN_S = 900.0
"""The longest time that sessions are served without a daemon."""

_BACKLOG = 4
_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred`: pid, user, group."""

_ENTRIES_S = 5.0
_BATCH_S = 0.1
MAX_QUEUED_ENTRIES = 8192

_MAX_LOG_TEXT = 300
"""Characters of one field; JSON makes up to 12 bytes of each, and a pipe takes 4096 bytes in one piece (PIPE_BUF)."""


def log(level: str, event: str, session_id: str | None = None, **fields: object) -> None:
    """Write a log line, one JSON object on descriptor 2, as nsinit does; never wait: without room it is dropped.

    `fields` must be JSON values, and hold nothing that a session or a server has sent.
    """
    record = {"level": level, "event": event, "session_id": session_id, **fields}
    clipped = {key: each[:_MAX_LOG_TEXT] if isinstance(each, str) else each for key, each in record.items()}
    line = json.dumps({key: each for key, each in clipped.items() if each is not None}).encode() + b"\n"
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    if any(events & select.POLLOUT for _, events in poller.poll(0)):
        try:
            os.write(2, line)
        except OSError:
            pass  # the reader is gone; there is nobody to tell


def log_fault(session_id: str | None, error: BaseException) -> None:
    """Log where an error of our own came from; its text may hold foreign bytes, so only an OSError's number is told."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = [f"{os.path.basename(each.filename)}:{each.lineno}" for each in frames]
    number = error.errno if isinstance(error, OSError) else None
    log("error", "fault", session_id, kind=type(error).__name__, errno=number, places=places)


class _RequestFailed(Exception):
    def __init__(self, code: p.FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@attrs.define(eq=False)
class _Configuration:
    """The first `Configure`, and what follows of it."""

    said: p.Configure
    always_deny: tuple[EgressRule, ...]
    machine: SharedState

    def is_as(self, other: p.Configure) -> bool:
        return attrs.evolve(other, seq=self.said.seq) == self.said

    def policy(self, text: p.PolicyText) -> Policy:
        """Return a session's policy; the operator's rules that deny come before the session's."""
        try:
            policy = parse_policy(text.mode, text.allow, text.deny)
        except InvalidRule as error:
            raise _RequestFailed("INVALID", str(error)) from None
        return attrs.evolve(policy, deny=(*self.always_deny, *policy.deny))


class EgressServer:
    """The server of one daemon after the other. `lookup` finds the addresses of names; tests bring their own."""

    def __init__(self, nursery: trio.Nursery, lookup: Lookup, kept_s: float) -> None:
        self._channel: socket.socket | None = None
        """The socket to the present daemon."""
        self._is_connected = trio.Event()
        self._is_as_asked: bool | None = None
        """Whether the process works as the present daemon has configured it; None before it has."""
        self._untaken: list[str] = []
        """Sessions that the present daemon has not taken yet."""
        self._nursery = nursery
        self._sending = trio.Lock()
        self._resolver = NameResolver(nursery, lookup, kept_s)
        self._own: set[Address] = set()
        self._configuration: _Configuration | None = None
        self._ways_out: dict[str, WayOut] = {}
        self._entries: deque[p.EgressEntry] = deque()
        self._dropped = 0
        self._has_news = trio.Event()
        self._totals = p.EgressTotals()
        self._are_totals_news = False
        self._batching = trio.Lock()

    def set_own_addresses(self, addresses: frozenset[Address]) -> None:
        """Refuse these from now on; `AddressCheck` reads the set at each check."""
        self._own.clear()
        self._own.update(addresses)

    # Requests

    @property
    def sessions(self) -> int:
        """The number of attached sessions."""
        return len(self._ways_out)

    async def serve_daemon(self, channel: socket.socket) -> bool:
        """Serve a daemon until its end of the socket is closed, or it ends the process; tell whether it did not.

        Raises:
            ProtocolError: what arrived is no request, or nobody reads the answers.
        """
        channel.setblocking(False)
        self._channel, self._is_as_asked, self._untaken = channel, None, list(self._ways_out)
        if not self._untaken:  # else when the daemon knows of all sessions, and so whom entries are about
            self._is_connected.set()
        try:
            return await self._serve_requests(channel)
        finally:
            self._channel, self._is_connected = None, trio.Event()
            trio.lowlevel.notify_closing(channel)
            channel.close()

    async def _serve_requests(self, channel: socket.socket) -> bool:
        while True:
            try:
                request, fds = await next_message(channel, p.decode_request, max_fds=p.MAX_FDS)
            except EOFError:
                return True
            answer, to_send = await self._answer(request, fds)
            if not await self._send(p.encode(answer), _ANSWER_S, to_send):
                raise p.ProtocolError("the daemon does not read its answers")
            self._send_now()
            if isinstance(request, p.EndProcess):
                return False

    async def _answer(self, request: p.EgressRequest, fds: list[int]) -> tuple[p.EgressAnswer, Sequence[int]]:
        """Serve a request; return the answer, and descriptors of ours to send. Descriptors that were not taken over are
        closed."""
        try:
            if isinstance(request, p.Configure):
                return self._configure(request, fds), ()
            if self._configuration is None or self._is_as_asked is None:
                raise _RequestFailed("NOT_CONFIGURED", "the first request is Configure")
            if isinstance(request, p.TakeSession):
                return self._take(request)
            if isinstance(request, p.EndProcess):
                return p.Accomplished(request.seq), ()
            if not self._is_as_asked:
                raise _RequestFailed("CONFIGURED", "another daemon has configured the process in another way")
            if isinstance(request, p.UseBroker):
                self._use_broker(self._configuration.machine, fds)
                return p.Accomplished(request.seq), ()
            return await self._serve(request, self._configuration, fds), ()
        except _RequestFailed as failure:
            return p.EgressFailed(request.seq, failure.code, str(failure)), ()
        finally:
            close_all(fds)

    def _configure(self, request: p.Configure, fds: Sequence[int]) -> p.Configured:
        if self._is_as_asked is not None:
            raise _RequestFailed("CONFIGURED", "Configure comes once")
        if self._configuration is None:
            self._configuration = self._read(request)
        self._is_as_asked = self._configuration.is_as(request)
        for fd in fds[:1]:
            os.dup2(fd, 2)
        return p.Configured(request.seq, self._is_as_asked, self._totals)

    def _read(self, request: p.Configure) -> _Configuration:
        try:
            permit = [ip_network(text) for text in request.permit]
            always_deny = tuple(parse_rule(text) for text in request.always_deny)
            if request.upstream is not None:
                ip_address(request.upstream.address)
        except ValueError as error:
            raise _RequestFailed("INVALID", str(error)) from None
        check = AddressCheck(permit, self._own)
        machine = SharedState(self._resolver, check, self._report, log_fault, self._note_change, self._totals)
        machine.upstream = request.upstream
        return _Configuration(request, always_deny, machine)

    def _take(self, request: p.TakeSession) -> tuple[p.SessionTaken, Sequence[int]]:
        while self._untaken:
            session_id = self._untaken.pop()
            if (way_out := self._ways_out.get(session_id)) is not None:
                return p.SessionTaken(request.seq, session_id), way_out.fds()
        self._is_connected.set()
        return p.SessionTaken(request.seq), ()

    async def _serve(self, request: p.SessionRequest, configuration: _Configuration, fds: list[int]) -> p.EgressAnswer:
        if isinstance(request, p.AttachSession):
            self._attach(request, configuration, fds)
            return p.Accomplished(request.seq)
        way_out = self._ways_out.get(request.session_id)
        if way_out is None:
            raise _RequestFailed("SESSION_UNKNOWN", f"there is no session {request.session_id}")
        match request:
            case p.DescribeSession():
                return p.Described(request.seq, way_out.state.counters)
            case p.SetPolicy(policy=text, limits=limits, secrets=uses):
                await way_out.set_policy(configuration.policy(text), limits, _host_secrets(uses))
            case p.DetachSession():
                del self._ways_out[request.session_id]
                await way_out.detach()
        await self._send_entries()
        return p.Accomplished(request.seq)

    def _attach(self, request: p.AttachSession, configuration: _Configuration, fds: list[int]) -> None:
        if request.session_id in self._ways_out:
            raise _RequestFailed("SESSION_EXISTS", f"session {request.session_id} is attached")
        if not configuration.machine.has_place():
            raise _RequestFailed("DESCRIPTORS", "no descriptor is free for one more session: raise RLIMIT_NOFILE")
        state = WayOutState(
            request.session_id,
            configuration.policy(request.policy),
            request.limits,
            configuration.machine,
            secrets=_host_secrets(request.secrets),
        )
        way_out = self._ways_out[request.session_id] = _take_over(state, fds)
        self._nursery.start_soon(way_out.serve)

    def _use_broker(self, machine: SharedState, fds: list[int]) -> None:
        """Hand connections over the socket from now on, instead of the one before."""
        if len(fds) != 1:
            raise _RequestFailed("DESCRIPTORS", "expected a socket to the broker")
        if machine.broker is not None:
            machine.broker.close()
        machine.broker = HandOverLink(socket.socket(fileno=fds.pop()))
        self._nursery.start_soon(machine.broker.serve)

    # Log entries

    def _note_change(self) -> None:
        self._are_totals_news = True
        self._has_news.set()

    def _report(self, entry: p.EgressEntry) -> None:
        if entry.kind != "dns":
            self._totals.allowed += entry.verdict == "allowed"
            self._totals.denied += entry.verdict == "denied"
        if len(self._entries) < MAX_QUEUED_ENTRIES:
            self._entries.append(entry)
            self._has_news.set()
        else:
            self._dropped += 1
        way_out = self._ways_out.get(entry.session_id)
        if entry.verdict != "allowed" and way_out and not way_out.state.prompt.take(trio.current_time()):
            self._send_now()

    def _send_now(self) -> None:
        """Send what there is without waiting; what finds no room stays for the next batch. Who sends anything else
        calls this afterwards, for it does nothing meanwhile."""
        channel = self._channel if self._is_connected.is_set() else None
        while channel and self._entries and not self._batching.locked() and not self._sending.locked():
            batch, told, data = self._next_batch()
            try:
                channel.send(data)
            except OSError:  # no room, or nobody is there: the next read says so
                self._entries.extendleft(reversed(batch))
                self._are_totals_news = True
                return
            self._dropped -= told

    async def batch_entries(self) -> None:
        """Send log entries and totals, those of `_BATCH_S` together."""
        while True:
            await self._is_connected.wait()
            await self._has_news.wait()
            if len(self._entries) < p.MAX_ENTRIES:
                await trio.sleep(_BATCH_S)
            await self._send_entries()

    async def _send_entries(self) -> None:
        """Send what there is now; what the daemon does not read in time is dropped."""
        async with self._batching:
            left, are_totals_due = len(self._entries), self._are_totals_news
            while self._is_connected.is_set() and (are_totals_due or (left > 0 and self._entries)):
                are_totals_due = False
                batch, told, data = self._next_batch()
                left -= len(batch)
                if await self._send(data, _ENTRIES_S):
                    self._dropped -= told
                    continue
                self._dropped += len(batch) + len(self._entries)
                self._entries.clear()
            if not self._entries and not self._are_totals_news and self._has_news.is_set():  # else one is waited for
                self._has_news = trio.Event()
        self._send_now()

    def _next_batch(self) -> tuple[Sequence[p.EgressEntry], int, bytes]:
        """Take as many entries as fit into one datagram, and return the number of dropped ones that it tells of."""
        size = min(len(self._entries), p.MAX_ENTRIES)
        while True:
            batch = tuple(self._entries[index] for index in range(size))
            try:
                data = p.encode(p.Entries(self._dropped, batch, self._totals))
            except p.ProtocolError:
                size //= 2
                continue
            for _ in batch:
                self._entries.popleft()
            self._are_totals_news = False
            return batch, self._dropped, data

    async def _send(self, data: bytes, deadline_s: float, fds: Sequence[int] = ()) -> bool:
        """Send a datagram; tell whether it is under way."""
        channel = self._channel
        with trio.move_on_after(deadline_s):
            async with self._sending:
                if channel is not None:
                    with suppress(OSError):  # nobody is there: the next read says so, or has said so
                        await relay.send_message(channel, data, fds)
                return True
        return False


def _host_secrets(uses: tuple[p.SecretUse, ...]) -> tuple[HostSecret, ...]:
    try:
        return tuple(map(HostSecret.of, uses))
    except InvalidRule as error:
        raise _RequestFailed("INVALID", str(error)) from None


def _take_over(state: WayOutState, fds: list[int]) -> WayOut:
    """Return the way out over these descriptors, which are taken off the list then."""
    sockets: list[socket.socket] = []
    try:
        if not fds:
            raise OSError(errno.EMFILE, "none arrived, as when no descriptor is free")
        if len(fds) not in (2, p.MAX_FDS):
            raise OSError(errno.EINVAL, f"{len(fds)} descriptors")
        sockets += (socket.socket(fileno=fd) for fd in fds[:2])
        listener, questions = sockets
        kinds = (listener.family, listener.type, questions.family, questions.type)
        if kinds != (socket.AF_INET, socket.SOCK_STREAM, socket.AF_INET, socket.SOCK_DGRAM):
            raise OSError(errno.EINVAL, "other kinds of sockets")
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.EINVAL, "the first socket does not listen")
        way_out = WayOut(state, listener, questions, fds[2] if len(fds) > 2 else None)
    except OSError as error:
        for sock in sockets:
            sock.detach()
        raise _RequestFailed("DESCRIPTORS", f"expected a TCP listener, a UDP socket and a link: {error}") from None
    fds.clear()
    return way_out


async def next_message(channel: socket.socket, decode: Callable[[bytes], M], *, max_fds: int) -> tuple[M, list[int]]:
    """Return the daemon's next message and the descriptors that came with it, which the caller owns. There are none if
    one did not arrive, since this process may have no more (unix(7)) or there were more than `max_fds`.

    Raises:
        EOFError: the daemon has closed its end.
        ProtocolError: what arrived is no message, or is too long.
    """
    while True:
        await trio.lowlevel.wait_readable(channel)
        try:
            data, ancillary, flags, _ = channel.recvmsg(
                p.MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(max_fds * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            break
        except BlockingIOError:
            continue
        except ConnectionResetError:
            raise EOFError from None  # closed with messages of ours unread (unix(7))
    fds = array.array("i")
    for _level, _kind, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % _FD_BYTES])
    try:
        if flags & socket.MSG_TRUNC:
            raise p.ProtocolError("a message is too long")
        if not data:
            raise EOFError
        message = decode(data)
        if flags & socket.MSG_CTRUNC:
            log("error", "descriptors_lost", arrived=len(fds))
            close_all(fds)
            return message, []
        return message, list(fds)
    except BaseException:
        close_all(fds)
        raise


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


async def serve(
    channel: socket.socket,
    lookup: Lookup = ask_machine,
    kept_s: float = KEPT_S,
    has_own: Callable[[frozenset[Address]], None] = lambda _addresses: None,
) -> int:
    """Serve the daemon at the other end of a socket, or, at a socket that listens, one after the other. Return the
    status to end with: 0 when there is none any more. `has_own` is told of this host's addresses, now and later."""
    status = 0

    def note(addresses: frozenset[Address]) -> None:
        server.set_own_addresses(addresses)
        has_own(addresses)

    async with trio.open_nursery() as nursery:
        server = EgressServer(nursery, lookup, kept_s)
        await nursery.start(watch_own_addresses, note)
        nursery.start_soon(server.batch_entries)
        log("info", "started")
        try:
            if channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                await _serve_daemons(channel, server)
            else:
                await server.serve_daemon(channel)
        except p.ProtocolError as error:
            log("error", "protocol", reason=str(error))
            status = 1
        nursery.cancel_scope.cancel()
    return status


async def _serve_daemons(listener: socket.socket, server: EgressServer) -> None:
    """Serve one daemon after the other while there are sessions, until none has come for `ORPHAN_S`. All have the first
    one's user: others can't open the socket file, unless they are root."""
    listener.setblocking(False)
    listener.listen(_BACKLOG)  # again: SO_PEERCRED tells a daemon of who called this last
    user: int | None = None
    while True:
        with trio.move_on_after(ORPHAN_S) as patience:
            await trio.lowlevel.wait_readable(listener)
        if patience.cancelled_caught:
            log("warning", "given_up", sessions=server.sessions)
            return
        try:
            daemon, _ = listener.accept()
        except OSError:
            continue  # gone before it was accepted
        credentials = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _pid, found, _group = _CREDENTIALS.unpack(credentials)
        user = found if user is None else user
        if found not in (0, user):
            log("warning", "refused_a_peer", uid=found)
            daemon.close()
        elif not await server.serve_daemon(daemon) or not server.sessions:
            return
