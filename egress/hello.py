"""The server name of a TLS ClientHello (RFC 8446, 4.1.2; RFC 6066, 3), from bytes as they arrive. No input, no output.

What begins as TLS is a ClientHello: a broken one has a fault and no server name, and is refused as one without a name
is. Were it taken for something else than TLS, it would reach a server that reads more leniently.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from egress.policy import InvalidRule, canonical_name

MAX_HELLO_BYTES = 16 * 1024
"""Bytes of the connection within which the ClientHello must end."""

_RECORD_HEADER_BYTES = 5
_HANDSHAKE = 22
_OTHER_RECORDS = (20, 21, 23, 24)  # some servers skip a warning before the ClientHello
_CLIENT_HELLO = 1
_MAX_RECORD_BYTES = 1 << 14
_SERVER_NAME = 0
_HOST_NAME = 0
_ENCRYPTED_CLIENT_HELLO = 0xFE0D  # RFC 9849
CHANGE_CIPHER_SPEC = b"\x14\3\3\0\1\1"
"""A record that clients may send before their second ClientHello (RFC 8446, D.4)."""
_ALERT, _ALERT_BYTES = 21, 7
_RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_RANDOM_AT = _RECORD_HEADER_BYTES + 4 + 2


class _Broken(Exception):
    """A defect, with the sentence on it."""


@attrs.frozen
class ClientHello:
    """A ClientHello that is complete, or that is broken."""

    server_name: str | None
    """Canonical name; None if there is none that may be one."""
    has_ech: bool = False
    """An encrypted ClientHello is inside, or random bytes in its place; `server_name` is the outer one's."""
    fault: str | None = None
    """A sentence on why there is no server name."""


@attrs.frozen
class NotTls:
    """The bytes begin no TLS connection."""


class HelloReader:
    """Reader of the first bytes that a client sends. Holds at most `MAX_HELLO_BYTES`, and never raises."""

    def __init__(self) -> None:
        self._taken = 0
        self._records = bytearray()
        """Bytes of which no record was made yet."""
        self._message = bytearray()
        """Bytes of the handshake message."""
        self._result: ClientHello | NotTls | None = None
        self.size = 0
        """Bytes of the connection that the complete records take which were read; with a result, up to its end."""

    def feed(self, data: bytes) -> ClientHello | NotTls | None:
        """Return what the bytes so far begin, or None: more are needed. A result stays."""
        if self._result is None:
            self._records += data[: MAX_HELLO_BYTES - self._taken]
            self._taken += len(data)
            try:
                self._result = self._read()
            except _Broken as broken:
                self._result = ClientHello(None, fault=str(broken))
            if self._result is not None:
                self._records.clear()
                self._message.clear()
        return self._result

    def _read(self) -> ClientHello | NotTls | None:
        if not self._message and (begin := _is_tls(self._records)) is not True:
            return None if begin is None else NotTls()
        at = 0
        while len(self._records) - at >= _RECORD_HEADER_BYTES:
            kind, major, _minor, *length = self._records[at : at + _RECORD_HEADER_BYTES]
            size = int.from_bytes(length, "big")
            if kind != _HANDSHAKE or major != 3 or not 0 < size <= _MAX_RECORD_BYTES:
                raise _Broken("a record before the end of the ClientHello has another type or version, or a wrong size")
            body = at + _RECORD_HEADER_BYTES
            if len(self._records) < body + size:
                break
            self._message += self._records[body : body + size]
            at = body + size
            self.size += _RECORD_HEADER_BYTES + size
            if (hello := self._complete_message()) is not None:
                return _client_hello(hello)
        del self._records[:at]
        if self._taken >= MAX_HELLO_BYTES:
            raise _Broken(f"the ClientHello has more than {MAX_HELLO_BYTES} bytes")
        return None

    def _complete_message(self) -> bytes | None:
        """Return the body of the handshake message, once all of it is there."""
        if self._message[0] != _CLIENT_HELLO:
            raise _Broken("the first message of TLS is no ClientHello")
        if len(self._message) < 4:
            return None
        end = 4 + int.from_bytes(self._message[1:4], "big")
        if len(self._message) > end:
            raise _Broken("the ClientHello shares a record with another message")
        return bytes(self._message[4:]) if len(self._message) == end else None


def is_retry(data: bytes) -> bool | None:
    """Tell whether the first bytes of a server ask for a second ClientHello (RFC 8446, 4.1.3); None: more are needed.

    Servers take the name from the second one, so that has to be looked at, too.
    """
    while data[:1] == bytes([_ALERT]) and len(data) > _ALERT_BYTES:  # a warning, in front of TLS 1.2
        data = data[_ALERT_BYTES:]
    end = _RANDOM_AT + len(_RETRY_RANDOM)
    if len(data) < end and (not data or data[0] in (_ALERT, _HANDSHAKE)):
        return None
    return data[0] == _HANDSHAKE and data[_RANDOM_AT:end] == _RETRY_RANDOM


def _is_tls(data: bytes | bytearray) -> bool | None:
    """Tell whether bytes begin a TLS connection; None if more are needed."""
    if data and data[0] & 0x80:  # the hello of SSL 2 that offers TLS (RFC 5246, E.2), which has no server name
        if len(data) < 4:
            return False if len(data) == 3 and data[2] != _CLIENT_HELLO else None
        if data[2] == _CLIENT_HELLO and data[3] == 3:
            raise _Broken("the ClientHello has the form of SSL 2")
        return False
    if data[:1] == bytes([_HANDSHAKE]):  # whatever version follows: servers must ignore it (RFC 8446, 5.1)
        return True
    if data and data[0] in _OTHER_RECORDS:
        return None if len(data) < 2 else data[1] == 3
    return False if data else None


class _Fields:
    """Reader of the fields of a message; a field that is not there whole is a defect."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise _Broken("a field of the ClientHello ends beyond its end")
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, length_size: int) -> bytes:
        """Return the bytes of a vector with its length before it (RFC 8446, 3.4)."""
        return self.take(self.number(length_size))

    def end(self) -> None:
        if not self.is_over:
            raise _Broken("the ClientHello has bytes behind its last field")


def _client_hello(body: bytes) -> ClientHello:
    fields = _Fields(body)
    fields.take(2 + 32)  # version, random
    fields.vector(1)  # session
    fields.vector(2)  # cipher suites
    fields.vector(1)  # compression
    extensions = {} if fields.is_over else dict(_extensions(fields.vector(2)))
    fields.end()
    name = extensions.get(_SERVER_NAME)
    if name is None:
        return ClientHello(None, _ENCRYPTED_CLIENT_HELLO in extensions, "the ClientHello has no server name")
    return ClientHello(_server_name(name), _ENCRYPTED_CLIENT_HELLO in extensions)


def _extensions(data: bytes) -> Iterator[tuple[int, bytes]]:
    fields, seen = _Fields(data), set()
    while not fields.is_over:
        kind = fields.number(2)
        if kind in seen:  # RFC 8446, 4.2 forbids; readers differ on which one counts
            raise _Broken(f"the ClientHello has the extension {kind} twice")
        seen.add(kind)
        yield kind, fields.vector(2)


def _server_name(data: bytes) -> str:
    fields = _Fields(data)
    names = _Fields(fields.vector(2))
    fields.end()
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or not names.is_over:  # RFC 6066, 3: one name of each type, and there is one type
        raise _Broken("the ClientHello has several server names, or one of an unknown type")
    try:
        return canonical_name(name.decode("ascii"))
    except (InvalidRule, UnicodeDecodeError):
        raise _Broken("the server name of the ClientHello is no name") from None
