"""One page of the list of sessions, from what lives and what is recorded.

The directory is the truth about sessions that live, the database about those that ended; what the database refused to
take is in neither and is asked for, too. Ended ones are read only when they are wanted. Runs in the caller's task.
"""

from __future__ import annotations

from collections.abc import Iterable

from sandkasten.actors.core import Ref
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.model import Session
from sandkasten.model.lifecycle import ENDED, LIVE
from sandkasten.model.listing import SessionPage, SessionQuery, page_of
from sandkasten.store.listing import Recorded


async def find_sessions(query: SessionQuery, *, directory: SessionDirectory, store: Ref) -> SessionPage:
    """Return the sessions that are asked for, newest first."""
    if not query.statuses & ENDED:
        return page_of(query, (entry.session for entry in directory))
    recorded = await store.ask(store_actor.FindSessions(query))
    unwritten = [record.session for record in directory.unwritten.values()]
    return merge(query, recorded, [*unwritten, *(entry.session for entry in directory)])


def merge(query: SessionQuery, recorded: Recorded, known: Iterable[Session]) -> SessionPage:
    """Return a page of both; what is known is later than what is recorded, except of a session that just ended."""
    found = {record.session.id: record.session for record in recorded.records}
    for session in known:
        before = found.get(session.id)
        if before is None or before.status in LIVE:
            found[session.id] = session
    return page_of(query, found.values(), seen_to=recorded.seen_to)
