"""What was in a persistent shell before somebody watched it: its last commands and what is kept of their output.

Taken from the logs of its runs when a view is opened, so a shell that nobody watches costs nothing. What is taken ends
exactly where a screen that follows the running command goes on. Nothing here is shown to anybody: see `screen.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from sandkasten.actors.runs.run import Run
from sandkasten.actors.runs.screen import SCROLLBACK_BYTES
from sandkasten.actors.runs.shells import Shell
from sandkasten.model.errors import ExecGone

MAX_PAST_RUNS = 100
_LINE_BYTES = 64
"""What a command is counted with beside its text and its output."""


@attrs.frozen
class PastRun:
    """A run and the part of its output that is to be shown, by offset over both streams. `is_over`: it has ended."""

    run: Run
    start: int
    end: int
    is_over: bool

    async def read(self) -> bytes:
        """Return that part, from a whole line on if it is not all; nothing if it is not kept any more."""
        if self.start == self.end:
            return b""
        assert self.run.log is not None
        try:
            data = (await self.run.log.read(None, self.start, self.end - self.start)).data
        except ExecGone:
            return b""
        _, newline, rest = data.partition(b"\n")
        return rest if self.start and newline else data


def past_of(shell: Shell, newest_first: Iterable[Run]) -> Sequence[PastRun]:
    """Return what was run in a shell so far, the oldest first: no more than a screen keeps."""
    found: list[PastRun] = []
    room_bytes = SCROLLBACK_BYTES
    for run in newest_first:
        if room_bytes <= 0 or len(found) >= MAX_PAST_RUNS:
            break
        if not _was_in(shell, run) or run.log is None:
            continue
        end = run.log.kept.total(None)
        start = max(run.log.kept.first_offset(None), end - room_bytes)
        found.append(PastRun(run, start, end, run.has_ended))
        room_bytes -= end - start + len(run.command) + _LINE_BYTES
    return found[::-1]


def _was_in(shell: Shell, run: Run) -> bool:
    """Whether a run has begun in it; one that an earlier daemon saw end is known by the shell's name alone."""
    if run.is_program or run.info.started_at is None:
        return False
    return run.shell is shell or (run.shell is None and run.spec.shell == shell.name)
