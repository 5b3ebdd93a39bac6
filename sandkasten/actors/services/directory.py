"""Which sessions are alive, by id: their `Ref`s and their latest state, readable by all without asking.

The `sessions` actor adds and removes entries; an entry shows the session as its actor has it at that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.admission.quotas import KeyShares
from sandkasten.counters.metrics import Metrics
from sandkasten.crash import Crash
from sandkasten.journal.ring import Journal
from sandkasten.links.runner import RunnerLink
from sandkasten.model import Session, SessionOptions
from sandkasten.output.run_archive import RunArchive
from sandkasten.output.spool import Spool
from sandkasten.store.sessions import SessionRecord

MAX_SEEN = 256
"""Ended sessions of which it is remembered what was to be seen of them."""


@attrs.frozen
class Inspection:
    """A session's inside at one moment. `link` is None before and after its sandbox lives."""

    record: SessionRecord
    create_ms: Mapping[str, float]
    lease: Mapping[str, Any]
    runs: Mapping[str, Any]
    shells: Sequence[Mapping[str, Any]]
    controls: Mapping[str, int]
    link: RunnerLink | None


@attrs.frozen
class Entry:
    """One live session. `view` returns its state now, `inspect` what its actor can be seen doing, `running` how many
    runs it has; `ended` is set when it is live no more."""

    ref: Ref
    view: Callable[[], Session]
    options: SessionOptions
    inspect: Callable[[], Inspection | None]
    key_id: str | None = None
    running: Callable[[], int] = lambda: 0
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def session(self) -> Session:
        return self.view()


class SessionDirectory:
    """All live sessions of this node."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._seen: OrderedDict[str, Inspection] = OrderedDict()
        self.reserved: set[str] = set()
        """Ids that something works on without an entry: vessels, ends that are being finished."""
        self.unwritten: dict[str, SessionRecord] = {}
        """Final records that the database refused; the reaper writes them when it takes writes again."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def next_end(self) -> datetime | None:
        """Return when the next lease ends, if nothing renews it."""
        ends = (entry.session.expires_at for entry in self)
        return min((end for end in ends if end is not None), default=None)

    def owns(self, session_id: str) -> bool:
        """Whether something here answers for that id, so that nobody else may tear it down."""
        return session_id in self._entries or session_id in self.reserved

    def __contains__(self, session_id: object) -> bool:
        """Whether more is known of that id here than the database has: it is owned, or its end waits to be written."""
        return isinstance(session_id, str) and (self.owns(session_id) or session_id in self.unwritten)

    def get(self, session_id: str) -> Entry | None:
        return self._entries.get(session_id)

    def runs_of(self, key_id: str) -> int:
        """Return how much runs, or waits for its turn, in the sessions that an API key made."""
        return sum(entry.running() for entry in self._entries.values() if entry.key_id == key_id)

    def add(
        self,
        session_id: str,
        ref: Ref,
        view: Callable[[], Session],
        inspect: Callable[[], Inspection | None] = lambda: None,
        running: Callable[[], int] = lambda: 0,
    ) -> None:
        """`inspect` returns what its actor can be seen doing, `running` how many runs it has."""
        session = view()
        self._entries[session_id] = Entry(ref, view, session.options, inspect, session.key_id, running)

    def remove(self, session_id: str) -> None:
        if (entry := self._entries.pop(session_id, None)) is not None:
            entry.ended.set()
            if (inside := entry.inspect()) is not None:
                self._seen[session_id] = inside
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def seen(self, session_id: str) -> Inspection | None:
        """Return what was to be seen of a session at its end, of the latest ones that ended."""
        return self._seen.get(session_id)

    def clear(self) -> None:
        for session_id in list(self._entries):
            self.remove(session_id)
        self.reserved.clear()


@attrs.frozen(kw_only=True)
class Shared:
    """See the module's docstring. `shares`: the API keys besides the configured one, and what each has."""

    store: Ref
    zygote: Ref
    workspaces: Ref
    directory: SessionDirectory
    journal: Journal
    spool: Spool
    archive: RunArchive
    metrics: Metrics
    shares: KeyShares
    crash: Crash
