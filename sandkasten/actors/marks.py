"""How long each phase of a create took."""

from __future__ import annotations

import trio


class Marks:
    """Phases of a create and how long each took, in milliseconds."""

    def __init__(self) -> None:
        self._last = trio.current_time()
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = trio.current_time()
        self.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now
