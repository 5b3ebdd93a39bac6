"""Ways out when something fails: what one session, or one part, loses is no other's loss, and nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sqlite3
from base64 import b64encode
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sandkasten.actors.core import Tell
from sandkasten.actors.services import egress as client
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config, PoolSettings, PoolSize
from sandkasten.errors import EgressUnavailable
from sandkasten.model import ExecSpec, Session, SessionPatch, SessionSpec, Status
from sandkasten.model.network import EgressDenial, Network, NetworkMode
from tests.kernel.test_network import ALLOWED, CONNECT, FETCH, PRIVATE, outside, python, served, supervisor
from tests.kernel.world import World, http
from tests.waiting import until

__all__ = ["outside", "supervisor"]


@attrs.frozen
class _Unknown(Tell):
    """A message no actor knows; handling it is a bug and ends the actor."""


def descriptors(world: World) -> int:
    """Return the number of descriptors of the egress process."""
    return len(os.listdir(f"/proc/{world.egress_pid}/fd"))


async def test_the_network_of_a_session_whose_actor_died_of_a_bug_is_let_go(
    supervisor: LocalSupervisor, outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets of its way out would keep its network namespace; the log goes, too."""
    monkeypatch.setattr(client, "_REFUSALS_EVERY_S", 0.1)
    other = await supervisor.create(SessionSpec(network=ALLOWED))
    before = descriptors(outside)
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    assert descriptors(outside) == before + 3
    entry = supervisor._directory.get(session.id)
    assert entry is not None
    entry.ref.tell(_Unknown())

    async def is_let_go() -> bool:
        return descriptors(outside) == before and list(supervisor._shared.egress_logs) == [other.id]

    await until(is_let_go)
    assert (await supervisor.get(session.id)).status is Status.CRASHED
    assert (await python(supervisor, other, FETCH.format("site.example"))).stdout == b"hello\n"


async def test_a_member_that_can_not_be_handed_out_leaves_no_way_out(
    config: Config, outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of such a member is undone before its end, and knows of no way out then."""
    open_way, failures = SessionActor.open_way, [EgressUnavailable("a fault of the test's")]

    async def open_and_fail(actor: SessionActor) -> None:
        await open_way(actor)
        if actor.session.network.has_way_out and failures:
            raise failures.pop()

    monkeypatch.setattr(SessionActor, "open_way", open_and_fail)
    pool = PoolSettings(enabled=True, images={"python": PoolSize(1)})
    async with served(attrs.evolve(config, pool=pool), outside) as supervisor:

        async def is_ready() -> bool:
            return (await supervisor.pools())[0].ready == 1

        await until(is_ready)
        (member,) = await supervisor.list(status=Status.POOL_IDLE)
        session = await supervisor.create(SessionSpec(network=ALLOWED))
        assert not failures
        assert session.id != member.id

        async def is_gone() -> bool:
            return member.id not in os.listdir(config.data_dir / "sessions")

        await until(is_gone)
        assert list(supervisor._shared.egress_logs) == [session.id]
        assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"


async def test_the_log_of_a_session_that_lost_its_way_out_ends_with_it(supervisor: LocalSupervisor) -> None:
    """Such a log is kept as long as the session, and no longer."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    await supervisor.update(session.id, SessionPatch(network=Network()))
    assert list(supervisor._shared.egress_logs) == [session.id]
    await supervisor.destroy(session.id)
    assert list(supervisor._shared.egress_logs) == []


async def test_a_way_out_that_the_process_refuses_is_no_loss_of_others(
    supervisor: LocalSupervisor, outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on, and so do the connections in it."""
    session = await supervisor.create(SessionSpec(network=ALLOWED))
    pid = outside.egress_pid
    make = client.EgressClient._make

    async def make_wrongly(actor: client.EgressClient, way: Any) -> None:
        await make(actor, way)
        way.fds = way.fds[::-1]

    with monkeypatch.context() as patched:
        patched.setattr(client.EgressClient, "_make", make_wrongly)
        with pytest.raises(EgressUnavailable):
            await supervisor.create(SessionSpec(network=ALLOWED))
    other = await supervisor.create(SessionSpec(network=ALLOWED))
    for each in (session, other):
        assert (await python(supervisor, each, FETCH.format("site.example"))).stdout == b"hello\n"
    assert outside.egress_pid == pid


async def test_a_process_that_can_not_be_started_is_started_later(
    config: Config, outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's refusal is no bug of the actor, whose end would be that of every way out."""
    start, failures = outside.start_egress, [errno.EMFILE, errno.EAGAIN]

    async def fail_and_start(*arguments: Any) -> object:  # Any: of a `StartEgress`
        if failures:
            raise OSError(failures.pop(), "no process to be had")
        return await start(*arguments)

    monkeypatch.setattr(outside, "start_egress", fail_and_start)
    async with served(config, outside) as supervisor:
        session = await supervisor.create(SessionSpec(network=ALLOWED))
        assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"hello\n"
        assert (failures, supervisor._egress.incarnation) == ([], 1)


_GO_ON = """
import pathlib, socket, time, urllib.request
held, turns = socket.create_connection(("other.example", 7), timeout=20), 0
while True:
    urllib.request.urlopen("http://site.example/", timeout=20).read()
    held.sendall(b"\\1")
    assert held.recv(1) == b"\\1"
    turns += 1
    pathlib.Path("turns").write_text(str(turns))
    time.sleep(0.02)
"""


_CONNECT = """
import pathlib, socket, time
turns = 0
while True:
    with socket.create_connection(("site.example", 80), timeout=20) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: site.example\\r\\n\\r\\n")
            turns += connection.recv(1) == b"H"
        except ConnectionResetError:
            pass  # it was open
    pathlib.Path("turns").write_text(str(turns))
    time.sleep(0.005)
"""


async def _start(supervisor: LocalSupervisor, session: Session, program: str) -> None:
    """Have a program go round in the background, until something fails."""
    await supervisor.exec(session.id, ExecSpec(f"cat >go-on.py <<'END'{program}END\npython3 go-on.py >failure 2>&1 &"))

    async def goes_on() -> bool:
        return await _turns(supervisor, session) > 2

    try:
        await until(goes_on)
    except trio.TooSlowError:
        raise AssertionError((await supervisor.exec(session.id, ExecSpec("ls -la; cat failure"))).output) from None


async def _turns(supervisor: LocalSupervisor, session: Session) -> int:
    """Return how often the program has gone round."""
    result = await supervisor.exec(session.id, ExecSpec(argv=("cat", "/workspace/turns")))
    return int(result.stdout or b"0")


async def _has_gone_on(supervisor: LocalSupervisor, session: Session) -> None:
    """Wait for some rounds more, before which nothing has failed."""
    before = await _turns(supervisor, session)

    async def has_gone_on() -> bool:
        return await _turns(supervisor, session) > before + 5

    await until(has_gone_on)
    assert (await supervisor.exec(session.id, ExecSpec(argv=("cat", "/workspace/failure")))).stdout == b""


async def test_connections_go_on_while_the_daemon_is_replaced(config: Config, outside: World) -> None:
    """The egress process serves the session on: an open connection lives, new ones are made, none fails. The next
    daemon has the same process, and the descriptors, so that connects wait for another one when that is killed.
    """
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
        await _start(first, session, _GO_ON)
    pid = outside.egress_pid
    async with served(config, outside) as second:
        await _has_gone_on(second, session)
        assert outside.egress_pid == pid
        assert (await python(second, session, FETCH.format("secret.example"))).end.egress_denied
        os.kill(pid, signal.SIGKILL)
        assert (await python(second, session, FETCH.format("site.example"))).stdout == b"hello\n"
        assert outside.egress_pid != pid


async def test_a_way_out_is_made_anew_when_daemon_and_process_are_gone(config: Config, outside: World) -> None:
    """Nobody has the descriptors any more: connects are refused until the next daemon has opened the way again."""
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
    os.kill(outside.egress_pid, signal.SIGKILL)
    async with served(config, outside) as second:

        async def is_reached() -> bool:
            return (await python(second, session, FETCH.format("site.example"))).stdout == b"hello\n"

        await until(is_reached)


async def test_a_daemon_with_another_configuration_replaces_the_process(config: Config, outside: World) -> None:
    """Nothing that the operator forbids by then is reached any more."""
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
        assert (await python(first, session, FETCH.format("site.example"))).stdout == b"hello\n"
    pid = outside.egress_pid
    async with served(config, outside, always_deny=("site.example",)) as second:
        outside.heard.clear()

        async def is_refused() -> bool:
            return bool((await python(second, session, FETCH.format("site.example"))).end.egress_denied)

        await until(is_refused)
        assert (outside.heard, outside.egress_pid != pid) == ([], True)


async def test_no_connect_fails_while_the_process_is_replaced(config: Config, outside: World) -> None:
    """By a daemon with another configuration: connects wait, though what is open is reset."""
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
        await _start(first, session, _CONNECT)
    pid = outside.egress_pid
    async with served(config, outside, always_deny=("denied.example",)) as second:
        await _has_gone_on(second, session)
        assert outside.egress_pid != pid


@pytest.mark.parametrize("network", [Network("none"), Network("allow", allow=["other.example:7"])])
async def test_a_change_holds_though_the_session_is_just_being_adopted(
    config: Config, outside: World, network: Network
) -> None:
    """The way out of the record, which the adoption asks for, does not come back over it."""
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
    os.kill(outside.egress_pid, signal.SIGSTOP)
    try:
        async with served(config, outside) as second:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second.update, session.id, SessionPatch(network=network))
                await trio.sleep(0.5)  # both wait for the process, or neither: the later one counts
                os.kill(outside.egress_pid, signal.SIGCONT)
            assert (await second.get(session.id)).network.mode is network.mode
            for _ in range(3):
                assert (await python(second, session, FETCH.format("site.example"))).end.exit_code == 1
            assert outside.heard == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(outside.egress_pid, signal.SIGCONT)


async def test_a_way_out_that_no_session_claims_is_closed(
    config: Config, outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a session whose record is gone; its sockets would keep the network namespace."""
    monkeypatch.setattr(client, "_REFUSALS_EVERY_S", 0.1)
    monkeypatch.setattr(client, "_CLAIM_S", 0.1)
    async with served(config, outside, ends_sessions=False) as first:
        kept = await first.create(SessionSpec(network=ALLOWED))
        assert (await python(first, kept, FETCH.format("site.example"))).stdout == b"hello\n"
        before = descriptors(outside)
        lost = await first.create(SessionSpec(network=ALLOWED))
    with closing(sqlite3.connect(config.db_path)) as database, database:
        database.execute("DELETE FROM sessions WHERE id = ?", (lost.id,))
    async with served(config, outside) as second:

        async def is_closed() -> bool:
            return descriptors(outside) == before

        await until(is_closed)
        assert (await python(second, kept, FETCH.format("site.example"))).stdout == b"hello\n"


async def test_an_adopted_session_is_within_the_maximum_of_now(config: Config, outside: World) -> None:
    """A session made under a wider one goes on without a way out; nothing of its network is undone in the record."""
    async with served(config, outside, ends_sessions=False) as first:
        session = await first.create(SessionSpec(network=ALLOWED))
        assert (await python(first, session, FETCH.format("site.example"))).stdout == b"hello\n"
        other = await first.create(SessionSpec(network=Network("open")))
    async with served(config, outside, max_mode="allow") as second:

        async def is_reached() -> bool:
            return (await python(second, session, FETCH.format("site.example"))).stdout == b"hello\n"

        await until(is_reached)
        outside.heard.clear()
        refused = await python(second, other, FETCH.format("site.example"))
        assert (refused.end.exit_code, outside.heard) == (1, [])


def proxy(connection: socket.socket, heads: list[bytes]) -> None:
    """Answer a CONNECT to the site as the site would, and refuse every other one."""
    heads.append(connection.recv(65536))
    if b"CONNECT site.example:80 " not in heads[-1]:
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        return
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    http(b"by way of the proxy")(connection)


async def test_all_goes_through_the_operators_proxy(
    config: Config, outside: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program inside needs no setting. What the proxy refuses is in the result of the run. The credentials are in no
    argument, log or event. A daemon with other ones replaces the process, and the session goes on."""
    heads: list[bytes] = []
    outside.serve(PRIVATE, 3128, partial(proxy, heads=heads))
    file = tmp_path / "credentials"
    settings: dict[str, Any] = {"upstream_proxy": f"http://{PRIVATE}:3128", "upstream_proxy_auth": file}
    allowed = Network(NetworkMode.ALLOW, allow=["site.example", "other.example:7"])
    file.write_text("node-7:first secret\n")
    async with served(config, outside, ends_sessions=False, **settings) as supervisor:
        session = await supervisor.create(SessionSpec(network=allowed))
        pid = outside.egress_pid
        fetched = await python(supervisor, session, FETCH.format("site.example"))
        assert fetched.stdout == b"by way of the proxy\n", fetched.stderr
        result = await python(supervisor, session, CONNECT.format("other.example", 7))
        assert result.end.egress_denied == (EgressDenial("other.example", 7, "upstream", 1),)
        page = await supervisor.egress_log(session.id, host="other.example")
        assert [(each.reason, each.cause) for each in page.entries] == [("upstream", "status 403")]
        assert b"secret" not in await trio.Path(f"/proc/{pid}/cmdline").read_bytes()
        assert "secret" not in repr([supervisor._shared.journal.recent(session.id, limit=100), page])
    file.write_text("node-7:second secret\n")
    async with served(config, outside, **settings) as supervisor:
        assert (await python(supervisor, session, FETCH.format("site.example"))).stdout == b"by way of the proxy\n"
        assert outside.egress_pid != pid
    assert "secret" not in repr([vars(record) for record in caplog.records])
    first, second = (b"Basic " + b64encode(each) for each in (b"node-7:first secret", b"node-7:second secret"))
    assert [(first in each, second in each) for each in heads] == [(True, False), (True, False), (False, True)]
    assert outside.heard == [(PRIVATE, 3128)] * 3
