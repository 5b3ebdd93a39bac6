"""E2B's code interpreter: contexts, and code that runs in them.

A context is a process of the sandbox, `kernel_program.py`, which keeps a Jupyter kernel and speaks lines on its input
and output. Its id is the process's without `KERNEL_PREFIX`. So contexts outlive the daemon as processes do, and nothing
of them is stored here. What comes of such a process is the sandbox's word: lines are bounded, are passed on only if
they are JSON and bear the id of the request, and say nothing but what the code inside could have printed.

The default context is started at the first code, and beside the answer where a sandbox is made of the image that the
template leads to whose name the SDK takes by itself. Members of a session pool of that image have it running
(`warm_pools`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import attrs
import orjson
from trio import Lock, move_on_after

from sandkasten.api.e2b.connect import decode_message, read_message
from sandkasten.api.e2b.context import HOMES, KERNEL_PREFIX, USER, Command, EnvdRequest
from sandkasten.api.e2b.sandboxes import E2bTerms
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.json import check_value_count, encode_json
from sandkasten.api.resources.fields import Environment
from sandkasten.config import PoolSize
from sandkasten.errors import (
    CommandTimeout,
    ExecEnded,
    ExecGone,
    ExecNotFound,
    InvalidRequest,
    MethodNotAllowed,
    NotInstalled,
    QuotaExceeded,
    RouteNotFound,
    SandkastenError,
)
from sandkasten.model import ExecInfo, ExecState, ProcessSpec, Stream, StreamsMode, WarmProcess
from sandkasten.supervisor import ExecStream, Supervisor

INTERPRETER_PORT = "49999"
MAX_CONTEXTS = 20
MAX_LINE_BYTES = 8 * 1024 * 1024 + 1024
"""Longest line of a context: that of `kernel_program.py`, and the id before it."""

START_S = 60.0
_LEAVE_S = 10.0
_DEFAULT = "default-"
_PROGRAM = Path(__file__).with_name("kernel_program.py").read_text()
_START = "import sys; sys.path[:] = filter(None, sys.path); exec(sys.argv.pop())"
"""Runs a program without what lies in the working directory: a `json.py` of the user's is not meant."""

_PATH = re.compile(r"/contexts(?:/([A-Za-z0-9-]{1,64})(/restart)?)?\Z")
_KERNEL: Final = b"*"
_LANGUAGES = frozenset({None, "python", "python3"})


@attrs.frozen
class ExecuteMessage:
    """Code to run, in the default context unless one is named."""

    code: str = attrs.field(repr=False)
    context_id: str | None = None
    language: str | None = None
    env_vars: Environment = attrs.field(factory=lambda: Environment({}), repr=False)


@attrs.frozen
class ContextMessage:
    """A context to make."""

    language: str | None = None
    cwd: str | None = None


class Lied(Exception):
    """A context wrote what its program does not write."""


class Interpreter:
    """Contexts of all sandboxes. Holds nothing but a lock for each sandbox whose default context is looked for."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    async def serve(self, request: EnvdRequest) -> Answer | None:
        """Answer a request to the interpreter's port."""
        exchange = request.exchange
        path, method = exchange.scope["path"], exchange.method
        exchange.route = f"e2b interpreter {path.split('/')[1][:20]}"
        if path == "/execute" and method == "POST":
            return await self._execute(request)
        if path == "/health" and method in ("GET", "HEAD"):
            return Answer(204, b"")
        if (match := _PATH.match(path)) is None:
            raise RouteNotFound("the code interpreter has no such path")
        match method, *match.groups():
            case "GET", None, None:
                runs = await _contexts(request.supervisor, request.session.id)
                return json_answer([_shown(request, run) for run in runs])
            case "POST", None, None:
                return await self._make(request)
            case "DELETE", str(name), None:
                return await _remove(request, name)
            case "POST", str(name), str():
                return await _restart(request, name)
        raise MethodNotAllowed("no such method here", allow="GET, POST, DELETE")

    async def warm(self, request: EnvdRequest) -> None:
        """Have the default context started, without waiting until it answers; whether it does is seen at first use."""
        with suppress(SandkastenError):
            await self._default(request, wait=False)

    # Requests

    async def _execute(self, request: EnvdRequest) -> Answer | None:
        exchange, supervisor, session_id = request.exchange, request.supervisor, request.session.id
        asked = read_message(await _body(request), ExecuteMessage)
        _check_language(asked.language)
        if asked.context_id is None:
            run = await self._default(request, wait=True)
        else:
            run = await _find(supervisor, session_id, asked.context_id)
        name = secrets.token_hex(8)
        has_ended = False

        async def follow() -> bytes | None:
            """Pass the answer on, and return the line that its context did not write."""
            order = {"op": "run", "id": name, "code": asked.code, "env": asked.env_vars}
            async with supervisor.attach_exec(session_id, run.exec_id, after=run.last_sequence) as stream:
                await _send(supervisor, run, session_id, order)
                await exchange.start(200, (("content-type", "application/x-ndjson"),))
                async with aclosing(_answers(stream, name.encode())) as answers:
                    async for kind, line in answers:
                        if kind == "end":
                            return None
                        await exchange.write(line + b"\n")
                cause = (await stream.wait_end()).cause.value
            reason = ""
            with suppress(SandkastenError, Lied):  # its output may be gone by now
                _, reason = await _first_word(supervisor, session_id, run)
            return _error("KernelGone", f"the context has ended: {reason or cause}")

        async def work() -> None:
            nonlocal has_ended
            try:
                last = await follow()
            except Lied as lie:  # not followed any more, so that nothing holds up its end
                await supervisor.cancel_exec(session_id, run.exec_id, now=True)
                last = _error("KernelLied", f"{lie}; the context was ended")
            has_ended = True
            if last is not None:
                await exchange.write(last)

        async with supervisor.attend(session_id):
            try:
                await exchange.until_disconnect(work)
            finally:
                if not has_ended:  # the client left
                    with move_on_after(_LEAVE_S, shield=True), suppress(SandkastenError):
                        await _send(supervisor, run, session_id, {"op": "interrupt", "id": name})
        await exchange.finish()
        return None

    async def _make(self, request: EnvdRequest) -> Answer:
        asked = read_message(await _body(request), ContextMessage)
        _check_language(asked.language)
        run = await _start(request, secrets.token_hex(8), await request.place(asked.cwd or ""), wait=True)
        return json_answer(_shown(request, run))

    async def _default(self, request: EnvdRequest, *, wait: bool) -> ExecInfo:
        """Return the default context, which is started if there is none."""
        session_id = request.session.id
        lock = self._locks.setdefault(session_id, Lock())
        async with lock:
            for run in await _contexts(request.supervisor, session_id):
                if run.exec_id.startswith(KERNEL_PREFIX + _DEFAULT):
                    return run
            return await _start(request, _DEFAULT + secrets.token_hex(8), await request.home(), wait=wait)


async def _remove(request: EnvdRequest, name: str) -> Answer:
    run = await _find(request.supervisor, request.session.id, name)
    await request.supervisor.cancel_exec(request.session.id, run.exec_id, now=True)
    return Answer(204, b"")


async def _restart(request: EnvdRequest, name: str) -> Answer:
    supervisor, session_id = request.supervisor, request.session.id
    run = await _find(supervisor, session_id, name)
    order = secrets.token_hex(8)
    with move_on_after(START_S):
        async with supervisor.attach_exec(session_id, run.exec_id, after=run.last_sequence) as stream:
            await _send(supervisor, run, session_id, {"op": "restart", "id": order})
            async with aclosing(_answers(stream, order.encode())) as answers:
                async for kind, _ in answers:
                    if kind == "restarted":
                        return Answer(204, b"")
        raise ExecNotFound(f"context {name} ended while it was restarted")
    raise CommandTimeout(f"context {name} did not start anew within {START_S:.0f} s")


async def _body(request: EnvdRequest) -> Mapping[str, Any]:
    exchange = request.exchange
    return decode_message(await exchange.read_json_body(limit_bytes=exchange.settings.max_json_bytes))


def _check_language(language: str | None) -> None:
    if (language and language.lower()) not in _LANGUAGES:
        raise InvalidRequest(f"code in {language!r:.40} can't be run", language="must be python")


# Contexts -------------------------------------------------------------------------------------------------------------


async def _contexts(supervisor: Supervisor, session_id: str) -> Sequence[ExecInfo]:
    return [
        run
        for run in await supervisor.execs(session_id)
        if run.exec_id.startswith(KERNEL_PREFIX) and run.state is ExecState.RUNNING
    ]


async def _find(supervisor: Supervisor, session_id: str, name: str) -> ExecInfo:
    for run in await _contexts(supervisor, session_id):
        if run.exec_id == KERNEL_PREFIX + name:
            return run
    raise ExecNotFound(f"context {name[:64]!r} not found")


def _shown(request: EnvdRequest, run: ExecInfo) -> Mapping[str, str]:
    kept = request.commands.get(request.session.id, run.exec_id)
    cwd = None if kept is None else kept.cwd
    return {"id": run.exec_id.removeprefix(KERNEL_PREFIX), "language": "python", "cwd": cwd or "/home/user"}


def _context(name: str, cwd: str, user: str | None) -> ProcessSpec:
    return ProcessSpec(
        argv=("python3", "-c", _START, _PROGRAM),
        cwd=cwd,
        user=user,
        process_id=KERNEL_PREFIX + name,
        streams=StreamsMode.SEPARATE,
    )


WARM_CONTEXT = WarmProcess(
    _context(_DEFAULT + "warm", HOMES[USER], USER), ready=r'^\* \{"type": "ready"', within_s=START_S
)
"""The default context of a sandbox that comes of a pool."""


def warm_pools(pools: Mapping[str, PoolSize], terms: E2bTerms) -> Mapping[str, WarmProcess]:
    """Return the context that members of pools have running, by the names of those pools whose members are sandboxes of
    E2B's API with a kernel."""
    return {name: WARM_CONTEXT for name, pool in pools.items() if pool.account == USER and terms.has_kernel(name)}


async def _start(request: EnvdRequest, name: str, cwd: str, *, wait: bool) -> ExecInfo:
    """Start a context, and with `wait` wait until its kernel answers.

    Raises:
        NotInstalled: the image has no Python with jupyter_client and ipykernel.
        CommandTimeout, QuotaExceeded, InvalidRequest.
    """
    supervisor, session_id = request.supervisor, request.session.id
    if len(await _contexts(supervisor, session_id)) >= MAX_CONTEXTS:
        raise QuotaExceeded(f"a sandbox has at most {MAX_CONTEXTS} code contexts", limit="contexts")
    run = await supervisor.start_process(session_id, _context(name, cwd, request.user))
    request.commands.keep(session_id, run.exec_id, Command("python3", (), {}, cwd))
    if not wait:
        return run
    try:
        await _wait_ready(supervisor, session_id, run)
    except BaseException:
        with move_on_after(_LEAVE_S, shield=True), suppress(SandkastenError):
            await supervisor.cancel_exec(session_id, run.exec_id, now=True)
        raise
    return run


async def _wait_ready(supervisor: Supervisor, session_id: str, run: ExecInfo) -> None:
    with move_on_after(START_S):
        try:
            kind, reason = await _first_word(supervisor, session_id, run)
        except Lied as lie:
            kind, reason = "", str(lie)
        if kind == "ready":
            return
        reason = reason or "no Python 3.8 or newer"
        raise NotInstalled(f"code needs python3 with jupyter_client and ipykernel in the image: {reason}")
    raise CommandTimeout(f"the kernel did not answer within {START_S:.0f} s")


async def _first_word(supervisor: Supervisor, session_id: str, run: ExecInfo) -> tuple[str, str]:
    """Return what a context says first of its kernel: `ready`, or `failed` and the reason; nothing if it ends without
    a word. Raises `Lied`."""
    async with (
        supervisor.attach_exec(session_id, run.exec_id) as stream,
        aclosing(_answers(stream, _KERNEL)) as answers,
    ):
        async for kind, line in answers:
            return kind, str(orjson.loads(line).get("reason", ""))[:500]
    return "", ""


# Lines ----------------------------------------------------------------------------------------------------------------


async def _send(supervisor: Supervisor, run: ExecInfo, session_id: str, order: Mapping[str, Any]) -> None:
    """Send a line, behind the end of one that may be there cut off. Raises `ExecNotFound` if the context has ended."""
    try:
        await supervisor.send_stdin(session_id, run.exec_id, b"\n" + encode_json(order) + b"\n")
    except (ExecEnded, ExecGone):
        raise ExecNotFound(f"context {run.exec_id.removeprefix(KERNEL_PREFIX)} has ended") from None


async def _answers(stream: ExecStream, name: bytes) -> AsyncGenerator[tuple[str, bytes]]:
    """Yield the type and the text of the lines with an id. Raises `Lied` for what can't be one, or is too long."""
    buffer, searched = bytearray(), 0
    async for output in stream:
        if output.stream is not Stream.STDOUT:
            continue
        buffer += output.data
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            searched = 0
            to, _, text = line.partition(b" ")
            if to == name:
                yield await _kind_of(text), text
        searched = len(buffer)
        if searched > MAX_LINE_BYTES:
            raise Lied(f"the context wrote a line of more than {MAX_LINE_BYTES} bytes")


async def _kind_of(text: bytes) -> str:
    try:
        await check_value_count(text)
        value = orjson.loads(text)
    except (orjson.JSONDecodeError, InvalidRequest):
        raise Lied("the context wrote a line that is not JSON") from None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise Lied("the context wrote a line without a type")
    return kind


def _error(name: str, value: str) -> bytes:
    return encode_json({"type": "error", "name": name, "value": value, "traceback": ""}) + b"\n"
