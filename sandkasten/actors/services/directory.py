"""The directory of live sessions, and the services that all parts of the tree share.

The sessions actor adds and removes entries; every other part reads. An entry shows a session as its actor has it at
that moment, so reading needs no message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
import trio

from sandkasten.actors.core import Ref, by_turns
from sandkasten.admission.quotas import KeyShares
from sandkasten.counters.metrics import Metrics
from sandkasten.crash import Crash
from sandkasten.images.registry.pulling import PullTurns
from sandkasten.journal.egress import EgressLogs
from sandkasten.journal.ring import Journal
from sandkasten.links.runner import RunnerLink
from sandkasten.model import Session, SessionOptions, Status
from sandkasten.output.store import OutputStore
from sandkasten.store.sessions import SessionRecord

MAX_SEEN = 256
"""Ended sessions whose last inspection is kept for diagnosis."""


@attrs.frozen
class Inspection:
    """The inside of a session at one moment. `link` is None before and after its sandbox lives."""

    record: SessionRecord
    create_ms: Mapping[str, float]
    lease: Mapping[str, Any]
    runs: Mapping[str, Any]
    shells: Sequence[Mapping[str, Any]]
    controls: Mapping[str, int]
    link: RunnerLink | None


@attrs.frozen
class Entry:
    """One live session. `view` returns its present state, `inspect` the inside of its actor, `running` the ids of
    its runs that have not ended. `ended` is set when the session has ended."""

    ref: Ref
    view: Callable[[], Session]
    options: SessionOptions
    inspect: Callable[[], Inspection | None]
    running: Callable[[], Collection[str]] = tuple
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def session(self) -> Session:
        return self.view()


class SessionDirectory:
    """The live sessions of the node, by id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.members: dict[str, Entry] = {}
        """Members of session pools: sessions that no client knows yet, and that no request of a client finds."""
        self._seen: OrderedDict[str, Inspection] = OrderedDict()
        self.reserved: set[str] = set()
        """Ids without an entry that are in use: pool sandboxes, file sandboxes, ends under way."""
        self.unwritten: dict[str, SessionRecord] = {}
        """Final records that the database refused. The reaper writes them later."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    async def sessions(self, is_wanted: Callable[[Session], bool] = lambda _session: True) -> list[Session]:
        """Return the sessions there are now, each as it is when its turn comes; other tasks go on meanwhile."""

        def look(entry: Entry) -> Session | None:
            return session if is_wanted(session := entry.session) else None

        return [session for session in await by_turns(look, self) if session is not None]

    def ids(self) -> list[str]:
        """Return the ids of all sessions, which takes less than their states."""
        return list(self._entries)

    def next_end(self) -> datetime | None:
        """Return the moment when the next lease ends unless it is renewed."""
        ends = (entry.session.expires_at for entry in self)
        return min((end for end in ends if end is not None), default=None)

    def owns(self, session_id: str) -> bool:
        """Whether the daemon is responsible for that id, so that no one else may tear it down."""
        return session_id in self._entries or session_id in self.members or session_id in self.reserved

    def __contains__(self, session_id: object) -> bool:
        """Whether the directory knows more of that id than the database: it is owned, or its end waits to be
        written."""
        return isinstance(session_id, str) and (self.owns(session_id) or session_id in self.unwritten)

    def known(self) -> frozenset[str]:
        """Return the ids that it contains."""
        return frozenset((*self._entries, *self.members, *self.reserved, *self.unwritten))

    def get(self, session_id: str) -> Entry | None:
        return self._entries.get(session_id)

    def runs_of(self, session_ids: Iterable[Hashable]) -> int:
        """Return the number of runs, queued ones included, in those of the sessions that it has."""
        found = (self._entries.get(each) for each in session_ids if isinstance(each, str))
        return sum(len(entry.running()) for entry in found if entry is not None)

    def add(
        self,
        session_id: str,
        ref: Ref,
        view: Callable[[], Session],
        inspect: Callable[[], Inspection | None] = lambda: None,
        running: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Add a session that lives from here on; see `Entry`."""
        session = view()
        entries = self.members if session.status is Status.POOL_IDLE else self._entries
        entries[session_id] = Entry(ref, view, session.options, inspect, running)

    def show_member(self, session_id: str) -> None:
        """Make a claimed member of a pool a session that clients find."""
        entry = self.members.pop(session_id)
        self._entries[session_id] = attrs.evolve(entry, options=entry.session.options)

    def remove(self, session_id: str) -> None:
        if (member := self.members.pop(session_id, None)) is not None:
            member.ended.set()
        if (entry := self._entries.pop(session_id, None)) is not None:
            entry.ended.set()
            if (inside := entry.inspect()) is not None:
                self._seen[session_id] = inside
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def seen(self, session_id: str) -> Inspection | None:
        """Return the last inspection of a session that ended; None if too many have ended since."""
        return self._seen.get(session_id)

    def clear(self) -> None:
        for session_id in [*self._entries, *self.members]:
            self.remove(session_id)
        self.reserved.clear()


@attrs.frozen(kw_only=True)
class Shared:
    """References and stores that parts of the tree need, made once and kept over the restart of any actor. `shares`
    holds the API keys besides the configured one and the sessions and runs of each."""

    store: Ref
    nsinit: Ref
    egress: Ref
    broker: Ref
    previews: Ref
    workspaces: Ref
    directory: SessionDirectory
    journal: Journal
    egress_logs: EgressLogs
    output: OutputStore
    metrics: Metrics
    shares: KeyShares
    crash: Crash
    pulls: PullTurns = attrs.field(factory=PullTurns)
