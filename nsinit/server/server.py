"""The fork server: one thread, one connection to the daemon, one loop. Reads requests, runs jobs, sends answers.

Owns the connection and the order of requests; `requests.py` says how each one is carried out. The end of the connection
is the end of nsinit: sandboxes of the pool and half-built ones go, built ones live on.
Sources: unix(7) SOCK_SEQPACKET, SCM_RIGHTS.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nsinit.log import log
from nsinit.sandbox import child
from nsinit.scheduler import Job, Scheduler
from nsinit.server.requests import STORE_TABLE, TABLE, Row, StoreNode, Work
from nsinit.server.start import StartedNsinit, open_store, start
from nsinit.steps import StepFailed, failure_of
from nsinit.wire.launching import Grant, NotGranted
from nsinit.wire.protocol import (
    ANSWERS,
    MAX_DATAGRAM_BYTES,
    MAX_FDS,
    REQUESTS,
    Failed,
    Ok,
    OpenStore,
    ProtocolError,
    Start,
)
from nsinit.wire.validate import InvalidName

MAX_UNANSWERED = 4096
"""Requests taken and not yet answered. With that many nothing is read, so that the daemon's sends wait."""

MAX_MESSAGE = 500
"""Characters of a failure's sentence that are sent."""

SPARE_SLOTS = 8
"""Id slots that are made ahead, one whenever nothing happened for `_IDLE_S`."""
_IDLE_S = 0.02
_STOP_DEADLINE_S = 10.0


def serve(channel: socket.socket, runner: child.Runner, grant: Grant | None) -> None:
    """Serve the daemon at the other end of `channel` until the connection ends. `grant`: what root allows the daemon;
    None for a daemon that is root itself."""
    channel.setblocking(True)
    data = channel.recv(MAX_DATAGRAM_BYTES)
    if not data:
        return
    match REQUESTS.decode(data):
        case OpenStore() as request:
            _serve_store(channel, request, grant)
        case Start() as request:
            _serve_daemon(channel, request, runner, grant)
        case request:
            raise ProtocolError(f"expected Start, got {type(request).__name__}")


def _serve_daemon(channel: socket.socket, request: Start, runner: child.Runner, grant: Grant | None) -> None:
    scheduler = Scheduler()
    try:
        node = start(request, scheduler, runner, grant)
    except StepFailed as error:
        log("error", "start failed", stage=error.stage, path=error.path, errno=error.errno, reason=str(error))
        channel.sendall(ANSWERS.encode(_failed(request.seq, error)))
        return
    channel.sendall(ANSWERS.encode(node.ready))
    channel.setblocking(False)
    NsinitServer(channel, node, scheduler, grant).run()
    node.stop()


def _serve_store(channel: socket.socket, request: OpenStore, grant: Grant | None) -> None:
    scheduler = Scheduler()
    try:
        node = open_store(request, scheduler, grant)
    except StepFailed as error:
        channel.sendall(ANSWERS.encode(_failed(request.seq, error)))
        return
    channel.sendall(ANSWERS.encode(Ok(request.seq)))
    channel.setblocking(False)
    RequestLoop(channel, node, scheduler, STORE_TABLE).run()


class RequestLoop:
    """The loop of an nsinit: requests of a table, and their answers."""

    def __init__(
        self,
        channel: socket.socket,
        node: StoreNode,
        scheduler: Scheduler,
        table: Mapping[type, Row[Any]],
        grant: Grant | None = None,
    ) -> None:
        self._channel = channel
        self._node = node
        self._table = table
        self._scheduler = scheduler
        self._allowance = grant.allowance if grant is not None else None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._queues: dict[str, deque[Callable[[], Job]]] = {}
        """Jobs not yet begun, by the key that they are ordered by; a key is here as long as a job of it runs."""
        self._unanswered = 0
        self._is_open = True
        self._watched_events = -1

    def run(self) -> None:
        """Serve until the connection ends, then end what was not finished."""
        self._watch()
        while self._is_open:
            self._scheduler.round()
        self._put_away()

    def _put_away(self) -> None:
        for jails in (self._node.unpacking.jails, self._node.packing.jails, self._node.packing.session_jails):
            jails.finish()
        deadline = time.monotonic() + _STOP_DEADLINE_S
        while (self._queues or self._is_busy()) and time.monotonic() < deadline:
            self._scheduler.round(0.1)

    def _is_busy(self) -> bool:
        """Whether something else is to be waited for at the end."""
        return self._scheduler.jobs > 0

    # Requests

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_DATAGRAM_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._is_open = False
            self._scheduler.watch(self._channel.fileno(), 0, self._on_channel)
            return
        try:
            request = REQUESTS.decode(data)
        except ProtocolError as error:
            log("error", "bad request", reason=str(error))
            for fd in fds:
                os.close(fd)
            self._is_open = False
            return
        self._unanswered += 1
        self._dispatch(request, fds)
        self._watch()

    def _dispatch(self, request: object, fds: list[int]) -> None:
        """Check a request and begin its work, or let the work wait for earlier requests of the same key."""
        row = self._table.get(type(request))
        seq: int = request.seq  # type: ignore[attr-defined]  # every request has one
        key = row.key(request) if row is not None and row.key is not None else None
        try:
            if row is None:
                raise InvalidName("already started")  # `Start` and `OpenStore` only come first
            row.check(request, fds)
            if self._allowance is not None:
                self._allowance.check(request)
        except InvalidName as error:
            stage = "grant" if isinstance(error, NotGranted) else "validate"
            for fd in fds:
                os.close(fd)
            self._answer(_logged_failure(seq, key, failure_of(stage, error)), [])
            return
        if row.on_arrival is not None:
            row.on_arrival(self._node, request)
        work = partial(row.run, self._node, request, fds)
        if key is None or (row.joins is not None and row.joins(self._node, request)):
            self._scheduler.spawn(self._answered(seq, key, work()))
        else:
            self._enqueue(key, lambda: self._answered(seq, key, work()))

    def _enqueue(self, key: str, job: Callable[[], Job]) -> None:
        """Run `job` after every earlier one of the same key."""
        if key in self._queues:
            self._queues[key].append(job)
        else:
            self._queues[key] = deque([job])
            self._scheduler.spawn(self._in_order(key))

    def _in_order(self, key: str) -> Job:
        queue = self._queues[key]
        while queue:
            yield from queue.popleft()()
        del self._queues[key]

    def _answered(self, seq: int, key: str | None, work: Work) -> Job:
        """Run `work` and send its answer; a failure is logged and is the answer."""
        try:
            message, fds = yield from work
        except StepFailed as error:
            message, fds = _logged_failure(seq, key, error), []
        except Exception as error:  # noqa: BLE001  # as in `Steps`: one request fails, and others are not its concern
            message, fds = _logged_failure(seq, key, failure_of("system", error)), []
        self._answer(message, fds)

    # Answers

    def _answer(self, message: object, fds: list[int]) -> None:
        self._unanswered -= 1
        self._outbox.append((ANSWERS.encode(message), fds))
        self._flush()
        self._watch()

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._channel.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._is_open = False
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)

    def _watch(self) -> None:
        """Wait for requests while there is room for their answers, and for room in the socket while answers wait."""
        if not self._is_open:
            return
        has_room = self._unanswered + len(self._outbox) < MAX_UNANSWERED
        events = (selectors.EVENT_READ if has_room else 0) | (selectors.EVENT_WRITE if self._outbox else 0)
        if events != self._watched_events:
            self._watched_events = events
            self._scheduler.watch(self._channel.fileno(), events, self._on_channel)

    def _on_channel(self) -> None:
        self._flush()
        self._receive()
        self._watch()


class NsinitServer(RequestLoop):
    """The loop of a started nsinit."""

    def __init__(self, channel: socket.socket, node: StartedNsinit, scheduler: Scheduler, grant: Grant | None) -> None:
        super().__init__(channel, node, scheduler, TABLE, grant)
        self._started, self._sessions = node, node.sessions

    def run(self) -> None:
        """Serve until the connection ends, then put away what was not finished."""
        self._watch()
        self._node.unpacking.store.share()
        self._started.workspaces.discard_drafts()
        self._sessions.delete_trash()
        slots = self._sessions.births.slots
        while self._is_open:
            wants_slots = slots.spare < SPARE_SLOTS
            if not self._scheduler.round(_IDLE_S if wants_slots else None) and wants_slots:
                slots.make_spare()
        self._put_away()

    def _put_away(self) -> None:
        self._sessions.finish()
        for key in list(self._queues):
            self._sessions.abort_build(key)
        for session_id in list(self._sessions.pool):
            self._enqueue(session_id, lambda session_id=session_id: self._remove(session_id))  # type: ignore[misc]
        super()._put_away()

    def _is_busy(self) -> bool:
        return self._sessions.is_deleting

    def _remove(self, session_id: str) -> Job:
        yield from self._sessions.remove(session_id)


def _logged_failure(seq: int, key: str | None, error: StepFailed) -> Failed:
    fields = {"stage": error.stage, "path": error.path, "errno": error.errno, "reason": str(error)}
    log("warning", "request failed", key, **fields)
    return _failed(seq, error)


def _failed(seq: int, error: StepFailed) -> Failed:
    return Failed(seq, error.stage, error.path, error.errno, str(error)[:MAX_MESSAGE])
