"""Run a command: one answer at its end, or a stream of events. Both raw ASGI: no time limit but the command's own.

A client that leaves a blocking call cancels its command and one that leaves a stream lets it go on, unless it said
otherwise. Events are made in `runevents.py`, results in `execview.py`.
"""

from __future__ import annotations

import functools

import attrs

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.run_events import Position, RunEvents, Transcript
from sandkasten.api.resources.run_views import end_view, is_timeout_error, output_view, timeout_error
from sandkasten.api.resources.schemas import ExecRequest, bad_fields, parse
from sandkasten.model import ExecSpec, OnDisconnect
from sandkasten.model.run import make_exec_id


async def run(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/exec"""
    request, spec = await _read(exchange)
    when_left = request.when_left(OnDisconnect.CANCEL)
    work = functools.partial(exchange.supervisor.exec, exchange.session_id, spec, on_disconnect=when_left)
    result = await exchange.until_disconnect(work)
    output_format = request.output_format
    view = end_view(result.end) | await output_view(result, output_format)
    if is_timeout_error(result.end, output_format):
        raise timeout_error(result.end, view)
    await exchange.answer(json_answer(view))


async def stream(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/exec/stream; with `Last-Event-ID` it goes on with a run that was begun before."""
    request, spec = await _read(exchange)
    position = last_event_id(exchange)
    if position is not None and spec.exec_id is None:
        raise bad_fields(exec_id="is required with Last-Event-ID")
    if spec.exec_id is None:
        spec = attrs.evolve(spec, exec_id=make_exec_id(), has_new_id=True)
    supervisor, session_id, exec_id = exchange.supervisor, exchange.session_id, str(spec.exec_id)
    if position is None:
        when_left = request.when_left(OnDisconnect.DETACH)
        open_run = functools.partial(supervisor.open_exec, session_id, spec, on_disconnect=when_left)
    else:
        open_run = functools.partial(supervisor.attach_exec, session_id, exec_id, after=position.sequence)
    output_format = request.output_format
    transcript = Transcript(output_format, position or Position())
    events = RunEvents(exchange, open_run, transcript, output_format, headers=(("x-exec-id", exec_id),))
    await exchange.until_disconnect(events.run)


def last_event_id(exchange: Exchange) -> Position | None:
    """Return where a stream is to go on: the header's position, if there is one. Raises `InvalidRequest`."""
    text = exchange.header(b"last-event-id")
    try:
        return Position.parse(text) if text else None
    except ValueError as error:
        raise bad_fields(last_event_id=str(error)) from None


async def _read(exchange: Exchange) -> tuple[ExecRequest, ExecSpec]:
    request = parse(await exchange.read_json_body(), ExecRequest)
    return request, request.to_spec(exchange.settings)
