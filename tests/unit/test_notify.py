"""Messages to the service manager: real datagrams, at a path and at an abstract name, and no wait for a manager that
does not read.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkasten.host.notify import Notifier, open_notifier
from tests.waiting import patience


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and its name as `NOTIFY_SOCKET` has it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@sandkasten-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(patience(5))
        yield sock, name


def test_each_message_is_one_datagram(manager: tuple[socket.socket, str]) -> None:
    """A status is one line, whatever it was made of; the variables are gone, so that no child takes them as its own."""
    sock, name = manager
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "OTHER": "stays"}
    notifier = open_notifier(environ)
    assert (environ, notifier.beat_s) == ({"OTHER": "stays"}, 1.0)
    notifier.ready("listening")
    notifier.alive("2 sessions")
    notifier.say("bad\nREADY=1")
    notifier.stopping("sessions run on")
    assert [sock.recv(4096).decode() for _ in range(4)] == [
        "READY=1\nSTATUS=listening",
        "WATCHDOG=1\nSTATUS=2 sessions",
        "STATUS=bad READY=1",
        "STOPPING=1\nSTATUS=sessions run on",
    ]
    notifier.close()
    notifier.say("after the end")
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(4096)


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"NOTIFY_SOCKET": "/nowhere/at/all"}]
)
def test_without_somebody_who_listens_nothing_is_said(environ: dict[str, str]) -> None:
    """A daemon in the foreground has no service manager, which is no error."""
    notifier = open_notifier({**environ, "WATCHDOG_USEC": "1000000"})
    notifier.ready("listening")
    assert (notifier.beat_s, notifier.fileno()) == (None, -1)


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("0", ""), ("-5", ""), ("many", ""), ("1000000", "1")])
def test_a_watchdog_that_is_off_or_watches_another_is_not_fed(usec: str, pid: str, tmp_path: Path) -> None:
    """A watchdog of another process waits for that process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
        notifier = open_notifier(environ)
        assert notifier.beat_s is None
        notifier.close()


def test_a_manager_that_does_not_read_or_is_gone_holds_nobody_up(tmp_path: Path) -> None:
    """Messages that can't be delivered are dropped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        notifier = open_notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(2000):
            notifier.alive("still here")
    notifier.alive("gone")
    notifier.close()


def test_a_notifier_of_nobody_says_nothing() -> None:
    """A notifier without a service manager can be used all the same."""
    Notifier().stopping("done")
