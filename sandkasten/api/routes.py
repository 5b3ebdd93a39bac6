"""The URL table, for both halves of the front. Handlers live in the modules it names.

JSON routes return an `Answer` and run in Quart; raw routes answer by themselves and run in front of it, because Quart
cuts a streamed answer at 60 s, buffers uploads without bound and costs a command 0.2 ms. Each route says what it needs
of the caller's key (`access.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs

from sandkasten.api import openapi
from sandkasten.api.http.auth import ACT, FIND, LOOK, MAKE, OPEN, RULE_NODE, SEE_NODE, Needs
from sandkasten.api.http.errors import Answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.routing import RouteTable
from sandkasten.api.resources import events, execs, files, keys, node, processes, sessions, workspaces
from sandkasten.api.resources import node as health
from sandkasten.api.resources import node as metrics
from sandkasten.api.resources import processes as shells
from sandkasten.api.resources import runs as commands
from sandkasten.api.resources import workspaces as archives
from sandkasten.api.resources.files import upload

JsonHandler = Callable[[Exchange], Awaitable[Answer]]
RawHandler = Callable[[Exchange], Awaitable[None]]

PUBLIC_PATHS = frozenset({"/healthz"})
SESSIONS = "/v1/sessions"
WORKSPACES = "/v1/workspaces"
_ABOVE_SESSIONS, _ABOVE_WORKSPACES = ("v1", "sessions"), ("v1", "workspaces")


@attrs.frozen
class JsonRoute:
    method: str
    rule: str
    handler: JsonHandler
    needs: Needs

    @property
    def template(self) -> str:
        """The rule as documents and metrics have it."""
        return (
            self.rule.replace("<session_id>", "{id}")
            .replace("<workspace_id>", "{id}")
            .replace("<", "{")
            .replace(">", "}")
        )


@attrs.frozen
class RawRoute:
    handler: RawHandler
    needs: Needs


JSON_ROUTES = (
    JsonRoute("GET", "/healthz", health.healthz, OPEN),
    JsonRoute("GET", "/readyz", health.readyz, SEE_NODE),
    JsonRoute("GET", "/openapi.json", openapi.openapi, FIND),
    JsonRoute("GET", "/v1/system", node.system, SEE_NODE),
    JsonRoute("GET", "/v1/node", node.node, SEE_NODE),
    JsonRoute("POST", "/v1/node/drain", node.drain, RULE_NODE),
    JsonRoute("POST", "/v1/node/undrain", node.undrain, RULE_NODE),
    JsonRoute("GET", "/v1/keys", keys.list_keys, RULE_NODE),
    JsonRoute("POST", SESSIONS, sessions.create, MAKE),
    JsonRoute("GET", SESSIONS, sessions.list_sessions, FIND),
    JsonRoute("GET", f"{SESSIONS}/<session_id>", sessions.get, LOOK),
    JsonRoute("PATCH", f"{SESSIONS}/<session_id>", sessions.update, ACT),
    JsonRoute("DELETE", f"{SESSIONS}/<session_id>", sessions.destroy, ACT),
    JsonRoute("GET", f"{SESSIONS}/<session_id>/stats", sessions.stats, LOOK),
    JsonRoute("GET", f"{SESSIONS}/<session_id>/diagnostics", sessions.diagnostics, LOOK),
    JsonRoute("POST", f"{SESSIONS}/<session_id>/pause", sessions.pause, ACT),
    JsonRoute("POST", f"{SESSIONS}/<session_id>/resume", sessions.resume, ACT),
    JsonRoute("GET", WORKSPACES, workspaces.list_workspaces, FIND),
    JsonRoute("POST", WORKSPACES, workspaces.create, MAKE),
    JsonRoute("GET", f"{WORKSPACES}/<workspace_id>", workspaces.get, FIND),
    JsonRoute("PUT", f"{WORKSPACES}/<workspace_id>", workspaces.put, MAKE),
    JsonRoute("PATCH", f"{WORKSPACES}/<workspace_id>", workspaces.update, MAKE),
    JsonRoute("DELETE", f"{WORKSPACES}/<workspace_id>", workspaces.delete, MAKE),
)


def _get(handler: RawHandler, needs: Needs) -> Mapping[str, RawRoute]:
    return {"GET": RawRoute(handler, needs), "HEAD": RawRoute(handler, needs)}


def _post(handler: RawHandler, needs: Needs) -> Mapping[str, RawRoute]:
    return {"POST": RawRoute(handler, needs)}


def _delete(handler: RawHandler, needs: Needs) -> Mapping[str, RawRoute]:
    return {"DELETE": RawRoute(handler, needs)}


RAW_ROUTES: RouteTable[Mapping[str, RawRoute]] = RouteTable(
    {
        "exec": _post(commands.run, ACT),
        "exec/stream": _post(commands.stream, ACT),
        "execs": _get(execs.list_runs, LOOK),
        "execs/{exec_id}": _get(execs.get, LOOK),
        "execs/{exec_id}/output": _get(execs.output, LOOK),
        "execs/{exec_id}/stream": _get(execs.stream, LOOK),
        "execs/{exec_id}/signal": _post(execs.send_signal, ACT),
        "execs/{exec_id}/cancel": _post(execs.cancel, ACT),
        "execs/{exec_id}/stdin": _post(execs.send_stdin, ACT),
        "execs/{exec_id}/resize": _post(execs.resize, ACT),
        "shells": {**_get(shells.list_shells, LOOK), **_post(shells.open_shell, ACT)},
        "shells/{name}": _delete(shells.close_shell, ACT),
        "processes": {**_get(processes.list_processes, LOOK), **_post(processes.start, ACT)},
        "processes/{exec_id}": {**_get(processes.get, LOOK), **_delete(processes.kill, ACT)},
        "processes/{exec_id}/logs": _get(processes.logs, LOOK),
        "processes/{exec_id}/stdin": _post(processes.send_stdin, ACT),
        "processes/{exec_id}/signal": _post(processes.send_signal, ACT),
        "processes/{exec_id}/resize": _post(processes.resize, ACT),
        "processes/{exec_id}/kill": _post(processes.kill, ACT),
        "processes/{exec_id}/wait": _post(processes.wait, LOOK),
        "ports": _get(processes.ports, LOOK),
        "events": _get(events.stream, LOOK),
        "fs/read": _get(files.read, LOOK),
        "fs/write": _post(files.write, ACT),
        "fs/upload": _post(upload, ACT),
    }
)
"""What follows `/v1/sessions/{id}/`, and the handler per method."""

WORKSPACE_ROUTES: RouteTable[Mapping[str, RawRoute]] = RouteTable(
    {
        "fs": {**_get(workspaces.list_files, FIND), **_delete(workspaces.remove, MAKE)},
        "fs/stat": _get(workspaces.stat, FIND),
        "fs/read": _get(files.read, FIND),
        "fs/write": _post(files.write, MAKE),
        "fs/upload": _post(upload, MAKE),
        "fs/download": _get(archives.download, FIND),
        "export": _get(archives.export, FIND),
        "import": _post(archives.import_archive, MAKE),
    }
)
"""What follows `/v1/workspaces/{id}/`, likewise."""

RAW_PATHS: Mapping[str, Mapping[str, RawRoute]] = {
    "/metrics": _get(metrics.metrics, SEE_NODE),
    "/v1/events": _get(events.stream, FIND),
}
"""Whole paths, and the handler per method."""


def split_session(segments: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """Return the session id and the segments behind it, or None for what is not beneath a session."""
    return _split(segments, _ABOVE_SESSIONS)


def split_workspace(segments: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """Return the workspace id and the segments behind it, or None for what is not beneath a workspace."""
    return _split(segments, _ABOVE_WORKSPACES)


def _split(segments: tuple[str, ...], above: tuple[str, str]) -> tuple[str, tuple[str, ...]] | None:
    if len(segments) < 3 or segments[:2] != above:
        return None
    return segments[2], segments[3:]
