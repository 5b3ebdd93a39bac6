"""Diagnosis: everything known of one session, living, hung or ended, whichever part of the daemon does not answer.

Each part has a deadline of its own and fails alone, with the reason in its place. A diagnosis does not go through the
session's mailbox, wakes no paused session and does not count as activity. Commands, their output and environments are
never shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
import trio

from nsinit.wire.protocol import AskDisk
from runner.wire import protocol as runner_protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.driver import ask_runner
from sandkasten.actors.services.directory import Entry, Inspection, Shared
from sandkasten.actors.services.nsinit import Describe, call
from sandkasten.actors.services.store import do
from sandkasten.counters.cgroup import read_raw
from sandkasten.errors import SandkastenError, SessionNotFound, StoreFailed
from sandkasten.model import Event, Session, Status
from sandkasten.model.lifecycle import WHOLE
from sandkasten.model.node import Diagnosis, MissingPart, Part
from sandkasten.store.events import last_events
from sandkasten.store.sessions import SessionRecord, client_session, get_session

PART_S = 2.0
"""Time for each part; all parts are read at once."""

EVENTS = 50
_CONCURRENT = 4
"""Diagnoses at a time: each takes a connection to PID 1 of a sandbox."""

_ENDED = "the session has ended"


class Diagnosing:
    """The maker of diagnoses. Runs in the caller's task."""

    def __init__(self, shared: Shared) -> None:
        self._store, self._nsinit = shared.store, shared.nsinit
        self._directory, self._journal = shared.directory, shared.journal
        self._turns = trio.CapacityLimiter(_CONCURRENT)
        self._threads = trio.CapacityLimiter(_CONCURRENT)

    async def diagnose(self, session_id: str) -> Diagnosis:
        """Return the diagnosis of a session. Raises `SessionNotFound` for one that is neither live nor recorded, and
        the store's error for one that is not live."""
        async with self._turns:
            entry = self._directory.get(session_id)
            inside = self._directory.seen(session_id) if entry is None else entry.inspect()
            record = inside.record if entry is not None and inside is not None else await self._recorded(session_id)
            works: dict[str, Callable[[], Awaitable[Part]]] = {
                "record": lambda: self._record(record, is_live=entry is not None),
                "events": lambda: self._events(session_id),
                "cgroup": lambda: self._cgroup(session_id),
                "disk": lambda: self._disk(record.session),
                "runner": lambda: self._runner(record.session, inside, is_live=entry is not None),
            }
            parts = _seen(inside, entry)
            async with trio.open_nursery() as nursery:
                for name, work in works.items():
                    nursery.start_soon(_have, parts, name, work)
            return Diagnosis(datetime.now(UTC), record.session, dict(sorted(parts.items())))

    async def _recorded(self, session_id: str) -> SessionRecord:
        if (kept := self._directory.unwritten.get(session_id)) is not None:
            return kept
        with trio.move_on_after(PART_S):
            record = await self._store.ask(do(client_session, session_id))
            if record is None:
                raise SessionNotFound("no such session", session_id=session_id)
            return record
        raise StoreFailed("the database does not answer")

    async def _record(self, record: SessionRecord, *, is_live: bool) -> Part:
        written = await self._store.ask(do(get_session, record.session.id))
        return {
            "incarnation": record.incarnation,
            "init": None if record.identity is None else attrs.asdict(record.identity),
            "ending": None if record.ending is None else record.ending.value,
            "ended_at": record.ended_at,
            "is_live": is_live,
            "is_reserved": record.session.id in self._directory.reserved,
            "is_unwritten": record.session.id in self._directory.unwritten,
            "written_status": None if written is None else written.session.status.value,
        }

    async def _events(self, session_id: str) -> Part:
        known = {event.cursor: event for event in self._journal.recent(session_id, limit=EVENTS)}
        try:
            stored = await self._store.ask(do(last_events, session_id=session_id, limit=EVENTS))
        except SandkastenError:  # memory has the newest, and they matter most
            stored = ()
        known |= {event.cursor: event for event in stored}
        return {"newest": [_event(known[cursor]) for cursor in sorted(known)[-EVENTS:]]}

    async def _cgroup(self, session_id: str) -> Part:
        dirs = (await self._nsinit.ask(Describe())).cgroup_dirs
        found = await trio.to_thread.run_sync(read_raw, dirs, session_id, limiter=self._threads, abandon_on_cancel=True)
        return found or MissingPart("there is no cgroup of this session")

    async def _disk(self, session: Session) -> Part:
        mode = (await self._nsinit.ask(Describe())).disk
        if session.status not in WHOLE:
            return {"mode": mode}
        use = await self._nsinit.ask(call(AskDisk, session.id))
        return {"mode": mode, **{field.name: getattr(use, field.name) for field in _fields(use)}}

    async def _runner(self, session: Session, inside: Inspection | None, *, is_live: bool) -> Part:
        link = inside.link if inside is not None and is_live else None
        if inside is None or link is None:
            return MissingPart(_ENDED if session.status not in WHOLE else "it is not connected")
        facts = {**link.connections, **inside.controls}
        if session.status is Status.PAUSED:
            return facts | {"answers": None}
        began = trio.current_time()
        hello = await ask_runner(link, runner_protocol.Hello(), runner_protocol.HelloReply)
        took_ms = round((trio.current_time() - began) * 1000, 3)
        return facts | {"answers": True, "took_ms": took_ms, "protocol": hello.version}


def _seen(inside: Inspection | None, entry: Entry | None) -> dict[str, Part]:
    """Return the parts that need no waiting."""
    if inside is None:
        gone = MissingPart("the daemon that served it is gone, or too many sessions have ended since")
        return dict.fromkeys(("actor", "create", "lease", "runs", "shells"), gone)
    is_over = entry is None
    return {
        "actor": MissingPart(_ENDED) if entry is None else _actor(entry.ref),
        "create": {"phases_ms": inside.create_ms} if inside.create_ms else MissingPart("an earlier daemon made it"),
        "lease": MissingPart(_ENDED) if is_over else inside.lease,
        "runs": inside.runs,
        "shells": {"open": [] if is_over else inside.shells},
    }


def _actor(ref: Ref) -> Mapping[str, Any]:
    return {"is_alive": ref.is_alive, "messages_waiting": ref.waiting}


async def _have(parts: dict[str, Part], name: str, work: Callable[[], Awaitable[Part]]) -> None:
    parts[name] = MissingPart(f"no answer within {PART_S:g} s")
    with trio.move_on_after(PART_S):
        try:
            parts[name] = await work()
        except SandkastenError as error:
            parts[name] = MissingPart(str(error))


def _event(event: Event) -> Mapping[str, Any]:
    return {"time": event.time, "type": event.type.value, "cursor": event.cursor, "data": event.data}


def _fields(value: object) -> Sequence[Any]:
    """Return the fields of an answer of nsinit, without `seq`."""
    return [field for field in dataclasses.fields(value) if field.name != "seq"]  # type: ignore[arg-type]
