"""Connections of streams: what is said of one that does not work, and that none is kept for nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import sandkasten.sync.transport
from sandkasten import errors
from sandkasten.sdk import SandboxClient, transport
from sandkasten.sdk.transport import Lost
from sandkasten.sdk.wire import EXEC_PROTOCOL, call
from tests.sdk.twin import FLAVOURS, run

MESSAGE = bytes(1024 * 1024)
HEAD = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
ACCEPTED = f"{HEAD}Sec-WebSocket-Accept: KEY\r\nSec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n"


@contextmanager
def answering_once(answer: str) -> Iterator[str]:
    """Answer one handshake, with the digest of its key for KEY (RFC 6455 §4.2.2), take nothing more, yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            kept.append(connection)
            key = re.search(rb"sec-websocket-key: (\S+)", connection.recv(64 * 1024), re.IGNORECASE)
            assert key
            digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            connection.sendall(answer.replace("KEY", base64.b64encode(digest).decode()).encode())

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
        for each in kept:
            each.close()


async def send_until_lost(client: SandboxClient) -> None:
    """A message that is not taken in time is no message that was sent, and none follows half of it."""
    connection = await client._transport.websocket(call("GET", "/"), EXEC_PROTOCOL)
    with pytest.raises(Lost, match="was lost"):
        for _ in range(20):  # what the kernel's buffers take is sent
            await connection.send(MESSAGE)
    with pytest.raises(Lost, match="is closed"):
        await connection.send("more")
    await connection.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_message_that_nobody_takes_is_a_lost_connection(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio, on trio and in a thread."""
    for module in (transport, sandkasten.sync.transport):
        monkeypatch.setattr(module, "WRITE_S", 0.2)
    with answering_once(ACCEPTED) as url:
        make: Any = lambda cls: cls(base_url=url)  # noqa: E731 - of either client
        run(flavour, send_until_lost, make)


@pytest.mark.parametrize(
    "answer",
    [
        f"{HEAD}Sec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: other\r\nSec-WebSocket-Protocol: {EXEC_PROTOCOL}\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: KEY\r\n\r\n",
        f"{HEAD}Sec-WebSocket-Accept: KEY\r\nSec-WebSocket-Protocol: other\r\n\r\n",
    ],
    ids=["no digest", "another digest", "no protocol", "another protocol"],
)
async def test_a_handshake_that_is_none_is_refused(answer: str) -> None:
    """As by a proxy that knows no WebSockets: runs are followed by events."""
    with answering_once(answer) as url:
        async with SandboxClient(base_url=url) as client:
            with pytest.raises(errors.SandkastenAPIError, match="no WebSockets"):
                await client._transport.websocket(call("GET", "/"), EXEC_PROTOCOL)
