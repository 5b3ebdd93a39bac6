"""Bytes of carried connections: all of them, in order, in both directions, whatever either side does."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest
import trio

from egress import barrier, relay
from tests.egress.harness import PUBLIC, Inside, Names, Program, egress, is_reset, program, read_all, server
from tests.waiting import patience, until

pytestmark = pytest.mark.usefixtures("outside")

MUCH = 64 * 1024 * 1024
_PIECE = 1024 * 1024


def names() -> Names:
    return Names(**{"good.example": [PUBLIC]})


async def send_much(stream: trio.SocketStream) -> str:
    """Send many bytes, end the stream, and return their digest."""
    digest = hashlib.sha256()
    for _ in range(MUCH // _PIECE):
        piece = os.urandom(_PIECE)
        digest.update(piece)
        await stream.send_all(piece)
    await stream.send_eof()
    return digest.hexdigest()


async def digest_of(stream: trio.SocketStream) -> tuple[str, int]:
    """Return digest and length of what comes."""
    digest, size = hashlib.sha256(), 0
    async for piece in stream:
        digest.update(piece)
        size += len(piece)
    return digest.hexdigest(), size


async def both_ways(stream: trio.SocketStream, results: dict[str, object], side: str) -> None:
    async def send() -> None:
        results[f"{side} sent"] = await send_much(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        results[f"{side} got"] = await digest_of(stream)


async def test_64_mib_both_ways_at_once() -> None:
    """Equal digests on both sides, and counted to the byte."""
    results: dict[str, object] = {}
    is_over = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await both_ways(stream, results, "server")
        is_over.set()

    async with egress(names()) as daemon, server(PUBLIC, 5000, serve):
        inside = await daemon.attach("good.example:5000")
        stream = await inside.connect_to("good.example", 5000)
        async with stream:
            with trio.fail_after(patience(30)):
                await both_ways(stream, results, "client")
                await is_over.wait()
        assert results["client got"] == (results["server sent"], MUCH)
        assert results["server got"] == (results["client sent"], MUCH)
        entry = await daemon.entry(kind="tcp")
        assert (entry.bytes_up, entry.bytes_down, entry.cause) == (MUCH, MUCH, "end")
    assert relay._Buffer.kept == 0


async def test_the_client_ends_first() -> None:
    """The server sees the end, and what it sends after that arrives."""

    async def late(stream: trio.SocketStream) -> None:
        everything = await read_all(stream)
        await stream.send_all(everything[::-1])

    async with egress(names()) as daemon, server(PUBLIC, 5000, late):
        inside = await daemon.attach("good.example:5000")
        stream = await inside.connect_to("good.example", 5000)
        async with stream:
            await stream.send_all(b"\x01\x02\x03")
            await stream.send_eof()
            assert await read_all(stream) == b"\x03\x02\x01"


async def test_the_server_ends_first() -> None:
    """The client sees the end, and what it sends after that arrives."""
    got: list[bytes] = []
    is_over = trio.Event()

    async def early(stream: trio.SocketStream) -> None:
        await stream.send_all(b"bye")
        await stream.send_eof()
        got.append(await read_all(stream))
        is_over.set()

    async with egress(names()) as daemon, server(PUBLIC, 5000, early):
        inside = await daemon.attach("good.example:5000")
        stream = await inside.connect_to("good.example", 5000)
        async with stream:
            assert await read_all(stream) == b"bye"
            await stream.send_all(b"\x01 more")
            await stream.send_eof()
            with trio.fail_after(patience()):
                await is_over.wait()
        assert got == [b"\x01 more"]


async def test_a_reset_is_passed_on() -> None:
    """A server that breaks off looks so to the client, too."""

    async def break_off(stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        relay.close(stream.socket._sock, with_reset=True)  # type: ignore[attr-defined]

    async with egress(names()) as daemon, server(PUBLIC, 5000, break_off):
        inside = await daemon.attach("good.example:5000")
        stream = await inside.connect_to("good.example", 5000)
        async with stream:
            await stream.send_all(b"\x01")
            assert await is_reset(stream)
        assert (await daemon.entry(verdict="allowed")).cause == "ECONNRESET"


async def test_a_slow_reader_holds_its_server_up_and_nobody_else() -> None:
    """The bytes on their way are bounded; other connections go on; later all bytes arrive."""
    sent: list[str] = []

    async def much(stream: trio.SocketStream) -> None:
        if await stream.receive_some(1) == b"\x01":
            sent.append(await send_much(stream))
        else:
            await stream.send_all(b"quick")

    async with egress(names()) as daemon, server(PUBLIC, 5000, much):
        inside = await daemon.attach("good.example:5000")
        slow = await inside.connect_to("good.example", 5000)
        async with slow:
            await slow.send_all(b"\x01")
            with trio.fail_after(patience()):
                while (await daemon.counters()).bytes_down < 1024:
                    pass
            quick = await inside.connect_to("good.example", 5000)
            async with quick:
                await quick.send_all(b"\x02")
                assert await read_all(quick) == b"quick"
            assert sent == []
            with trio.fail_after(patience(30)):
                digest, size = await digest_of(slow)
        assert (sent, size) == ([digest], MUCH)


async def test_hostile_chunks_hold_up_no_other_session() -> None:
    """Reading bodies in chunks of one byte takes milliseconds of the process, and one session has as many connections
    with them as it may: each answer of another session waits for one of those, not for all.
    """
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"1\r\na\r\n" * 10_000

    async def swallow(stream: trio.SocketStream) -> None:
        while await stream.receive_some(65536):
            pass

    async def flood(hostile: Inside, synthetic: str) -> None:
        async with await hostile.connect(synthetic, 80) as stream:
            await stream.send_all(head)
            while True:
                await stream.send_all(chunks)

    async with program("127.0.0.0/8") as process, server("127.0.0.1", 80, swallow), server("127.0.0.1", 5000):
        hostile = await process.daemon.attach("localhost")
        other = await process.daemon.attach("localhost:5000", name="s-2")
        synthetic = await hostile.address_of("localhost")
        async with await other.connect_to("localhost", 5000) as stream, trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(flood, hostile, synthetic)

            async def is_flooded() -> bool:
                return (await process.daemon.counters()).bytes_up > 1 << 20

            await until(is_flooded)
            waited = []
            for _ in range(10):
                begin = trio.current_time()
                await stream.send_all(b"\x01")
                assert await stream.receive_some(1) == b"\x01"
                waited.append(trio.current_time() - begin)
            nursery.cancel_scope.cancel()
        assert sorted(waited)[len(waited) // 2] < patience(0.5)


class Counted:
    """Bytes that arrived at one side."""

    def __init__(self) -> None:
        self.size = 0
        self._grown = trio.Event()

    async def receive(self, stream: trio.SocketStream) -> None:
        """Count what comes, to the stream's end."""
        async for data in stream:
            self.size += len(data)
            self._grown.set()
            self._grown = trio.Event()

    async def next(self, size: int) -> None:
        """Wait until so many bytes more have come."""
        wanted = self.size + size
        while self.size < wanted:
            await self._grown.wait()


async def flood(stream: trio.SocketStream, counted: Counted) -> None:
    """Send without an end, and count what comes."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.receive, stream)
        while True:
            await stream.send_all(bytes(relay.SMALL_CHUNK_BYTES))


async def test_bandwidth_is_what_the_limits_say() -> None:
    """Each direction has its own rate beside the other at another; a change counts for the open connection."""
    came, heard = Counted(), Counted()

    async def measured(size: int) -> tuple[float, float]:
        """Return bytes in a second that came down and went up, while `size` bytes came down."""
        began, down, up = trio.current_time(), came.size, heard.size
        await came.next(size)
        span = trio.current_time() - began
        return (came.size - down) / span, (heard.size - up) / span

    async with egress(names()) as daemon, server(PUBLIC, 5000, partial(flood, counted=heard)):
        inside = await daemon.attach("good.example:5000", mbit_up=16, mbit_down=64)
        async with await inside.connect_to("good.example", 5000) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(flood, stream, came)
            with trio.fail_after(patience(60)):
                await came.next(4 * _PIECE)  # the beginning is faster, and so is what fills the buffers
                await heard.next(4 * _PIECE)
                down, up = await measured(8 * _PIECE)
                await daemon.set_policy("good.example:5000", mbit_up=64, mbit_down=16)
                await came.next(2 * _PIECE)
                down_then, up_then = await measured(3 * _PIECE)
            nursery.cancel_scope.cancel()
    for quick, slow in ((down, up), (up_then, down_then), (down, down_then), (up_then, up)):
        assert 2.5 < quick / slow < 6


def _memory_of(process: Program) -> tuple[Path, Path | None]:
    """Return the files with the memory of a process, and with that of its sockets where they are counted apart."""
    for cgroup in map(Path, process.cgroups):
        if (cgroup / "memory.current").exists():
            return cgroup / "memory.current", None
        if (cgroup / "memory.kmem.tcp.limit_in_bytes").exists():
            (cgroup / "memory.kmem.tcp.limit_in_bytes").write_text(str(1 << 40))  # without a limit nothing is counted
            return cgroup / "memory.usage_in_bytes", cgroup / "memory.kmem.tcp.usage_in_bytes"
    pytest.skip("no cgroup counts memory here")


async def test_what_nobody_reads_leaves_memory_for_others() -> None:
    """All connections of a session, with servers that take nothing and send without an end, don't fill the memory of
    the process, in a v1 tree not even if that of sockets is added."""

    async def send(stream: trio.SocketStream) -> None:
        while True:
            await stream.send_all(bytes(1 << 16))

    async def hold(inside: Inside, address: str) -> None:
        async with await inside.connect(address, 5000) as stream:
            await send(stream)

    async with program("127.0.0.0/8", descriptors=4096) as process, server("127.0.0.1", 5000, send):
        memory, of_sockets = _memory_of(process)
        inside = await process.daemon.attach("localhost:5000")
        address = await inside.address_of("localhost")
        async with trio.open_nursery() as nursery:
            for _ in range(256):
                nursery.start_soon(hold, inside, address)
            carried = -1
            while True:
                counters = await process.daemon.counters()
                if counters.connections_open == 256 and carried == counters.bytes_up + counters.bytes_down:
                    break
                carried = counters.bytes_up + counters.bytes_down
                await trio.sleep(0.5)
            held = sum(int(file.read_text()) for file in (memory, of_sockets) if file is not None)
            nursery.cancel_scope.cancel()
    assert held < barrier.MEMORY_BYTES
