"""DNS of a session: what is answered, from where, and what the resolver outside gets to hear."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from egress import protocol as p
from egress import resolver, way_out
from egress.names import RANGE
from egress.resolver import LookupFailed, LookupShare, NameResolver, NoSuchName
from tests.egress.harness import PRIVATE, PUBLIC, Answer, Names, egress, is_refused, question
from tests.waiting import patience, until

pytestmark = pytest.mark.usefixtures("outside")

A, AAAA, TXT, HTTPS = 1, 28, 16, 65


def names() -> Names:
    return Names(
        **{"good.example": [PUBLIC], "empty.example": [], "hang.example": [PUBLIC], "private.example": [PRIVATE]}
    )


async def test_a_name_that_is_not_allowed_does_not_exist() -> None:
    """NXDOMAIN with the extended error `filtered`, and nobody outside is asked; told of once for A and AAAA."""
    outside = names()
    async with egress(outside) as daemon:
        inside = await daemon.attach("good.example")
        for kind in (A, AAAA, TXT):
            answer = await inside.ask("secret-in-a-name.example", kind)
            assert (answer.code, answer.extended, answer.address) == (3, 17, None)
        assert outside.asked == []
        entry = await daemon.entry(kind="dns")
        assert (entry.host, entry.verdict, entry.reason) == ("secret-in-a-name.example", "denied", "not_allowed")
        counters = await daemon.counters()
        assert (counters.dns_queries, counters.dns_denied, counters.denied) == (3, 3, 0)
        assert len(daemon.entries) == 1


async def test_an_allowed_name_has_one_synthetic_address_and_nothing_else() -> None:
    """An A record with a short life; no AAAA, no HTTPS record; letters of the question come back as they were."""
    outside = names()
    async with egress(outside) as daemon:
        inside = await daemon.attach("good.example", "empty.example")
        answer = await inside.ask("GooD.example")
        assert answer.address is not None
        assert ip_address(answer.address) in RANGE
        assert answer.ttl == way_out.ANSWER_TTL_S
        assert b"\x04GooD\x07example" in answer.data
        for name, kind in (("good.example", AAAA), ("good.example", HTTPS), ("empty.example", A)):
            nothing = await inside.ask(name, kind)
            assert (nothing.code, nothing.address) == (0, None)
        assert outside.asked == ["good.example", "empty.example"]


async def test_a_name_that_does_not_exist_outside_does_not_inside() -> None:
    """The extended error says nothing of a policy then."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("*.example")
        answer = await inside.ask("nobody.example")
        assert (answer.code, answer.extended) == (3, None)
        assert daemon.entries == []


async def test_a_question_that_has_come_is_answered_before_the_end() -> None:
    """A way out that is to end at the same moment still answers for a name that is known: the question was taken from
    the socket, where the process that follows does not find it any more."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        address = await inside.address_of("good.example")
        with inside.socket(socket.SOCK_DGRAM) as sock:
            await sock.connect(("198.18.0.1", 53))
            os.write(sock.fileno(), question("good.example"))
            await daemon.done(lambda seq: p.DetachSession(seq, "s-1"))
            assert Answer(os.read(sock.fileno(), 4096)).address == address


async def test_every_name_server_is_ours() -> None:
    """A question to any address is answered from there, by UDP as by TCP."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        assert (await inside.ask("good.example", server="8.8.8.8")).address
        stream = await inside.connect("9.9.9.9", 53)
        async with stream:
            ask = question("good.example")
            framed = len(ask).to_bytes(2, "big") + ask
            await stream.send_all(framed[:1])
            await stream.send_all(framed[1:] + framed)
            received = b""
            with trio.fail_after(patience()):
                while len(received) < 2 or len(received) < 2 * (2 + int.from_bytes(received[:2], "big")):
                    received += await stream.receive_some(1000)
        assert Answer(received[2:]).address == (await inside.ask("good.example")).address
        counters = await daemon.counters()
        assert (counters.connections, counters.dns_queries) == (0, 4)


async def test_a_name_belongs_to_one_session() -> None:
    """The address that stands for a name in one session stands for nothing in another, without a rule for that name."""
    async with egress(names()) as daemon:
        one = await daemon.attach("good.example:5000", name="s-1")
        other = await daemon.attach("*.example:5000", name="s-2")
        assert await is_refused(other, await one.address_of("good.example"), 5000)
        assert (await daemon.entry(session_id="s-2")).reason == "unknown_address"


async def test_garbage_is_survived() -> None:
    """After any bytes to port 53, the next question is answered."""
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        with inside.socket(socket.SOCK_DGRAM) as sock:
            await sock.connect(("198.18.0.1", 53))
            whole = question("good.example")
            for size in range(len(whole)):
                await sock.send(whole[:size])
            await sock.send(bytes(2000))
        stream = await inside.connect("198.18.0.1", 53)
        async with stream:
            await stream.send_all(b"\0\5hello")
            with trio.fail_after(patience()):
                assert await stream.receive_some(100) == b""
        assert (await inside.ask("good.example")).address


async def test_a_look_up_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question for it fails after a time, as a failure of the server; other names and sessions are answered."""
    monkeypatch.setattr(resolver, "DEADLINE_S", 0.3)
    outside = names()
    hanging = [f"h{each}.example" for each in range(resolver.MAX_THREADS_OF_SESSION)]
    outside.hanging.update(("hang.example", *hanging))
    async with egress(outside) as daemon:
        inside = await daemon.attach("*.example")
        other = await daemon.attach("good.example", "private.example", name="s-2")
        assert (await inside.ask("hang.example")).code == 2
        assert (await inside.ask("good.example")).address
        async with trio.open_nursery() as nursery:
            for name in hanging:
                nursery.start_soon(inside.ask, name)
        assert (await inside.ask("empty.example")).code == 2  # all threads of this session hang
        assert (await other.ask("private.example")).code == 3
        outside.go_on.set()
        with trio.fail_after(patience()):
            while (await inside.ask("empty.example")).code != 0:
                pass


async def test_no_session_waits_for_the_threads_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a session whose threads all hang has asked for the same name before."""
    monkeypatch.setattr(resolver, "DEADLINE_S", 1.0)
    outside = names()
    hanging = [f"h{each}.example" for each in range(resolver.MAX_THREADS_OF_SESSION)]
    outside.hanging.update(hanging)
    async with egress(outside) as daemon:
        hostile, other = [await daemon.attach("*.example", name=name) for name in ("s-1", "s-2")]
        await hostile.ask("empty.example")
        async with trio.open_nursery() as nursery:
            for name in hanging:
                nursery.start_soon(hostile.ask, name)

            async def all_hang() -> bool:
                return set(hanging) <= set(outside.asked)

            async def has_asked_more() -> bool:
                return (await daemon.counters()).dns_queries > len(hanging) + 1

            await until(all_hang)
            nursery.start_soon(hostile.ask, "good.example")
            await until(has_asked_more)
            assert (await other.ask("good.example")).address
        outside.go_on.set()


@pytest.mark.parametrize(("sessions", "begins_well", "least_left"), [(1, True, 120), (16, True, 40), (64, False, 24)])
async def test_sessions_whose_names_hang_leave_threads_for_others(
    sessions: int, begins_well: bool, least_left: int
) -> None:
    """Each asks for more names than it may have threads; then as many others as threads are left are answered, and a
    thread that ends goes to one who waits."""
    outside = names()
    hanging = [[f"h{each}-{session}.example" for each in range(20)] for session in range(sessions)]
    outside.hanging.update(name for each in hanging for name in each)
    async with trio.open_nursery() as nursery:
        asked = NameResolver(nursery, outside)
        for each in hanging:
            share = LookupShare()
            if begins_well:
                await _resolve(asked, f"first.{each[0]}", share)
            for name in each:
                nursery.start_soon(_resolve, asked, name, share)
        await wait_all_tasks_blocked()
        held = asked._threads.borrowed_tokens
        assert sessions <= held <= resolver.MAX_THREADS - least_left
        with trio.fail_after(patience()):
            async with trio.open_nursery() as others:
                for number in range(least_left):
                    outside.addresses[f"good{number}.example"] = ("203.0.113.7",)
                    others.start_soon(asked.resolve, f"good{number}.example", LookupShare())
        outside.go_on.set()
    assert {name for each in hanging for name in each} <= set(outside.asked)


async def _resolve(asked: NameResolver, name: str, share: LookupShare) -> None:
    with suppress(NoSuchName, LookupFailed):
        await asked.resolve(name, share)


async def test_questions_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions beyond it are refused, with the extended error `not ready`."""
    monkeypatch.setattr(way_out, "DNS_RATE", 0.001)
    monkeypatch.setattr(way_out, "DNS_BURST", 2.0)
    async with egress(names()) as daemon:
        inside = await daemon.attach("good.example")
        codes = [(await inside.ask("good.example")).code for _ in range(3)]
        answer = await inside.ask("good.example")
        assert (codes, answer.code, answer.extended) == ([0, 0, 5], 5, 14)


async def test_names_that_go_outside_count_as_bytes() -> None:
    """A name that a program makes up carries its bytes to who answers for it: beyond the limit nobody outside is asked,
    by a question or by the proxy, until there is another limit. What is known already counts once."""
    outside = names()
    async with egress(outside) as daemon:
        inside = await daemon.attach("*.example", bytes_up=2 * len("data0.example"))
        codes = [(await inside.ask(f"data{number}.example", kind)).code for number in range(3) for kind in (A, AAAA)]
        assert codes == [3, 3, 3, 3, 5, 5]
        entry = await daemon.entry(kind="dns")
        assert (entry.host, entry.reason) == ("data2.example", "limit")
        assert await is_refused(inside, "198.18.0.1", 3128)
        assert outside.asked == ["data0.example", "data1.example"]
        await daemon.set_policy("*.example")
        assert (await inside.ask("good.example")).address
