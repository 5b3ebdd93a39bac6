"""One sandbox: its life-cycle, lease, commands and teardown. The only writer of its record.

The lease is state of this actor, and its mailbox orders an expiry against a racing command, so there is no lock and no
half-destroyed command. Death is an event: pidfd of PID 1, out-of-memory notification, a broken or hostile connection.
A session is never restarted, because its state is in the kernel; cancelling this actor leaves the sandbox running (for
adoption), only `Destroy`, an expiry or a death tears it down.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any, TypeVar, TypeVarTuple

import attrs
import trio

from nsinit.wire.protocol import MakeWorkspace
from runner.wire import protocol as runner_protocol
from sandkasten import logcontext
from sandkasten.actors.core import Actor, Ref, Reply, unwrap
from sandkasten.actors.runs.driver import ask_runner
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.services.directory import Inspection
from sandkasten.actors.services.nsinit import Sandbox, ask_patiently, ask_when_up, attach, build, call
from sandkasten.actors.session.birth import Greeting, Marks, first_request, greet
from sandkasten.actors.session.changing import change_session, read_disk
from sandkasten.actors.session.ending import EXPIRIES, end_session
from sandkasten.actors.session.inspection import inspect
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.messages import (
    Destroy,
    Died,
    Expire,
    Life,
    OpenRun,
    PauseSession,
    ResumeSession,
    RunToEnd,
    Stats,
    Update,
    Wake,
    Work,
    is_act,
    is_read,
)
from sandkasten.actors.session.pausing import Pausing
from sandkasten.actors.session.record import LiveRecord
from sandkasten.actors.session.setup import VESSEL, Creation, Services
from sandkasten.actors.session.watch import INIT_ENDED, SandboxWatch, judge, last_word
from sandkasten.actors.session.work import SessionWork
from sandkasten.admission.plan import check_spans, plan_sandbox
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.crash import Point
from sandkasten.links.runner import RunnerLink
from sandkasten.log import rfc3339_or_none
from sandkasten.model import FOREVER_S, Cause, EndReason, EventType, Session, SessionPatch, SessionStats, Status
from sandkasten.model.errors import (
    ActorGone,
    BuildFailed,
    BuildInterrupted,
    Overloaded,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
)
from sandkasten.model.lifecycle import ENDED, USABLE, WHOLE, Event, next_status
from sandkasten.store.sessions import KernelIdentity, SessionRecord

log = logging.getLogger(__name__)

A = TypeVar("A")
Ts = TypeVarTuple("Ts")

_CRASHES = {EventType.EXEC_STARTED: Point.EXEC_STARTED, EventType.EXEC_ENDED: Point.EXEC_ENDED}
_MAX_CONTROLS = 8
"""Requests at a time that are answered at once; see `runs.MAX_ACTIVE`."""

_FULL_MAILBOX_PAUSE_S = 0.02


class SessionActor(Actor):
    """See the module's docstring. `ready` is answered when the session runs, or failed when it can't."""

    def __init__(self, ref: Ref, record: SessionRecord, creation: Creation | None, services: Services) -> None:
        """Without `creation` the sandbox of `record` is adopted."""
        super().__init__(ref)
        ref.judge, ref.last_word = self.judge, lambda: last_word(self.session, has_died=self.has_died.is_set())
        self.ready: Reply[Session] = Reply()
        self._creation = creation
        self._services = services
        self._lease = Lease()
        self._own = LiveRecord(record, self._lease, store=services.store, directory=services.directory)
        self._link: RunnerLink | None = None
        self._stats = CgroupStats(services.cgroup_dirs, record.session.id)
        self._is_lease_followed = False
        self._create_ms: Mapping[str, float] = {}
        self._controls = trio.CapacityLimiter(_MAX_CONTROLS)
        self._watch = SandboxWatch(record.session.id, services.zygote, self._stats)
        logs, keep = services.spool.session(record.session.id), services.keep(record.session.id)
        runs = Runs(
            self,
            zygote=services.zygote,
            stats=self._stats,
            logs=logs,
            queue_length=services.shell_queue_length,
            metrics=services.metrics,
            keep=keep,
        )
        self._work = SessionWork(self, runs, logs=logs, keep=keep)
        self._pausing = Pausing(self, self._own, zygote=services.zygote, lease=self._lease, work=self._work)

    @property
    def session(self) -> Session:
        """The session as it is now."""
        return self._own.session

    @property
    def record(self) -> SessionRecord:
        """The session's durable record as it is now."""
        return self._own.record

    def inspect(self) -> Inspection:
        """Return what can be seen from outside, at any moment."""
        return inspect(self.record, self._create_ms, self._lease, self._work, self._controls, self._link)

    # Life -------------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        logcontext.session_id.set(self.session.id)
        try:
            if self._creation is not None:
                await self._create(self._creation)
            else:
                async with self._services.adoptions:
                    await self._adopt()
        except SandkastenError as error:
            log.warning("session_start_failed", extra={"session_id": self.session.id, "error": repr(error)})
            await self._give_up(error)
            return
        logcontext.origin.set(logcontext.NOBODY)  # what happens to it by itself is not the creator's doing
        self._nursery.start_soon(self._watch.watch_init, self._report_death)
        self._nursery.start_soon(self._watch.watch_memory, self._report_kill)
        self._nursery.start_soon(self._lease.watch, self._report_lease_end, self._warn_of_lease_end)
        if self._creation is not None:
            self._services.crash.passing(Point.CREATE_READY)
        self.ready.set(self.session)
        self._own.change(timings_ms={})  # for whoever waited alone: they are large

    async def _give_up(self, error: SandkastenError) -> None:
        """What could not be created is undone. What could not be adopted ends only if it is not there any more; while
        the fork server or the database is away it is left for the reaper to try again."""
        self.stop()
        if self._creation is not None:
            if isinstance(error, RunnerLost):  # nobody has used it yet
                error = BuildInterrupted(str(error))
            self._own.note(idempotency_key=None)  # a retry may try again
            is_built = self.session.status is not Status.CREATING
            await self._finish(Event.DIED if is_built else Event.BUILD_FAILED, str(error), EndReason.ERROR)
        elif isinstance(error, BuildFailed | RunnerLost | RunnerProtocolError) or type(error) is SandboxError:
            await self._finish(Event.DIED, str(error))
        self.ready.fail(error)

    async def on_stop(self) -> None:
        await self._work.close(has_ended=self._own.facts.status in ENDED)
        if self._link is not None:
            self._link.close()
        self._watch.close()
        self._stats.close()
        self.ready.fail(self.gone())

    def gone(self) -> SandkastenError:
        return self.ref.last_word() or ActorGone("the session is not served at the moment")

    async def judge(self, error: SandkastenError) -> SandkastenError:
        return await judge(error, self, self._watch)

    async def handle(self, message: Life | Work) -> Any:
        match message:
            case Stats():
                self._require(WHOLE)
                return self.defer(self._read_stats)
            case Update(patch):
                return await self._update(patch)
            case PauseSession(spec):
                self._require(WHOLE)
                await self._pausing.pause(spec)
                return self.session
            case ResumeSession():
                await self._go_on(self._pausing.resume)
                return self.session
            case Wake():
                return await self._go_on(self._pausing.wake)
            case Destroy(reason):
                return await self._finish(Event.DESTROY, reason)
            case Expire():
                if self._lease.has_ended:
                    await self._finish(Event.EXPIRE, EXPIRIES[self._lease.reason], self._lease.reason)
                return None
            case Died(reason):
                await self._finish(Event.DIED, reason)
                return None
            case _ if is_read(message):
                self._require(WHOLE)
                return self._work.handle(message)
            case _:
                await self._go_on(self._pausing.wake)
                self._require(USABLE)
                if is_act(message):
                    self._own.renew()
                if isinstance(message, OpenRun | RunToEnd):
                    self._services.crash.passing(Point.EXEC_ACCEPTED)
                return self._work.handle(message)

    async def _go_on(self, resume: Callable[[], Awaitable[None]]) -> None:
        """Let it go on, if it stands still; one that can't has died."""
        self._require(WHOLE)
        try:
            return await resume()
        except (RunnerLost, RunnerProtocolError) as error:
            reason = str(error)
        await self._finish(Event.DIED, reason)
        raise self.gone()

    async def _create(self, creation: Creation) -> None:
        marks = Marks()
        crash = self._services.crash
        await self._own.put()
        marks.mark("store")
        crash.passing(Point.CREATE_RECORDED)
        session = self.session
        plan = plan_sandbox(
            session.id,
            creation.resolved,
            workspace_id=session.workspace_id,
            image=creation.image,
            image_kind=creation.image_kind,
        )
        if session.workspace_id is not None:
            await ask_patiently(self._services.zygote, call(MakeWorkspace, session.workspace_id))
            marks.mark("workspace")
        greeting = Greeting(self._services.paths.run_dir(session.id), first_request(creation, self._services.graces))
        try:
            async with trio.open_nursery() as meanwhile:
                if session.acquire_detail == VESSEL:
                    greeting.begin(meanwhile)
                sandbox = await ask_when_up(self._services.zygote, build(plan))
                self._hold(sandbox)
                marks.mark_steps("build", sandbox.timings_us)
                crash.passing(Point.CREATE_BUILT)
                self._own.change(status=next_status(session.status, Event.BUILT))
                meanwhile.start_soon(self._put_running)
                self._meet(*await greeting.finish())
        except BaseExceptionGroup as group:
            raise unwrap(group) from None
        finally:
            greeting.close()
        marks.mark("runner")
        self._create_ms = marks.phases
        crash.passing(Point.CREATE_SET_UP)
        self._own.change(timings_ms=marks.phases)
        self._own.renew()
        self._tell_created()

    def _tell_created(self) -> None:
        made = self.session
        self.emit(
            EventType.SESSION_CREATED,
            image=made.image,
            workspace_id=made.workspace_id,
            acquire_source=made.acquire_source,
            ttl_s=None if made.ttl_s == FOREVER_S else made.ttl_s,
            expires_at=rfc3339_or_none(made.expires_at),
        )

    async def _put_running(self) -> None:
        await self._own.put()
        self._services.crash.passing(Point.CREATE_RUNNING)

    async def _adopt(self) -> None:
        """Take over a sandbox that outlived its daemon, shell state and all."""
        self._hold(await ask_patiently(self._services.zygote, attach(self.session.id)))
        self._link = RunnerLink(self._services.paths.run_dir(self.session.id))
        await self._work.adoption.recover()
        if self.session.status is Status.PAUSED:
            await self._pausing.adopt()
        else:
            await self.greet()
            await self._work.adoption.resume()
        limits = self._stats.read_limits(self.session.limits)  # a change may have been cut short
        self._own.change(acquire_detail="adopted", limits=limits)
        self._services.budget.hold(self.session.id, limits)
        self._own.restore_lease()
        self._own.put_soon()

    def _hold(self, sandbox: Sandbox) -> None:
        self._watch.hold(sandbox)
        identity = sandbox.identity
        self._stats.init_pid = identity.pid
        kernel = KernelIdentity(identity.pid, identity.start_ticks, identity.pid_ns, self._services.boot_id)
        self._own.note(identity=kernel)

    def _meet(self, link: RunnerLink, hello: runner_protocol.HelloReply) -> None:
        self._link = link
        self._own.change(cwd=hello.cwd)
        self._work.runs.shells.adopt(hello)
        self._work.runs.keeping.gives_tickets = hello.version >= runner_protocol.KEPT_RUNS_VERSION

    async def resume_runs(self) -> None:
        await self._work.adoption.resume()

    async def greet(self) -> None:
        """Ask PID 1 of a sandbox that this daemon did not make, or has let stand still, what it has."""
        self._meet(self.link, await greet(self.link, runner_protocol.Hello()))

    async def _finish(self, event: Event, reason: str | None, end_reason: EndReason | None = None) -> Session:
        """End the session. Nothing overtakes this: it is awaited in the mailbox."""
        self.stop()
        await end_session(
            self, self._own, self._watch, self._services, event=event, reason=reason, end_reason=end_reason
        )
        return self.session

    # What work in the session needs of it -----------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        return self._own.facts.id

    @property
    def cwd(self) -> str:
        return self._own.facts.cwd

    @property
    def link(self) -> RunnerLink:
        assert self._link is not None
        return self._link

    @property
    def has_died(self) -> trio.Event:
        return self._watch.has_died

    @property
    def cause_of_stop(self) -> Cause:
        is_alive = self._own.facts.status in WHOLE and not self.has_died.is_set()
        return Cause.DAEMON_RESTARTED if is_alive else Cause.SANDBOX_DIED

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        try:
            self._nursery.start_soon(work, *args)
        except RuntimeError:  # closed to new tasks: the session has ended
            log.debug("task_not_started", extra={"session_id": self.session_id})

    @property
    def running(self) -> int:
        """How many runs there are, or wait for their turn."""
        return self._work.runs.under_way

    def check_run(self) -> None:
        self._services.shares.check_run(self._own.facts.key_id)

    def begin_activity(self) -> None:
        self._lease.active += 1
        self._own.renew()
        self._own.put_lease()
        if not self._is_lease_followed:
            self._is_lease_followed = True
            self.start_task(self._follow_lease)

    def end_activity(self) -> None:
        self._lease.active -= 1
        if not self._is_stopping:
            self._own.renew()
            self._own.put_lease()

    def emit(self, event: EventType, **data: object) -> None:
        self._services.journal.emit(event, self.session_id, **data)
        if event in _CRASHES:
            self._services.crash.passing(_CRASHES[event])

    def note_cwd(self, cwd: str) -> None:
        if cwd != self._own.facts.cwd:
            self._own.change(cwd=cwd)

    def distrust(self, error: RunnerProtocolError) -> None:
        self.start_task(self._tell_self, Died(f"its init broke the protocol: {error}"))

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A:
        try:
            async with self._controls:
                return await ask_runner(self.link, request, answer, fd=fd)
        except RunnerProtocolError as error:
            self.distrust(error)
            raise

    async def wake(self) -> None:
        if self._own.facts.status is Status.PAUSED:
            await self.ref.ask(Wake())

    async def find_victim(self) -> str | None:
        return await self._watch.find_victim()

    async def _read_stats(self) -> SessionStats:
        disk: dict[str, Any] = {**await read_disk(self._services.zygote, self.session.id)}  # fields of SessionStats
        return attrs.evolve(self._stats.read_all(), spool_bytes=self._work.kept_bytes, **disk)

    async def _update(self, patch: SessionPatch) -> Session:
        self._require(WHOLE)
        check_spans(self._services.maximum, ttl_s=patch.ttl_s, max_lifetime_s=patch.max_lifetime_s)
        if patch.env is not None:
            await self._go_on(self._pausing.wake)
        await change_session(self, self._own, patch, services=self._services)
        self._own.renew()
        await self._own.put()
        return self.session

    def _require(self, states: Container[Status]) -> None:
        if self._own.facts.status not in states:
            raise self.gone()

    # Lease ------------------------------------------------------------------------------------------------------

    async def _follow_lease(self) -> None:
        await self._own.put_while_busy()
        self._is_lease_followed = False

    async def _report_lease_end(self) -> None:
        """Begin to end it when its turn has come. Until then it is as usable as before, and may be renewed."""
        try:
            async with self._services.expiries:
                await self._tell_self(Expire())
        except SandkastenError as error:  # the actor is ending anyway
            log.info("expiry_skipped", extra={"session_id": self.session.id, "error": str(error)})

    def _warn_of_lease_end(self, end_reason: EndReason, remaining_s: float) -> None:
        self.emit(EventType.SESSION_EXPIRING, remaining_s=round(remaining_s), end_reason=end_reason)

    async def _tell_self(self, message: Expire | Died) -> None:
        """Put news into the own mailbox and, for an `Ask`, wait until it was served; waits when the mailbox is full."""
        while True:
            try:
                if isinstance(message, Expire):
                    return await self.ref.ask(message)
                return self.ref.tell(message)
            except Overloaded:
                await trio.sleep(_FULL_MAILBOX_PAUSE_S)

    # Signs of life ----------------------------------------------------------------------------------------------

    async def _report_death(self) -> None:
        await self._tell_self(Died(INIT_ENDED))

    def _report_kill(self, kills: int, victim: str | None) -> None:
        self.emit(EventType.OOM, oom_kills=kills, victim=victim)
