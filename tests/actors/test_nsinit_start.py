"""The client of an nsinit at its start, whose reason of a refusal is told, and at an asker's end."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nsinit.wire import protocol
from sandkasten.actors.core import Ref, unwrap
from sandkasten.actors.services.nsinit import Call, NsinitClient, ask_store
from sandkasten.errors import ActorGone, BuildFailed
from sandkasten.links.fds import OwnedFd
from sandkasten.links.processes import ChildProcess
from tests.waiting import patience


async def test_why_it_refused_is_not_lost_with_it(tmp_path: Path) -> None:
    """The answer and the end of the connection come together; often enough for trio to have chosen either order."""
    for _ in range(30):
        with trio.fail_after(patience(5)), pytest.raises(BaseExceptionGroup) as ended:
            async with trio.open_nursery() as nursery:
                await nursery.start(NsinitClient(Ref("nsinit"), tmp_path, "ab" * 4, start_nsinit=_refusing).run)
        error = unwrap(ended.value)
        assert isinstance(error, BuildFailed)
        assert "no such disk" in error.message


async def test_descriptors_of_an_asker_that_was_cancelled_are_not_mistaken_for_others(tmp_path: Path) -> None:
    """The same open file is sent after the asker has closed its own, whatever has that number by then; a request of an
    asker that left before is not sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    blob, other = tmp_path / "blob", tmp_path / "other"
    blob.touch()
    other.touch()

    async def start() -> ChildProcess:
        return ChildProcess(ours)

    with theirs:
        theirs.settimeout(patience())
        client = NsinitClient(Ref("nsinit"), tmp_path, "ab" * 4, start_nsinit=start)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, _say_ready, theirs)
            await nursery.start(client.run)
            request = protocol.UnpackLayer(0, "", 1, 1, 0)
            closed = OwnedFd(os.open(blob, os.O_RDONLY))
            closed.close()
            with pytest.raises(ActorGone):
                await client.ref.ask(Call(request, lambda answer: answer.message, fds=[closed]))
            async with client._link._send_lock:
                async with trio.open_nursery() as asking:
                    fd = os.open(blob, os.O_RDONLY)
                    asking.start_soon(ask_store, client.ref, request, (fd,))
                    await wait_all_tasks_blocked()
                    asking.cancel_scope.cancel()
                os.close(fd)
                others = [os.open(other, os.O_RDONLY) for _ in range(4)]
                assert fd in others
            _, (received,), _, _ = await trio.to_thread.run_sync(socket.recv_fds, theirs, 1 << 16, 1)
            assert os.path.samestat(os.fstat(received), blob.stat())
            for each in (received, *others):
                os.close(each)
            nursery.cancel_scope.cancel()


def _say_ready(sock: socket.socket) -> None:
    start = protocol.REQUESTS.decode(sock.recv(protocol.MAX_DATAGRAM_BYTES))
    sock.send(protocol.ANSWERS.encode(protocol.Ready(start.seq, 1, "v2", {})))


async def _refusing() -> ChildProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    threading.Thread(target=_refuse, args=(theirs,)).start()
    return ChildProcess(ours)


def _refuse(sock: socket.socket) -> None:
    with sock:
        start = protocol.REQUESTS.decode(sock.recv(protocol.MAX_DATAGRAM_BYTES))
        sock.send(protocol.ANSWERS.encode(protocol.Failed(start.seq, "disk", "", 0, "no such disk")))


def test_every_request_names_an_answer_of_the_contract() -> None:
    """The client refuses any other answer, so that a caller gets the class that its request names."""
    assert {protocol.answer_class(kind) for kind in protocol.REQUESTS.classes} == (
        set(protocol.ANSWERS.classes) - {protocol.Failed}
    )
