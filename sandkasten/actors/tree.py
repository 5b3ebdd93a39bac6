"""The tree: its children in start order, and the supervisor's interface on top of them.

    supervisor     one_for_one; children start in this order and stop in reverse
    ├── store      the one SQLite writer
    ├── events     the journal's way to disk
    ├── output     output and records of runs
    ├── nsinit     the one connection to the privileged process
    ├── broker     the process that has the secrets
    ├── egress     the process that carries the connections of sessions
    ├── previews   the process that carries HTTP to servers in sessions
    ├── images     the image catalogue
    ├── jobs       pulls of images
    ├── workspaces their holds, records and files
    ├── sessions   id → Ref; one temporary session actor per sandbox
    ├── reaper     sweeps leftovers every minute
    ├── uploads    removes part files that nobody goes on with
    ├── pulse      measures how late the event loop is
    ├── history    samples the use of each session
    └── …          children of the caller (the HTTP front)

`LocalSupervisor` is the interface. Sessions and the node are here, runs and terminals in `tree_work.py`, workspaces in
`tree_workspaces.py`; the numbers of the node are assembled in `node_view.py`, a diagnosis in `diagnosis.py`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial

import attrs
import trio
from prometheus_client.metrics_core import Metric

from nsinit.wire.protocol import IoLimits, SeccompProfile
from sandkasten.actors.core import Ask, R, Ref, unwrap
from sandkasten.actors.diagnosis import Diagnosing
from sandkasten.actors.node import recovery, sessions
from sandkasten.actors.node.creating import NodeIdentity
from sandkasten.actors.node.recovery import LeftoverSearch
from sandkasten.actors.node.sessions import list_sessions
from sandkasten.actors.node_view import MetricSources, NodeFacts, describe_capacity, describe_system, measure
from sandkasten.actors.services import broker, commits, egress, events, exports, images, jobs, nsinit, previews, store
from sandkasten.actors.services.directory import Entry, SessionDirectory, Shared
from sandkasten.actors.services.history import UsageHistory
from sandkasten.actors.services.layers import NsinitLayers
from sandkasten.actors.services.nsinit import Describe
from sandkasten.actors.services.nsinit import ping as ping_nsinit
from sandkasten.actors.services.store import do
from sandkasten.actors.session.messages import (
    Activity,
    Attend,
    Borrow,
    ClosePreview,
    Destroy,
    HoldStill,
    OpenPreview,
    PauseSession,
    ResumeSession,
    Stats,
    Update,
    Wake,
)
from sandkasten.actors.session.watch import translating_death
from sandkasten.actors.supervision import ChildSpec, GiveUp
from sandkasten.actors.tree_work import InFlight, WorkOfSessions
from sandkasten.actors.tree_workspaces import WorkOfWorkspaces
from sandkasten.actors.workspaces import actor as workspaces
from sandkasten.actors.workspaces.files import LocalFiles
from sandkasten.actors.workspaces.holds import Holds
from sandkasten.actors.workspaces.records import QuotaPolicy
from sandkasten.actors.workspaces.uploads import WORKSPACE_PLACE, sweep_uploads
from sandkasten.admission.budget import disk_floor_bytes
from sandkasten.admission.keys import KeyRing
from sandkasten.admission.network import bridge_terms, fit_network, resolve_network
from sandkasten.admission.previews import check_preview, check_publish, preview_key
from sandkasten.admission.quotas import KeyShares
from sandkasten.admission.secrets import placeholder_key
from sandkasten.config import MIB, Config, DiskSettings
from sandkasten.counters.metrics import Metrics, watch_loop
from sandkasten.counters.node import session_bounds, terminals_of
from sandkasten.crash import Crash
from sandkasten.errors import (
    Capacity,
    LauncherGone,
    PreviewNotFound,
    SandkastenError,
    SessionExpired,
    SessionNotFound,
)
from sandkasten.host.paths import DataPaths, credentials_file
from sandkasten.host.resolvers import machine_resolvers
from sandkasten.images.catalog import Catalog
from sandkasten.images.registry.blobs import Blobs
from sandkasten.journal.egress import EgressLogs
from sandkasten.journal.ring import Journal
from sandkasten.links.processes import StartEgress, StartNsinit, start_as_child, start_egress_as_child
from sandkasten.links.runner import RunnerLink
from sandkasten.model import (
    SESSION_ID,
    PauseSpec,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Status,
    UsageSample,
    WarmProcess,
)
from sandkasten.model.image import CommitSpec, Compression, ImageDescription, Pruned
from sandkasten.model.job import ImageJob, ImportSpec, PullSpec
from sandkasten.model.lifecycle import LIVE, ended_error
from sandkasten.model.listing import SessionPage, SessionQuery
from sandkasten.model.network import (
    EgressPage,
    EgressVerdict,
    NetworkInfo,
    NewSecret,
    Preview,
    PreviewSpec,
    SecretInfo,
    SignedPreview,
)
from sandkasten.model.node import Diagnosis, Machine, NodeCapacity, NodeInfo, PoolInfo, Readiness, System
from sandkasten.model.workspace import EVERYWHERE, Within, WorkspaceQuota
from sandkasten.output.store import OutputStore
from sandkasten.store.database import ping
from sandkasten.store.sessions import client_session, live_sessions

log = logging.getLogger(__name__)

_MATCHERS = 2
_OBSERVERS = 2
_METRICS_S = 1.0
_READY_S = 5.0
_LET_GO_S = 30.0
_MIN_FREE_RATIO = 0.02


class LocalSupervisor(WorkOfSessions, WorkOfWorkspaces):
    """The supervisor of this machine; implements `supervisor.Supervisor`."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        node: NodeIdentity,
        *,
        machine: Machine,
        pool_size: int,
        profiles: Sequence[SeccompProfile] = (),
        start_nsinit: StartNsinit = start_as_child,
        start_egress: StartEgress | None = start_egress_as_child,
        warm: Mapping[str, WarmProcess] | None = None,
    ) -> None:
        self._config, self._catalog, self._node, self._pool_size = config, catalog, node, pool_size
        self._machine, self._started_at = machine, datetime.now(UTC)
        self._profiles, self._start_nsinit = profiles, start_nsinit
        self._start_egress, self._warm = start_egress, warm or {}
        self._store, self._writer, self._nsinit = Ref("store"), Ref("events"), Ref("nsinit")
        self._egress, self._images, self._workspaces = Ref("egress"), Ref("images"), Ref("workspaces")
        self._previews, self._broker = Ref("previews"), Ref("broker")
        self._sessions, self._reaper, self._jobs = Ref("sessions"), Ref("reaper"), Ref("jobs")
        spool_dir = DataPaths(config.data_dir).spool
        directory, metrics = SessionDirectory(), Metrics()
        self._shared = Shared(
            store=self._store,
            nsinit=self._nsinit,
            egress=self._egress,
            broker=self._broker,
            previews=self._previews,
            workspaces=self._workspaces,
            directory=directory,
            journal=Journal(on_event=metrics.note_event),
            egress_logs=EgressLogs(),
            output=OutputStore.configured(spool_dir, config.runs),
            metrics=metrics,
            shares=KeyShares(KeyRing(), runs_of=directory.runs_of),
            crash=Crash(config.testing.crash_at),
        )
        self._directory, self._journal, self._metrics = directory, self._shared.journal, self._shared.metrics
        self._holds, self._in_flight, self._usages = Holds(), InFlight(), {}
        self.leftovers = LeftoverSearch(config.data_dir, node.boot_id, self._shared)
        self._diagnosing = Diagnosing(self._shared)
        self._cgroup_dirs: Mapping[str, str] = {}
        self._history = UsageHistory(directory, self._nsinit)
        self._matchers = trio.CapacityLimiter(_MATCHERS)
        self._observers = trio.CapacityLimiter(_OBSERVERS)
        self._is_output_open = False

    @property
    def shares(self) -> KeyShares:
        """The API keys besides the configured one, with the shares of each. The watch of the key file fills the
        ring."""
        return self._shared.shares

    @property
    def node_id(self) -> str:
        return self._node.id

    def children(self) -> Sequence[ChildSpec]:
        """Return the tree's children in start order."""
        return (
            ChildSpec("store", self._start_store),
            ChildSpec("events", self._start_events),
            ChildSpec("output", self._start_output),
            ChildSpec("nsinit", self._start_nsinit_client, may_keep_failing=True),
            ChildSpec("broker", self._start_broker_client, may_keep_failing=True),
            ChildSpec("egress", self._start_egress_client, may_keep_failing=True),
            ChildSpec("previews", self._start_preview_client),
            ChildSpec("images", self._start_images),
            ChildSpec("jobs", self._start_jobs),
            ChildSpec("workspaces", self._start_workspaces),
            ChildSpec("sessions", self._start_sessions),
            ChildSpec("reaper", self._start_reaper),
            ChildSpec("uploads", partial(sweep_uploads, self._store, self._files_at)),
            ChildSpec("pulse", partial(watch_loop, self._metrics)),
            ChildSpec("history", self._history.run, may_keep_failing=True),
        )

    async def _start_store(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = store.Store(self._store, self._config.db_path, metrics=self._metrics)
        await actor.run(task_status=task_status)

    async def _start_events(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = events.Events(self._writer, self._journal, store=self._store, kept=self._config.events.keep)
        await actor.run(task_status=task_status)

    async def _start_output(self, *, task_status: trio.TaskStatus[None]) -> None:
        if not self._is_output_open:  # a restart after a bug keeps the output
            live = {each.session.id for each in await self._store.ask_again(do(live_sessions))}
            await self._shared.output.open(live)
            self._is_output_open = True
        task_status.started()
        try:
            await self._shared.output.run()
        except trio.Cancelled:
            self._shared.output.close()
            raise

    async def _start_nsinit_client(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        data_dir, disk = self._config.data_dir, self._config.disk.mode
        actor = nsinit.NsinitClient(
            self._nsinit,
            data_dir,
            self._node.id,
            disk=disk,
            io=_io_limits(self._config.disk),
            terminals=terminals_of(min(session_bounds(self._config.server.max_sessions).values())),
            profiles=self._profiles,
            crash_at=self._shared.crash.take_foreign(),
            own_filters=self._config.security.own_filters,
            merge_pages=self._config.isolation.merge_pages,
            bridge=bridge_terms(self._config, machine_resolvers()),
            disk_floor_bytes=disk_floor_bytes(data_dir, self._config.disk),
            start_nsinit=self._start_nsinit,
        )
        try:
            await actor.run(task_status=task_status)
        except* LauncherGone as gone:  # without root no other launcher can be started
            raise GiveUp(str(unwrap(gone))) from None

    def key_for(self, purpose: str) -> bytes:
        """Return a key of this node for one purpose, which survives restarts and gives no other key away."""
        return hmac.digest(self._node.run_key, f"sandkasten {purpose}".encode(), hashlib.sha256)

    async def _start_broker_client(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = broker.BrokerClient(
            self._broker,
            data_dir=self._config.data_dir,
            ca_file=self._config.egress.ca_file,
            key=placeholder_key(self._node.run_key),
            start=self._start_egress,
        )
        await actor.run(task_status=task_status)

    async def _start_egress_client(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = egress.EgressClient(
            self._egress,
            nsinit=self._nsinit,
            broker=self._broker,
            settings=self._config.egress_in_force,
            directory=self._directory,
            logs=self._shared.egress_logs,
            journal=self._journal,
            metrics=self._metrics,
            start=self._start_egress,
            path=DataPaths(self._config.data_dir).egress,
            steers=self._machine.steers,
        )
        await actor.run(task_status=task_status)

    async def _start_preview_client(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = previews.PreviewClient(
            self._previews,
            nsinit=self._nsinit,
            settings=self._config.preview,
            directory=self._directory,
            key=preview_key(self._node.run_key),
            use=_use,
            wake=_wake,
            start=self._start_egress,
        )
        try:
            await actor.run(task_status=task_status)
        except* OSError as group:
            raise GiveUp(f"preview.listen: {self._config.preview.listen}: {unwrap(group)}") from None

    async def _start_images(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        shared = self._shared
        self._commits = commits.Commits(
            self._nsinit, self._images, self._layers, shared.pulls, shared.crash, self._catalog
        )
        actor = images.Images(
            self._images,
            self._catalog,
            self._nsinit,
            pulls=self._shared.pulls,
            blobs=self._blobs,
            directory=self._directory,
            pools=tuple(self._config.pool.in_force),
        )
        await actor.run(task_status=task_status)

    @functools.cached_property
    def _floor_bytes(self) -> int:
        return disk_floor_bytes(self._config.data_dir, self._config.disk)

    @functools.cached_property
    def _exports(self) -> exports.Exports:
        return exports.Exports(self._catalog, self._nsinit, self._config.data_dir, self._blobs)

    @functools.cached_property
    def _blobs(self) -> Blobs:
        return Blobs(DataPaths(self._config.data_dir).blobs, floor_bytes=self._floor_bytes)

    @functools.cached_property
    def _layers(self) -> NsinitLayers:
        return NsinitLayers(self._nsinit, self._config.data_dir, self._floor_bytes)

    async def _start_jobs(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = jobs.Jobs(
            self._jobs,
            store=self._store,
            layers=self._layers,
            catalog=self._catalog,
            blobs=self._blobs,
            settings=self._config.images,
            credentials_file=credentials_file(self._config),
            crash=self._shared.crash,
            turns=self._shared.pulls,
        )
        await actor.run(task_status=task_status)

    async def _start_workspaces(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = workspaces.Workspaces(
            self._workspaces,
            store=self._store,
            nsinit=self._nsinit,
            directory=self._directory,
            holds=self._holds,
            policy=_quota_policy(self._config),
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
            holds=self._holds,
            leftovers=self.leftovers,
            pool_size=self._pool_size,
            warm=self._warm,
        )
        await actor.run(task_status=task_status)

    async def _start_reaper(self, *, task_status: trio.TaskStatus[Ref]) -> None:
        actor = recovery.Reaper(
            self._reaper,
            self._shared,
            sessions=self._sessions,
            leftovers=self.leftovers,
            keep_records_s=self._config.records.keep_seconds,
        )
        await actor.run(task_status=task_status)

    def close(self) -> None:
        """Close the journal after the end of the tree: its readers are told."""
        self._journal.close()

    async def finish(self) -> None:
        """Refuse new requests, and wait until creates and requests in flight have ended."""
        self._in_flight.close()
        try:
            await self._sessions.ask_again(sessions.Refuse())
        except SandkastenError as error:
            log.error("creates_not_refused", extra={"error": str(error)})
        await self._in_flight.wait_none()

    async def leave_sessions(self) -> None:
        """End the actors of all sessions and leave the sandboxes running. Runs that a caller waits for are answered
        `daemon_restarted`."""
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
        network = fit_network(spec.network, self._config, steers=self._machine.steers)
        try:
            check_publish(spec.publish, self._config.preview, has_gateway=self._start_egress is not None)
            session = await self._sessions.ask(sessions.Create(attrs.evolve(spec, network=network)))
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
        if patch.network is not None:
            patch = attrs.evolve(patch, network=fit_network(patch.network, self._config, steers=self._machine.steers))
            resolve_network(patch.network, self._config)
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
                await entry.ended.wait()  # its budget and its workspace are free
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

    async def usage(self, session_id: str, start: float, end: float) -> Sequence[UsageSample]:
        await self._live(session_id)
        return self._history.samples(session_id, start, end)

    async def network(self, session_id: str) -> NetworkInfo:
        session = (await self._live(session_id)).session
        counters = await self._egress.ask_again(egress.CountWay(session_id))
        return NetworkInfo(session.network, session.network_revision, counters)

    async def egress_log(
        self,
        session_id: str,
        *,
        after: str | None = None,
        verdict: EgressVerdict | None = None,
        host: str | None = None,
        limit: int = 1000,
    ) -> EgressPage:
        await self._live(session_id)
        return self._shared.egress_logs.page(session_id, after, verdict, host, limit)

    # Previews ---------------------------------------------------------------------------------------------------

    async def open_preview(self, session_id: str, spec: PreviewSpec) -> SignedPreview:
        entry = await self._live(session_id)
        check_preview(spec, self._config.preview, has_gateway=self._start_egress is not None)
        preview = await entry.ref.ask(OpenPreview(spec))
        return await self._previews.ask_again(previews.SignPreview(session_id, preview))

    async def find_preview(self, session_id: str, port: int) -> SignedPreview:
        preview = (await self._live(session_id)).session.previews.get(port)
        if preview is None:
            raise PreviewNotFound("the port has no preview", port=port)
        spec = PreviewSpec(port, access=preview.access)
        check_preview(spec, self._config.preview, has_gateway=self._start_egress is not None)
        return await self._previews.ask_again(previews.SignPreview(session_id, preview))

    async def previews(self, session_id: str) -> Sequence[Preview]:
        return tuple((await self._live(session_id)).session.previews.values())

    async def close_preview(self, session_id: str, port: int) -> None:
        entry = await self._live(session_id)
        await entry.ref.ask(ClosePreview(port))

    # Secrets ----------------------------------------------------------------------------------------------------

    async def put_secret(self, secret: NewSecret) -> None:
        await self._broker.ask_again(broker.KeepSecret(secret))

    async def secrets(self) -> Sequence[SecretInfo]:
        found = await self._broker.ask_again(broker.AskSecrets())
        return tuple(SecretInfo(each.name, each.hosts, each.placeholder) for each in found)

    async def delete_secret(self, name: str) -> None:
        await self._broker.ask_again(broker.ForgetSecret(name))

    # Images -----------------------------------------------------------------------------------------------------

    async def images(self, *, within: Within = EVERYWHERE, is_bounded: bool = False) -> Sequence[ImageDescription]:
        return await self._images.ask_again(images.DescribeImages(None, within, is_bounded))

    async def image(self, name: str, *, within: Within = EVERYWHERE, is_bounded: bool = False) -> ImageDescription:
        (found,) = await self._images.ask_again(images.DescribeImages(name, within, is_bounded))
        return found

    async def delete_image(self, name: str) -> None:
        (found,) = await self._images.ask_again(images.DescribeImages(name))
        await self._sessions.ask_again(sessions.ForgetImage(found.name))
        await self._images.ask_again(images.RemoveImage(name))

    async def commit_session(self, session_id: str, spec: CommitSpec) -> ImageDescription:
        @asynccontextmanager
        async def still() -> AsyncIterator[None]:
            entry = await self._live(session_id)
            try:
                await entry.ref.ask(HoldStill(commits.COPY_S))  # is served even if this is cancelled
                yield
            finally:
                # One that has ended needs no processes; another failure is in the session's own events.
                with trio.move_on_after(_LET_GO_S, shield=True), suppress(SandkastenError):
                    await entry.ref.ask(HoldStill(0))

        entry = await self._live(session_id)
        return await self._commits.commit(session_id, entry.session.image, spec, still)

    def export_image(self, name: str, compression: Compression) -> exports.Export:
        return self._exports.open(name, compression)

    async def prune_images(self, *, older_than_s: int, dry_run: bool = False) -> Pruned:
        return await self._images.ask_again(images.PruneLayers(older_than_s, dry_run))

    # Jobs -------------------------------------------------------------------------------------------------------

    async def pull_image(self, spec: PullSpec) -> ImageJob:
        return await self._jobs.ask_again(jobs.BeginPull(spec))

    async def import_image(self, spec: ImportSpec, read: Callable[[], Awaitable[bytes]]) -> ImageJob:
        jobs.check_import(spec)
        file = await self._blobs.spool(read, self._config.images.max_pull_mb * MIB)
        try:
            with trio.CancelScope(shield=True):  # else nobody would know whether the job has the file
                job = await self._jobs.ask(jobs.BeginImport(spec, file))
        except SandkastenError:
            file.close()
            raise
        return job

    async def jobs(self, *, limit: int = 100) -> Sequence[ImageJob]:
        return await self._jobs.ask_again(jobs.ListJobs(limit))

    async def job(self, job_id: str) -> ImageJob:
        return await self._jobs.ask_again(jobs.GetJob(job_id))

    async def next_of_job(self, job_id: str, seen: int, wait_s: float) -> tuple[int, ImageJob]:
        return await self._jobs.ask_again(jobs.NextOfJob(job_id, seen, wait_s))

    async def cancel_job(self, job_id: str) -> ImageJob:
        return await self._jobs.ask_again(jobs.CancelJob(job_id))

    # Files ------------------------------------------------------------------------------------------------------

    def files(self, session_id: str) -> LocalFiles:
        def workspace_of() -> str | None:
            entry = self._directory.get(session_id)
            return None if entry is None else entry.session.workspace_id

        return LocalFiles(
            lambda lasting: self._loan(session_id, lasting=lasting),
            self._store,
            session_id,
            workspace_of=workspace_of,
        )

    async def _files_at(self, place: str) -> LocalFiles | None:
        """Return the files at the place of an upload, None for a paused session, which stays as it is."""
        if place.startswith(WORKSPACE_PLACE):
            return self.workspace_files(place.removeprefix(WORKSPACE_PLACE))
        return None if (await self.get(place)).status is Status.PAUSED else self.files(place)

    @asynccontextmanager
    async def _loan(self, session_id: str, *, lasting: bool = False) -> AsyncIterator[RunnerLink]:
        with nullcontext() if lasting else self._in_flight:
            entry = await self._live(session_id)
            activity = Activity()
            try:
                async with translating_death(entry.ref):
                    yield await entry.ref.ask(Borrow(activity, lasting))
            finally:
                activity.end()

    async def _live(self, session_id: str) -> Entry:
        """Return the entry of a live session. Raises the error that an ended one ended with."""
        entry = self._directory.get(session_id)
        if entry is None:
            recorded = await self._recorded(session_id)
            if recorded.status in LIVE:
                self._in_flight.check_open()  # it was left to the next start
            raise ended_error(recorded)
        return entry

    async def _recorded(self, session_id: str) -> Session:
        if not SESSION_ID.match(session_id):
            raise SessionNotFound("no such session", session_id=session_id[:64])
        unwritten = self._directory.unwritten.get(session_id)
        record = unwritten or await self._store.ask_again(do(client_session, session_id))
        if record is None:
            raise SessionNotFound("no such session", session_id=session_id)
        return record.session

    # Node ------------------------------------------------------------------------------------------------------------

    async def readiness(self) -> Readiness:
        checks = {
            "store": await _check(self._store, do(ping)),
            "nsinit": await _check(self._nsinit, ping_nsinit()),
            "sessions": "ok" if self._sessions.is_alive else "not running",
            "disk": await trio.to_thread.run_sync(_check_disk, self._config),
        }
        return Readiness(ready=all(each == "ok" for each in checks.values()), checks=checks)

    async def system(self) -> System:
        ready = await self._nsinit.ask_again(Describe())
        describe = partial(describe_system, has_egress=self._start_egress is not None)
        return await trio.to_thread.run_sync(describe, self._config, self._machine, ready)

    async def capacity(self) -> NodeCapacity:
        is_up = all(ref.is_alive for ref in (self._store, self._nsinit, self._sessions))
        return await self._capacity("ready" if is_up else "not_ready")

    async def _capacity(self, status: str) -> NodeCapacity:
        ready = await self._nsinit.ask_again(Describe())
        occupancy = await self._sessions.ask_again(sessions.Occupied())
        facts = NodeFacts(
            status="draining" if occupancy.is_draining else status,
            sessions=await self._shared.directory.sessions(),
            max_sessions=occupancy.max_sessions,
            committed=occupancy.committed,
            pooled=occupancy.pooled,
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

    async def pools(self) -> Sequence[PoolInfo]:
        return (await self._sessions.ask_again(sessions.Occupied())).pools

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
                self._cgroup_dirs = (await self._nsinit.ask(Describe())).cgroup_dirs
        seen = MetricSources(
            metrics=self._shared.metrics,
            directory=self._shared.directory,
            journal=self._shared.journal,
            output=self._shared.output,
            parts=(self._store, self._writer, self._nsinit, self._egress, self._images, self._sessions, self._reaper),
            nsinit=self._nsinit,
            data_dir=self._config.data_dir,
            cgroup_dirs=self._cgroup_dirs,
            node_id=self._node.id,
        )
        return await measure(seen, limiter=self._observers)

    async def sweep(self) -> int:
        """Sweep now; return the number of sessions and leftovers that were settled."""
        return await self._reaper.ask(recovery.Sweep())


async def _wake(entry: Entry) -> None:
    await entry.ref.ask(Wake())


async def _use(entry: Entry) -> None:
    """Count as a use of a session, which puts off its idle end."""
    activity = Activity()
    try:
        await entry.ref.ask(Attend(activity))
    finally:
        activity.end()


def _require_ended(session: Session) -> Session:
    """Return a session that has ended. Raises `Capacity` for one whose end has only begun."""
    if session.status in LIVE:
        raise Capacity("the session's end has begun and will be finished", session_id=session.id)
    return session


async def _check(ref: Ref, message: Ask[R]) -> str:
    with trio.move_on_after(_READY_S):
        try:
            await ref.ask(message)
        except SandkastenError as error:
            return str(error)
        return "ok"
    return "does not answer"


def _quota_policy(config: Config) -> QuotaPolicy:
    default_mb = config.workspace_quota_mb
    default = WorkspaceQuota.of(default_mb * MIB) if default_mb else None
    return QuotaPolicy(default, max(default_mb, config.disk.max_mb) * MIB)


def _check_disk(config: Config) -> str:
    for name, path in (("data directory", config.data_dir), ("database", config.db_path.parent)):
        space = os.statvfs(path)
        free_ratio = space.f_bavail / max(space.f_blocks, 1)
        if free_ratio <= _MIN_FREE_RATIO:
            return f"only {free_ratio:.1%} of the {name}'s disk is free"
    return "ok"


def _io_limits(disk: DiskSettings) -> IoLimits:
    return IoLimits(
        weight=disk.io_weight,
        read_bps=disk.max_read_mb_per_second * MIB,
        write_bps=disk.max_write_mb_per_second * MIB,
        read_iops=disk.max_reads_per_second,
        write_iops=disk.max_writes_per_second,
    )
