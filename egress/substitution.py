"""Placeholders in requests become values, and an answer that has a value in it is cut. No input, no output.

A value goes into the values of header fields, and into `Basic` credentials (RFC 7617), which are decoded for it; never
into a target or a body. Values are searched for in all that the server says, as they are and in base64 wherever they
stand in it: in the head of an answer and its trailer, in a body, and in the bytes after a 101. Requests ask for no
content coding (RFC 9110, 12.5.3), so that a body can be searched; a body that has one all the same passes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import NoReturn

import h11

from egress.http import Headers, HttpGuard, HttpRefused
from egress.policy import Reason

_HELD_BYTES = 4
"""Shortest beginning of a text that is held back at the end of a portion: shorter ones give nothing away, and whoever
waits for them would wait for long."""

_CREDENTIALS = (b"authorization", b"proxy-authorization")
_BASIC = b"basic "
_CODINGS = (b"accept-encoding", b"sec-websocket-extensions")  # RFC 9110, 12.5.3; RFC 6455, 9.1


class EchoFound(Exception):
    """A text that must not go out is there."""


class EchoSearch:
    """A search in a stream of bytes for texts, none of which is shorter than `_HELD_BYTES`."""

    def __init__(self) -> None:
        self._needles: dict[bytes, None] = {}
        self._seen = b""
        """The last bytes, as many as a text that goes on may have begun in."""
        self._held = 0
        """The number of these that were not let out."""

    def add(self, needle: bytes) -> None:
        """Search for one more text from now on."""
        self._needles[needle] = None

    def look(self, text: bytes) -> None:
        """Look at a whole text. Raises `EchoFound`."""
        if any(needle in text for needle in self._needles):
            raise EchoFound

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may go out now; without data the stream ends, and all may. Raises `EchoFound`."""
        window = self._seen + data
        self.look(window)
        unsent = self._held + len(data)
        self._held = min(unsent, self._begun(window)) if data else 0
        out = window[len(window) - unsent : len(window) - self._held]
        longest = max(map(len, self._needles), default=1)
        self._seen = window[max(len(window) - max(longest - 1, self._held), 0) :] if data else b""
        return out

    def _begun(self, window: bytes) -> int:
        """Return the length of the longest end of the window that a text begins with."""
        found = 0
        for needle in self._needles:
            tail, beginning = window[-(len(needle) - 1) :], needle[:_HELD_BYTES]
            at = tail.find(beginning)
            while at >= 0 and len(tail) - at > found:
                if needle.startswith(tail[at:]):
                    found = len(tail) - at
                    break
                at = tail.find(beginning, at + 1)
        return found


class SecretGuard(HttpGuard):
    """HTTP of one connection to a host that has secrets. `values`: from each placeholder to its value."""

    def __init__(self, name: str, port: int, values: Mapping[bytes, bytes]) -> None:
        super().__init__(name, port)
        self._values = values
        self._search = EchoSearch()
        for value in values.values():
            for form in _forms(value):
                self._search.add(form)
        self._is_coded = False

    def _checked(self, request: h11.Request) -> h11.Request:
        checked = super()._checked(request)
        headers = [(name, self._filled(name.lower(), value)) for name, value in _without_codings(checked)]
        return h11.Request(method=checked.method, target=checked.target, headers=headers, http_version=b"1.1")

    def _filled(self, name: bytes, value: bytes) -> bytes:
        """Return the value of a field with every placeholder replaced."""
        filled = self._replaced(value)
        if name not in _CREDENTIALS or value[: len(_BASIC)].lower() != _BASIC:
            return filled
        try:
            credentials = base64.b64decode(value[len(_BASIC) :].strip(), validate=True)
        except binascii.Error:
            return filled
        if (with_value := self._replaced(credentials)) == credentials:
            return filled
        return value[: len(_BASIC)] + base64.b64encode(with_value)

    def _replaced(self, text: bytes) -> bytes:
        for placeholder, value in self._values.items():
            text = text.replace(placeholder, value)
        return text

    def _look_at_answer(self, event: object) -> None:
        try:
            match event:
                case h11.Response() | h11.InformationalResponse():
                    self._search.look(b"\n".join([bytes(event.reason), *_lines(event.headers)]))
                    self._is_coded = any(name == b"content-encoding" for name, _ in event.headers)
                case h11.EndOfMessage():
                    self._search.look(b"\n".join(_lines(event.headers)))
        except EchoFound:
            self._cut()

    def _plain_answer(self, data: bytes) -> bytes:
        try:
            return data if self._is_coded else self._search.feed(data)
        except EchoFound:
            self._cut()

    def _cut(self) -> NoReturn:
        raise HttpRefused(Reason.ECHO, 502, "the answer has the value of a secret in it") from None


def _forms(value: bytes) -> Iterable[bytes]:
    """Return a value, and what is in the base64 of every text that has it (RFC 4648, 4 and 5): the signs that have no
    bit of a neighbour, for each place in a group of three bytes."""
    yield value
    for before, first in enumerate((0, 2, 3)):
        for sign in (b"+/", b"-_"):
            yield base64.b64encode(bytes(before) + value, sign)[first : (before + len(value)) * 8 // 6]


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    return (b"%s: %s" % (name, value) for name, value in headers)


def _without_codings(request: h11.Request) -> Headers:
    """Return a request's headers, which ask for bodies without an encoding, and for WebSockets without compression."""
    kept = [(name, value) for name, value in request.headers.raw_items() if name.lower() not in _CODINGS]
    return [*kept, (b"Accept-Encoding", b"identity")]
