"""The URL table, for both halves of the front. Handlers live in the modules it names.

JSON routes return an `Answer` and run in Quart; raw routes answer by themselves and run in front of it, because Quart
cuts a streamed answer at 60 s, buffers uploads without bound and costs a command 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs

from sandkasten.api import events, execs, files, health, processes, sessions, shells, system
from sandkasten.api import exec as commands
from sandkasten.api.errors import Answer
from sandkasten.api.exchange import Exchange
from sandkasten.api.routing import RouteTable
from sandkasten.api.upload import upload

JsonHandler = Callable[[Exchange], Awaitable[Answer]]
RawHandler = Callable[[Exchange], Awaitable[None]]

PUBLIC_PATHS = frozenset({"/healthz"})
SESSIONS = "/v1/sessions"
_ABOVE_SESSIONS = ("v1", "sessions")


@attrs.frozen
class JsonRoute:
    method: str
    rule: str
    handler: JsonHandler


JSON_ROUTES = (
    JsonRoute("GET", "/healthz", health.healthz),
    JsonRoute("GET", "/readyz", health.readyz),
    JsonRoute("GET", "/v1/system", system.system),
    JsonRoute("GET", "/v1/node", system.node),
    JsonRoute("POST", SESSIONS, sessions.create),
    JsonRoute("GET", SESSIONS, sessions.list_sessions),
    JsonRoute("GET", f"{SESSIONS}/<session_id>", sessions.get),
    JsonRoute("PATCH", f"{SESSIONS}/<session_id>", sessions.update),
    JsonRoute("DELETE", f"{SESSIONS}/<session_id>", sessions.destroy),
    JsonRoute("GET", f"{SESSIONS}/<session_id>/stats", sessions.stats),
    JsonRoute("POST", f"{SESSIONS}/<session_id>/pause", sessions.pause),
    JsonRoute("POST", f"{SESSIONS}/<session_id>/resume", sessions.resume),
)


def _get(handler: RawHandler) -> Mapping[str, RawHandler]:
    return {"GET": handler, "HEAD": handler}


def _post(handler: RawHandler) -> Mapping[str, RawHandler]:
    return {"POST": handler}


RAW_ROUTES: RouteTable[Mapping[str, RawHandler]] = RouteTable(
    {
        "exec": _post(commands.run),
        "exec/stream": _post(commands.stream),
        "execs": _get(execs.list_runs),
        "execs/{exec_id}": _get(execs.get),
        "execs/{exec_id}/output": _get(execs.output),
        "execs/{exec_id}/stream": _get(execs.stream),
        "execs/{exec_id}/signal": _post(execs.send_signal),
        "execs/{exec_id}/cancel": _post(execs.cancel),
        "execs/{exec_id}/stdin": _post(execs.send_stdin),
        "execs/{exec_id}/resize": _post(execs.resize),
        "shells": {**_get(shells.list_shells), **_post(shells.open_shell)},
        "shells/{name}": {"DELETE": shells.close_shell},
        "processes": {**_get(processes.list_processes), **_post(processes.start)},
        "processes/{exec_id}": {**_get(processes.get), "DELETE": processes.kill},
        "processes/{exec_id}/logs": _get(processes.logs),
        "processes/{exec_id}/stdin": _post(processes.send_stdin),
        "processes/{exec_id}/signal": _post(processes.send_signal),
        "processes/{exec_id}/resize": _post(processes.resize),
        "processes/{exec_id}/kill": _post(processes.kill),
        "processes/{exec_id}/wait": _post(processes.wait),
        "ports": _get(processes.ports),
        "events": _get(events.stream),
        "fs/read": _get(files.read),
        "fs/write": _post(files.write),
        "fs/upload": _post(upload),
    }
)
"""What follows `/v1/sessions/{id}/`, and the handler per method."""

RAW_PATHS: Mapping[str, Mapping[str, RawHandler]] = {"/v1/events": _get(events.stream)}
"""Whole paths, and the handler per method."""


def split_session(segments: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """Return the session id and the segments behind it, or None for what is not beneath a session."""
    if len(segments) < 3 or segments[:2] != _ABOVE_SESSIONS:
        return None
    return segments[2], segments[3:]
