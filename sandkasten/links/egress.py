"""Requests to the egress process and its answers over one socket; see `egress/protocol.py`."""

from __future__ import annotations

import array
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import attrs
import trio

from egress import protocol
from sandkasten.links.fds import OwnedFd
from sandkasten.model.errors import EgressUnavailable

A = TypeVar("A")

_MOST_AT_ONCE = 64
"""Messages taken before other tasks have their turn."""


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
                    self._stdlib, protocol.MAX_DATAGRAM_BYTES, protocol.MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
                self._hand_on(data, list(map(OwnedFd, fds)))
        except BlockingIOError:
            pass
        except (OSError, protocol.ProtocolError) as error:
            self._lose(f"the egress process is gone: {error}")

    def _hand_on(self, data: bytes, fds: list[OwnedFd]) -> None:
        with ExitStack() as unused:
            for each in fds:
                unused.callback(each.close)
            if not data:
                raise protocol.ProtocolError("it closed the connection")
            message = protocol.decode_answer(data)
            if isinstance(message, protocol.Entries):
                self._take(message)
            elif (waiting := self._waiting.get(message.seq)) is not None:
                if isinstance(message, protocol.SessionTaken) and not self._taken:
                    self._taken = fds
                    unused.pop_all()
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
