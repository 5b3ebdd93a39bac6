"""The preview client: owner of the preview gateway, of its listeners, and of the stock of sockets for each session.

The gateway (`egress/gateway.py`) reads HTTP and asks here, for each request, whether the request may go inside. The
answer comes of the session's record in the directory, so what the record says holds from that moment on: no copy of it
is anywhere else. With leave goes a socket in the session's network, made by nsinit; some are kept in stock for each
session that has previews, and closed with the session, whose network they would keep.

A published port has a listener of its own on the node, which the gateway accepts from and asks about likewise. It is
made here and shut down here: whatever the gateway does, nothing listens on the port from that moment on (shutdown(2)).
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, assert_never

import attrs
import trio

from egress import knocking
from sandkasten import logcontext
from sandkasten.actors.core import Actor, Ask, Ref
from sandkasten.actors.services.directory import Entry, SessionDirectory
from sandkasten.actors.services.nsinit import ask_patiently, open_sockets
from sandkasten.admission.previews import is_admitted, preview_url, published_url, sign_preview
from sandkasten.config import PreviewSettings
from sandkasten.errors import Capacity, Conflict, SandkastenError, SessionPaused
from sandkasten.links.fds import OwnedFd
from sandkasten.links.processes import STOP_S, ChildProcess, StartEgress, keep_running
from sandkasten.model import Status
from sandkasten.model.lifecycle import USABLE
from sandkasten.model.network import EVERY_PORT, Preview, PreviewAccess, SignedPreview

log = logging.getLogger(__name__)

STOCK = 16
"""Sockets that nsinit is asked for at once."""

_BACKLOG = 512
_TRIES = 64
"""Ports of the node that are tried when any will do."""

_SEND_S = 10.0
_SO_NETNS_COOKIE = 71
"""The number of a socket's network, unique on the machine (asm-generic/socket.h; Linux 5.14)."""


@attrs.frozen
class SignPreview(Ask[SignedPreview]):
    """Return URL and token of a preview, on a node that serves previews."""

    session_id: str
    preview: Preview


@attrs.frozen
class PublishPort(Ask[int]):
    """Listen on a port of the node for connections to a session's port; return it. `host_port`: 0 is any free one. A
    port that is published already stays as it is. Raises `Conflict`, `Capacity`."""

    session_id: str
    port: int
    host_port: int


@attrs.frozen
class CloseDoors(Ask[None]):
    """End the requests of a session that are under way, of one port or of all but those `kept`, and what listens for
    it; without previews its sockets, too. Answered when nothing listens and the gateway was told."""

    session_id: str
    port: int = knocking.ALL_PORTS
    kept: tuple[int, ...] = ()


Message = SignPreview | PublishPort | CloseDoors


@attrs.define(eq=False)
class _Doors:
    """The stock of one session, and the listeners of its published ports."""

    sockets: list[OwnedFd] = attrs.field(factory=list)
    published: dict[int, socket.socket] = attrs.field(factory=dict)
    filling: trio.Lock = attrs.field(factory=trio.Lock)
    watch: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True
        self.watch.cancel()
        while self.sockets:
            self.sockets.pop().close()
        for port in list(self.published):
            self.unpublish(port)

    def unpublish(self, port: int) -> None:
        """End a listener, of which the gateway may have a copy."""
        if (listener := self.published.pop(port, None)) is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


class _NoLeave(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_UNKNOWN = 401, "UNAUTHORIZED", "this preview needs its token, or has ended"
"""The answer about whatever is not there, too: names of sessions can't be tried."""


class PreviewClient(Actor):
    """See the module's docstring. Without `start` the node has no way to a gateway. `use` notes a use of a session, and
    `wake` ends its pause."""

    def __init__(
        self,
        ref: Ref,
        *,
        nsinit: Ref,
        settings: PreviewSettings,
        directory: SessionDirectory,
        key: bytes,
        use: Callable[[Entry], Awaitable[None]],
        wake: Callable[[Entry], Awaitable[None]],
        start: StartEgress | None,
    ) -> None:
        super().__init__(ref)
        self._nsinit, self._settings, self._directory = nsinit, settings, directory
        self._key, self._use, self._wake, self._start = key, use, wake, start
        self._listener: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._gateway: socket.socket | None = None
        """The socket of a gateway that has its first message."""
        self._sending = trio.Lock()
        self._doors: dict[str, _Doors] = {}
        self._knocks = 0

    async def on_start(self) -> None:
        """Listen, and start the gateway. Raises `OSError`."""
        logcontext.origin.set(logcontext.NOBODY)  # what happens to the gateway is no session's doing
        if self._start is None or (self._settings.listen is None and self._settings.publish is None):
            return
        if self._settings.listen is not None:
            host, _, port = self._settings.listen.rpartition(":")
            self._listener = _listen(host.removeprefix("[").removesuffix("]"), int(port))
            log.info("previews_listen", extra={"address": self._settings.listen})
        for entry in self._directory:  # after a restart of this actor; sessions of another daemon ask by themselves
            for preview in entry.session.previews.values():
                if preview.host_port is not None:
                    try:
                        self._publish(entry.session.id, preview.port, preview.host_port)
                    except SandkastenError as error:
                        log.warning("not_published", extra={"session_id": entry.session.id, "error": str(error)})
        self._nursery.start_soon(keep_running, "gateway", partial(self._run_process, self._start))

    async def handle(self, message: Message) -> Any:  # each message names its answer
        match message:
            case SignPreview(session_id, preview):
                return self._sign(session_id, preview)
            case PublishPort(session_id, port, host_port):
                return self._publish(session_id, port, host_port)
            case CloseDoors():
                return self.defer(self._close, message)
            case _:
                assert_never(message)

    async def on_stop(self) -> None:
        for doors in self._doors.values():
            doors.close()
        if self._listener is not None:
            self._listener.close()
        if self._process is not None:
            await self._process.end("gateway", STOP_S)

    def _sign(self, session_id: str, preview: Preview) -> SignedPreview:
        if preview.host_port is not None:
            return SignedPreview(preview, published_url(self._settings, preview.host_port), None)
        assert self._listener is not None, "the node serves previews"
        gateway = self._listener.getsockname()[:2]
        url = preview_url(self._settings, session_id, preview.port, listen_port=gateway[1])
        is_public = preview.access is PreviewAccess.PUBLIC
        return SignedPreview(preview, url, None if is_public else sign_preview(self._key, session_id, preview), gateway)

    async def _close(self, order: CloseDoors) -> None:
        session_id, port = order.session_id, order.port
        entry = self._directory.get(session_id)
        is_all = port == knocking.ALL_PORTS and not order.kept
        if is_all or entry is None or not entry.session.previews:
            self._drop(session_id)
        elif (doors := self._doors.get(session_id)) is not None:
            doors.unpublish(port)
        if (gateway := self._gateway) is not None:
            await self._send(gateway, knocking.Revoke(session_id, port, order.kept))

    def _publish(self, session_id: str, port: int, host_port: int) -> int:
        entry = self._directory.get(session_id) or self._directory.members.get(session_id)  # one that is being claimed
        if self._settings.publish is None or self._start is None or entry is None:
            raise Conflict("this node does not publish ports of that session", session_id=session_id)
        doors = self._doors_of(session_id, entry)
        if (listener := doors.published.get(port)) is not None:
            bound: int = listener.getsockname()[1]
            if host_port in (0, bound):
                return bound
            raise Conflict(f"the port is published as {bound}: close that first", port=port, host_port=bound)
        if sum(len(each.published) for each in self._doors.values()) >= knocking.MAX_PUBLISHED:
            raise Capacity("the node has too many published ports", limit=knocking.MAX_PUBLISHED)
        doors.published[port] = listener = _listen_within(self._settings, host_port)
        if (gateway := self._gateway) is not None:
            self._nursery.start_soon(self._tell_published, gateway, session_id, port, listener)
        return int(listener.getsockname()[1])

    # The process ------------------------------------------------------------------------------------------------

    async def _run_process(self, start: StartEgress) -> None:
        """Start a gateway and serve it to its end. Meanwhile, and before the next one, clients wait."""
        process = self._process = await start("gateway")
        self._knocks = 0
        process.sock.setblocking(False)
        try:
            async with process.forwarding_log("gateway"), trio.open_nursery() as nursery:
                fds = [] if self._listener is None else [self._listener.fileno()]
                await self._send(process.sock, knocking.Open(self._settings.domain), fds)
                self._gateway = process.sock
                for session_id, doors in list(self._doors.items()):
                    for port, listener in list(doors.published.items()):
                        await self._tell_published(process.sock, session_id, port, listener)
                await self._answer_knocks(process.sock, nursery)
                nursery.cancel_scope.cancel()
        finally:
            self._process = self._gateway = None
            with trio.CancelScope(shield=True):
                await process.end("gateway", STOP_S)
        log.warning("gateway_ended")

    async def _tell_published(self, sock: socket.socket, session_id: str, port: int, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            with OwnedFd(os.dup(listener.fileno())) as fd:  # it may be closed while the message waits for its turn
                await self._send(sock, knocking.PublishedPort(session_id, port), [fd.fileno()])

    async def _answer_knocks(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        """Answer until the gateway goes away, or breaks the protocol."""
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                data = sock.recv(knocking.MAX_DATAGRAM_BYTES)
                if not data:
                    return
                knock = knocking.decode_knock(data)
                if self._knocks >= knocking.MAX_KNOCKS:
                    raise knocking.ProtocolError("it knocks more often than it may")
            except BlockingIOError:
                continue
            except (OSError, knocking.ProtocolError) as error:
                log.error("gateway_not_understood", extra={"error": str(error)})
                return
            if (leave := self._leave_at_once(knock)) is not None:
                await self._let_in(sock, knock, *leave)
                continue
            self._knocks += 1
            nursery.start_soon(self._answer, sock, knock)

    async def _let_in(self, sock: socket.socket, knock: knocking.Knock, lasts_s: float | None, fd: OwnedFd) -> None:
        with fd:
            await self._send(sock, knocking.Admitted(knock.seq, lasts_s), [fd.fileno()])

    async def _answer(self, sock: socket.socket, knock: knocking.Knock) -> None:
        try:
            await self._let_in(sock, knock, *await self._admit(knock))
        except _NoLeave as refused:
            await self._send(sock, knocking.NotAdmitted(knock.seq, refused.status, refused.code, str(refused)))
        finally:
            self._knocks -= 1

    async def _send(self, sock: socket.socket, order: knocking.Order, fds: Sequence[int] = ()) -> None:
        """Send a message. A gateway that takes none for so long is ended by the end of its socket."""
        data = knocking.encode(order)
        if not self._sending.locked() and _is_sent(sock, data, fds):
            return
        with trio.move_on_after(_SEND_S) as patience:
            async with self._sending:
                while not _is_sent(sock, data, fds):
                    await trio.lowlevel.wait_writable(sock)
        if patience.cancelled_caught:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended meanwhile

    # Leave ------------------------------------------------------------------------------------------------------

    async def _admit(self, knock: knocking.Knock) -> tuple[float | None, OwnedFd]:
        """Return the seconds that a request may last, None for no end, and a socket for it. Raises `_NoLeave`."""
        entry, preview = self._find(knock)
        try:
            if entry.session.status is Status.PAUSED and preview.resume:
                await self._wake(entry)
            status = entry.session.status
            if status is Status.PAUSED:
                raise SessionPaused("the session is paused")
            if status not in USABLE:
                raise _NoLeave(503, "CAPACITY", "the session does not run now")
            if preview.keep_alive:
                await self._use(entry)
            fd = await self._take(knock.session_id, entry)
        except SessionPaused:
            raise _NoLeave(503, "SESSION_PAUSED", "the session is paused") from None
        except SandkastenError as error:
            log.warning("preview_not_reached", extra={"session_id": knock.session_id, "error": str(error)})
            raise _NoLeave(503, "CAPACITY", "the session can't be reached now") from None
        try:
            if self._find(knock)[1].epoch != preview.epoch:  # it was closed meanwhile
                raise _NoLeave(*_UNKNOWN)
        except _NoLeave:
            fd.close()
            raise
        return _time_left(knock, preview), fd

    def _leave_at_once(self, knock: knocking.Knock) -> tuple[float | None, OwnedFd] | None:
        """Return what `_admit` does for a request that has leave and waits for nothing, None for another: a task for
        each request costs a fifth of the answer."""
        try:
            entry, preview = self._find(knock)
        except _NoLeave:
            return None
        doors = self._doors.get(knock.session_id)
        if preview.keep_alive or entry.session.status not in USABLE or doors is None or not doors.sockets:
            return None
        return _time_left(knock, preview), doors.sockets.pop()

    def _find(self, knock: knocking.Knock) -> tuple[Entry, Preview]:
        entry = self._directory.get(knock.session_id)
        previews = {} if entry is None else entry.session.previews
        preview = previews.get(knock.port, None if knock.is_plain else previews.get(EVERY_PORT))
        if (
            entry is None
            or preview is None
            or preview.expires_at <= datetime.now(UTC)
            or (preview.access is PreviewAccess.LOCAL) != knock.is_plain
            or not is_admitted(self._key, knock.session_id, preview, knock.tokens[: knocking.MAX_TOKENS])
        ):
            raise _NoLeave(*_UNKNOWN)
        return entry, preview

    async def _take(self, session_id: str, entry: Entry) -> OwnedFd:
        """Return a socket in the session's network, from its stock, which is filled first if it is empty."""
        doors = self._doors_of(session_id, entry)
        if doors.sockets:  # a lock that is free would let others have their turns first
            return doors.sockets.pop()
        async with doors.filling:
            if not doors.sockets:
                made = (await ask_patiently(self._nsinit, open_sockets(session_id, STOCK))).fds
                if doors.is_closed or not all(map(_is_foreign, made)):
                    for fd in made:
                        fd.close()
                    raise _NoLeave(503, "CAPACITY", "the session can't be reached now")
                doors.sockets.extend(made)
            return doors.sockets.pop()

    def _doors_of(self, session_id: str, entry: Entry) -> _Doors:
        doors = self._doors.get(session_id)
        if doors is None:
            doors = self._doors[session_id] = _Doors()
            self._nursery.start_soon(self._watch_end, session_id, entry, doors)
        return doors

    async def _watch_end(self, session_id: str, entry: Entry, doors: _Doors) -> None:
        with doors.watch:
            await entry.ended.wait()
            if self._doors.get(session_id) is doors:
                self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        if (doors := self._doors.pop(session_id, None)) is not None:
            doors.close()


def _time_left(knock: knocking.Knock, preview: Preview) -> float | None:
    if knock.is_plain:  # its session closes it in time, or puts off the end
        return None
    return max((preview.expires_at - datetime.now(UTC)).total_seconds(), 0.0)


def _listen_within(settings: PreviewSettings, host_port: int) -> socket.socket:
    """Return a listener on a port of the node, any free one of its range for 0. Raises `Conflict`, `Capacity`."""
    assert settings.publish is not None
    ports = settings.publish_range
    if host_port and host_port not in ports:
        raise Conflict(f"this node publishes on ports {ports[0]} to {ports[-1]}", host_port=host_port)
    for each in [host_port] if host_port else random.sample(ports, min(_TRIES, len(ports))):
        try:
            return _listen(settings.publish, each)
        except OSError as error:
            failure = error
    if host_port:
        message = f"port {host_port} of the node can't be had: {failure.strerror}"
        raise Conflict(message, host_port=host_port) from None
    raise Capacity(f"no free port of the node was found: {failure.strerror}") from None


def _listen(host: str, port: int) -> socket.socket:
    """Return a listener for clients of previews. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def _is_sent(sock: socket.socket, data: bytes, fds: Sequence[int]) -> bool:
    """Send a message if there is room. One to a process that has ended is sent, too: the next read says so."""
    try:
        socket.send_fds(sock, [data], fds)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_foreign(fd: OwnedFd) -> bool:
    """Whether a socket is of another network than this process: one of the machine's would reach its servers."""
    with socket.socket(fileno=os.dup(fd.fileno())) as theirs, socket.socket(socket.AF_INET) as ours:
        cookies = [each.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) for each in (theirs, ours)]
    return cookies[0] != cookies[1]
