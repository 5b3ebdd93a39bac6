"""What the messages of all our WebSockets have in common: kinds of field, refusals, JSON objects with a `type`.

Sans-I/O; of messages it knows those that say nothing of what the WebSocket is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NewType

import attrs
import orjson

from sandkasten.api.http.json import encode_json
from sandkasten.api.http.websocket import Opcode, encode_frame
from sandkasten.api.resources.fields import make_converter
from sandkasten.api.resources.schemas import structure
from sandkasten.model.errors import InvalidRequest, SandkastenError

KIB = 1024
MAX_CHANNEL = 2**31
MAX_FRAME_BYTES = 64 * KIB
MIN_FRAME_BYTES = 1 * KIB
MAX_CREDIT_BYTES = 16 * 1024 * KIB
MAX_SEQUENCE = 2**53
MAX_PING_CHARS = 256

Channel = NewType("Channel", int)
CreditBytes = NewType("CreditBytes", int)
FrameBytes = NewType("FrameBytes", int)
WindowBytes = NewType("WindowBytes", int)
Sequence = NewType("Sequence", int)
PingText = NewType("PingText", str)

Fields = Mapping[str, Any]
"""Of a JSON object."""


@attrs.frozen
class Ping:
    kind: ClassVar[str] = "ping"
    data: PingText | None = None


@attrs.frozen
class Pong:
    kind: ClassVar[str] = "pong"
    data: str | None = None


class Refused(Exception):
    """A message that can't be taken. `channel` and `kind` are what it named, if it did so legibly."""

    def __init__(self, error: SandkastenError, *, channel: int | None = None, kind: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.channel = channel
        self.kind = kind


def reason_of(error: SandkastenError) -> str:
    """Return why a connection is closed that gets no `error` message: the error's, and what is wrong with a field."""
    fields = [f"{name} {problem}" for name, problem in error.details.items() if isinstance(problem, str)]
    return ": ".join([error.message, *fields[:1]])


def parse_control(message: str, kinds: Mapping[str, type[Any]]) -> tuple[type[Any], Fields]:  # attrs classes
    """Return the class of a text frame's message, of those in `kinds`, and its fields, not looked at yet.

    Raises:
        Refused: it is no JSON object or of no such type.
    """
    try:
        value = orjson.loads(message)
    except orjson.JSONDecodeError:
        raise Refused(InvalidRequest("a text frame is not JSON", text="malformed")) from None
    if not isinstance(value, dict):
        raise Refused(InvalidRequest("a text frame is not a JSON object", text="must be an object"))
    kind = value.get("type")
    cls = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        error = InvalidRequest("a message of unknown type", type=f"must be one of {', '.join(kinds)}")
        raise Refused(error, channel=named_channel(value))
    return cls, value


def build(cls: type[Any], value: Fields) -> Any:  # an instance of the attrs class
    """Return the message. Raises `InvalidRequest`."""
    return structure(value, cls, _converter)


def named_channel(value: Fields) -> int | None:
    """Return the channel that a message names, even if the rest of it is malformed."""
    number = value.get("id")
    return number if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MAX_CHANNEL else None


def encode_control(kind: str, fields: Fields) -> bytes:
    """Return a message as a text frame."""
    return encode_frame(Opcode.TEXT, encode_json({"type": kind, **fields}))


def present_fields(message: Any) -> dict[str, Any]:  # an attrs instance; JSON values
    """Return the fields of a message that are not None."""
    return attrs.asdict(message, recurse=False, filter=lambda _field, value: value is not None)


def _integer(low: int, high: int) -> Callable[[object, object], int]:
    def check(value: object, _type: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value

    return check


def _ping_text(value: object, _type: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_PING_CHARS:
        raise ValueError(f"must be a string of at most {MAX_PING_CHARS} characters")
    return value


_converter = make_converter()
_converter.register_structure_hook(Channel, _integer(1, MAX_CHANNEL))
_converter.register_structure_hook(CreditBytes, _integer(0, MAX_CREDIT_BYTES))
_converter.register_structure_hook(FrameBytes, _integer(MIN_FRAME_BYTES, MAX_FRAME_BYTES))
_converter.register_structure_hook(WindowBytes, _integer(MIN_FRAME_BYTES, MAX_CREDIT_BYTES))
_converter.register_structure_hook(Sequence, _integer(0, MAX_SEQUENCE))
_converter.register_structure_hook(PingText, _ping_text)
