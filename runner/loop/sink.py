"""Where the answer to a request goes, and where what else comes on its connection goes. Pure declarations."""

from __future__ import annotations

from typing import Protocol

from runner.wire.protocol import Kind


class Job(Protocol):
    """What a running request takes from its connection."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_cancel(self) -> None: ...

    def on_close(self) -> None: ...

    def on_drained(self) -> None: ...

    @property
    def wants_input(self) -> bool: ...


class Sink(Protocol):
    """Where the answer to a request goes: a connection, or what outlives it (`kept`). `finish` sends the one final
    frame; nothing may follow it."""

    def send(self, kind: Kind, body: bytes) -> None: ...

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None: ...

    def refresh_input(self) -> None: ...

    @property
    def is_full(self) -> bool: ...
