"""The messages of a terminal WebSocket. Sans-I/O.

Binary frames are the terminal's bytes, both ways; text frames are JSON objects with a `type`. `CLIENT_MESSAGES` and
`SERVER_MESSAGES` are the whole table; docs/websocket.md is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from sandkasten.api.resources.fields import Cells, ExecId, Path, ShellName, User
from sandkasten.api.resources.run_views import end_view
from sandkasten.api.resources.schemas import bad_fields
from sandkasten.api.websocket.fields import (
    CreditBytes,
    Ping,
    Pong,
    Refused,
    WindowBytes,
    build,
    encode_control,
    parse_control,
    present_fields,
)
from sandkasten.model import ExecEnd, TerminalSize, TerminalSpec
from sandkasten.model.errors import SandkastenError

PROTOCOL = "sandkasten.terminal.v1"
INPUT = "input"
"""What a refusal calls a binary frame of the client's."""


@attrs.frozen
class Query:
    """What is asked for in the URL. `window`: how many bytes may be on their way to the screen; None: no such limit."""

    cols: Cells | None = None
    rows: Cells | None = None
    shell: ShellName | None = None
    terminal_id: ExecId | None = None
    read_only: bool = False
    cwd: Path | None = None
    user: User | None = None
    window: WindowBytes | None = None

    @property
    def size(self) -> TerminalSize:
        usual = TerminalSize()
        return TerminalSize(self.cols or usual.cols, self.rows or usual.rows)

    def to_spec(self) -> TerminalSpec:
        """Return the model's terminal."""
        return TerminalSpec(
            size=self.size,
            shell=self.shell,
            terminal_id=self.terminal_id,
            read_only=self.read_only,
            cwd=self.cwd,
            user=self.user,
        )


def parse_query(query: Mapping[str, str]) -> Query:
    """Return what the URL asks for. Raises `InvalidRequest`."""
    values: dict[str, object] = dict(query)
    for name in ("cols", "rows", "window"):
        if (text := query.get(name)) is not None and text.isascii() and text.isdigit() and len(text) < 18:
            values[name] = int(text)
    if query.get("read_only") in ("true", "false"):
        values["read_only"] = query["read_only"] == "true"
    parsed: Query = build(Query, values)
    if parsed.shell is not None and parsed.terminal_id is not None:
        raise bad_fields(terminal_id="must be absent with shell")
    for name in ("cwd", "user"):
        if getattr(parsed, name) is not None and (parsed.shell or parsed.terminal_id) is not None:
            raise bad_fields(**{name: "must be absent with shell and terminal_id: it is there already"})
    return parsed


@attrs.frozen
class Resize:
    kind: ClassVar[str] = "resize"
    cols: Cells
    rows: Cells


@attrs.frozen
class TakeOver:
    """Sit down at the watched shell."""

    kind: ClassVar[str] = "take_over"


@attrs.frozen
class GiveBack:
    """Leave the shell that was taken over."""

    kind: ClassVar[str] = "give_back"


@attrs.frozen
class Credit:
    """`bytes` of what was sent are on the screen."""

    kind: ClassVar[str] = "credit"
    bytes: CreditBytes


ClientMessage = Resize | TakeOver | GiveBack | Credit | Ping

CLIENT_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls for cls in (Resize, TakeOver, GiveBack, Credit, Ping)
}


def parse_message(message: str) -> ClientMessage:
    """Return what a client said in a text frame.

    Raises:
        Refused: it is malformed.
    """
    cls, value = parse_control(message, CLIENT_MESSAGES)
    try:
        built: ClientMessage = build(cls, value)
    except SandkastenError as error:
        raise Refused(error, kind=cls.kind) from None
    return built


@attrs.frozen
class Ready:
    """The terminal is open. `taken_over`: what is typed reaches a shell."""

    kind: ClassVar[str] = "ready"
    terminal_id: str
    cols: int
    rows: int
    taken_over: bool
    read_only: bool


@attrs.frozen
class Skipped:
    """`bytes` of output were lost for this viewer: it was too slow. The screen may be wrong until it is redrawn."""

    kind: ClassVar[str] = "skipped"
    bytes: int


@attrs.frozen
class TakenOver:
    """What is typed reaches the shell from now on."""

    kind: ClassVar[str] = "taken_over"


@attrs.frozen
class GivenBack:
    """The shell is only watched from now on."""

    kind: ClassVar[str] = "given_back"


@attrs.frozen
class Exit:
    """The terminal has ended; the connection is closed behind it."""

    kind: ClassVar[str] = "exit"
    end: ExecEnd

    def view(self) -> dict[str, Any]:  # JSON values
        """Return the message's fields: those of every ending."""
        return end_view(self.end)


@attrs.frozen
class Error:
    """Something went wrong; `refused` names the message that was not taken. Without it the connection ends."""

    kind: ClassVar[str] = "error"
    error_code: str
    message: str
    retryable: bool
    request_id: str | None = None
    details: Mapping[str, Any] | None = None  # JSON values
    refused: str | None = None


ServerMessage = Ready | Skipped | TakenOver | GivenBack | Exit | Error | Pong

SERVER_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls for cls in (Ready, Skipped, TakenOver, GivenBack, Exit, Error, Pong)
}


def encode_message(message: ServerMessage) -> bytes:
    """Return a message as a text frame; what is None is left out."""
    return encode_control(message.kind, message.view() if isinstance(message, Exit) else present_fields(message))
