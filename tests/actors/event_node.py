"""Store and events as the tree runs them, on one database file, for one test."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import attrs
import trio

from sandkasten.actors.core import Ask, R, Ref
from sandkasten.actors.services.events import EventReader, Events, Flush, open_reader
from sandkasten.actors.services.store import Store
from sandkasten.journal.ring import Journal
from sandkasten.model import Event, EventType
from tests.waiting import PATIENCE_S

A, B = "a" * 24, "b" * 24


class CountedRef(Ref):
    """A `Ref` of the store that remembers which functions were sent."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[object] = []

    async def ask(self, message: Ask[R]) -> R:
        self.asked.append(getattr(message, "function", None))
        return await super().ask(message)


@attrs.frozen
class EventNode:
    """A journal, its actor and the store below, on one database file."""

    journal: Journal
    store: CountedRef
    events: Ref
    path: Path

    def emit(self, *numbers: int, session_id: str = A) -> None:
        for number in numbers:
            self.journal.emit(EventType.PORT_OPENED, session_id, port=number, address="::")

    async def flush(self) -> None:
        await self.events.ask(Flush())

    def reader(
        self, session_id: str | None = None, *, after: str | None = None
    ) -> AbstractAsyncContextManager[EventReader]:
        return open_reader(self.journal, self.store, session_id=session_id, after=after)

    def rows(self) -> int:
        """Count what a second connection finds in the file."""
        with closing(sqlite3.connect(self.path)) as database:
            return int(database.execute("SELECT COUNT(*) FROM events").fetchone()[0])

    def rename(self, old: str, new: str) -> None:
        """Take a table away, or bring it back: the database then refuses, or serves again."""
        with closing(sqlite3.connect(self.path)) as database:
            database.execute(f"ALTER TABLE {old} RENAME TO {new}")


@asynccontextmanager
async def running_node(path: Path, *, memory_events: int = 8192, kept: int = 100_000) -> AsyncIterator[EventNode]:
    """Run store and events as the tree does: started in this order, stopped in reverse."""
    journal, store = Journal(memory_events=memory_events), CountedRef("store")
    async with trio.open_nursery() as stores:
        await stores.start(Store(store, path).run)
        async with trio.open_nursery() as actors:
            events = await actors.start(Events(Ref("events"), journal, store=store, kept=kept).run)
            yield EventNode(journal, store, events, path)
            actors.cancel_scope.cancel()
        stores.cancel_scope.cancel()


async def take(reader: EventReader, count: int) -> list[Event]:
    """Return the next `count` events."""
    with trio.fail_after(PATIENCE_S):
        return [await anext(reader) for _ in range(count)]


def ports(events: Sequence[Event]) -> list[int]:
    return [event.data["port"] for event in events]
