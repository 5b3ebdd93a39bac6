"""The daemon's side of nsinit: requests and answers on its socket. How one is started is in `processes.py`.

`NsinitLink` speaks `nsinit.wire.protocol` over `AF_UNIX SOCK_SEQPACKET`, and pairs answers with requests by `seq`.
Descriptors arrive by SCM_RIGHTS; the receiver of the answer owns them. Source: unix(7).
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, MAX_FDS, NETWORK_STAGE, REQUESTS, Failed, ProtocolError
from sandkasten.errors import NsinitLost
from sandkasten.links.fds import OwnedFd

_FD_SIZE = array.array("i").itemsize
_PASSING_STAGES = frozenset(
    {"builder", "cgroup maker", "network maker", "child", "clone", "deadline", "identity", "stop"}
)
"""Values of `nsinit.steps.StepFailed.stage` that name a process that died, or a time that ran out."""

_TAKEN_ID = "session", errno.EEXIST
"""nsinit died over its preparations for this id; the next create has another id."""


@attrs.frozen
class NsinitAnswer:
    """A message from nsinit and the descriptors that came with the message; the receiver closes them."""

    message: Any  # a member of nsinit.wire.protocol.ANSWERS
    fds: Sequence[OwnedFd]


class NsinitLink:
    """Requests and answers over one socket. `serve` must run while requests are made."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._waiting: dict[int, _Slot] = {}
        self._next_seq = 1
        self._send_lock = trio.Lock()
        self._lost: str | None = None

    def next_seq(self) -> int:
        """Return a fresh number for a request's `seq`."""
        self._next_seq += 1
        return self._next_seq

    async def request(self, message: Any, fds: Sequence[int] = ()) -> NsinitAnswer:  # one of its REQUESTS
        """Send a request with descriptors, which stay the caller's, and wait for its answer, which may be `Failed`.
        Cancelling closes the answer's descriptors.

        Raises:
            NsinitLost: nsinit died, or broke the protocol.
        """
        if self._lost is not None:
            raise NsinitLost(self._lost)
        slot = self._waiting[message.seq] = _Slot()
        try:
            async with self._send_lock:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                await self._socket.sendmsg([REQUESTS.encode(message)], ancillary)
            await slot.done.wait()
        except OSError as error:
            raise NsinitLost("the fork server is gone") from error
        except trio.Cancelled:
            slot.drop()  # the answer may have come in the same turn of the loop
            raise
        finally:
            del self._waiting[message.seq]
        if slot.answer is None:
            raise NsinitLost(self._lost or "the fork server is gone")
        return slot.answer

    async def serve(self) -> None:
        """Hand answers to their requests until nsinit goes away; then raise `NsinitLost` here and in every request."""
        try:
            while True:
                answer = await self._receive()
                slot = self._waiting.get(answer.message.seq)
                if slot is not None:
                    slot.fill(answer)
                else:  # the request was cancelled
                    for fd in answer.fds:
                        fd.close()
        except (OSError, ProtocolError, NsinitLost) as error:
            self._lost = f"the fork server is gone: {error}"
            await trio.lowlevel.cancel_shielded_checkpoint()  # requests whose answer came just before return first
            raise NsinitLost(self._lost) from error
        finally:
            self._lost = self._lost or "the fork server is gone"
            for slot in self._waiting.values():
                slot.done.set()

    async def _receive(self) -> NsinitAnswer:
        space = socket.CMSG_SPACE(MAX_FDS * _FD_SIZE)
        # MSG_CMSG_CLOEXEC: no descriptor leaks into a program that another thread starts meanwhile.
        data, ancillary, flags, _ = await self._socket.recvmsg(MAX_DATAGRAM_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = [OwnedFd(fd) for fd in _fds_in(ancillary)]
        try:
            if not data:
                raise NsinitLost("nsinit closed the connection")
            # MSG_CTRUNC: the kernel closed descriptors that found no room, so the message can't be believed.
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("truncated datagram")
            return NsinitAnswer(ANSWERS.decode(data), fds)
        except BaseException:
            for fd in fds:
                fd.close()
            raise


class _Slot:
    """The place of one answer."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: NsinitAnswer | None = None

    def fill(self, answer: NsinitAnswer) -> None:
        self.answer = answer
        self.done.set()

    def drop(self) -> None:
        """Close the descriptors of an answer whose request was cancelled."""
        for fd in self.answer.fds if self.answer else ():
            fd.close()


def _fds_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return fds.tolist()


def failure_text(failed: Failed) -> str:
    """Return a sentence for the log: step, path, errno and nsinit's message."""
    reason = f": {os.strerror(failed.errno)}" if failed.errno else ""
    return f"{failed.stage} {failed.path}{reason} ({failed.message})" if failed.message else f"{failed.stage}{reason}"


def is_passing(stage: str, number: int) -> bool:
    """Whether a build that failed at `stage`, with that errno, may succeed at the next attempt."""
    return stage.removeprefix(NETWORK_STAGE) in _PASSING_STAGES or (stage, number) == _TAKEN_ID
