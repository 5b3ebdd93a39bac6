"""The URL table, for both halves of the front. Handlers live in the modules it names.

JSON routes return an `Answer` and run in Quart; raw routes answer by themselves and run in front of it, because Quart
cuts a streamed answer at 60 s, buffers uploads without bound and costs a command 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs

from sandkasten.api import exec as commands
from sandkasten.api import files, health, sessions
from sandkasten.api.errors import Answer
from sandkasten.api.exchange import Exchange
from sandkasten.api.upload import upload

JsonHandler = Callable[[Exchange], Awaitable[Answer]]
RawHandler = Callable[[Exchange], Awaitable[None]]

PUBLIC_PATHS = frozenset({"/healthz"})
SESSIONS = "/v1/sessions"


@attrs.frozen
class JsonRoute:
    method: str
    rule: str
    handler: JsonHandler


JSON_ROUTES = (
    JsonRoute("GET", "/healthz", health.healthz),
    JsonRoute("GET", "/readyz", health.readyz),
    JsonRoute("POST", SESSIONS, sessions.create),
    JsonRoute("GET", SESSIONS, sessions.list_sessions),
    JsonRoute("GET", f"{SESSIONS}/<session_id>", sessions.get),
    JsonRoute("PATCH", f"{SESSIONS}/<session_id>", sessions.update),
    JsonRoute("DELETE", f"{SESSIONS}/<session_id>", sessions.destroy),
    JsonRoute("GET", f"{SESSIONS}/<session_id>/stats", sessions.stats),
)

RAW_ROUTES: Mapping[str, Mapping[str, RawHandler]] = {
    "exec": {"POST": commands.run},
    "exec/stream": {"POST": commands.stream},
    "fs/read": {"GET": files.read, "HEAD": files.read},
    "fs/write": {"POST": files.write},
    "fs/upload": {"POST": upload},
}
"""What follows `/v1/sessions/{id}/`, and the handler per method."""


def split_session_path(path: str) -> tuple[str, str] | None:
    """Return the session id and what follows it, or None for a path that is not beneath a session."""
    if not path.startswith(f"{SESSIONS}/"):
        return None
    session_id, _, rest = path.removeprefix(f"{SESSIONS}/").partition("/")
    return session_id, rest
