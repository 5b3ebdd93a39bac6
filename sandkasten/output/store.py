"""The output store: output and records of all runs of all sessions, in bounded memory and on bounded disk.

`OutputStore` has one `SessionOutput` for each session, and that has an `OutputLog` for each run that is kept. Three
places hold the output of a run:

- PID 1 holds the newest part of it until the daemon says that PID 1 may forget the run (`actors/runs/persistence.py`);
- memory holds it while there is room, so that the output of a short run touches no file;
- the session's files hold what memory had no room for, and what PID 1 might not be able to give back to the next
  daemon. Each byte is written at most once: a block that was written leaves memory without another write.

Facts and ends of runs and the ids that were used go to the same files (`disk.py`), in the background: `SessionOutput`
is the only writer of its session's files.

Who gives way:

- Memory is short: blocks of ended runs leave it first, session by session, then those of the largest running one. What
  readers still hold of logs that were dropped goes last.
- A session costs more than its limit: its ended runs are dropped, oldest part first, then the oldest part of the
  largest running log. Costs are counted as in memory, wherever the output lies, and an ended run costs its record.
- The records of all sessions take too much: the session that takes most drops its oldest ended run.
- The output of all sessions takes too much disk: the session with most of it gives up its oldest file, with the output
  in it, of running logs as well, and whoever reads it. To drop ended runs alone may free no file. So no session loses
  anything as long as it has no more than its equal part.
- The disk takes nothing, and memory is short: the session with most output in memory loses the oldest of that.
- The time of an ended run is over: the run is dropped.

A disk that fails or is full costs old output, and the next daemon's knowledge; never a run.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Final, NoReturn, TypeVar, TypeVarTuple

import attrs
import trio

from sandkasten.config import MIB, RunsSettings
from sandkasten.model.run import is_made
from sandkasten.output.blocks import BLOCK_BYTES, Block, KeptOutput, Ledger, OutputAccount
from sandkasten.output.disk import (
    DataFile,
    News,
    OutputDiskUse,
    SessionFiles,
    Tail,
    Written,
    find_files,
    session_of,
)
from sandkasten.output.log import OutputLog
from sandkasten.output.records import RunFacts, RunState, UsedIds

log = logging.getLogger(__name__)

RECORD_BYTES: Final = 6 * 1024
"""The cost of an ended run beside its output: memory of its record, texts not included."""

_BATCH_BYTES: Final = MIB
"""About as much leaves memory at a time."""

_WRITE_BYTES: Final = 8 * MIB
"""At most about as much output is written at a time."""

_LOCKED_S: Final = 0.01
"""Time between two looks at a session that is to give up a file and is being written."""

_WRITERS: Final = 2
_READERS: Final = 4
_MOST_UNTOLD: Final = 4096
"""Ids of runs that are gone, and of those that were refused, which a write that failed leaves to the next. PID 1 can
show fewer to the next daemon."""

_DROPS_AT_ONCE: Final = 256
_RUNS_PER_CHECKPOINT: Final = 128

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

Describe = Callable[[str], tuple[RunFacts | bytes, RunState] | None]
"""Returns facts, which may be JSON already, and state; None for a run that is not to be written."""

Chosen = Sequence[tuple[KeptOutput, Block, Tail]]

Batch = Sequence[tuple[KeptOutput, Sequence[Block]]]

ROUND_S: Final = 0.1
"""Time between two moments at which the records of all sessions are written."""

_TURNS_AT_ONCE: Final = 64
"""Sessions whose records are written by one call of a thread."""


@attrs.frozen
class Records:
    """Records of one session that are written beside those of others. `settle` is called once, by the task that asked
    for them, with the error if they were not written."""

    files: SessionFiles
    news: News
    settle: Callable[[OSError | None], None]


Turn = Callable[[], Records | None]
"""Returns the records of a session that are due, None if there are none or the session writes them itself."""


def _of_one_session(step: Callable[[], R]) -> R | None:
    """Take a step that is a session's own. One that fails costs no other session its records, and no round."""
    try:
        return step()
    except Exception:
        log.exception("records_not_written")
        return None


def _write_each(records: Sequence[Records]) -> Sequence[OSError | None]:
    """Write the records of several sessions, in a worker thread; return the error of each that failed."""
    errors: list[OSError | None] = []
    for each in records:
        try:
            each.files.write(each.news)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


class Shelf:
    """The logs of ended runs of all sessions, in the order in which they ended."""

    def __init__(self, ledger: Ledger, retention_s: float, records_limit_bytes: int) -> None:
        self._ledger = ledger
        self._records_limit_bytes = records_limit_bytes
        self._records_bytes = 0
        self.retention_s = retention_s
        self._logs: OrderedDict[OutputLog, SessionOutput] = OrderedDict()
        self._holders: dict[SessionOutput, int] = {}
        """The cost of the records of each session that has any."""
        self.closed: deque[SessionOutput] = deque()
        """Sessions that have ended and still have logs to drop."""

    @property
    def next_expiry(self) -> float:
        """When the oldest log is to be dropped, in `trio.current_time()` seconds."""
        return next(iter(self._logs)).expires_at if self._logs else inf

    def put(self, log: OutputLog, owner: SessionOutput) -> None:
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

    def _count(self, owner: SessionOutput, cost_bytes: int) -> None:
        self._records_bytes += cost_bytes
        self._holders[owner] = self._holders.get(owner, 0) + cost_bytes
        if not self._holders[owner]:
            del self._holders[owner]

    async def drop_closed(self) -> None:
        """Drop the logs of sessions that have ended, and let others run meanwhile."""
        while self.closed:
            if not self.closed[0].drop_some():
                self.closed.popleft()
            await trio.lowlevel.checkpoint()

    async def drop_expired(self) -> None:
        """Drop the logs whose time is over, and let others run meanwhile."""
        now = trio.current_time()
        while self.next_expiry <= now:
            for _ in range(_DROPS_AT_ONCE):
                if self.next_expiry <= now:
                    next(iter(self._logs.values())).drop_oldest()
            await trio.lowlevel.checkpoint()


@attrs.frozen
class _Due:
    """Ids of a session's runs that are to be written down: with other facts or another state, gone, refused."""

    changed: dict[str, None]
    gone: list[str]
    refused: list[str]


class SessionOutput:
    """The logs of one session by the id of their run, its records, and the only writer of its files."""

    def __init__(self, store: OutputStore, ledger: Ledger, shelf: Shelf, files: SessionFiles, limit_bytes: int) -> None:
        self.used = UsedIds()
        """Ids that clients chose for runs that are not kept any more."""
        self.files = files
        self.account = OutputAccount(limit_bytes, self._make_room)
        self._store, self._ledger, self._shelf = store, ledger, shelf
        self._on_gone: Callable[[str], None] = lambda exec_id: None
        self._describe: Describe = lambda exec_id: None
        self._logs: dict[str, OutputLog] = {}
        self._running: dict[str, OutputLog] = {}
        self._retired: deque[OutputLog] = deque()
        self._is_closed = False
        self.is_recovering = False
        """From `expect_recovery` to `recovered_all`: not all runs in the files are known, so nothing is written."""
        self._changed: dict[str, None] = {}
        self._gone: list[str] = []
        self._refused: list[str] = []
        self._writing = trio.Lock()

    def when_gone(self, call: Callable[[str], None]) -> None:
        """Have `call` told the id of each ended run whose log is dropped, but not at `close`."""
        self._on_gone = call

    def describe_with(self, describe: Describe) -> None:
        """Call `describe` for the facts and the state of a run when the run's record is written."""
        self._describe = describe

    @property
    def bytes_used(self) -> int:
        """The cost of all logs, in memory or on disk, and of the records of ended runs."""
        return self.account.used_bytes

    # Runs

    def open(self, exec_id: str) -> OutputLog:
        """Begin the log of a run whose id no other log here has."""
        assert exec_id not in self._logs
        log = OutputLog(exec_id, self._ledger, self.account)
        if self._is_closed:
            log.drop()
            return log
        self._logs[exec_id] = self._running[exec_id] = log
        return log

    def get(self, exec_id: str) -> OutputLog | None:
        return self._logs.get(exec_id)

    def note_changed(self, exec_id: str) -> None:
        """The facts or the state of a run have changed: the next `write` writes both."""
        self._changed[exec_id] = None

    def retire(self, exec_id: str, *, text_bytes: int = 0) -> None:
        """The run has ended: close its log, and keep the log until its time is over or its room is needed.

        `text_bytes`: memory of its record beside `RECORD_BYTES`.
        """
        log = self._running.pop(exec_id, None)
        if log is None:
            return
        if not log.is_closed:
            log.close()
        log.kept.settle()
        log.record_bytes = RECORD_BYTES + text_bytes
        self.account.used_bytes += log.record_bytes
        self._retired.append(log)
        self._shelf.put(log, self)
        self._make_room()

    def discard(self, exec_id: str) -> None:
        """The run never began: forget its log, as if the id had not been used. Nobody is told."""
        log = self._running.pop(exec_id, None)
        if log is not None:
            del self._logs[exec_id]
            log.drop()
            self._changed.pop(exec_id, None)
            self._refused.append(exec_id)

    def note_gone(self, exec_id: str) -> None:
        """Remember the id of a run that is not kept any more."""
        if not is_made(exec_id):
            self.used.add(exec_id)
        self._changed.pop(exec_id, None)
        self._gone.append(exec_id)

    def drop_oldest(self) -> None:
        """Drop the log of the run that ended first."""
        log = self._retired.popleft()
        self._shelf.remove(log)
        self.account.used_bytes -= log.record_bytes
        log.drop()
        if not self._is_closed:
            del self._logs[log.exec_id]
            self.note_gone(log.exec_id)
            self._on_gone(log.exec_id)

    def drop_some(self) -> bool:
        """Drop some logs of a session that was closed; True when there are more."""
        for _ in range(min(len(self._retired), _DROPS_AT_ONCE)):
            self.drop_oldest()
        return bool(self._retired)

    def close(self) -> None:
        """Nobody finds the logs any more, and nothing more is written. Very many are dropped bit by bit, later.

        The files stay for the next daemon; `destroy` removes them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.files.keep()
        for log in self._running.values():
            log.drop()
        self._logs.clear()
        self._running.clear()
        self._store.forget(self)
        if self.drop_some():
            self._shelf.closed.append(self)
            self._ledger.work.set()

    # Files

    def expect_recovery(self) -> None:
        """Write nothing until `recovered_all`: a statement would drop the runs that have no log yet."""
        self.is_recovering = True

    async def read(self) -> Written:
        """Return what earlier daemons wrote down, and know the used ids again. Nothing is written until
        `recovered_all`."""
        self.expect_recovery()
        written = await self._store.in_reader(self.files.read)
        self.used = written.used
        return written

    def recovered_all(self) -> None:
        """All runs that `read` returned and that are still to be kept have their logs: writes are on again."""
        self.is_recovering = False
        self.files.note_counted()

    async def write(self, exec_ids: Iterable[str] | None = ()) -> bool:
        """Write all records that are due, and the output of some runs, or of all, that lies in memory alone. Return
        whether more is left: about `_WRITE_BYTES` of output are written at a time.

        Raises:
            OSError: the disk is full or broken, the output would pass the disk limit, the session was closed, or not
                all runs in its files are recovered yet.
        """
        async with self._writing:
            chosen: list[tuple[KeptOutput, Block, Tail]] = []
            room_bytes = _WRITE_BYTES
            for exec_id in self._logs if exec_ids is None else exec_ids:
                log = self._logs.get(exec_id)
                if log is not None and room_bytes > 0:
                    found = log.kept.unwritten(room_bytes)
                    chosen += [(log.kept, *each) for each in found]
                    room_bytes -= sum(block.packed_bytes - block.written_bytes for block, _ in found)
            await self._write(chosen)
            return room_bytes <= 0

    def write_soon(self, turn: Turn) -> None:
        """Have `turn` called at the next round. Does not wait."""
        self._store.write_soon(turn)

    def take_records(self, on_settled: Callable[[OSError | None], None]) -> Records | None:
        """Return all records that are due, for a round; the session's files are the round's until `settle`, which calls
        `on_settled`. None: nothing can be written now, or it takes longer to put together."""
        exec_ids = self._logs if self.files.needs_statement else self._changed
        if self._writing.locked() or not self._takes_writes or len(exec_ids) > _RUNS_PER_CHECKPOINT:
            return None
        runs = [found for exec_id in exec_ids if (found := self._describe(exec_id)) is not None]
        due = self._take_due()
        news = self._news(due, runs)
        self._writing.acquire_nowait()
        return Records(self.files, news, partial(self._settle, due, news, on_settled))

    def _settle(
        self, due: _Due, news: News, on_settled: Callable[[OSError | None], None], error: OSError | None
    ) -> None:
        self._writing.release()
        if error is not None:
            self._put_back(due)
        elif news.statement is not None and self.files.has_old_records:
            self._ledger.note_unneeded(self.files)
        on_settled(error)

    async def write_out(self, batch: Batch) -> None:
        """Have blocks leave memory, the oldest of each log; those that lie in memory alone are written before.

        Raises:
            OSError: as `write`.
        """
        async with self._writing:
            chosen = []
            for kept, blocks in batch:
                chosen += [(kept, *each) for each in kept.unwritten(among=blocks)]
            if chosen:
                await self._write(chosen)
            for kept, _ in batch:
                kept.leave_memory()

    async def destroy(self) -> None:
        """The session has ended: remove its files, now and for good. Output that a reader is close behind stays."""
        self.close()
        await self._store.discard(self.files)

    async def _write(self, chosen: Chosen) -> None:
        size_bytes = _size(chosen)
        has_room = not chosen or await self._make_disk_room(size_bytes)
        if has_room:
            chosen = [(kept, block, tail) for kept, block, tail in chosen if not block.is_dropped]
        await self._append(chosen if has_room else ())
        if not has_room:
            raise OSError(errno.EDQUOT, "the limit of output on disk is reached")
        await self._bound_files()

    async def _append(self, chosen: Chosen) -> None:
        """Write all records that are due and the chosen output; a write that fails is made up for by the next one."""
        if not self._takes_writes:
            raise OSError(errno.EAGAIN, "the session's output is closed, or not taken over yet")
        has_statement = self.files.needs_statement
        if not (chosen or self._changed or self._gone or self._refused or has_statement):
            return
        due = self._take_due()
        try:
            runs = await self._describe_all(list(self._logs if has_statement else due.changed))
            # Not before: a run that is dropped while the others are described is among the used ids instead.
            news = self._news(due, runs, [tail for _, _, tail in chosen])
            places = await self._store.in_thread(self.files.write, news)
        except BaseException:  # a thread that was left alone may still write, but not behind a later write
            self._put_back(due)
            raise
        for (kept, block, tail), place in zip(chosen, places, strict=False):
            kept.note_written(block, tail.span, place)
        if has_statement and self.files.has_old_records:
            self._ledger.note_unneeded(self.files)

    @property
    def _takes_writes(self) -> bool:
        return not (self._is_closed or self.is_recovering or self.files.is_discarded)

    def _take_due(self) -> _Due:
        due = _Due(self._changed, self._gone, self._refused)
        self._changed, self._gone, self._refused = {}, [], []
        return due

    def _put_back(self, due: _Due) -> None:
        self._changed = due.changed | self._changed
        self._gone = (due.gone + self._gone)[-_MOST_UNTOLD:]
        self._refused = (due.refused + self._refused)[-_MOST_UNTOLD:]

    def _news(self, due: _Due, runs: Sequence[tuple[RunFacts | bytes, RunState]], tails: Sequence[Tail] = ()) -> News:
        statement = self.used.encode() if self.files.needs_statement else None
        return News(due.refused, runs, tails, due.gone, statement, self.files.take_number())

    async def _describe_all(self, exec_ids: Sequence[str]) -> Sequence[tuple[RunFacts | bytes, RunState]]:
        found = []
        for number, exec_id in enumerate(exec_ids):
            if number % _RUNS_PER_CHECKPOINT == _RUNS_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
            if (described := self._describe(exec_id)) is not None:
                found.append(described)
        return found

    async def _make_disk_room(self, size_bytes: int) -> bool:
        """Make room for output under the disk limit: the session with most output in files gives up its oldest file,
        until the output fits. Return False when no file can be given up."""
        while self._store.output_bytes_on_disk + size_bytes > self._store.disk_limit_bytes:
            largest = self._store.largest_on_disk()
            if largest is None:
                return False
            if largest is self:
                if not await self._give_file():
                    return False
            elif largest._writing.locked():
                await trio.sleep(_LOCKED_S)  # to wait for its lock could be mutual
            else:
                async with largest._writing:
                    try:
                        is_free = await largest._give_file()
                    except OSError:
                        is_free = False
                if not is_free:
                    return False
        return True

    async def _give_file(self) -> bool:
        """Give up the oldest file with the output in it. False: no room came of that."""
        before_bytes = self._store.output_bytes_on_disk
        await self._store.remove_unneeded()
        if self._store.output_bytes_on_disk == before_bytes and (oldest := self.files.oldest_output) is not None:
            await self._drop_file(oldest)
        return self._store.output_bytes_on_disk < before_bytes

    async def _bound_files(self) -> None:
        """Give up the oldest files of output when all take much more than what is needed of them."""
        files = self.files
        while files.output_bytes > self.account.limit_bytes + 2 * files.out_file_bytes:
            oldest = files.oldest_output
            assert oldest is not None
            await self._drop_file(oldest)
            if files.oldest_output is oldest:
                return  # the session was closed

    async def _drop_file(self, file: DataFile) -> None:
        """Drop the output in the oldest file, and the file: no reader of a dropped log can keep that for ever."""
        for log in self._logs.values():
            log.kept.drop_file(file)
        await self._store.in_thread(self.files.give_up, file)

    # The limit of the session

    def _make_room(self) -> None:
        """Get back under the limit: ended runs go first, bit by bit, then the oldest part of the largest log.

        A running log keeps its fair part of half the budget, and whatever readers it waits for still need; then the
        session is over its limit by as much.
        """
        account = self.account
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

    def _shorten_oldest(self) -> None:
        """Take the oldest part of the log of the run that ended first; a short log goes as a whole."""
        oldest = self._retired[0]
        if oldest.can_shrink:
            oldest.kept.drop_oldest()
        else:
            self.drop_oldest()


class OutputStore:
    """The output of all sessions of a daemon. Call `open`, have `run` running in a task, then `close`."""

    def __init__(
        self,
        root: Path,
        *,
        memory_bytes: int = 64 * MIB,
        session_bytes: int = 64 * MIB,
        disk_bytes: int = 4096 * MIB,
        records_bytes: int = 256 * MIB,
        retention_s: float = 900.0,
    ) -> None:
        self._root = root
        self._session_bytes = session_bytes
        self._disk = OutputDiskUse()
        self._ledger = Ledger(memory_bytes)
        self._shelf = Shelf(self._ledger, retention_s, records_bytes)
        self._files: dict[str, SessionFiles] = {}
        self._sessions: dict[str, SessionOutput] = {}
        self._owners: dict[OutputAccount, SessionOutput] = {}
        self._turns: list[Turn] = []
        self._has_turns = trio.Event()
        self._writing = trio.CapacityLimiter(_WRITERS)
        self._recovering = trio.CapacityLimiter(_READERS)
        self.disk_limit_bytes = disk_bytes

    @classmethod
    def configured(cls, root: Path, runs: RunsSettings) -> OutputStore:
        """Return a store with the limits of the configuration."""
        return cls(
            root,
            memory_bytes=runs.spool_memory_mb * MIB,
            session_bytes=runs.keep_mb * MIB,
            disk_bytes=runs.spool_disk_mb * MIB,
            records_bytes=runs.records_memory_mb * MIB,
            retention_s=runs.keep_seconds,
        )

    @property
    def retention_s(self) -> float:
        """Time for which the output of an ended run is kept."""
        return self._shelf.retention_s

    @property
    def memory_bytes_used(self) -> int:
        return self._ledger.memory_bytes

    @property
    def disk_bytes_used(self) -> int:
        """The size of all files, those included that are about to be removed."""
        return self._disk.record_bytes + self._disk.output_bytes

    @property
    def output_bytes_on_disk(self) -> int:
        """The size of the files of output, which the disk limit bounds."""
        return self._disk.output_bytes

    @property
    def lost_bytes(self) -> int:
        """Bytes of output that the disk did not take or give back."""
        return self._ledger.lost_bytes

    def uses(self, name: str) -> bool:
        """Whether a file of that name is a session's that has files here."""
        return session_of(name) in self._files

    async def open(self, live: Collection[str] = ()) -> None:
        """Make the directory, and find what an earlier daemon left of the live sessions. Raises `OSError`."""
        await self.in_thread(find_files, self._root, live, self._files_of)
        self._ledger.is_closed = False

    def session(self, session_id: str) -> SessionOutput:
        """Return the output of a session; empty at first, and empty anew after its `close`."""
        output = self._sessions.get(session_id)
        if output is None:
            files = self._files_of(session_id)
            output = SessionOutput(self, self._ledger, self._shelf, files, self._session_bytes)
            self._sessions[session_id] = self._owners[output.account] = output
        return output

    async def run(self) -> NoReturn:
        """Drop logs whose time is over, remove files, and have blocks leave memory, whenever there is need; write the
        records of all sessions in rounds."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_rounds)
            await self._look_after()

    async def _look_after(self) -> NoReturn:
        ledger = self._ledger
        while True:
            ledger.work = trio.Event()
            await self._shelf.drop_expired()
            await self._shelf.drop_closed()
            await self.remove_unneeded()
            if ledger.memory_bytes > ledger.memory_limit_bytes:
                await self._free_memory()
            with trio.move_on_at(self._shelf.next_expiry):
                await ledger.work.wait()

    def write_soon(self, turn: Turn) -> None:
        """Have `turn` called at the next round. Does not wait."""
        self._turns.append(turn)
        self._has_turns.set()

    async def _write_rounds(self) -> NoReturn:
        while True:
            await self._has_turns.wait()
            await trio.sleep_until(ceil(trio.current_time() / ROUND_S) * ROUND_S)
            self._has_turns = trio.Event()
            turns, self._turns = self._turns, []
            for start in range(0, len(turns), _TURNS_AT_ONCE):
                await self._write_records(turns[start : start + _TURNS_AT_ONCE])

    async def _write_records(self, turns: Sequence[Turn]) -> None:
        records: list[Records] = []
        errors: Sequence[OSError | None] = ()
        try:
            described = 0
            for turn in turns:
                if (found := _of_one_session(turn)) is not None:
                    records.append(found)
                    described += len(found.news.runs)
                if described >= _RUNS_PER_CHECKPOINT:
                    described = 0
                    await trio.lowlevel.checkpoint()
            if records:
                errors = await self.in_thread(_write_each, records)
        finally:
            errors = errors or [OSError(errno.EAGAIN, "the daemon stops")] * len(records)
            for each, error in zip(records, errors, strict=True):
                _of_one_session(partial(each.settle, error))

    def close(self) -> None:
        """Free all writers and readers. The files stay for the next daemon."""
        self._ledger.is_closed = True
        for output in list(self._sessions.values()):
            output.close()

    async def discard(self, session: SessionFiles | str) -> None:
        """Remove the files of a session that has ended."""
        files = self._files_of(session) if isinstance(session, str) else session
        await self.in_thread(files.discard)
        self._forget_files(files)

    def largest_on_disk(self) -> SessionOutput | None:
        """Return the session with most output in files, of those that may be written to."""
        outputs = [each for each in self._sessions.values() if each.files.output_bytes and not each.is_recovering]
        return max(outputs, key=lambda output: output.files.output_bytes, default=None)

    def forget(self, output: SessionOutput) -> None:
        """The session's output was closed."""
        del self._owners[output.account], self._sessions[output.files.session_id]

    async def in_thread(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do something to files. A cancelled call leaves its thread alone."""
        return await trio.to_thread.run_sync(work, *args, limiter=self._writing, abandon_on_cancel=True)

    async def in_reader(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """As `in_thread`, for what an earlier daemon left."""
        return await trio.to_thread.run_sync(work, *args, limiter=self._recovering, abandon_on_cancel=True)

    async def remove_unneeded(self) -> None:
        """Remove the files of which nothing is needed any more."""
        while self._ledger.unneeded:
            files, _ = self._ledger.unneeded.popitem()
            await self.in_thread(files.remove_unneeded)
            self._forget_files(files)

    def _files_of(self, session_id: str) -> SessionFiles:
        files = self._files.get(session_id)
        if files is None:
            files = self._files[session_id] = SessionFiles(
                self._root, session_id, self._disk, limit_bytes=self._session_bytes
            )
        return files

    def _forget_files(self, files: SessionFiles) -> None:
        if files.is_discarded and files.is_empty and self._files.get(files.session_id) is files:
            del self._files[files.session_id]

    async def _free_memory(self) -> None:
        """Have blocks leave memory until three quarters of the limit are left."""
        ledger = self._ledger
        while ledger.memory_bytes > ledger.memory_low_bytes and (batch := self._choose()):
            owner = self._owners.get(batch[0][0].account)
            if owner is None:  # closed meanwhile, and not all of it is dropped yet
                await self._shelf.drop_closed()
                continue
            await self.remove_unneeded()
            try:
                await owner.write_out(batch)
            except OSError as error:
                # EAGAIN: the disk is not to blame, and nothing else would be written in place of these
                for kept, blocks in batch if error.errno == errno.EAGAIN else self._most_in_memory():
                    kept.lose(blocks)
                ledger.report(error)
        while ledger.memory_bytes > ledger.memory_low_bytes and ledger.lingering:
            kept = next(iter(ledger.lingering))
            kept.drop_through(kept.blocks[-1])

    def _choose(self) -> Batch:
        """Return what leaves memory next: the oldest of ended runs of one session; without any, of the largest running
        log."""
        ledger = self._ledger
        if not ledger.in_memory:
            largest = max(ledger.running, key=lambda kept: kept.memory_bytes, default=None)
            if largest is not None and largest.memory_bytes:
                excess_bytes = largest.memory_bytes - ledger.memory_low_bytes // len(ledger.running)
                wanted_bytes = min(max(excess_bytes, BLOCK_BYTES), _BATCH_BYTES)
                return [(largest, largest.oldest_in_memory(wanted_bytes))]
            return []
        account = next(iter(ledger.in_memory))
        ledger.in_memory.move_to_end(account)
        return _oldest_in_memory(account.in_memory)

    def _most_in_memory(self) -> Batch:
        """Return what is lost when the disk takes nothing: the oldest of the session with most output in memory."""
        ended = [kept for account in self._ledger.in_memory for kept in account.in_memory]
        used = defaultdict[OutputAccount, int](int)
        for kept in (*ended, *self._ledger.running):
            used[kept.account] += kept.memory_bytes
        largest = max(used, key=used.__getitem__, default=None)
        return _oldest_in_memory(kept for kept in (*ended, *self._ledger.running) if kept.account is largest)


def _size(chosen: Chosen) -> int:
    return sum(tail.size_bytes for _, _, tail in chosen)


def _oldest_in_memory(logs: Iterable[KeptOutput]) -> Batch:
    """Return the oldest blocks of some logs, the first of them first, about `_BATCH_BYTES`."""
    batch: list[tuple[KeptOutput, Sequence[Block]]] = []
    room_bytes = _BATCH_BYTES
    for kept in logs:
        if room_bytes <= 0:
            break
        blocks = kept.oldest_in_memory(room_bytes)
        batch.append((kept, blocks))
        room_bytes -= sum(block.cost_bytes for block in blocks)
    return batch


def _shrinkable_bytes(log: OutputLog) -> int:
    return log.kept.cost_bytes if log.can_shrink else 0
