"""The table of routes: every method of every path, and who answers there.

A line says all there is to say about a route: how it is served, its method and path, its handler, what it needs of the
key, and the classes of its query, body and answer. Requests are dispatched from the table, and `/openapi.json` is made
from the same lines. To add a route, write its handler with its classes in `resources` and a line here.

JSON routes are served by Quart. A route is raw, in front of Quart, if it streams, waits, takes an upload, or is one
that agents call all the time: Quart would cut an answer at 60 s, buffer a body without bound and add 0.2 ms
(docs/adr/0007-hypercorn-and-quart.md).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from sandkasten.api.http.auth import ACT, FIND, LOOK, MAKE, OPEN, RULE_NODE, SEE_NODE, Needs
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.routing import Route, RouteKind, RouteTable
from sandkasten.api.openapi import document
from sandkasten.api.resources import events, files, keys, node, runs, sessions, workspaces
from sandkasten.api.resources import file_archives as archives
from sandkasten.api.resources import file_changes as changes
from sandkasten.api.resources import file_contents as contents
from sandkasten.api.resources import file_entries as entries
from sandkasten.api.resources import file_search as search
from sandkasten.api.resources import file_texts as texts
from sandkasten.api.resources import file_uploads as uploads
from sandkasten.api.resources import file_watch as watches
from sandkasten.api.resources.run_output import ExecResultBody, OutputBody, OutputQuery
from sandkasten.api.websocket.events import events_ws, watch_ws
from sandkasten.api.websocket.exec import exec_ws
from sandkasten.api.websocket.handshake import WebSocketExchange
from sandkasten.api.websocket.terminal import terminal_ws
from sandkasten.api.websocket.terminal_messages import TerminalQuery
from sandkasten.model import SessionStats
from sandkasten.model.node import PoolInfo

SESSIONS = "/v1/sessions"
WORKSPACES = "/v1/workspaces"

_SESSION = f"{SESSIONS}/{{id}}"
_RUN = f"{_SESSION}/execs/{{exec_id}}"
_PROCESS = f"{_SESSION}/processes/{{exec_id}}"
_WORKSPACE = f"{WORKSPACES}/{{id}}"
_EVENTS = "text/event-stream"
_TAR = "application/x-tar"
_ZSTD = "application/zstd"
_CREATED = (201,)


def _json(
    method: str, path: str, handler: Callable[[Exchange], Awaitable[Answer]], needs: Needs, **columns: Any
) -> Route:  # columns: of Route
    return Route(kind=RouteKind.JSON, method=method, path=path, handler=handler, needs=needs, **columns)


def _raw(
    method: str, path: str, handler: Callable[[Exchange], Awaitable[Answer | None]], needs: Needs, **columns: Any
) -> Route:  # columns: of Route
    return Route(kind=RouteKind.RAW, method=method, path=path, handler=handler, needs=needs, **columns)


def _websocket(
    path: str, handler: Callable[[WebSocketExchange], Awaitable[None]], needs: Needs, **columns: Any
) -> Route:  # columns: of Route
    return Route(kind=RouteKind.WEBSOCKET, method="GET", path=path, handler=handler, needs=needs, **columns)


_PLACES = ((_SESSION, LOOK, ACT), (_WORKSPACE, FIND, MAKE))
"""Where files are, and what reading and changing them needs of the key."""


def _file_routes(top: str, look: Needs, act: Needs) -> tuple[Route, ...]:
    """Return the routes that are the same for files of a session and of a workspace."""
    upload = f"{top}/fs/uploads/{{upload_id}}"
    return (
        _raw("GET", f"{top}/fs/read", files.read, look, query=files.ReadQuery, answer=files.FileBody),
        _raw("POST", f"{top}/fs/write", files.write, act, body=files.WriteRequest, answer=files.WrittenBody),
        _raw("POST", f"{top}/fs/upload", files.upload, act, body_type=files.FORM, answer=files.UploadedBody),
        _raw("GET", f"{top}/fs/file", contents.get, look, query=contents.GetQuery, answer_type=contents.BYTES),
        _raw(
            *("PUT", f"{top}/fs/file", contents.put, act),
            query=contents.PutQuery,
            body_type=contents.BYTES,
            answer=contents.PutBody,
            statuses=(200, 201),
        ),
        _raw(
            *("POST", f"{top}/fs/uploads", uploads.begin, act),
            body=uploads.UploadRequest,
            answer=uploads.UploadBody,
            statuses=_CREATED,
        ),
        _raw("GET", upload, uploads.look, look, answer=uploads.UploadBody),
        _raw("PATCH", upload, uploads.append, act, body_type=contents.BYTES, answer=uploads.UploadBody),
        _raw("DELETE", upload, uploads.drop, act, answer=sessions.DoneBody),
        _raw("POST", f"{upload}/commit", uploads.commit, act, answer=contents.PutBody, statuses=(200, 201)),
        _raw(
            "POST", f"{top}/fs/mkdir", changes.make_directory, act, body=changes.MakeRequest, answer=files.WrittenBody
        ),
        _raw("POST", f"{top}/fs/move", changes.move, act, body=changes.MoveRequest, answer=files.WrittenBody),
        _raw("DELETE", f"{top}/fs", changes.remove, act, query=changes.RemovalQuery, answer=files.WrittenBody),
        _raw("POST", f"{top}/fs/copy", changes.copy, act, body=changes.MoveRequest, answer=files.WrittenBody),
        _raw("POST", f"{top}/fs/chmod", changes.change_mode, act, body=changes.ModeRequest, answer=files.WrittenBody),
        _raw("POST", f"{top}/fs/chown", changes.change_owner, act, body=changes.OwnerRequest, answer=files.WrittenBody),
        _raw("GET", f"{top}/fs/list", entries.list_files, look, query=entries.ListQuery, answer=entries.ListBody),
        _raw("GET", f"{top}/fs/stat", entries.stat, look, query=entries.StatQuery, answer=entries.FileInfoBody),
        _raw("GET", f"{top}/fs/archive", archives.pack, look, query=archives.PackQuery, answer_type=_TAR),
        _raw(
            *("POST", f"{top}/fs/archive", archives.unpack, act),
            query=archives.UnpackQuery,
            body_type=_TAR,
            answer=archives.UnpackedBody,
            statuses=_CREATED,
        ),
        _raw("GET", f"{top}/fs/watch", watches.watch, look, query=watches.WatchQuery, answer_type=_EVENTS),
        _websocket(f"{top}/fs/watch", watch_ws, look, query=watches.WatchQuery),
        _raw("POST", f"{top}/fs/glob", search.glob, look, body=search.GlobRequest, answer=search.GlobBody),
        _raw(
            *("POST", f"{top}/fs/search", search.search, look),
            body=search.SearchRequest,
            answer_type=search.NDJSON,
        ),
        _raw("GET", f"{top}/fs/view", texts.view, look, query=texts.ViewQuery, answer=texts.ViewBody),
        _raw("POST", f"{top}/fs/edit", texts.edit, act, body=texts.EditRequest, answer=texts.EditsBody),
        _raw("POST", f"{top}/fs/stat", entries.stat_many, look, body=entries.StatRequest, answer=entries.StatsBody),
    )


async def openapi(_exchange: Exchange) -> Answer:
    """Describe this interface as OpenAPI."""
    return json_answer(_description())


@functools.cache
def _description() -> dict[str, Any]:  # JSON values
    return document(TABLE.routes, version("sandkasten-runtime"))


TABLE = RouteTable(
    (
        # The node
        _raw("GET", "/healthz", node.healthz, OPEN, answer=node.HealthBody),
        _json("GET", "/readyz", node.readyz, SEE_NODE, answer=node.ReadinessBody, statuses=(200, 503)),
        _json("GET", "/openapi.json", openapi, FIND, answer=dict[str, Any]),
        _raw("GET", "/metrics", node.metrics, SEE_NODE, answer_type="text/plain"),
        _json("GET", "/v1/system", node.system, SEE_NODE, answer=node.SystemBody),
        _json("GET", "/v1/node", node.node, SEE_NODE, answer=node.NodeBody),
        _json("POST", "/v1/node/drain", node.drain, RULE_NODE, answer=node.NodeBody),
        _json("POST", "/v1/node/undrain", node.undrain, RULE_NODE, answer=node.NodeBody),
        _json("GET", "/v1/pools", node.pools, SEE_NODE, answer=list[PoolInfo]),
        _json("GET", "/v1/keys", keys.list_keys, RULE_NODE, answer=keys.KeysBody),
        _raw("GET", "/v1/events", events.stream, FIND, query=events.EventsQuery, answer_type=_EVENTS),
        _websocket("/v1/events", events_ws, FIND, query=events.EventsQuery, needs_live_session=False),
        # Sessions
        _json(
            *("GET", SESSIONS, sessions.list_sessions, FIND),
            query=sessions.SessionsQuery,
            answer=list[sessions.SessionBody],
        ),
        _raw(
            *("POST", SESSIONS, sessions.create, MAKE),
            body=sessions.CreateRequest,
            answer=sessions.SessionBody,
            statuses=_CREATED,
        ),
        _json("GET", _SESSION, sessions.get, LOOK, answer=sessions.SessionBody),
        _json("PATCH", _SESSION, sessions.update, ACT, body=sessions.PatchRequest, answer=sessions.SessionBody),
        _raw("DELETE", _SESSION, sessions.destroy, ACT, answer=sessions.DoneBody),
        _json("GET", f"{_SESSION}/stats", sessions.stats, LOOK, answer=SessionStats),
        _json("GET", f"{_SESSION}/diagnostics", sessions.diagnostics, LOOK, answer=sessions.DiagnosisBody),
        _json(
            *("POST", f"{_SESSION}/pause", sessions.pause, ACT),
            body=sessions.PauseRequest,
            answer=sessions.SessionBody,
        ),
        _json("POST", f"{_SESSION}/resume", sessions.resume, ACT, answer=sessions.SessionBody),
        _raw("GET", f"{_SESSION}/events", events.stream, LOOK, query=events.EventsQuery, answer_type=_EVENTS),
        _websocket(f"{_SESSION}/events", events_ws, LOOK, query=events.EventsQuery, needs_live_session=False),
        # Runs of a session
        _raw("POST", f"{_SESSION}/exec", runs.execute, ACT, body=runs.ExecRequest, answer=ExecResultBody),
        _raw(
            *("POST", f"{_SESSION}/exec/stream", runs.execute_and_follow, ACT),
            body=runs.ExecRequest,
            answer_type=_EVENTS,
        ),
        _websocket(f"{_SESSION}/exec/ws", exec_ws, ACT),
        _websocket(f"{_SESSION}/terminal/ws", terminal_ws, ACT, query=TerminalQuery),
        _raw("GET", f"{_SESSION}/execs", runs.list_runs, LOOK, query=runs.RunsQuery, answer=runs.RunsBody),
        _raw("GET", _RUN, runs.get_run, LOOK, answer=runs.RunBody),
        _raw("GET", f"{_RUN}/output", runs.read_output, LOOK, query=OutputQuery, answer=OutputBody),
        _raw("GET", f"{_RUN}/stream", runs.follow_run, LOOK, query=runs.FollowQuery, answer_type=_EVENTS),
        _raw("POST", f"{_RUN}/signal", runs.send_signal, ACT, body=runs.SignalRequest, answer=sessions.DoneBody),
        _raw("POST", f"{_RUN}/cancel", runs.cancel_run, ACT, body=runs.CancelRequest, answer=runs.RunBody),
        _raw("POST", f"{_RUN}/stdin", runs.send_stdin, ACT, body=runs.StdinRequest, answer=sessions.DoneBody),
        _raw("POST", f"{_RUN}/resize", runs.resize, ACT, body=runs.TerminalRequest, answer=sessions.DoneBody),
        _raw("GET", f"{_SESSION}/shells", runs.list_shells, LOOK, answer=runs.ShellsBody),
        _raw(
            *("POST", f"{_SESSION}/shells", runs.open_shell, ACT),
            body=runs.ShellRequest,
            answer=runs.ShellBody,
            statuses=_CREATED,
        ),
        _raw("DELETE", f"{_SESSION}/shells/{{name}}", runs.close_shell, ACT, answer=sessions.DoneBody),
        _raw(
            *("GET", f"{_SESSION}/processes", runs.list_processes, LOOK),
            query=runs.ProcessesQuery,
            answer=runs.ProcessesBody,
        ),
        _raw(
            *("POST", f"{_SESSION}/processes", runs.start_process, ACT),
            body=runs.ProcessRequest,
            answer=runs.ProcessBody,
            statuses=_CREATED,
        ),
        _raw("GET", _PROCESS, runs.get_process, LOOK, answer=runs.ProcessBody),
        _raw("DELETE", _PROCESS, runs.kill_process, ACT, answer=runs.ProcessBody),
        _raw("GET", f"{_PROCESS}/logs", runs.process_logs, LOOK, query=runs.LogsQuery, answer=OutputBody),
        _raw("POST", f"{_PROCESS}/stdin", runs.process_stdin, ACT, body=runs.StdinRequest, answer=sessions.DoneBody),
        _raw("POST", f"{_PROCESS}/signal", runs.process_signal, ACT, body=runs.SignalRequest, answer=sessions.DoneBody),
        _raw(
            "POST", f"{_PROCESS}/resize", runs.process_resize, ACT, body=runs.TerminalRequest, answer=sessions.DoneBody
        ),
        _raw("POST", f"{_PROCESS}/kill", runs.kill_process, ACT, answer=runs.ProcessBody),
        _raw("POST", f"{_PROCESS}/wait", runs.wait_for_process, LOOK, body=runs.WaitRequest, answer=runs.WaitedBody),
        _raw("GET", f"{_SESSION}/ports", runs.list_ports, LOOK, answer=runs.PortsBody),
        # Files of a session, and of a workspace
        *(route for top, look, act in _PLACES for route in _file_routes(top, look, act)),
        # Workspaces
        _json(
            *("GET", WORKSPACES, workspaces.list_workspaces, FIND),
            query=workspaces.WorkspacesQuery,
            answer=workspaces.WorkspacesBody,
        ),
        _json(
            *("POST", WORKSPACES, workspaces.create, MAKE),
            body=workspaces.WorkspaceRequest,
            answer=workspaces.WorkspaceBody,
            statuses=_CREATED,
        ),
        _json(
            *("GET", _WORKSPACE, workspaces.get, FIND),
            query=workspaces.WorkspaceQuery,
            answer=workspaces.WorkspaceBody,
        ),
        _json(
            *("PUT", _WORKSPACE, workspaces.put, MAKE),
            body=workspaces.WorkspacePutRequest,
            answer=workspaces.WorkspaceBody,
            statuses=(200, 201),
        ),
        _json(
            *("PATCH", _WORKSPACE, workspaces.update, MAKE),
            body=workspaces.WorkspacePatchRequest,
            answer=workspaces.WorkspaceBody,
        ),
        _json("DELETE", _WORKSPACE, workspaces.delete, MAKE, query=workspaces.DeleteQuery, answer=sessions.DoneBody),
        # Files of a workspace
        _raw(
            *("GET", f"{_WORKSPACE}/fs", workspaces.list_files, FIND),
            query=workspaces.FilesQuery,
            answer=workspaces.FilesBody,
        ),
        _raw(
            *("GET", f"{_WORKSPACE}/fs/download", workspaces.download, FIND),
            query=workspaces.DownloadQuery,
            answer_type=_TAR,
        ),
        _raw("GET", f"{_WORKSPACE}/export", workspaces.export, FIND, query=workspaces.ExportQuery, answer_type=_ZSTD),
        _raw(
            *("POST", f"{_WORKSPACE}/import", workspaces.import_archive, MAKE),
            query=workspaces.ImportQuery,
            body_type=_ZSTD,
            answer=archives.UnpackedBody,
            statuses=_CREATED,
        ),
    )
)
