"""Connections of streams: what is said of one that does not work, and that none is kept for nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio

import sandkasten.sync.transport
from sandkasten import errors
from sandkasten.model import Stream
from sandkasten.sdk import SandboxClient, Session, channels, transport
from sandkasten.sdk.files import FileStream
from sandkasten.sdk.transport import Lost
from sandkasten.sdk.wire import EXEC_PROTOCOL, call
from tests.api.harness import KEY, RunningTree, running_front
from tests.fakes.runner import Script
from tests.sdk.proxy import Cut, running_proxy
from tests.sdk.test_bad_servers import answering
from tests.sdk.twin import FLAVOURS, run
from tests.waiting import patience

MESSAGE = bytes(1024 * 1024)
HEAD = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
ACCEPTED = f"{HEAD}Sec-WebSocket-Accept: KEY\r\nSec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n"


@contextmanager
def answering_once(answer: str) -> Iterator[str]:
    """Answer one handshake, with the digest of its key for KEY (RFC 6455 §4.2.2), take nothing more, yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            kept.append(connection)
            key = re.search(rb"sec-websocket-key: (\S+)", connection.recv(64 * 1024), re.IGNORECASE)
            assert key
            digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            connection.sendall(answer.replace("KEY", base64.b64encode(digest).decode()).encode())

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
        for each in kept:
            each.close()


async def send_until_lost(client: SandboxClient) -> None:
    """A message that is not taken in time is no message that was sent, and none follows half of it."""
    connection = await client._transport.websocket(call("GET", "/"), EXEC_PROTOCOL)
    with pytest.raises(Lost, match="was lost"):
        await _fill(connection)
    with pytest.raises(Lost, match="is closed"):
        await connection.send("more")
    await connection.close()


async def _fill(connection: transport.WebSocket) -> None:
    for _ in range(20):  # what the kernel's buffers take is sent
        await connection.send(MESSAGE)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_message_that_nobody_takes_is_a_lost_connection(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio, on trio and in a thread."""
    for module in (transport, sandkasten.sync.transport):
        monkeypatch.setattr(module, "WRITE_S", 0.2)
    with answering_once(ACCEPTED) as url:
        make: Any = lambda cls: cls(base_url=url)  # noqa: E731 - of either client
        run(flavour, send_until_lost, make)


@pytest.mark.parametrize(
    "answer",
    [
        f"{HEAD}Sec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: other\r\nSec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: KEY\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: KEY\r\nSec-WebSocket-Protocol: other\r\n\r\n",
    ],
    ids=["no digest", "another digest", "no protocol", "another protocol"],
)
async def test_a_handshake_that_is_none_is_refused(answer: str) -> None:
    """As by a proxy that knows no WebSockets: runs are followed by events."""
    with answering_once(answer) as url:
        async with SandboxClient(base_url=url) as client:
            with pytest.raises(errors.SandkastenAPIError, match="no WebSockets"):
                await client._transport.websocket(call("GET", "/"), EXEC_PROTOCOL)


@asynccontextmanager
async def with_session(**settings: Any) -> AsyncIterator[tuple[RunningTree, SandboxClient, Session]]:
    """Serve scripted sandboxes to one client, with one session."""
    async with running_front(**settings) as running, SandboxClient(base_url=running.url, api_key=KEY) as client:
        yield running, client, await client.create_session()


async def _take(output: AsyncIterator[Any], connection: transport.WebSocket) -> bytes:
    """Read all, each piece after a call that was cancelled while another task sent."""

    async def send(*, task_status: trio.TaskStatus[None]) -> None:
        async with connection._lock:
            task_status.started()
            await trio.sleep_forever()

    taken = b""
    with trio.fail_after(patience()):
        while True:
            async with trio.open_nursery() as nursery:
                await nursery.start(send)
                with trio.move_on_after(0.01):
                    taken += _bytes_of(await anext(output, None))
                nursery.cancel_scope.cancel()
            if (piece := await anext(output, None)) is None:
                return taken
            taken += _bytes_of(piece)


def _bytes_of(piece: Any) -> bytes:  # of a run or of a terminal
    return piece if isinstance(piece, bytes) else piece.data if piece else b""


async def test_a_cancelled_reader_loses_no_output() -> None:
    """Output of a run and of a terminal, when the credit for a piece could not be sent."""
    parts = [bytes([number]) * 32 * 1024 for number in range(60)]
    script = Script([(Stream.STDOUT, each) for each in parts])
    async with with_session() as (running, _client, box):
        running.tree.scripts.update({"much": script, "": script})  # a terminal's command is empty
        async with box.start(["much"], raw=True) as run:
            first = _bytes_of(await anext(run))
            assert isinstance(run._feed, channels.ChannelFeed)
            assert run._feed._joined
            assert first + await _take(run, run._feed._joined[0]._socket) == b"".join(parts)
        async with box.terminal() as terminal:
            assert terminal._socket
            first = await anext(terminal)
            assert first + await _take(terminal, terminal._socket) == b"".join(parts)


async def test_a_session_has_one_websocket_and_an_unused_one_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects of a session share it; one that is too old or too many is closed when another session needs one."""
    async with with_session() as (_running, client, box):
        pool, links = client._transport._pool, client._transport.links

        async def stream(session_id: str) -> int:
            session = await client.get_session(session_id)
            assert [each.done async for each in session.exec_stream("x")] == [True]
            return sum(not each.is_idle() for each in pool.connections)

        assert [await stream(box.id) for _ in range(5)] == [1] * 5
        ids = [(await client.create_session()).id for _ in range(4)]
        assert [await stream(each) for each in ids] == [2, 3, 4, 5]
        monkeypatch.setattr(channels, "_UNUSED", 2)
        last = [(await client.create_session()).id for _ in range(3)]
        assert await stream(last[0]) == 3  # the two that were used last, and its own
        assert len(links) == 4
        async with box.start("x", detach=True):
            monkeypatch.setattr(channels, "_IDLE_S", 0.0)
            assert await stream(last[1]) == 2
            assert await stream(last[2]) == 2
        assert set(links) == {f"/v1/sessions/{each}" for each in (box.id, last[2])}


async def test_a_file_goes_on_after_a_cancelled_read() -> None:
    """An archive, which can't be read on, ends with an error and not as if it were whole."""
    content = bytes(range(256)) * 40_000
    async with with_session() as (_running, _client, box):
        await box.files.write("f", content)
        await trio.sleep(0.05)  # a file that changed just now has no version to go on with
        async with box.files.open("f") as stream:
            taken = await _give_up(stream)
            assert taken + b"".join([piece async for piece in stream]) == content
        async with box.files.open("f") as stream:
            stream._offset = None  # as of an archive
            await _give_up(stream)
            with pytest.raises(errors.ConnectionFailed, match="given up"):
                await anext(stream)


async def _give_up(stream: FileStream) -> bytes:
    """Read what has come, up to a read that waits and is cancelled."""
    taken = b""
    while True:
        with trio.CancelScope() as scope:
            scope.cancel()
            taken += await anext(stream)
        if scope.cancelled_caught:
            return taken


async def test_every_wait_of_a_client_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's timeout ends what moves a directory, too, and a wait for a connection where all are in use."""
    async with answering([None]) as (url, _), SandboxClient(base_url=url, timeout=0.2) as client:
        files = client.session("0123456789abcdef").files
        for work in (files.move("a", "b"), files.copy("a", "b"), files.remove("a", recursive=True)):
            with trio.fail_after(patience()), pytest.raises(errors.DeadlineExceeded, match="nothing was heard"):
                await work
    monkeypatch.setattr(transport, "_CONNECTIONS", 1)
    async with (
        running_front() as running,
        SandboxClient(base_url=running.url, api_key=KEY, timeout=0.2) as client,
        client.events(),
    ):
        with trio.fail_after(patience()), pytest.raises(errors.DeadlineExceeded, match="all 1 connections"):
            await client.workspace("w").files.read_bytes("f")


async def test_a_run_is_there_once_its_block_is_entered() -> None:
    """A run that waits for its shell, too; a caller that gives up by then leaves nothing, and the others alone."""
    async with with_session() as (running, client, box):
        turns = [trio.Event(), trio.Event()]
        running.tree.scripts.update({"held": Script(hold=turns[0]), "next": Script(hold=turns[1])})
        with trio.fail_after(patience()):
            async with box.start("held") as held, box.start("next") as waits:
                assert (await running.supervisor.get_exec(box.id, waits.id)).state.value == "queued"
                for run in (held, waits):
                    assert isinstance(run._feed, channels.ChannelFeed)
                    assert run._feed._joined
                    assert run._feed._joined[1].is_known
                (link,) = client._transport.open_links
                connection = link._socket._socket
                with trio.CancelScope() as scope:
                    async with connection._lock:
                        scope.cancel()
                        async with box.start("next"):
                            pass
                assert scope.cancelled_caught
                assert (len(link._socket.channels), link._socket.is_usable) == (2, True)
                turns[0].set()
                turns[1].set()
                assert (await waits.wait()).cause == "exited"


async def test_a_command_without_an_id_is_asked_for_once() -> None:
    """One that was lost is uncertain: on its way it is not sent again as a request, and its events are not resumed."""
    async with with_session() as (running, _client, box):
        box._link.go_on_without_ids()
        assert [each.done async for each in box.exec_stream("x")] == [True]
        assert box._link._socket
        await box._link._socket._socket._stream.aclose()
        with pytest.raises(errors.Uncertain, match="no id"):
            await box.start("x").wait()
        assert len(running.tree.runs) == 1
        box._link._refusals, box._link._again_at = 2, math.inf
        running.tree.scripts["held"] = Script([(Stream.STDOUT, b"x")], hold=trio.Event())
        async with box.start("held") as run:
            assert (await anext(run)).data == "x"
            await running.stop()
            with pytest.raises(errors.Uncertain, match="no id"):
                await anext(run)


async def test_lost_handshakes_do_not_count_for_ever() -> None:
    """Two of them make the client follow runs by events, for a time."""
    async with (
        running_front() as running,
        running_proxy(running.port) as proxy,
        SandboxClient(base_url=proxy.url, api_key=KEY) as client,
    ):
        box = await client.create_session()

        async def follow(*cuts: Cut) -> int:
            await client._transport._pool.aclose()
            proxy.cuts = list(cuts)
            proxy.requests.clear()
            assert [each.done async for each in box.exec_stream("x")] == [True]
            return len([line for line in proxy.requests if b"exec/ws" in line])

        assert await follow(Cut(5, of_request=False)) == 1
        assert await follow(Cut(5, of_request=False)) == 1
        assert await follow() == 0
        box._link._again_at -= channels._AGAIN_S
        assert await follow() == 1
        assert len(running.tree.runs) == 4


async def test_a_wait_lasts_as_long_as_it_was_asked_for() -> None:
    """A server may allow no such wait at once."""
    async with with_session(max_exec_timeout_ms=100) as (running, _client, box):
        running.tree.scripts["held"] = Script(hold=trio.Event())
        run = await box.process("held")
        began = trio.current_time()
        assert not (await run.wait_for(pattern="x", timeout_ms=350)).happened
        assert trio.current_time() - began >= 0.35
