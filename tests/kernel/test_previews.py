"""Previews from a client outside to a server in a session: who is let in, until when, and that nothing of it stays."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.admission.previews import check_publish
from sandkasten.config import Config, PoolSettings, PoolSize, PreviewSettings
from sandkasten.errors import Conflict, InvalidRequest, PreviewNotFound, PreviewsOff
from sandkasten.model import EventType, PauseSpec, ProcessSpec, Session, SessionSpec, Status, WaitFor
from sandkasten.model.network import EVERY_PORT, PreviewAccess, PreviewSpec, SignedPreview
from tests.kernel.world import served
from tests.waiting import patience, until

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = f"{self.path} {self.headers['Host']} {self.headers['X-Sandkasten-Preview-Token']}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(said))); self.end_headers()
        self.wfile.write(said)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture
def with_previews(config: Config) -> Config:
    return attrs.evolve(config, preview=PreviewSettings(listen="127.0.0.1:0", publish="127.0.0.1"))


@pytest.fixture
async def supervisor(with_previews: Config) -> AsyncIterator[LocalSupervisor]:
    async with served(with_previews) as opened:
        yield opened


async def with_server(supervisor: LocalSupervisor, spec: SessionSpec | None = None) -> Session:
    """A session in which a server listens on port 8000 of the loopback."""
    session = await supervisor.create(spec or SessionSpec())
    started = await supervisor.start_process(session.id, ProcessSpec(argv=("python3", "-c", SERVER)))
    await supervisor.wait_process(session.id, started.exec_id, WaitFor(port=8000), timeout_s=patience(60))
    return session


async def fetch(url: str, token: str | None, path: str = "/") -> tuple[int, str]:
    """Return status and text; the name of the URL is that of the loopback."""
    parts = urlsplit(url)

    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=patience(30))
        headers = {"Host": parts.netloc} | ({} if token is None else {"X-Sandkasten-Preview-Token": token})
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await trio.to_thread.run_sync(ask)


def other_port(signed: SignedPreview, port: int) -> str:
    return signed.url.replace(f"//{signed.preview.port}-", f"//{port}-")


async def test_a_server_inside_is_reached_with_its_token(supervisor: LocalSupervisor) -> None:
    """With it alone: not with that of another port or session, not without one; and the server never sees it. More
    requests than sockets are made at a time are served."""
    session, other = await with_server(supervisor), await supervisor.create(SessionSpec())
    signed = await supervisor.open_preview(session.id, PreviewSpec(8000))
    assert signed.token is not None
    assert urlsplit(signed.url).netloc.startswith(f"8000-{session.id}.localhost:")
    for _ in range(20):
        assert await fetch(signed.url, signed.token, "/a?b") == (200, f"/a?b {urlsplit(signed.url).netloc} None")
    neighbour = await supervisor.open_preview(session.id, PreviewSpec(8001))
    foreign = await supervisor.open_preview(other.id, PreviewSpec(8000))
    for token in (None, "x" * 43, neighbour.token, foreign.token):
        assert (await fetch(signed.url, token))[0] == 401
    assert (await fetch(other_port(signed, 22), signed.token))[0] == 401
    status, text = await fetch(neighbour.url, neighbour.token)
    assert (status, text.split(":")[0]) == (502, "PORT_NOT_LISTENING")
    public = await supervisor.open_preview(session.id, PreviewSpec(8000, access=PreviewAccess.PUBLIC))
    assert public.token is None
    assert (await fetch(public.url, None))[0] == 200


async def test_a_token_is_void_when_its_preview_has_gone(supervisor: LocalSupervisor) -> None:
    """Closed, opened anew, or over: the token lets nobody in any more, and events tell of it."""
    session = await with_server(supervisor)
    first = await supervisor.open_preview(session.id, PreviewSpec(8000))
    assert (await fetch(first.url, first.token))[0] == 200
    second = await supervisor.open_preview(session.id, PreviewSpec(8000, ttl_s=600))
    assert (await fetch(first.url, first.token))[0] == 401
    assert (await fetch(second.url, second.token))[0] == 200
    await supervisor.close_preview(session.id, 8000)
    assert (await fetch(second.url, second.token))[0] == 401
    with pytest.raises(PreviewNotFound):
        await supervisor.close_preview(session.id, 8000)
    third = await supervisor.open_preview(session.id, PreviewSpec(8000, ttl_s=1))

    async def is_over() -> bool:
        return not await supervisor.previews(session.id)

    await until(is_over)
    assert (await fetch(third.url, third.token))[0] == 401
    closed: list[object] = []
    async with supervisor.events(session_id=session.id, after="0") as events:
        with trio.fail_after(patience()):
            while len(closed) < 2:
                event = await anext(aiter(events))
                closed += [event.data["reason"]] if event.type is EventType.PREVIEW_CLOSED else []
    assert closed == ["closed by request", "its time was over"]


async def test_a_paused_session_is_told_and_goes_on(supervisor: LocalSupervisor) -> None:
    """A pause is 503, and no request ends the pause."""
    session = await with_server(supervisor)
    signed = await supervisor.open_preview(session.id, PreviewSpec(8000, keep_alive=True))
    await supervisor.pause(session.id)
    status, text = await fetch(signed.url, signed.token)
    assert (status, text.split(":")[0]) == (503, "SESSION_PAUSED")
    await supervisor.resume(session.id)
    before = (await supervisor.get(session.id)).last_activity
    assert (await fetch(signed.url, signed.token))[0] == 200
    assert (await supervisor.get(session.id)).last_activity > before


async def test_a_preview_outlives_the_daemon(with_previews: Config) -> None:
    """The next daemon lets in whom the last one did; the listener's port is its own."""
    async with served(with_previews, ends_sessions=False) as first:
        session = await with_server(first)
        before = await first.open_preview(session.id, PreviewSpec(8000))
    async with served(with_previews) as second:

        async def is_adopted() -> bool:
            return bool(await second.previews(session.id))

        await until(is_adopted)
        other = await second.open_preview(session.id, PreviewSpec(8001))
        name = urlsplit(before.url).netloc.partition(":")[0]
        url = f"http://{name}:{urlsplit(other.url).port}/"
        assert (await fetch(url, before.token))[0] == 200
        await second.destroy(session.id)
        assert (await fetch(url, before.token))[0] == 401


async def reach(port: int | None) -> bytes:
    """Return what a server behind a published port answers; nothing if it is not reached."""
    request = b"GET /published HTTP/1.0\r\nHost: x\r\n\r\n"

    def ask() -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", port or 0), timeout=patience(30)) as link:
                link.sendall(request)
                link.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: link.recv(65536), b""))
        except (ConnectionRefusedError, ConnectionResetError):
            return b""

    return await trio.to_thread.run_sync(ask)


async def is_reached(port: int) -> bool:
    return b"/published" in await reach(port)


def gateway_pid() -> int:
    """The gateway of the daemon in this process."""
    children = [each for task in Path("/proc/self/task").iterdir() for each in (task / "children").read_text().split()]
    (found,) = [each for each in children if b"\0gateway\0" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return int(found)


LOCAL = PreviewSpec(8000, access=PreviewAccess.LOCAL)


async def test_a_published_port_leads_to_its_session_alone(supervisor: LocalSupervisor) -> None:
    """As plain TCP, on the loopback, on a port that is told back; another session's leads to that one, the name of a
    preview to none, and the end of the session frees the port."""
    session, other = await with_server(supervisor), await supervisor.create(SessionSpec())
    opened = await supervisor.open_preview(session.id, LOCAL)
    foreign = await supervisor.open_preview(other.id, LOCAL)
    port = opened.preview.host_port
    assert (opened.url, opened.token) == (f"tcp://127.0.0.1:{port}", None)
    assert (await reach(port)).endswith(b"/published x None")
    assert await reach(foreign.preview.host_port) == b""
    named = await supervisor.open_preview(session.id, PreviewSpec(8001))
    assert (await fetch(other_port(named, 8000), named.token))[0] == 401
    assert (await fetch(named.url, named.token))[0] == 502
    await supervisor.destroy(session.id)
    assert await reach(port) == b""
    assert port
    with socket.create_server(("127.0.0.1", port)):
        pass


async def has_member(supervisor: LocalSupervisor) -> bool:
    return (await supervisor.pools())[0].ready == 1


async def test_a_session_is_made_with_its_ports(with_previews: Config) -> None:
    """Cold or from a pool: the port is published when the create is answered, the same create again has the same port,
    and one that can't have all its ports makes no session, keeps none of them, and leaves its key free."""
    pool = PoolSettings(enabled=True, images={"python": PoolSize(1, 1)})
    async with served(attrs.evolve(with_previews, pool=pool)) as supervisor:
        sources, key = set[str](), "k"
        async with supervisor.events(after="0") as events:
            while len(sources) < 2:
                spec = SessionSpec(image="python", publish=(LOCAL,), idempotency_key=key)
                session = await with_server(supervisor, spec)
                (published,) = session.published
                assert (await supervisor.create(spec)).published == [published]
                assert await is_reached(published.host_port or 0)
                sources.add(session.acquire_source)
                key += "k"
            taken = attrs.evolve(LOCAL, port=8001, host_port=published.host_port or 0)
            spec = attrs.evolve(spec, publish=(LOCAL, taken), idempotency_key=key)
            before = {each.id for each in await supervisor.list()}
            with pytest.raises(Conflict):
                await supervisor.create(spec)
            assert {each.id for each in await supervisor.list()} == before
            again = await supervisor.create(attrs.evolve(spec, publish=(LOCAL,)))
            told: list[EventType] = []
            with trio.fail_after(patience()):
                async for event in events:
                    told += [event.type] if event.session_id == again.id else []
                    if EventType.PREVIEW_OPENED in told:
                        break
            assert told[:2] == [EventType.SESSION_CREATED, EventType.PREVIEW_OPENED]
            await supervisor.close_preview(again.id, 8000)
            await until(lambda: has_member(supervisor))
            (member,) = supervisor._directory.members.values()
            inside = member.inspect()
            assert inside is not None
            assert inside.record.identity is not None
            os.kill(inside.record.identity.pid, signal.SIGSTOP)  # it can't be handed out, and another one is made
            host_port = again.published[0].host_port or 0
            other = await supervisor.create(SessionSpec(publish=(attrs.evolve(LOCAL, host_port=host_port),)))
            assert (other.acquire_source, other.published[0].host_port) == ("cold", host_port)
    with pytest.raises(InvalidRequest):
        check_publish((LOCAL, LOCAL), with_previews.preview, has_gateway=True)


async def test_a_preview_of_every_port_leaves_those_with_one_of_their_own_alone(supervisor: LocalSupervisor) -> None:
    """The token opens all ports without one. When it is closed, a port that has one, or is published, is reached as
    before."""
    session = await with_server(supervisor)
    every = await supervisor.open_preview(session.id, PreviewSpec(EVERY_PORT))
    url = every.url.replace("{port}", "8000")
    assert (await fetch(url, every.token))[0] == 200
    assert (await fetch(url, None))[0] == 401
    assert await supervisor.find_preview(session.id, EVERY_PORT) == every
    own = await supervisor.open_preview(session.id, PreviewSpec(8000))
    assert [(await fetch(url, token))[0] for token in (every.token, own.token)] == [401, 200]
    await supervisor.close_preview(session.id, 8000)
    assert [(await fetch(url, token))[0] for token in (every.token, own.token)] == [200, 401]
    local = await supervisor.open_preview(session.id, LOCAL)
    assert (await fetch(url, every.token))[0] == 401
    await supervisor.close_preview(session.id, EVERY_PORT)
    assert await is_reached(local.preview.host_port or 0)
    await supervisor.close_preview(session.id, 8000)
    assert (await fetch(url, every.token))[0] == 401


async def test_a_port_of_the_node_is_published_once(supervisor: LocalSupervisor) -> None:
    """A repeat has the same port and keeps the connections, beyond the first end; a port that is taken, another kind of
    preview and a port out of range are refused, and a closed one is free at once."""
    session, other = await with_server(supervisor), await supervisor.create(SessionSpec())
    first = (await supervisor.open_preview(session.id, attrs.evolve(LOCAL, ttl_s=round(patience(3))))).preview
    port = first.host_port or 0
    with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as link:
        again = await supervisor.open_preview(session.id, attrs.evolve(LOCAL, ttl_s=600))
        assert again.preview.host_port == port
        await trio.sleep((first.expires_at - datetime.now(UTC)).total_seconds() + 0.1)
        await trio.to_thread.run_sync(link.sendall, b"GET /held HTTP/1.0\r\nHost: x\r\n\r\n")
        assert b"/held" in await trio.to_thread.run_sync(lambda: b"".join(iter(lambda: link.recv(65536), b"")))
    for session_id, refused in (
        (session.id, attrs.evolve(LOCAL, host_port=port + 1)),
        (session.id, PreviewSpec(8000)),
        (other.id, attrs.evolve(LOCAL, host_port=port)),
        (other.id, attrs.evolve(LOCAL, host_port=80)),
    ):
        with pytest.raises(Conflict):
            await supervisor.open_preview(session_id, refused)
    with pytest.raises(InvalidRequest):
        await supervisor.open_preview(other.id, PreviewSpec(8000, host_port=port))
    await supervisor.close_preview(session.id, 8000)
    assert await reach(port) == b""
    taken = await supervisor.open_preview(other.id, attrs.evolve(LOCAL, host_port=port))
    assert taken.preview.host_port == port


async def test_a_published_port_outlives_the_gateway_and_the_daemon(with_previews: Config) -> None:
    """The next one serves the same port; one that somebody else has meanwhile is closed, and an event says so."""
    async with served(with_previews, ends_sessions=False) as first:
        session = await with_server(first)
        port = (await first.open_preview(session.id, LOCAL)).preview.host_port or 0
        lost = (await first.open_preview(session.id, attrs.evolve(LOCAL, port=8001))).preview.host_port or 0
        os.kill(gateway_pid(), signal.SIGKILL)
        await until(lambda: is_reached(port))
    assert await reach(port) == b""
    with socket.create_server(("127.0.0.1", lost)):
        async with served(with_previews) as second:
            await until(lambda: is_reached(port))

            async def is_closed() -> bool:
                return [each.port for each in await second.previews(session.id)] == [8000]

            await until(is_closed)


async def test_a_preview_may_end_a_pause(supervisor: LocalSupervisor) -> None:
    """One that says `resume`, of either kind, unless the pause is not to be ended by requests."""
    session = await with_server(supervisor)
    signed = await supervisor.open_preview(session.id, PreviewSpec(8000, resume=True))
    await supervisor.pause(session.id)
    assert (await fetch(signed.url, signed.token))[0] == 200
    assert (await supervisor.get(session.id)).status is Status.RUNNING
    await supervisor.pause(session.id, PauseSpec(auto_resume=False))
    assert (await fetch(signed.url, signed.token))[0] == 503
    await supervisor.close_preview(session.id, 8000)
    port = (await supervisor.open_preview(session.id, attrs.evolve(LOCAL, resume=True))).preview.host_port
    await supervisor.pause(session.id, PauseSpec(auto_resume=True))
    assert b"/published" in await reach(port)


async def test_without_an_address_there_are_none(config: Config) -> None:
    """The refusal names the setting."""
    async with served(config) as supervisor:
        session = await supervisor.create(SessionSpec())
        with pytest.raises(PreviewsOff) as refused:
            await supervisor.open_preview(session.id, PreviewSpec(8000))
        assert refused.value.details == {"setting": "preview.listen"}
        with pytest.raises(PreviewsOff) as refused:
            await supervisor.open_preview(session.id, LOCAL)
        assert refused.value.details == {"setting": "preview.publish"}
