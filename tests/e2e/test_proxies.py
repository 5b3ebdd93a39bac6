"""Reverse proxies, configured as docs/deployment.md says, pass on what the daemon and its clients say, at once."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trio_websocket import open_websocket_url

from sandkasten.api.websocket.exec_messages import PROTOCOL
from sandkasten.errors import ConnectionFailed
from tests import debian
from tests.api.ws_client import Talk, output_of
from tests.e2e.daemon import KEY, Daemon
from tests.sdk import usage
from tests.sdk.twin import FLAVOURS, run
from tests.waiting import patience

PAGE = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
BEARER = {"Authorization": f"Bearer {KEY}"}
NGINX = """\
daemon off; master_process off; pid {top}/pid; error_log {top}/log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {top}/body; proxy_temp_path {top}/proxy; fastcgi_temp_path {top}/fastcgi;
    uwsgi_temp_path {top}/uwsgi; scgi_temp_path {top}/scgi;
    {page}
}}
"""
CADDY = """\
{{
    admin off
    auto_https off
}}
{page}
"""


def _block(kind: str) -> str:
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(block)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def certificate() -> Iterator[Path]:
    """A directory with a key and a certificate of localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as name:
        directory = Path(name)
        files = ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/fullchain.pem"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        subprocess.run([*command, *files, *names, "-days", "2"], check=True, capture_output=True)
        yield directory


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def url(request: pytest.FixtureRequest, daemon: Daemon, certificate: Path) -> Iterator[str]:
    """The address of a proxy before the daemon, with the configuration of the page."""
    name, port = str(request.param), _free_port()
    try:
        program = debian.program(name, {"nginx": "usr/sbin/nginx", "caddy": "usr/bin/caddy"}[name])
    except debian.Unavailable as reason:
        pytest.skip(f"{name} can't be had: {reason}")
    upstream = daemon.wait_url().removeprefix("http://")
    top = certificate / name
    top.mkdir()
    config = top / "config"
    page = _block({"nginx": "nginx", "caddy": "caddyfile"}[name]).replace("127.0.0.1:8080", upstream)
    if name == "nginx":
        page = page.replace("/etc/ssl/sandbox.example.org", str(certificate)).replace("listen 443", f"listen {port}")
        config.write_text(NGINX.format(top=top, page=page))
        command = [str(program), "-p", str(top), "-e", f"{top}/log", "-c", str(config)]
    else:
        tls = f"tls {certificate}/fullchain.pem {certificate}/key.pem"
        page = page.replace("sandbox.example.org {", f"https://localhost:{port} {{\n    {tls}")
        config.write_text(CADDY.format(page=page))
        command = [str(program), "run", "--adapter", "caddyfile", "--config", str(config)]
    variables = {"HOME": str(top), "XDG_DATA_HOME": str(top), "XDG_CONFIG_HOME": str(top)}
    with (top / "said").open("w") as said, subprocess.Popen(command, stdout=said, stderr=said, env=variables) as proxy:
        try:
            _wait_until_it_listens(port, proxy, top)
            yield f"https://localhost:{port}"
        finally:
            proxy.terminate()
            proxy.wait(patience(20))


def _wait_until_it_listens(port: int, proxy: subprocess.Popen[bytes], top: Path) -> None:
    deadline = time.monotonic() + patience(20)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert proxy.poll() is None, (top / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def context(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate / "fullchain.pem")


@pytest.fixture
def through(url: str, context: ssl.SSLContext) -> Iterator[httpx.Client]:
    """A client of the proxy; every session it made is gone afterwards."""
    with httpx.Client(base_url=url, headers=BEARER, verify=context, timeout=patience(60), trust_env=False) as client:
        yield client
        for session in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.fixture
def session(through: httpx.Client) -> str:
    """The path of a session."""
    return f"/v1/sessions/{through.post('/v1/sessions', json={}).json()['id']}"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_sdk_trusts_the_authority_that_the_environment_names(
    flavour: str, url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL_CERT_FILE`, for requests and for the WebSocket of streams; without it the server is refused."""
    make: Any = lambda cls: cls(base_url=url, api_key=KEY, timeout=patience(20))  # noqa: E731 - of either client
    with pytest.raises(ConnectionFailed, match="certificate"):
        run(flavour, usage.streams, make)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "fullchain.pem"))
    run(flavour, usage.streams, make)


def test_each_event_of_a_stream_comes_at_once(through: httpx.Client, session: str) -> None:
    """The command ends only when the client, which has read the first event, has written a file."""
    waits = {"cmd": "echo one; until [ -e /workspace/go ]; do sleep 0.05; done; echo two"}
    with through.stream("POST", f"{session}/exec/stream", json=waits) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data: ")).startswith('data: {"chunk":"one\\n"')
        assert through.post(f"{session}/fs/write", json={"path": "go", "text": ""}).status_code == 200
        rest = "\n".join(lines)
    assert '"chunk":"two\\n"' in rest
    assert '"exit_code":0' in rest


def test_a_large_file_goes_in_and_comes_out(through: httpx.Client, session: str) -> None:
    """Larger than what proxies take unasked."""
    data = bytes(range(256)) * (3 * 4096)
    assert through.put(f"{session}/fs/file", params={"path": "big"}, content=data).status_code == 201
    assert through.get(f"{session}/fs/file", params={"path": "big"}).content == data


async def test_a_websocket_carries_a_run_both_ways(session: str, url: str, context: ssl.SSLContext) -> None:
    """Input goes in while output comes out, and a page of the proxy's own origin may open one."""
    path = f"{url.replace('https', 'wss')}{session}/exec/ws"
    headers = [(name.encode(), value.encode()) for name, value in {**BEARER, "Origin": url}.items()]
    async with open_websocket_url(path, context, subprotocols=[PROTOCOL], extra_headers=headers) as connection:
        talk = Talk(connection)
        await talk.hear_text("hello")
        await talk.say("start", id=1, cmd="read line; echo got $line", stdin=True)
        await talk.hear_until("started")
        await talk.feed(1, b"this\n")
        assert output_of(await talk.hear_until("exit", 1)) == b"got this\n"


def test_a_client_that_leaves_ends_its_command(through: httpx.Client, session: str) -> None:
    """The proxy passes the end of a connection on."""
    endless = {"cmd": "echo on; sleep 1000", "exec_id": "left", "on_disconnect": "cancel"}
    with through.stream("POST", f"{session}/exec/stream", json=endless) as answer:
        assert next(line for line in answer.iter_lines() if line.startswith("data: "))
    deadline = time.monotonic() + patience(20)
    while (run := through.get(f"{session}/execs/left").json())["state"] != "ended":
        assert time.monotonic() < deadline, run
        time.sleep(0.05)
    assert run["end"]["cause"] == "cancelled"
