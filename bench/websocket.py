"""A WebSocket client as thin as can be, on a plain blocking socket: frames out masked, frames in as they come.

Source: RFC 6455 §4.1 (opening handshake), §5.2 (framing).
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import struct
from typing import Any

from bench.daemon import KEY

_TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_HEADER = struct.Struct("!IBQ")
_RECEIVE_BYTES = 1024 * 1024


class WebSocket:
    """One open connection. `receive` returns text as `str` and binary messages as `bytes`."""

    def __init__(self, address: tuple[str, int], path: str) -> None:
        self._socket = socket.create_connection(address, timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {nonce}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._more()
        head, _, rest = head.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(head.decode(errors="replace"))
        self._buffer = bytearray(rest)

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def send(self, message: str | bytes) -> None:
        """Send one message."""
        text = isinstance(message, str)
        data = message.encode() if isinstance(message, str) else message
        self._send_frame(_TEXT if text else _BINARY, data)

    def receive(self) -> str | bytes:
        """Return the next message; answers pings meanwhile."""
        while True:
            opcode, payload = self._frame()
            if opcode == _TEXT:
                return payload.decode()
            if opcode == _BINARY:
                return payload
            if opcode == _CLOSE:
                raise ConnectionError(f"closed: {payload!r}")
            if opcode == _PING:
                self._send_frame(_PONG, payload)

    def echo(self) -> None:
        """Have a short message sent back. Raises `RuntimeError`: another came."""
        self.send("x" * 600)
        if self.receive() != "x" * 600:
            raise RuntimeError("a wrong echo")

    def _send_frame(self, opcode: int, data: bytes) -> None:
        length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2)
        if len(data) >= 65536:
            length = b"\xff" + len(data).to_bytes(8)
        self._socket.sendall(bytes([0x80 | opcode]) + length + bytes(4) + data)  # a mask of zeros changes nothing

    def _frame(self) -> tuple[int, bytes]:
        self._need(2)
        length, start = self._buffer[1] & 0x7F, 2
        if length >= 126:
            start = 4 if length == 126 else 10
            self._need(start)
            length = int.from_bytes(self._buffer[2:start])
        self._need(start + length)
        opcode, payload = self._buffer[0] & 0x0F, bytes(memoryview(self._buffer)[start : start + length])
        del self._buffer[: start + length]
        return opcode, payload

    def _need(self, size: int) -> None:
        while len(self._buffer) < size:
            self._buffer += self._more()

    def _more(self) -> bytes:
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


class ExecSocket:
    """The exec stream of one session over one WebSocket."""

    def __init__(self, address: tuple[str, int], session_id: str) -> None:
        self._socket = WebSocket(address, f"/v1/sessions/{session_id}/exec/ws")
        self._socket.receive()  # hello
        self._channels = itertools.count(1)

    def __enter__(self) -> ExecSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.__exit__(*error)

    def start(self, command: str, **fields: object) -> int:
        """Begin a command and return its channel."""
        channel = next(self._channels)
        self.say(type="start", id=channel, cmd=command, **fields)
        return channel

    def say(self, **message: object) -> None:
        self._socket.send(json.dumps(message))

    def next(self) -> dict[str, Any] | bytes:
        """Return the next event of whatever channel: a JSON object, or a piece of output."""
        message = self._socket.receive()
        if isinstance(message, bytes):
            return message[_HEADER.size :]
        event: dict[str, Any] = json.loads(message)
        if event["type"] == "error":
            raise RuntimeError(message)
        return event

    def run(self, command: str) -> None:
        """Run a command to its end."""
        self.start(command)
        self.until_exit()

    def until_exit(self, *, credit_every: int = 0) -> int:
        """Read until the command has ended; return how many bytes of output came. With `credit_every` give as much
        credit back whenever so much has come."""
        size = owed = 0
        while True:
            event = self.next()
            if isinstance(event, bytes):
                size += len(event)
                owed += len(event)
                if credit_every and owed >= credit_every:
                    self.say(type="credit", id=1, bytes=owed)
                    owed = 0
            elif event["type"] == "exit":
                return size
