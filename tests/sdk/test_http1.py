"""HTTP/1.1 as other servers speak it: how a body ends, what is refused, tunnels and TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from sandkasten import errors
from sandkasten.sdk import SandboxClient, transport
from tests.kernel.tool_servers import Authority
from tests.sdk.test_bad_servers import answering
from tests.sdk.twin import FLAVOURS, run
from tests.waiting import patience

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: 15\r\n"
BODY = b'{"status":"ok"}'
CHUNKS = b'5;a=b\r\n{"sta\r\nA \r\ntus":"ok"}\r\n0\r\nTrailer: x\r\n\r\n'


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        (LENGTH + b"\r\n" + BODY, True),
        (LENGTH + b"content-length:15 \r\n\r\n" + BODY, True),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\nLink: b\r\n\r\n" + LENGTH + b"\r\n" + BODY,
            True,
        ),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n" + CHUNKS, True),
        (LENGTH + b"Connection: keep-alive, Close\r\n\r\n" + BODY, False),
        (LENGTH.replace(b"1.1", b"1.0") + b"\r\n" + BODY, False),
        (LENGTH + b"\r\n" + BODY + b"more than was said", False),
    ],
    ids=["length", "twice", "informational", "chunks", "close", "old", "more"],
)
async def test_a_body_ends_where_its_head_says(said: bytes, is_kept: bool) -> None:
    """The connection is kept only if nothing else can be on it."""
    async with answering([said]) as (url, times), SandboxClient(base_url=url) as client:
        with trio.fail_after(patience()):
            assert await client.healthz()
            assert bool(client._transport._pool._idle) is is_kept
            assert await client.healthz()
        assert len(times) == 2
        assert not client._transport._pool.used


@pytest.mark.parametrize(
    "said",
    [
        OK + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + BODY,
        OK + b"Content-Length: +15\r\n\r\n" + BODY,
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS.replace(b"5;", b"-5;"),
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS.replace(b"5;", b"4;"),
        OK + b"Content Length: 15\r\n\r\n" + BODY,
        OK + b" folded\r\n\r\n",
        OK + b"a" * 200_000,
    ],
    ids=["two lengths", "sign", "coding", "size", "chunk", "name", "line", "long"],
)
async def test_what_is_no_http_is_a_lost_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it is guessed at."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.001)
    async with answering([said]) as (url, _), SandboxClient(base_url=url) as client:
        with trio.fail_after(patience()), pytest.raises(errors.ConnectionFailed, match="the server sent"):
            await client.healthz()


async def test_a_key_with_a_line_break_is_not_sent() -> None:
    """The rest of the key would be another header."""
    async with answering([LENGTH + b"\r\n" + BODY]) as (url, times):
        async with SandboxClient(base_url=url, api_key="a\r\nX-Other: b") as client:
            with pytest.raises(errors.ConnectionFailed, match="line break"):
                await client.healthz()
        assert not times


@contextmanager
def _serving(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection in a thread, and yield the port."""
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                if is_over.is_set():
                    connection.close()
                    return
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

        is_over = threading.Event()
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        port = listener.getsockname()[1]
        try:
            yield port
        finally:
            is_over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            for each in (acceptor, *threads):
                each.join()


def _answer(authority: Authority, connection: socket.socket) -> None:
    """Answer one request over TLS."""
    try:
        with authority.wrapped(connection) as stream:
            stream.recv(64 * 1024)
            stream.sendall(LENGTH + b"\r\n" + BODY)
    except (ssl.SSLError, OSError):
        connection.close()


def _tunnel(asked: list[bytes], port: int, connection: socket.socket) -> None:
    """Make a tunnel to a port, whatever the name, for who has a password."""
    with connection:
        asked.append(connection.recv(64 * 1024))
        if b"Basic bWU6YSBi" not in asked[-1]:
            connection.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")
            return
        connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=_copy, args=(server, connection))
            back.start()
            _copy(connection, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(64 * 1024):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


async def ask(client: SandboxClient) -> None:
    """Ask once."""
    assert await client.healthz()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tls_is_checked_and_goes_through_a_proxy(flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tunnel, with the password of the proxy's URL; a certificate of another name is refused."""
    authority = Authority(tmp_path, "sandkasten.test")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    asked: list[bytes] = []
    with _serving(partial(_answer, authority)) as port, _serving(partial(_tunnel, asked, port)) as proxy:

        def attempt(url: str) -> None:
            make: Any = lambda cls: cls(base_url=url, timeout=patience())  # noqa: E731 - of either client
            run(flavour, ask, make)

        monkeypatch.setenv("https_proxy", f"http://me:a%20b@127.0.0.1:{proxy}")
        attempt("https://sandkasten.test:8443")
        assert asked[-1].startswith(b"CONNECT sandkasten.test:8443 HTTP/1.1\r\nhost: sandkasten.test:8443\r\n")
        with pytest.raises(errors.ConnectionFailed, match="no server answers"):
            attempt("https://other.test:8443")
        with pytest.raises(errors.ConnectionFailed, match="no server answers"):
            attempt(f"https://localhost:{port}")
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy}")
        with pytest.raises(errors.ConnectionFailed, match="407"):
            attempt("https://sandkasten.test:8443")
