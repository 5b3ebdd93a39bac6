"""The daemon as a client meets it: started by its console script, spoken to over plain sockets.

The client is as thin as can be (one `sendall`, reads until the answer is whole), so that what is measured is the
daemon and not an HTTP library.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

KEY = "benchmark"
WithLog = Callable[[Path, Path], AbstractContextManager[tuple[int, tuple[str, int]]]]
"""`running_with_log`, or as that."""


def running(data_dir: Path, **environ: str) -> AbstractContextManager[tuple[int, tuple[str, int]]]:
    """Run a daemon on a free port, with settings by the names of their variables; yield its pid and address."""
    return _running(data_dir, "--stop-sessions", environ=environ)


def running_with_log(data_dir: Path, log: Path) -> AbstractContextManager[tuple[int, tuple[str, int]]]:
    """As `running`; the daemon's log goes to a file, and tells of ordinary events as well."""
    return _running(data_dir, "--stop-sessions", log=log, environ={})


def running_and_leaving_with_log(data_dir: Path, log: Path) -> AbstractContextManager[tuple[int, tuple[str, int]]]:
    """As `running_with_log`; the daemon leaves its sessions to the next one."""
    return _running(data_dir, log=log, environ={})


def running_and_leaving(data_dir: Path, **environ: str) -> AbstractContextManager[tuple[int, tuple[str, int]]]:
    """As `running`; the daemon leaves its sessions to the next one."""
    return _running(data_dir, environ=environ)


@contextmanager
def _running(
    data_dir: Path, *options: str, log: Path | None = None, environ: Mapping[str, str]
) -> Iterator[tuple[int, tuple[str, int]]]:
    words = ["serve", "--listen", "127.0.0.1:0", "--data-dir", str(data_dir), *options]
    own = {"SANDKASTEN_API_KEY": KEY}
    for name in ("HEAD", "KEEP_ALIVE"):  # a connection waits for its first request, and its next, as other rows take
        own[f"SANDKASTEN_SERVER_{name}_TIMEOUT_S"] = "3600"
    with ExitStack() as stack:
        process = stack.enter_context(
            start(
                [*words, "--log-level", "info" if log else "warning"],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("wb")) if log else None,
                text=True,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **own, **environ},
            )
        )
        assert process.stdout is not None
        try:
            found = next(filter(None, (re.search(r"http://([\d.]+):(\d+)", line) for line in process.stdout)))
            yield process.pid, (found[1], int(found[2]))
        finally:
            process.terminate()
            process.stdout.read()


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start the console script with the options of `subprocess.Popen`."""
    return subprocess.Popen([str(Path(sys.executable).with_name("sandkasten")), *words], **options)


class Client:
    """One keep-alive connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def call(self, method: str, path: str, body: object = None) -> Any:  # any JSON
        """Send one request and return its decoded answer."""
        return json.loads(self.text(method, path, body))

    def text(self, method: str, path: str, body: object = None) -> bytes:
        """Send one request and return the body of its answer."""
        self._socket.sendall(encode(method, path, body))
        data = b""
        while (content := body_of(data)) is None:
            data += self._receive()
        return content

    def wait_for(self, method: str, path: str, body: object, marker: bytes) -> None:
        """Send one request and return as soon as `marker` has arrived; the connection is then used up."""
        self._socket.sendall(encode(method, path, body))
        data = b""
        while marker not in data:
            data += self._receive()

    def _receive(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the daemon closed the connection")
        return data


def encode(method: str, path: str, body: object = None) -> bytes:
    """Return a request as bytes. A body is JSON, unless it is bytes."""
    kind = "octet-stream" if isinstance(body, bytes) else "json"
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/{kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def decode(data: bytes) -> Any:  # JSON
    """Return the answer in `data`, or None while it is not whole. Raises `RuntimeError` unless it is a 2xx."""
    content = body_of(data)
    return None if content is None else json.loads(content)


def body_of(data: bytes) -> bytes | None:
    """Return the body of the answer in `data`, as `decode`."""
    head, separator, content = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    if length := re.search(rb"content-length: *(\d+)", head, re.IGNORECASE):
        if len(content) < int(length[1]):
            return None
    elif content.endswith(b"\r\n0\r\n\r\n"):
        content = _dechunked(content)
    else:
        return None
    if not head.startswith(b"HTTP/1.1 2"):
        raise RuntimeError(content.decode(errors="replace"))
    return content


def _dechunked(content: bytes) -> bytes:
    """Return a whole body without its division into chunks (RFC 9112 §7.1)."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = content.index(b"\r\n", at)
        size = int(content[at:end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(content[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def verify(answer: Mapping[str, Any], output: bytes) -> None:
    """Raise `RuntimeError` unless a command has ended with status 0 and given that output."""
    if answer["exit_code"] != 0 or answer["output"].encode() != output:
        raise RuntimeError(f"a wrong answer: {answer}")
