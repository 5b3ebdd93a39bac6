"""Why a run ended: out of memory, out of processes or out of room, on evidence of its own only.

That the kernel killed, refused a fork or has no room left is known of the session as a whole. A run that was alone in
it for all of its life did that; beside others, or beside what earlier runs left, it is said of a run only that shows a
sign of it: a death by SIGKILL, or the words of the C library in what it wrote. Otherwise the runner's word stands.
A run can forge its own signs, and thereby its own cause, never that of another.

Sources: strerror(3); bash(1), dash(1), "EXIT STATUS" and diagnostics; make(1).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import attrs

from runner.wire.protocol import ExecReply
from sandkasten.model import Cause, Stream
from sandkasten.model.errors import ExecGone
from sandkasten.output.spool import OutputLog

_SIGKILL = 9
_KILLED_STATUS = 128 + _SIGKILL
_CAN_NOT_FORK_STATUS = 254
"""What bash exits with when it has given up forking."""
_OWN_CAUSES = (Cause.TIMED_OUT, Cause.CANCELLED)
"""Causes that we brought about: what the counters say besides does not matter."""

_TAIL_BYTES = 16 * 1024
"""How much of each stream is looked at, from its end."""

_KILLED = re.compile(
    rb"^ *Killed *\r?$|\d +Killed\b|\] Killed\b|\bKilled signal\b|\bSIGKILL\b|\bError 137\b", re.MULTILINE
)
"""How shells, make, gcc and Python tell of a child that was killed."""
_NO_PROCESS = re.compile(
    rb"resource temporarily unavailable|can(?:no|')t fork|can't start new thread"
    rb"|unable to create (?:new )?native thread|\bEAGAIN\b",
    re.IGNORECASE,
)
_NO_ROOM = re.compile(rb"no space left on device|disk quota exceeded", re.IGNORECASE)


@attrs.frozen
class Facts:
    """What is known besides the runner's word. `kills`, `refusals`: how often the kernel killed for memory and refused
    a fork in the session while it ran. `is_alone`: nothing else was there at any time. `is_clean`: nothing of earlier
    commands was in its shell, which would tell of their deaths now. `was_sent_kill`: a caller sent it SIGKILL."""

    kills: int
    refusals: int
    is_alone: bool
    is_clean: bool
    was_sent_kill: bool


Says = Callable[[Stream, re.Pattern[bytes]], Awaitable[bool]]
"""Whether the end of a stream has such words."""


async def find_cause(reply: ExecReply, facts: Facts, says: Says) -> Cause:
    """Return the cause of an end that the runner reported."""
    cause = Cause(reply.cause)
    if reply.exit_code == 0 or cause in _OWN_CAUSES:
        return cause
    if facts.kills > 0 and (facts.is_alone or await _was_killed(reply, facts, says)):
        return Cause.OOM
    if facts.refusals > 0 and (facts.is_alone or await _could_not_fork(reply, says)):
        return Cause.PIDS_LIMIT
    return Cause.DISK_FULL if await _had_no_room(reply, facts, says) else cause


async def _was_killed(reply: ExecReply, facts: Facts, says: Says) -> bool:
    if reply.exit_code == _KILLED_STATUS:
        return not facts.was_sent_kill
    return facts.is_clean and (await says(Stream.STDERR, _KILLED) or await says(Stream.STDOUT, _KILLED))


async def _could_not_fork(reply: ExecReply, says: Says) -> bool:
    is_told = await says(Stream.STDERR, _NO_PROCESS) or await says(Stream.STDOUT, _NO_PROCESS)
    return is_told or reply.exit_code == _CAN_NOT_FORK_STATUS


async def _had_no_room(reply: ExecReply, facts: Facts, says: Says) -> bool:
    """The kernel counts no refused writes, so words count on standard error alone, unless there still is no room."""
    if reply.disk_filled and facts.is_alone:
        return True
    return await says(Stream.STDERR, _NO_ROOM) or (reply.disk_full and await says(Stream.STDOUT, _NO_ROOM))


def reader_of(log: OutputLog) -> Says:
    """Return what looks at a run's output. It is looked at only when a run failed; what is not kept says nothing."""

    async def says(stream: Stream, words: re.Pattern[bytes]) -> bool:
        start = max(log.kept.total(stream) - _TAIL_BYTES, log.kept.first_offset(stream))
        try:
            tail = await log.read(stream, start, _TAIL_BYTES)
        except ExecGone:
            return False
        return words.search(tail.data) is not None

    return says
