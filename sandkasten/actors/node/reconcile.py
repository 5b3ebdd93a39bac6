"""The planner of recovery: one pure function over the records, the kernel and the disk.

Used at a start and by every sweep. The kernel is the truth, the database a cache. Every session id gets exactly one
action. An id with an owner is left alone. An unknown id or leftover is told of when it is first seen, and removed when
it is seen again: between two looks a session may have begun or ended. At a start none can.

Removed are sandboxes and remains of unknown sessions (processes, cgroups, directories with their mounts, which are in a
namespace of their own), nsinit's leftovers (cgroups, directories, trash, loop devices) and files in `spool/`. Mounts
made by hand and cgroups in another part of the tree are told of, and stay. Network namespaces and interfaces are not
looked for: those of a sandbox have no name and live as long as its processes, and none is made outside of one.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence

import attrs

from nsinit.wire import protocol
from nsinit.wire.protocol import TOLD_ONLY, Found
from sandkasten.model import EndReason, Status
from sandkasten.model.lifecycle import Trigger
from sandkasten.output.disk import OutputFile
from sandkasten.store.sessions import SessionRecord

HOST_REBOOT = "the machine was restarted"


class SessionAction(enum.StrEnum):
    """The action for one session id."""

    LEAVE = "leave"
    """Leave the session to its owner in this daemon."""

    WATCH = "watch"
    """Look again at the next sweep: it has no owner."""

    ADOPT = "adopt"
    """Have a session actor take it over: its sandbox runs as recorded."""

    FINISH = "finish"
    """Tear down the remains and write the final state: its end was begun, or it can't go on."""

    CLEAN = "clean"
    """Tear the sandbox down: its session is not recorded as alive."""


@attrs.frozen
class Decision:
    """The action for a session id. `event` is the cause of a finish, `end_reason` its end reason unless that is the
    usual one of the event; `reason` is for people."""

    session_id: str
    action: SessionAction
    record: SessionRecord | None = None
    event: Trigger | None = None
    reason: str | None = None
    end_reason: EndReason | None = None


@attrs.frozen
class Leftover:
    """Something that belongs to no session: a leftover of nsinit's (with its kinds) or a `spool_file`."""

    kind: str
    name: str


SESSION = "session"
"""The kind of leftover that an unknown session id is."""

SPOOL_FILE = "spool_file"
"""A file in `spool/` that neither the output store uses nor a known session owns."""

MAX_OUTPUT_FILES = 1000
"""Bound of one look; the next looks find the rest."""

TRASH = "trash"
"""Trash is deleted without a decision, so only trash that stays is told of."""

Sightings = frozenset["str | Leftover"]
"""Session ids and leftovers that the last look found and left."""


@attrs.frozen
class Observed:
    """The findings of one look. `records`: sessions that the store has as alive. `found`, `leftovers`: findings on
    disk and in the kernel, of this boot. `owned`: ids with an owner. `seen`: sightings of the look before.
    `is_start`: no session can begin or end meanwhile. `output_files`: files in `spool/` that the output store does not
    use."""

    records: Sequence[SessionRecord]
    found: Sequence[Found]
    boot_id: str
    leftovers: Sequence[Leftover] = ()
    owned: Container[str] = frozenset()
    seen: Sightings = frozenset()
    is_start: bool = False
    output_files: Sequence[OutputFile] = ()


@attrs.frozen
class Reconciliation:
    """A decision for each session id. `news`: leftovers to tell of; `remove`: leftovers to remove; `seen`: sightings
    for the next look."""

    decisions: Sequence[Decision]
    remove: Sequence[Leftover]
    news: Sequence[Leftover]
    seen: Sightings

    def of(self, *actions: SessionAction) -> Sequence[Decision]:
        """Return the decisions for some actions."""
        return [each for each in self.decisions if each.action in actions]


def plan_reconciliation(observed: Observed) -> Reconciliation:
    """Decide about every id and every leftover of one look."""
    found: Mapping[str, Found] = {each.session_id: each for each in observed.found}
    records = {record.session.id: record for record in observed.records}
    decisions = [_decide(observed, record, found.get(session_id)) for session_id, record in records.items()]
    decisions += [_decide_unknown(observed, each) for session_id, each in found.items() if session_id not in records]
    watched = {each.session_id for each in decisions if each.action is SessionAction.WATCH}
    files = _unknown_files(observed, records)
    leftovers = dict.fromkeys((*observed.leftovers, *files))
    remove = [each for each in leftovers if _is_due(observed, each) and files.get(each) not in watched]
    told = [each for each in leftovers if each.kind != TRASH and each not in observed.seen]
    unknown = [Leftover(SESSION, name) for name in watched - set(observed.seen) if name not in records]
    unknown += [Leftover(SESSION, each.session_id) for each in decisions if each.action is SessionAction.CLEAN]
    news = [*told, *(each for each in unknown if each.name not in observed.seen)]
    return Reconciliation(decisions, remove, news, frozenset(watched | (leftovers.keys() - set(remove))))


def _unknown_files(observed: Observed, records: Container[str]) -> Mapping[Leftover, str | None]:
    """Return the files in `spool/` without a known session, each with the session that its name says."""
    unknown = [
        each
        for each in observed.output_files
        if each.session_id not in records and each.session_id not in observed.owned
    ]
    return {Leftover(SPOOL_FILE, each.name): each.session_id for each in unknown[:MAX_OUTPUT_FILES]}


def _is_due(observed: Observed, leftover: Leftover) -> bool:
    """Whether to remove it: when it was seen before, a file in `spool/` at a start as well."""
    if leftover.kind in TOLD_ONLY:
        return False
    return leftover in observed.seen or (observed.is_start and leftover.kind == SPOOL_FILE)


def as_leftovers(found: Sequence[protocol.Leftover]) -> Sequence[Leftover]:
    """Return nsinit's findings as leftovers of a reconciliation."""
    return [Leftover(each.kind, each.name) for each in found]


def _decide(observed: Observed, record: SessionRecord, found: Found | None) -> Decision:
    session = record.session
    if session.id in observed.owned:
        return Decision(session.id, SessionAction.LEAVE, record)
    is_due = observed.is_start or session.status is Status.DESTROYING or session.id in observed.seen
    return _judge(record, found, observed.boot_id) if is_due else Decision(session.id, SessionAction.WATCH, record)


def _decide_unknown(observed: Observed, found: Found) -> Decision:
    if found.session_id in observed.owned:
        return Decision(found.session_id, SessionAction.LEAVE)
    is_remains = observed.is_start and found.identity is None
    return Decision(
        found.session_id,
        SessionAction.CLEAN if is_remains or found.session_id in observed.seen else SessionAction.WATCH,
    )


def _judge(record: SessionRecord, found: Found | None, boot_id: str) -> Decision:
    """Decide about a session that has no actor."""
    session = record.session

    def finish(event: Trigger, reason: str | None, end_reason: EndReason | None = None) -> Decision:
        return Decision(session.id, SessionAction.FINISH, record, event, reason, end_reason)

    match session.status:
        case Status.CREATING:
            return finish(Trigger.BUILD_FAILED, "the daemon stopped while the session was being created")
        case Status.DESTROYING:
            return finish(record.ending or Trigger.DESTROY, session.reason)
        case _ if is_of_another_boot(record, boot_id):
            return finish(Trigger.NOT_FOUND, HOST_REBOOT, EndReason.HOST_REBOOT)
        case _ if found is None or found.identity is None:
            return finish(Trigger.NOT_FOUND, "its processes were gone when the daemon looked for them")
        case _ if not _is_same(record, found):
            return finish(Trigger.NOT_FOUND, "another process runs under its id")
        case _:
            return Decision(session.id, SessionAction.ADOPT, record)


def is_of_another_boot(record: SessionRecord, boot_id: str) -> bool:
    """Whether the machine was restarted since the record was written, so that its pid is another process's now."""
    return record.identity is not None and record.identity.boot_id != boot_id


def _is_same(record: SessionRecord, found: Found) -> bool:
    """Whether the process found is the one recorded: pid, start time and namespace."""
    recorded, actual = record.identity, found.identity
    if recorded is None or actual is None:
        return False
    return (recorded.pid, recorded.start_ticks, recorded.pid_ns) == (actual.pid, actual.start_ticks, actual.pid_ns)
