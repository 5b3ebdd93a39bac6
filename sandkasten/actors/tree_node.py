"""The node's part of the supervisor's interface: whether it is ready, what it is, what it has and counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import attrs
import trio
from prometheus_client.metrics_core import Metric

from sandkasten.actors.core import Ask, R, Ref
from sandkasten.actors.diagnosis import Diagnosing
from sandkasten.actors.node import recovery, sessions
from sandkasten.actors.node.creating import Node
from sandkasten.actors.node_view import NodeFacts, Observed, describe_capacity, describe_system, measure
from sandkasten.actors.services.nsinit import Describe
from sandkasten.actors.services.nsinit import ping as ping_nsinit
from sandkasten.actors.services.shared import Shared
from sandkasten.actors.services.store import do
from sandkasten.config import Config
from sandkasten.images.catalog import Catalog
from sandkasten.model import SESSION_ID
from sandkasten.model.errors import SandkastenError, SessionNotFound
from sandkasten.model.node import Diagnosis, Machine, NodeCapacity, NodeInfo, Readiness, System
from sandkasten.store.database import ping

_METRICS_S = 1.0
_READY_S = 5.0
_MIN_FREE_RATIO = 0.02


class WorkOfNode:
    """See the module's docstring. The heir brings the fields."""

    _config: Config
    _catalog: Catalog
    _node: Node
    _machine: Machine
    _started_at: datetime
    _shared: Shared
    _store: Ref
    _writer: Ref
    _zygote: Ref
    _images: Ref
    _sessions: Ref
    _reaper: Ref
    _diagnosing: Diagnosing
    _cgroup_dirs: Mapping[str, str]
    _observers: trio.CapacityLimiter

    async def readiness(self) -> Readiness:
        checks = {
            "store": await _check(self._store, do(ping)),
            "zygote": await _check(self._zygote, ping_nsinit()),
            "sessions": "ok" if self._sessions.is_alive else "not running",
            "disk": await trio.to_thread.run_sync(_check_disk, self._config),
        }
        return Readiness(ready=all(each == "ok" for each in checks.values()), checks=checks)

    async def system(self) -> System:
        ready = await self._zygote.ask_again(Describe())
        return await trio.to_thread.run_sync(describe_system, self._config, self._machine, ready)

    async def capacity(self) -> NodeCapacity:
        is_up = all(ref.is_alive for ref in (self._store, self._zygote, self._sessions))
        return await self._capacity("ready" if is_up else "not_ready")

    async def _capacity(self, status: str) -> NodeCapacity:
        ready = await self._zygote.ask_again(Describe())
        occupancy = await self._sessions.ask_again(sessions.Occupied())
        facts = NodeFacts(
            status="draining" if occupancy.is_draining else status,
            sessions=[entry.session for entry in self._shared.directory],
            max_sessions=occupancy.max_sessions,
            committed=occupancy.committed,
            vessels=occupancy.vessels,
            queued=occupancy.queued,
            cgroup_dirs=ready.cgroup_dirs,
        )
        return await describe_capacity(self._config, self._catalog, facts)

    async def node(self) -> NodeInfo:
        found = await self._capacity("ready" if (await self.readiness()).ready else "not_ready")
        return NodeInfo(
            id=self._node.id,
            incarnation=self._node.incarnation,
            time=datetime.now(UTC),
            started_at=self._started_at,
            **attrs.asdict(found, recurse=False),
        )

    async def drain(self) -> NodeInfo:
        await self._sessions.ask_again(sessions.Drain(drained=True))
        return await self.node()

    async def undrain(self) -> NodeInfo:
        await self._sessions.ask_again(sessions.Drain(drained=False))
        return await self.node()

    async def diagnose(self, session_id: str) -> Diagnosis:
        if not SESSION_ID.match(session_id):
            raise SessionNotFound("no such session", session_id=session_id[:64])
        return await self._diagnosing.diagnose(session_id)

    async def metrics(self) -> Sequence[Metric]:
        if not self._cgroup_dirs:
            with trio.move_on_after(_METRICS_S), suppress(SandkastenError):
                self._cgroup_dirs = (await self._zygote.ask(Describe())).cgroup_dirs
        seen = Observed(
            metrics=self._shared.metrics,
            directory=self._shared.directory,
            journal=self._shared.journal,
            spool=self._shared.spool,
            parts=(self._store, self._writer, self._zygote, self._images, self._sessions, self._reaper),
            zygote=self._zygote,
            data_dir=self._config.data_dir,
            cgroup_dirs=self._cgroup_dirs,
            node_id=self._node.id,
        )
        return await measure(seen, limiter=self._observers)

    async def sweep(self) -> int:
        """Have the reaper sweep now; return what it tore down or finished."""
        return await self._reaper.ask(recovery.Sweep())


async def _check(ref: Ref, message: Ask[R]) -> str:
    with trio.move_on_after(_READY_S):
        try:
            await ref.ask(message)
        except SandkastenError as error:
            return str(error)
        else:
            return "ok"
    return "does not answer"


def _check_disk(config: Config) -> str:
    for name, path in (("data directory", config.data_dir), ("database", config.db_path.parent)):
        space = os.statvfs(path)
        free_ratio = space.f_bavail / max(space.f_blocks, 1)
        if free_ratio <= _MIN_FREE_RATIO:
            return f"only {free_ratio:.1%} of the {name}'s disk is free"
    return "ok"
