"""The pause of a session: every process of it is frozen, and thawed later. Runs in the mailbox of the session's actor,
so that no message overtakes a pause.

Intent before effect: the record says `paused` before the first process is frozen, and `running` only after all are
thawed. After a crash the record says which of the two is to be made true: a paused session is frozen (again), and
adopted without an answer of its PID 1, which is frozen as well.
"""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import trio

from nsinit.wire.protocol import SetFrozen
from runner.wire import protocol
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.services.nsinit import ask_patiently, call
from sandkasten.actors.session.birth import Services
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.record import LiveRecord, age_s
from sandkasten.errors import Conflict, RunnerLost, SandkastenError, SessionPaused
from sandkasten.model import FOREVER_S, AtEnd, EventType, Pause, PauseSpec, Status
from sandkasten.model.lifecycle import WHOLE, Trigger, next_status

log = logging.getLogger(__name__)

A = TypeVar("A")

_TRANSFER_S = 0.5
"""Longest time for which a file transfer may hold up a pause."""

_AGAIN_S = 10.0
"""Time until a session that could not be paused at its end is to be paused again."""

_DELAYS = 6
"""The number of times that file transfers may put off the pause at a session's end. The next one breaks them off: a
client whose transfer trickles would have its session run for ever."""


class PausableSession(Protocol):
    """A session's actor, as a pause needs it."""

    async def greet_again(self) -> None: ...

    async def wait_transferred(self, timeout_s: float) -> bool: ...

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A: ...

    def emit(self, event: EventType, **data: object) -> None: ...


class Pausing:
    """The pause of one session: freeze, thaw, and the clocks that stop meanwhile."""

    def __init__(
        self, actor: PausableSession, own: LiveRecord, services: Services, *, lease: Lease, runs: Runs
    ) -> None:
        self._actor = actor
        self._own = own
        self._nsinit = services.nsinit
        self._maximum = services.maximum
        self._lease = lease
        self._runs = runs
        self._is_greeted = True
        self._held_until = -math.inf
        self._delays = 0
        """The number of times that the pause at the end was put off."""
        self._is_wanted = False
        """Whether the session stays paused when nothing holds it still."""
        self._still_since = 0.0
        """When the pause began, in `trio.current_time()` seconds; computed from the time of day if it was adopted."""

    async def pause(self, spec: PauseSpec, *, waits: bool = True) -> None:
        """Freeze a running session, or change the options of a pause. `waits`: for file transfers.

        Raises:
            Conflict: a file is being transferred.
            BuildFailed: not every process could be frozen; the session runs on.
        """
        session = self._own.session
        is_new = session.status is not Status.PAUSED
        if is_new and waits and not await self._actor.wait_transferred(_TRANSFER_S):
            raise Conflict("a file of the session is being transferred; try again when that is done")
        since = datetime.now(UTC) if session.pause is None else session.pause.since
        status = next_status(session.status, Trigger.PAUSE) if is_new else session.status
        self._own.renew()
        self._own.change(status=status, pause=Pause(since, spec.auto_resume, spec.stop_lease))
        self._lease.pause(stop=spec.stop_lease)
        if is_new:
            self._still_since = trio.current_time()
            self._runs.stop_clocks()
        failure: SandkastenError | None = None
        try:
            await self._own.put()
            await self._set_frozen(frozen=True)
        except SandkastenError as error:
            failure = error
        if failure is not None:
            if is_new:
                await self._let_go_on()
            raise failure
        self._is_wanted = True
        if is_new:
            self._actor.emit(EventType.SESSION_PAUSED)

    async def pause_at_end(self) -> bool:
        """Pause a session whose lease ran out, if that was asked for, and return whether it goes on. One that can't be
        paused now goes on for a while. The longest lifetime that the operator allows ends it all the same.
        """
        own = self._own
        session = own.session
        if session.options.at_end != AtEnd.PAUSE or session.status not in WHOLE:
            return False
        is_woken = session.pause is None or session.pause.auto_resume
        own.change(max_lifetime_s=float(self._maximum.max_lifetime_seconds or FOREVER_S))
        own.renew()
        if self._lease.has_ended:
            return False
        try:
            await self.pause(PauseSpec(auto_resume=is_woken, stop_lease=True), waits=self._delays < _DELAYS)
            self._delays = 0
        except SandkastenError as error:
            self._delays += 1
            log.warning("not_paused_at_end", extra={"session_id": session.id, "error": str(error)})
            own.change(max_lifetime_s=min(age_s(own.record) + _AGAIN_S, own.session.max_lifetime_s))
            own.renew()
        return True

    async def hold(self, span_s: float) -> None:
        """Keep the session still for a time; 0 ends that, and the pause unless it is wanted. A later daemon knows the
        pause alone. Raises as `pause` and `resume`.
        """
        if span_s:
            is_wanted = self._own.facts.status is Status.PAUSED
            if not is_wanted:
                await self.pause(PauseSpec(stop_lease=True))
            self._is_wanted, self._held_until = is_wanted, trio.current_time() + span_s
        elif self._is_held:
            self._held_until = -math.inf
            if not self._is_wanted:
                await self.resume()

    @property
    def _is_held(self) -> bool:
        return trio.current_time() < self._held_until

    async def resume(self) -> None:
        """Thaw a paused session; do nothing to a running one.

        Raises:
            Conflict: the session is held still.
            SandkastenError: the session could not be thawed and stays paused, or its PID 1 does not answer.
        """
        if self._is_held:
            raise Conflict("the session stands still while it is copied; try again when that is done")
        if self._own.facts.status is Status.PAUSED:
            await self._let_go_on()
            self._actor.emit(EventType.SESSION_RESUMED)

    async def wake(self) -> None:
        """As `resume`, for a request that needs the processes. Raises `SessionPaused` without `auto_resume`."""
        pause = self._own.session.pause
        if pause is not None and (self._is_held or not pause.auto_resume):
            raise SessionPaused("the session is paused", since=pause.since.isoformat(timespec="seconds"))
        await self.resume()

    async def adopt(self) -> None:
        """Take over a session that an earlier daemon paused, or was about to pause."""
        pause = self._own.session.pause
        since = self._own.session.last_activity if pause is None else pause.since
        self._still_since = trio.current_time() - max(0.0, (datetime.now(UTC) - since).total_seconds())
        self._runs.stop_clocks()
        await self._set_frozen(frozen=True)
        self._is_greeted = False
        self._lease.pause(stop=pause is not None and pause.stop_lease)

    async def _let_go_on(self) -> None:
        session = self._own.session
        await self._set_frozen(frozen=False)
        still_s = trio.current_time() - self._still_since
        if not self._is_greeted:
            await self._greet()
        self._lease.resume()
        self._own.change(status=next_status(session.status, Trigger.RESUME), pause=None)
        self._own.renew()
        self._runs.start_clocks()
        thawed = protocol.Thawed(round(still_s * 1000))
        try:
            await self._actor.ask_runner(thawed, protocol.Done)
        except SandkastenError as error:  # the watch of PID 1 reports a death
            log.warning("time_limits_not_moved", extra={"session_id": session.id, "error": str(error)})
        await self._own.put()

    async def _greet(self) -> None:
        """Send the first request to the PID 1 of an adopted session. Raises `RunnerLost` if its answer is unusable."""
        try:
            await self._actor.greet_again()
        except SandkastenError as error:
            raise RunnerLost(str(error)) from error
        self._is_greeted = True

    async def _set_frozen(self, *, frozen: bool) -> None:
        await ask_patiently(self._nsinit, call(SetFrozen, self._own.session.id, frozen))
