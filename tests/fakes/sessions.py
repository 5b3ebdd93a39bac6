"""The part of the supervisor in memory that has sessions and what happens to them. Knows no HTTP."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import attrs
import trio
from prometheus_client.metrics_core import Metric

from sandkasten.actors.node_view import defaults_in_force, limits_in_force
from sandkasten.config import Config
from sandkasten.counters.node import committed
from sandkasten.host.checks import works
from sandkasten.host.protections import Situation, protections
from sandkasten.model import (
    FOREVER_S,
    STATEFUL,
    EndReason,
    Event,
    EventType,
    Limits,
    Pause,
    PauseSpec,
    Pressure,
    Session,
    SessionOptions,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Stall,
    Status,
    errors,
)
from sandkasten.model.lifecycle import LIVE, ended_error
from sandkasten.model.listing import SessionPage, SessionQuery, page_of
from sandkasten.model.node import (
    Amounts,
    Diagnosis,
    Machine,
    MissingPart,
    NodeCapacity,
    NodeInfo,
    Part,
    Readiness,
    System,
)

DEFAULT_TTL_S = 1800.0


class Events:
    """`EventStream` over the list of events."""

    def __init__(self, supervisor: FakeSessions, session_id: str | None, position: int) -> None:
        self._supervisor = supervisor
        self._session_id = session_id
        self._position = position

    @property
    def cursor(self) -> str:
        return f"{self._position:08d}"

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        while True:
            self._supervisor.check_cursor(self._position)
            while self._position < len(self._supervisor.journal):
                event = self._supervisor.journal[self._position]
                self._position += 1
                if self._session_id in (None, event.session_id):
                    return event
            await self._supervisor.event_emitted.wait()


def _system(now: datetime) -> System:
    config = Config()
    machine = Machine(now, [works("clone3", "done")], {"cgroup_mode": "mode v2"})
    return System(
        version="0",
        python="3.11.0",
        kernel="6.1.0",
        architecture="x86_64",
        cgroup_mode="v2",
        features={"overlay_by_fd": True},
        defaults=defaults_in_force(config),
        limits=limits_in_force(config),
        protections=protections(Situation(config, machine)),
        machine=machine,
    )


class FakeSessions:
    """Sessions are records. `events_forgotten` is how many of the journal's events are not kept any more."""

    node_id = "fake"

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.specs: list[SessionSpec] = []
        self.attendants: Counter[str] = Counter()
        self.patches: list[SessionPatch] = []
        self.journal: list[Event] = []
        self.events_forgotten = 0
        self.families: list[Metric] = []
        self.event_emitted = trio.Event()
        self.readiness_checks = {"store": "ok", "zygote": "ok", "disk": "ok"}
        self.create_failure: Exception | None = None
        self.is_drained = False
        self.started_at = datetime.now(UTC)
        self.system_answer = _system(self.started_at)

    async def create(self, spec: SessionSpec) -> Session:
        await trio.lowlevel.checkpoint()
        if self.create_failure is not None:
            raise self.create_failure
        if self.is_drained:
            raise errors.Draining("this node takes no new sessions for now", retry_after_s=30)
        self.specs.append(spec)
        now = datetime.now(UTC)
        ttl_s = spec.ttl_s or DEFAULT_TTL_S
        session = Session(
            id=secrets.token_hex(12),
            image=spec.image or "python",
            status=Status.RUNNING,
            cwd="/workspace",
            created_at=now,
            expires_at=None if ttl_s == FOREVER_S else now + timedelta(seconds=ttl_s),
            last_activity=now,
            ttl_s=ttl_s,
            max_lifetime_s=spec.max_lifetime_s or FOREVER_S,
            limits=spec.limits or Limits(),
            workspace_id=spec.workspace_id,
            key_id=spec.key_id,
            labels=dict(spec.labels),
            options=SessionOptions(exec_mode=spec.exec_mode or STATEFUL, seccomp=spec.seccomp or "strict"),
            timings_ms={"queue": 0.1, "clone 3": 2.5},
        )
        self.sessions[session.id] = session
        self.environments[session.id] = dict(spec.env)
        self.emit(EventType.SESSION_CREATED, session.id, image=session.image)
        return session

    async def get(self, session_id: str) -> Session:
        await trio.lowlevel.checkpoint()
        try:
            return self.sessions[session_id]
        except KeyError:
            raise errors.SessionNotFound("no such session") from None

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        await trio.lowlevel.checkpoint()
        statuses = frozenset({status}) if status else frozenset(Status) if ended else LIVE
        return (await self.find(SessionQuery(statuses, limit=limit))).sessions

    async def find(self, query: SessionQuery) -> SessionPage:
        await trio.lowlevel.checkpoint()
        return page_of(query, self.sessions.values())

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        session = await self._live(session_id)
        self.patches.append(patch)
        changes = {name: value for name, value in attrs.asdict(patch, recurse=False).items() if value is not None}
        for name, value in (changes.pop("env", None) or {}).items():
            if value is None:
                self.environments[session_id].pop(name, None)
            else:
                self.environments[session_id][name] = value
        self.sessions[session_id] = attrs.evolve(session, **changes)
        return self.sessions[session_id]

    async def pause(self, session_id: str, spec: PauseSpec | None = None) -> Session:
        session, spec = await self._live(session_id), spec or PauseSpec()
        since = datetime.now(UTC) if session.pause is None else session.pause.since
        pause = Pause(since, spec.auto_resume, spec.stop_lease)
        self.sessions[session_id] = attrs.evolve(session, status=Status.PAUSED, pause=pause)
        return self.sessions[session_id]

    async def resume(self, session_id: str) -> Session:
        session = await self._live(session_id)
        self.sessions[session_id] = attrs.evolve(session, status=Status.RUNNING, pause=None)
        return self.sessions[session_id]

    async def destroy(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if session.status in LIVE:
            session = self.end(session_id, Status.DESTROYED, "destroyed by request", EndReason.USER)
        return session

    def end(self, session_id: str, status: Status, reason: str, end_reason: EndReason = EndReason.CRASHED) -> Session:
        """Let a session end as if by itself."""
        ended = attrs.evolve(self.sessions[session_id], status=status, reason=reason, end_reason=end_reason)
        self.sessions[session_id] = ended
        self.emit(EventType(f"session.{status.value}"), session_id, reason=reason, end_reason=end_reason.value)
        return self.sessions[session_id]

    async def wait_ended(self, session_id: str) -> Session:
        while (session := await self.get(session_id)).status in LIVE:
            await self.event_emitted.wait()
        return session

    @asynccontextmanager
    async def attend(self, session_id: str) -> AsyncIterator[None]:
        await self._live(session_id)
        self.attendants[session_id] += 1
        self.event_emitted.set()
        try:
            yield
        finally:
            self.attendants[session_id] -= 1

    async def stats(self, session_id: str) -> SessionStats:
        await self._live(session_id)
        return SessionStats(
            memory_bytes=1024,
            memory_limit=2048,
            cpu_usage_usec=99,
            cpu_throttled=0,
            pids=2,
            pids_limit=256,
            oom_kills=0,
            memory_pressure=Pressure(some=Stall(0.5, 0.1, 0.0, total_usec=7)),
        )

    def emit(self, kind: EventType, session_id: str, **data: object) -> None:
        """Let something happen. Cursors count the events from 1 on."""
        self.journal.append(Event(f"{len(self.journal) + 1:08d}", datetime.now(UTC), kind, session_id, data))
        self.event_emitted.set()
        self.event_emitted = trio.Event()

    def check_cursor(self, position: int) -> None:
        """Raise `CursorGone` if what follows the first `position` events is not kept."""
        if position < self.events_forgotten:
            raise errors.CursorGone("those events are not kept any more", oldest=f"{self.events_forgotten:08d}")

    @asynccontextmanager
    async def events(self, *, session_id: str | None = None, after: str | None = None) -> AsyncIterator[Events]:
        if session_id is not None:
            await self.get(session_id)
        position = len(self.journal)
        if after is not None:
            if not (after.isascii() and after.isdigit() and len(after) == 8 and int(after) <= position):
                raise errors.InvalidRequest("the cursor is malformed", cursor="is none of this server")
            position = int(after)
        self.check_cursor(position)
        yield Events(self, session_id, position)

    async def readiness(self) -> Readiness:
        await trio.lowlevel.checkpoint()
        return Readiness(all(value == "ok" for value in self.readiness_checks.values()), self.readiness_checks)

    async def system(self) -> System:
        await trio.lowlevel.checkpoint()
        return self.system_answer

    async def diagnose(self, session_id: str) -> Diagnosis:
        parts: dict[str, Part] = {"runner": MissingPart("there is none"), "lease": {"activities": 0}}
        return Diagnosis(datetime.now(UTC), await self.get(session_id), parts)

    async def metrics(self) -> Sequence[Metric]:
        await trio.lowlevel.checkpoint()
        return self.families

    async def node(self) -> NodeInfo:
        await trio.lowlevel.checkpoint()
        live = [session for session in self.sessions.values() if session.status in LIVE]
        return NodeInfo(
            id=self.node_id,
            incarnation=1,
            status="draining" if self.is_drained else "ready" if (await self.readiness()).ready else "not_ready",
            time=datetime.now(UTC),
            started_at=self.started_at,
            totals=Amounts(sessions=1000, cpu=2.0, memory_bytes=2**32, pids=32768, disk_bytes=2**40),
            committed=committed(session.limits for session in live),
            used=Amounts(sessions=len(live), memory_bytes=4096, disk_bytes=2**30),
            images=("host",),
            sessions=dict(Counter(session.status.value for session in live)),
        )

    async def capacity(self) -> NodeCapacity:
        return await self.node()

    async def drain(self) -> NodeInfo:
        self.is_drained = True
        return await self.node()

    async def undrain(self) -> NodeInfo:
        self.is_drained = False
        return await self.node()

    async def _live(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if session.status not in LIVE:
            raise ended_error(session)
        return session
