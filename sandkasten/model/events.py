"""Values of the journal: the types of event, and one event."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs


class EventType(enum.StrEnum):
    """Types of event; a closed set."""

    SESSION_CREATED = "session.created"
    SESSION_PAUSED = "session.paused"
    SESSION_RESUMED = "session.resumed"
    SESSION_EXPIRING = "session.expiring"
    SESSION_EXPIRED = "session.expired"
    SESSION_DESTROYED = "session.destroyed"
    SESSION_CRASHED = "session.crashed"
    SESSION_LOST = "session.lost"
    EXEC_STARTED = "exec.started"
    EXEC_ENDED = "exec.ended"
    PROCESS_STARTED = "process.started"
    PROCESS_EXITED = "process.exited"
    TERMINAL_OPENED = "terminal.opened"
    TERMINAL_CLOSED = "terminal.closed"
    SHELL_OPENED = "shell.opened"
    SHELL_CLOSED = "shell.closed"
    PORT_OPENED = "port.opened"
    PORT_CLOSED = "port.closed"
    NETWORK_CHANGED = "network.changed"
    EGRESS_ASK = "egress.ask"
    EGRESS_DENIED = "egress.denied"
    EGRESS_LIMITED = "egress.limited"
    EGRESS_RESTARTED = "egress.restarted"
    PREVIEW_OPENED = "preview.opened"
    PREVIEW_CLOSED = "preview.closed"
    OOM = "oom"
    POOL_FAILING = "pool.failing"
    LEFTOVER_FOUND = "leftover.found"
    LEFTOVER_REMOVED = "leftover.removed"


@attrs.frozen
class Event:
    """One event of the journal. Cursors are opaque to clients and ordered; `data` holds JSON values."""

    cursor: str
    time: datetime
    type: EventType
    session_id: str
    data: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values
