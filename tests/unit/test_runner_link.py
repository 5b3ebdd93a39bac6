"""The daemon's end of a connection to PID 1, on a plain pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from runner.wire.protocol import FROM_DAEMON, MAX_FRAME_BYTES, MAX_REQUEST_BYTES, Exec, FrameDecoder, Kind, encode_frame
from sandkasten.actors.workspaces.files import LocalFileStream
from sandkasten.errors import RunnerLost
from sandkasten.links.runner import RunnerConnection
from tests.waiting import patience


@pytest.fixture
async def peer() -> AsyncIterator[tuple[RunnerConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    connection = RunnerConnection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


async def test_a_late_answer_is_no_breach_of_the_contract(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """A sandbox starved of CPU is not hostile."""
    with pytest.raises(RunnerLost):
        await peer[0].receive(deadline=trio.current_time() + 0.01)


async def test_an_answer_that_came_is_not_late(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """The daemon had no time to look."""
    connection, theirs = peer
    theirs.send(encode_frame(Kind.STDOUT, b"x"))
    assert await connection.receive(deadline=trio.current_time() - 1) == (Kind.STDOUT, b"x")


async def test_pieces_that_came_give_no_task_a_turn_but_after_many(
    peer: tuple[RunnerConnection, socket.socket],
) -> None:
    """A switch of tasks would cost more than a piece of a line."""
    connection, theirs = peer
    theirs.send(encode_frame(Kind.STDOUT, b"x") * 100)
    await connection.receive()
    with trio.testing.assert_no_checkpoints():
        for _ in range(20):
            await connection.receive()
    with trio.testing.assert_checkpoints():
        for _ in range(40):
            await connection.receive()


async def test_whoever_waits_can_be_told_to_wait_less(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """A cancel shortens the patience of the driver that waits already."""
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(RunnerLost):
                await peer[0].receive()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        peer[0].hasten(trio.current_time() + 0.01)


async def test_a_frame_that_was_cut_is_finished_by_the_next(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """A sender who was cancelled half-way does not garble what another one sends."""
    connection, theirs = peer
    big = bytes(8 * 1024 * 1024)
    with trio.move_on_after(0.05):
        await connection.send(Kind.DATA, big)
    assert connection.is_sending
    with trio.move_on_after(0.05):  # nothing of this one is sent, and nothing of the first forgotten
        await connection.send(Kind.DATA, b"late")
    assert connection.is_sending
    decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
    frames: list[tuple[Kind, int]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.send, Kind.END)
        while len(frames) < 2:
            await trio.lowlevel.wait_readable(theirs)
            decoder.feed(theirs.recv(1024 * 1024))
            frames += [(kind, len(body)) for kind, body in decoder]
    assert frames == [(Kind.DATA, len(big)), (Kind.END, 0)]
    assert not connection.is_sending


async def test_nothing_overtakes_a_request_that_does_not_fit(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """The socket takes a part at once; what another task sends then comes behind the rest."""
    connection, theirs = peer
    request = Exec("a", "x" * 4 * 1024 * 1024)
    decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
    frames: list[Kind] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.send_request, request)
        await trio.testing.wait_all_tasks_blocked()
        assert connection.is_sending
        nursery.start_soon(connection.send, Kind.END)
        while len(frames) < 2:
            await trio.lowlevel.wait_readable(theirs)
            decoder.feed(theirs.recv(1024 * 1024))
            frames += [kind for kind, _ in decoder]
    assert frames == [Kind.REQUEST, Kind.END]
    assert not connection.is_sending


async def test_content_that_does_not_go_on_ends(peer: tuple[RunnerConnection, socket.socket]) -> None:
    """Each piece has its time, whatever the whole may take, and the error says what did not come or go."""
    connection, theirs = peer
    theirs.send(encode_frame(Kind.DATA, b"x"))
    stream = LocalFileStream(connection, patience(), piece_s=0.01)
    assert await anext(stream) == b"x"
    with pytest.raises(RunnerLost, match="nothing has come from the sandbox"):
        await anext(stream)
    with pytest.raises(RunnerLost, match="taken nothing of the content"):
        await stream.send(bytes(64 * MAX_FRAME_BYTES))
