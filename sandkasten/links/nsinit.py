"""The daemon's end of the connection to nsinit: sends requests, pairs answers by `seq`.

Speaks `nsinit.wire.protocol` over `AF_UNIX SOCK_SEQPACKET`; descriptors arrive by SCM_RIGHTS and are owned by whoever gets
the answer. Where the process comes from is `nsinit_process.py`. Sources: unix(7).
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

from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, MAX_FDS, REQUESTS, Failed, ProtocolError
from sandkasten.links.fds import OwnedFd
from sandkasten.model.errors import ZygoteLost

_FD_SIZE = array.array("i").itemsize

_PASSING_STAGES = frozenset({"builder", "cgroup maker", "child", "clone", "deadline", "identity", "stop"})
"""What of `nsinit.steps.StepFailed.stage` names a process that died, or a time that ran out."""

_TAKEN_ID = "session", errno.EEXIST
"""nsinit died over what it prepared for this id; the next create has another id."""


@attrs.frozen
class Answer:
    """A message from nsinit and the descriptors that came with it; the receiver closes them."""

    message: Any  # a member of nsinit.protocol.ANSWERS
    fds: Sequence[OwnedFd]


class ZygoteLink:
    """Request and answer over one socket. `serve` must run while requests are made."""

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

    async def request(self, message: Any) -> Answer:  # a member of nsinit.protocol.REQUESTS
        """Send a request and wait for its answer, which may be `Failed`. A dropped answer's descriptors are closed.

        Raises:
            ZygoteLost: nsinit died, or broke the protocol.
        """
        if self._lost is not None:
            raise ZygoteLost(self._lost)
        slot = self._waiting[message.seq] = _Slot()
        try:
            async with self._send_lock:
                await self._socket.send(REQUESTS.encode(message))
            await slot.done.wait()
        except OSError as error:
            raise ZygoteLost("the fork server is gone") from error
        except trio.Cancelled:
            slot.drop()
            raise
        finally:
            del self._waiting[message.seq]
        if slot.answer is None:
            raise ZygoteLost(self._lost or "the fork server is gone")
        return slot.answer

    async def serve(self) -> None:
        """Hand answers to their askers until nsinit goes away; then raise `ZygoteLost` here and in every asker."""
        try:
            while True:
                answer = await self._receive()
                slot = self._waiting.get(answer.message.seq)
                if slot is not None:
                    slot.fill(answer)
                else:  # the asker has gone; what came for it is not kept
                    for fd in answer.fds:
                        fd.close()
        except (OSError, ProtocolError, ZygoteLost) as error:
            self._lost = f"the fork server is gone: {error}"
            await trio.lowlevel.cancel_shielded_checkpoint()  # whose answer came just before that goes first
            raise ZygoteLost(self._lost) from error
        finally:
            self._lost = self._lost or "the fork server is gone"
            for slot in self._waiting.values():
                slot.done.set()

    async def _receive(self) -> Answer:
        space = socket.CMSG_SPACE(MAX_FDS * _FD_SIZE)
        data, ancillary, flags, _ = await self._socket.recvmsg(MAX_DATAGRAM_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = [OwnedFd(fd) for fd in _fds_in(ancillary)]
        try:
            if not data:
                raise ZygoteLost("it closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("truncated datagram")
            return Answer(ANSWERS.decode(data), fds)
        except BaseException:
            for fd in fds:
                fd.close()
            raise


class _Slot:
    """Where one answer lands."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None

    def fill(self, answer: Answer) -> None:
        self.answer = answer
        self.done.set()

    def drop(self) -> None:
        """The asker was cancelled: close what it will never take."""
        for fd in self.answer.fds if self.answer else ():
            fd.close()


def _fds_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return fds.tolist()


def failure_text(failed: Failed) -> str:
    """Return a sentence for the log: step, path, errno and what nsinit said."""
    reason = f": {os.strerror(failed.errno)}" if failed.errno else ""
    return f"{failed.stage} {failed.path}{reason} ({failed.message})" if failed.message else f"{failed.stage}{reason}"


def is_passing(stage: str, number: int) -> bool:
    """Return whether a build that failed at `stage`, with that errno, may succeed when it is tried again."""
    return stage in _PASSING_STAGES or (stage, number) == _TAKEN_ID
