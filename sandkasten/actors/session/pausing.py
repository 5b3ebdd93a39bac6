"""Letting a session stand still and go on. Belongs to its actor and runs in its mailbox, so nothing overtakes it.

Intent before effect: the record says `paused` before the first process stands still, and `running` only after all go
on. So whatever the record says after a crash is what is to be made true: a paused one is frozen (again), and adopted
without a word from its PID 1, which could not answer.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import trio

from nsinit.wire.protocol import SetFrozen
from runner.wire import protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.services.nsinit import ask_patiently, call
from sandkasten.actors.session.lease import Lease
from sandkasten.actors.session.record import LiveRecord
from sandkasten.model import EventType, Pause, PauseSpec, Status
from sandkasten.model.errors import Conflict, RunnerLost, SandkastenError, SessionPaused
from sandkasten.model.lifecycle import Event, next_status

log = logging.getLogger(__name__)

A = TypeVar("A")

_TRANSFER_S = 0.5
"""How long a file that is being transferred may hold up a pause."""


class Pausable(Protocol):
    """A session's actor, as a pause needs it."""

    async def greet_again(self) -> None: ...

    async def wait_transferred(self, timeout_s: float) -> bool: ...

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A: ...

    def emit(self, event: EventType, **data: object) -> None: ...


class Pausing:
    """See the module's docstring."""

    def __init__(self, actor: Pausable, own: LiveRecord, *, nsinit: Ref, lease: Lease, runs: Runs) -> None:
        self._actor = actor
        self._own = own
        self._nsinit = nsinit
        self._lease = lease
        self._runs = runs
        self._is_greeted = True
        self._still_since = 0.0
        """On the clock that nobody sets; that of a session which was adopted is taken from the time of day."""

    async def pause(self, spec: PauseSpec) -> None:
        """Freeze a running session, or change how a paused one is.

        Raises:
            Conflict: a file is being transferred.
            BuildFailed: not all of it would stand still; it goes on.
        """
        session = self._own.session
        is_new = session.status is not Status.PAUSED
        if is_new and not await self._actor.wait_transferred(_TRANSFER_S):
            raise Conflict("a file of the session is being transferred; try again when that is done")
        since = datetime.now(UTC) if session.pause is None else session.pause.since
        status = next_status(session.status, Event.PAUSE) if is_new else session.status
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
        if is_new:
            self._actor.emit(EventType.SESSION_PAUSED)

    async def resume(self) -> None:
        """Let a paused session go on; of one that runs, nothing.

        Raises:
            SandkastenError: it could not be thawed, and is as it was; or its PID 1 does not answer.
        """
        if self._own.session.status is Status.PAUSED:
            await self._let_go_on()
            self._actor.emit(EventType.SESSION_RESUMED)

    async def wake(self) -> None:
        """As `resume`, for a request that needs it awake. Raises `SessionPaused` if it is not to go on by itself."""
        pause = self._own.session.pause
        if pause is not None and not pause.auto_resume:
            raise SessionPaused("the session is paused", since=pause.since.isoformat(timespec="seconds"))
        await self.resume()

    async def adopt(self) -> None:
        """Take over a session that its last daemon paused, or was about to."""
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
        self._own.change(status=next_status(session.status, Event.RESUME), pause=None)
        self._own.renew()
        self._runs.start_clocks()
        thawed = protocol.Thawed(round(still_s * 1000))
        try:
            await self._actor.ask_runner(thawed, protocol.Done)
        except SandkastenError as error:  # whether it is dead or hostile is for others to say
            log.warning("time_limits_not_moved", extra={"session_id": session.id, "error": str(error)})
        await self._own.put()

    async def _greet(self) -> None:
        """Hear from the PID 1 of an adopted session at last. Raises `RunnerLost` if it is not one to go on with."""
        try:
            await self._actor.greet_again()
        except SandkastenError as error:
            raise RunnerLost(str(error)) from error
        self._is_greeted = True

    async def _set_frozen(self, *, frozen: bool) -> None:
        await ask_patiently(self._nsinit, call(SetFrozen, self._own.session.id, frozen))
