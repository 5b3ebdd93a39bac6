"""One HTTP request and its answer over raw ASGI: bounded bodies, deadlines on reading, an end when the client leaves.

The one place that reads request bodies and starts answers; Quart gets its bodies from here, too. Decides nothing about
routes, keys or errors.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, quote

import trio

from sandkasten.admission.quotas import KeyShares
from sandkasten.api.http.connection import ClientGone, Leave
from sandkasten.api.http.errors import Answer, Headers
from sandkasten.api.http.guard import HAS_ARRIVED_KEY, LEAVE_KEY, App, Message, Receive, Scope, Send, has_body
from sandkasten.api.http.json import check_value_count
from sandkasten.api.http.key_scope import own_workspaces
from sandkasten.api.http.measured import FrontMetrics
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.http.zstandard import Zstandard
from sandkasten.errors import InvalidRequest, SandkastenError, TooLarge
from sandkasten.model.keys import NOBODY
from sandkasten.supervisor import Files, Supervisor, WorkspaceSupervisor

T = TypeVar("T")

JSON = ("content-type", "application/json")
MAX_QUERY_FIELDS = 32
_IGNORED = b"sandkasten-ignored"
_MAX_IGNORED_CHARS = 1024
_MOST_IGNORED = 32
_MAX_IGNORED_NAME_CHARS = 64


class AsgiExchange:
    """A request for a handler, by HTTP or for a WebSocket.

    `key` is the caller's key, or `NOBODY` before authentication. `route` is the template of the path once a route was
    found; `session_id` is set beneath a session, `workspace_id` beneath a workspace. `use` counts the request among
    those of its key.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        supervisor: Supervisor,
        settings: ApiSettings,
        shares: KeyShares,
    ) -> None:
        self.scope = scope
        self.supervisor = supervisor
        self.settings = settings
        self.shares = shares
        self.use = shares.ring.use()
        self.key = NOBODY
        self.route: str | None = None
        self.session_id = ""
        self.workspace_id = ""
        self._receive = receive
        self._send = send

    @functools.cached_property
    def query(self) -> dict[str, str]:
        """The query's fields, the last of a name.

        Raises:
            InvalidRequest: the query is not UTF-8 or has too many fields.
        """
        return parse_query(self.scope["query_string"])

    @property
    def workspaces(self) -> WorkspaceSupervisor:
        """The workspaces within the reach of the caller's key. Handlers use no other way to workspaces."""
        return own_workspaces(self.key, self.supervisor)

    @property
    def files(self) -> Files:
        """The files of the session or workspace in the request's path."""
        return self.made_files(make=False)

    def made_files(self, *, make: bool = True) -> Files:
        """Return the same, and make a workspace that is not there when a request needs it."""
        if not self.workspace_id:
            return self.supervisor.files(self.session_id)
        return self.workspaces.workspace_files(self.workspace_id, make=make)


class Exchange(AsgiExchange):
    """One HTTP request, with all that the handler needs. `params` are the open segments of the path. `status` is
    set once the answer's head was sent."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        supervisor: Supervisor,
        settings: ApiSettings,
        shares: KeyShares,
        metrics: FrontMetrics,
        zstandard: Zstandard,
        mcp: App,
    ) -> None:
        super().__init__(scope, receive, send, supervisor=supervisor, settings=settings, shares=shares)
        self.metrics = metrics
        self.zstandard = zstandard
        self.mcp = mcp
        self.params: Mapping[str, str] = {}
        self.is_started = False
        self.status = 0
        self.ignored: Sequence[str] = ()
        """Paths of the first fields of the body that mean nothing here, cut: see `ignore`."""
        self._is_body_done = False
        self._body_bytes = 0
        self._json_body: bytes | None = None

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    def header(self, name: bytes) -> str | None:
        """Return a header's value, or None if the header is missing or there are several."""
        return one_header(self.scope, name)

    def header_list(self, name: bytes) -> str | None:
        """Return a header's values as one list (RFC 9110 §5.3), or None if the header is missing."""
        values = [bytes(value).decode("latin-1") for key, value in self.scope["headers"] if key == name]
        return ", ".join(values) if values else None

    def query_all(self, name: str) -> list[str]:
        """Return every value of a query's field, in order. Raises as `query`."""
        return [value for field, value in query_fields(self.scope["query_string"]) if field == name]

    def ignore(self, names: Sequence[str]) -> None:
        """Name fields of the body that mean nothing here in the answer and in the log: the first ones, cut."""
        self.ignored = [name[:_MAX_IGNORED_NAME_CHARS] for name in names[:_MOST_IGNORED]]

    # The request's body

    async def read_chunk(self, *, limit_bytes: int) -> bytes:
        """Return the next piece of the body, `b""` at the end.

        Raises:
            TooLarge: the body is longer than `limit_bytes`, or its announced length is.
            InvalidRequest: no data came for `read_timeout_s`.
            ClientGone: the client left.
        """
        if not self._body_bytes and (self._declared_bytes() or 0) > limit_bytes:
            raise _too_large(limit_bytes)
        while not self._is_body_done:
            message = await self._receive_in_time()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._is_body_done = not message.get("more_body", False)
            chunk = bytes(message.get("body", b""))
            self._body_bytes += len(chunk)
            if self._body_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            if chunk:
                return chunk
        return b""

    async def read_body(self, *, limit_bytes: int) -> bytes:
        """Return the whole body; raises as `read_chunk`."""
        body = bytearray()
        while chunk := await self.read_chunk(limit_bytes=limit_bytes):
            body += chunk
        return bytes(body)

    @property
    def is_body_done(self) -> bool:
        """Whether the body was read to its end, or there is none."""
        return self._is_body_done or not has_body(self.scope)

    async def drop_body(self) -> None:
        """Read a body that means nothing, as that of a GET; raises as `read_chunk`."""
        if has_body(self.scope):
            await self.read_body(limit_bytes=self.settings.max_request_bytes)

    async def read_json_body(self, *, limit_bytes: int | None = None) -> bytes:
        """Return a JSON body, not parsed yet; the same one when called again.

        Reads up to `limit_bytes`, by default `max_request_bytes`. Without a configured key the body's type must be
        `application/json`: a web page can't send that across origins unasked (Fetch standard, "CORS-safelisted
        request-header").

        Raises:
            InvalidRequest: the type is another one, or the body has too many values.
            TooLarge, InvalidRequest, ClientGone: as `read_chunk`.
        """
        if self._json_body is not None:
            return self._json_body
        body = await self.read_body(limit_bytes=limit_bytes or self.settings.max_request_bytes)
        if body and self.settings.api_key is None and self.media_type != "application/json":
            raise InvalidRequest("without an API key bodies must be application/json", content_type=self.media_type)
        await check_value_count(body)
        self._json_body = body
        return body

    @property
    def media_type(self) -> str:
        """The body's media type without parameters, in lower case; empty if the header is missing."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    def _declared_bytes(self) -> int | None:
        declared = self.header(b"content-length")
        return int(declared) if declared is not None and declared.isascii() and declared.isdigit() else None

    async def _receive_in_time(self) -> Message:
        if (has_arrived := self.scope.get(HAS_ARRIVED_KEY)) is not None and has_arrived():
            return await self._receive()
        with trio.move_on_after(self.settings.read_timeout_s):
            return await self._receive()
        raise InvalidRequest("the request body did not arrive in time", read_timeout_s=self.settings.read_timeout_s)

    # The answer

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of an answer whose body follows in `write`s."""
        encoded = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
        await self._send_message({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        """Send a part of the body; returns when the client's socket has taken it."""
        await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        await self._send_message({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, answer: Answer) -> None:
        """Send a whole answer."""
        headers: Headers = (JSON, ("content-length", str(len(answer.body))), *answer.headers)
        if not self.is_body_done:
            headers = (*headers, ("connection", "close"))  # the rest of the request can't be skipped
        await self.start(answer.status, headers)
        await self.finish(answer.body)

    async def hand_over(self, app: App, *, limit_bytes: int, tells_of_leaving: bool = False) -> None:
        """Let another ASGI application answer, after a body of up to `limit_bytes`.

        The application gets the body in one piece, since Quart would buffer without bound. Without `tells_of_leaving`
        the application does not learn that the client left, since quart-trio would drop the answer of a client that
        only ended its own side.
        """
        bodies = [await self.read_json_body(limit_bytes=limit_bytes)]

        async def receive() -> Message:
            if not bodies and tells_of_leaving:
                return await self._receive()
            if not bodies:
                await trio.sleep_forever()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        await app(self.scope, receive, self._send_message)

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            self.status = message["status"]
            if self.ignored:
                message["headers"] = [*message["headers"], (_IGNORED, _listed(self.ignored))]
        elif not message.get("more_body", False):
            self.use.leave()  # the connection may be another key's next, so the end of this key ends it no more
        await self._send(message)

    # The client

    async def until_disconnect(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, cancelled with all of the request when the client leaves. Call it after the body has been read.

        The end of the client's side counts as a leave: until something is written, a closed socket looks the same as a
        half-closed one, and a command must not go on for a client that has left (RFC 9293 §3.6).

        Raises:
            ClientGone: the client left first.
            SandkastenError: what `work` raised.
        """
        leave: Leave | None = self.scope.get(LEAVE_KEY)
        if leave is None or not self.is_body_done:
            return await self._until_message(work)
        with leave.calling(functools.partial(self.use.end, ClientGone())):
            return await work()

    async def _until_message(self, work: Callable[[], Awaitable[T]]) -> T:
        """As `until_disconnect`, for a request whose body nobody reads: the connection's reader would wait for that,
        and not see the client leave."""
        results: list[T] = []
        failure: SandkastenError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_on_disconnect, nursery.cancel_scope)
            try:
                try:
                    results.append(await work())
                except SandkastenError as error:  # not through the nursery, which would wrap it into a group
                    failure = error
            except* ClientGone:  # a write noticed it before the reader did
                pass
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not results:
            raise ClientGone
        return results[0]

    async def _cancel_on_disconnect(self, scope: trio.CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


def _listed(names: Sequence[str]) -> bytes:
    """Return a few names as the value of a header: percent-encoded where they are no plain words."""
    text = ", ".join(quote(name, safe="", errors="replace") for name in names)
    return text[:_MAX_IGNORED_CHARS].encode("ascii")


def one_header(scope: Scope, name: bytes) -> str | None:
    """Return a header's value, or None if the header is missing or there are several."""
    values = [value for key, value in scope["headers"] if key == name]
    return bytes(values[0]).decode("latin-1") if len(values) == 1 else None


def parse_query(query_string: bytes) -> dict[str, str]:
    """Return a query's fields, the last of a name. Raises as `query_fields`."""
    return dict(query_fields(query_string))


def query_fields(query_string: bytes) -> list[tuple[str, str]]:
    """Return a query's fields in order.

    Raises:
        InvalidRequest: the query is not UTF-8 or has too many fields.
    """
    try:
        text = query_string.decode("ascii")
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS, separator="&")
    except ValueError:
        raise InvalidRequest("the query is not UTF-8 or has too many fields", query="malformed") from None


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit_bytes} bytes", max_body_bytes=limit_bytes)
