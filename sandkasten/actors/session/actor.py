"""The actor of one session: the life of its sandbox, its lease, the work done in it, and its end.

The actor is the only writer of the session's record. The lease is state of this actor, and the mailbox orders an expiry
against a racing command: there is no lock and no half-destroyed command. A death is an event: the pidfd of PID 1, an
out-of-memory notification, a broken or hostile connection. A session is never restarted, because its state is in the
kernel. Cancelling the actor leaves the sandbox running, to be adopted by the next daemon; only `Destroy`, an expiry or
a death tears the sandbox down.

Begin at `SessionActor.handle`. The first request to PID 1 is in `birth.py`, membership of a pool in `pooled.py`, a
pause in `pausing.py`, a change of limits in `changing.py`, previews in `previews.py`, the end in `ending.py`. The runs,
shells, terminals and ports of the session are in `actors.runs`; they see this actor as `SessionServices`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, TypeVarTuple, assert_never

import attrs
import trio

from nsinit.wire.protocol import MakeWorkspace
from runner.wire import protocol as runner_protocol
from sandkasten import logcontext
from sandkasten.actors.core import DEFERRED, LATER, Actor, Ref, Reply, unwrap
from sandkasten.actors.runs.adoption import RunAdoption
from sandkasten.actors.runs.driver import ask_runner
from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Joined, RunClaim
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.terminals import Terminals
from sandkasten.actors.services.directory import Inspection
from sandkasten.actors.services.egress import count_network
from sandkasten.actors.services.nsinit import Sandbox, ask_patiently, ask_when_up, attach, build, call
from sandkasten.actors.session.birth import (
    HELLO_S,
    Creation,
    Greeting,
    PhaseTimer,
    Services,
    first_request,
    greet,
    hand_over,
)
from sandkasten.actors.session.changing import change_session, close_stale_bridge, open_way, read_disk, reopen_way
from sandkasten.actors.session.ending import EXPIRIES, end_member, end_session
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.messages import (
    Activity,
    Attend,
    Borrow,
    Claim,
    ClosePreview,
    CloseShell,
    Destroy,
    Died,
    Expire,
    FindRun,
    Freeze,
    HoldStill,
    KillRest,
    Life,
    ListRuns,
    ListShells,
    OpenPreview,
    OpenRun,
    OpenShell,
    OpenTerminal,
    PauseSession,
    ResizeRun,
    ResumeSession,
    RunToEnd,
    SignalRun,
    Stats,
    Update,
    Wake,
    WarmUp,
    WatchPorts,
    Work,
    is_act,
    is_read,
)
from sandkasten.actors.session.pausing import Pausing
from sandkasten.actors.session.pooled import Membership
from sandkasten.actors.session.previews import SessionPreviews
from sandkasten.actors.session.record import LiveRecord
from sandkasten.actors.session.watch import INIT_ENDED, SandboxWatch, end_error, translate_death
from sandkasten.admission.plan import check_spans, plan_sandbox
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.crash import Point
from sandkasten.errors import (
    ActorGone,
    BuildFailed,
    BuildInterrupted,
    Capacity,
    Overloaded,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
)
from sandkasten.journal.egress import SessionDenials
from sandkasten.links.runner import RunnerLink
from sandkasten.log import rfc3339_or_none
from sandkasten.model import (
    FOREVER_S,
    Cause,
    EndReason,
    EventType,
    ExecInfo,
    Session,
    SessionPatch,
    SessionStats,
    ShellInfo,
    Status,
)
from sandkasten.model.lifecycle import ENDED, STANDING, USABLE, WHOLE, Trigger, next_status
from sandkasten.store.sessions import KernelIdentity, SessionRecord

log = logging.getLogger(__name__)

A = TypeVar("A")
Ts = TypeVarTuple("Ts")

MAX_SHOWN_RUNS = 50
"""The newest runs that a diagnosis shows."""

SILENCE_S = 30.0
"""Time without an answer, after one that was waited for in vain, until a PID 1 counts as dead. A busy machine is
slower than a PID 1 that was stopped."""

_PROBE_PAUSE_S = 1.0

_CRASHES = {EventType.EXEC_STARTED: Point.EXEC_STARTED, EventType.EXEC_ENDED: Point.EXEC_ENDED}

_MAX_CONTROLS = 8
"""Requests to PID 1 at a time that are answered at once; see `runs.MAX_ACTIVE`."""

_MAX_TRANSFERS = 32
"""File transfers of one session at a time; see `runs.MAX_ACTIVE`."""

_MAX_ATTENDANTS = 1024
"""Requests at a time that follow the session's events."""

_FULL_MAILBOX_PAUSE_S = 0.02


class SessionActor(Actor):
    """See the module's docstring. `ready` is answered when the session runs, or failed when it can't."""

    def __init__(self, ref: Ref, record: SessionRecord, creation: Creation | None, services: Services) -> None:
        """Without `creation` the sandbox of `record` is adopted."""
        super().__init__(ref)
        ref.speak_for(
            end_error=lambda: end_error(self.session, has_died=self.has_died.is_set()), translate=self.translate
        )
        self.session_id = record.session.id
        self.ready: Reply[Session] = Reply()
        self._creation = creation
        self._services = services
        self._lease = Lease()
        self._own = LiveRecord(record, self._lease, store=services.store, directory=services.directory)
        self._link: RunnerLink | None = None
        self._stats = CgroupStats(services.cgroup_dirs, record.session.id)
        self._is_lease_followed = self._is_doubted = False
        self._create_ms: Mapping[str, float] = {}
        self._controls = trio.CapacityLimiter(_MAX_CONTROLS)
        self._watch = SandboxWatch(record.session.id, services.nsinit, self._stats)
        self._output, keep = services.output.session(record.session.id), services.keep(record.session.id)
        if creation is None:
            services.adoptions.queue(ref, is_member=record.session.status is Status.POOL_IDLE)
            self._output.expect_recovery()  # a write at a stop before would drop the runs of the earlier daemon
        self._runs = Runs(
            self,
            nsinit=services.nsinit,
            stats=self._stats,
            output=self._output,
            queue_length=services.shell_queue_length,
            metrics=services.metrics,
            keep=keep,
            denials=SessionDenials(services.egress_logs, record.session.id),
        )
        self._ports = Ports(self)
        self._terminals = Terminals(self, self._runs)
        self._adoption = RunAdoption(self, self._runs, keep, self._output, on_terminal=self._terminals.adopt)
        self._transfers = self._attendants = 0
        self._transfer_ended = trio.Event()
        self._previews = SessionPreviews(self, self._own, previews=services.previews)
        self._reopening = trio.CancelScope()
        self._pausing = Pausing(self, self._own, services, lease=self._lease, runs=self._runs)
        self._membership = Membership(
            self, self._own, services, previews=self._previews, runs=self._runs, ports=self._ports
        )

    @property
    def session(self) -> Session:
        """The session as it is now."""
        return self._own.session

    @property
    def record(self) -> SessionRecord:
        """The session's durable record as it is now."""
        return self._own.record

    # Life -------------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        logcontext.session_id.set(self.session.id)
        try:
            if self._creation is not None:
                await self._create(self._creation)
            else:
                async with self._services.adoptions.turn(self.ref):
                    await self._adopt()
        except SandkastenError as error:
            log.warning("session_start_failed", extra={"session_id": self.session.id, "error": repr(error)})
            await self._give_up(error)
            return
        if self._creation is None and await self._expire():  # before a request that waited could renew the lease
            return
        logcontext.origin.set(logcontext.NOBODY)  # from here on nothing that happens is the creator's doing
        self._nursery.start_soon(self._watch.watch_init, self._report_death)
        self._nursery.start_soon(self._watch.watch_memory, self._report_kill)
        self._nursery.start_soon(self._lease.watch, self._report_lease_end, self._warn_of_lease_end)
        if self._creation is not None:
            self._services.crash.passing(Point.CREATE_READY)
        self.ready.set(self.session)
        self._own.change(timings_ms={})  # large, and of use to the creator alone

    async def _create(self, creation: Creation) -> None:
        timer = PhaseTimer()
        crash = self._services.crash
        await self._own.put()
        timer.end_phase("store")
        crash.passing(Point.CREATE_RECORDED)
        session = self.session
        plan = plan_sandbox(
            session.id,
            creation.resolved,
            workspace_id=session.workspace_id,
            image=creation.image.name,
            image_kind=creation.image.kind,
            layers=creation.image.layers,
        )
        if session.workspace_id is not None:
            await ask_patiently(self._services.nsinit, call(MakeWorkspace, session.workspace_id))
            timer.end_phase("workspace")
        greeting = Greeting(self._services.paths.run_dir(session.id), first_request(creation, self._services.graces))
        try:
            async with trio.open_nursery() as meanwhile:
                if creation.is_prepared:
                    greeting.begin(meanwhile)
                is_built = trio.Event()
                meanwhile.start_soon(open_way, self._services.egress, session, is_built)
                sandbox = await ask_when_up(self._services.nsinit, build(plan))
                is_built.set()
                self._hold(sandbox)
                timer.end_steps("build", sandbox.timings_us)
                crash.passing(Point.CREATE_BUILT)
                self._own.change(status=next_status(session.status, Trigger.BUILT))
                meanwhile.start_soon(self._put_running, creation)
                self._meet(*await greeting.finish())
        except BaseExceptionGroup as group:
            raise unwrap(group) from None
        finally:
            greeting.close()
        timer.end_phase("runner")
        self._create_ms = timer.phases
        crash.passing(Point.CREATE_SET_UP)
        self._own.change(timings_ms=timer.phases)
        if session.status is Status.POOL_IDLE:
            # PID 1 copies the pages that a hand-over writes to now, and not at the claim: 0.2 ms
            await hand_over(self.link, {}, within_s=HELLO_S)
        else:
            self._own.renew()
            self.announce()

    def announce(self) -> None:
        made = self.session
        self.emit(
            EventType.SESSION_CREATED,
            image=made.image,
            workspace_id=made.workspace_id,
            acquire_source=made.acquire_source,
            ttl_s=None if made.ttl_s == FOREVER_S else made.ttl_s,
            expires_at=rfc3339_or_none(made.expires_at),
        )
        self._previews.announce()

    async def open_way(self) -> None:
        """Give a session that is claimed the way out that it is to have."""
        await open_way(self._services.egress, self.session)

    def _reopen_way(self) -> None:
        """Give an adopted session its way out, until its network is changed."""
        self._reopening = trio.CancelScope()
        self.start_task(reopen_way, self._services.egress, self._own, self._reopening)

    async def _put_running(self, creation: Creation) -> None:
        await self._previews.publish(creation.publish)
        await self._own.put()
        self._services.crash.passing(Point.CREATE_RUNNING)

    async def _adopt(self) -> None:
        """Take over a sandbox that outlived its daemon, with its runs and the state of its shells."""
        sandbox = await ask_patiently(self._services.nsinit, attach(self.session.id))
        self._hold(sandbox)
        if sandbox.bridged:
            await close_stale_bridge(self._services, self.session)
        self._link = RunnerLink(self._services.paths.run_dir(self.session.id))
        await self._adoption.recover()
        is_member = self.session.status is Status.POOL_IDLE
        if is_member:
            await self._membership.set_frozen(frozen=False)
        if self.session.status is Status.PAUSED:
            await self._pausing.adopt()
        else:
            await self.greet_again()
        limits = self._stats.read_limits(self.session.limits)  # a change may have been cut short
        self._own.change(acquire_detail="adopted", limits=limits)
        self._services.budget.hold(self.session.id, limits)
        if not is_member:
            self._own.restore_lease()
        self._reopen_way()
        self._previews.adopt()
        self._own.put_soon()

    def _hold(self, sandbox: Sandbox) -> None:
        self._watch.hold(sandbox)
        identity = sandbox.identity
        self._stats.follow_init(identity.pid)
        kernel = KernelIdentity(identity.pid, identity.start_ticks, identity.pid_ns, self._services.boot_id)
        self._own.note(identity=kernel)

    def _meet(self, link: RunnerLink, hello: runner_protocol.HelloReply) -> None:
        self._link = link
        link.note_version(hello.version)
        if hello.has_changes and self._own.facts.status is Status.POOL_IDLE:
            raise SandboxError("a member of a pool that was being claimed when the daemon ended")
        self._own.change(cwd=hello.cwd)
        self._runs.shells.adopt(hello)

    async def greet_again(self) -> None:
        """Ask PID 1 of a sandbox that this daemon did not make for its shells and runs, and go on with them."""
        self._meet(self.link, await greet(self.link, runner_protocol.Hello()))
        await self._adoption.resume()

    async def _give_up(self, error: SandkastenError) -> None:
        """Undo a sandbox that could not be created. A sandbox that could not be adopted ends only if it is gone; while
        nsinit or the database is away it is left for the next reconciliation."""
        self.stop()
        if self._creation is not None:
            if isinstance(error, RunnerLost):  # nobody has used the session yet
                error = BuildInterrupted(str(error))
            self._own.note(idempotency_key=None)  # a retry may try again
            is_built = self.session.status is not Status.CREATING
            await self._finish(Trigger.DIED if is_built else Trigger.BUILD_FAILED, str(error), EndReason.ERROR)
        elif isinstance(error, BuildFailed | RunnerLost | RunnerProtocolError) or type(error) is SandboxError:
            await self._finish(Trigger.DIED, str(error))
        self.ready.fail(error)

    async def _finish(self, event: Trigger, reason: str | None, end_reason: EndReason | None = None) -> Session:
        """End the session. Awaited in the mailbox, so that no message overtakes the end."""
        self.stop()
        if self._own.facts.status is Status.POOL_IDLE:
            await end_member(self.session_id, self._own, self._services, event=event, reason=reason)
            return self.session
        await end_session(
            self, self._own, self._watch, self._services, event=event, reason=reason, end_reason=end_reason
        )
        return self.session

    async def on_stop(self) -> None:
        self._terminals.close()
        if self._own.facts.status in ENDED:
            await self._output.destroy()
        else:
            await self._runs.persistence.leave()
        if self._link is not None:
            self._link.close()
        self._watch.close()
        self._stats.close()
        self.ready.fail(self.gone())

    def gone(self) -> SandkastenError:
        return self.ref.end_error() or ActorGone("the session is not served at the moment")

    async def translate(self, error: SandkastenError) -> SandkastenError:
        return await translate_death(error, self, self._watch)

    # Mailbox ----------------------------------------------------------------------------------------------------

    async def handle(self, message: Life | Work) -> Any:  # each message names its answer
        match message:
            case Claim():
                self._require({Status.POOL_IDLE})
                return await self._membership.claim(message)
            case Freeze():
                self._require({Status.POOL_IDLE})
                return await self._membership.set_frozen(frozen=True)
            case WarmUp(process):
                self._require({Status.POOL_IDLE})
                return self.defer(self._membership.warm_up, process)
            case Stats():
                self._require(WHOLE)
                return self.defer(self._read_stats)
            case Update(patch):
                return await self._update(patch)
            case OpenPreview(wanted):
                self._require(WHOLE)
                return await self._previews.open(wanted)
            case ClosePreview(port):
                self._require(WHOLE)
                return await self._previews.close(port)
            case PauseSession(spec):
                return await self._change(self._pausing.pause, spec)
            case HoldStill(span_s):
                return await self._change(self._pausing.hold, span_s)
            case ResumeSession():
                return await self._change(self._pausing.resume)
            case Wake():
                return await self._change(self._pausing.wake)
            case Destroy(reason):
                return await self._finish(Trigger.DESTROY, reason)
            case Expire():
                return await self._expire()
            case Died(reason):
                return await self._finish(Trigger.DIED, reason)
        if is_read(message):
            self._require(WHOLE)
        else:
            await self._change(self._pausing.wake)
            self._require(USABLE)
            if is_act(message):
                self._own.renew()
        return self._work(message)

    def handle_at_once(self, message: Life | Work) -> Any:  # each message names its answer
        if isinstance(message, RunToEnd | OpenRun | Borrow) and self._own.facts.status in USABLE:
            return self._work(message)
        return LATER

    def _work(self, message: Work) -> Any:  # each message names its answer
        """Serve a message about the work in the session, which is awake if the message needs that."""
        match message:
            case OpenRun(claim):
                return self._open_run(claim)
            case RunToEnd(claim):
                wanted = claim.run
                self._open_run(claim)
                if claim.run is not wanted:
                    raise Joined("another run has this id")
                return DEFERRED  # the run's own end is the answer
            case FindRun(exec_id, _):
                return self._runs.find(exec_id)
            case ListRuns():
                return self._runs.infos()
            case SignalRun(exec_id, number):
                return self.defer(self._runs.signal, self._runs.find(exec_id), number)
            case KillRest(exec_id):
                return self.defer(self._runs.kill_rest, self._runs.find(exec_id))
            case ResizeRun(exec_id, size):
                return self.defer(self._runs.resize, self._runs.find(exec_id), size)
            case OpenShell(spec):
                self._runs.accounts.note_company()
                return self.defer(self._runs.shells.open, spec)
            case ListShells():
                return self._runs.shells.infos()
            case CloseShell(name):
                return self.defer(self._close_shell, name)
            case OpenTerminal(spec):
                self._ports.ensure_watched()
                return self._terminals.join(spec)
            case WatchPorts():
                self._ports.ensure_watched()
                return self._ports
            case Borrow(activity, lasting=False):
                return self._lend(activity)
            case Borrow(activity):
                self._attend(activity)
                return self.link
            case Attend(activity):
                return self._attend(activity)
            case _:
                assert_never(message)

    def _require(self, states: Container[Status]) -> None:
        if self._own.facts.status not in states:
            raise self.gone()

    async def _change(self, change: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> Session:
        """Have a session pause, or go on. A session that can't go on has died."""
        self._require(WHOLE)
        try:
            await change(*args)
            return self.session
        except (RunnerLost, RunnerProtocolError) as error:
            reason = str(error)
        await self._finish(Trigger.DIED, reason)
        raise self.gone()

    async def _read_stats(self) -> SessionStats:
        disk: dict[str, Any] = {**await read_disk(self._services.nsinit, self.session.id)}  # fields of SessionStats
        counters = await count_network(self._services.egress, self.session)
        return attrs.evolve(self._stats.read_all(), spool_bytes=self._output.bytes_used, network=counters, **disk)

    async def _update(self, patch: SessionPatch) -> Session:
        self._require(WHOLE)
        check_spans(self._services.maximum, ttl_s=patch.ttl_s, max_lifetime_s=patch.max_lifetime_s)
        network = self.session.network if patch.network is None else patch.network
        if patch.env is not None or patch.secret_env or network.variables != self.session.network.variables:
            await self._change(self._pausing.wake)
        if patch.network is not None:
            self._reopening.cancel()
        try:
            await change_session(self, self._own, patch, services=self._services)
        except SandkastenError:
            if self._reopening.cancel_called:
                self._reopen_way()
            raise
        self._own.renew()
        await self._own.put()
        return self.session

    def _open_run(self, claim: RunClaim) -> None:
        self._services.crash.passing(Point.EXEC_ACCEPTED)
        self._ports.ensure_watched()
        self._runs.admit(claim)

    async def _close_shell(self, name: str) -> None:
        self._terminals.close_view(await self._runs.shells.close(name))

    # File transfers and followers -------------------------------------------------------------------------------

    def _lend(self, activity: Activity) -> RunnerLink:
        if self._transfers >= _MAX_TRANSFERS:
            raise Capacity("too many files of this session are being transferred", limit=_MAX_TRANSFERS)
        self._transfers += 1
        self._runs.accounts.note_company()
        self.begin_activity()
        activity.begin(self._end_transfer)
        return self.link

    def _end_transfer(self) -> None:
        self._transfers -= 1
        self._transfer_ended.set()
        self._transfer_ended = trio.Event()
        self.end_activity()

    async def wait_transferred(self, timeout_s: float) -> bool:
        """Wait until no file is being transferred; False if that takes longer."""
        with trio.move_on_after(timeout_s):
            while self._transfers:
                await self._transfer_ended.wait()
        return self._transfers == 0

    def _attend(self, activity: Activity) -> None:
        if self._attendants >= _MAX_ATTENDANTS:
            raise Capacity("too many follow this session", limit=_MAX_ATTENDANTS)
        self._attendants += 1
        self.begin_activity()
        activity.begin(self._end_attendance)

    def _end_attendance(self) -> None:
        self._attendants -= 1
        self.end_activity()

    # Lease and signs of life ------------------------------------------------------------------------------------

    async def _follow_lease(self) -> None:
        await self._own.put_while_busy()
        self._is_lease_followed = False

    async def _report_lease_end(self) -> None:
        """Begin to end the session when its turn has come. Until then the session is usable and may be renewed. One
        whose processes have time to end has its turn after that (`ending.py`)."""
        try:
            async with nullcontext() if self.session.options.stop_grace_ms else self._services.expiries:
                await self._tell_self(Expire())
        except SandkastenError as error:  # the actor is ending anyway
            log.info("expiry_skipped", extra={"session_id": self.session.id, "error": str(error)})

    async def _expire(self) -> bool:
        """End a session whose lease ran out, unless it is paused instead; return whether it was ended."""
        if may_end := self._lease.has_ended and not await self._pausing.pause_at_end():
            await self._finish(Trigger.EXPIRE, EXPIRIES[self._lease.reason], self._lease.reason)
        return may_end

    def _warn_of_lease_end(self, end_reason: EndReason, remaining_s: float) -> None:
        self.emit(EventType.SESSION_EXPIRING, remaining_s=round(remaining_s), end_reason=end_reason)

    async def _report_death(self) -> None:
        await self._tell_self(Died(INIT_ENDED))

    def _report_kill(self, kills: int, victim: str | None) -> None:
        self.emit(EventType.OOM, oom_kills=kills, victim=victim)

    async def _tell_self(self, message: Expire | Died) -> None:
        """Put a message into the own mailbox, as soon as there is room, and wait for the answer of an `Expire`."""
        while True:
            try:
                if isinstance(message, Expire):
                    return await self.ref.ask(message)
                return self.ref.tell(message)
            except Overloaded:
                await trio.sleep(_FULL_MAILBOX_PAUSE_S)

    # SessionServices: what the work in the session needs --------------------------------------------------------

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
        is_alive = self._own.facts.status in STANDING and not self.has_died.is_set()
        return Cause.DAEMON_RESTARTED if is_alive else Cause.SANDBOX_DIED

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        try:
            self._nursery.start_soon(work, *args)
        except RuntimeError:  # closed to new tasks: the session has ended
            log.debug("task_not_started", extra={"session_id": self.session_id})

    def check_run(self) -> None:
        self._services.shares.check_run(self._own.facts.key_id)

    def begin_activity(self) -> None:
        self._lease.begin_activity()  # which holds the idle end off: the lease is renewed at the end
        if not self._is_lease_followed:
            self._is_lease_followed = True
            self.start_task(self._follow_lease)

    def end_activity(self) -> None:
        self._lease.end_activity()
        if not self._is_stopping:
            self._own.renew()
            self._own.put_lease()

    def emit(self, event: EventType, **data: object) -> None:
        if self.session_id in self._services.directory.members:  # nobody's session: nobody is told
            return
        self._services.journal.emit(event, self.session_id, **data)
        if event in _CRASHES:
            self._services.crash.passing(_CRASHES[event])

    def note_cwd(self, cwd: str) -> None:
        if cwd != self._own.facts.cwd:
            self._own.change(cwd=cwd)

    def end_soon(self, reason: str) -> None:
        """Have the session end as one that died."""
        self.start_task(self._tell_self, Died(reason))

    def distrust(self, error: RunnerProtocolError) -> None:
        self.end_soon(f"its init broke the protocol: {error}")

    def doubt(self) -> None:
        """Find out whether PID 1 still answers, and end the session if it is silent for too long."""
        if not self._is_doubted:
            self._is_doubted = True
            self.start_task(self._probe_init)

    async def _probe_init(self) -> None:
        since = trio.current_time()
        while self._own.facts.status in USABLE and not self.has_died.is_set():
            try:
                await greet(self.link, runner_protocol.Hello())
                break
            except RunnerProtocolError as error:
                self.distrust(error)
                break
            except SandkastenError as error:
                reason = str(error)
            if trio.current_time() - since >= SILENCE_S:
                await self._tell_self(Died(f"its init process does not answer: {reason}"))
                break
            await trio.sleep(_PROBE_PAUSE_S)
        self._is_doubted = False

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

    # Seen from outside, at any moment and without a message -----------------------------------------------------

    @property
    def running(self) -> Collection[str]:
        """Ids of the runs that go on or wait for their turn."""
        return self._runs.under_way

    def inspect(self) -> Inspection:
        """Return the state of the actor for metrics and diagnoses, which are wanted most when it does not answer."""
        runs, controls = self._runs, self._controls
        return Inspection(
            record=self.record,
            create_ms=dict(self._create_ms),
            lease=_shown_lease(self._lease),
            runs={
                "running": runs.running,
                "queued": runs.queued,
                "known": runs.known,
                "kept_bytes": self._output.bytes_used,
                "newest": [_shown_run(info) for info in runs.newest(MAX_SHOWN_RUNS)],
            },
            shells=[_shown_shell(info) for info in runs.shells.infos()],
            controls={"requests": controls.borrowed_tokens, "requests_waiting": controls.statistics().tasks_waiting},
            link=self._link,
        )


def _shown_lease(lease: Lease) -> Mapping[str, Any]:
    remaining_s = lease.end - trio.current_time()
    is_endless = math.isinf(remaining_s)
    return {
        "activities": lease.active,
        "is_held": lease.is_held,
        "ends_in_s": None if is_endless else round(remaining_s, 3),
        "ends_by": None if is_endless else lease.reason.value,
    }


def _shown_run(info: ExecInfo) -> Mapping[str, Any]:
    """Return a run without its command and output: a diagnosis is sent around."""
    return {
        "exec_id": info.exec_id,
        "kind": info.kind.value,
        "state": info.state.value,
        "shell": info.shell,
        "created_at": info.created_at,
        "started_at": info.started_at,
        "ended_at": info.ended_at,
        "cause": None if info.end is None else info.end.cause.value,
        "exit_code": None if info.end is None else info.end.exit_code,
        "stdout_bytes": info.stdout_bytes,
        "stderr_bytes": info.stderr_bytes,
        "trace_id": info.trace_id,
    }


def _shown_shell(info: ShellInfo) -> Mapping[str, Any]:
    running = None if info.running is None else info.running.exec_id
    return {"name": info.name, "running": running, "queued": list(info.queued)}
