"""One session's way out: its listener, its DNS socket and its connections, from `AttachSession` to `DetachSession`.

Who asks is the socket that a question or a connection arrived at. Owns the session's descriptors. The sockets keep the
session's network namespace alive, and the BPF link is held for it alone: what is not closed here, stays.

A connection to port 53 of any address is DNS over TCP (RFC 7766). A name that is not allowed does not exist, and the
question for it never leaves the machine; one that is allowed gets the address that stands for it. So does, in the mode
`ask`, a name that no rule decides on: whether it exists is asked for outside when it is allowed, and not before. With
an operator's proxy no name is looked up, and each allowed one has an address.

Sources: ip(7) (IP_PKTINFO), accept(2), udp(7); RFC 1035, 4.2.2; RFC 8914.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Literal

import trio

from egress import dns, relay
from egress.connection import CarriedConnection
from egress.policy import Address, Policy, Reason, Ruling
from egress.protocol import EgressEntry, WayOutLimits
from egress.resolver import LookupFailed, NoSuchName
from egress.state import HostSecret, RateBucket, Refusal, WayOutState
from egress.upstream import is_local_name

DNS_PORT = 53
ANSWER_TTL_S = 5
DNS_RATE, DNS_BURST = 500.0, 2000.0
MAX_QUESTIONS = 256
"""Questions of a session that wait for the resolver outside."""

_TCP_QUESTION_S = 10.0
"""The longest time between two questions of a connection."""

_TURNS = 64
_ACCEPTS = 8
"""Connections that are accepted before others have their turns."""
_PAUSE_S = 0.1
"""Time without accepting when the process, or the machine, has no descriptor or memory for a connection."""

_SOCKET_BYTES = 1024 * 1024
_WIDE = 8
"""Open connections of a session whose buffers the kernel may grow to some MiB. In a v2 tree all of it is charged to
this process, whose memory one session could fill by hundreds of connections that nobody reads."""
_REPEATED_S = 0.1
"""A refused name is reported once in this time: the C library asks for A and for AAAA, and again."""

_IP_PKTINFO = 8  # linux/in.h
_PKTINFO = struct.Struct("=I4s4s")  # struct in_pktinfo: interface, the local address to send from, destination


class WayOut:
    """The way out of a session. Takes the descriptors over, unless an OSError says that they are not what is needed."""

    def __init__(
        self, state: WayOutState, listener: socket.socket, questions: socket.socket, link_fd: int | None
    ) -> None:
        questions.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted has both (tcp(7), socket(7))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        for sock in (listener, questions):
            sock.setblocking(False)
        self.state = state
        self.ended = trio.Event()
        self._listener = listener
        self._questions = questions
        self._link_fd = link_fd
        self._scope = trio.CancelScope()
        self._open: set[CarriedConnection] = set()
        self._rate = RateBucket(state.limits.rate, state.limits.burst)
        self._dns_rate = RateBucket(DNS_RATE, DNS_BURST)
        self._waiting_questions = 0
        state.cut_all = self._cut_all
        self._reported: tuple[str, float] = ("", 0.0)

    def fds(self) -> list[int]:
        """Return the descriptors, which stay this object's: listener, questions, and the link if there is one."""
        sockets = [self._listener.fileno(), self._questions.fileno()]
        return sockets if self._link_fd is None else [*sockets, self._link_fd]

    async def serve(self) -> None:
        """Serve until `detach`; then all is closed."""
        self.state.machine.sessions += 1
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._accept_all, nursery)
                    await self._answer_all(nursery)  # a task of its own takes 4 KiB of each session
        finally:
            for sock in (self._listener, self._questions):
                trio.lowlevel.notify_closing(sock)
                sock.close()
            if self._link_fd is not None:
                os.close(self._link_fd)
            self.state.machine.sessions -= 1
            self.ended.set()

    async def detach(self) -> None:
        """Reset all connections and close all descriptors; return when that is done."""
        self._cut_all("detached")
        self._scope.cancel()
        await self.ended.wait()

    def _cut_all(self, cause: str) -> None:
        for each in self._open:
            each.cut(cause)

    async def set_policy(self, policy: Policy, limits: WayOutLimits, secrets: tuple[HostSecret, ...] = ()) -> None:
        """Replace all three; return when the connections that are no longer allowed are reset."""
        self.state.secrets = secrets
        self.state.change(policy, limits)
        self._rate = RateBucket(limits.rate, limits.burst)
        before = set(self._open)
        for each in before:
            each.judge_again()
        for each in before:
            if each.is_cut:
                await each.ended.wait()

    # Connections

    async def _accept_all(self, nursery: trio.Nursery) -> None:
        turns = 0
        while True:
            if turns % _ACCEPTS == 0:
                await trio.lowlevel.checkpoint()
            turns += 1
            if not self.state.machine.has_descriptors():
                await self._wait_for_descriptors()
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._listener)
                continue
            except ConnectionAbortedError:
                continue  # the client went before it was accepted (accept(2), ECONNABORTED)
            except OSError as error:
                self.state.machine.fault(self.state.session_id, error)
                await trio.sleep(_PAUSE_S)
                continue
            self._start(client, nursery)
            if wait_s := self._rate.take(trio.current_time()):  # the backlog holds what comes meanwhile
                await trio.sleep(wait_s)
                self._rate.take(trio.current_time())

    async def _wait_for_descriptors(self) -> None:
        """Wait until a connection more would find descriptors; the backlog holds what comes meanwhile."""
        self.state.machine.fault(self.state.session_id, OSError(errno.EMFILE, "connections wait for descriptors"))
        self.state.machine.totals.pauses += 1
        self.state.machine.changed()
        while not self.state.machine.has_descriptors():  # noqa: ASYNC110 - of all sessions; nobody tells of each end
            await trio.sleep(_PAUSE_S)

    def _start(self, client: socket.socket, nursery: trio.Nursery) -> None:
        """Begin to serve an accepted connection, or reset it."""
        try:
            client.setblocking(False)
            # Not inherited from the listener, as the others are: what waits in the backlog would have that room, too.
            if is_narrow := self.state.counters.connections_open >= _WIDE:
                relay.narrow(client)
            else:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            host, port = client.getsockname()
            destination = IPv4Address(host)
        except OSError:  # reset by the client already
            relay.close(client, with_reset=True)
            return
        if not self.state.may_open():
            self.state.counters.denied += 1
            self._report(Reason.LIMIT, "tcp", self._host_of(destination), port)
            relay.close(client, with_reset=True)
            return
        self.state.counters.connections_open += 1
        self.state.machine.totals.connections_open += 1
        self.state.machine.changed()
        if port == DNS_PORT:
            nursery.start_soon(self._answer_stream, client)
        else:
            self.state.counters.connections += 1
            connection = CarriedConnection(self.state, client, destination, port, is_narrow=is_narrow)
            self._open.add(connection)  # here, for what cuts all may come before its task's first step
            nursery.start_soon(self._carry, connection)

    def _host_of(self, destination: IPv4Address) -> str:
        entry = self.state.name_at(destination)
        return entry.name if entry else str(destination)

    async def _carry(self, connection: CarriedConnection) -> None:
        try:
            await connection.run()
        finally:
            self._open.discard(connection)
            self._count_closed()

    def _count_closed(self) -> None:
        self.state.counters.connections_open -= 1
        self.state.machine.totals.connections_open -= 1
        self.state.machine.changed()

    # DNS

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        """Answer the questions of the UDP socket, each from the address that it was sent to."""
        turns = 0
        while True:
            turns += 1
            if turns % _TURNS == 0:
                await trio.lowlevel.checkpoint()
            try:
                data, ancillary, _flags, sender = self._questions.recvmsg(
                    dns.MAX_QUESTION_BYTES + 1, socket.CMSG_SPACE(_PKTINFO.size)
                )
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._questions)
                continue
            except OSError as error:
                self.state.machine.fault(self.state.session_id, error)
                await trio.sleep(_PAUSE_S)
                continue
            destination = next((_PKTINFO.unpack(each)[2] for _, _, each in ancillary), None)
            if destination is None:
                continue
            if self._waiting_questions < MAX_QUESTIONS:
                self._waiting_questions += 1
                nursery.start_soon(self._answer_datagram, data, destination, sender)

    async def _answer_datagram(self, data: bytes, destination: bytes, sender: tuple[str, int]) -> None:
        try:
            answer = await self._answer(data)
            if answer is not None:
                pktinfo = _PKTINFO.pack(0, destination, bytes(4))
                with suppress(OSError):  # no room, or nobody there any more: DNS over UDP may lose an answer
                    self._questions.sendmsg([answer], [(socket.IPPROTO_IP, _IP_PKTINFO, pktinfo)], 0, sender)
        finally:
            self._waiting_questions -= 1

    async def _answer_stream(self, client: socket.socket) -> None:
        """Answer the questions of a connection, one after the other (RFC 1035, 4.2.2: a length is before each)."""
        received = b""
        try:
            while True:
                with trio.fail_after(_TCP_QUESTION_S):
                    while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
                        piece = await relay.receive(client, relay.SMALL_CHUNK_BYTES)
                        if not piece:
                            return
                        received += piece
                size = int.from_bytes(received[:2], "big")
                answer = await self._answer(received[2 : 2 + size])
                received = received[2 + size :]
                if answer is None:
                    return
                with trio.fail_after(_TCP_QUESTION_S):
                    await relay.send_all(client, len(answer).to_bytes(2, "big") + answer)
        except (OSError, trio.TooSlowError):
            pass  # the client's loss
        finally:
            relay.close(client, with_reset=False)
            self._count_closed()

    async def _answer(self, data: bytes) -> bytes | None:
        """Return the answer to a question, None if there is none to give. Never raises."""
        try:
            parsed = dns.parse_question(data)
            if not isinstance(parsed, dns.Question):
                return parsed
            self.state.counters.dns_queries += 1
            if self._dns_rate.take(trio.current_time()):
                return dns.answer_error(parsed, dns.Rcode.REFUSED, ede=dns.Ede.NOT_READY, text="too many questions")
            return await self._answer_question(parsed)
        except Exception as error:  # noqa: BLE001 - a fault of ours leaves one question without an answer
            self.state.machine.fault(self.state.session_id, error)
            return None

    async def _answer_question(self, question: dns.Question) -> bytes:
        decision = self.state.policy.judge_name(question.name) if question.name else Ruling(False, Reason.BAD_NAME)
        if not decision.is_allowed and decision.reason is not Reason.UNANSWERED:
            return self._deny(question, decision.reason or Reason.ERROR, decision.rule, dns.Ede.FILTERED)
        if self.state.machine.upstream is not None and is_local_name(question.name):
            return self._deny(question, Reason.BAD_ADDRESS, None, dns.Ede.BLOCKED)
        if not decision.is_allowed or self.state.machine.upstream is not None:
            self._count_allowed()
            return self._stand_in(question)
        try:
            addresses = await self.state.find(question.name)
        except NoSuchName:
            self._count_allowed()
            return dns.answer_error(question, dns.Rcode.NXDOMAIN)
        except LookupFailed as error:
            self._count_allowed()
            return dns.answer_error(question, dns.Rcode.SERVFAIL, ede=dns.Ede.NOT_READY, text=str(error))
        except Refusal as refusal:
            return self._deny(question, refusal.reason, None, dns.Ede.BLOCKED)
        self._count_allowed()
        return self._stand_in(question, addresses) if addresses else dns.answer_nothing(question)

    def _stand_in(self, question: dns.Question, addresses: Sequence[Address] = ()) -> bytes:
        """Answer with the address that stands for a name, whose addresses, if they are known, are dialled then."""
        if question.type != dns.TYPE_A:
            return dns.answer_nothing(question)
        entry = self.state.names.give(question.name)
        if entry is None:
            return dns.answer_error(question, dns.Rcode.SERVFAIL, ede=dns.Ede.NOT_READY, text="too many names in use")
        if addresses:
            self.state.keep(entry, addresses)
        return dns.answer_address(question, entry.address, ANSWER_TTL_S)

    def _count_allowed(self) -> None:
        self.state.machine.totals.dns_allowed += 1
        self.state.machine.changed()

    def _deny(self, question: dns.Question, reason: Reason, rule: str | None, ede: dns.Ede) -> bytes:
        self.state.counters.dns_denied += 1
        self.state.machine.totals.dns_denied += 1
        self.state.machine.changed()
        now = trio.current_time()
        if self._reported[0] != question.name or self._reported[1] + _REPEATED_S < now:
            self._reported = question.name, now
            self._report(reason, "dns", question.name, DNS_PORT, rule)
        rcode = dns.Rcode.REFUSED if reason is Reason.LIMIT else dns.Rcode.NXDOMAIN  # the name may exist
        return dns.answer_error(question, rcode, ede=ede, text=f"the session's network policy: {reason}")

    def _report(
        self, reason: Reason, kind: Literal["tcp", "dns"], host: str, port: int, rule: str | None = None
    ) -> None:
        self.state.machine.report(
            EgressEntry(self.state.session_id, time.time(), kind, host, port, "denied", reason=reason, rule=rule)
        )
