"""A service manager that starts the daemon hears when it serves, that it lives, and that it stops."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import running_daemon
from tests.e2e.test_nsinit_service import running_service
from tests.waiting import patience

WATCHDOG_USEC = "600000"


@pytest.fixture
def manager() -> Iterator[tuple[socket.socket, str]]:
    """A socket with an abstract name."""
    name = f"sandkasten-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(patience(60))
        yield sock, f"@{name}"


def wait_message(sock: socket.socket, first_line: str, status: str = "") -> None:
    """Read messages until one begins so and has that in its status."""
    while True:
        message = sock.recv(4096).decode()
        if message.splitlines()[0] == first_line and status in message:
            return


def test_the_daemon_tells_when_it_serves_that_it_lives_and_that_it_stops(data_dir: Path, tmp_path: Path) -> None:
    """The daemon's messages arrive though its user could not reach the manager's socket, whose directory is root's
    alone.
    """
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(patience(60))
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": WATCHDOG_USEC}
        with running_daemon(data_dir, **variables) as daemon, daemon.client() as client:
            wait_message(sock, "READY=1", daemon.wait_url())
            client.post("/v1/sessions", json={}).raise_for_status()
            wait_message(sock, "WATCHDOG=1", "ready, 1 sessions")
            assert daemon.stop(signal.SIGINT) == 0
        wait_message(sock, "STOPPING=1", "sessions are ended")


def test_the_service_of_nsinit_does_so_too(
    data_dir: Path, manager: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nsinit service tells that it serves and lives, both before a daemon has connected and afterwards."""
    sock, name = manager
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    path = data_dir / "nsinit.sock"
    with running_service(data_dir, path) as service:
        wait_message(sock, "READY=1", str(path))
        wait_message(sock, "WATCHDOG=1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
            daemon.connect(str(path))
            for _ in range(2):
                wait_message(sock, "WATCHDOG=1")
        assert service.stop() == 0
        wait_message(sock, "STOPPING=1")
