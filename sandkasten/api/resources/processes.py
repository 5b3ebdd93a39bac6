"""Background processes of a session: start, look, read and follow logs, reach into, wait, kill; and listening ports.

A process is a run with its own names in the URL: what `execs.py` does to runs is done here to processes only.

Named persistent shells of a session: open, list, close.
"""

from __future__ import annotations

import functools

import attrs

from sandkasten.api.http.errors import json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources import execs
from sandkasten.api.resources.execs import exec_id, find_runs, views_of
from sandkasten.api.resources.fields import bad_query, query_flag
from sandkasten.api.resources.output import answer_output
from sandkasten.api.resources.run_views import process_view, shell_view
from sandkasten.api.resources.runschemas import ProcessRequest, ShellRequest, WaitRequest
from sandkasten.api.resources.schemas import clamp_timeout, parse
from sandkasten.model import ExecInfo, ExecKind
from sandkasten.model.errors import ExecNotFound


async def start(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes"""
    request = parse(await exchange.read_json_body(), ProcessRequest)
    process = await exchange.supervisor.start_process(exchange.session_id, request.to_spec(exchange.settings))
    await exchange.answer(json_answer(process_view(process), status=201))


async def list_processes(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/processes?state=&limit="""
    runs = await find_runs(exchange, ExecKind.PROCESS)
    await exchange.answer(json_answer({"processes": await views_of(runs, process_view)}))


async def get(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/processes/{exec_id}"""
    await exchange.answer(json_answer(process_view(await _process(exchange))))


async def logs(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/processes/{exec_id}/logs?stream=&offset=&limit=&encoding=&follow="""
    await _process(exchange)
    if not query_flag(exchange, "follow"):
        await answer_output(exchange, exec_id(exchange))
        return
    for name in ("offset", "limit"):
        if name in exchange.query:
            raise bad_query(name, "must be absent with follow: the place is told by Last-Event-ID or after")
    await execs.stream(exchange)


async def send_stdin(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes/{exec_id}/stdin"""
    await _process(exchange)
    await execs.send_stdin(exchange)


async def send_signal(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes/{exec_id}/signal"""
    await _process(exchange)
    await execs.send_signal(exchange)


async def resize(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes/{exec_id}/resize"""
    await _process(exchange)
    await execs.resize(exchange)


async def kill(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes/{exec_id}/kill, or DELETE of the process; it and all it started end at once."""
    await _process(exchange)
    process = await exchange.supervisor.cancel_exec(exchange.session_id, exec_id(exchange), now=True)
    await exchange.answer(json_answer(process_view(process)))


async def wait(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/processes/{exec_id}/wait"""
    request = parse(await exchange.read_json_body(), WaitRequest)
    condition = request.to_condition()
    await _process(exchange)
    work = functools.partial(
        exchange.supervisor.wait_process,
        exchange.session_id,
        exec_id(exchange),
        condition,
        timeout_s=clamp_timeout(request.timeout_ms, exchange.settings) / 1000,
    )
    waited = await exchange.until_disconnect(work)
    line = {} if waited.line is None else {"line": waited.line}
    await exchange.answer(json_answer({"happened": waited.happened, "process": process_view(waited.run)} | line))


async def ports(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/ports"""
    found = await exchange.supervisor.ports(exchange.session_id)
    await exchange.answer(json_answer({"ports": [attrs.asdict(port) for port in found]}))


async def _process(exchange: Exchange) -> ExecInfo:
    """Return the process that the path names. Raises `ExecNotFound` for a run of another kind, too."""
    run = await exchange.supervisor.get_exec(exchange.session_id, exec_id(exchange))
    if run.kind is not ExecKind.PROCESS:
        raise ExecNotFound("no such process", process_id=run.exec_id)
    return run


async def open_shell(exchange: Exchange) -> None:
    """POST /v1/sessions/{id}/shells"""
    request = parse(await exchange.read_json_body(), ShellRequest)
    shell = await exchange.supervisor.open_shell(exchange.session_id, request.to_spec())
    await exchange.answer(json_answer(shell_view(shell), status=201))


async def list_shells(exchange: Exchange) -> None:
    """GET /v1/sessions/{id}/shells; the default one first."""
    shells = await exchange.supervisor.shells(exchange.session_id)
    await exchange.answer(json_answer({"shells": [shell_view(shell) for shell in shells]}))


async def close_shell(exchange: Exchange) -> None:
    """DELETE /v1/sessions/{id}/shells/{name}"""
    await exchange.supervisor.close_shell(exchange.session_id, exchange.params["name"])
    await exchange.answer(json_answer({"ok": True}))
