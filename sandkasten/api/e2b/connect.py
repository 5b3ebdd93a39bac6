"""The Connect protocol with its JSON codec: envelopes of streams, codes of errors, and values as proto3 JSON. Sans-I/O.
Also errors as answers of E2B's API that are none of that protocol.

A stream is a sequence of envelopes: one byte of flags, four bytes of length (big-endian), and a JSON object. The last
envelope of an answer has the flag `END`, and is empty or holds an error. Compression and protobuf are refused: E2B's
clients send neither.

Sources: Connect protocol reference ("Streaming-Response", "Error Codes"); ProtoJSON format (bytes are base64, 64-bit
integers are strings, fields are lowerCamelCase or as in the schema, absent is the default).
"""

from __future__ import annotations

import base64
import binascii
import enum
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from sandkasten import errors
from sandkasten.api.http.errors import Answer, error_answer, error_body, json_answer
from sandkasten.api.http.json import encode_json
from sandkasten.api.resources.fields import parse
from sandkasten.errors import InvalidRequest, SandkastenError, TooLarge

T = TypeVar("T")


END = 0x02
HEAD = struct.Struct("!BI")
"""Flags and length of an envelope."""


class Code(enum.StrEnum):
    """Codes of the protocol; a closed set."""

    CANCELED = "canceled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"


STATUS: Mapping[Code, int] = MappingProxyType(
    {
        Code.CANCELED: 499,
        Code.UNKNOWN: 500,
        Code.INVALID_ARGUMENT: 400,
        Code.DEADLINE_EXCEEDED: 504,
        Code.NOT_FOUND: 404,
        Code.ALREADY_EXISTS: 409,
        Code.PERMISSION_DENIED: 403,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.FAILED_PRECONDITION: 400,
        Code.ABORTED: 409,
        Code.OUT_OF_RANGE: 400,
        Code.UNIMPLEMENTED: 501,
        Code.INTERNAL: 500,
        Code.UNAVAILABLE: 503,
        Code.DATA_LOSS: 500,
        Code.UNAUTHENTICATED: 401,
    }
)
"""HTTP status of a unary answer with that error."""

_CODES: Mapping[type[SandkastenError], Code] = MappingProxyType(
    {
        errors.InvalidRequest: Code.INVALID_ARGUMENT,
        errors.PathOutside: Code.INVALID_ARGUMENT,
        errors.IsADirectory: Code.INVALID_ARGUMENT,
        errors.NotAFile: Code.INVALID_ARGUMENT,
        errors.NotADirectory: Code.INVALID_ARGUMENT,
        errors.TooLarge: Code.RESOURCE_EXHAUSTED,
        errors.Unauthorized: Code.UNAUTHENTICATED,
        errors.Forbidden: Code.PERMISSION_DENIED,
        errors.PermissionDenied: Code.PERMISSION_DENIED,
        errors.FileNotFound: Code.NOT_FOUND,
        errors.ExecNotFound: Code.NOT_FOUND,
        errors.ExecEnded: Code.NOT_FOUND,
        errors.ExecGone: Code.DATA_LOSS,
        errors.RouteNotFound: Code.UNIMPLEMENTED,
        errors.MethodNotAllowed: Code.UNIMPLEMENTED,
        errors.Conflict: Code.ALREADY_EXISTS,
        errors.NotEmpty: Code.FAILED_PRECONDITION,
        errors.ExecIdsExhausted: Code.RESOURCE_EXHAUSTED,
        errors.QuotaExceeded: Code.RESOURCE_EXHAUSTED,
        errors.Capacity: Code.RESOURCE_EXHAUSTED,
        errors.DiskFull: Code.RESOURCE_EXHAUSTED,
        errors.DiskReserve: Code.RESOURCE_EXHAUSTED,
        errors.StoreFull: Code.RESOURCE_EXHAUSTED,
        errors.CommandTimeout: Code.DEADLINE_EXCEEDED,
        errors.Overloaded: Code.UNAVAILABLE,
        errors.ShuttingDown: Code.UNAVAILABLE,
        errors.Draining: Code.UNAVAILABLE,
        errors.ActorGone: Code.UNAVAILABLE,
    }
)


class ConnectError(Exception):
    """An error with a code of the protocol, which none of ours stands for."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def code_of(error: Exception) -> Code:
    """Return the code for any error; `INTERNAL` for one whose text is not for clients."""
    return error.code if isinstance(error, ConnectError) else _CODES.get(type(error), Code.INTERNAL)  # type: ignore[arg-type]  # other types are no keys


def error_object(code: Code, message: str) -> dict[str, str]:
    """Return an error as the protocol spells it."""
    return {"code": code.value, "message": message}


def envelope(message: Mapping[str, Any], flags: int = 0) -> bytes:
    """Return a message of a stream."""
    body = encode_json(message)
    return HEAD.pack(flags, len(body)) + body


def ending(error: Mapping[str, str] | None = None) -> bytes:
    """Return the last message of an answer."""
    return envelope({} if error is None else {"error": error}, END)


class EnvelopeReader:
    """Messages out of the bytes of a client's stream, whatever the pieces in which they come."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._has_ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes and yield the bodies of the messages that are complete now, for `decode_message`.

        Raises:
            InvalidRequest: a message is compressed, or comes behind the last one.
            TooLarge: a message announces more than `max_bytes`; nothing of it is kept.
        """
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            flags, size = HEAD.unpack_from(self._buffer)
            if flags & ~END or self._has_ended:
                raise InvalidRequest("the stream has a message that can't be read", flags=flags)
            if size > self._max_bytes:
                raise TooLarge(f"a message of the stream is larger than {self._max_bytes} bytes", bytes=size)
            end = HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            if flags & END:
                self._has_ended = True
            else:
                yield body

    def finish(self) -> None:
        """Check that the stream ended behind a message. Raises `InvalidRequest`."""
        if self._buffer:
            raise InvalidRequest("the stream ends within a message", bytes=len(self._buffer))


_DEPTH = 16


def decode_message(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a message; no body is an empty one. Raises `InvalidRequest`."""
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("the message is not valid JSON", body=str(error)) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the message is not a JSON object", body="must be an object")
    return value


def read_message(value: Mapping[str, Any], cls: type[T]) -> T:
    """Return a message as an attrs class. A null is an absent field, and further fields are ignored. Raises
    `InvalidRequest`."""
    return parse(_without_nulls(value, _DEPTH), cls)


def _without_nulls(value: Any, depth: int) -> Any:  # JSON values
    """Return a value without the nulls of its objects. Raises `InvalidRequest` for one with objects too deep."""
    if not isinstance(value, Mapping):
        return value
    if depth == 0:
        raise InvalidRequest("the message has too many objects in each other", body=f"at most {_DEPTH} levels")
    return {name: _without_nulls(each, depth - 1) for name, each in value.items() if each is not None}


def base64_text(data: bytes) -> str:
    """Return bytes as ProtoJSON spells them."""
    return base64.b64encode(data).decode("ascii")


def base64_bytes(value: object) -> bytes:
    """Return the bytes of a base64 text of either alphabet, padded or not. Raises `ValueError`."""
    if not isinstance(value, str):
        raise ValueError("must be base64")
    text = value.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64") from None


def integer(value: object, *, low: int = 0, high: int = 2**32 - 1) -> int:
    """Return an integer, which may be spelled as a text. Raises `ValueError`."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdigit() and value.isascii():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"must be an integer between {low} and {high}")
    return value


def timestamp(microseconds: int) -> str | None:
    """Return a time as ProtoJSON spells it; None if no calendar has it."""
    try:
        moment = datetime.fromtimestamp(microseconds / 10**6, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z") if moment.year >= 1 else None


# Errors by status -----------------------------------------------------------------------------------------------------

GONE = (errors.SessionNotFound, errors.SessionExpired, errors.SessionPaused)
BREAKS = (*GONE, errors.RunnerLost)
"""Errors that break a stream which has begun: its client then asks whether the sandbox lives."""


class SandboxGone(Exception):
    """The sandbox is gone or paused, or does not answer though it is there (`is_alive`). Answered as by what stands
    before a sandbox."""

    def __init__(self, sandbox_id: str, *, is_alive: bool = False) -> None:
        super().__init__(sandbox_id)
        self.sandbox_id, self.is_alive = sandbox_id, is_alive


def message_of(error: Exception) -> str:
    """Return the text of an error for a client, and log what is not for clients."""
    body = error_body(error)
    return _text_of(body.message, body.details)


def _text_of(message: str, details: Mapping[str, Any] | None) -> str:
    """Return a message with the bad fields that its details name."""
    problems = [f"{name} {problem}" for name, problem in (details or {}).items() if isinstance(problem, str)]
    return f"{message}: {', '.join(problems)}" if problems else message


def spell_error(error: Exception) -> Answer:
    """Return the answer for any error. "No room now" is 429, which E2B's clients repeat; to them 503 is final."""
    if isinstance(error, SandboxGone):
        words = "The sandbox is running but port is not open" if error.is_alive else "The sandbox was not found"
        return json_answer({"sandboxId": error.sandbox_id[:64], "message": words, "code": 502}, status=502)
    answer = error_answer(error)
    status, headers = answer.status, answer.headers
    if isinstance(error, errors.SessionExpired | errors.InvalidImage):
        status = 404
    elif status == 503:
        status = 429
        headers = headers if isinstance(error, errors.Capacity) else (*headers, ("retry-after", "1"))
    body = orjson.loads(answer.body)
    text = _text_of(body["message"], body.get("details"))
    return json_answer({"code": status, "message": text}, status=status, headers=headers)
