"""A session as the member of a pool: the process that it is made with, how it stands still, and the claim by which it
becomes a client's.

Runs in the mailbox of the session's actor, but for the wait for a process. A client's variables are sent to PID 1, and
to that process, before the record says `running`: so no record says it of a session without them. PID 1 tells the next
daemon that it has some, which then does not take the session for a member.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVarTuple

import trio

from nsinit.wire.protocol import SetFrozen
from sandkasten.actors.core import Reply
from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Run, RunClaim, RunRequest
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.waiting import wait_for
from sandkasten.actors.services.nsinit import ask_patiently, call
from sandkasten.actors.session.birth import Services, hand_over
from sandkasten.actors.session.messages import Claim
from sandkasten.actors.session.previews import SessionPreviews
from sandkasten.actors.session.record import LiveRecord
from sandkasten.crash import Point
from sandkasten.errors import ActorGone, RunnerLost, SandboxError, SandkastenError
from sandkasten.links.runner import RunnerLink
from sandkasten.model import Session, Status, WaitFor, WarmProcess
from sandkasten.store.sessions import SessionRecord

log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

_TAKEN_S = 1.0
"""Deadline for variables to be read. They may be more than a socket or a pipe holds, and a member that does not read
would hold up the create."""


class PooledSession(Protocol):
    """A session's actor, as its membership needs it."""

    @property
    def link(self) -> RunnerLink: ...

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None: ...

    async def open_way(self) -> None: ...

    def announce(self) -> None: ...

    def end_soon(self, reason: str) -> None: ...


class Membership:
    """See the module's docstring."""

    def __init__(
        self,
        actor: PooledSession,
        own: LiveRecord,
        services: Services,
        *,
        previews: SessionPreviews,
        runs: Runs,
        ports: Ports,
    ) -> None:
        self._actor, self._own, self._services = actor, own, services
        self._previews, self._runs, self._ports = previews, runs, ports
        self._is_frozen = False
        self._process: Run | None = None

    async def set_frozen(self, *, frozen: bool) -> None:
        """Freeze the member, or thaw it."""
        await ask_patiently(self._services.nsinit, call(SetFrozen, self._own.facts.id, frozen))
        self._is_frozen = frozen

    async def warm_up(self, wanted: WarmProcess) -> None:
        """Begin the process, unless an earlier daemon has, and wait until it is ready. From then on the member ends
        with it, until it is claimed.

        Raises:
            SandboxError: the process has ended, or is not ready in time.
        """
        claim = RunClaim(Run(RunRequest.of_process(wanted.spec, self._own.facts.options)))
        try:
            self._runs.admit(claim)
            run = claim.run
            await run.started.wait()
            condition, matchers = WaitFor(pattern=wanted.ready), trio.CapacityLimiter(1)
            outcome = await wait_for(run, condition, self._ports, timeout_s=wanted.within_s, matchers=matchers)
        finally:
            claim.leave()
        if run.has_ended or not outcome.happened:
            raise SandboxError(f"the pool's process {run.exec_id} did not become ready: {run.last_line or 'no word'}")
        self._process = run
        self._actor.start_task(self._end_with, run)

    async def _end_with(self, run: Run) -> None:
        await run.ended.wait_done()
        if self._own.facts.status is Status.POOL_IDLE:
            self._actor.end_soon(f"the pool's process {run.exec_id} ended")

    async def claim(self, claim: Claim) -> Session:
        """Become the session of a client. PID 1 answers for itself while the record is written, if there are no
        variables to be sent before. Raises as `Claim`."""
        member, crash, own = self._own.record, self._services.crash, self._own
        own.begin_life(spec_digest=claim.spec_digest, idempotency_key=claim.idempotency_key, **claim.changes)
        written: Reply[None] = Reply()
        failure: Exception | None = None
        try:
            await self._previews.publish(claim.publish)
            if self._is_frozen:  # before the record says `running`: a daemon that adopts such a session thaws nothing
                await self.set_frozen(frozen=False)
                crash.passing(Point.CLAIM_THAWED)
            if not claim.env:
                own.post(written)
            await self._give(claim.env)
            crash.passing(Point.CLAIM_HANDED_OVER)
            if claim.env:
                own.post(written)
            try:
                await written.wait()
            except ActorGone:  # the store is being restarted, and may have written the record
                await own.put()
            crash.passing(Point.CLAIM_RECORDED)
            await self._actor.open_way()  # a daemon that adopts an idle member would leave it the way of this client
        except Exception as error:  # noqa: BLE001 - after a bug, too, the next member may get the idempotency key
            failure = error
        if failure is not None:
            await self._undo(member)
            if isinstance(failure, RunnerLost):  # for `translate` a lost PID 1 is worth a wait of some seconds
                failure = ActorGone(str(failure))
            raise failure
        self._services.directory.show_member(own.facts.id)
        self._actor.announce()
        if self._process is not None:
            self._runs.began(self._process)
        return own.session

    async def _give(self, env: Mapping[str, str]) -> None:
        """Give PID 1, and the member's process, the variables of the session. Raises as `hand_over`, and `RunnerLost`
        if one of them does not read."""
        with trio.move_on_after(_TAKEN_S) as patience:
            await hand_over(self._actor.link, env)
            if self._process is not None and env:
                await self._process.input.send(_claim_line(env))
        if patience.cancelled_caught:
            raise RunnerLost("the variables of the session are not read")

    async def _undo(self, member: SessionRecord) -> None:
        """End a member that could not be handed out. Its record goes at once: the next member may get the same
        idempotency key."""
        await self._previews.undo(member)
        try:
            await self._own.delete()
        except SandkastenError as error:
            log.error("pool_member_not_deleted", extra={"session_id": member.session.id, "error": str(error)})
        self._actor.end_soon("it could not be handed out")


def _claim_line(env: Mapping[str, str]) -> bytes:
    """Return the line by which a process learns the variables of the session that it has become part of."""
    return json.dumps({"op": "claim", "env": dict(env)}).encode() + b"\n"
