"""Listeners: the addresses that are taken and refused, and that a unix socket is private and gone afterwards."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import httpx
import pytest
import trio

from sandkasten.api.http.listen import ListenError, open_listeners, split_host_port
from sandkasten.api.http.settings import ApiSettings
from tests.api import apps
from tests.api.harness import KEY, running_app, running_front


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
        (":80", ("", 80)),
    ],
)
def test_host_and_port_are_split(address: str, parsed: tuple[str, int]) -> None:
    """Names, IPv4, bracketed IPv6, and no host at all."""
    assert split_host_port(address) == parsed


@pytest.mark.parametrize("address", ["", "8080", "localhost", "localhost:", "a:65536", "a:-1", "a:٣", "::1:80", "a:b"])
def test_a_malformed_address_is_refused(address: str) -> None:
    """With a sentence that quotes it."""
    with pytest.raises(ListenError, match=re.escape(repr(address))):
        split_host_port(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "192.0.2.1:0"])
async def test_without_a_key_only_loopback_is_served(address: str) -> None:
    """The refusal comes before anything is bound, and says what to do."""
    with pytest.raises(ListenError, match="without an API key"):
        async with open_listeners((address,), loopback_only=True):
            pass


async def test_localhost_counts_as_loopback() -> None:
    """Names are resolved before they are judged."""
    async with open_listeners(("localhost:0",), loopback_only=True) as bound:
        assert all(re.match(r"http://(127\.0\.0\.1|\[::1\]):\d+\Z", address) for address in bound.addresses)


async def test_with_a_key_every_address_is_served() -> None:
    """A key is what makes a public address acceptable."""
    async with running_app(apps.plain, listen=("0.0.0.0:0",)) as running:
        assert await running.is_alive()


async def test_a_name_without_address_is_an_error() -> None:
    """One sentence, not a traceback of the resolver."""
    with pytest.raises(ListenError, match="has no address"):
        async with open_listeners(("no-such-host.invalid:0",), loopback_only=True):
            pass


async def test_a_taken_port_is_an_error() -> None:
    """The message names the address."""
    async with open_listeners(("127.0.0.1:0",), loopback_only=True) as bound:
        port = bound.addresses[0].rpartition(":")[2]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
            async with open_listeners((f"127.0.0.1:{port}",), loopback_only=True):
                pass


async def test_tcp_and_a_unix_socket_are_served_at_once(tmp_path: Path) -> None:
    """Both are reported, the socket has mode 0600 and is gone after the stop."""
    path = tmp_path / "api.sock"
    async with running_front(listen=("127.0.0.1:0", f"unix:{path}")) as running:
        assert running.addresses == [running.url, f"unix:{path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandkasten") as client:
            headers = {"Authorization": f"Bearer {KEY}"}
            assert (await client.post("/v1/sessions", headers=headers)).status_code == 201
        assert await running.is_alive()
        await running.stop()
        assert not path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """A daemon that was killed leaves its socket; the next one starts all the same."""
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with open_listeners((f"unix:{path}",), loopback_only=True):
        pass
    assert not path.exists()


async def test_a_socket_in_use_is_an_error(tmp_path: Path) -> None:
    """A second daemon must not steal the first one's socket."""
    address = (f"unix:{tmp_path / 'api.sock'}",)
    async with open_listeners(address, loopback_only=True):
        with pytest.raises(ListenError, match="another process"):
            async with open_listeners(address, loopback_only=True):
                pass
        assert (tmp_path / "api.sock").exists()


async def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    """Only sockets are ever removed."""
    path = tmp_path / "api.sock"
    path.write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        async with open_listeners((f"unix:{path}",), loopback_only=True):
            pass
    assert path.read_text() == "precious"


async def test_a_successors_socket_is_not_removed(tmp_path: Path) -> None:
    """A stop removes the file it made, not whatever has that name by then."""
    path = tmp_path / "api.sock"
    async with open_listeners((f"unix:{path}",), loopback_only=True):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


@pytest.mark.parametrize("path", ["/nonexistent/api.sock", "/" + "a" * 200, "/tmp/\0"])
async def test_an_impossible_path_is_an_error(path: str) -> None:
    """No directory, too long, not a path: one sentence each."""
    with pytest.raises(ListenError):
        async with open_listeners((f"unix:{path}",), loopback_only=True):
            pass


async def test_one_bad_address_closes_the_good_ones() -> None:
    """All or nothing: no listener is left behind."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ListenError):
        async with open_listeners(("127.0.0.1:0", "nonsense"), loopback_only=True):
            pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_key_is_not_in_the_settings_repr() -> None:
    """Settings end up in logs."""
    assert "secret" not in repr(ApiSettings(api_key="secret"))


async def test_no_address_is_an_error() -> None:
    """A daemon that listens nowhere would only look alive."""
    with pytest.raises(ListenError):
        async with open_listeners((), loopback_only=True):
            await trio.lowlevel.checkpoint()
