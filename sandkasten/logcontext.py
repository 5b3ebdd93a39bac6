"""For whom the current task works and what it is about: what every log line and event of it can say.

Owns the two context variables; formats nothing. A task inherits them from the one that started it, and an actor takes
the origin over from each message, so that a request is known by its id wherever it is served.
"""

from __future__ import annotations

from contextvars import ContextVar

import attrs

from sandkasten.tracing import Trace


@attrs.frozen
class Origin:
    """The request behind some work, and who made it; all None for what the daemon does by itself.

    `key_id` names the API key and is not the key.
    """

    request_id: str | None = None
    trace: Trace | None = None
    key_id: str | None = None


NOBODY = Origin()

origin: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
session_id: ContextVar[str | None] = ContextVar("session_id", default=None)


def set_key(key_id: str | None) -> None:
    """The request at hand was made with this key."""
    origin.set(attrs.evolve(origin.get(), key_id=key_id))
