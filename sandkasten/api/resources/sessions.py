"""Create, read, list, change and destroy sessions: JSON in, one question to the supervisor, JSON out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import scrub
from sandkasten.api.http.key_scope import owned_patch, owned_query, owned_spec, within_reach
from sandkasten.api.resources import schemas
from sandkasten.api.resources.fields import bad_query, query_integer
from sandkasten.log import rfc3339, rfc3339_or_none
from sandkasten.model import FOREVER_S, Pause, Session, SessionPatch, Status
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.listing import LabelSelector, Place, SessionQuery, parse_cursor
from sandkasten.model.node import Part, Unavailable

MAX_LIST = 10_000
DEFAULT_LIST = 1000
NEXT_CURSOR = "x-next-cursor"
"""Header with the `cursor` of the next page; absent on the last one."""

_NOT_A_TOKEN = re.compile(r"[^A-Za-z0-9_.-]")


async def create(exchange: Exchange) -> Answer:
    """POST /v1/sessions"""
    request = schemas.parse(await exchange.read_json_body(), schemas.CreateRequest)
    spec = request.to_spec(
        default_limits=exchange.settings.default_limits, key_header=exchange.header(b"idempotency-key")
    )
    session = await exchange.supervisor.create(owned_spec(exchange.key, spec))
    headers = (("server-timing", server_timing(session.timings_ms)),) if session.timings_ms else ()
    return json_answer(session_view(session), status=201, headers=headers)


async def get(exchange: Exchange) -> Answer:
    """GET /v1/sessions/{id}; an ended session is an answer, not an error."""
    return json_answer(session_view(await exchange.supervisor.get(exchange.session_id)))


async def list_sessions(exchange: Exchange) -> Answer:
    """GET /v1/sessions?status=&label=&limit=&cursor="""
    query = SessionQuery(
        statuses=_statuses(exchange.query.get("status")),
        labels=tuple(_label(text) for text in exchange.query_all("label")),
        after=_place(exchange.query.get("cursor")),
        limit=query_integer(exchange, "limit", default=DEFAULT_LIST, high=MAX_LIST),
    )
    page = await exchange.supervisor.find(owned_query(exchange.key, query))
    headers = () if page.next is None else ((NEXT_CURSOR, page.next.cursor),)
    sessions = within_reach(exchange.key, page.sessions)
    return json_answer([session_view(session) for session in sessions], headers=headers)


async def update(exchange: Exchange) -> Answer:
    """PATCH /v1/sessions/{id}"""
    request = schemas.parse(await exchange.read_json_body(), schemas.PatchRequest)
    current = exchange.settings.default_limits
    if request.limits is not None:
        current = (await exchange.supervisor.get(exchange.session_id)).limits
    patch: SessionPatch = owned_patch(exchange.key, request.to_patch(current=current))
    return json_answer(session_view(await exchange.supervisor.update(exchange.session_id, patch)))


async def pause(exchange: Exchange) -> Answer:
    """POST /v1/sessions/{id}/pause; an empty body is one without fields."""
    request = schemas.parse(await exchange.read_json_body(), schemas.PauseRequest)
    return json_answer(session_view(await exchange.supervisor.pause(exchange.session_id, request.to_spec())))


async def resume(exchange: Exchange) -> Answer:
    """POST /v1/sessions/{id}/resume"""
    return json_answer(session_view(await exchange.supervisor.resume(exchange.session_id)))


async def destroy(exchange: Exchange) -> Answer:
    """DELETE /v1/sessions/{id}; on an ended session it changes nothing."""
    await exchange.supervisor.destroy(exchange.session_id)
    return json_answer({"ok": True})


async def stats(exchange: Exchange) -> Answer:
    """GET /v1/sessions/{id}/stats; a counter that the kernel does not offer is null."""
    return json_answer(attrs.asdict(await exchange.supervisor.stats(exchange.session_id)))


async def diagnostics(exchange: Exchange) -> Answer:
    """GET /v1/sessions/{id}/diagnostics; a part that can't be had says why, and so does one of an ended session."""
    found = await exchange.supervisor.diagnose(exchange.session_id)
    parts = {name: _part_view(part) for name, part in found.parts.items()}
    return json_answer({"time": rfc3339(found.time), "session": session_view(found.session), **parts})


def _part_view(part: Part) -> dict[str, Any]:  # JSON values
    return {"unavailable": part.reason} if isinstance(part, Unavailable) else _plain(part)


def _plain(value: Any) -> Any:  # JSON values, and times
    """Return the same with times as text, and texts that any reader of JSON takes."""
    match value:
        case datetime():
            return rfc3339(value)
        case str():
            return scrub(value)
        case Mapping():
            return {str(name): _plain(member) for name, member in value.items()}
        case list() | tuple():
            return [_plain(member) for member in value]
        case _:
            return value


def session_view(session: Session) -> dict[str, Any]:  # JSON values
    """Return a session as clients see it."""
    view = {
        "id": session.id,
        "image": session.image,
        "status": session.status.value,
        "cwd": session.cwd,
        "created_at": rfc3339(session.created_at),
        "expires_at": rfc3339_or_none(session.expires_at),
        "last_activity": rfc3339(session.last_activity),
        "acquire_source": session.acquire_source,
        "ttl_seconds": _seconds(session.ttl_s),
        "idle_timeout_seconds": _seconds(session.ttl_s),
        "max_lifetime_seconds": _seconds(session.max_lifetime_s),
        "limits": attrs.asdict(session.limits),
        **attrs.asdict(session.options),
        "labels": dict(session.labels),
        "epoch": session.epoch,
    }
    optional = {
        "workspace_id": session.workspace_id,
        "key_id": session.key_id,
        "acquire_detail": session.acquire_detail,
        "reason": session.reason,
        "end_reason": None if session.end_reason is None else session.end_reason.value,
        "pause": None if session.pause is None else pause_view(session.pause),
    }
    return view | {name: value for name, value in optional.items() if value is not None}


def _seconds(span_s: float) -> float | None:
    """Return a span as clients see it: whole seconds as such, one without end as null."""
    if span_s == FOREVER_S:
        return None
    return int(span_s) if span_s.is_integer() else span_s


def pause_view(pause: Pause) -> dict[str, Any]:  # JSON values
    return attrs.asdict(pause) | {"since": rfc3339(pause.since)}


def server_timing(timings_ms: Mapping[str, float]) -> str:
    """Return phases as a `Server-Timing` value (W3C Server Timing §3)."""
    return ", ".join(f"{_NOT_A_TOKEN.sub('_', phase)};dur={ms:.3f}" for phase, ms in timings_ms.items())


def _statuses(text: str | None) -> frozenset[Status]:
    if text is None:
        return LIVE
    if text == "all":
        return frozenset(Status)
    try:
        return frozenset({Status(text)})
    except ValueError:
        choices = ", ".join([*Status, "all"])
        raise bad_query("status", f"must be one of {choices}") from None


def _label(text: str) -> LabelSelector:
    name, is_equal, value = text.partition("=")
    if not name:
        raise bad_query("label", "must be NAME or NAME=VALUE")
    return LabelSelector(name, value if is_equal else None)


def _place(text: str | None) -> Place | None:
    try:
        return None if text is None else parse_cursor(text)
    except ValueError as problem:
        raise bad_query("cursor", str(problem)) from None
