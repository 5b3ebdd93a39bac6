"""The mode `ask`: what no rule decides is held until a policy decides, and refused when none does in time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

import pytest
import trio

from egress import protocol as p
from egress import state
from egress.names import RANGE
from egress.policy import PolicyMode
from tests.egress.harness import (
    METADATA,
    OTHER_PUBLIC,
    PRIVATE,
    PUBLIC,
    Egress,
    Inside,
    Names,
    client_hello,
    egress,
    is_refused,
    is_reset,
    read_all,
    server,
)
from tests.waiting import patience

pytestmark = pytest.mark.usefixtures("outside")

SOON_S = 0.2
"""A time for answers that tests wait for the end of."""


@asynccontextmanager
async def asking(*allow: str, **limits: float) -> AsyncIterator[tuple[Egress, Inside, Names]]:
    """A session in the mode `ask`, with its daemon and the names outside."""
    outside = Names(**{"new.example": [PUBLIC], "known.example": [OTHER_PUBLIC], "private.example": [PRIVATE]})
    async with egress(outside) as daemon:
        yield daemon, await daemon.attach(*allow, mode="ask", **limits), outside  # type: ignore[arg-type]


def asked(daemon: Egress) -> list[tuple[str, int]]:
    """Return what the daemon was asked about so far."""
    return [(each.host, each.port) for each in daemon.entries if each.verdict == "asked"]


async def held(daemon: Egress, inside: Inside, name: str, port: int = 5000) -> trio.SocketStream:
    """Return a connection that waits for a decision."""
    stream = await inside.connect_to(name, port)
    await daemon.entry(verdict="asked", host=name, port=port)
    return stream


async def echoes(stream: trio.SocketStream) -> None:
    """Check that bytes come back from the server."""
    await stream.send_all(b"\x01")
    with trio.fail_after(patience()):
        assert await stream.receive_some() == b"\x01"


async def test_nothing_leaves_before_the_answer() -> None:
    """A name has its address at once, whether it exists or not, and is asked for outside when a rule allows it."""
    async with asking() as (daemon, inside, outside), server(PUBLIC, 5000):
        first = await inside.ask("new.example")
        assert first.address is not None
        assert IPv4Address(first.address) in RANGE
        assert (await inside.ask("none.example")).address not in (None, first.address)
        assert (await inside.ask("new.example", 28)).code == 0
        stream = await held(daemon, inside, "new.example")
        await stream.send_all(b"\x01before the answer")
        assert outside.asked == []
        await daemon.set_policy("new.example:5000", mode="ask")
        await stream.send_eof()
        assert await read_all(stream) == b"\x01before the answer"
        assert outside.asked == ["new.example"]
        assert (await inside.ask("new.example")).address == first.address
        entry = await daemon.entry(verdict="allowed")
        assert (entry.host, entry.rule, entry.address) == ("new.example", "new.example:5000", PUBLIC)


async def test_a_host_and_port_is_asked_about_once() -> None:
    """However many connections wait for it; one answer lets all of them go on, and another port is another question."""
    async with asking() as (daemon, inside, _outside), server(PUBLIC, 5000):
        streams = [await held(daemon, inside, "new.example") for _ in range(20)]
        await held(daemon, inside, "new.example", 22)
        assert asked(daemon) == [("new.example", 5000), ("new.example", 22)]
        await daemon.set_policy("new.example:5000", mode="ask")
        for stream in streams:
            await echoes(stream)
        assert (await daemon.counters()).connections_open == 21


async def test_what_rules_decide_is_not_asked_about() -> None:
    """An allowed name is reached, one that is denied does not exist, and what no rule could open is refused."""
    async with asking("known.example:5000") as (daemon, inside, _outside), server(OTHER_PUBLIC, 5000):
        await daemon.set_policy("known.example:5000", mode="ask", deny=["*.bad.example", "new.example:25"])
        await echoes(await inside.connect_to("known.example", 5000))
        assert (await inside.ask("a.bad.example")).code == 3
        assert await is_refused(inside, await inside.address_of("new.example"), 25)
        for address in (PRIVATE, METADATA, "198.18.7.7"):
            assert await is_refused(inside, address, 80)
        assert (await daemon.entry(host=PRIVATE)).reason == "bad_address"
        assert asked(daemon) == []


async def test_an_answer_that_denies_resets() -> None:
    """At once, and the name does not exist from then on; nothing was asked for outside."""
    async with asking() as (daemon, inside, outside):
        stream = await held(daemon, inside, "new.example")
        await daemon.set_policy(mode="ask", deny=["new.example"])
        assert await is_reset(stream)
        entry = await daemon.entry(verdict="denied", kind="tcp")
        assert (entry.host, entry.port, entry.reason, entry.rule) == ("new.example", 5000, "denied", "new.example")
        assert (await inside.ask("new.example")).code == 3
        assert outside.asked == []


async def test_no_answer_is_a_refusal() -> None:
    """After the session's time; who connects again asks again."""
    async with asking(ask_s=SOON_S) as (daemon, inside, outside):
        for count in (1, 2):
            assert await is_reset(await inside.connect_to("new.example", 5000))
            await daemon.until(lambda: len(daemon.entries) == 2 * count)  # noqa: B023 - awaited here
            entry = daemon.entries[-1]
            assert (entry.verdict, entry.reason, entry.cause) == ("denied", "unanswered", None)
            assert entry.duration_ms >= SOON_S * 1000 - 1
        assert asked(daemon) == [("new.example", 5000)] * 2
        assert outside.asked == []
        assert (await daemon.counters()).denied == 2


async def test_an_answer_about_another_host_changes_nothing() -> None:
    """The connection waits on, is not asked about again, and the end of its time stays where it was."""
    async with asking(ask_s=1.0) as (daemon, inside, _outside):
        began = trio.current_time()
        stream = await held(daemon, inside, "new.example")
        for port in (1, 2, 3):
            await daemon.set_policy(f"known.example:{port}", mode="ask", ask_s=1000.0)
        assert await is_reset(stream)
        assert trio.current_time() - began < patience()
        assert asked(daemon) == [("new.example", 5000)]


@pytest.mark.parametrize(("mode", "reason"), [("allow", "not_allowed"), ("open", None)])
async def test_another_mode_is_an_answer_to_all(mode: PolicyMode, reason: str | None) -> None:
    """Held connections are judged by it."""
    async with asking() as (daemon, inside, _outside), server(PUBLIC, 5000):
        stream = await held(daemon, inside, "new.example")
        await daemon.set_policy(mode=mode)
        if reason is None:
            await echoes(stream)
        else:
            assert await is_reset(stream)
            assert (await daemon.entry(verdict="denied")).reason == reason


async def test_an_allowed_name_is_checked_as_any_other() -> None:
    """An answer opens what a rule opens: addresses, existence, and what the client sends first are checked."""
    async with asking() as (daemon, inside, _outside), server(PUBLIC, 443):
        streams = {
            "private.example": (await held(daemon, inside, "private.example"), "bad_address"),
            "none.example": (await held(daemon, inside, "none.example"), "no_address"),
            "new.example": (await held(daemon, inside, "new.example", 443), "sni"),
        }
        await streams["new.example"][0].send_all(client_hello("other.example"))
        await daemon.set_policy("private.example:5000", "none.example:5000", "new.example", mode="ask")
        for name, (stream, reason) in streams.items():
            assert await is_reset(stream)
            assert (await daemon.entry(verdict="denied", host=name)).reason == reason


async def test_a_rule_that_goes_cuts_what_it_allowed() -> None:
    """A connection that carries bytes is not held again."""
    async with asking("new.example:5000") as (daemon, inside, _outside), server(PUBLIC, 5000):
        stream = await inside.connect_to("new.example", 5000)
        await echoes(stream)
        await daemon.set_policy(mode="ask")
        assert await is_reset(stream)
        assert asked(daemon) == []


async def test_a_literal_address_is_asked_about() -> None:
    """A rule for the address is the answer, if the address may be dialled at all."""
    async with asking() as (daemon, inside, _outside), server(PUBLIC, 5000):
        stream = await inside.connect(PUBLIC, 5000)
        await daemon.entry(verdict="asked", host=PUBLIC)
        await daemon.set_policy(f"{PUBLIC}:5000", mode="ask")
        await echoes(stream)


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_request_to_the_proxy_is_held(is_allowed: bool) -> None:
    """The proxy's answer waits as long; a refusal has its reason in it."""
    async with asking(ask_s=patience() if is_allowed else SOON_S) as (daemon, inside, outside), server(PUBLIC, 5000):
        stream = await inside.connect("198.18.0.1", 3128)
        await stream.send_all(b"CONNECT new.example:5000 HTTP/1.1\r\nHost: new.example:5000\r\n\r\n")
        await daemon.entry(verdict="asked", host="new.example", port=5000)
        assert outside.asked == []
        if is_allowed:
            await daemon.set_policy("new.example:5000", mode="ask")
        answer = await stream.receive_some()
        assert answer.startswith(b"HTTP/1.1 200 " if is_allowed else b"HTTP/1.1 403 unanswered: new.example:5000")
        await stream.aclose()
        entry = await daemon.entry(kind="proxy")
        assert (entry.host, entry.reason) == ("new.example", None if is_allowed else "unanswered")


async def test_questions_at_one_time_are_bounded() -> None:
    """Of 300 names so many are asked about, and the others are refused as a limit; hosts with a rule are reached."""
    async with (
        asking("known.example:5000", connections=1000) as (daemon, inside, outside),
        server(OTHER_PUBLIC, 5000),
    ):
        for number in range(300):
            await inside.connect_to(f"n{number}.example", 5000)
        await daemon.until(lambda: len(daemon.entries) == 300)
        refused = [each for each in daemon.entries if each.verdict == "denied"]
        assert len(asked(daemon)) == state.MAX_ASKED
        assert {each.reason for each in refused} == {"limit"}
        assert outside.asked == []
        await echoes(await inside.connect_to("known.example", 5000))


async def test_clients_that_leave_do_not_make_room_for_more_questions() -> None:
    """A question counts until its time is over, so nobody is asked faster than that."""
    async with asking() as (daemon, inside, _outside):
        for number in range(state.MAX_ASKED + 5):
            await trio.aclose_forcefully(await inside.connect_to(f"n{number}.example", 5000))
        await daemon.until(lambda: sum(each.reason == "limit" for each in daemon.entries) == 5)
        assert len(asked(daemon)) == state.MAX_ASKED


async def test_held_connections_count_as_open_ones() -> None:
    """A session has as many as its limit says."""
    async with asking(connections=2) as (daemon, inside, _outside):
        for _ in range(2):
            await held(daemon, inside, "new.example")
        assert await is_refused(inside, await inside.address_of("new.example"), 5000)
        assert (await daemon.entry(verdict="denied")).reason == "limit"


async def test_a_session_that_ends_releases_what_it_holds() -> None:
    """Connections are reset, and their entries say that nobody had answered."""
    async with asking() as (daemon, inside, _outside):
        stream = await held(daemon, inside, "new.example")
        await daemon.done(lambda seq: p.DetachSession(seq, "s-1"))
        assert await is_reset(stream)
        assert (await daemon.entry(verdict="denied")).reason == "unanswered"
        await daemon.until(lambda: daemon.totals.connections_open == 0)


async def test_a_client_that_gives_up_counts_no_longer() -> None:
    """Bytes that it has sent do not hide that. The question stands, the log has the connection as unanswered, and
    others that wait for the same host go on."""
    async with asking(connections=2) as (daemon, inside, _outside), server(PUBLIC, 5000):
        gone = await held(daemon, inside, "new.example")
        stays = await inside.connect_to("new.example", 5000)
        await gone.send_all(b"\x01never read")
        await gone.aclose()
        entry = await daemon.entry(verdict="denied", kind="tcp")
        assert (entry.host, entry.reason) == ("new.example", "unanswered")
        while (await daemon.counters()).connections_open != 1:  # its end was told before
            pass
        await daemon.set_policy("new.example:5000", mode="ask")
        await echoes(stays)
        assert asked(daemon) == [("new.example", 5000)]
