"""An nsinit that refuses to start: its reason is what is told, not that it has ended then."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Ref, unwrap
from sandkasten.actors.services.nsinit import NsinitClient
from sandkasten.links.processes import ChildProcess
from sandkasten.model.errors import BuildFailed
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
