"""The tree: its children in start order, and the supervisor's interface on top of them.

    supervisor     one_for_one; children start in this order and stop in reverse
    ├── store      the one SQLite writer
    ├── events     the journal's way to disk
    ├── spool      output that is kept for a while
    ├── zygote     the one connection to nsinit
    ├── images     the image store
    ├── workspaces who has which, and their files without a session
    ├── sessions   id → Ref; one temporary session actor per sandbox
    ├── reaper     sweeps what no live session owns
    ├── pulse      measures how late the event loop is
    └── …          what the caller adds (the HTTP front)

Network leases and the warm pool join between `images` and `reaper`. What can be asked of a session's work is in
`tree_work.py`, of workspaces in `tree_workspaces.py`, of the node in `tree_node.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from functools import partial

import trio

from nsinit.wire.protocol import SeccompProfile
from sandkasten.actors.core import Ref, unwrap
from sandkasten.actors.diagnosis import Diagnosing
from sandkasten.actors.node import recovery, sessions
from sandkasten.actors.node.creating import Node
from sandkasten.actors.node.in_flight import Attended
from sandkasten.actors.node.inventory import Inventory, Removal
from sandkasten.actors.node.sessions import list_sessions
from sandkasten.actors.services import events, images, nsinit, store
from sandkasten.actors.services.directory import Entry, SessionDirectory
from sandkasten.actors.services.shared import Shared
from sandkasten.actors.services.store import do
from sandkasten.actors.session.messages import Borrow, Destroy, PauseSession, ResumeSession, Stats, Update
from sandkasten.actors.session.watch import translating_death
from sandkasten.actors.supervision import ChildSpec, GiveUp
from sandkasten.actors.tree_node import WorkOfNode
from sandkasten.actors.tree_work import WorkOfSessions
from sandkasten.actors.tree_workspaces import WorkOfWorkspaces
from sandkasten.actors.workspaces import actor as workspaces
from sandkasten.actors.workspaces.holds import Attachments
from sandkasten.actors.workspaces.transfer import LocalFileReader, LocalFileWriter, open_reader, open_writer
from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares
from sandkasten.config import Config
from sandkasten.counters.metrics import Metrics, watch_loop
from sandkasten.crash import Crash
from sandkasten.host.paths import DataPaths
from sandkasten.images.catalog import Catalog
from sandkasten.journal.ring import Journal
from sandkasten.links.nsinit import StartNsinit, start_as_child
from sandkasten.links.runner import RunnerLink
from sandkasten.model import (
    SESSION_ID,
    PauseSpec,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Status,
)
from sandkasten.model.errors import Capacity, LauncherGone, SandkastenError, SessionExpired, SessionNotFound
from sandkasten.model.lifecycle import LIVE, ended_error
from sandkasten.model.listing import SessionPage, SessionQuery
from sandkasten.model.node import Machine
from sandkasten.output.run_archive import RunArchive
from sandkasten.output.spool import Spool
from sandkasten.store.sessions import get_session, live_sessions

log = logging.getLogger(__name__)

_MATCHERS = 2
_OBSERVERS = 2
_SPOOL_STOP_S = 5.0


class LocalSupervisor(WorkOfSessions, WorkOfWorkspaces, WorkOfNode):
    """The supervisor of this machine; implements `supervisor.Supervisor`."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        node: Node,
        *,
        machine: Machine,
        vessels: int,
        profiles: Sequence[SeccompProfile] = (),
        start_nsinit: StartNsinit = start_as_child,
    ) -> None:
        self._config, self._catalog, self._node, self._vessels = config, catalog, node, vessels
        self._machine, self._started_at = machine, datetime.now(UTC)
        self._profiles, self._start_nsinit = profiles, start_nsinit
        self._store, self._writer, self._zygote = Ref("store"), Ref("events"), Ref("zygote")
        self._images, self._workspaces = Ref("images"), Ref("workspaces")
        self._sessions, self._reaper = Ref("sessions"), Ref("reaper")
        spool_dir = DataPaths(config.data_dir).spool
        directory = SessionDirectory()
        self._shared = Shared(
            store=self._store,
            zygote=self._zygote,
            workspaces=self._workspaces,
            directory=directory,
            journal=Journal(),
            spool=Spool.configured(spool_dir, config.runs),
            archive=RunArchive.configured(spool_dir, config.runs),
            metrics=Metrics(),
            shares=KeyShares(KeyRing(), runs_of=directory.runs_of),
            crash=Crash(config.testing.crash_at),
        )
        self._directory, self._journal, self._metrics = directory, self._shared.journal, self._shared.metrics
        self._journal.on_event = self._metrics.note_event
        self._attachments, self._attended, self._usages = Attachments(), Attended(), {}
        self.inventory = Inventory(config.data_dir, node.boot_id, self._shared)
        self._removal = Removal(spool_dir, self._shared, self.inventory)
        self._diagnosing = Diagnosing(self._shared)
        self._cgroup_dirs: Mapping[str, str] = {}
        self._matchers = trio.CapacityLimiter(_MATCHERS)
        self._observers = trio.CapacityLimiter(_OBSERVERS)
        self._is_spool_open = False

    @property
    def shares(self) -> KeyShares:
        """The API keys besides the configured one, and what each has. Whoever serves on keys fills the ring."""
        return self._shared.shares

    @property
    def node_id(self) -> str:
        return self._node.id

    def children(self) -> Sequence[ChildSpec]:
        """Return the tree's children in start order."""
        return (
            ChildSpec("store", self._start_store),
            ChildSpec("events", self._start_events),
            ChildSpec("spool", self._start_spool),
            ChildSpec("zygote", self._start_zygote, may_keep_failing=True),
            ChildSpec("images", self._start_images),
            ChildSpec("workspaces", self._start_workspaces),
            ChildSpec("sessions", self._start_sessions),
            ChildSpec("reaper", self._start_reaper),
            ChildSpec("pulse", partial(watch_loop, self._metrics)),
        )

    async def _start_store(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = store.Store(self._store, self._config.db_path, metrics=self._metrics)
        await actor.run(task_status=task_status)

    async def _start_events(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = events.Events(self._writer, self._journal, store=self._store, kept=self._config.events.keep)
        await actor.run(task_status=task_status)

    async def _start_spool(self, *, task_status: trio.TaskStatus[None]) -> None:
        if not self._is_spool_open:  # a restart after a bug keeps what there is
            await self._shared.spool.open()
            live = {each.session.id for each in await self._store.ask_again(do(live_sessions))}
            await trio.to_thread.run_sync(self._shared.archive.open, live)
            self._is_spool_open = True
        task_status.started()
        try:
            await self._shared.spool.run()
        except trio.Cancelled:
            with trio.move_on_after(_SPOOL_STOP_S, shield=True):
                await self._shared.spool.close()
            raise

    async def _start_zygote(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        data_dir, disk = self._config.data_dir, self._config.disk.mode
        actor = nsinit.NsinitClient(
            self._zygote,
            data_dir,
            self._node.id,
            disk=disk,
            profiles=self._profiles,
            crash_at=self._shared.crash.take_foreign(),
            start_nsinit=self._start_nsinit,
        )
        try:
            await actor.run(task_status=task_status)
        except* LauncherGone as gone:  # who is not root any more can't start another
            raise GiveUp(str(unwrap(gone))) from None

    async def _start_images(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        await images.Images(self._images, self._catalog).run(task_status=task_status)

    async def _start_workspaces(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = workspaces.Workspaces(
            self._workspaces,
            store=self._store,
            zygote=self._zygote,
            directory=self._directory,
            attachments=self._attachments,
            paths=DataPaths(self._config.data_dir),
            new_id=self._node.new_session_id,
            crash=self._shared.crash,
        )
        await actor.run(task_status=task_status)

    async def _start_sessions(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = sessions.Sessions(
            self._sessions,
            self._config,
            self._node,
            self._shared,
            images=self._images,
            attachments=self._attachments,
            inventory=self.inventory,
            removal=self._removal,
            vessels=self._vessels,
        )
        await actor.run(task_status=task_status)

    async def _start_reaper(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = recovery.Reaper(
            self._reaper,
            self._shared,
            sessions=self._sessions,
            inventory=self.inventory,
            removal=self._removal,
            keep_records_s=self._config.records.keep_seconds,
        )
        await actor.run(task_status=task_status)

    def close(self) -> None:
        """The tree has ended: whoever still follows the journal is told."""
        self._journal.close()

    async def finish(self) -> None:
        """Begin nothing new, and wait until creates, commands and files that somebody waits for have ended."""
        self._attended.close()
        try:
            await self._sessions.ask_again(sessions.Refuse())
        except SandkastenError as error:
            log.error("creates_not_refused", extra={"error": str(error)})
        await self._attended.wait_none()

    async def leave_sessions(self) -> None:
        """Let go of all sessions: they run on, and who waits for a command in one is answered `daemon_restarted`."""
        try:
            await self._sessions.ask_again(sessions.LeaveAll())
        except SandkastenError as error:
            log.error("sessions_not_left", extra={"error": str(error)})

    async def end_sessions(self) -> None:
        """Refuse new sessions and end all there are."""
        try:
            await self._sessions.ask_again(sessions.DestroyAll())
        except SandkastenError as error:
            log.error("end_of_sessions_failed", extra={"error": str(error)})

    # Sessions ---------------------------------------------------------------------------------------------------

    async def create(self, spec: SessionSpec) -> Session:
        began = trio.current_time()
        outcome, timings_ms = "bug", dict[str, float]()
        try:
            session = await self._sessions.ask(sessions.Create(spec))
            outcome, timings_ms = "ok", dict(session.timings_ms)
        except SandkastenError as error:
            outcome = error.code
            raise
        except trio.Cancelled:
            outcome = "left"
            raise
        finally:
            self._metrics.note_create(outcome, trio.current_time() - began, timings_ms)
        return session

    async def get(self, session_id: str) -> Session:
        entry = self._directory.get(session_id)
        return entry.session if entry is not None else await self._recorded(session_id)

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        statuses = frozenset({status}) if status is not None else frozenset(Status) if ended else LIVE
        return (await self.find(SessionQuery(statuses, limit=limit))).sessions

    async def find(self, query: SessionQuery) -> SessionPage:
        return await list_sessions(query, directory=self._directory, store=self._store)

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        entry = await self._live(session_id)
        return await entry.ref.ask(Update(patch))

    async def pause(self, session_id: str, spec: PauseSpec | None = None) -> Session:
        entry = await self._live(session_id)
        return await entry.ref.ask(PauseSession(spec or PauseSpec()))

    async def resume(self, session_id: str) -> Session:
        entry = await self._live(session_id)
        return await entry.ref.ask(ResumeSession())

    async def destroy(self, session_id: str) -> Session:
        entry = self._directory.get(session_id)
        if entry is not None:
            try:
                session = _require_ended(await entry.ref.ask(Destroy()))
                await entry.ended.wait()  # what it took can be had again
                return session
            except SessionExpired:
                log.debug("destroy_raced", extra={"session_id": session_id})  # it ended on its own meanwhile
        session = await self._recorded(session_id)
        if session.status in LIVE and self._directory.get(session_id) is None:
            session = await self._sessions.ask(sessions.Forget(session_id))
        return _require_ended(session)

    async def wait_ended(self, session_id: str) -> Session:
        entry = self._directory.get(session_id)
        if entry is not None:
            await entry.ended.wait()
        return await self._recorded(session_id)

    async def stats(self, session_id: str) -> SessionStats:
        entry = await self._live(session_id)
        return await entry.ref.ask(Stats())

    # Files ------------------------------------------------------------------------------------------------------

    def open_read(self, session_id: str, path: str, *, max_bytes: int) -> AbstractAsyncContextManager[LocalFileReader]:
        return self._open_read(session_id, path, max_bytes)

    @asynccontextmanager
    async def _open_read(self, session_id: str, path: str, max_bytes: int) -> AsyncIterator[LocalFileReader]:
        async with self._loan(session_id) as link, open_reader(link, path, max_bytes) as reader:
            yield reader

    def open_write(self, session_id: str, path: str) -> AbstractAsyncContextManager[LocalFileWriter]:
        return self._open_write(session_id, path)

    @asynccontextmanager
    async def _open_write(self, session_id: str, path: str) -> AsyncIterator[LocalFileWriter]:
        async with self._loan(session_id) as link, open_writer(link, path) as writer:
            yield writer

    @asynccontextmanager
    async def _loan(self, session_id: str) -> AsyncIterator[RunnerLink]:
        with self._attended.one_more():
            entry = await self._live(session_id)
            done = trio.Event()
            try:
                async with translating_death(entry.ref):
                    yield await entry.ref.ask(Borrow(done))
            finally:
                done.set()

    async def _live(self, session_id: str) -> Entry:
        """Return the entry of a live session; of an ended one, raise what became of it."""
        entry = self._directory.get(session_id)
        if entry is None:
            recorded = await self._recorded(session_id)
            if recorded.status in LIVE:
                self._attended.check_open()  # it was left to the next start
            raise ended_error(recorded)
        return entry

    async def _recorded(self, session_id: str) -> Session:
        if not SESSION_ID.match(session_id):
            raise SessionNotFound("no such session", session_id=session_id[:64])
        record = self._directory.unwritten.get(session_id) or await self._store.ask_again(do(get_session, session_id))
        if record is None:
            raise SessionNotFound("no such session", session_id=session_id)
        return record.session


def _require_ended(session: Session) -> Session:
    """Return a session that has ended; of one whose end has only begun say so."""
    if session.status in LIVE:
        raise Capacity("the session's end has begun and will be finished", session_id=session.id)
    return session
