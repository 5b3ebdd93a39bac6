"""A build under way, and those who join it: they work in the session's network while PID 1 starts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from nsinit.scheduler import JobEvent, Wait


@dataclass(slots=True)
class Filling:
    """A build under way, whose end waits for what others do in the session's network meanwhile.

    `has_network`: the builder is done with the network. `has_way_out`: a way out was opened."""

    has_network: JobEvent = field(default_factory=JobEvent)
    has_way_out: bool = False
    _others: int = 0
    _left: JobEvent = field(default_factory=JobEvent)

    def join(self) -> None:
        """Have the end wait for `leave`."""
        self._others += 1

    def leave(self) -> None:
        self._others -= 1
        self._left.set()

    def end(self) -> Generator[Wait, bool, None]:
        """Let others go on, and wait for them."""
        self.has_network.set()
        while self._others:
            self._left = JobEvent()
            yield Wait(event=self._left)
