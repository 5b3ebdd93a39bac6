"""Ports of E2B's sandboxes, through the daemon and by their names: who is let in, and what goes either way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import attrs
import httpx
import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.api.app import make_app
from sandkasten.api.e2b.front import E2bFront
from sandkasten.api.e2b.sandboxes import E2bTerms
from sandkasten.config import Config, PreviewSettings
from sandkasten.model import ProcessSpec, WaitFor
from tests.api.harness import KEY, Running, make_settings, read_to_end, read_until, running_app
from tests.kernel.world import served
from tests.waiting import patience

SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size); self.rfile.readline()
            self.rfile.readline()
        data += self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = json.dumps([self.command, self.path, len(data), dict(self.headers)]).encode()
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Set-Cookie", "a=b"); self.send_header("X-Own", "yes")
        self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        for piece in (said[:5], said[5:]) if self.command != "HEAD" else ():
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(piece), piece)); self.wfile.flush()
        if self.path == "/broken": return self.connection.close()
        if self.path == "/silent": return self.rfile.read(1)
        self.wfile.write(b"0\\r\\n\\r\\n" if self.command != "HEAD" else b"")
    do_GET = do_POST = do_HEAD = do_DELETE = answer
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
PORT = {"E2b-Sandbox-Port": "8000"}


@attrs.frozen
class World:
    """A front with E2B's API over a supervisor with previews, and a client of it."""

    running: Running
    client: httpx.AsyncClient
    supervisor: LocalSupervisor


@attrs.frozen
class Sandbox:
    """A sandbox with a server on port 8000, and a client of the API that made it."""

    client: httpx.AsyncClient
    made: dict[str, Any]  # Any: JSON values

    def head(self, **more: str) -> dict[str, str]:
        """Return what a client sends to a port."""
        head = {"E2b-Sandbox-Id": self.made["sandboxID"], "E2b-Traffic-Access-Token": self.made["trafficAccessToken"]}
        return head | PORT | more

    async def by_name(self, **headers: str) -> int:
        """Return the status of a request by the name of the port, as `get_host` makes it."""
        host = f"8000-{self.made['sandboxID']}.{self.made['domain']}"
        url = f"http://127.0.0.1:{host.rpartition(':')[2]}/"
        return (await self.client.get(url, headers={"Host": host, **headers})).status_code


async def make(world: World, **body: Any) -> Sandbox:  # Any: JSON values
    client, supervisor = world.client, world.supervisor
    answer = await client.post("/v2/sandboxes", json={"allow_internet_access": False, **body})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    started = await supervisor.start_process(made["sandboxID"], ProcessSpec(argv=("python3", "-c", SERVER)))
    await supervisor.wait_process(made["sandboxID"], started.exec_id, WaitFor(port=8000), timeout_s=patience(60))
    return Sandbox(client, made)


@pytest.fixture
async def world(config: Config) -> AsyncIterator[World]:
    config = attrs.evolve(config, preview=PreviewSettings(listen="127.0.0.1:0"))
    async with served(config) as supervisor:
        terms = E2bTerms(key=b"s" * 32, has_ports=True)
        app = make_app(supervisor, settings=make_settings(), shares=supervisor.shares, e2b=E2bFront(terms))
        async with (
            running_app(app) as running,
            httpx.AsyncClient(
                base_url=running.url, headers={"X-API-KEY": KEY}, timeout=patience(60), verify=False
            ) as client,
        ):
            yield World(running, client, supervisor)


async def test_requests_reach_a_port_and_leave_keys_and_tokens_outside(world: World) -> None:
    """Method, target, body and answer are as they were sent, whatever the framing; what opens doors of ours stays
    outside, with cookies. A token of the program's own goes in. Nobody is let in without a token, nor with a wrong one;
    where nothing listens the words are those that clients look for."""
    client, box = world.client, await make(world, envVars={"OWN": "a=b"})
    ours = {"X-API-KEY": KEY, "X-Access-Token": box.made["envdAccessToken"], "Cookie": "c=d", "X-Mine": "1"}
    sent = box.head(**ours, Authorization=f"Bearer {KEY}")
    answer = await client.get("/a%20b//c?q=%20&username=x", headers=sent)
    method, target, size, seen = answer.json()
    assert (answer.status_code, answer.headers["x-own"], answer.headers.get("set-cookie")) == (200, "yes", None)
    assert (method, target, size) == ("GET", "/a%20b//c?q=%20&username=x", 0)
    names = {name.lower() for name in seen}
    assert "x-mine" in names
    assert not names & {"x-api-key", "x-access-token", "e2b-traffic-access-token", "cookie", "authorization"}
    assert not any(secret in json.dumps(seen) for secret in (KEY, box.made["envdAccessToken"]))
    envd = {"E2b-Sandbox-Port": "49983", "X-Access-Token": box.made["envdAccessToken"]}
    variables = (await client.get("/envs", headers=box.head() | envd)).json()
    assert (variables["OWN"], variables["HOME"]) == ("a=b", "/home/user")
    own = (await client.get("/", headers=box.head(Authorization="Basic not base64"))).json()[3]
    assert own["authorization"] == "Basic not base64"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b"x" * 100_000

    for body in (b"y" * 800_000, pieces()):
        assert (await client.post("/files", headers=box.head(), content=body)).json()[:3] == ["POST", "/files", 800_000]
    for method, path, status in (("HEAD", "/", 200), ("DELETE", "/none", 404)):
        assert (await client.request(method, path, headers=box.head())).status_code == status
    for change in ({"E2b-Traffic-Access-Token": ""}, {"E2b-Traffic-Access-Token": KEY}, {"E2b-Sandbox-Id": "0" * 24}):
        assert (await client.get("/", headers=box.head() | change)).status_code == 401
    envd = {"E2b-Sandbox-Port": "49983"}  # for which the other token is no good
    assert (await client.get("/health", headers=box.head() | envd)).status_code == 401, "it is for ports alone"
    closed = await client.get("/", headers=box.head() | {"E2b-Sandbox-Port": "8001"})
    assert (closed.status_code, "port is not open" in closed.json()["message"]) == (502, True)
    for port in ("0", "65536", "x", "080000"):
        assert (await client.get("/", headers=box.head() | {"E2b-Sandbox-Port": port})).status_code == 400


async def test_an_answer_that_breaks_off_breaks_off_and_so_does_one_whose_sandbox_ends(world: World) -> None:
    """A client is never told that half of an answer was all, and has each piece of it at once."""
    box = await make(world)
    for path, mark in (("/broken", b"["), ("/silent", b"["), ("/silent", b"]")):
        async with await world.running.connect() as stream:
            lines = [
                f"GET {path} HTTP/1.1",
                "Host: localhost",
                *(f"{name}: {value}" for name, value in box.head().items()),
            ]
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            got = await read_until(stream, mark)
            if mark == b"]":
                await world.client.delete(f"/sandboxes/{box.made['sandboxID']}")
            if (path, mark) != ("/silent", b"["):  # that client leaves
                assert not (got + await read_to_end(stream)).endswith(b"0\r\n\r\n")
    gone = await world.client.get("/", headers=box.head())
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


async def test_a_port_has_a_name_which_is_open_unless_the_client_says_otherwise(
    world: World,
) -> None:
    """`get_host` leads to the gateway. With `allowPublicTraffic` false the traffic token is asked for there, too. A
    paused sandbox is woken by its name if it was made so."""
    client, box = world.client, await make(world)
    closed = await make(world, network={"allowPublicTraffic": False}, autoResume={"enabled": True})
    token = {"E2B-Traffic-Access-Token": closed.made["trafficAccessToken"]}
    assert [await box.by_name(), await closed.by_name(), await closed.by_name(**token)] == [200, 401, 200]
    others = {"E2B-Traffic-Access-Token": box.made["trafficAccessToken"]}
    assert await closed.by_name(**others) == 401
    assert (await client.get("/", headers=closed.head())).status_code == 200
    for each in (box, closed):
        assert (await client.post(f"/sandboxes/{each.made['sandboxID']}/pause", json={})).status_code == 204
    assert [await box.by_name(), await closed.by_name(**token)] == [503, 200]
    again = await client.post(f"/v2/sandboxes/{closed.made['sandboxID']}/connect", json={})
    assert again.json() == closed.made
