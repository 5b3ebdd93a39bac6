"""Requests to ports of a sandbox, which the preview gateway carries: this is a client of the gateway, and no gateway.

A sandbox has one preview of every port. The gateway asks for leave, connects inside and reads what answers there; here
come heads and bodies that the gateway has written anew. A client names the port in a header of a request to the
daemon's own origin, which the answers of all sandboxes share then: so cookies go neither way, nor does what a browser
would keep for the origin. Keys and tokens of the client end here: what listens inside is hostile.
"""

from __future__ import annotations

import attrs
import h11
import trio

from sandkasten import errors
from sandkasten.api.e2b.connect import SandboxGone
from sandkasten.api.e2b.sandboxes import TRAFFIC_TOKEN, find_ports
from sandkasten.api.http.auth import Gate
from sandkasten.api.http.connection import ClientGone, Leave
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.guard import LEAVE_KEY, has_body
from sandkasten.api.resources.file_contents import ANY_SIZE
from sandkasten.model import Session
from sandkasten.model.network import PORT_BOUNDS, SignedPreview

_READ_BYTES = 64 * 1024
_CONNECT_S = 10.0

_OURS = frozenset({b"x-api-key", b"x-access-token", TRAFFIC_TOKEN, b"cookie", b"e2b-sandbox-id", b"e2b-sandbox-port"})
_OF_CONNECTION = frozenset({b"host", b"connection", b"expect", b"upgrade", b"keep-alive", b"te"})
_OF_ORIGIN = frozenset({b"set-cookie", b"clear-site-data", b"strict-transport-security", b"alt-svc"})
"""Fields of an answer that a browser keeps for, or does to, the whole origin."""

Headers = list[tuple[bytes, bytes]]


async def carry(exchange: Exchange, session: Session, port: str, gate: Gate) -> None:
    """Carry a request to a port, and its answer.

    Raises:
        SandboxGone: nothing listens there, or the sandbox is gone.
        NotInstalled, Overloaded: the node has no way there, or no room now.
        ClientGone: the client left, or what listens inside broke off.
    """
    exchange.route = "e2b port"
    low, high = PORT_BOUNDS
    if not (port.isascii() and port.isdigit() and len(port) <= len(str(high)) and low <= int(port) <= high):
        raise errors.InvalidRequest("there is no such port", e2b_sandbox_port=f"must be between {low} and {high}")
    preview = await find_ports(exchange.supervisor, session.id)
    if preview is None or preview.gateway is None:
        raise errors.NotInstalled("ports of this sandbox can't be reached: preview.listen is not set, or was not then")
    host = preview.url.partition("://")[2].rstrip("/").replace("{port}", str(int(port)))
    request = h11.Request(
        method=exchange.scope["method"], target=_target(exchange), headers=_sent(exchange, host, preview, gate)
    )
    try:
        with trio.fail_after(_CONNECT_S):
            stream = await trio.open_tcp_stream(*preview.gateway)
    except (OSError, trio.TooSlowError):
        raise errors.Overloaded("the gateway to sandboxes does not answer now") from None
    async with stream:
        await _Visit(exchange, session.id, stream).carry(request)


def _target(exchange: Exchange) -> bytes:
    query = bytes(exchange.scope["query_string"])
    return bytes(exchange.scope["raw_path"]) + (b"?" + query if query else b"")


def _sent(exchange: Exchange, host: str, preview: SignedPreview, gate: Gate) -> Headers:
    """Return the fields of a request as they go to the gateway."""
    kept: Headers = [(b"Host", host.encode()), (b"Connection", b"close")]
    if preview.token is not None:
        kept.append((TRAFFIC_TOKEN, preview.token.encode()))
    for name, value in exchange.scope["headers"]:
        if name in _OURS or name in _OF_CONNECTION or (name == b"authorization" and _is_key(value, gate)):
            continue
        kept.append((bytes(name), bytes(value)))
    return kept


def _is_key(authorization: bytes, gate: Gate) -> bool:
    """Whether a header has a key of this server, in whatever scheme."""
    try:
        gate.check_key(authorization.partition(b" ")[2].strip())
    except errors.Unauthorized:
        return False
    return True


@attrs.define
class _Visit:
    """One request on its way, over a connection of its own to the gateway."""

    exchange: Exchange
    sandbox_id: str
    stream: trio.SocketStream
    http: h11.Connection = attrs.field(factory=lambda: h11.Connection(h11.CLIENT))

    async def carry(self, request: h11.Request) -> None:
        """Send request and body, and answer; the client's leave ends both."""
        leave: Leave = self.exchange.scope.get(LEAVE_KEY) or Leave()
        faults: list[Exception] = []
        is_done = False

        async def send_up() -> None:
            try:
                await self._up(request)
            except (ClientGone, errors.SandkastenError) as error:
                faults.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_up)
            try:
                with leave.calling(nursery.cancel_scope.cancel):
                    await self._down()
                    is_done = True
            except (ClientGone, SandboxGone, errors.SandkastenError) as error:
                faults.append(error)
            nursery.cancel_scope.cancel()
        if faults:
            raise faults[0]
        if not is_done:
            raise ClientGone

    async def _up(self, request: h11.Request) -> None:
        try:
            await self._send(request)
            while has_body(self.exchange.scope) and (chunk := await self.exchange.read_chunk(limit_bytes=ANY_SIZE)):
                await self._send(h11.Data(data=chunk))
            await self._send(h11.EndOfMessage())
        except (trio.BrokenResourceError, h11.LocalProtocolError):
            return  # the gateway takes no more; what it says is read

    async def _send(self, event: h11.Event) -> None:
        await self.stream.send_all(self.http.send(event) or b"")

    async def _down(self) -> None:
        try:
            while not isinstance(event := await self._next(), h11.EndOfMessage):
                match event:
                    case h11.Response():
                        await self._begin(event)
                    case h11.Data():
                        await self.exchange.write(bytes(event.data))
                    case h11.InformationalResponse():
                        pass
                    case _:
                        raise h11.RemoteProtocolError("the gateway broke off")
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            if self.exchange.is_started:
                raise ClientGone from None
            raise SandboxGone(self.sandbox_id, is_alive=True) from None
        await self.exchange.finish()

    async def _next(self) -> object:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.stream.receive_some(_READ_BYTES))
        return event

    async def _begin(self, answer: h11.Response) -> None:
        refusal = dict(answer.headers).get(b"x-sandkasten-error")
        if refusal is not None and answer.status_code in (401, 502, 503):  # whoever forges it fools its own client
            if refusal == b"CAPACITY":
                raise errors.Overloaded("the sandbox can't be reached now")
            raise SandboxGone(self.sandbox_id, is_alive=answer.status_code == 502)
        fields = tuple(
            (name.decode("ascii"), value.decode("latin-1"))
            for name, value in answer.headers
            if name not in (b"connection", b"transfer-encoding") and name not in _OF_ORIGIN
        )
        unread = () if self.exchange.is_body_done else (("connection", "close"),)
        await self.exchange.start(answer.status_code, (*fields, *unread))
