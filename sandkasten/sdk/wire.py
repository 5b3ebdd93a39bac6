"""Format of the wire, without I/O: requests as values, answers read, events and frames decoded.

docs/api.md and docs/websocket.md describe the same from the server's side. Nothing here waits, so the asynchronous and
the blocking client share this file.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from sandkasten import errors
from sandkasten.sdk.text import OutputText
from sandkasten.sdk.types import ExecBytes, ExecResult, Output, RunEnd, StreamName, Unset

JSON = {"content-type": "application/json"}
GRACE_S = 15.0
"""Time for which the answer to a command may come after the command's own limit: it is interrupted and killed first."""

_PASSING = frozenset({429, 502, 503, 504})
_GATEWAY = frozenset({502, 503, 504})
_BYTE = re.compile("[\udc80-\udcff]")


@dataclass(slots=True)
class HttpCall:
    """A request. `patience_s` is added to the client's timeout; None is no limit. A call that is not `repeat` is sent
    once, and is `Uncertain` when the connection is lost. A stream is lost after `silence_s` without a byte, if given,
    and a transfer is given up after the client's timeout without one. One that `may_poll` is told so, and asks then
    for a stream in parts.

    `source` makes the pieces of a body anew for each attempt; `headers` then has its length, if that is known.
    """

    method: str
    path: str
    query: str = ""
    body: bytes | None = None
    source: Callable[[], Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    patience_s: float | None = 0.0
    silence_s: float | None = None
    is_transfer: bool = False
    may_poll: bool = False
    repeat: bool = True

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


@dataclass(slots=True)
class WholeAnswer:
    """A whole answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:  # a JSON value
        """The JSON of the body.

        Raises:
            SandkastenAPIError: the body is no JSON, so another server than Sandkasten answered.
        """
        try:
            return json.loads(self.body)
        except ValueError:
            raise errors.api_error(self.body.decode("utf-8", "replace"), self.status) from None

    @property
    def retry_after_s(self) -> float | None:
        """The time to wait before a repetition, as the server advises: in seconds, or as a date by the server's clock
        (RFC 9110 §10.2.3). None: there is no advice, or it can't be read.
        """
        advice = self.headers.get("retry-after", "")
        if not advice or advice.isdecimal():
            return float(advice) if advice else None
        from email.utils import parsedate_to_datetime  # late: dates are rare, and the import of the SDK is to be quick

        try:
            now = parsedate_to_datetime(self.headers["date"])
            return max((parsedate_to_datetime(advice) - now).total_seconds(), 0.0)
        except (KeyError, ValueError, TypeError):
            return None

    @property
    def error(self) -> errors.SandkastenAPIError:
        """The error that the answer stands for."""
        return errors.api_error(self.body.decode("utf-8", "replace"), self.status, retry_after_s=self.retry_after_s)


def call(
    method: str,
    path: str,
    value: object = None,
    *,
    query: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    **fields: Any,  # of HttpCall
) -> HttpCall:
    """Return a request with `value` as JSON, if given; a query's value of None is left out."""
    spelled = ""
    if query:
        pairs = query.items() if isinstance(query, Mapping) else query
        spelled = urlencode([(name, _spell(each)) for name, each in pairs if each is not None], quote_via=quote)
    body = None if value is None else json.dumps(value, separators=(",", ":")).encode()
    headers = (JSON if body is not None else {}) | fields.pop("headers", {})
    return HttpCall(method, path, spelled, body, headers=headers, **fields)


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else spelled(str(value))


def spelled(name: str) -> str:
    """Return a local name, whose bytes that are not UTF-8 are surrogates (PEP 383), as docs/api.md#files spells it."""
    return _BYTE.sub(lambda found: f"\0{ord(found[0]) - 0xDC00:02x}", name)


def given(**values: object) -> dict[str, Any]:  # JSON values
    """Return the values that are not None. A name that ends in `_` loses that."""
    return {name.rstrip("_"): value for name, value in values.items() if value is not None}


def set_values(**values: object) -> dict[str, Any]:  # JSON values
    """Return the values that are not `UNSET`; None is kept, as null."""
    return {name: value for name, value in values.items() if not isinstance(value, Unset)}


def part(text: str) -> str:
    """Return a text as one part of a path."""
    return quote(spelled(text), safe="")


def new_id() -> str:
    """Return an id for a run or a create that no other client chooses."""
    return f"sdk-{secrets.token_hex(12)}"


def may_pass(answer: WholeAnswer) -> bool:
    """Return whether the same request may succeed later, as the server says, or as a proxy did not reach it."""
    if answer.status not in _PASSING:
        return False
    error = answer.error
    return error.retryable if error.code != errors.SandkastenError.code else answer.status in _GATEWAY


# Commands -------------------------------------------------------------------------------------------------------------


def command(cmd: str | Sequence[str]) -> dict[str, Any]:  # JSON values
    """Return the fields of a command: a text is a script for a shell, a sequence a program with its arguments."""
    return {"cmd": cmd} if isinstance(cmd, str) else {"argv": list(cmd)}


def exec_patience_s(timeout_ms: int | None, queue_timeout_ms: int | None) -> float | None:
    """Return how long the answer to a command may take, its wait for the shell included; None: no limit is known."""
    if not timeout_ms:
        return None
    return (timeout_ms + (queue_timeout_ms or timeout_ms)) / 1000 + GRACE_S


def exec_result(value: Mapping[str, Any]) -> ExecResult:  # a JSON object
    """Return the result that an answer describes."""
    return ExecResult.take(given(**value), output=value.get("output") or "")


def exec_bytes(value: Mapping[str, Any]) -> ExecBytes:  # a JSON object
    """Return the result of a command that was asked for in base64."""
    output = {name: base64.b64decode(value.get(name) or "") for name in ("stdout", "stderr")}
    return ExecBytes.take(given(**value), **output)


def run_end(value: Mapping[str, Any]) -> RunEnd:  # a JSON object
    """Return the run's end that a JSON object describes."""
    return RunEnd.take(given(**value))


class Decoder:
    """Maker of pieces of output from the bytes of both streams of a run.

    The pieces are text. The bytes of a character that is not whole wait for its rest. With `clean`, escape sequences
    are removed, and what may be the begin of one waits as well. With `raw`, the pieces are the bytes as they came.
    """

    def __init__(self, *, raw: bool = False, clean: bool = False) -> None:
        self._raw = raw
        self._texts = {"stdout": OutputText(is_raw=not clean), "stderr": OutputText(is_raw=not clean)}
        self._seq = 0

    def feed(self, stream: StreamName, data: bytes, seq: int) -> Output | None:
        """Return the piece of output that the bytes complete; None if they complete nothing."""
        self._seq = seq
        text = data if self._raw else self._texts[stream].feed(data)
        return Output(stream, text, seq) if text else None

    def rest(self) -> Iterator[Output]:
        """Yield what waits at the end of the output."""
        streams: tuple[StreamName, ...] = ("stdout", "stderr")
        for stream in streams:
            if text := self._texts[stream].feed(b"", is_last=True):
                yield Output(stream, text, self._seq)


# Messages of any stream ----------------------------------------------------------------------------------------------


@contextmanager
def reading() -> Iterator[None]:
    """Return a context in which a message of the server is read.

    Raises:
        ConnectionFailed: the message is none of this protocol.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise errors.ConnectionFailed(f"the server sent a message that is none of the protocol ({error!r})") from error


# Server-sent events ---------------------------------------------------------------------------------------------------

MAX_EVENT_BYTES = 1024 * 1024


@dataclass(slots=True)
class ServerEvent:
    """A server-sent event; `id` is empty for an event that has none."""

    name: str
    data: str
    id: str

    @property
    def value(self) -> Any:  # a JSON value
        return json.loads(self.data)


class EventDecoder:
    """Server-sent events out of bytes that may be cut anywhere (HTML Living Standard §9.2.6).

    Lines end with LF or CRLF; a lone CR is no line end here, since a decoder would have to wait for the next byte.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name, self._id, self._data = "", "", list[str]()
        self._size = 0

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that the bytes complete, also those that have an id alone.

        Raises:
            ConnectionFailed: an event is longer than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if found := self._line(line.removesuffix(b"\r").decode("utf-8", "replace")):
                yield found
        if max(len(self._rest), self._size) > MAX_EVENT_BYTES:
            raise errors.ConnectionFailed("the server sends an event that is too long", max_bytes=MAX_EVENT_BYTES)

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            found = ServerEvent(self._name, "\n".join(self._data), self._id)
            self._name, self._id, self._data, self._size = "", "", [], 0
            return found if found.data or found.id else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "id":
            self._id = value
        elif name == "data":
            self._data.append(value)
            self._size += len(line)
        return None


# WebSocket messages ---------------------------------------------------------------------------------------------------

EXEC_PROTOCOL = "sandkasten.exec.v1"
TERMINAL_PROTOCOL = "sandkasten.terminal.v1"
MAX_MESSAGE_BYTES = 1024 * 1024
_HEAD = struct.Struct(">IBQ")
_STREAMS: dict[int, StreamName] = {1: "stdout", 2: "stderr"}
_MORE = 128


@dataclass(slots=True)
class Frame:
    """Binary message of a run: bytes of piece `seq`, of which more follows if `more`."""

    channel: int
    stream: StreamName
    seq: int
    more: bool
    data: memoryview


def read_frame(message: bytes) -> Frame:
    """Return a binary message of the server.

    Raises:
        ConnectionFailed: the message is none of this protocol.
    """
    with reading():
        channel, tag, seq = _HEAD.unpack_from(message)
        return Frame(channel, _STREAMS[tag & ~_MORE], seq, bool(tag & _MORE), memoryview(message)[_HEAD.size :])


def read_message(message: str) -> dict[str, Any]:  # JSON values
    """Return a text message of the server.

    Raises:
        ConnectionFailed: the message is none of this protocol.
    """
    with reading():
        value = json.loads(message)
        if not isinstance(value["type"], str):
            raise TypeError("a message has a type")
        return dict(value)


_KEY = re.compile(r"sk_([0-9a-f]{12})_")


def key_id_of(api_key: str | None) -> str:
    """Return the id under which the server lists what a key has made (docs/keys.md); the id is no secret."""
    if not api_key:
        return "local"
    return found[1] if (found := _KEY.match(api_key)) else "configured"
