"""The spool: what runs wrote, kept outside the sandboxes for later readers, in bounded memory and on bounded disk.

Owns the spool's directory and the one task that writes what memory has no room for, removes files and drops what is
too old. Output stays in memory as long as there is room, so a short run touches no file. A disk that fails or is full
costs old output, never a run.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from pathlib import Path
from typing import Final, NoReturn, TypeVar, TypeVarTuple

import trio

from sandkasten.config import MIB, Runs
from sandkasten.output.spool_blocks import Block, KeptOutput
from sandkasten.output.spool_ledger import BLOCK_BYTES, Ledger
from sandkasten.output.spool_log import WINDOW_BYTES, LogReader, OutputLog, ReaderMode
from sandkasten.output.spool_segment import (
    Segment,
    clear_directory,
    prepare_directory,
    remove_segments,
    segment_path,
    write_segment,
)
from sandkasten.output.spool_session import RunLogs, Shelf

__all__ = ["WINDOW_BYTES", "LogReader", "OutputLog", "ReaderMode", "RunLogs", "Spool"]

log = logging.getLogger(__name__)

_SEGMENT_BYTES: Final = MIB
"""About as much goes into one file."""

_CLOSE_S: Final = 5.0

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

Batch = Sequence[tuple[KeptOutput, Block]]


class Spool:
    """The logs of all sessions of a daemon. `open` it, have `run` running while it is in use, then `close` it."""

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
        self._ledger = Ledger(memory_bytes, disk_bytes)
        self._shelf = Shelf(self._ledger, retention_s, records_bytes)
        self._sessions: dict[str, RunLogs] = {}
        self._numbers = count(1)
        self._names: set[str] = set()
        self._writing = trio.CapacityLimiter(1)

    @classmethod
    def configured(cls, root: Path, runs: Runs) -> Spool:
        """Return one with the limits of the configuration."""
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
        """How long the output of an ended run is kept."""
        return self._shelf.retention_s

    @property
    def memory_bytes_used(self) -> int:
        return self._ledger.memory_bytes

    @property
    def disk_bytes_used(self) -> int:
        """What the files take, those included that are about to be removed."""
        return self._ledger.disk_bytes

    @property
    def lost_bytes(self) -> int:
        """How much output the disk did not take or give back."""
        return self._ledger.lost_bytes

    def uses(self, name: str) -> bool:
        """Whether there is output of this spool in a file of that name, or is about to be."""
        return name in self._names

    async def open(self) -> None:
        """Make the directory and remove what an earlier daemon left in it. Raises `OSError`."""
        if left := await self._in_thread(prepare_directory, self._root):
            log.info("spool_cleared", extra={"files": left})  # a daemon that was killed had output on disk
        self._ledger.is_closed = False

    def session(self, session_id: str) -> RunLogs:
        """Return the logs of a session; they begin empty, and anew after their `close`."""
        logs = self._sessions.get(session_id)
        if logs is None:
            logs = self._sessions[session_id] = RunLogs(
                self._ledger,
                self._shelf,
                limit_bytes=self._session_bytes,
                on_closed=lambda: self._forget(session_id),
            )
        return logs

    async def run(self) -> NoReturn:
        """Write, remove and drop what has to be, whenever it has to."""
        ledger = self._ledger
        while True:
            ledger.work = trio.Event()
            self._drop_expired()
            await self._shelf.drop_closed()
            await self._remove_doomed()
            if ledger.memory_bytes > ledger.memory_limit_bytes:
                await self._write_down_to_low()
            with trio.move_on_at(self._next_expiry()):
                await ledger.work.wait()

    async def close(self) -> None:
        """Drop everything and remove the files. Takes a few seconds at most."""
        self._ledger.is_closed = True
        for logs in list(self._sessions.values()):
            logs.close()
        with trio.move_on_after(_CLOSE_S, shield=True):
            try:
                await self._in_thread(clear_directory, self._root)
            except OSError as error:
                self._ledger.report(error)

    def _forget(self, session_id: str) -> None:
        del self._sessions[session_id]

    async def _in_thread(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do something to the files. One thing at a time: what a cancelled call began is over before the next one."""
        return await trio.to_thread.run_sync(work, *args, limiter=self._writing, abandon_on_cancel=True)

    def _next_expiry(self) -> float:
        expiry = self._shelf.next_expiry
        return inf if expiry is None else expiry

    def _drop_expired(self) -> None:
        now = trio.current_time()
        while self._next_expiry() <= now:
            self._shelf.drop_oldest()

    async def _remove_doomed(self) -> None:
        ledger = self._ledger
        while ledger.doomed:
            doomed, ledger.doomed = ledger.doomed, []
            ledger.disk_bytes -= await self._in_thread(remove_segments, doomed)
            self._names.difference_update(segment.path.name for segment in doomed)

    async def _write_down_to_low(self) -> None:
        ledger = self._ledger
        while ledger.memory_bytes > ledger.memory_low_bytes and (batch := self._choose()):
            await self._remove_doomed()
            if await self._has_disk_room(batch):
                await self._write(batch)
            else:
                self._lose(batch, OSError(errno.EDQUOT, "the spool's disk limit is reached"))

    def _choose(self) -> Batch:
        """Return what to write next: the oldest ended runs of one session; without any, of the largest running one."""
        ledger = self._ledger
        if ledger.unwritten:
            return self._choose_ended()
        largest = max(ledger.running, key=lambda kept: kept.memory_bytes)
        excess_bytes = largest.memory_bytes - ledger.memory_low_bytes // len(ledger.running)
        wanted_bytes = min(max(excess_bytes, BLOCK_BYTES), _SEGMENT_BYTES)
        return [(largest, block) for block in largest.seal_unwritten(wanted_bytes)]

    def _choose_ended(self) -> Batch:
        batch: list[tuple[KeptOutput, Block]] = []
        room = _SEGMENT_BYTES
        account = next(iter(self._ledger.unwritten))
        self._ledger.unwritten.move_to_end(account)
        for kept in account.unwritten:
            if room <= 0:
                break
            blocks = kept.seal_unwritten(room)
            batch += [(kept, block) for block in blocks]
            room -= sum(block.cost_bytes for block in blocks)
        return batch

    async def _has_disk_room(self, batch: Batch) -> bool:
        """Make room under the disk limit: the session that takes most gives its oldest ended run, unless that is the
        one which wants to write, and has none."""
        ledger = self._ledger
        size_bytes = sum(block.cost_bytes for _, block in batch)
        writer_bytes = max(kept.account.used_bytes for kept, _ in batch)
        while ledger.disk_bytes + size_bytes > ledger.disk_limit_bytes:
            if not self._shelf.drop_of_largest(at_least_bytes=writer_bytes):
                return False
            await self._remove_doomed()
        return True

    async def _write(self, batch: Batch) -> None:
        """Write blocks to a new file. Those that were dropped meanwhile leave a hole, until the others go too."""
        batch = [(kept, block) for kept, block in batch if not block.is_dropped]
        if not batch:
            return
        path = segment_path(self._root, next(self._numbers))
        contents = [block.packed or block.pieces or () for _, block in batch]
        self._names.add(path.name)
        try:
            lengths = await self._in_thread(write_segment, path, contents)
        except OSError as error:
            self._names.discard(path.name)
            self._lose(batch, error)
            return
        except BaseException:
            self._names.discard(path.name)  # nobody will read it: a thread that was left alone may still write it
            raise
        ledger = self._ledger
        segment = Segment(path, sum(lengths), len(batch))
        ledger.disk_bytes += segment.size_bytes
        position = 0
        for (kept, block), length in zip(batch, lengths, strict=True):
            if block.is_dropped:
                ledger.release(segment)
            else:
                kept.move_to_disk(block, segment, position, length)
            position += length

    def _lose(self, batch: Batch, error: OSError) -> None:
        self._ledger.report(error)
        for kept, block in batch:
            if not block.is_dropped:
                kept.lose_through(block)
