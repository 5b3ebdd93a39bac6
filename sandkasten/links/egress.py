"""Requests to the egress process and its answers over one socket; see `egress/protocol.py`."""

from __future__ import annotations

import array
import os
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import trio

from egress import protocol
from sandkasten.errors import EgressUnavailable
from sandkasten.links.fds import OwnedFd

A = TypeVar("A")

_MOST_AT_ONCE = 64
"""Messages taken before other tasks have their turn."""

_SCM_MAX_FD = 253
"""The most descriptors of a message (unix(7)). With room for fewer the kernel closes the rest in recvmsg(2), and the
last close of a socket may wait for as long as its maker wanted (socket(7), SO_LINGER)."""


class EgressLink:
    """Requests and answers; `take` is called with each notice. `serve` must run while requests are made."""

    def __init__(self, sock: socket.socket, take: Callable[[protocol.Entries], None]) -> None:
        self._stdlib = sock
        sock.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._take = take
        self._seq = 0
        self._waiting: dict[int, tuple[trio.Event, list[protocol.EgressAnswer]]] = {}
        self._taken: list[OwnedFd] = []
        """Descriptors that came with the last `SessionTaken`."""
        self._send_lock = trio.Lock()
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether every request fails from now on."""
        return self._lost is not None

    async def request(self, request: protocol.EgressRequest, answer: type[A], fds: Sequence[int] = ()) -> A:
        """Send a request, whose `seq` is set here, and return its answer of the class `answer`.

        Raises:
            EgressUnavailable: the process has ended, broke the protocol, or refused the request.
        """
        if self._lost is not None:
            raise EgressUnavailable(self._lost)
        self._seq += 1
        request = attrs.evolve(request, seq=self._seq)
        done, answers = self._waiting[request.seq] = trio.Event(), []
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            async with self._send_lock:
                await self._socket.sendmsg([protocol.encode(request)], rights)
            await done.wait()
        except (OSError, trio.ClosedResourceError) as error:
            raise EgressUnavailable(self._lost or f"the egress process is gone: {error}") from error
        finally:
            del self._waiting[request.seq]
        match answers:
            case [protocol.EgressFailed() as failed]:
                raise EgressUnavailable(f"the egress process refused: {failed.message}")
            case [found] if isinstance(found, answer):
                return found
            case []:
                raise EgressUnavailable(self._lost or "the egress process is gone")
        raise EgressUnavailable(f"the egress process answered with {type(answers[0]).__name__}")

    async def take_session(self) -> tuple[str, list[OwnedFd]]:
        """Return a session of an earlier daemon, and its descriptors, which the caller owns; an empty id, when there is
        no more. Raises as `request`."""
        answer = await self.request(protocol.TakeSession(0), protocol.SessionTaken)
        taken, self._taken = self._taken, []
        return answer.session_id, taken

    async def serve(self) -> None:
        """Hand on answers and notices until the process goes away; return then, and fail every request."""
        try:
            while self._lost is None:
                await trio.lowlevel.wait_readable(self._stdlib)
                self.catch_up()
        except trio.ClosedResourceError:
            pass  # another caller of `catch_up` saw the end first
        finally:
            self._lose("the egress process is gone")

    def catch_up(self) -> None:
        """Hand on what has come, without waiting. The egress process tells of a refusal before it answers the session,
        so what was refused to a run that has ended is known after this."""
        try:
            for _ in range(_MOST_AT_ONCE):
                data, fds, _flags, _address = socket.recv_fds(
                    self._stdlib, protocol.MAX_DATAGRAM_BYTES, _SCM_MAX_FD, socket.MSG_CMSG_CLOEXEC
                )
                try:
                    self._hand_on(data, fds)
                except BaseException:
                    _close_elsewhere(fds)
                    raise
        except BlockingIOError:
            pass
        except (OSError, protocol.ProtocolError) as error:
            self._lose(f"the egress process is gone: {error}")

    def _hand_on(self, data: bytes, fds: Sequence[int]) -> None:
        """Hand on a message; own its descriptors, if there are any, unless an error is raised."""
        if not data:
            raise protocol.ProtocolError("it closed the connection")
        message = protocol.decode_answer(data)
        waiting = None if isinstance(message, protocol.Entries) else self._waiting.get(message.seq)
        if fds:
            if waiting is None or self._taken or not isinstance(message, protocol.SessionTaken):
                raise protocol.ProtocolError("descriptors that nobody asked for")
            _check_sockets(fds)
            self._taken = [OwnedFd(fd) for fd in fds]
        if isinstance(message, protocol.Entries):
            self._take(message)
        elif waiting is not None:
            waiting[1].append(message)
            waiting[0].set()

    def _lose(self, reason: str) -> None:
        """Fail every request; a process that broke the protocol is hung up on, which ends it."""
        if self._lost is None:
            self._lost = reason
            trio.lowlevel.notify_closing(self._stdlib)
            self._stdlib.close()
            for fd in self._taken:
                fd.close()
        for done, _ in self._waiting.values():
            done.set()


def _check_sockets(fds: Sequence[int]) -> None:
    """Raise `ProtocolError` unless these may be a listener, a socket of DNS and a link, none of which waits when it is
    closed."""
    if len(fds) not in (protocol.MAX_FDS - 1, protocol.MAX_FDS):
        raise protocol.ProtocolError(f"{len(fds)} descriptors for a session")
    for fd, option, wanted in ((fds[0], socket.SO_ACCEPTCONN, 1), (fds[1], socket.SO_TYPE, socket.SOCK_DGRAM)):
        sock = socket.socket(fileno=fd)
        try:
            if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, option) != wanted:
                raise protocol.ProtocolError("a session's sockets are of another kind")
        finally:
            sock.detach()
    if len(fds) > 2 and stat.S_IFMT(os.fstat(fds[2]).st_mode) != 0:  # of an anonymous inode, as links are
        raise protocol.ProtocolError("a session's link is something else")


def _close_elsewhere(fds: Sequence[int]) -> None:
    """Close descriptors of a process that broke the protocol where nobody waits for it."""

    def close_all() -> None:
        for fd in fds:
            os.close(fd)

    if fds:
        threading.Thread(target=close_all, name="close", daemon=True).start()
