"""E2B's API within the one HTTP front: which requests are E2B's, whose they are, and how their errors are spelled.

A request with the header `E2b-Sandbox-Id` belongs to that sandbox, whatever its path. Else `/files` with a signature
belongs to the sandbox whose token signed it, and a path of the control API to that. All others are our own API's.

Keys are ours, as `X-API-KEY`, with their access, label and quotas. A sandbox's services take the sandbox's token, which
acts with the key that made the sandbox, for as long as that key is in force.

`connect.py` has the errors: a sandbox that is gone, or paused, is 502 in the words that E2B's clients look for.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType

import attrs
import trio

from sandkasten import errors, logcontext
from sandkasten.api.e2b import files, filesystem, ports, process
from sandkasten.api.e2b.calls import ServerStream, Unary, call, stream, take_stream
from sandkasten.api.e2b.connect import GONE, SandboxGone
from sandkasten.api.e2b.context import AUTO_RESUME, TEMPLATE, Commands, EnvdRequest, user_of
from sandkasten.api.e2b.control import Control
from sandkasten.api.e2b.interpreter import INTERPRETER_PORT, Interpreter
from sandkasten.api.e2b.sandboxes import (
    SIGNATURE,
    TRAFFIC_TOKEN,
    E2bTerms,
    find_ports,
    find_signer,
    go_on,
    is_paused,
    is_same,
    is_token_of,
    traffic_token,
    wait_while_still,
)
from sandkasten.api.e2b.usage import read_environment, read_metrics_now
from sandkasten.api.http.auth import ACT, FIND, LOOK, MAKE, Authenticator, Needs, admit
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange, one_header, parse_query
from sandkasten.api.http.guard import Scope
from sandkasten.api.http.routing import Route, RouteKind, RouteMatch, RouteTable, Target
from sandkasten.errors import Unauthorized
from sandkasten.model import SESSION_ID, Session, Status
from sandkasten.model.keys import CONFIGURED, CONFIGURED_ID, LOCAL, LOCAL_ID, Access, ApiKey
from sandkasten.model.lifecycle import WHOLE
from sandkasten.model.listing import LabelSelector, SessionQuery

ENVD_PORT = "49983"
_MAX_SIGNERS = 1000


@attrs.frozen
class E2bClaim:
    """A request that is E2B's: of a sandbox's services, or of the control API (`match`)."""

    sandbox_id: str | None = None
    match: RouteMatch | None = None
    is_signed: bool = False


class E2bFront:
    """E2B's API, for requests that the front hands over. `watchers.run` is run by the front's owner."""

    def __init__(self, settings: E2bTerms) -> None:
        self._settings = settings
        self._commands = Commands()
        self.watchers = filesystem.Watchers()
        self._interpreter = Interpreter()
        self._control = _control_routes(Control(settings, self._interpreter, self._commands))
        self._unary: Mapping[str, Unary] = MappingProxyType(
            {
                "/process.Process/List": process.list_processes,
                "/process.Process/SendInput": process.send_input,
                "/process.Process/CloseStdin": process.close_stdin,
                "/process.Process/SendSignal": process.send_signal,
                "/process.Process/Update": process.update,
                "/filesystem.Filesystem/Stat": filesystem.stat_path,
                "/filesystem.Filesystem/ListDir": filesystem.list_dir,
                "/filesystem.Filesystem/MakeDir": filesystem.make_dir,
                "/filesystem.Filesystem/Move": filesystem.move,
                "/filesystem.Filesystem/Remove": filesystem.remove,
                "/filesystem.Filesystem/CreateWatcher": self.watchers.create,
                "/filesystem.Filesystem/GetWatcherEvents": self.watchers.fetch,
                "/filesystem.Filesystem/RemoveWatcher": self.watchers.remove,
            }
        )
        self._streams: Mapping[str, ServerStream] = MappingProxyType(
            {
                "/process.Process/Start": process.start,
                "/process.Process/Connect": process.connect,
                "/filesystem.Filesystem/WatchDir": filesystem.watch_dir,
            }
        )

    def claim(self, scope: Scope, target: Target | None) -> E2bClaim | None:
        """Return what is asked of E2B's API, None for a request of our own."""
        if any(name == b"e2b-sandbox-id" for name, _ in scope["headers"]):
            return E2bClaim(sandbox_id=one_header(scope, b"e2b-sandbox-id") or "")
        if target is None:
            return None
        if target.segments == ("files",):
            return E2bClaim(is_signed=True)
        match = self._control.find(target.segments)
        return None if match is None else E2bClaim(match=match)

    async def serve(self, exchange: Exchange, claim: E2bClaim, authenticator: Authenticator) -> None:
        """Answer a request. Raises what `spell_error` spells."""
        answer: Answer | None
        if claim.match is not None:
            answer = await self._serve_control(exchange, claim.match, authenticator)
        else:
            request = await self._admit_to_sandbox(exchange, claim, authenticator)
            is_gone = False
            try:
                answer = await self._serve_sandbox(request, authenticator)
            except GONE:
                is_gone = True
            except errors.RunnerLost:
                raise SandboxGone(request.session.id, is_alive=True) from None
            if is_gone:
                session = await self._live_session(exchange, request.session.id)
                if session.status is Status.PAUSED:
                    raise errors.Overloaded("the sandbox stands still just now; try again")
                raise SandboxGone(session.id)
        if answer is not None and answer.status == 204:  # no content, and so no length of it: RFC 9110 §8.6
            await exchange.drop_body()
            await exchange.start(204, ())
            await exchange.finish()
        elif answer is not None:
            await exchange.answer(answer)

    # The control API

    async def _serve_control(
        self, exchange: Exchange, match: RouteMatch, authenticator: Authenticator
    ) -> Answer | None:
        scope = exchange.scope
        token = exchange.header(b"x-api-key")
        is_bearer = exchange.header(b"authorization") is not None
        needs_none = not authenticator.gate.is_key_needed
        key = await authenticator.identify(scope, None if token is None or needs_none or is_bearer else token.encode())
        _take_key(exchange, key)
        route = match.methods.get(exchange.method)
        if route is None:
            raise errors.MethodNotAllowed("no such method here", allow=match.allow)
        exchange.params, exchange.route = match.params, f"e2b {route.path}"
        if (session_id := match.params.get("sandbox")) is not None:
            if not SESSION_ID.match(session_id):
                raise errors.SessionNotFound("sandbox not found")
            exchange.session_id = session_id
            logcontext.session_id.set(session_id)
        await admit(key, route.needs, exchange.supervisor, session_id=exchange.session_id)
        answer: Answer | None = await route.handler(exchange)
        return answer

    # A sandbox's services

    async def _admit_to_sandbox(self, exchange: Exchange, claim: E2bClaim, authenticator: Authenticator) -> EnvdRequest:
        """Return the request, if its token or its signature is right. Raises `Unauthorized`, `SandboxGone`."""
        exchange.route = "e2b envd"
        sandbox_id = claim.sandbox_id
        if sandbox_id is None:
            sandbox_id = await self._find_signer(exchange)
        elif not is_token_of(self._settings.key, sandbox_id, exchange.header(b"x-access-token") or ""):
            sandbox_id = sandbox_id if await self._may_visit(exchange, sandbox_id) else None
        if sandbox_id is None:
            await authenticator.throttle.note(exchange.scope.get("client"))
            raise Unauthorized("the access token or the signature is wrong, or has expired")
        if not SESSION_ID.match(sandbox_id):
            raise SandboxGone(sandbox_id)
        exchange.session_id = sandbox_id
        logcontext.session_id.set(sandbox_id)
        session = await self._live_session(exchange, sandbox_id)
        key = _key_of(exchange, session)
        if key.access < Access.WRITE or not key.reaches(session.labels):
            raise Unauthorized("the API key that made this sandbox may not use it any more")
        _take_key(exchange, key)
        if session.status is Status.PAUSED and AUTO_RESUME in session.labels:
            session = await go_on(self._settings, exchange.supervisor, session)
        elif session.status is Status.PAUSED:
            session = await wait_while_still(exchange.supervisor, session)
        if _port_of(exchange) != ENVD_PORT:  # query and user are for what listens there
            return EnvdRequest(exchange, session, None, self._commands)
        user = exchange.query.get("username")
        if not user and claim.sandbox_id is not None:  # a signature is for the user that it names
            user = user_of(exchange.header(b"authorization"))
        return EnvdRequest(exchange, session, user, self._commands)

    async def _may_visit(self, exchange: Exchange, sandbox_id: str) -> bool:
        """Whether a request is to a port of a sandbox and has the token for those."""
        given = exchange.header(TRAFFIC_TOKEN) or ""
        if _port_of(exchange) == ENVD_PORT or not given or not SESSION_ID.match(sandbox_id):
            return False
        found = await find_ports(exchange.supervisor, sandbox_id)
        token = None if found is None else found.token
        return is_same(token or traffic_token(self._settings.key, sandbox_id), given)

    async def _live_session(self, exchange: Exchange, sandbox_id: str) -> Session:
        """Return a sandbox that serves requests, now or when it goes on. Raises `SandboxGone`."""
        try:
            session = await exchange.supervisor.get(sandbox_id)
        except errors.SessionNotFound:
            raise SandboxGone(sandbox_id) from None
        if session.status not in WHOLE or (is_paused(self._settings, session) and AUTO_RESUME not in session.labels):
            raise SandboxGone(sandbox_id)
        return session

    async def _find_signer(self, exchange: Exchange) -> str | None:
        """Return the sandbox whose token signed the request's URL."""
        query = parse_query(exchange.scope["query_string"])
        expiration = query.get("signature_expiration")
        if exchange.method not in ("GET", "HEAD", "POST") or _is_past(expiration):
            return None
        if not SIGNATURE.fullmatch(query.get("signature", "")):
            return None
        labels = (LabelSelector(TEMPLATE),)
        wanted = SessionQuery(statuses=WHOLE, labels=labels, limit=_MAX_SIGNERS)
        while True:
            page = await exchange.supervisor.find(wanted)
            found = find_signer(
                self._settings.key,
                (session.id for session in page.sessions),
                query["signature"],
                path=query.get("path", ""),
                action="write" if exchange.method == "POST" else "read",
                user=query.get("username", ""),
                expiration=expiration,
            )
            if found is not None or page.next is None:
                return found
            await trio.lowlevel.checkpoint()
            wanted = attrs.evolve(wanted, after=page.next)

    async def _serve_sandbox(self, request: EnvdRequest, authenticator: Authenticator) -> Answer | None:
        if (port := _port_of(request.exchange)) == ENVD_PORT:
            return await self._serve_envd(request)
        if port == INTERPRETER_PORT:
            return await self._interpreter.serve(request)
        await ports.carry(request.exchange, request.session, port, authenticator.gate)
        return None

    async def _serve_envd(self, request: EnvdRequest) -> Answer | None:
        exchange = request.exchange
        path, method = exchange.scope["path"], exchange.method
        exchange.route = f"e2b {path}"
        if method == "POST" and path in self._unary:
            return await call(request, self._unary[path])
        if method == "POST" and path in self._streams:
            return await stream(request, self._streams[path])
        if method == "POST" and path == "/process.Process/StreamInput":
            return await take_stream(request)
        match method, path:
            case "GET" | "HEAD", "/health":
                return Answer(204, b"")
            case "GET" | "HEAD", "/files":
                await files.download(request)
                return None
            case "POST", "/files":
                return await files.upload(request)
            case "GET", "/envs":
                return json_answer(await read_environment(exchange.supervisor, request.session, request.user))
            case "GET", "/metrics":
                return json_answer(await read_metrics_now(exchange.supervisor, request.session))
        exchange.route = "e2b envd"
        raise errors.RouteNotFound("this server has no such service for a sandbox")


def _port_of(exchange: Exchange) -> str:
    return exchange.header(b"e2b-sandbox-port") or ENVD_PORT


def _key_of(exchange: Exchange, session: Session) -> ApiKey:
    """Return the key that made a session. Raises `Unauthorized` when that is not in force any more."""
    if session.key_id in (None, CONFIGURED_ID, LOCAL_ID):
        return LOCAL if session.key_id == LOCAL_ID else CONFIGURED
    if (key := exchange.shares.ring.in_force(session.key_id)) is None:
        raise Unauthorized("the API key that made this sandbox was revoked or has expired")
    return key


def _take_key(exchange: Exchange, key: ApiKey) -> None:
    exchange.key = key
    exchange.use.bind(key)
    logcontext.set_key(key.id)
    exchange.shares.take_request(key)


def _is_past(expiration: str | None) -> bool:
    """Whether the end of a signature, in Unix seconds, is over; one that is no number is."""
    if expiration is None:
        return False
    return not (expiration.isascii() and expiration.isdigit() and len(expiration) < 16) or int(expiration) < time.time()


_Handler = Callable[[Exchange], Awaitable[Answer]]


def _control_routes(control: Control) -> RouteTable:
    return RouteTable(_routes(control))


def _routes(control: Control) -> Iterator[Route]:
    """Yield the routes of the control API, with what each needs of the key."""
    sandbox = "/sandboxes/{sandbox}"
    table: tuple[tuple[str, str, _Handler, Needs], ...] = (
        ("GET", "/sandboxes", control.list_running, FIND),
        ("POST", "/sandboxes", control.create, MAKE),
        ("GET", "/v2/sandboxes", control.list_all, FIND),
        ("POST", "/v2/sandboxes", control.create, MAKE),
        ("GET", sandbox, control.get, LOOK),
        ("DELETE", sandbox, control.kill, ACT),
        ("POST", f"{sandbox}/timeout", control.set_timeout, ACT),
        ("POST", f"{sandbox}/connect", control.connect, ACT),
        ("POST", f"{sandbox}/resume", control.connect, ACT),
        ("POST", f"/v2{sandbox}/connect", control.connect, ACT),
        ("POST", f"{sandbox}/pause", control.pause, ACT),
        ("GET", f"{sandbox}/metrics", control.metrics, LOOK),
        ("PUT", f"{sandbox}/network", control.update_network, ACT),
        ("POST", f"{sandbox}/snapshots", control.missing, ACT),
        ("POST", f"{sandbox}/fork", control.missing, ACT),
        ("GET", "/snapshots", control.missing, FIND),
        ("GET", "/templates", control.missing, FIND),
        ("POST", "/v3/templates", control.missing, MAKE),
        ("GET", "/volumes", control.missing, FIND),
        ("POST", "/volumes", control.missing, MAKE),
        ("GET", "/secrets", control.missing, FIND),
        ("POST", "/secrets", control.missing, MAKE),
    )
    for method, path, handler, needs in table:
        yield Route(kind=RouteKind.RAW, method=method, path=path, handler=handler, needs=needs)
