"""Runs as a resource: look at them, read their output by offset or as events, and reach into those that run.

Raw ASGI: clients look at runs often, and a run may keep an answer waiting. Nothing here ends a run because a client
left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import trio

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.fields import bad_query, query_choice, query_flag, query_integer
from sandkasten.api.resources.output import answer_output
from sandkasten.api.resources.run_events import Position, RunEvents, Transcript
from sandkasten.api.resources.run_views import run_view
from sandkasten.api.resources.runs import last_event_id
from sandkasten.api.resources.runschemas import CancelRequest, SignalRequest, StdinRequest
from sandkasten.api.resources.schemas import OutputFormat, TerminalRequest, parse
from sandkasten.model import ExecInfo, ExecKind, ExecState, Stream

DEFAULT_LIST = 1000
MAX_LIST = 10_000
VIEWS_AT_ONCE = 100


async def list_runs(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/execs?kind=&state=&limit="""
    runs = await find_runs(exchange, query_choice(exchange, "kind", *ExecKind))
    await exchange.answer(json_answer({"execs": await views_of(runs, run_view)}))


async def find_runs(exchange: Exchange, kind: str | None) -> Sequence[ExecInfo]:
    """Return the latest runs of a kind (None: of all) that the query's `state` and `limit` ask for, oldest first."""
    state = query_choice(exchange, "state", *ExecState)
    limit = query_integer(exchange, "limit", default=DEFAULT_LIST, high=MAX_LIST)
    runs = await exchange.supervisor.execs(exchange.session_id)
    return [run for run in runs if kind in (None, run.kind) and state in (None, run.state)][-limit:]


async def views_of(
    runs: Sequence[ExecInfo], view: Callable[[ExecInfo], dict[str, Any]]
) -> list[dict[str, Any]]:  # JSON
    """Return what clients see of runs, giving other tasks their turns meanwhile."""
    views = []
    for start in range(0, len(runs), VIEWS_AT_ONCE):
        views += [view(run) for run in runs[start : start + VIEWS_AT_ONCE]]
        await trio.lowlevel.checkpoint()
    return views


async def get(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/execs/{exec_id}"""
    run = await exchange.supervisor.get_exec(exchange.session_id, exec_id(exchange))
    await exchange.answer(json_answer(run_view(run)))


async def output(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/execs/{exec_id}/output?stream=&offset=&limit=&encoding="""
    await answer_output(exchange, exec_id(exchange))


async def stream(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/execs/{exec_id}/stream?after=&stream=&encoding=&raw_output=&on_timeout="""
    await exchange.read_body(limit_bytes=exchange.settings.max_request_bytes)  # a GET's body means nothing
    position = last_event_id(exchange) or _after(exchange)
    only = query_choice(exchange, "stream", *Stream)
    output_format = OutputFormat(
        is_base64=query_choice(exchange, "encoding", "utf-8", "base64") == "base64",
        is_raw=query_flag(exchange, "raw_output"),
        is_timeout_error=query_choice(exchange, "on_timeout", "error", "result") != "result",
    )
    wanted = exec_id(exchange)
    open_run = functools.partial(exchange.supervisor.attach_exec, exchange.session_id, wanted, after=position.sequence)
    transcript = Transcript(output_format, position, only=None if only is None else Stream(only))
    events = RunEvents(exchange, open_run, transcript, output_format, headers=(("x-exec-id", wanted),))
    await exchange.until_disconnect(events.run)


async def send_signal(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/execs/{exec_id}/signal"""
    request = parse(await exchange.read_json_body(), SignalRequest)
    await exchange.supervisor.signal_exec(exchange.session_id, exec_id(exchange), request.signal)
    await exchange.answer(json_answer({"ok": True}))


async def cancel(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/execs/{exec_id}/cancel; answers with the run once it has ended."""
    request = parse(await exchange.read_json_body(), CancelRequest)
    run = await exchange.supervisor.cancel_exec(exchange.session_id, exec_id(exchange), now=bool(request.now))
    await exchange.answer(json_answer(run_view(run)))


async def send_stdin(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/execs/{exec_id}/stdin; answers once the run has taken it."""
    body = await exchange.read_json_body(limit_bytes=exchange.settings.max_json_bytes)
    request = parse(body, StdinRequest)
    work = functools.partial(
        exchange.supervisor.send_stdin,
        exchange.session_id,
        exec_id(exchange),
        request.content,
        close=bool(request.close),
    )
    await exchange.until_disconnect(work)
    await exchange.answer(json_answer({"ok": True}))


async def resize(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/execs/{exec_id}/resize"""
    request = parse(await exchange.read_json_body(), TerminalRequest)
    await exchange.supervisor.resize_exec(exchange.session_id, exec_id(exchange), request.size)
    await exchange.answer(json_answer({"ok": True}))


def exec_id(exchange: Exchange) -> str:
    """Return the id of the run that the path names."""
    return exchange.params["exec_id"]


def _after(exchange: Exchange) -> Position:
    try:
        return Position.parse(exchange.query.get("after", "0"))
    except ValueError as error:
        raise bad_query("after", str(error)) from None
