"""The logs of one session: who is running, who has ended, and who gives way when the session's budget is used up.

Costs are counted as in memory, wherever the output lies, so that one number bounds memory, disk and index alike. An
ended run costs its record besides, whatever it wrote: so runs without output are bounded as well. Where all sessions
share a bound it is the one that takes most which gives way, so none loses anything as long as it has its equal part.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import trio

from sandkasten.output.spool_ledger import Account, Ledger
from sandkasten.output.spool_log import OutputLog

RECORD_BYTES: Final = 6 * 1024
"""What an ended run costs beside its output: what the daemon holds of it in memory, its texts not included."""

_DROPS_AT_ONCE: Final = 256


class Shelf:
    """The logs of ended runs of all sessions, in the order in which they ended."""

    def __init__(self, ledger: Ledger, retention_s: float, records_limit_bytes: int) -> None:
        self._ledger = ledger
        self._records_limit_bytes = records_limit_bytes
        self._records_bytes = 0
        self.retention_s = retention_s
        self._logs: OrderedDict[OutputLog, RunLogs] = OrderedDict()
        self._holders: dict[RunLogs, int] = {}
        """What the records of each session that has any cost."""
        self.closed: deque[RunLogs] = deque()
        """Sessions that have ended and still have logs to drop."""

    @property
    def next_expiry(self) -> float | None:
        """When the oldest log is to be dropped, in `trio.current_time()` seconds; None without any."""
        return next(iter(self._logs)).expires_at if self._logs else None

    def put(self, log: OutputLog, owner: RunLogs) -> None:
        log.expires_at = trio.current_time() + self.retention_s
        if not self._logs:
            self._ledger.work.set()
        self._logs[log] = owner
        self._count(owner, log.record_bytes)
        while self._records_bytes > self._records_limit_bytes:
            max(self._holders, key=self._holders.__getitem__).drop_oldest()

    def remove(self, log: OutputLog) -> None:
        owner = self._logs.pop(log, None)
        if owner is not None:
            self._count(owner, -log.record_bytes)

    def _count(self, owner: RunLogs, cost_bytes: int) -> None:
        self._records_bytes += cost_bytes
        self._holders[owner] = self._holders.get(owner, 0) + cost_bytes
        if not self._holders[owner]:
            del self._holders[owner]

    async def drop_closed(self) -> None:
        """Drop what sessions that have ended left, and let others run meanwhile."""
        while self.closed:
            if not self.closed[0].drop_some():
                self.closed.popleft()
            await trio.lowlevel.checkpoint()

    def drop_oldest(self) -> None:
        """Drop the log that ended first."""
        next(iter(self._logs.values())).drop_oldest()

    def drop_of_largest(self, *, at_least_bytes: int) -> bool:
        """Drop the oldest log of the session that takes most; False if none that has one takes so much."""
        largest = max(self._holders, key=lambda logs: logs.bytes_used, default=None)
        if largest is None or largest.bytes_used < at_least_bytes:
            return False
        largest.drop_oldest()
        return True


class RunLogs:
    """The logs of one session, by the id of their run."""

    def __init__(self, ledger: Ledger, shelf: Shelf, *, limit_bytes: int, on_closed: Callable[[], None]) -> None:
        self.on_gone: Callable[[str], None] = lambda exec_id: None
        """Told the id of a run that ended when its log was dropped; not told at `close`."""
        self._ledger = ledger
        self._shelf = shelf
        self._on_closed = on_closed
        self._account = Account(limit_bytes, self._make_room)
        self._logs: dict[str, OutputLog] = {}
        self._running: dict[str, OutputLog] = {}
        self._retired: deque[OutputLog] = deque()
        self._is_closed = False

    def when_gone(self, call: Callable[[str], None]) -> None:
        """Have `call` told the id of each ended run whose log is dropped, but not at `close`."""
        self.on_gone = call

    @property
    def bytes_used(self) -> int:
        """What all logs cost, in memory or on disk, and the records of ended runs."""
        return self._account.used_bytes

    def open(self, exec_id: str) -> OutputLog:
        """Begin the log of a run whose id no other log here has."""
        assert exec_id not in self._logs
        log = OutputLog(exec_id, self._ledger, self._account)
        if self._is_closed:
            log.drop()
            return log
        self._logs[exec_id] = self._running[exec_id] = log
        return log

    def get(self, exec_id: str) -> OutputLog | None:
        return self._logs.get(exec_id)

    def retire(self, exec_id: str, *, text_bytes: int = 0) -> None:
        """The run has ended: its log is closed, and kept until it is too old or its room is needed. `text_bytes`: what
        its record takes beside `RECORD_BYTES`."""
        log = self._running.pop(exec_id, None)
        if log is None:
            return
        if not log.is_closed:
            log.close()
        log.kept.settle()
        log.record_bytes = RECORD_BYTES + text_bytes
        self._account.used_bytes += log.record_bytes
        self._retired.append(log)
        self._shelf.put(log, self)
        self._make_room()

    def discard(self, exec_id: str) -> None:
        """The run never began: forget its log, as if its id had not been used. `on_gone` isn't told."""
        log = self._running.pop(exec_id, None)
        if log is not None:
            del self._logs[exec_id]
            log.drop()

    def drop_oldest(self) -> None:
        """Drop the log of the run that ended first."""
        log = self._retired.popleft()
        self._shelf.remove(log)
        self._account.used_bytes -= log.record_bytes
        log.drop()
        if not self._is_closed:
            del self._logs[log.exec_id]
            self.on_gone(log.exec_id)

    def _shorten_oldest(self) -> None:
        """Take the oldest part of the log of the run that ended first; a short log goes as a whole."""
        oldest = self._retired[0]
        if oldest.can_shrink:
            oldest.kept.drop_oldest()
        else:
            self.drop_oldest()

    def close(self) -> None:
        """The session has ended: nobody finds its logs any more. Very many are dropped bit by bit behind this call."""
        if self._is_closed:
            return
        self._is_closed = True
        for log in self._running.values():
            log.drop()
        self._logs.clear()
        self._running.clear()
        self._on_closed()
        if self.drop_some():
            self._shelf.closed.append(self)
            self._ledger.work.set()

    def drop_some(self) -> bool:
        """Drop some logs of a session that was closed; True when there are more."""
        for _ in range(min(len(self._retired), _DROPS_AT_ONCE)):
            self.drop_oldest()
        return bool(self._retired)

    def _make_room(self) -> None:
        """Get back under the limit: ended runs go first, bit by bit, then the oldest part of the largest log.

        A running log keeps its fair part of half the budget, and whatever readers it waits for still need; then the
        session is over its limit by as much.
        """
        account = self._account
        while account.used_bytes > account.limit_bytes:
            if self._retired:
                self._shorten_oldest()
                continue
            if not self._running:
                return
            largest = max(self._running.values(), key=_shrinkable_bytes)
            fair_bytes = account.limit_bytes // (2 * len(self._running))
            if _shrinkable_bytes(largest) <= fair_bytes:
                return
            largest.kept.drop_oldest()


def _shrinkable_bytes(log: OutputLog) -> int:
    return log.kept.cost_bytes if log.can_shrink else 0
