"""Where the answer to a request goes. Pure declaration: a connection implements it."""

from __future__ import annotations

from typing import Protocol

from runner.protocol import Kind


class Sink(Protocol):
    """Where the answer to a request goes. `finish` sends the one final frame; nothing may follow it."""

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None: ...

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool: ...
