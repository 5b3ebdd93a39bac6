"""Values for tests: records made to order, and hypothesis strategies."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sandkasten.model import Limits, Session, Status
from sandkasten.store.sessions import SessionRecord

_SESSION_FIELDS = {
    *("labels", "workspace_id", "cwd", "reason", "end_reason", "ttl_s", "max_lifetime_s", "image", "created_at"),
}


def make_record(session_id: str, *, status: Status = Status.RUNNING, **fields: Any) -> SessionRecord:
    """Return a plausible record; `fields` go to the session or to the record, whichever has them."""
    now = datetime.now(UTC)
    session = Session(
        id=session_id,
        status=status,
        expires_at=now + timedelta(hours=1),
        last_activity=now,
        limits=Limits(),
        **{
            "image": "python",
            "cwd": "/workspace",
            "ttl_s": 1800.0,
            "created_at": now,
            **{name: fields.pop(name) for name in _SESSION_FIELDS & fields.keys()},
        },
    )
    return SessionRecord(session=session, incarnation=1, spec_digest="digest", **fields)
