"""Messages about runs that outlive the connection they were begun on; part of `protocol`. Values only.

A run that was begun with a *ticket* is kept: it goes on when its connection breaks, as long as its output finds room,
and its end is kept until the daemon says that it has it. The ticket is text of the daemon's, given back as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TICKET_CHARS = 4096
MAX_LISTED_RUNS = 32
"""Runs in one `RunList`: with tickets of the greatest length they still fit into one frame."""

KEPT_RUN_BYTES = 3 * 1024 * 1024
"""Output of one run that PID 1 keeps. More than can be on its way: unsent, in the socket, and with a daemon that has
received but not stored it."""


@dataclass(frozen=True, slots=True)
class ListRuns:
    """Tell the kept runs with a number above `after`, in order. Answer: `RunList`."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class AttachRun:
    """Go on with a kept run: this connection takes the place of the one it was begun on. The first bytes of its streams
    are known. Answer: STARTED with `Attached`, output frames, then `ExecReply`; errors `NOT_RUNNING` (there is no such
    run), `BAD_REQUEST` (it has not written that much)."""

    exec_id: str
    stdout_offset: int = 0
    stderr_offset: int = 0


@dataclass(frozen=True, slots=True)
class ForgetRuns:
    """The daemon is done with these runs: their ends are forgotten, and what still runs is cancelled. Answer:
    `Done`."""

    exec_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One kept run. `has_begun`: STARTED was sent; `input_ended`: all of its standard input has come."""

    number: int
    exec_id: str
    ticket: str
    has_begun: bool
    has_ended: bool
    input_ended: bool


@dataclass(frozen=True, slots=True)
class RunList:
    """`more`: ask again after the last one's number."""

    runs: tuple[RunEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Attached:
    """What follows begins at these offsets: as asked for, or later when what was there is not kept any more. `age_us`
    counts from the beginning of the run, 0 before it; `pid` as in `Started`."""

    exec_id: str
    stdout_offset: int
    stderr_offset: int
    age_us: int
    pid: int = 0
