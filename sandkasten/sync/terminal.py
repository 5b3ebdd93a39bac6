"""A terminal of a session: bytes in both directions, over a WebSocket of its own."""

# Made from sandkasten/sdk/terminal.py by tests/sdk/twin.py, not to be edited.
from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from sandkasten import errors
from sandkasten.sdk.types import RunEnd
from sandkasten.sdk.wire import TERMINAL_PROTOCOL, read_message, run_end
from sandkasten.sync.transport import Endpoint, Lost, Pump, SocketClosed, WebSocket

WINDOW_BYTES = 1024 * 1024
"""Bytes that may be on their way: a caller that takes none holds up its own view, and its memory stays bounded."""
_INPUT_BYTES = 256 * 1024


class Terminal:
    """A terminal, opened by `with session.terminal(...) as terminal:`; `for data in terminal` reads bytes.

    Leaving the block leaves the terminal open for others; its program ends with `exit`, by `Run.cancel` on
    `session.run(terminal.id)`, or with the session. A lost connection is not opened again: join by `terminal_id`.
    """

    def __init__(self, session: Endpoint, query: dict[str, Any]) -> None:
        """Internal: use `Session.terminal`."""
        self._transport = session.transport
        self._request = session.call("GET", "/terminal/ws", query=query | {"window": WINDOW_BYTES})
        self._socket: WebSocket | None = None
        self._pump: Pump | None = None
        self._received: deque[bytes] = deque()
        self._refused: dict[str, errors.SandkastenError] = {}
        self._answers = 0
        self._taken = 0
        self.id = ""
        """Id by which others join the terminal; it names a run, too."""
        self.cols, self.rows = 0, 0
        self.taken_over = False
        """Whether this viewer's input reaches a shell that is viewed."""
        self.skipped = 0
        """Bytes of output that this viewer lost because it was too slow."""
        self.end: RunEnd | None = None
        """End of the terminal's program, once this viewer has seen it."""

    def __enter__(self) -> Self:
        try:
            self._socket = self._transport.websocket(self._request, TERMINAL_PROTOCOL)
        except Lost as lost:
            raise (lost.__cause__ if isinstance(lost.__cause__, errors.SandkastenAPIError) else lost) from None
        self._pump = Pump(self._socket, self._take)
        try:
            self._until(lambda: bool(self.id) or self.end is not None)
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._received.append(message)
            return
        value = read_message(message)
        match value["type"]:
            case "ready":
                self.id, self.taken_over = value["terminal_id"], value["taken_over"]
                self.cols, self.rows = value["cols"], value["rows"]
            case "skipped":
                self.skipped += value["bytes"]
            case "taken_over" | "given_back":
                self.taken_over = value["type"] == "taken_over"
                self._answers += 1
            case "exit":
                self.end = run_end(value)
            case "error":
                self._refused[value.get("refused", "")] = errors.api_error(message, None, streamed=True)

    def _until(self, is_done: Callable[[], bool]) -> None:
        assert self._pump is not None, "a terminal is opened by `with`"
        try:
            self._pump.until(lambda: is_done() or "" in self._refused)
        except SocketClosed as closed:
            if self.end is None:
                raise self._refused.get("", Lost(str(closed), was_sent=True)) from closed
        if "" in self._refused and not is_done():
            raise self._refused[""]

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the next bytes of output; the iteration ends with the terminal's program. A cancelled call loses none.

        Raises:
            ConnectionFailed: the connection was lost; the terminal goes on.
        """
        assert self._socket is not None, "a terminal is opened by `with`"
        self._until(lambda: bool(self._received) or self.end is not None)
        if not self._received:
            raise StopIteration
        taken = self._taken + len(self._received[0])
        if taken >= WINDOW_BYTES // 8 and self.end is None:
            try:
                self._say(type="credit", bytes=taken)
            except Lost:
                pass  # what has come by then is still handed out
            taken = 0
        self._taken = taken
        return self._received.popleft()  # last: a cancelled call leaves it

    def _say(self, **message: object) -> None:
        assert self._socket is not None, "a terminal is opened by `with`"
        self._socket.send(json.dumps(message))

    def send(self, data: str | bytes) -> None:
        """Type into the terminal.

        Raises:
            Uncertain: the connection was lost.
        """
        assert self._socket is not None, "a terminal is opened by `with`"
        content = data.encode() if isinstance(data, str) else data
        for start in range(0, len(content), _INPUT_BYTES):
            try:
                self._socket.send(content[start : start + _INPUT_BYTES])
            except Lost as lost:
                raise errors.Uncertain(f"{lost.message}; what was typed may have arrived") from lost

    def resize(self, cols: int, rows: int) -> None:
        """Give the terminal another size in character cells, for all viewers."""
        self._say(type="resize", cols=cols, rows=rows)
        self.cols, self.rows = cols, rows

    def take_over(self) -> None:
        """Type into the viewed shell from now on; returns when its running command has ended and it waits.

        Raises:
            Uncertain: the connection was lost.
        """
        self._order("take_over")

    def give_back(self) -> None:
        """Return the shell to the commands that wait for it, or stop waiting for it."""
        self._order("give_back")

    def _order(self, name: str) -> None:
        self._refused.pop(name, None)
        answers = self._answers
        try:
            self._say(type=name)
            self._until(lambda: self._answers > answers or name in self._refused or self.end is not None)
        except Lost as lost:
            raise errors.Uncertain(f"{lost.message}; {name} may have had its effect") from lost
        if name in self._refused:
            raise self._refused.pop(name)
