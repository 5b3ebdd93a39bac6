"""A guarded server on a loopback port for one test, and clients that speak to it byte by byte."""

from __future__ import annotations

import http.client
import io
import math
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.admission.keys import KeyRing
from sandkasten.api.app import make_app
from sandkasten.api.http.guard import App
from sandkasten.api.http.server import serve
from sandkasten.api.http.settings import ApiSettings
from sandkasten.config import Config
from tests.api.described import Described
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.waiting import patience

KEY = "sk-test-key"
PATIENCE_S = 10.0
"""Longest time for which a test waits for an event that must happen; only a failing test waits that long."""
_SETTINGS_OF_TREE = attrs.fields_dict(Config).keys() - attrs.fields_dict(ApiSettings).keys()


@attrs.define
class Running:
    """A server that is up. `stop` ends it and returns how long that took."""

    url: str
    port: int
    addresses: list[str]
    scope: trio.CancelScope
    stopped: trio.Event
    ring: KeyRing = attrs.field(factory=KeyRing)

    async def stop(self) -> float:
        began = trio.current_time()
        self.scope.cancel()
        with trio.fail_after(patience()):
            await self.stopped.wait()
        return trio.current_time() - began

    async def connect(self, *, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect(("127.0.0.1", self.port))
        return trio.SocketStream(sock)

    def client(self, **options: Any) -> httpx.AsyncClient:  # Any: httpx's own options
        token = options.pop("token", KEY)
        headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
        options["verify"] = False  # nothing is encrypted here, and the certificates take 30 ms to load
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=patience(), **options)

    async def is_alive(self) -> bool:
        """Whether a fresh connection still gets an answer."""
        async with await self.connect() as stream:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in (await read_to_end(stream)).partition(b"\r\n")[0]


@attrs.define
class RunningTree(Running):
    """A front with the daemon's tree behind it."""

    tree: ScriptedTree = attrs.field(kw_only=True)
    described: Described = attrs.field(kw_only=True)

    @property
    def supervisor(self) -> LocalSupervisor:
        return self.tree.supervisor

    async def activities(self, session_id: str) -> int:
        """Return how many runs and connected clients keep a session from being idle."""
        lease = (await self.supervisor.diagnose(session_id)).parts["lease"]
        assert isinstance(lease, Mapping)
        return int(lease["activities"])


def make_settings(**changes: Any) -> ApiSettings:  # Any: ApiSettings' fields
    """Return settings fit for a test: a free port, a key, a short stop."""
    defaults: dict[str, Any] = {"listen": ("127.0.0.1:0",), "api_key": KEY, "graceful_timeout_s": 0.3}
    return ApiSettings(**defaults | changes)


@asynccontextmanager
async def running_app(app: App, **changes: Any) -> AsyncIterator[Running]:  # Any: ApiSettings' fields
    """Serve any ASGI application; `changes` are settings."""
    settings = make_settings(**changes)
    stopped = trio.Event()

    async def run(*, task_status: trio.TaskStatus[tuple[trio.CancelScope, list[str]]]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                addresses: list[str] = await inner.start(_serve, app, settings)
                task_status.started((scope, addresses))
        stopped.set()

    async with trio.open_nursery() as nursery:
        scope, addresses = await nursery.start(run)
        url = addresses[0]
        port = int(url.rpartition(":")[2]) if url.startswith("http") else 0
        running = Running(url, port, addresses, scope, stopped)
        try:
            yield running
        finally:
            scope.cancel()


async def _serve(app: App, settings: ApiSettings, *, task_status: trio.TaskStatus[list[str]]) -> None:
    await serve(app, settings, task_status=task_status)


@asynccontextmanager
async def running_front(**changes: Any) -> AsyncIterator[RunningTree]:  # Any: fields of ApiSettings or Config
    """Serve the front over the daemon's tree with scripted sandboxes; `changes` are settings of the front or of the
    tree. What is answered and not described fails the test.
    """
    of_tree = {name: changes.pop(name) for name in _SETTINGS_OF_TREE & changes.keys()}
    async with open_scripted(**of_tree) as tree:
        app = make_app(tree.supervisor, settings=make_settings(**changes), shares=tree.supervisor.shares)
        described = Described(app)
        async with running_app(described, **changes) as running:
            running.ring = tree.supervisor.shares.ring
            yield RunningTree(**attrs.asdict(running, recurse=False), tree=tree, described=described)
        assert described.problems == [], described.problems


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """Return everything until the server closes; a reset ends it, too."""
    received = bytearray()
    with trio.fail_after(patience()):
        try:
            while data := await stream.receive_some(64 * 1024):
                received += data
        except trio.BrokenResourceError:
            pass
    return bytes(received)


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    """Return what comes up to and with `mark`, and perhaps more."""
    received = bytearray()
    with trio.fail_after(patience()):
        while mark not in received:
            data = await stream.receive_some(64 * 1024)
            assert data, f"closed before {mark!r}: {bytes(received)!r}"
            received += data
    return bytes(received)


def request_bytes(method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None) -> bytes:
    """Return a request with the key, a `Host`, and the body's length."""
    fields = {"Host": "localhost", "Authorization": f"Bearer {KEY}"} | (headers or {})
    if body is not None and "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(body)))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return head.encode("latin-1") + b"\r\n" + (body or b"")


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parse_answer(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (lower case) and body of one answer."""
    answer = http.client.HTTPResponse(_Bytes(data))  # type: ignore[arg-type]  # it only calls makefile
    answer.begin()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


async def send_and_read(running: Running, data: bytes) -> bytes:
    """Send `data` on a fresh connection, end the client's side, and return what comes back."""
    async with await running.connect() as stream:
        try:
            await stream.send_all(data)
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass
        return await read_to_end(stream)


class Steps(trio.abc.Instrument):
    """CPU time that the steps of tasks took, together and the longest of them. A step under way when this is installed
    does not count: most of it was before."""

    def __init__(self) -> None:
        self.longest_s = self.whole_s = 0.0
        self._began_s = math.inf

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = max(0.0, time.thread_time() - self._began_s)
        self.longest_s, self.whole_s = max(self.longest_s, took_s), self.whole_s + took_s
