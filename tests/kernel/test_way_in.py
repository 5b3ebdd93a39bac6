"""Sockets that nsinit makes in a session's network: what they reach when somebody outside connects them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from nsinit.wire.protocol import MAX_SOCKETS, Failed, OpenSockets, SocketsOpened, Teardown
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, new_id, running
from tests.waiting import patience

PATIENCE_S = 20.0
SERVER = """
import os, socket
listener = socket.create_server(("127.0.0.1", 8000))
if os.fork() == 0:
    os.setsid(); os.close(0); os.close(1); os.close(2)
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"inside"); connection.close()
print("listens")
"""
"""A server that goes on when its command has ended."""


@contextlib.contextmanager
def opened(server: Nsinit, session_id: str, count: int) -> Iterator[list[socket.socket]]:
    """Sockets of a session, as the daemon gets them."""
    answer, fds = server.ask(OpenSockets, session_id=session_id, count=count)
    assert isinstance(answer, SocketsOpened), (answer, server.log)
    assert answer.session_id == session_id
    assert len(fds) == count
    assert not any(map(os.get_blocking, fds))
    sockets = [socket.socket(fileno=fd) for fd in fds]
    try:
        for each in sockets:
            each.settimeout(patience(PATIENCE_S))
        yield sockets
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Nsinit]:
    """An nsinit with its network maker, which is there from the first sockets on and is no leak of a test."""
    with data_directory() as data_dir, running(data_dir) as nsinit:
        with opened(nsinit, nsinit.build(host_plan()).session_id, 1):
            pass
        nsinit.remove_sandboxes()
        yield nsinit


@pytest.fixture
def box(server: Nsinit) -> Sandbox:
    return server.build(host_plan())


def serve(box: Sandbox) -> None:
    """Have a server listen inside on port 8000 of the loopback."""
    assert box.python(SERVER) == "listens"


def test_a_socket_reaches_a_server_of_its_session(server: Nsinit, box: Sandbox) -> None:
    """As many as were asked for, each for one connection to the session's loopback."""
    serve(box)
    with opened(server, box.session_id, MAX_SOCKETS) as sockets:
        for each in sockets:
            each.connect(("127.0.0.1", 8000))
            assert each.makefile("rb").read() == b"inside"


def test_a_socket_reaches_nothing_of_the_host(server: Nsinit, box: Sandbox) -> None:
    """A port of the host's loopback is refused, and an address outside has no route."""
    with socket.create_server(("127.0.0.1", 0)) as ours, opened(server, box.session_id, 2) as (first, second):
        with pytest.raises(ConnectionRefusedError):
            first.connect(ours.getsockname())
        with pytest.raises(OSError, match="unreachable"):
            second.connect(("203.0.113.7", 80))


@pytest.mark.parametrize("count", [0, -1, MAX_SOCKETS + 1])
def test_a_count_out_of_range_is_refused(server: Nsinit, box: Sandbox, count: int) -> None:
    """nsinit checks the daemon's number."""
    answer, fds = server.ask(OpenSockets, session_id=box.session_id, count=count)
    assert isinstance(answer, Failed), answer
    assert fds == []


def test_a_session_that_is_not_there_has_no_sockets(server: Nsinit, box: Sandbox) -> None:
    """Neither one that never was nor one that has ended."""
    server.ask(Teardown, session_id=box.session_id)
    for session_id in (box.session_id, new_id()):
        answer, fds = server.ask(OpenSockets, session_id=session_id, count=1)
        assert isinstance(answer, Failed), answer
        assert answer.stage.startswith("network: ")
        assert fds == []
