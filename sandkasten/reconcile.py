"""What to do about each session after a restart; a pure planner over what the store says and what the kernel shows.

The kernel is the truth, the database a cache. Nothing is decided twice: every session id gets exactly one action.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs

from nsinit.protocol import Found
from sandkasten.lifecycle import Event
from sandkasten.model import EndReason, Status
from sandkasten.store.sessions import SessionRecord

HOST_REBOOT = "the machine was restarted"


class Action(enum.StrEnum):
    """What happens to one session id."""

    ADOPT = "adopt"
    """It runs as recorded: a session actor takes it over."""

    FINISH = "finish"
    """Its end was begun, or it can't go on: tear down what is left and write the final state."""

    REAP = "reap"
    """The store does not know it: report, then tear it down."""


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


def plan_reconciliation(
    records: Sequence[SessionRecord], found: Sequence[Found], *, boot_id: str
) -> Sequence[Decision]:
    """Return one decision for every id in `records` (live ones of the store) or `found` (nsinit's scan, this boot)."""
    seen: Mapping[str, Found] = {each.session_id: each for each in found}
    known = {record.session.id for record in records}
    decisions = [_decide(record, seen.get(record.session.id), boot_id) for record in records]
    decisions += [Decision(each.session_id, Action.REAP) for each in found if each.session_id not in known]
    return decisions


def _decide(record: SessionRecord, found: Found | None, boot_id: str) -> Decision:
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
            return finish(Event.NOT_FOUND, "its processes were gone when the daemon started")
        case _ if not _is_same(record, found):
            return finish(Event.NOT_FOUND, "another process runs under its id")
        case _:
            return Decision(session.id, Action.ADOPT, record)


def is_of_another_boot(record: SessionRecord, boot_id: str) -> bool:
    """Whether the machine was restarted since: whatever bears the recorded pid now is somebody else."""
    return record.identity is not None and record.identity.boot_id not in (None, boot_id)


def _is_same(record: SessionRecord, found: Found) -> bool:
    """Whether the process found is the one recorded: pid, start time and namespace."""
    recorded, actual = record.identity, found.identity
    if recorded is None or actual is None:
        return False
    return (recorded.pid, recorded.start_ticks, recorded.pid_ns) == (actual.pid, actual.start_ticks, actual.pid_ns)
