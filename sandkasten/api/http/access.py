"""Who may do what: the one decision before any handler, from what a route needs and what a key gives.

Every route says in its table what it needs; there is no default, so one that says nothing is no route. What a confined
key can't reach does not exist for it: 404, as for an id that nobody ever had. Reads no header (`auth.py`).
"""

from __future__ import annotations

import enum
from typing import assert_never

import attrs

from sandkasten.model import SESSION_ID
from sandkasten.model.errors import Forbidden, SessionNotFound
from sandkasten.model.keys import Access, ApiKey
from sandkasten.supervisor import Supervisor


class Reach(enum.Enum):
    """What a route touches, and so who sees to it that a confined key stays within its label.

    SESSION: the session in the path, which is looked at here. FILTERED: whatever the handler finds or makes, and the
    handler asks the key. NODE: everything there is; no confined key gets there. PUBLIC: nothing; no key is needed.
    """

    SESSION = enum.auto()
    FILTERED = enum.auto()
    NODE = enum.auto()
    PUBLIC = enum.auto()


@attrs.frozen
class Needs:
    """What a route needs of the key."""

    access: Access
    reach: Reach


LOOK = Needs(Access.READ, Reach.SESSION)
ACT = Needs(Access.WRITE, Reach.SESSION)
FIND = Needs(Access.READ, Reach.FILTERED)
MAKE = Needs(Access.WRITE, Reach.FILTERED)
SEE_NODE = Needs(Access.READ, Reach.NODE)
RULE_NODE = Needs(Access.ADMIN, Reach.NODE)
OPEN = Needs(Access.NONE, Reach.PUBLIC)


async def admit(key: ApiKey, needs: Needs, supervisor: Supervisor, *, session_id: str) -> None:
    """Let a request of that key pass, or raise.

    Raises:
        Forbidden: the key does not give what the route needs.
        SessionNotFound: there is no such session, or none that this key reaches.
    """
    if key.access < needs.access:
        raise Forbidden("this API key may not do that", needs=needs.access.name.lower(), has=key.access.name.lower())
    if key.label is None:
        return
    match needs.reach:
        case Reach.SESSION:
            await _require_session(key, supervisor, session_id)
        case Reach.NODE:
            raise Forbidden("this API key is confined to a label, and this is about the whole node", needs="no label")
        case Reach.FILTERED | Reach.PUBLIC:
            return
        case _:
            assert_never(needs.reach)


async def _require_session(key: ApiKey, supervisor: Supervisor, session_id: str) -> None:
    missing = SessionNotFound("no such session", session_id=session_id[:64])
    if not SESSION_ID.match(session_id):
        raise missing
    try:
        session = await supervisor.get(session_id)
    except SessionNotFound:
        raise missing from None
    if not key.reaches(session.labels):
        raise missing
