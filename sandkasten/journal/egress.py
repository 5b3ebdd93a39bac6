"""The log of what sessions reached for: the newest entries of each, numbered in memory. Does no I/O.

Refusals are kept apart from the rest: a program can have itself refused as often as it likes, and would push out the
entry of what it sent before.

Numbers begin at the microsecond in which a session's log was opened, so a cursor of an earlier daemon is behind every
entry of this one, and its reader misses none that is kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import merge
from operator import itemgetter
from typing import Protocol

import attrs

from egress import protocol
from sandkasten.errors import InvalidRequest
from sandkasten.model.network import (
    MAX_DENIALS,
    EgressDenial,
    EgressEntry,
    EgressKind,
    EgressLogging,
    EgressPage,
    EgressVerdict,
)

KEPT = 1000
"""Refusals that are kept of each session, and as many other entries."""

KEPT_OF_ALL = 50_000
"""Entries that are kept of all sessions together, some tens of MiB; beyond it, the longest log loses the older half
of its refusals or of the rest, of which it has more."""


KEPT_RUNS = 32
"""Runs of each session that an entry may still be of: it is told a moment after its connection's end."""


class RunTime(Protocol):
    """The time of a run, in seconds since the epoch; `ended` is infinite before its end. `is_alone`: no process of the
    session but the run's own could connect meanwhile."""

    exec_id: str
    began: float
    ended: float
    is_alone: bool


class SessionEgressLog:
    """The log of one session. `runs` are the last ones."""

    def __init__(self, logging: EgressLogging) -> None:
        self.logging = logging
        self.runs: deque[RunTime] = deque(maxlen=KEPT_RUNS)
        self._refused: deque[tuple[int, EgressEntry]] = deque(maxlen=KEPT)
        self._others: deque[tuple[int, EgressEntry]] = deque(maxlen=KEPT)
        self._first = self._last = time.time_ns() // 1000
        self._dropped = 0

    @property
    def kept(self) -> int:
        """The number of entries."""
        return len(self._refused) + len(self._others)

    def halve(self) -> int:
        """Drop the older half of the refusals, or of the rest if there are more of it; return their number."""
        longest = max(self._refused, self._others, key=len)
        count = (len(longest) + 1) // 2
        for _ in range(count):
            longest.popleft()
        return count

    @property
    def last(self) -> int:
        """The number of the newest entry."""
        return self._last

    def add(self, entry: protocol.EgressEntry) -> EgressEntry | None:
        """Keep an entry and return it. Where refusals alone are logged, drop an allowed one and return None."""
        if entry.verdict == "allowed" and self.logging is EgressLogging.DENIED:
            return None
        self._last += 1
        shown = {name: value for name, value in attrs.asdict(entry).items() if name not in ("session_id", "dial_ms")}
        shown |= {
            "cursor": str(self._last),
            "time": datetime.fromtimestamp(entry.time, UTC),
            "kind": EgressKind(entry.kind),
            "verdict": EgressVerdict(entry.verdict),
            "port": None if entry.kind == "dns" else entry.port,
            "exec_id": next((each.exec_id for each in self.runs if _is_of(entry, each)), None),
        }
        kept = EgressEntry(**shown)
        (self._refused if kept.verdict is EgressVerdict.DENIED else self._others).append((self._last, kept))
        return kept

    def note_dropped(self, count: int) -> None:
        """Count entries that were lost on their way, of this session or another."""
        self._dropped += count

    def page(self, after: str | None, verdict: EgressVerdict | None, host: str | None, limit: int) -> EgressPage:
        """Return the entries behind a cursor. Raises `InvalidRequest` for a malformed one."""
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 20):
            raise InvalidRequest("malformed cursor", after="must be the cursor of an entry or of a page")
        place = max(int(after or 0), self._first)
        found: list[EgressEntry] = []
        missed = 0
        for number, entry in merge(self._refused, self._others, key=itemgetter(0)):
            if number <= place:
                continue
            if len(found) == limit:
                break
            missed += number - place - 1
            place = number
            if verdict in (None, entry.verdict) and host in (None, entry.host):
                found.append(entry)
        return EgressPage(found, str(place), self._dropped, missed)

    def denied_since(self, number: int) -> Sequence[EgressDenial]:
        """Return the refusals behind an entry's number, equal ones counted, at most `MAX_DENIALS`."""
        counts: dict[tuple[str, int | None, str], int] = {}
        for at, entry in reversed(self._refused):
            if at <= number:
                break
            key = entry.host, entry.port, entry.reason or ""
            counts[key] = counts.get(key, 0) + 1
        newest_last = list(counts.items())[::-1]
        return tuple(EgressDenial(*key, count) for key, count in newest_last[:MAX_DENIALS])


def _is_of(entry: protocol.EgressEntry, run: RunTime) -> bool:
    return run.is_alone and run.began <= entry.time <= run.ended


class EgressLogs:
    """The logs of all sessions that have a way out, or had one."""

    def __init__(self) -> None:
        self._logs: dict[str, SessionEgressLog] = {}
        self._kept = 0
        self._catch_up: Callable[[], None] | None = None

    def follow(self, catch_up: Callable[[], None]) -> None:
        """Call `catch_up` from now on, before a log is read for a run: it adds what has been told by then."""
        self._catch_up = catch_up

    def catch_up(self) -> None:
        """Have what was told by now added to the logs."""
        if self._catch_up is not None:
            self._catch_up()

    def open(self, session_id: str, logging: EgressLogging) -> None:
        """Begin the log of a session, or go on with it."""
        if (log := self._logs.get(session_id)) is not None:
            log.logging = logging
        else:
            self._logs[session_id] = SessionEgressLog(logging)

    def add(self, entry: protocol.EgressEntry) -> EgressEntry | None:
        """Keep an entry of a session that has a log, and return it; see `SessionEgressLog.add`."""
        log = self._logs[entry.session_id]
        before = log.kept
        shown = log.add(entry)
        self._kept += log.kept - before
        if self._kept > KEPT_OF_ALL:
            self._kept -= max(self._logs.values(), key=lambda each: each.kept).halve()
        return shown

    def __iter__(self) -> Iterator[str]:
        """Return the ids of the sessions that have a log."""
        return iter(list(self._logs))

    def note_dropped(self, count: int) -> None:
        """Count entries that were lost on their way; nobody knows whose they were."""
        for log in self._logs.values():
            log.note_dropped(count)

    def get(self, session_id: str) -> SessionEgressLog | None:
        return self._logs.get(session_id)

    def page(
        self, session_id: str, after: str | None, verdict: EgressVerdict | None, host: str | None, limit: int
    ) -> EgressPage:
        """Return entries of a session's log; none of a session that never had a way out."""
        self.catch_up()
        log = self._logs.get(session_id)
        return EgressPage((), after or "0") if log is None else log.page(after, verdict, host, limit)

    def forget(self, session_id: str) -> None:
        """Drop the log of a session that has ended."""
        if (log := self._logs.pop(session_id, None)) is not None:
            self._kept -= log.kept


@attrs.frozen
class SessionDenials:
    """Refusals of one session, as its runs see them."""

    logs: EgressLogs
    session_id: str

    def begin(self, run: RunTime) -> int:
        """Have entries of that time know of a run; return the number of the newest entry, 0 while there is no log."""
        if (log := self.logs.get(self.session_id)) is None:
            return 0
        log.runs.append(run)
        return log.last

    def since(self, mark: int) -> Sequence[EgressDenial]:
        """Return what the session was refused since `mark`, up to now."""
        if (log := self.logs.get(self.session_id)) is None:
            return ()
        self.logs.catch_up()
        return log.denied_since(mark)
