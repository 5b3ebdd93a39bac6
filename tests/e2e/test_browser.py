"""A browser's own `WebSocket` drives runs and terminals: key by first message, bytes both ways, closes with codes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

CHROMIUM = shutil.which("chromium")
PAGE = (Path(__file__).parent / "browser_page.html").read_text()
PATIENCE_S = 90.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-breakpad",
    "--disable-crash-reporter",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the browser of the package chromium")


class Site:
    """A web site on loopback: one page, and the place where the page puts its result."""

    def __init__(self) -> None:
        self.results: queue.Queue[dict[str, Any]] = queue.Queue()  # JSON values
        self.config: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = PAGE.replace("CONFIG", json.dumps(site.config), 1).encode()
                self._answer(200 if self.path == "/" else 404, body if self.path == "/" else b"")

            def do_POST(self) -> None:
                site.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(200, b"")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                pass

        return Handler


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def profile() -> Iterator[Path]:
    """A directory with a short name: the browser has a unix socket in it."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@contextlib.contextmanager
def browsing(url: str, profile: Path) -> Iterator[None]:
    """Let a browser show a page."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", url]
    places = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR")
    environment = os.environ | dict.fromkeys(places, str(profile))
    browser = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def visit(site: Site, daemon: Daemon, profile: Path) -> dict[str, Any]:  # JSON values
    """Show the page with a fresh session of the daemon and return what it reports."""
    with daemon.client() as client:
        session_id = client.post("/v1/sessions", json={}).json()["id"]
        base = f"/v1/sessions/{session_id}"
        site.config = {
            "url": daemon.wait_url().replace("http:", "ws:"),
            "key": KEY,
            "execPath": f"{base}/exec/ws",
            "terminalPath": f"{base}/terminal/ws?cols=100&rows=30&window=65536",
        }
        with browsing(site.origin, profile):
            result = site.results.get(timeout=patience(PATIENCE_S))
        client.delete(base)
        return result


def test_a_page_of_an_allowed_origin_runs_commands_and_a_terminal(site: Site, data_dir: Path, profile: Path) -> None:
    """Exact bytes on both streams, the exit with its status; a prompt that computes, and the close behind its exit."""
    with running_daemon(data_dir, SANDKASTEN_ALLOWED_ORIGINS=site.origin) as daemon:
        result = visit(site, daemon, profile)
    command, terminal = result["command"], result["terminal"]
    assert (bytes(command["output"]["1"]), bytes(command["output"]["2"])) == (b"out \xff", b"\x00\x01\xfe")
    assert (command["exit"]["type"], command["exit"]["exit_code"]) == ("exit", 3)
    assert command["end"] == {"code": 1000, "reason": "", "protocol": "sandkasten.exec.v1"}
    assert (terminal["ready"]["cols"], terminal["ready"]["rows"]) == (100, 30)
    assert "a42b" in terminal["seen"]
    assert "/dev/pts/" in terminal["seen"]
    assert terminal["exit"]["exit_code"] == 5
    assert (terminal["end"]["code"], terminal["end"]["protocol"]) == (1000, "sandkasten.terminal.v1")


def test_a_page_of_another_origin_does_not_get_in(site: Site, data_dir: Path, profile: Path) -> None:
    """A page of another origin is refused although it knows the key: the handshake fails, which the page sees
    as 1006.
    """
    with running_daemon(data_dir) as daemon:
        result = visit(site, daemon, profile)
    assert result["command"] == {
        "end": {"code": 1006, "reason": "", "protocol": ""},
        "exit": None,
        "output": {"1": [], "2": []},
    }
