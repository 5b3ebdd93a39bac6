"""The egress process and its daemon: requests, endings, descriptors, and a daemon that does not read."""

from __future__ import annotations

import array
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from egress import protocol as p
from egress import server as egress_server
from egress import state
from egress.state import OWN_DESCRIPTORS
from tests.egress.harness import PUBLIC, Egress, Inside, Names, egress, is_refused, is_reset, program, server
from tests.waiting import patience, until

pytestmark = pytest.mark.usefixtures("outside")


def names() -> Names:
    return Names(**{"good.example": [PUBLIC]})


def descriptors(pid: int = os.getpid()) -> list[str]:
    """Return what the descriptors of a process are."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except FileNotFoundError:
            pass  # the one that lists
    return sorted(found)


async def failure(daemon: Egress, request: p.EgressRequest, *fds: int) -> str:
    answer = await daemon.ask(lambda seq: attrs.evolve(request, seq=seq), fds)
    assert isinstance(answer, p.EgressFailed), answer
    return answer.code


async def test_requests_that_fail_change_nothing() -> None:
    """Each with its code; descriptors that came along are closed, and the next request is served."""
    policy = p.PolicyText("allow", ("good.example",))
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        before = descriptors()
        assert await failure(daemon, p.Configure(0)) == "CONFIGURED"
        assert await failure(daemon, p.AttachSession(0, "s-1", policy), *inside.fds) == "SESSION_EXISTS"
        assert await failure(daemon, p.AttachSession(0, "s-2", policy)) == "DESCRIPTORS"
        assert await failure(daemon, p.AttachSession(0, "s-2", policy), *reversed(inside.fds)) == "DESCRIPTORS"
        assert await failure(daemon, p.AttachSession(0, "s-2", policy), *inside.fds[1::-1]) == "DESCRIPTORS"
        bad = p.PolicyText("allow", ("*",))
        assert await failure(daemon, p.AttachSession(0, "s-2", bad), *inside.fds) == "INVALID"
        assert await failure(daemon, p.SetPolicy(0, "s-1", bad)) == "INVALID"
        for request in (p.SetPolicy(0, "s-2", policy), p.DetachSession(0, "s-2"), p.DescribeSession(0, "s-2")):
            assert await failure(daemon, request) == "SESSION_UNKNOWN"
        assert descriptors() == before
        assert (await inside.ask("good.example")).address


async def test_nothing_is_served_before_the_configuration() -> None:
    """A configuration with a network or a rule that is none is refused, and may be sent again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon = Egress(ours)
    with theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(egress_server.serve, theirs, names())
            nursery.start_soon(daemon.read)
            assert await failure(daemon, p.DescribeSession(0, "s-1")) == "NOT_CONFIGURED"
            assert await failure(daemon, p.Configure(0, permit=("10.0.0.1/8",))) == "INVALID"
            assert await failure(daemon, p.Configure(0, always_deny=("*",))) == "INVALID"
            assert await daemon.ask(lambda seq: p.Configure(seq)) == p.Configured(4)
            daemon.reading.cancel()
            daemon.close()


async def test_a_detached_session_leaves_nothing() -> None:
    """Connections are reset and logged before the answer; the descriptors are closed, so nothing is steered."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        before = descriptors()
        inside = await daemon.attach("good.example:5000")
        synthetic = await inside.address_of("good.example")
        stream = await inside.connect(synthetic, 5000)
        async with stream:
            await stream.send_all(b"\x01")
            assert await stream.receive_some(1) == b"\x01"
            await daemon.done(lambda seq: p.DetachSession(seq, "s-1"))
            assert [each.cause for each in daemon.entries] == ["detached"]
            inside.close_copies()
            assert await is_reset(stream)
        with pytest.raises(ConnectionRefusedError):
            await inside.connect(synthetic, 5000)

        async def closed() -> bool:
            return len(descriptors()) == len(before) + 1  # the test's own, of the namespace

        await until(closed)


async def test_a_refusal_is_told_at_once_whatever_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The many refusals of one session come together, and no other waits for those."""
    monkeypatch.setattr(egress_server, "_BATCH_S", 1e6)
    monkeypatch.setattr(state, "PROMPT_RATE", 1e-6)
    async with egress(names()) as daemon:
        noisy, other = [await daemon.attach("good.example", name=name) for name in ("s-1", "s-2")]
        for number in range(int(state.PROMPT_BURST) + 20):
            assert (await noisy.ask(f"{number}.bad.example")).code == 3
        assert (await other.ask("bad.example")).code == 3
        await daemon.entry(session_id="s-2", host="bad.example")


async def test_totals_of_all_sessions_are_told() -> None:
    """Connections and questions by verdict, and bytes, also of a connection that is open; with no request for them. A
    session that has gone stays counted, and the time of the dial is with the entry."""
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000")
        synthetic = await inside.address_of("good.example")
        assert await is_refused(inside, synthetic, 5001)
        await inside.ask("bad.example")
        stream = await inside.connect(synthetic, 5000)
        async with stream:
            await stream.send_all(b"\x01")
            assert await stream.receive_some(1) == b"\x01"
            await daemon.until(lambda: daemon.totals.bytes_down == 1)
            assert daemon.totals.connections_open == 1
        await daemon.done(lambda seq: p.DetachSession(seq, "s-1"))
        await daemon.until(lambda: daemon.totals.connections_open == 0)
        asked = daemon.totals.dns_allowed  # once for each kind of address
        assert asked >= 1
        assert daemon.totals == p.EgressTotals(0, 1, 1, len("good.example") + 1, 1, asked, 1, 0)
        carried = await daemon.entry(verdict="allowed")
        assert carried.dial_ms is not None
        assert 0 < carried.dial_ms < 60_000
        assert (await daemon.entry(verdict="denied", kind="tcp")).dial_ms is None


async def test_a_daemon_that_does_not_read_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections go on; entries for which there is no room are counted, and the count arrives later."""
    monkeypatch.setattr(egress_server, "MAX_QUEUED_ENTRIES", 20)
    monkeypatch.setattr(egress_server, "_ENTRIES_S", 0.2)
    async with egress(names()) as daemon, server(PUBLIC, 5000):
        inside = await daemon.attach("good.example:5000")
        synthetic = await inside.address_of("good.example")
        daemon.reading.cancel()
        total = 700
        for _ in range(total):
            assert await is_refused(inside, synthetic, 5001)
        stream = await inside.connect(synthetic, 5000)
        async with stream:
            await stream.send_all(b"\x01")
            assert await stream.receive_some(1) == b"\x01"
            daemon.reading = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.read)
                assert (await daemon.counters()).denied == total
                await stream.send_eof()
                await daemon.entry(verdict="allowed")
                daemon.reading.cancel()
        assert daemon.dropped > 0
        assert daemon.dropped + len(daemon.entries) == total + 1


# The program


def events(log: list[dict[str, object]]) -> list[object]:
    """Return the events of a log, without what this machine lacks."""
    return [each["event"] for each in log if each["event"] != "less_protected"]


async def test_the_process_ends_with_its_daemon() -> None:
    """The socket's end is the end, without an error, and connections break."""
    async with program("127.0.0.0/8") as process, server("127.0.0.1", 5000):
        inside = await process.daemon.attach("localhost:5000")
        stream = await inside.connect_to("localhost", 5000)
        async with stream:
            await stream.send_all(b"\x01")
            assert await stream.receive_some(1) == b"\x01"
            process.daemon.reading.cancel()
            process.daemon.channel.close()
            with trio.fail_after(patience()):
                status, log = await process.ended()
            assert (status, events(log)) == (0, ["started"])
            assert await is_reset(stream)


@pytest.mark.parametrize(
    "garbage", [b"garbage", b'{"type":"Configured","seq":1,"version":1}', bytes(p.MAX_DATAGRAM_BYTES + 1)]
)
async def test_garbage_is_the_end(garbage: bytes) -> None:
    """Bytes that are no request end the process with a line in the log and a status, descriptors with them or not."""
    async with program() as process:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 5))]
        await process.daemon.channel.sendmsg([garbage], rights)
        with trio.fail_after(patience()):
            status, log = await process.ended()
        assert status == 1
        assert events(log) == ["started", "protocol"]


async def test_connections_wait_while_there_are_no_descriptors() -> None:
    """Connections that no descriptor is left for stay in the backlog, and are served when others have ended."""
    room = 5
    limit = OWN_DESCRIPTORS + p.MAX_FDS + 2 * room + 1
    async with program("127.0.0.0/8", descriptors=limit) as process, server("127.0.0.1", 5000):
        inside = await process.daemon.attach("localhost:5000")
        synthetic = await inside.address_of("localhost")
        streams = [await inside.connect(synthetic, 5000) for _ in range(2 * room)]
        for stream in streams[:room]:
            assert await answers(stream)

        async def is_paused() -> bool:
            return "fault" in process.log_so_far()

        await until(is_paused)
        assert (await process.daemon.counters()).connections == room
        for stream in streams[:room]:
            await stream.aclose()
        for stream in streams[room:]:
            assert await answers(stream)
            await stream.aclose()


async def test_ten_thousand_connections_of_a_crowd_leave_others_served() -> None:
    """The process has as many as it may, and resets the others; another session is answered all the while."""
    sessions, each_has = 20, 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with program(descriptors=20_000) as process:
            names = [f"s-{number}" for number in range(sessions)]
            crowd = [
                await process.daemon.attach(
                    mode="ask", name=name, connections=each_has, rate=1e6, burst=10**6, ask_s=1e6
                )
                for name in names
            ]
            other = await process.daemon.attach(name="other")
            for each in crowd:
                for _ in range(each_has):
                    with suppress(ConnectionResetError, ConnectionRefusedError):
                        await each.socket(socket.SOCK_STREAM).connect(("9.9.9.9", 80))
                assert (await other.ask("no.example")).code == 3

            async def are_all_taken_or_reset() -> bool:
                counted = [await process.daemon.counters(name) for name in names]
                assert sum(each.connections_open for each in counted) <= state.MAX_CONNECTIONS
                return sum(each.connections_open + each.denied for each in counted) == sessions * each_has

            await until(are_all_taken_or_reset)
            assert (await other.ask("no.example")).code == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_session_that_no_descriptor_is_left_for_is_refused() -> None:
    """The request fails with a reason, and a session that was there before goes on."""
    policy = p.PolicyText("allow", ("localhost:5000",))
    limit = OWN_DESCRIPTORS + 2 * p.MAX_FDS + 2
    async with program("127.0.0.0/8", descriptors=limit) as process, server("127.0.0.1", 5000):
        first = await process.daemon.attach("localhost:5000")
        with closing(Inside()) as other:

            async def attach(name: str) -> p.EgressAnswer:
                return await process.daemon.ask(partial(p.AttachSession, session_id=name, policy=policy), other.fds)

            assert isinstance(await attach("s-2"), p.Accomplished)
            refused = await attach("s-3")
            assert isinstance(refused, p.EgressFailed)
            assert (refused.code, "RLIMIT_NOFILE" in refused.message) == ("DESCRIPTORS", True)
            await process.daemon.done(lambda seq: p.DetachSession(seq, "s-2"))
            stream = await first.connect(await first.address_of("localhost"), 5000)
            async with stream:
                assert await answers(stream)


async def test_descriptors_that_do_not_arrive_are_refused() -> None:
    """Where the kernel has none for them the request fails, and the process goes on."""
    policy = p.PolicyText("allow", ("good.example",))
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        with closing(Inside()) as other:
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))  # has room for one of the three
            try:
                answer = await daemon.ask(lambda seq: p.AttachSession(seq, "s-2", policy), other.fds)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(answer, p.EgressFailed)
        assert (answer.code, "none arrived" in answer.message) == ("DESCRIPTORS", True), answer
        assert (await inside.ask("good.example")).address


async def answers(stream: trio.SocketStream) -> bool:
    """Tell whether a byte comes back."""
    await stream.send_all(b"\x01")
    with trio.fail_after(patience()):
        return await stream.receive_some(1) == b"\x01"


# One daemon after the other -------------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(names: Names) -> AsyncIterator[tuple[bytes, Callable[[], int | None]]]:
    """Run the server at a socket that listens; yield its address, and what tells the status it has ended with."""
    address = b"\0egress of a test %d" % os.getpid()
    statuses: list[int] = []

    async def run(listener: socket.socket) -> None:
        statuses.append(await egress_server.serve(listener, names))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, listener)
            yield address, lambda: statuses[0] if statuses else None
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(address: bytes) -> AsyncIterator[Egress]:
    """Be a daemon at a server."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    daemon = Egress(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.read)
        yield daemon
        daemon.reading.cancel()
    daemon.channel.close()


async def taken(daemon: Egress) -> list[str]:
    """Take all sessions; return their ids."""
    found: list[str] = []
    while True:
        answer = await daemon.ask(p.TakeSession)
        assert isinstance(answer, p.SessionTaken)
        if not answer.session_id:
            return sorted(found)
        found.append(answer.session_id)


async def has_ended(status: Callable[[], int | None]) -> bool:
    return status() is not None


async def test_sessions_are_served_on_between_two_daemons() -> None:
    """Open connections live, names are answered, and what is not allowed stays so. The next daemon is told what was
    refused meanwhile, counts on from there, and says what holds from then on."""
    async with listening(names()) as (address, status), server(PUBLIC, 5000):
        async with connected(address) as first:
            assert await first.ask(p.Configure) == p.Configured(1)
            inside, other = [await first.attach("good.example:5000", name=name) for name in ("s-1", "s-2")]
            stream = await inside.connect_to("good.example", 5000)
        await stream.send_all(b"\x01")
        assert await stream.receive_some(1) == b"\x01"
        assert (await other.ask("bad.example")).code == 3
        async with await inside.connect_to("good.example", 5000) as second_stream:
            await second_stream.send_all(b"\x02")
            assert await second_stream.receive_some(1) == b"\x02"
        async with connected(address) as second:
            configured = await second.ask(p.Configure)
            assert isinstance(configured, p.Configured)
            assert (configured.is_as_asked, configured.totals.dns_denied) == (True, 1)
            assert second.entries == []  # about sessions that this daemon does not know of yet
            assert await taken(second) == ["s-1", "s-2"]
            await second.entry(session_id="s-2", host="bad.example")
            async with stream:
                await second.set_policy("other.example")
                assert await is_reset(stream)
            for name in ("s-1", "s-2"):
                await second.done(lambda seq, name=name: p.DetachSession(seq, name))  # type: ignore[misc]
        await until(partial(has_ended, status))  # nothing is left to serve
        assert status() == 0
        inside.close()
        other.close()


async def test_a_daemon_that_reads_nothing_and_ends_takes_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log entries wait for room in its socket when that is closed. The next daemon is served."""
    monkeypatch.setattr(egress_server, "_ENTRIES_S", 1e6)
    async with listening(names()) as (address, status):
        async with connected(address) as first:
            await first.done(p.Configure)
            inside = await first.attach("good.example:5000")
            synthetic = await inside.address_of("good.example")
            first.reading.cancel()
            for _ in range(700):
                assert await is_refused(inside, synthetic, 5001)
        async with connected(address) as second:
            await second.done(p.Configure)
            assert await taken(second) == ["s-1"]
        assert status() is None
        inside.close()


async def test_sessions_without_a_daemon_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all descriptors are closed, and connects are refused."""
    async with listening(names()) as (address, status):
        async with connected(address) as daemon:
            await daemon.done(p.Configure)
            inside = await daemon.attach("good.example:5000")
            synthetic = await inside.address_of("good.example")
            inside.close_copies()
            monkeypatch.setattr(egress_server, "ORPHAN_S", 0.1)
        await until(partial(has_ended, status))
        with pytest.raises(ConnectionRefusedError):
            await inside.connect(synthetic, 5000)
        inside.close()


@pytest.mark.parametrize(
    "change",
    [
        {"permit": ("10.0.0.0/8",)},
        {"always_deny": ("a.example",)},
        {"upstream": p.UpstreamProxy("10.0.0.1", 3128)},
        {"version": p.VERSION + 1},
    ],
)
async def test_a_process_that_was_configured_otherwise_gives_its_sessions_away(change: dict[str, Any]) -> None:
    """Nothing changes for a daemon that wants something else, which takes the descriptors and ends the process."""
    async with listening(names()) as (address, status):
        async with connected(address) as first:
            await first.done(p.Configure)
            inside = await first.attach("good.example:5000")
        async with connected(address) as second:
            configured = await second.ask(lambda seq: p.Configure(seq, **change))
            assert isinstance(configured, p.Configured)
            assert not configured.is_as_asked
            assert await failure(second, p.SetPolicy(0, "s-1", p.PolicyText("open"))) == "CONFIGURED"
            assert await failure(second, p.DetachSession(0, "s-1")) == "CONFIGURED"
            assert await taken(second) == ["s-1"]
            await second.done(p.EndProcess)
            await until(partial(has_ended, status))
        inside.close()


async def test_another_user_is_no_daemon() -> None:
    """A connection of another user than the first daemon's, and not of root's, is closed."""
    program = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    program += "s.connect(chr(0) + sys.argv[1]); s.settimeout(20); sys.exit(len(s.recv(1)))"
    async with listening(names()) as (address, _):
        async with connected(address) as daemon:
            await daemon.done(p.Configure)
            inside = await daemon.attach("good.example")
        command = [sys.executable, "-I", "-S", "-c", program, address[1:].decode()]
        done = await trio.run_process(command, check=False)
        assert done.returncode == 0
        async with connected(address) as daemon:
            await daemon.done(p.Configure)
            assert await taken(daemon) == ["s-1"]
        inside.close()
