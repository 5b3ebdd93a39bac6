"""The messages of an exec WebSocket. Sans-I/O.

Text frames are JSON objects with a `type`; binary frames are a header and bytes of a stream. `CLIENT_MESSAGES` and
`SERVER_MESSAGES` are the whole table; docs/websocket.md is compared with them. A malformed message raises
`MessageRefused`, which names the channel if the message did. Unknown fields are ignored, as in bodies of requests.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from sandkasten.api.http.json import Body
from sandkasten.api.http.websocket import Opcode, encode_frame_head
from sandkasten.api.resources.fields import ExecId, SignalNumber, bad_fields, parse
from sandkasten.api.resources.runs import ExecRequest
from sandkasten.api.websocket import messages
from sandkasten.api.websocket.messages import (
    KIB,
    MAX_CHANNEL,
    MAX_CREDIT_BYTES,
    MAX_FRAME_BYTES,
    ChannelNumber,
    CreditBytes,
    Fields,
    FrameBytes,
    MessageRefused,
    Ping,
    Pong,
    Sequence,
    named_channel,
    parse_control,
)
from sandkasten.errors import InvalidRequest, SandkastenError
from sandkasten.model import Stream

PROTOCOL = "sandkasten.exec.v1"

MAX_CHANNELS = 64
DEFAULT_FRAME_BYTES = 32 * KIB
DEFAULT_CREDIT_BYTES = 1024 * KIB
STDIN_CREDIT_BYTES = 256 * KIB

HEADER = struct.Struct("!IBQ")
"""The head of a binary frame: channel, tag, sequence number (0 for input)."""

MORE = 0x80
"""Set in the tag when more of the same piece follows; its sequence number counts once the last part came."""


class Tag(enum.IntEnum):
    """The stream that the bytes of a binary frame belong to."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2


_TAGS = {Stream.STDOUT: Tag.STDOUT, Stream.STDERR: Tag.STDERR}

# Of clients -----------------------------------------------------------------------------------------------------------


NOT_IN_START = ("raw_output", "encoding", "output_fields")
"""Fields of `POST …/exec` that mean nothing on a WebSocket, where output is bytes."""


@attrs.frozen
class Carried:
    """A class whose fields a message has besides its own, and those of them that it has `without`."""

    cls: type[Any]  # an attrs class
    without: tuple[str, ...]


@attrs.frozen
class ChannelStart:
    """Run a command; besides these fields those of `POST …/exec`."""

    kind: ClassVar[str] = "start"
    carries: ClassVar[Carried] = Carried(ExecRequest, NOT_IN_START)
    id: ChannelNumber
    credit: CreditBytes | None = None
    max_frame: FrameBytes | None = None


@attrs.frozen
class StartCommand(ChannelStart):
    """A `start` with its command."""

    request: ExecRequest = attrs.field(kw_only=True)


@attrs.frozen
class ChannelAttach:
    """Follow a run that exists, behind the piece of output numbered `after`."""

    kind: ClassVar[str] = "attach"
    id: ChannelNumber
    exec_id: ExecId
    after: Sequence | None = None
    credit: CreditBytes | None = None
    max_frame: FrameBytes | None = None


@attrs.frozen
class ChannelCredit(messages.Credit):
    """Allow `bytes` more of output."""

    id: ChannelNumber


@attrs.frozen
class CloseStdin:
    """End the input."""

    kind: ClassVar[str] = "close_stdin"
    id: ChannelNumber


@attrs.frozen
class ChannelSignal:
    """Send a signal to the run."""

    kind: ClassVar[str] = "signal"
    id: ChannelNumber
    signal: SignalNumber


@attrs.frozen
class ChannelResize(messages.Resize):
    """Change the size of the run's terminal."""

    id: ChannelNumber


@attrs.frozen
class ChannelCancel:
    """End the run; `now`: without asking it first."""

    kind: ClassVar[str] = "cancel"
    id: ChannelNumber
    now: bool | None = None


@attrs.frozen
class Detach:
    """Leave the run to itself."""

    kind: ClassVar[str] = "detach"
    id: ChannelNumber


@attrs.frozen
class Input:
    """A binary frame: bytes for the standard input of a run."""

    kind: ClassVar[str] = "stdin"
    id: int
    data: bytes = attrs.field(repr=False)


ClientMessage = (
    StartCommand
    | ChannelAttach
    | ChannelCredit
    | CloseStdin
    | ChannelSignal
    | ChannelResize
    | ChannelCancel
    | Detach
    | Ping
    | Input
)

CLIENT_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls
    for cls in (
        ChannelStart,
        ChannelAttach,
        ChannelCredit,
        CloseStdin,
        ChannelSignal,
        ChannelResize,
        ChannelCancel,
        Detach,
        Ping,
    )
}


def wire_fields(cls: type[Any]) -> Mapping[str, bool]:  # an attrs class
    """Return the fields of a client's message, and whether each is required."""
    own = {field.name: field.default is attrs.NOTHING for field in attrs.fields(cls)}
    if cls is not ChannelStart:
        return own
    return own | {field.name: False for field in attrs.fields(ExecRequest) if field.name not in NOT_IN_START}


def parse_message(message: str | bytes) -> ClientMessage:
    """Return a client's message.

    Raises:
        MessageRefused: the message is malformed.
    """
    return _parse_input(message) if isinstance(message, bytes) else _parse_text(message)


def _parse_input(message: bytes) -> Input:
    if len(message) < HEADER.size:
        raise MessageRefused(InvalidRequest("a malformed frame", binary="shorter than its header"))
    channel, tag, sequence = HEADER.unpack_from(message)
    if not 1 <= channel <= MAX_CHANNEL:
        raise MessageRefused(InvalidRequest("a binary frame names no channel", id=f"must be from 1 to {MAX_CHANNEL}"))
    if tag != Tag.STDIN or sequence != 0:
        error = InvalidRequest("a client's binary frames have tag 0 and sequence number 0", tag=tag, sequence=sequence)
        raise MessageRefused(error, channel=channel, kind=Input.kind)
    return Input(channel, message[HEADER.size :])


def _parse_text(message: str) -> ClientMessage:
    cls, value = parse_control(message, CLIENT_MESSAGES)
    try:
        if cls is ChannelStart:
            return _build_start(value)
        built: ClientMessage = parse(value, cls)
    except SandkastenError as error:
        raise MessageRefused(error, channel=named_channel(value), kind=cls.kind) from None
    return built


def _build_start(value: Fields) -> StartCommand:
    if meaningless := [name for name in NOT_IN_START if value.get(name) is not None]:
        raise bad_fields(**dict.fromkeys(meaningless, "means nothing here: output is bytes"))
    start: ChannelStart = parse(value, ChannelStart)
    return StartCommand(start.id, start.credit, start.max_frame, request=parse(value, ExecRequest))


# Of the server --------------------------------------------------------------------------------------------------------


@attrs.frozen
class ExecHello(Body):
    """The first message: the key was right, if one is needed."""

    kind: ClassVar[str] = "hello"
    protocol: str
    session_id: str
    limits: Mapping[str, int]


@attrs.frozen
class ChannelStarted(Body):
    """The run has its turn. Output follows from behind the piece numbered `seq`."""

    kind: ClassVar[str] = "started"
    id: int
    seq: int
    exec_id: str
    attached: bool


@attrs.frozen(kw_only=True)
class ChannelExit(messages.Exit):
    """The run has ended and its output was sent, whole pieces up to that numbered `seq`. The channel is free.

    `omitted_bytes` counts the output behind that piece which was dropped, because the client cancelled and gave no
    credit.
    """

    id: int
    seq: int
    stdout_bytes: int
    stderr_bytes: int
    omitted_bytes: int | None = None


@attrs.frozen
class Detached(Body):
    """The run goes on without this channel, which is free. Everything up to `seq` was sent."""

    kind: ClassVar[str] = "detached"
    id: int
    seq: int


@attrs.frozen(kw_only=True)
class ChannelError(messages.ErrorMessage):
    """An error. Everything up to `seq` was sent. `final`: the channel has ended and is free; otherwise only the message
    named by `refused` was not taken. An error of the whole connection has neither `id` nor `seq`."""

    id: int | None = None
    seq: int | None = None
    final: bool = False


@attrs.frozen
class Granted(Body):
    """`bytes` more of input may be sent."""

    kind: ClassVar[str] = "credit"
    id: int
    bytes: int


ServerMessage = ExecHello | ChannelStarted | ChannelExit | Detached | ChannelError | Granted | Pong

SERVER_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls for cls in (ExecHello, ChannelStarted, ChannelExit, Detached, ChannelError, Granted, Pong)
}

LIMITS: Mapping[str, int] = {
    "channels": MAX_CHANNELS,
    "credit_bytes": DEFAULT_CREDIT_BYTES,
    "max_credit_bytes": MAX_CREDIT_BYTES,
    "frame_bytes": DEFAULT_FRAME_BYTES,
    "max_frame_bytes": MAX_FRAME_BYTES,
    "stdin_credit_bytes": STDIN_CREDIT_BYTES,
}
"""The limits in `hello`, which adds `message_bytes`: the largest message of a client."""


def encode_output(
    channel: int, stream: Stream, data: memoryview, sequence: int, *, more: bool
) -> tuple[bytes, memoryview]:
    """Return a part of a piece of output as a binary frame, without a copy of `data`; `more`: another part follows."""
    tag = _TAGS[stream] | (MORE if more else 0)
    head = encode_frame_head(Opcode.BINARY, HEADER.size + len(data))
    return head + HEADER.pack(channel, tag, sequence), data
