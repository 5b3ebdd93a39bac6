"""One sandbox: its life-cycle, lease, commands and teardown. The only writer of its record.

The lease is state of this actor, and its mailbox orders an expiry against a racing command, so there is no lock and no
half-destroyed command. Death is an event: pidfd of PID 1, out-of-memory notification, a broken or hostile connection.
A session is never restarted, because its state is in the kernel; cancelling this actor leaves the sandbox running (for
adoption), only `Destroy`, an expiry or a death tears it down.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

import attrs
import trio

from runner import protocol as runner_protocol
from sandkasten.actors import store as store_actor
from sandkasten.actors import zygote as zygote_actor
from sandkasten.actors.actor import DEFERRED, Actor, Deferred, Ref, Reply
from sandkasten.actors.exec_account import Account, cut_short
from sandkasten.actors.exec_run import ExecRun, is_lost, unwrap
from sandkasten.actors.lease import Lease
from sandkasten.actors.session_messages import (
    Borrow,
    Destroy,
    Died,
    Expire,
    Message,
    OpenExec,
    RunExec,
    Stats,
    Update,
)
from sandkasten.actors.session_setup import Creation, Services
from sandkasten.errors import (
    BuildFailed,
    Capacity,
    Conflict,
    Overloaded,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    SessionExpired,
    ShellBusy,
)
from sandkasten.lifecycle import USABLE, Event, next_status
from sandkasten.model import Cause, ExecEnd, Session, SessionPatch, Status
from sandkasten.runtime.cgroup_stats import CgroupStats
from sandkasten.runtime.oom_event import OomEvent
from sandkasten.runtime.plan import check_limits, plan_limits, plan_sandbox
from sandkasten.runtime.runner_link import RunnerLink
from sandkasten.store.sessions import KernelIdentity, SessionRecord

log = logging.getLogger(__name__)

_HELLO_S = 10.0
"""How long a new or adopted runner may take to answer the first request."""

_PERSIST_EVERY_S = 10.0
"""A renewed lease reaches the database at most this often; state changes reach it at once."""

_DEATH_NEWS_S = 2.0
"""How long after a lost connection the news of PID 1's death may take."""

_MAX_LOANS = 32
"""File transfers of one session at a time; the runner takes four times as many connections."""

_EXEC_IDS = 4096
"""How many ids of commands a session remembers."""

_FULL_MAILBOX_PAUSE_S = 0.02
_INIT_ENDED = "its init process ended"


class SessionActor(Actor):
    """See the module's docstring. `ready` is answered when the session runs, or failed when it can't."""

    def __init__(self, ref: Ref, record: SessionRecord, creation: Creation | None, services: Services) -> None:
        """Without `creation` the sandbox of `record` is adopted."""
        super().__init__(ref)
        self.ready: Reply[Session] = Reply()
        self._record = record
        self._creation = creation
        self._services = services
        self._renewed: tuple[datetime, datetime] | None = None
        self._lease = Lease()
        self._persisted_at = -math.inf
        self._runs: list[ExecRun] = []
        self._loans = 0
        self._exec_ids: OrderedDict[str, None] = OrderedDict()
        self._sandbox: zygote_actor.Sandbox | None = None
        self._oom: OomEvent | None = None
        self._link: RunnerLink | None = None
        self._stats = CgroupStats(services.cgroup_dirs, record.session.id)
        self._has_died = trio.Event()

    @property
    def session(self) -> Session:
        """The session as it is now."""
        return self.record.session

    @property
    def record(self) -> SessionRecord:
        """The session's durable record as it is now, made when it is asked for: each command renews the lease."""
        if self._renewed is not None:
            last_activity, expires_at = self._renewed
            session = attrs.evolve(self._record.session, last_activity=last_activity, expires_at=expires_at)
            self._record = attrs.evolve(self._record, session=session)
            self._renewed = None
        return self._record

    # Life -------------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        try:
            if self._creation is not None:
                await self._create(self._creation)
            else:
                await self._adopt()
        except SandkastenError as error:
            log.warning("session_start_failed", extra={"session_id": self.session.id, "error": repr(error)})
            await self._give_up(error)
            return
        self._nursery.start_soon(self._watch_init)
        self._nursery.start_soon(self._lease.watch, self._report_lease_end)
        if self._oom is not None:
            self._nursery.start_soon(self._watch_oom, self._oom)
        self.ready.set(self.session)

    async def _give_up(self, error: SandkastenError) -> None:
        """What could not be created is undone. What could not be adopted ends only if it is not there any more; while
        the fork server or the database is away it is left for the reaper to try again."""
        self.stop()
        if self._creation is not None:
            self._record = attrs.evolve(self.record, idempotency_key=None)  # a retry may try again
            is_built = self.session.status is not Status.CREATING
            await self._finish(Event.DIED if is_built else Event.BUILD_FAILED, str(error))
        elif isinstance(error, BuildFailed | RunnerLost | RunnerProtocolError) or type(error) is SandboxError:
            await self._finish(Event.DIED, str(error))
        self.ready.fail(error)

    async def on_stop(self) -> None:
        is_alive = self.session.status in USABLE and not self._has_died.is_set()
        for run in self._runs:
            if not run.has_ended:
                cause = Cause.DAEMON_RESTARTED if is_alive else Cause.SANDBOX_DIED
                run.finish(cut_short(run, cause, self.session.cwd))
        if self._link is not None:
            self._link.close()
        if self._sandbox is not None:
            self._sandbox.pidfd.close()
        if self._oom is not None:
            self._oom.close()
        self._stats.close()
        self.ready.fail(self.gone())

    def gone(self) -> SandkastenError:
        return ended_error(self.session)

    async def handle(self, message: Message) -> Any:
        match message:
            case OpenExec(run):
                return self._open_exec(run, starts=self._current)
            case RunExec(run):
                return self._open_exec(run, ends=self._current)
            case Borrow(done):
                return self._lend(done)
            case Stats():
                self._require_usable()
                return self._stats.read_all()
            case Update(patch):
                return await self._update(patch)
            case Destroy():
                return await self._finish(Event.DESTROY, "destroyed by request")
            case Expire():
                if self._lease.has_ended:
                    await self._finish(Event.EXPIRE, "its time to live ran out")
                return None
            case Died(reason):
                await self._finish(Event.DIED, reason)
                return None
            case _:
                assert_never(message)

    async def _create(self, creation: Creation) -> None:
        marks = _Marks()
        await self._put()
        marks.mark("store")
        session = self.session
        plan = plan_sandbox(
            session.id,
            creation.resolved,
            workspace_id=session.workspace_id,
            image=creation.image,
            image_kind=creation.image_kind,
        )
        if session.workspace_id is not None:
            make = zygote_actor.MakeWorkspace(session.workspace_id)
            await zygote_actor.ask_patiently(self._services.zygote, make)
            marks.mark("workspace")
        self._hold(await zygote_actor.ask_when_up(self._services.zygote, zygote_actor.Build(plan)))
        marks.mark("build")
        setup = runner_protocol.Setup(env=dict(creation.env), shell=creation.resolved.shell)
        self._change(status=next_status(session.status, Event.BUILT))
        try:
            async with trio.open_nursery() as both:
                both.start_soon(self._put)
                await self._greet(setup)
        except BaseExceptionGroup as group:
            raise unwrap(group) from None
        marks.mark("runner")
        self._change(timings_ms=marks.phases)
        self._renew()

    async def _adopt(self) -> None:
        """Take over a sandbox that outlived its daemon, shell state and all."""
        attach = zygote_actor.Attach(self.session.id)
        self._hold(await zygote_actor.ask_patiently(self._services.zygote, attach))
        await self._greet(runner_protocol.Hello())
        self._change(acquire_detail="adopted")
        self._restore_lease()
        self._persist_soon()

    def _hold(self, sandbox: zygote_actor.Sandbox) -> None:
        self._sandbox = sandbox
        if sandbox.oom_fd is not None:
            self._oom = OomEvent(sandbox.oom_kind, sandbox.oom_fd)
        identity = sandbox.identity
        kernel = KernelIdentity(identity.pid, identity.start_ticks, identity.pid_ns)
        self._record = attrs.evolve(self._record, identity=kernel)
        self._link = RunnerLink(self._services.paths.run_dir(self.session.id))

    async def _greet(self, request: runner_protocol.Setup | runner_protocol.Hello) -> None:
        assert self._link is not None
        with trio.move_on_after(_HELLO_S) as patience:
            async with self._link.connection() as connection:
                await connection.send_request(request)
                answer = await connection.receive_answer()
        if patience.cancelled_caught:
            raise RunnerLost("the sandbox's init does not answer")
        match answer:
            case runner_protocol.HelloReply(version=runner_protocol.PROTOCOL_VERSION):
                self._change(cwd=answer.cwd)
            case runner_protocol.HelloReply():
                raise SandboxError(f"the sandbox's init speaks protocol {answer.version}")
            case runner_protocol.Error():
                raise SandboxError(f"the sandbox could not start: {answer.message}")
            case _:
                raise RunnerProtocolError(f"{type(answer).__name__} to the first request")

    async def _finish(self, event: Event, reason: str | None) -> Session:
        """Tear the sandbox down and write its final state. Nothing overtakes this: it is awaited in the mailbox.

        A refused record does not stop the teardown: what must end ends, and is written when that is possible again.
        """
        self.stop()
        session_id = self.session.id
        self._record = attrs.evolve(self.record, ending=event)
        self._change(status=next_status(self.session.status, event), reason=reason)
        await self._put_or_keep()
        try:
            teardown = zygote_actor.Teardown(session_id)
            torn_down = await zygote_actor.ask_patiently(self._services.zygote, teardown)
        except SandkastenError as error:  # the reaper finishes it
            log.error("teardown_deferred", extra={"session_id": session_id, "error": str(error)})
            return self.session
        if event is Event.DIED and torn_down.oom_kills > 0:
            reason = f"out of memory: {reason}"
        self._record = attrs.evolve(self.record, ended_at=datetime.now(UTC))
        self._change(status=next_status(self.session.status, Event.TORN_DOWN, cause=event), reason=reason)
        await self._put_or_keep()
        facts = {"session_id": session_id, "status": self.session.status, "reason": reason}
        log.info("session_ended", extra=facts)
        return self.session

    # Work -------------------------------------------------------------------------------------------------------

    def _open_exec(
        self, run: ExecRun, *, starts: Reply[None] | None = None, ends: Reply[ExecEnd] | None = None
    ) -> Deferred:
        """Begin to run a command; answer one of both when it starts, or ends."""
        self._require_usable()
        self._require_fresh(run.exec_id)
        limit = self._services.shell_queue_length
        if len(self._runs) >= limit:
            running = self._runs[0]
            age_s = trio.current_time() - running.started_at if running.started_at is not None else 0.0
            raise ShellBusy(
                f"{len(self._runs)} commands are waiting for this shell",
                exec_id=running.exec_id,
                age_ms=round(age_s * 1000),
                last_line=running.last_line,
                queue_length=limit,
            )
        self._exec_ids[run.exec_id] = None
        if len(self._exec_ids) > _EXEC_IDS:
            self._exec_ids.popitem(last=False)
        run.expect_start(after=self._runs)
        self._runs.append(run)
        self._begin_activity()
        self._nursery.start_soon(self._run_exec, run, starts or Reply(), ends or Reply())
        return DEFERRED

    def _require_fresh(self, exec_id: str) -> None:
        """Refuse an id that was used before: a retry must never run a command twice."""
        if exec_id in self._exec_ids:
            is_running = any(run.exec_id == exec_id for run in self._runs)
            status = "running" if is_running else "ended"
            raise Conflict("a command with this exec_id was run before", exec_id=exec_id, status=status)

    async def _run_exec(self, run: ExecRun, started: Reply[None], ended: Reply[ExecEnd]) -> None:
        assert self._link is not None
        try:
            account = Account.open(self._stats)
            with run.scope:
                reply = await run.drive(self._link, started)
                run.finish(account.close(run, reply, self._stats))
                if reply.cwd != self._record.session.cwd:
                    self._change(cwd=reply.cwd)
            if not run.has_ended:  # its reader left, which cancelled it
                run.finish(cut_short(run, Cause.CANCELLED, self.session.cwd))
        except SandkastenError as error:
            await self._judge(run, started, error)
        finally:
            if not run.has_ended:
                run.finish(cut_short(run, Cause.SANDBOX_DIED, self._record.session.cwd))
            run.answer(ended)
            ended.fail(self.gone())
            started.fail(self.gone())  # no effect when it was answered
            self._runs.remove(run)
            self._end_activity()

    async def _judge(self, run: ExecRun, started: Reply[None], error: SandkastenError) -> None:
        """A command failed below the shell: find out whether the sandbox is dead, hostile, or only said no."""
        if isinstance(error, RunnerLost):
            with trio.move_on_after(_DEATH_NEWS_S):
                await self._has_died.wait()
        if isinstance(error, RunnerProtocolError):
            await self._tell_self(Died(f"its init broke the protocol: {error}"))
        if self._has_died.is_set() and run.started_at is not None:
            run.finish(cut_short(run, Cause.SANDBOX_DIED, self.session.cwd))
        else:
            verdict = error
            if self._has_died.is_set() and is_lost(error):
                verdict = SessionExpired("session is crashed", status="crashed", reason=_INIT_ENDED)
            started.fail(verdict)  # no effect when it was answered
            run.fail(verdict)

    def _lend(self, done: trio.Event) -> RunnerLink:
        self._require_usable()
        assert self._link is not None
        if self._loans >= _MAX_LOANS:
            raise Capacity("too many files of this session are being transferred", limit=_MAX_LOANS)
        self._loans += 1
        self._begin_activity()
        self._nursery.start_soon(self._await_return, done)
        return self._link

    async def _await_return(self, done: trio.Event) -> None:
        await done.wait()
        self._loans -= 1
        self._end_activity()

    async def _update(self, patch: SessionPatch) -> Session:
        self._require_usable()
        if patch.limits is not None:
            check_limits(patch.limits)
            limits = plan_limits(patch.limits)
            await self._services.zygote.ask(zygote_actor.SetLimits(self.session.id, limits))
            self._change(limits=patch.limits)
        if patch.labels is not None:
            self._change(labels=dict(patch.labels))
        if patch.ttl_s is not None:
            self._change(ttl_s=patch.ttl_s)
        self._renew()
        await self._put()
        return self.session

    def _require_usable(self) -> None:
        if self.session.status not in USABLE:
            raise self.gone()

    # Lease ------------------------------------------------------------------------------------------------------

    def _begin_activity(self) -> None:
        self._lease.active += 1
        self._renew()

    def _end_activity(self) -> None:
        self._lease.active -= 1
        if not self._is_stopping:
            self._renew()
            if trio.current_time() - self._persisted_at > _PERSIST_EVERY_S:
                self._persist_soon()

    def _renew(self) -> None:
        moment = datetime.now(UTC)
        lifetime_left_s = self._lifetime_left_s(moment)
        remaining_s = self._lease.renew(ttl_s=self._record.session.ttl_s, lifetime_left_s=lifetime_left_s)
        self._renewed = (moment, moment + timedelta(seconds=remaining_s))

    def _restore_lease(self) -> None:
        """The lease goes on as recorded: a restart neither renews nor shortens it."""
        moment = datetime.now(UTC)
        remaining_s = (self._record.session.expires_at - moment).total_seconds()
        self._lease.restore(remaining_s=remaining_s, lifetime_left_s=self._lifetime_left_s(moment))

    def _lifetime_left_s(self, moment: datetime) -> float | None:
        if self._record.max_lifetime_s is None:
            return None
        return self._record.max_lifetime_s - (moment - self._record.session.created_at).total_seconds()

    def _persist_soon(self) -> None:
        self._persisted_at = trio.current_time()
        try:
            self._services.store.tell(store_actor.Put(self.record))
        except SandkastenError as error:  # the next renewal or state change writes it
            log.warning("lease_not_persisted", extra={"session_id": self.session.id, "error": str(error)})

    async def _report_lease_end(self) -> None:
        try:
            await self._tell_self(Expire())
        except SandkastenError as error:  # the actor is ending anyway
            log.info("expiry_skipped", extra={"session_id": self.session.id, "error": str(error)})

    async def _tell_self(self, message: Expire | Died) -> None:
        """Put news into the own mailbox and, for an `Ask`, wait until it was served; waits when the mailbox is full."""
        while True:
            try:
                if isinstance(message, Expire):
                    return await self.ref.ask(message)
                return self.ref.tell(message)
            except Overloaded:
                await trio.sleep(_FULL_MAILBOX_PAUSE_S)

    # Death ------------------------------------------------------------------------------------------------------

    async def _watch_init(self) -> None:
        assert self._sandbox is not None
        await trio.lowlevel.wait_readable(self._sandbox.pidfd.fileno())
        self._has_died.set()
        await self._tell_self(Died(_INIT_ENDED))

    async def _watch_oom(self, event: OomEvent) -> None:
        known = 0
        while True:
            await event.wait()  # a v1 cgroup that is removed wakes us as well
            kills = self._stats.read_oom_kills()
            if kills > known:
                known = kills
                log.warning("oom", extra={"session_id": self.session.id, "oom_kills": kills})

    # Record -----------------------------------------------------------------------------------------------------

    def _change(self, **changes: Any) -> None:  # fields of Session
        session = self.session
        if "status" in changes and changes["status"] is not session.status:
            changes["epoch"] = session.epoch + 1
        self._record = attrs.evolve(self._record, session=attrs.evolve(session, **changes))

    async def _put(self) -> None:
        self._persisted_at = trio.current_time()
        await self._services.store.ask_again(store_actor.Put(self.record))

    async def _put_or_keep(self) -> None:
        self._persisted_at = trio.current_time()
        await store_actor.put_or_keep(self._services.store, self._services.directory.unwritten, self.record)


class _Marks:
    """Phases of a create and how long each took, in milliseconds."""

    def __init__(self) -> None:
        self._last = trio.current_time()
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = trio.current_time()
        self.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now


def ended_error(session: Session) -> SessionExpired:
    """Return the error for requests to a session that serves none any more."""
    return SessionExpired(f"session is {session.status}", status=str(session.status), reason=session.reason)
