"""A session's way out, from a program inside to a server outside: what is reached, what is refused, and who is told."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import StopOrder, open_tree
from sandkasten.config import Config, EgressSettings, PoolSettings, PoolSize
from sandkasten.config.seccomp import load_filters
from sandkasten.errors import Conflict
from sandkasten.host import examine
from sandkasten.links.processes import start_as_child
from sandkasten.model import Event, EventType, ExecResult, ExecSpec, Session, SessionPatch, SessionSpec
from sandkasten.model.network import EgressDenial, EgressVerdict, Network, NetworkLimits, NetworkMode
from tests.kernel.world import World, echo, http, world
from tests.waiting import patience, until

SITE, OTHER, PRIVATE = "93.184.215.14", "93.184.215.15", "10.9.8.7"
"""Addresses of the world; the first two are the machine's own there, and permitted."""

ALLOWED = Network(NetworkMode.ALLOW, allow=["site.example", "other.example:7"])


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, f"{SITE}/32", f"{OTHER}/32", f"{PRIVATE}/32") as made:
        made.name({"site.example": SITE, "other.example": OTHER, "private.example": PRIVATE, "secret.example": SITE})
        for address in (SITE, PRIVATE):
            made.serve(address, 80, http(b"hello"))
        made.serve(OTHER, 7, echo)
        yield made


@asynccontextmanager
async def served(
    config: Config, outside: World, *, ends_sessions: bool = True, steers: bool = True, **settings: Any
) -> AsyncIterator[LocalSupervisor]:  # Any: fields of `EgressSettings`
    """A tree whose egress process is in the world. Without `steers` it takes the kernel for one that can't."""
    permit = f"{SITE}/32", f"{OTHER}/32"
    config = attrs.evolve(config, egress=EgressSettings(**{"max_mode": "open", "permit": permit, **settings}))
    machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
    if not steers:
        machine = attrs.evolve(machine, checks=[each for each in machine.checks if each.id != "sk_lookup"])
    profiles = load_filters(config.security)
    order = StopOrder(ends_sessions=ends_sessions)
    start = outside.start_egress
    async with open_tree(config, machine, profiles, start_as_child, order, start_egress=start) as supervisor:
        yield supervisor


@pytest.fixture
async def supervisor(config: Config, outside: World) -> AsyncIterator[LocalSupervisor]:
    async with served(config, outside) as opened:
        yield opened


async def python(supervisor: LocalSupervisor, session: Session, code: str) -> ExecResult:
    """Run a program inside, its own modules imported."""
    argv = ("python3", "-c", f"import socket, sys, urllib.request\n{code}")
    with trio.fail_after(patience(60)):
        return await supervisor.exec(session.id, ExecSpec(argv=argv))


async def measured(supervisor: LocalSupervisor) -> dict[tuple[str, ...], float]:
    """Return the samples about ways out, by their names and the values of their labels."""
    samples = [sample for metric in await supervisor.metrics() for sample in metric.samples]
    prefix = "sandkasten_egress_"
    return {
        (each.name.removeprefix(prefix), *each.labels.values()): each.value
        for each in samples
        if each.name.startswith(prefix)
    }


async def told(
    supervisor: LocalSupervisor, type: EventType, session_id: str | None = None, *, after: str = "0"
) -> Event:
    """Wait for an event of this type; return it."""
    async with supervisor.events(session_id=session_id, after=after) as events:
        with trio.fail_after(patience()):
            while (event := await anext(aiter(events))).type is not type:
                pass
    return event


FETCH = "print(urllib.request.urlopen('http://{}/', timeout=20).read().decode())"
CONNECT = """
try:
    s = socket.create_connection(({!r}, {}), timeout=20)
    s.sendall(b'ping\\n')
    print(s.recv(10) or 'closed')
except OSError as error:
    print(type(error).__name__, error.errno)
"""


async def test_a_program_reaches_an_allowed_name(supervisor: LocalSupervisor, outside: World) -> None:
    """Without proxy settings, by the libraries it has; what it reached is in the log with its run, and counted."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    result = await python(supervisor, session, FETCH.format("site.example"))
    assert (result.stdout, result.end.egress_denied) == (b"hello\n", ()), result.stderr
    assert outside.heard == [(SITE, 80)]

    async def is_logged() -> bool:
        page = await supervisor.egress_log(session.id, host="site.example", verdict=EgressVerdict.ALLOWED)
        wanted = SITE, 80, result.end.exec_id
        return any((each.address, each.port, each.exec_id) == wanted and each.bytes_down for each in page.entries)

    await until(is_logged)
    counters = (await supervisor.network(session.id)).counters
    assert (counters.connections, counters.denied) == (1, 0)
    assert counters.dns_queries > 0
    assert (await supervisor.stats(session.id)).network == counters

    async def is_measured() -> bool:
        return (await measured(supervisor))["bytes_total", "down"] == counters.bytes_down

    await until(is_measured)
    found = await measured(supervisor)
    assert (found["connections_total", "allowed"], found["connections_total", "denied"]) == (1, 0)
    assert (found["connections_open",], found["dial_seconds_count",], found["restarts_total",]) == (0, 1, 0)
    assert found["dns_questions_total", "allowed"] == counters.dns_queries


async def test_a_name_that_is_not_allowed_is_not_resolved(supervisor: LocalSupervisor, outside: World) -> None:
    """The program is told that there is no such name, and the caller what the session was refused."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    result = await python(supervisor, session, FETCH.format("secret.example"))
    assert result.end.exit_code != 0
    assert b"Name or service not known" in result.stderr, result.stderr
    (denial,) = result.end.egress_denied
    assert (denial.host, denial.port, denial.reason) == ("secret.example", None, "not_allowed")
    assert outside.heard == []
    after = await supervisor.exec(session.id, ExecSpec("true"))
    assert after.end.egress_denied == ()
    assert (await told(supervisor, EventType.EGRESS_DENIED, session.id)).data["host"] == "secret.example"


async def test_the_installation_says_that_it_has_ways_out(supervisor: LocalSupervisor) -> None:
    """On a machine whose kernel steers, with a process to carry."""
    assert (await supervisor.system()).features["way_out"] is True


async def test_what_a_limit_stops_is_told_as_that(supervisor: LocalSupervisor) -> None:
    """Not as a refusal by the rules."""
    limited = attrs.evolve(ALLOWED, limits=NetworkLimits(bytes_up=1))
    session = await supervisor.create(SessionSpec(network=limited))
    result = await python(supervisor, session, FETCH.format("site.example"))
    assert [each.reason for each in result.end.egress_denied] == ["limit"], result.stderr
    event = await told(supervisor, EventType.EGRESS_LIMITED, session.id)
    assert (event.data["host"], event.data["reason"], event.data["count"]) == ("site.example", "limit", 1)
    recent = supervisor._journal.recent(session.id, limit=9)
    assert EventType.EGRESS_DENIED not in {each.type for each in recent}


async def test_bandwidth_changes_on_a_live_session(supervisor: LocalSupervisor, outside: World) -> None:
    """A download is slower with a bound than, in the same session, without one."""
    outside.serve(OTHER, 80, http(bytes(6 * 1024 * 1024)))
    network = Network(NetworkMode.ALLOW, allow=["other.example"])
    session = await supervisor.create(SessionSpec(network=attrs.evolve(network, limits=NetworkLimits(mbit_down=16))))
    fetch = "import time; began = time.monotonic(); size = len(urllib.request.urlopen('http://other.example/').read())"
    fetch += "; print(size, time.monotonic() - began)"
    bounded = (await python(supervisor, session, fetch)).stdout.split()
    await supervisor.update(session.id, SessionPatch(network=network))
    free = (await python(supervisor, session, fetch)).stdout.split()
    assert bounded[0] == free[0] == b"%d" % (6 * 1024 * 1024)
    assert float(bounded[1]) > 2 * float(free[1])


async def test_a_port_that_is_not_allowed_is_reset(supervisor: LocalSupervisor, outside: World) -> None:
    """A rule with a port is for that port; the connection ends before the server hears of it."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    first = await python(supervisor, session, CONNECT.format("other.example", 7))
    assert first.stdout == b"b'ping\\n'\n", await supervisor.egress_log(session.id)
    result = await python(supervisor, session, CONNECT.format("other.example", 80))
    assert b"Connection" in result.stdout, result.stdout
    assert EgressDenial("other.example", 80, "port") in result.end.egress_denied
    assert outside.heard == [(OTHER, 7)]


async def test_an_address_without_a_rule_is_refused(supervisor: LocalSupervisor, outside: World) -> None:
    """The address of an allowed name, too: rules are for names."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    result = await python(supervisor, session, CONNECT.format(SITE, 80))
    assert result.end.egress_denied[0].reason == "not_allowed"
    assert outside.heard == []


@pytest.mark.parametrize("target", [PRIVATE, "private.example", "169.254.169.254", "100.64.0.1", "192.168.1.1"])
async def test_an_open_network_reaches_no_private_address(
    supervisor: LocalSupervisor, outside: World, target: str
) -> None:
    """Neither by address nor by a name that has such an address."""
    session = await supervisor.create(SessionSpec(network=Network(NetworkMode.OPEN)))
    assert (await python(supervisor, session, FETCH.format("secret.example"))).stdout == b"hello\n"
    result = await python(supervisor, session, FETCH.format(target))
    assert result.end.exit_code != 0
    assert result.end.egress_denied, result.stderr
    assert (PRIVATE, 80) not in outside.heard


async def test_a_session_without_a_way_out_is_as_it_was(supervisor: LocalSupervisor) -> None:
    """Mode `none`: no route leads anywhere, and no resolver is named."""
    session = await supervisor.create(SessionSpec())
    assert session.network == Network()
    assert b"OSError 101" in (await python(supervisor, session, CONNECT.format(SITE, 80))).stdout  # ENETUNREACH
    assert b"nameserver" not in (await supervisor.exec(session.id, ExecSpec("cat /etc/resolv.conf"))).stdout


async def test_a_live_session_is_given_a_way_out_and_loses_it(supervisor: LocalSupervisor, outside: World) -> None:
    """A change is in force when it is answered: new connections and open ones."""
    session = await supervisor.create(SessionSpec())
    changed = await supervisor.update(session.id, SessionPatch(network=ALLOWED, if_revision=1))
    assert (changed.network, changed.network_revision) == (ALLOWED, 2)
    assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"
    with pytest.raises(Conflict) as conflict:
        await supervisor.update(session.id, SessionPatch(network=Network(), if_revision=1))
    assert conflict.value.details["revision"] == 2
    held = (
        "s = socket.create_connection(('other.example', 7)); s.sendall(b'x\\n'); s.recv(2); print('on', flush=True)\n"
    )
    held += "try: print(s.recv(1))\nexcept OSError as error: print(type(error).__name__)"
    async with supervisor.open_exec(session.id, ExecSpec(argv=("python3", "-c", f"import socket\n{held}"))) as run:
        with trio.fail_after(patience(60)):
            seen = b""
            async for chunk in run:
                seen += chunk.data
                if seen == b"on\n":
                    await supervisor.update(session.id, SessionPatch(network=Network()))
    assert seen == b"on\nConnectionResetError\n"
    assert b"Connection" in (await python(supervisor, session, CONNECT.format(OTHER, 7))).stdout
    assert outside.heard == [(SITE, 80), (OTHER, 7)]


async def test_connects_wait_for_an_egress_process_that_was_killed(supervisor: LocalSupervisor, outside: World) -> None:
    """The next process gets the descriptors, and serves what came meanwhile; an event and a counter tell."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    os.kill(outside.egress_pid, signal.SIGKILL)
    assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"
    assert (await told(supervisor, EventType.EGRESS_RESTARTED)).data["count"] == 1
    assert (await measured(supervisor))["restarts_total",] == 1


async def test_the_end_of_a_session_leaves_no_descriptor(supervisor: LocalSupervisor, outside: World) -> None:
    """Neither here nor in the egress process, where one would keep the session's network namespace."""
    await supervisor.destroy((await supervisor.create(SessionSpec(network=ALLOWED))).id)
    before = _descriptors(outside)
    for _ in range(3):
        session = await supervisor.create(SessionSpec(network=ALLOWED))
        assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"
        await supervisor.destroy(session.id)

    async def are_gone() -> bool:
        return _descriptors(outside) == before

    await until(are_gone)


def _descriptors(outside: World) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), outside.egress_pid)]


async def test_a_kernel_that_does_not_steer_leaves_a_proxy(config: Config, outside: World) -> None:
    """Programs that obey the variables reach what is allowed, by its name; everything else reaches nothing. A change of
    a live session is no other.
    """
    direct = "import os; os.environ.clear()" + CONNECT.format("site.example", 80)
    async with served(config, outside, steers=False) as supervisor:
        features = (await supervisor.system()).features
        assert (features["way_out"], features["steering"]) == (True, False)
        made = await supervisor.create(SessionSpec(network=ALLOWED))
        changed = await supervisor.create(SessionSpec())
        changed = await supervisor.update(changed.id, SessionPatch(network=ALLOWED))
        for session in (made, changed):
            assert session.network.proxy_env
            assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"
            refused = await python(supervisor, session, FETCH.format("secret.example"))
            assert b"403" in refused.stderr
            assert [each.host for each in refused.end.egress_denied] == ["secret.example"]
            outside.heard.clear()
            for code in (direct, CONNECT.format(SITE, 80)):
                assert (await python(supervisor, session, code)).stdout == f"OSError {errno.ENETUNREACH}\n".encode()
            assert outside.heard == []


async def test_a_member_of_a_pool_is_given_its_way_out_when_it_is_claimed(config: Config, outside: World) -> None:
    """The claim is answered when the policy is in force."""
    config = attrs.evolve(config, pool=PoolSettings(enabled=True, images={"host": PoolSize(1, 1)}))
    async with served(config, outside) as supervisor:

        async def is_ready() -> bool:
            return any(each.ready for each in await supervisor.pools())

        for _ in range(3):
            await until(is_ready)
            session = await supervisor.create(SessionSpec(image="host", network=ALLOWED))
            if session.acquire_source == "pool":  # a member that a busy machine lets answer late is given up
                break
        assert session.acquire_source == "pool"
        assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"


async def test_a_session_without_a_network_sees_nothing_of_ways_out(config: Config, outside: World) -> None:
    """Files, tables of the kernel and variables are to the byte those of a daemon that lets no session have one."""
    look = (
        "{ find /etc -type f ! -name 'host*' | sort | xargs sha256sum 2>&1; cat /etc/host* /etc/resolv.conf;"
        " cd /proc/net; cat route fib_trie if_inet6 tcp udp arp; env | sort; } | sed s/$(hostname)/NAME/"
    )
    seen = []
    for mode in ("open", "none"):
        async with served(config, outside, max_mode=mode) as supervisor:
            if mode != "none":
                other = await supervisor.create(SessionSpec(network=ALLOWED))
                assert (await python(supervisor, other, FETCH.format("site.example"))).stdout == b"hello\n"
            session = await supervisor.create(SessionSpec())
            seen.append((await supervisor.exec(session.id, ExecSpec(look))).output.decode().splitlines())
    assert seen[0] == seen[1]
