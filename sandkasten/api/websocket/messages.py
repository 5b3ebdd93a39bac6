"""The messages that all our WebSockets share, and how messages are read and spelled. Sans-I/O.

A text frame is a JSON object with a `type`. A client's message that can't be taken raises `MessageRefused`. A server's
message is an attrs class whose optional fields are left out when they are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NewType, Self

import attrs
import orjson

from sandkasten.api.http.errors import ErrorBody, error_body
from sandkasten.api.http.json import Body, encode_json, to_plain
from sandkasten.api.http.websocket import Opcode, encode_frame
from sandkasten.api.resources.fields import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, Between, Cells, add_kinds
from sandkasten.api.resources.run_output import EndBody
from sandkasten.errors import InvalidRequest, SandkastenError

KIB = 1024
MAX_CHANNEL = 2**31
MAX_FRAME_BYTES = 64 * KIB
MIN_FRAME_BYTES = MIN_WINDOW_BYTES
MAX_CREDIT_BYTES = MAX_WINDOW_BYTES
MAX_SEQUENCE = 2**53
MAX_PING_CHARS = 256

ChannelNumber = NewType("ChannelNumber", int)
CreditBytes = NewType("CreditBytes", int)
FrameBytes = NewType("FrameBytes", int)
Sequence = NewType("Sequence", int)
PingText = NewType("PingText", str)

Fields = Mapping[str, Any]
"""The fields of a JSON object."""


# Of clients -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Ping:
    """A question whether the server still listens."""

    kind: ClassVar[str] = "ping"
    data: PingText | None = None


@attrs.frozen
class Resize:
    """A new size of the terminal, in character cells."""

    kind: ClassVar[str] = "resize"
    cols: Cells
    rows: Cells


@attrs.frozen
class Credit:
    """Permission to send `bytes` more of output."""

    kind: ClassVar[str] = "credit"
    bytes: CreditBytes


# Of the server --------------------------------------------------------------------------------------------------------


@attrs.frozen
class Pong(Body):
    """The answer to a ping, with the ping's `data`."""

    kind: ClassVar[str] = "pong"
    data: str | None = None


@attrs.frozen(kw_only=True)
class Exit(EndBody):
    """The run or terminal has ended."""

    kind: ClassVar[str] = "exit"


@attrs.frozen(kw_only=True)
class ErrorMessage(ErrorBody):
    """An error. `refused` names the type of the message that was not taken."""

    kind: ClassVar[str] = "error"
    request_id: str | None = None
    refused: str | None = None

    @classmethod
    def of(cls, error: Exception, **fields: Any) -> Self:  # those of the subclass
        """Return the message about an error, and log the part that clients are not told."""
        return cls(**attrs.asdict(error_body(error), recurse=False), **fields)


# Reading and spelling -------------------------------------------------------------------------------------------------


class MessageRefused(Exception):
    """A message that can't be taken. `channel` and `kind` are those that the message named legibly."""

    def __init__(self, error: SandkastenError, *, channel: int | None = None, kind: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.channel = channel
        self.kind = kind


def reason_of(error: SandkastenError | ErrorBody) -> str:
    """Return the reason in a close frame: the message of an error, and the problem of the first bad field."""
    fields = [f"{name} {problem}" for name, problem in (error.details or {}).items() if isinstance(problem, str)]
    return ": ".join([error.message, *fields[:1]])


def parse_control(message: str, kinds: Mapping[str, type[Any]]) -> tuple[type[Any], Fields]:  # attrs classes
    """Return the class of a text frame's message, of those in `kinds`, and its unchecked fields.

    Raises:
        MessageRefused: the frame is no JSON object, or its type is not in `kinds`.
    """
    try:
        value = orjson.loads(message)
    except orjson.JSONDecodeError:
        raise MessageRefused(InvalidRequest("a text frame is not JSON", text="malformed")) from None
    if not isinstance(value, dict):
        raise MessageRefused(InvalidRequest("a text frame is not a JSON object", text="must be an object"))
    kind = value.get("type")
    cls = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        error = InvalidRequest("a message of unknown type", type=f"must be one of {', '.join(kinds)}")
        raise MessageRefused(error, channel=named_channel(value))
    return cls, value


def named_channel(value: Fields) -> int | None:
    """Return the channel in a message, even if the rest of the message is malformed."""
    number = value.get("id")
    return number if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MAX_CHANNEL else None


def encode_message(message: Any) -> bytes:  # an instance of a server's class
    """Return a server's message as a text frame."""
    return encode_frame(Opcode.TEXT, encode_json({"type": message.kind, **to_plain(message)}))


def _ping_text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_PING_CHARS:
        raise ValueError(f"must be a string of at most {MAX_PING_CHARS} characters")
    return value


add_kinds(
    {
        ChannelNumber: Between(1, MAX_CHANNEL),
        CreditBytes: Between(0, MAX_CREDIT_BYTES),
        FrameBytes: Between(MIN_FRAME_BYTES, MAX_FRAME_BYTES),
        Sequence: Between(0, MAX_SEQUENCE),
        PingText: _ping_text,
    }
)
