"""The messages of a terminal WebSocket. Sans-I/O.

Binary frames are the terminal's bytes, both ways; text frames are JSON objects with a `type`. `CLIENT_MESSAGES` and
`SERVER_MESSAGES` are the whole table; docs/websocket.md is compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    Cells,
    ExecId,
    Path,
    ShellName,
    User,
    WindowBytes,
    bad_fields,
    parse,
    parse_known_query,
)
from sandkasten.api.websocket.messages import (
    Credit,
    ErrorMessage,
    Exit,
    MessageRefused,
    Ping,
    Pong,
    Resize,
    parse_control,
)
from sandkasten.errors import SandkastenError
from sandkasten.model import TerminalSize, TerminalSpec

PROTOCOL = "sandkasten.terminal.v1"
RAW_PROTOCOL = f"{PROTOCOL}.raw"
"""A terminal without messages, as the attach add-on of xterm.js speaks: every frame of a client is typed."""

INPUT = "input"
"""The name of a client's binary frame in a refusal."""


@attrs.frozen
class TerminalQuery:
    """The query of a terminal. `window` bounds the bytes on their way to the screen; None: no such limit. `take_over`:
    input reaches the viewed shell from the start."""

    cols: Cells | None = None
    rows: Cells | None = None
    shell: ShellName | None = None
    terminal_id: ExecId | None = None
    read_only: bool = False
    take_over: bool = False
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


def parse_query(query: Mapping[str, str], *, is_raw: bool = False) -> TerminalQuery:
    """Return the query in a URL. Raises `InvalidRequest`."""
    parsed = parse_known_query(query, TerminalQuery)
    if parsed.shell is not None and parsed.terminal_id is not None:
        raise bad_fields(terminal_id="must be absent with shell")
    for name in ("cwd", "user"):
        if getattr(parsed, name) is not None and (parsed.shell or parsed.terminal_id) is not None:
            raise bad_fields(**{name: "must be absent with shell and terminal_id: it is there already"})
    if parsed.take_over and (parsed.shell is None or parsed.read_only):
        raise bad_fields(take_over="must be absent without shell, and with read_only")
    if is_raw and parsed.window is not None:
        raise bad_fields(window=f"must be absent with {RAW_PROTOCOL}, which has no message for credit")
    return parsed


@attrs.frozen
class TakeOver:
    """Direct input to the watched shell."""

    kind: ClassVar[str] = "take_over"


@attrs.frozen
class GiveBack:
    """Leave the shell that was taken over."""

    kind: ClassVar[str] = "give_back"


ClientMessage = Resize | TakeOver | GiveBack | Credit | Ping

CLIENT_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls for cls in (Resize, TakeOver, GiveBack, Credit, Ping)
}


def parse_message(message: str) -> ClientMessage:
    """Return a client's message in a text frame.

    Raises:
        MessageRefused: the message is malformed.
    """
    cls, value = parse_control(message, CLIENT_MESSAGES)
    try:
        built: ClientMessage = parse(value, cls)
    except SandkastenError as error:
        raise MessageRefused(error, kind=cls.kind) from None
    return built


@attrs.frozen
class TerminalReady(Body):
    """The terminal is open. `taken_over`: input reaches a shell."""

    kind: ClassVar[str] = "ready"
    terminal_id: str
    cols: int
    rows: int
    taken_over: bool
    read_only: bool


@attrs.frozen
class Skipped(Body):
    """`bytes` of output were lost for this viewer: it was too slow. The screen may be wrong until it is redrawn."""

    kind: ClassVar[str] = "skipped"
    bytes: int


@attrs.frozen
class TakenOver(Body):
    """Input reaches the shell from now on."""

    kind: ClassVar[str] = "taken_over"


@attrs.frozen
class GivenBack(Body):
    """Input no longer reaches the shell, which is only watched."""

    kind: ClassVar[str] = "given_back"


ServerMessage = TerminalReady | Skipped | TakenOver | GivenBack | Exit | ErrorMessage | Pong

SERVER_MESSAGES: Mapping[str, type[Any]] = {  # attrs classes
    cls.kind: cls for cls in (TerminalReady, Skipped, TakenOver, GivenBack, Exit, ErrorMessage, Pong)
}
