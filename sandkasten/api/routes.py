"""The table of routes: every method of every path, and who answers there.

A line says all there is to say about a route: how it is served, its method and path, its handler, what it needs of the
key, the classes of its query, body and answer, its errors, and what is said in its stream. Requests are dispatched from
the table, and `/openapi.json` is made from the same lines. To add a route, write its handler with its classes in
`resources` and a line here.

JSON routes are served by Quart. A route is raw, in front of Quart, if it streams, waits, takes an upload, or is one
that agents call all the time: Quart would cut an answer at 60 s, buffer a body without bound and add 0.2 ms
(docs/adr/0007-hypercorn-and-quart.md).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import attrs
import trio

from sandkasten import errors
from sandkasten.api.http.auth import ACT, FIND, LOOK, MAKE, OPEN, RULE_NODE, SEE_NODE, Needs
from sandkasten.api.http.errors import Answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import encode_json
from sandkasten.api.http.routing import Messages, Route, RouteKind, RouteTable
from sandkasten.api.http.sse import ErrorEvent
from sandkasten.api.openapi import document
from sandkasten.api.resources import (
    events,
    files,
    images,
    jobs,
    keys,
    mcp,
    network,
    node,
    previews,
    runs,
    secrets,
    sessions,
    workspaces,
)
from sandkasten.api.resources import file_archives as archives
from sandkasten.api.resources import file_changes as changes
from sandkasten.api.resources import file_contents as contents
from sandkasten.api.resources import file_entries as entries
from sandkasten.api.resources import file_search as search
from sandkasten.api.resources import file_texts as texts
from sandkasten.api.resources import file_uploads as uploads
from sandkasten.api.resources import file_watch as watches
from sandkasten.api.resources.run_output import OCTETS, RUN_EVENTS, ExecResultBody, OutputBody, OutputQuery
from sandkasten.api.websocket import events as event_sockets
from sandkasten.api.websocket import exec_messages, terminal_messages
from sandkasten.api.websocket.exec import exec_ws
from sandkasten.api.websocket.handshake import Auth, WebSocketExchange
from sandkasten.api.websocket.messages import ErrorMessage
from sandkasten.api.websocket.terminal import terminal_ws
from sandkasten.model import SessionStats, UsageSample
from sandkasten.model.node import PoolInfo

SESSIONS = "/v1/sessions"
WORKSPACES = "/v1/workspaces"

_SESSION = f"{SESSIONS}/{{id}}"
_RUN = f"{_SESSION}/execs/{{exec_id}}"
_PROCESS = f"{_SESSION}/processes/{{exec_id}}"
_WORKSPACE = f"{WORKSPACES}/{{id}}"
_EVENTS = "text/event-stream"
_ARCHIVES = tuple(archives.TYPES.values())
_PACKED = ("application/x-tar", "application/zstd")
_CREATED = (201,)
_OFFSETS = tuple(f"x-{name}" for name in ("offset", "next-offset", "first-offset", "total-bytes", "is-final"))

_NAMED = ("content-disposition",)
_NAMED_RUN = ("x-exec-id",)
_DONE = sessions.DoneBody

_Errors = tuple[type[errors.SandkastenError], ...]

_AWAKE: _Errors = (errors.SessionExpired, errors.SessionPaused)
_BEGINS: _Errors = (*_AWAKE, errors.Conflict, errors.ExecGone, errors.ExecIdsExhausted, errors.ShellFailed)
_IN_SHELL: _Errors = (errors.ShellNotFound, errors.ShellBusy)
_PATH: _Errors = (
    *(errors.FileNotFound, errors.NotAFile, errors.NotADirectory, errors.PermissionDenied),
    *(errors.PathOutside, errors.Conflict, errors.WorkInterrupted),
)
_FILE: _Errors = (*_PATH, errors.IsADirectory)
_MADE: _Errors = (errors.WorkspaceBusy, errors.Conflict)
_WAY_OUT: _Errors = (
    *(errors.InvalidRule, errors.EgressUnavailable, errors.NetworkNotSupported),
    *(errors.SecretNotFound, errors.SecretsOff),
)
"""Errors of what needs a session's processes; begins a run, in a shell; names a path, that of one file; makes or takes
up a workspace; asks for a network. `openapi.errors_of` adds those that follow from the needs."""

_RUN_EVENTS = Messages(server=RUN_EVENTS)
_EVENT_STREAM = Messages(server={**events.EVENTS, "error": ErrorEvent})
_CHANGES = Messages(server={**watches.CHANGES, "error": ErrorEvent})
_EXEC_SOCKET = Messages(
    server={**exec_messages.SERVER_MESSAGES, "error": exec_messages.ChannelError | ErrorMessage},
    client={**exec_messages.CLIENT_MESSAGES, Auth.kind: Auth},
    protocols=(exec_messages.PROTOCOL,),
    binary="channel (4 bytes), stream (1), sequence number (8), all big-endian, and the bytes",
)
_TERMINAL_SOCKET = Messages(
    server=terminal_messages.SERVER_MESSAGES,
    client={**terminal_messages.CLIENT_MESSAGES, Auth.kind: Auth},
    protocols=(terminal_messages.PROTOCOL, terminal_messages.RAW_PROTOCOL),
    binary="the terminal's bytes, both ways",
)


def _told(protocol: str, server: Mapping[str, object]) -> Messages:
    """Return the messages of a WebSocket that takes none but the key."""
    messages = {**server, ErrorMessage.kind: ErrorMessage}
    return Messages(server=messages, client={Auth.kind: Auth}, protocols=(protocol,))


_EVENT_SOCKET = _told(event_sockets.SUBPROTOCOL, event_sockets.EVENT_MESSAGES)
_CHANGE_SOCKET = _told(event_sockets.WATCH_SUBPROTOCOL, watches.CHANGES)


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


def _failing(why: _Errors, *routes: Route) -> Iterator[Route]:
    """Yield routes with the errors that they have in common besides their own."""
    return (attrs.evolve(route, errors=(*why, *route.errors)) for route in routes)


_PLACES = ((_SESSION, LOOK, ACT, _AWAKE), (_WORKSPACE, FIND, MAKE, (errors.WorkspaceBusy,)))
"""Where files are, what reading and changing them needs of the key, and why they can't be reached."""


def _file_routes(top: str, look: Needs, act: Needs, away: _Errors) -> Iterator[Route]:
    """Yield the routes that are the same for files of a session and of a workspace."""
    upload = f"{top}/fs/uploads/{{upload_id}}"
    written = files.WrittenBody
    yield from _failing(
        (*away, *_PATH),
        _raw("GET", f"{top}/fs/list", entries.list_files, look, query=entries.ListQuery, answer=entries.ListBody),
        _raw("POST", f"{top}/fs/stat", entries.stat_many, look, body=entries.StatRequest, answer=entries.StatsBody),
        _raw("POST", f"{top}/fs/glob", search.glob, look, body=search.GlobRequest, answer=search.GlobBody),
        _raw(
            *("POST", f"{top}/fs/search", search.search, look),
            body=search.SearchRequest,
            answer_type=search.NDJSON,
            messages=Messages(server=search.LINES),
        ),
        _raw(
            *("GET", f"{top}/fs/archive", archives.pack, look),
            query=archives.PackQuery,
            answer_type=_ARCHIVES,
            gives=_NAMED,
        ),
        _raw(
            *("GET", f"{top}/fs/watch", watches.watch, look),
            query=watches.WatchQuery,
            answer_type=_EVENTS,
            messages=_CHANGES,
        ),
    )
    yield _websocket(f"{top}/fs/watch", event_sockets.watch_ws, look, query=watches.WatchQuery, messages=_CHANGE_SOCKET)
    yield from _failing(
        (*away, *_FILE),
        _raw(
            *("GET", f"{top}/fs/file", contents.get, look),
            query=contents.GetQuery,
            head=contents.GetHead,
            answer_type=contents.BYTES,
            statuses=(200, 206, 304),
            gives=("etag", "accept-ranges", "last-modified", "content-range"),
            errors=(errors.RangeNotSatisfiable,),
        ),
        _raw("GET", f"{top}/fs/stat", entries.stat, look, query=entries.StatQuery, answer=entries.FileInfoBody),
        _raw("GET", f"{top}/fs/view", texts.view, look, query=texts.ViewQuery, answer=texts.ViewBody),
        _raw(
            *("POST", f"{top}/fs/uploads", uploads.begin, act),
            body=uploads.UploadRequest,
            answer=uploads.UploadBody,
            statuses=_CREATED,
        ),
        _raw("GET", upload, uploads.look, look, answer=uploads.UploadBody),
        _raw(
            *("PATCH", upload, uploads.append, act),
            head=uploads.AppendHead,
            body_type=contents.BYTES,
            answer=uploads.UploadBody,
        ),
        _raw("DELETE", upload, uploads.drop, act, answer=sessions.DoneBody),
        _raw("POST", f"{top}/fs/chmod", changes.change_mode, act, body=changes.ModeRequest, answer=written),
        _raw("POST", f"{top}/fs/chown", changes.change_owner, act, body=changes.OwnerRequest, answer=written),
    )
    yield from _failing(
        (*away, *_FILE, errors.NotEmpty),
        _raw("POST", f"{top}/fs/mkdir", changes.make_directory, act, body=changes.MakeRequest, answer=written),
        _raw("POST", f"{top}/fs/move", changes.move, act, body=changes.MoveRequest, answer=written),
        _raw("POST", f"{top}/fs/copy", changes.copy, act, body=changes.MoveRequest, answer=written),
        _raw("DELETE", f"{top}/fs", changes.remove, act, query=changes.RemovalQuery, answer=written),
        _raw(
            *("POST", f"{top}/fs/archive", archives.unpack, act),
            query=archives.UnpackQuery,
            body_type=(*_ARCHIVES, contents.BYTES),
            answer=archives.UnpackedBody,
            statuses=_CREATED,
        ),
    )
    yield from _failing(
        (*away, *_FILE, errors.PreconditionFailed),
        _raw(
            *("PUT", f"{top}/fs/file", contents.put, act),
            query=contents.PutQuery,
            head=contents.WriteHead,
            body_type=contents.BYTES,
            answer=contents.PutBody,
            statuses=(200, 201),
        ),
        _raw(
            *("POST", f"{upload}/commit", uploads.commit, act),
            body=uploads.CommitRequest,
            head=contents.WriteHead,
            answer=contents.PutBody,
            statuses=(200, 201),
        ),
        _raw(
            *("POST", f"{top}/fs/edit", texts.edit, act),
            body=texts.EditRequest,
            answer=texts.EditsBody,
            errors=(errors.Ambiguous,),
        ),
    )
    yield from _failing(
        (*away, *_FILE),
        _raw("GET", f"{top}/fs/read", files.read, look, query=files.ReadQuery, answer=files.FileBody),
        _raw("POST", f"{top}/fs/write", files.write, act, body=files.WriteRequest, answer=written),
        _raw("POST", f"{top}/fs/upload", files.upload, act, body_type=files.FORM, answer=files.UploadedBody),
    )


def _event_routes(path: str, needs: Needs) -> tuple[Route, ...]:
    """Return the two ways to follow the journal."""
    return (
        _raw(
            *("GET", path, events.stream, needs),
            query=events.EventsQuery,
            head=events.EventsHead,
            answer_type=_EVENTS,
            errors=(errors.CursorGone,),
            messages=_EVENT_STREAM,
        ),
        _websocket(
            *(path, event_sockets.events_ws, needs),
            query=events.EventsQuery,
            needs_live_session=False,
            messages=_EVENT_SOCKET,
        ),
    )


async def openapi(_exchange: Exchange) -> Answer:
    """Describe this interface as OpenAPI."""
    return Answer(200, await trio.to_thread.run_sync(_description))  # the first takes long enough to hold up others


@functools.cache
def _description() -> bytes:
    return encode_json(document(TABLE.routes, version("sandkasten-runtime")))


TABLE = RouteTable(
    (
        # The node
        _raw("GET", "/healthz", node.healthz, OPEN, answer=node.HealthBody),
        _json("GET", "/readyz", node.readyz, SEE_NODE, answer=node.ReadinessBody, statuses=(200, 503)),
        _json("GET", "/openapi.json", openapi, FIND, answer=dict[str, Any]),
        _raw("GET", "/metrics", node.metrics, SEE_NODE, answer_type=("text/plain", "application/openmetrics-text")),
        _json("GET", "/v1/system", node.system, SEE_NODE, answer=node.SystemBody),
        _json("GET", "/v1/node", node.node, SEE_NODE, answer=node.NodeBody),
        _json("POST", "/v1/node/drain", node.drain, RULE_NODE, answer=node.NodeBody),
        _json("POST", "/v1/node/undrain", node.undrain, RULE_NODE, answer=node.NodeBody),
        _json("GET", "/v1/pools", node.pools, SEE_NODE, answer=list[PoolInfo]),
        _json("GET", "/v1/keys", keys.list_keys, RULE_NODE, answer=keys.KeysBody),
        *_failing(
            (errors.SecretsOff, errors.EgressUnavailable),
            _json("GET", "/v1/secrets", secrets.list_secrets, RULE_NODE, answer=secrets.SecretsBody),
            _json(
                *("POST", "/v1/secrets", secrets.put_secret, RULE_NODE),
                body=secrets.SecretRequest,
                answer=secrets.SecretBody,
                statuses=_CREATED,
                errors=(errors.Capacity, errors.StoreFailed),
            ),
            _json(
                *("DELETE", "/v1/secrets/{name}", secrets.delete_secret, RULE_NODE),
                answer=sessions.DoneBody,
                errors=(errors.SecretNotFound, errors.StoreFailed),
            ),
        ),
        # Images, and the jobs that make them
        *_failing(
            (errors.InvalidImage,),
            _json(
                *("GET", "/v1/images", images.list_images, FIND),
                query=images.ImagesQuery,
                answer=images.ImagesBody,
            ),
            _json("GET", "/v1/images/{name}", images.get, FIND, answer=images.ImageBody),
            _raw(
                *("GET", "/v1/images/{name}/export", images.export, RULE_NODE),
                query=images.ImageExportQuery,
                answer_type="application/x-tar",
                gives=_NAMED,
                errors=(errors.LayerRefused, errors.DiskReserve),
            ),
            _json(
                *("DELETE", "/v1/images", images.delete, RULE_NODE),
                query=images.ImageQuery,
                answer=sessions.DoneBody,
                errors=(errors.ImageInUse,),
            ),
            _json(
                *("DELETE", "/v1/images/{name}", images.remove, RULE_NODE),
                answer=sessions.DoneBody,
                errors=(errors.ImageInUse,),
            ),
        ),
        _json("POST", "/v1/images/prune", images.prune, RULE_NODE, body=images.PruneRequest, answer=images.PrunedBody),
        _json(
            *("POST", "/v1/images/pull", jobs.pull, RULE_NODE),
            head=jobs.PullHead,
            body=jobs.PullRequest,
            answer=jobs.BegunBody,
            statuses=(202,),
            errors=(errors.InvalidReference, errors.InvalidImage, errors.Conflict, errors.StoreFailed),
        ),
        _raw(
            *("POST", "/v1/images/import", jobs.import_image, RULE_NODE),
            query=jobs.ImageImportQuery,
            body_type=(*_ARCHIVES, contents.BYTES),
            answer=jobs.BegunBody,
            statuses=(202,),
            errors=(errors.InvalidImage, errors.DiskReserve, errors.StoreFailed),
        ),
        _json("GET", "/v1/jobs", jobs.list_jobs, RULE_NODE, query=jobs.JobsQuery, answer=jobs.JobsBody),
        *_failing(
            (errors.JobNotFound,),
            _json("GET", "/v1/jobs/{job_id}", jobs.get, RULE_NODE, answer=jobs.JobBody),
            _raw("DELETE", "/v1/jobs/{job_id}", jobs.cancel, RULE_NODE, answer=jobs.JobBody),
            _raw(
                *("GET", "/v1/jobs/{job_id}/events", jobs.follow, RULE_NODE),
                answer_type=_EVENTS,
                messages=Messages(server={**jobs.JOB_EVENTS, "error": ErrorEvent}),
            ),
        ),
        *_event_routes("/v1/events", FIND),
        *(
            _raw(
                *(method, "/mcp", mcp.serve_mcp, FIND),
                query=mcp.McpQuery,
                body_type="application/json" if method == "POST" else (),
                answer_type=("application/json", _EVENTS),
                statuses=(200, 202),
                errors=(errors.NotInstalled,),
            )
            for method in ("POST", "GET", "DELETE")
        ),
        # Sessions
        _json(
            *("GET", SESSIONS, sessions.list_sessions, FIND),
            query=sessions.SessionsQuery,
            answer=list[sessions.SessionBody],
            gives=(sessions.NEXT_CURSOR,),
        ),
        _raw(
            *("POST", SESSIONS, sessions.create, MAKE),
            head=sessions.CreateHead,
            body=sessions.CreateRequest,
            answer=sessions.SessionBody,
            statuses=_CREATED,
            gives=("server-timing",),
            errors=(
                errors.InvalidImage,
                errors.SessionExpired,
                errors.WorkspaceNotFound,
                *_MADE,
                *_WAY_OUT,
                errors.PreviewsOff,
            ),
        ),
        _json("GET", _SESSION, sessions.get, LOOK, answer=sessions.SessionBody),
        _raw("DELETE", _SESSION, sessions.destroy, ACT, answer=sessions.DoneBody),
        _json("GET", f"{_SESSION}/diagnostics", sessions.diagnostics, LOOK, answer=sessions.DiagnosisBody),
        *_event_routes(f"{_SESSION}/events", LOOK),
        *_failing(
            (errors.SessionExpired,),
            _json(
                *("PATCH", _SESSION, sessions.update, ACT),
                body=sessions.PatchRequest,
                answer=sessions.SessionBody,
                errors=(errors.SessionPaused, errors.LimitInUse, errors.Conflict, *_WAY_OUT),
            ),
            _json(
                *("GET", f"{_SESSION}/network", network.read_network, LOOK),
                answer=network.NetworkInfoBody,
                errors=(errors.EgressUnavailable,),
            ),
            _json(
                *("GET", f"{_SESSION}/egress", network.read_egress, LOOK),
                query=network.EgressQuery,
                answer=network.EgressBody,
                errors=(errors.EgressUnavailable,),
            ),
            _json(
                *("POST", f"{_SESSION}/previews", previews.open_preview, ACT),
                body=previews.PreviewRequest,
                answer=previews.OpenedPreviewBody,
                statuses=_CREATED,
                errors=(errors.PreviewsOff, errors.Conflict),
            ),
            _json("GET", f"{_SESSION}/previews", previews.list_previews, LOOK, answer=previews.PreviewsBody),
            _json(
                *("DELETE", f"{_SESSION}/previews/{{port}}", previews.close_preview, ACT),
                answer=sessions.DoneBody,
                errors=(errors.PreviewNotFound,),
            ),
            _json(
                *("POST", f"{_SESSION}/pause", sessions.pause, ACT),
                body=sessions.PauseRequest,
                answer=sessions.SessionBody,
                errors=(errors.Conflict,),
            ),
            _json(
                "POST",
                f"{_SESSION}/resume",
                sessions.resume,
                ACT,
                answer=sessions.SessionBody,
                errors=(errors.Conflict,),
            ),
            _json(
                *("POST", f"{_SESSION}/commit", images.commit, RULE_NODE),
                body=images.CommitImageRequest,
                answer=images.ImageBody,
                statuses=_CREATED,
                errors=(
                    *(errors.Conflict, errors.InvalidImage, errors.DiskFull, errors.LayerRefused),
                    *(errors.SessionNotFound, errors.SessionExpired),
                ),
            ),
            _json("GET", f"{_SESSION}/stats", sessions.stats, LOOK, answer=SessionStats),
            _raw("GET", f"{_SESSION}/usage", sessions.usage, LOOK, query=sessions.UsageQuery, answer=list[UsageSample]),
            _raw("GET", f"{_SESSION}/execs", runs.list_runs, LOOK, query=runs.RunsQuery, answer=runs.RunsBody),
            _raw("GET", f"{_SESSION}/shells", runs.list_shells, LOOK, answer=runs.ShellsBody),
            _raw(
                *("GET", f"{_SESSION}/processes", runs.list_processes, LOOK),
                query=runs.ProcessesQuery,
                answer=runs.ProcessesBody,
            ),
            _raw("GET", f"{_SESSION}/ports", runs.list_ports, LOOK, answer=runs.PortsBody),
        ),
        # Runs of a session
        _websocket(f"{_SESSION}/exec/ws", exec_ws, ACT, messages=_EXEC_SOCKET),
        _websocket(
            *(f"{_SESSION}/terminal/ws", terminal_ws, ACT),
            query=terminal_messages.TerminalQuery,
            messages=_TERMINAL_SOCKET,
        ),
        *_failing(
            _BEGINS,
            _raw(
                *("POST", f"{_SESSION}/exec", runs.execute, ACT),
                body=runs.ExecRequest,
                answer=ExecResultBody,
                errors=(*_IN_SHELL, errors.CommandTimeout),
            ),
            _raw(
                *("POST", f"{_SESSION}/exec/stream", runs.execute_and_follow, ACT),
                head=runs.FollowHead,
                body=runs.ExecRequest,
                answer_type=_EVENTS,
                gives=_NAMED_RUN,
                errors=(*_IN_SHELL, errors.ExecNotFound),
                messages=_RUN_EVENTS,
            ),
            _raw(
                *("POST", f"{_SESSION}/processes", runs.start_process, ACT),
                body=runs.ProcessRequest,
                answer=runs.ProcessBody,
                statuses=_CREATED,
            ),
        ),
        *_failing(
            _AWAKE,
            _raw(
                *("POST", f"{_SESSION}/shells", runs.open_shell, ACT),
                body=runs.ShellRequest,
                answer=runs.ShellBody,
                statuses=_CREATED,
                errors=(errors.Conflict, errors.ShellFailed),
            ),
            _raw(
                *("DELETE", f"{_SESSION}/shells/{{name}}", runs.close_shell, ACT),
                answer=sessions.DoneBody,
                errors=(errors.ShellNotFound,),
            ),
        ),
        *_failing(
            (errors.SessionExpired, errors.ExecNotFound, errors.ExecGone),
            _raw("GET", _RUN, runs.get_run, LOOK, answer=runs.RunBody),
            _raw("GET", _PROCESS, runs.get_process, LOOK, answer=runs.ProcessBody),
            _raw(
                *("GET", f"{_RUN}/output", runs.read_output, LOOK),
                query=OutputQuery,
                answer=OutputBody,
                answer_type=OCTETS,
                gives=_OFFSETS,
            ),
            _raw(
                *("GET", f"{_RUN}/stream", runs.follow_run, LOOK),
                query=runs.FollowQuery,
                head=runs.FollowHead,
                answer_type=_EVENTS,
                gives=_NAMED_RUN,
                messages=_RUN_EVENTS,
            ),
            _raw(
                *("GET", f"{_PROCESS}/logs", runs.process_logs, LOOK),
                query=runs.LogsQuery,
                head=runs.FollowHead,
                answer=OutputBody,
                answer_type=(OCTETS, _EVENTS),
                gives=(*_OFFSETS, *_NAMED_RUN),
                messages=_RUN_EVENTS,
            ),
            _raw(
                *("POST", f"{_RUN}/wait", runs.wait_for_run, LOOK),
                body=runs.WaitRequest,
                answer=runs.RunWaitedBody,
            ),
            _raw(
                *("POST", f"{_PROCESS}/wait", runs.wait_for_process, LOOK),
                body=runs.WaitRequest,
                answer=runs.WaitedBody,
            ),
            *_failing(
                (errors.SessionPaused,),
                _raw("POST", f"{_RUN}/cancel", runs.cancel_run, ACT, body=runs.CancelRequest, answer=runs.RunBody),
                _raw("POST", f"{_PROCESS}/kill", runs.kill_process, ACT, answer=runs.ProcessBody),
                _raw("DELETE", _PROCESS, runs.kill_process, ACT, answer=runs.ProcessBody),
            ),
            *_failing(
                (errors.SessionPaused, errors.ExecEnded, errors.Conflict),
                _raw("POST", f"{_RUN}/signal", runs.send_signal, ACT, body=runs.SignalRequest, answer=_DONE),
                _raw("POST", f"{_RUN}/stdin", runs.send_stdin, ACT, body=runs.StdinRequest, answer=_DONE),
                _raw("POST", f"{_RUN}/resize", runs.resize, ACT, body=runs.TerminalRequest, answer=_DONE),
                _raw("POST", f"{_PROCESS}/signal", runs.process_signal, ACT, body=runs.SignalRequest, answer=_DONE),
                _raw("POST", f"{_PROCESS}/stdin", runs.process_stdin, ACT, body=runs.StdinRequest, answer=_DONE),
                _raw("POST", f"{_PROCESS}/resize", runs.process_resize, ACT, body=runs.TerminalRequest, answer=_DONE),
            ),
        ),
        # Files
        *(route for each in _PLACES for route in _file_routes(*each)),
        # Workspaces
        _json(
            *("GET", WORKSPACES, workspaces.list_workspaces, FIND),
            query=workspaces.WorkspacesQuery,
            answer=workspaces.WorkspacesBody,
        ),
        *_failing(
            _MADE,
            _json(
                *("POST", WORKSPACES, workspaces.create, MAKE),
                body=workspaces.WorkspaceRequest,
                answer=workspaces.WorkspaceBody,
                statuses=_CREATED,
            ),
            _json(
                *("PUT", _WORKSPACE, workspaces.put, MAKE),
                body=workspaces.WorkspacePutRequest,
                answer=workspaces.WorkspaceBody,
                statuses=(200, 201),
                errors=(errors.LimitInUse,),
            ),
            _json(
                *("PATCH", _WORKSPACE, workspaces.update, MAKE),
                body=workspaces.WorkspacePatchRequest,
                answer=workspaces.WorkspaceBody,
                errors=(errors.LimitInUse,),
            ),
            _raw(
                *("POST", f"{_WORKSPACE}/import", workspaces.import_archive, MAKE),
                query=workspaces.ImportQuery,
                body_type=(*_ARCHIVES, contents.BYTES),
                answer=archives.UnpackedBody,
                statuses=_CREATED,
            ),
        ),
        *_failing(
            (errors.WorkspaceBusy,),
            _json(
                *("GET", _WORKSPACE, workspaces.get, FIND),
                query=workspaces.WorkspaceQuery,
                answer=workspaces.WorkspaceBody,
            ),
            _json(
                *("DELETE", _WORKSPACE, workspaces.delete, MAKE), query=workspaces.DeleteQuery, answer=sessions.DoneBody
            ),
            _raw(
                *("GET", f"{_WORKSPACE}/export", workspaces.export, FIND),
                query=workspaces.ExportQuery,
                answer_type=_PACKED,
                gives=_NAMED,
                errors=(errors.PermissionDenied,),
            ),
            *_failing(
                _FILE,
                _raw(
                    *("GET", f"{_WORKSPACE}/fs", workspaces.list_files, FIND),
                    query=workspaces.FilesQuery,
                    answer=workspaces.FilesBody,
                ),
                _raw(
                    *("GET", f"{_WORKSPACE}/fs/download", workspaces.download, FIND),
                    query=workspaces.DownloadQuery,
                    answer_type=_PACKED,
                    gives=_NAMED,
                ),
            ),
        ),
    )
)
