"""How long each phase of a create took."""

from __future__ import annotations

from collections.abc import Mapping

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

    def mark_steps(self, phase: str, steps_us: Mapping[str, int]) -> None:
        """End a phase of which the steps are known: they follow it as `phase.step`, and overlap where they may."""
        self.mark(phase)
        self.phases |= {f"{phase}.{step}": took_us / 1000 for step, took_us in steps_us.items()}
