"""Which sessions are alive, by id: their `Ref`s and their latest state, readable by all without asking.

The `sessions` actor adds and removes entries, each session actor publishes its own state; nobody else writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from sandkasten.actors.actor import Ref
from sandkasten.model import Session


@attrs.define
class Entry:
    """One live session."""

    ref: Ref
    session: Session


class SessionDirectory:
    """All live sessions of this node."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.reserved: set[str] = set()
        """Ids for which nsinit keeps a blank vessel ready."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def owns(self, session_id: str) -> bool:
        """Whether something here answers for that id, so that nobody else may tear it down."""
        return session_id in self._entries or session_id in self.reserved

    def get(self, session_id: str) -> Entry | None:
        return self._entries.get(session_id)

    def add(self, ref: Ref, session: Session) -> None:
        self._entries[session.id] = Entry(ref, session)

    def publish(self, session: Session) -> None:
        """Replace the state of a session that is listed."""
        entry = self._entries.get(session.id)
        if entry is not None:
            entry.session = session

    def remove(self, session_id: str) -> None:
        self._entries.pop(session_id, None)

    def clear(self) -> None:
        self._entries.clear()
        self.reserved.clear()
