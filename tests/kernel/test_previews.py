"""Previews from a client outside to a server in a session: who is let in, until when, and that nothing of it stays."""

from __future__ import annotations

import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import StopOrder, open_tree
from sandkasten.config import Config, PreviewSettings
from sandkasten.config.seccomp import load_filters
from sandkasten.host import examine
from sandkasten.links.processes import start_as_child
from sandkasten.model import EventType, ProcessSpec, Session, SessionSpec, WaitFor
from sandkasten.model.errors import PreviewNotFound, PreviewsOff
from sandkasten.model.network import PreviewAccess, PreviewSpec, SignedPreview
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


@asynccontextmanager
async def served(config: Config, *, ends_sessions: bool = True) -> AsyncIterator[LocalSupervisor]:
    machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
    order = StopOrder(ends_sessions=ends_sessions)
    async with open_tree(config, machine, load_filters(config.security), start_as_child, order) as supervisor:
        yield supervisor


@pytest.fixture
def with_previews(config: Config) -> Config:
    return attrs.evolve(config, preview=PreviewSettings(listen="127.0.0.1:0"))


@pytest.fixture
async def supervisor(with_previews: Config) -> AsyncIterator[LocalSupervisor]:
    async with served(with_previews) as opened:
        yield opened


async def with_server(supervisor: LocalSupervisor) -> Session:
    """A session in which a server listens on port 8000 of the loopback."""
    session = await supervisor.create(SessionSpec())
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


async def test_without_an_address_there_are_none(config: Config) -> None:
    """The refusal names the setting."""
    async with served(config) as supervisor:
        session = await supervisor.create(SessionSpec())
        with pytest.raises(PreviewsOff) as refused:
            await supervisor.open_preview(session.id, PreviewSpec(8000))
        assert refused.value.details == {"setting": "preview.listen"}
