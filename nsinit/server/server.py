"""The fork server: one thread, one connection to the daemon, one loop. Reads requests, runs jobs, sends answers.

Owns the order of requests (those on one session run in the order they came, everything else side by side) and the
start and the end of nsinit. The end of the connection is the end of nsinit: vessels and half-built sandboxes go,
built ones live on. Sources: unix(7) SOCK_SEQPACKET, SCM_RIGHTS.
"""

from __future__ import annotations

import array
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace

from nsinit.log import log
from nsinit.sandbox import child
from nsinit.scheduler import Job, Scheduler, Wait
from nsinit.server import image_import, kmsg
from nsinit.server.sessions import Sessions
from nsinit.server.start import Node, start
from nsinit.steps import StepFailed, failure_of
from nsinit.storage import workspaces
from nsinit.wire.grant import Grant
from nsinit.wire.protocol import (
    ANSWERS,
    MAX_DATAGRAM_BYTES,
    REQUESTS,
    AskDisk,
    AskQuota,
    Attach,
    Build,
    DiscardWorkspace,
    DiskLimits,
    DiskUse,
    Failed,
    FindVictim,
    Furnish,
    Grouped,
    GrowWorkspace,
    ListWorkspaces,
    MakeGroup,
    MakeWorkspace,
    Ok,
    Prepare,
    ProtocolError,
    PublishWorkspace,
    QuotaFound,
    RemoveGroup,
    RemoveStray,
    Scan,
    Scanned,
    SetDisk,
    SetFrozen,
    SetLimits,
    Start,
    Survey,
    Surveyed,
    SyncWorkspace,
    Teardown,
    TornDown,
    UnpackImage,
    Victim,
    WorkspacesListed,
)
from nsinit.wire.validate import (
    MIN_DISK_INODES,
    InvalidName,
    check_disk,
    check_group_name,
    check_limits,
    check_plan,
    check_session_id,
    check_workspace_id,
)

MAX_UNANSWERED = 4096
"""Requests taken and not yet answered; beyond that nothing is read, and the daemon's sends wait."""

SCAN_BATCH = 200
"""Sessions in one `Scanned` datagram, so that it stays well below `MAX_DATAGRAM_BYTES`."""

MAX_MESSAGE = 500
"""Characters of a failure's sentence that are sent."""

SPARE_SLOTS = 8
_STOP_DEADLINE_S = 10.0
_IDLE_S = 0.02

Answer = tuple[object, list[int]]
Work = Generator[Wait, bool, Answer]


def serve(channel: socket.socket, runner: child.Runner, grant: Grant | None) -> None:
    """Serve the daemon at the other end of `channel` until it is gone, or do there what needs no start.

    `grant` None: who is there is as powerful as we are.
    """
    channel.setblocking(True)
    data, fds, _flags, _address = socket.recv_fds(channel, MAX_DATAGRAM_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return
    match REQUESTS.decode(data):
        case UnpackImage() as request:
            image_import.serve(channel, request, fds, grant)
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
        failed = Failed(request.seq, error.stage, error.path, error.errno, str(error)[:MAX_MESSAGE])
        channel.sendall(ANSWERS.encode(failed))
        return
    channel.sendall(ANSWERS.encode(node.ready))
    channel.setblocking(False)
    Zygote(channel, node, scheduler).run()
    node.stop()


class Zygote:
    """The loop of a started nsinit."""

    def __init__(self, channel: socket.socket, node: Node, scheduler: Scheduler) -> None:
        self._channel = channel
        self._sessions: Sessions = node.sessions
        self._layout = node.sessions.foundry.machine.layout
        self._slots = node.sessions.foundry.slots
        self._kernel_log = node.kernel_log
        self._strays = node.strays
        self._scheduler = scheduler
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._waiting: dict[str, deque[Callable[[], Job]]] = {}
        self._unanswered = 0
        self._is_open = True

    def run(self) -> None:
        """Serve until the connection ends, then put away what was not finished."""
        self._watch()
        workspaces.discard_drafts(self._layout, self._sessions.foundry.machine.volumes)
        self._sessions.delete_trash()
        while self._is_open:
            wants_slots = self._slots.spare < SPARE_SLOTS
            if not self._scheduler.round(_IDLE_S if wants_slots else None) and wants_slots:
                self._slots.make_spare()
        self._put_away()

    def _put_away(self) -> None:
        self._sessions.finish()
        for session_id in list(self._waiting):
            self._sessions.abort_build(session_id)
        for session_id in list(self._sessions.vessels):
            self._enqueue(session_id, lambda session_id=session_id: self._forget_vessel(session_id))  # type: ignore[misc]
        deadline = time.monotonic() + _STOP_DEADLINE_S
        while (self._waiting or self._sessions.is_deleting) and time.monotonic() < deadline:
            self._scheduler.round(0.1)

    def _forget_vessel(self, session_id: str) -> Job:
        yield from self._sessions.remove(session_id)

    # Requests

    def _receive(self) -> None:
        try:
            data = self._channel.recv(MAX_DATAGRAM_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_open = False
            self._scheduler.watch(self._channel.fileno(), 0, self._on_channel)
            return
        try:
            request = REQUESTS.decode(data)
        except ProtocolError as error:
            log("error", "bad request", reason=str(error))
            self._is_open = False
            return
        self._unanswered += 1
        self._dispatch(request)
        self._watch()

    def _dispatch(self, request: object) -> None:
        match request:
            case Build(seq, plan):
                self._submit(seq, plan.session_id, lambda: self._build(request))
            case Teardown(seq, session_id):
                self._sessions.abort_build(session_id)
                self._submit(seq, session_id, lambda: self._teardown(request))
            case Prepare(seq, session_id):
                self._submit(seq, session_id, lambda: self._prepare(request))
            case Furnish(seq, plan):
                self._submit(seq, plan.session_id, lambda: self._furnish(request))
            case SetFrozen(seq, session_id):
                self._submit(seq, session_id, lambda: self._set_frozen(request))
            case RemoveGroup(seq, session_id):
                self._submit(seq, session_id, lambda: self._remove_group(request))
            case SetLimits(seq, session_id):
                self._submit(seq, session_id, lambda: self._set_limits(request))
            case Attach(seq, session_id):
                self._submit(seq, session_id, lambda: self._at_once(request))
            case MakeGroup(seq, session_id):
                self._submit(seq, session_id, lambda: self._make_group(request))
            case Scan(seq):
                self._scheduler.spawn(self._answered(seq, None, self._scan(request)))
            case Survey(seq):
                self._scheduler.spawn(self._answered(seq, None, self._survey(request)))
            case RemoveStray(seq):
                self._scheduler.spawn(self._answered(seq, None, self._remove_stray(request)))
            case SetDisk(seq, session_id):
                self._submit(seq, session_id, lambda: self._at_once(request))
            case AskDisk(seq):
                self._scheduler.spawn(self._answered(seq, None, self._ask_disk(request)))
            case FindVictim(seq):
                self._scheduler.spawn(self._answered(seq, None, self._find_victim(request)))
            case ListWorkspaces(seq):
                self._scheduler.spawn(self._answered(seq, None, self._list_workspaces(request)))
            case AskQuota(seq, workspace_id):
                self._submit(seq, f"workspace {workspace_id}", lambda: self._ask_quota(request))
            case MakeWorkspace() | GrowWorkspace() | DiscardWorkspace() | PublishWorkspace() | SyncWorkspace():
                self._submit(request.seq, f"workspace {request.workspace_id}", lambda: self._workspace(request))
            case Start(seq) | UnpackImage(seq):
                self._scheduler.spawn(self._answered(seq, None, self._refuse_after_start()))

    def _submit(self, seq: int, session_id: str, work: Callable[[], Work]) -> None:
        self._enqueue(session_id, lambda: self._answered(seq, session_id, work()))

    def _enqueue(self, session_id: str, job: Callable[[], Job]) -> None:
        """Run `job` after everything that was asked of this session before."""
        if session_id in self._waiting:
            self._waiting[session_id].append(job)
        else:
            self._waiting[session_id] = deque([job])
            self._scheduler.spawn(self._in_order(session_id))

    def _in_order(self, session_id: str) -> Job:
        queue = self._waiting[session_id]
        while queue:
            yield from queue.popleft()()
        del self._waiting[session_id]

    def _answered(self, seq: int, session_id: str | None, work: Work) -> Job:
        """Run `work` and send what it returns; its failure is an answer too, and a line in the log."""
        try:
            message, fds = yield from work
        except InvalidName as error:
            message, fds = _failed(seq, session_id, failure_of("validate", error)), []
        except StepFailed as error:
            message, fds = _failed(seq, session_id, error), []
        except OSError as error:
            message, fds = _failed(seq, session_id, failure_of("system", error)), []
        self._unanswered -= 1
        self._send(message, fds)

    def _prepare(self, request: Prepare) -> Work:
        check_session_id(request.session_id)
        check_limits(request.limits)
        check_disk(request.disk)
        yield from self._sessions.prepare(request.session_id, request.limits, request.disk)
        return Ok(request.seq), []

    def _furnish(self, request: Furnish) -> Work:
        check_plan(request.plan)
        yield from self._sessions.furnish(request.plan)
        return Ok(request.seq), []

    def _build(self, request: Build) -> Work:
        check_plan(request.plan)
        built, fds = yield from self._sessions.build(request)
        log("info", "built", built.session_id, pid=built.identity.pid)
        return built, fds

    def _teardown(self, request: Teardown) -> Work:
        check_session_id(request.session_id)
        removed = yield from self._sessions.remove(request.session_id)
        counters = removed.counters
        log("info", "torn down", request.session_id, leftovers=list(removed.leftovers))
        return TornDown(
            *(request.seq, request.session_id, counters.oom_kills, counters.cpu_usec, counters.memory_peak_bytes),
            removed.leftovers,
        ), []

    def _set_frozen(self, request: SetFrozen) -> Work:
        check_session_id(request.session_id)
        yield from self._sessions.set_frozen(request.session_id, frozen=request.frozen)
        return Ok(request.seq), []

    def _make_group(self, request: MakeGroup) -> Work:
        check_session_id(request.session_id)
        check_group_name(request.name)
        membership, fd = yield from self._sessions.make_group(request.session_id, request.name)
        return Grouped(request.seq, membership), [fd]

    def _remove_group(self, request: RemoveGroup) -> Work:
        check_session_id(request.session_id)
        check_group_name(request.name)
        is_gone = yield from self._sessions.remove_group(request.session_id, request.name, kill=request.kill)
        if is_gone:
            return Ok(request.seq), []
        return Failed(request.seq, "group", request.name, errno.EBUSY, "something in the group lives on"), []

    def _set_limits(self, request: SetLimits) -> Work:
        check_session_id(request.session_id)
        check_limits(request.limits)
        yield from self._sessions.set_limits(request.session_id, request.limits)
        return Ok(request.seq), []

    def _find_victim(self, request: FindVictim) -> Work:
        check_session_id(request.session_id)
        kills = yield from self._sessions.find_kills(request.session_id)
        if not kills.last:
            return Victim(request.seq, ""), []
        kill = kills.last[-1]
        count, pids = (kills.count, kills.pids) if self._kernel_log.has_our_pids else (0, ())
        return Victim(request.seq, kill.name, kmsg.age_s(kill), count, pids), []

    def _ask_disk(self, request: AskDisk) -> Work:
        check_session_id(request.session_id)
        return DiskUse(request.seq, *self._sessions.disk_usage(request.session_id)), []
        yield  # a generator, like all work

    def _list_workspaces(self, request: ListWorkspaces) -> Work:
        names, more = workspaces.listed(self._layout, request.after, SCAN_BATCH)
        return WorkspacesListed(request.seq, names, more), []
        yield  # a generator, like all work

    def _ask_quota(self, request: AskQuota) -> Work:
        check_workspace_id(request.workspace_id)
        volumes = self._sessions.foundry.machine.volumes
        return QuotaFound(request.seq, volumes.quota_of(request.workspace_id)), []
        yield  # a generator, like all work

    def _workspace(
        self, request: MakeWorkspace | GrowWorkspace | DiscardWorkspace | PublishWorkspace | SyncWorkspace
    ) -> Work:
        check_workspace_id(request.workspace_id)
        machine = self._sessions.foundry.machine
        volumes, crash = machine.volumes, machine.crash
        match request:
            case MakeWorkspace():
                if request.quota is not None:
                    check_disk(request.quota)
                yield from workspaces.make(self._layout, volumes, request, crash)
            case GrowWorkspace():
                check_disk(DiskLimits(request.size_bytes, MIN_DISK_INODES))
                yield from workspaces.grow(self._layout, volumes, request, crash)
            case DiscardWorkspace(_, workspace_id, draft):
                yield from workspaces.discard(self._layout, workspace_id, draft=draft, crash=crash)
                self._sessions.delete_trash()
            case PublishWorkspace(_, workspace_id, replace):
                yield from workspaces.publish(self._layout, volumes, workspace_id, replace=replace, crash=crash)
                self._sessions.delete_trash()
            case SyncWorkspace(_, workspace_id):
                yield from workspaces.sync(self._layout, volumes, workspace_id)
        return Ok(request.seq), []

    def _scan(self, request: Scan) -> Work:
        found, more = self._sessions.scan(request.after, SCAN_BATCH)
        return Scanned(request.seq, tuple(found), more), []
        yield  # a generator, like all work

    def _survey(self, request: Survey) -> Work:
        return Surveyed(request.seq, tuple((yield from self._strays.find()))), []

    def _remove_stray(self, request: RemoveStray) -> Work:
        is_gone = yield from self._strays.remove(request.stray)
        self._sessions.delete_trash()
        if is_gone:
            log("warning", "stray removed", kind=request.stray.kind, name=request.stray.name)
            return Ok(request.seq), []
        return Failed(request.seq, "stray", request.stray.name, errno.EBUSY, "something of it is left"), []

    def _at_once(self, request: object) -> Work:
        """The requests that never wait."""
        answer: Answer
        match request:
            case Attach(seq, session_id):
                check_session_id(session_id)
                attached, fds = self._sessions.attach(session_id)
                answer = replace(attached, seq=seq), fds
            case SetDisk(seq, session_id, disk):
                check_session_id(session_id)
                check_disk(disk)
                self._sessions.set_disk(session_id, disk)
                answer = Ok(seq), []
            case _:
                raise AssertionError(type(request).__name__)
        return answer
        yield  # a generator, like all work

    def _refuse_after_start(self) -> Work:
        raise InvalidName("already started")
        yield  # a generator, like all work

    # Answers

    def _send(self, message: object, fds: list[int]) -> None:
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
        """Read as long as there is room for answers; write as long as some wait."""
        if not self._is_open:
            return
        has_room = self._unanswered + len(self._outbox) < MAX_UNANSWERED
        events = (selectors.EVENT_READ if has_room else 0) | (selectors.EVENT_WRITE if self._outbox else 0)
        if events != self._events:
            self._events = events
            self._scheduler.watch(self._channel.fileno(), events, self._on_channel)

    _events = -1

    def _on_channel(self) -> None:
        self._flush()
        self._receive()
        self._watch()


def _failed(seq: int, session_id: str | None, error: StepFailed) -> Failed:
    log(
        "warning",
        "request failed",
        session_id,
        stage=error.stage,
        path=error.path,
        errno=error.errno,
        reason=str(error),
    )
    return Failed(seq, error.stage, error.path, error.errno, str(error)[:MAX_MESSAGE])
