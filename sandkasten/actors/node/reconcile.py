"""What to do about each session and about what is nobody's: a pure planner over disk, kernel and store.

Used at the start and every minute. The kernel is the truth, the database a cache. Every session id gets exactly one
action. What somebody works on is left alone; what nobody knows is removed when it was seen twice, and so is told of
before: between a look at one and a look at the other a session may have begun or ended. At the start nothing can.

What is swept: sandboxes and remains of unknown sessions (processes, cgroups, directories, and their mounts, which are
in a namespace of their own), nsinit's leftovers (cgroups, directories, trash, loop devices) and files of the spool.
Mounts made by hand and cgroups in another part of the tree are told of, and stay. Network namespaces and interfaces are
not looked for: those of a sandbox have no name and live as long as its processes do, and none is made outside of one.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence

import attrs

from nsinit.wire import protocol
from nsinit.wire.protocol import TOLD_ONLY, Found
from sandkasten.model import EndReason, Status
from sandkasten.model.lifecycle import Event
from sandkasten.output.spool_files import SpoolFile
from sandkasten.store.sessions import SessionRecord

HOST_REBOOT = "the machine was restarted"


class Action(enum.StrEnum):
    """What happens to one session id."""

    LEAVE = "leave"
    """Somebody here works on it."""

    WATCH = "watch"
    """Nobody does, for all that is known: look again."""

    ADOPT = "adopt"
    """It runs as recorded: a session actor takes it over."""

    FINISH = "finish"
    """Its end was begun, or it can't go on: tear down what is left and write the final state."""

    CLEAN = "clean"
    """The store does not know it as alive: tear it down."""


@attrs.frozen
class Decision:
    """`event` says why a session is finished, `end_reason` so where that is not the event's usual one; `reason` is for
    people."""

    session_id: str
    action: Action
    record: SessionRecord | None = None
    event: Event | None = None
    reason: str | None = None
    end_reason: EndReason | None = None


@attrs.frozen
class Leftover:
    """Something that is no session's: a leftover of nsinit's (its kinds) or a `spool_file`."""

    kind: str
    name: str


SESSION = "session"
"""The kind of leftover that an unknown session id is."""

SPOOL_FILE = "spool_file"
"""In the spool's directory, and neither of this daemon's spool nor of a session that is known."""

MAX_SPOOL_FILES = 1000
"""Of one look; when those are gone the next ones are found."""

TRASH = "trash"
"""It goes by itself: only what stays is worth telling."""

Sightings = frozenset["str | Leftover"]
"""Session ids and leftovers that the last look found and nothing was done about."""


@attrs.frozen
class Observed:
    """One look. `records`: those the store has as alive. `found`, `leftovers`: disk and kernel, of this boot. `owned`:
    ids that an actor answers for. `seen`: what the look before left. `is_start`: nothing can begin or end meanwhile.
    `spool`: files in the spool's directory that its owner does not use."""

    records: Sequence[SessionRecord]
    found: Sequence[Found]
    boot_id: str
    leftovers: Sequence[Leftover] = ()
    owned: Container[str] = frozenset()
    seen: Sightings = frozenset()
    is_start: bool = False
    spool: Sequence[SpoolFile] = ()


@attrs.frozen
class Plan:
    """`news`: what is told of now; `remove`: leftovers whose time has come; `seen`: for the next look."""

    decisions: Sequence[Decision]
    remove: Sequence[Leftover]
    news: Sequence[Leftover]
    seen: Sightings

    def of(self, *actions: Action) -> Sequence[Decision]:
        """Return the decisions for some actions."""
        return [each for each in self.decisions if each.action in actions]


def plan_reconciliation(observed: Observed) -> Plan:
    """Decide about every id and every leftover of one look."""
    found: Mapping[str, Found] = {each.session_id: each for each in observed.found}
    records = {record.session.id: record for record in observed.records}
    decisions = [_decide(observed, record, found.get(session_id)) for session_id, record in records.items()]
    decisions += [_decide_unknown(observed, each) for session_id, each in found.items() if session_id not in records]
    watched = {each.session_id for each in decisions if each.action is Action.WATCH}
    files = _unknown_files(observed, records)
    leftovers = dict.fromkeys((*observed.leftovers, *files))
    remove = [each for each in leftovers if _is_due(observed, each) and files.get(each) not in watched]
    told = [each for each in leftovers if each.kind != TRASH and each not in observed.seen]
    unknown = [Leftover(SESSION, name) for name in watched - set(observed.seen) if name not in records]
    unknown += [Leftover(SESSION, each.session_id) for each in decisions if each.action is Action.CLEAN]
    news = [*told, *(each for each in unknown if each.name not in observed.seen)]
    return Plan(decisions, remove, news, frozenset(watched | (leftovers.keys() - set(remove))))


def _unknown_files(observed: Observed, records: Container[str]) -> Mapping[Leftover, str | None]:
    """Return the files of the spool that are nobody's, each with the session it says it is of."""
    unknown = [
        each for each in observed.spool if each.session_id not in records and each.session_id not in observed.owned
    ]
    return {Leftover(SPOOL_FILE, each.name): each.session_id for each in unknown[:MAX_SPOOL_FILES]}


def _is_due(observed: Observed, leftover: Leftover) -> bool:
    """At the start a file that is nobody's stays nobody's; all else is looked at twice."""
    if leftover.kind in TOLD_ONLY:
        return False
    return leftover in observed.seen or (observed.is_start and leftover.kind == SPOOL_FILE)


def as_leftovers(found: Sequence[protocol.Leftover]) -> Sequence[Leftover]:
    """Return what nsinit found as what is planned with."""
    return [Leftover(each.kind, each.name) for each in found]


def _decide(observed: Observed, record: SessionRecord, found: Found | None) -> Decision:
    session = record.session
    if session.id in observed.owned:
        return Decision(session.id, Action.LEAVE, record)
    is_due = observed.is_start or session.status is Status.DESTROYING or session.id in observed.seen
    return _judge(record, found, observed.boot_id) if is_due else Decision(session.id, Action.WATCH, record)


def _decide_unknown(observed: Observed, found: Found) -> Decision:
    if found.session_id in observed.owned:
        return Decision(found.session_id, Action.LEAVE)
    is_remains = observed.is_start and found.identity is None
    return Decision(found.session_id, Action.CLEAN if is_remains or found.session_id in observed.seen else Action.WATCH)


def _judge(record: SessionRecord, found: Found | None, boot_id: str) -> Decision:
    """Say what becomes of a session that has no actor."""
    session = record.session

    def finish(event: Event, reason: str | None, end_reason: EndReason | None = None) -> Decision:
        return Decision(session.id, Action.FINISH, record, event, reason, end_reason)

    match session.status:
        case Status.CREATING:
            return finish(Event.BUILD_FAILED, "the daemon stopped while the session was being created")
        case Status.DESTROYING:
            return finish(record.ending or Event.DESTROY, session.reason)
        case _ if is_of_another_boot(record, boot_id):
            return finish(Event.NOT_FOUND, HOST_REBOOT, EndReason.HOST_REBOOT)
        case _ if found is None or found.identity is None:
            return finish(Event.NOT_FOUND, "its processes were gone when the daemon looked for them")
        case _ if not _is_same(record, found):
            return finish(Event.NOT_FOUND, "another process runs under its id")
        case _:
            return Decision(session.id, Action.ADOPT, record)


def is_of_another_boot(record: SessionRecord, boot_id: str) -> bool:
    """Whether the machine was restarted since: whatever bears the recorded pid now is somebody else."""
    return record.identity is not None and record.identity.boot_id != boot_id


def _is_same(record: SessionRecord, found: Found) -> bool:
    """Whether the process found is the one recorded: pid, start time and namespace."""
    recorded, actual = record.identity, found.identity
    if recorded is None or actual is None:
        return False
    return (recorded.pid, recorded.start_ticks, recorded.pid_ns) == (actual.pid, actual.start_ticks, actual.pid_ns)
