"""The daemon that is tried: one data directory and one port, through any number of daemons one after the other.

Owns the daemon's process. Its clients are thin and know two failures: no answer (`Unreachable`), and an answer that is
an error; what either means is decided by who asked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import h11
import trio

from bench.daemon import KEY
from bench.soak import machine

START_S = 120.0
STOP_S = 120.0
ANSWER_S = 120.0
_REAP_S = 0.2
_RETRY_S = 0.05
_LINE_CHARS = 3000
_HELPERS = "builder", "cgroup_maker", "cgroup_emptier"
_OF_KILLS = ('"child": "nsinit"', *(f"nsinit_a_{name}_ended" for name in _HELPERS))
"""Errors that the kills of a soak must leave in a log."""


class Unreachable(Exception):
    """No whole answer came: whether the request had an effect is unknown."""


@attrs.frozen
class Answer:
    """Status and decoded JSON; text as it is."""

    status: int
    body: Any  # JSON value

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def code(self) -> str:
        return str(self.body.get("error_code", "")) if isinstance(self.body, dict) else ""


class Site:
    """See the module's docstring."""

    def __init__(self, data_dir: Path, settings: dict[str, str]) -> None:
        self.data_dir = data_dir
        self.address = ("127.0.0.1", _free_port())
        self._environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "SANDKASTEN_API_KEY": KEY,
            "SANDKASTEN_DATA_DIR": str(data_dir),
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.log = data_dir.parent / "daemon.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start a daemon and wait until it is ready."""
        script = str(Path(sys.executable).with_name("sandkasten"))
        command = [script, "serve", "--listen", f"127.0.0.1:{self.address[1]}", "--log-level", "warning"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, once per start
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with trio.fail_after(START_S):
            async with self.client() as client:
                while not await _is_ready(client):
                    assert self._process.poll() is None, "\n".join(["the daemon ended", *self.errors()])
                    await trio.sleep(_RETRY_S)

    async def kill(self) -> None:
        """SIGKILL the daemon, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        await self._wait()

    async def stop(self) -> None:
        """End the daemon and its sessions in good order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        assert await self._wait() == 0, "the daemon did not stop in good order"

    async def _wait(self) -> int:
        assert self._process is not None
        with trio.fail_after(STOP_S):
            while (status := self._process.poll()) is None:  # noqa: ASYNC110 - a process gives no event to its parent
                await trio.sleep(_RETRY_S)
        return status

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(self.address)
        try:
            yield client
        finally:
            await client.close()

    async def reap_for_ever(self) -> None:
        """Collect the orphans of killed daemons, as an init would."""
        while True:
            machine.reap_orphans({self._process.pid} if self._process is not None else set())
            await trio.sleep(_REAP_S)

    def errors(self) -> list[str]:
        """Return what the daemons' logs have of level error, each cut: what no kill explains before the rest."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        found = [line[:_LINE_CHARS] for line in lines if '"level": "error"' in line]
        return sorted(found, key=lambda line: any(each in line for each in _OF_KILLS))

    def destroy_leftovers(self) -> None:
        """Last resort of a run that failed: kill what is below this process."""
        for pid in machine.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class Client:
    """One connection that is opened again when it was lost."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._stream: trio.SocketStream | None = None
        self._protocol = h11.Connection(h11.CLIENT)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def call(self, method: str, path: str, body: object = None) -> Answer:
        """Send one request and return the answer. Raises `Unreachable`."""
        try:
            with trio.fail_after(ANSWER_S):
                stream = self._stream or await self._open()
                return await self._exchange(stream, method, path, b"" if body is None else json.dumps(body).encode())
        except (OSError, trio.BrokenResourceError, trio.TooSlowError, h11.RemoteProtocolError) as error:
            await self.close()
            raise Unreachable(f"{method} {path}: {error or type(error).__name__}") from error

    async def _open(self) -> trio.SocketStream:
        self._protocol = h11.Connection(h11.CLIENT)
        self._stream = await trio.open_tcp_stream(*self._address)
        return self._stream

    async def _exchange(self, stream: trio.SocketStream, method: str, path: str, content: bytes) -> Answer:
        protocol = self._protocol
        headers = [
            ("Host", "localhost"),
            ("Authorization", f"Bearer {KEY}"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
        ]
        request = protocol.send(h11.Request(method=method, target=path, headers=headers)) or b""
        await stream.send_all(
            request + (protocol.send(h11.Data(content)) or b"") + (protocol.send(h11.EndOfMessage()) or b"")
        )
        status, data, is_json = 0, bytearray(), False
        while not isinstance(event := await self._next_event(stream), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                is_json = dict(event.headers).get(b"content-type", b"").startswith(b"application/json")
            elif isinstance(event, h11.Data):
                data += event.data
        if protocol.our_state is h11.MUST_CLOSE or protocol.their_state is not h11.DONE:
            await self.close()
        else:
            protocol.start_next_cycle()
        return Answer(status, json.loads(data) if is_json else data.decode())

    async def _next_event(self, stream: trio.SocketStream) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await stream.receive_some(65536))
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the daemon closed the connection")
        return event


async def count_tasks(client: Client) -> int:
    """Return how many tasks the daemon has, that of this request included. Raises `Unreachable`."""
    page = (await client.call("GET", "/metrics")).body
    return next(int(float(line.split()[1])) for line in page.splitlines() if line.startswith("sandkasten_trio_tasks "))


async def _is_ready(client: Client) -> bool:
    try:
        return (await client.call("GET", "/readyz")).is_ok
    except Unreachable:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
