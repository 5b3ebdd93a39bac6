"""The interface of a session's actor towards the work in the session: runs, shells, terminals, ports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, TypeVarTuple

import trio

from sandkasten.errors import RunnerProtocolError, SandkastenError
from sandkasten.links.runner import RunnerLink
from sandkasten.model import Cause, EventType

A = TypeVar("A")
Ts = TypeVarTuple("Ts")


class SessionServices(Protocol):
    """A session as its runs, shells, terminals and ports see it; implemented by `SessionActor`."""

    @property
    def session_id(self) -> str: ...

    @property
    def cwd(self) -> str:
        """The directory of the default shell."""
        ...

    @property
    def link(self) -> RunnerLink:
        """The connections to PID 1."""
        ...

    @property
    def has_died(self) -> trio.Event:
        """Set when PID 1 has died."""
        ...

    @property
    def cause_of_stop(self) -> Cause:
        """The cause of end of a run that has not ended when the session's actor ends."""
        ...

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Run `work(*args)` beside the mailbox, unless the session is ending."""
        ...

    def check_run(self) -> None:
        """Check the quota of the API key that made the session. Raises `QuotaExceeded`."""
        ...

    def begin_activity(self) -> None:
        """Hold the session's idle end off until `end_activity`."""
        ...

    def end_activity(self) -> None: ...

    def emit(self, event: EventType, **data: object) -> None:
        """Write an event of the session to the journal."""
        ...

    def distrust(self, error: RunnerProtocolError) -> None:
        """End the session, because PID 1 broke the protocol."""
        ...

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A:
        """Send PID 1 a request that is answered at once, and return the answer. Raises the translated refusal."""
        ...

    def note_cwd(self, cwd: str) -> None:
        """Record the directory of the default shell."""
        ...

    async def translate(self, error: SandkastenError) -> SandkastenError:
        """Return the error of a request that failed with `error`, perhaps because the session has ended."""
        ...

    async def wake(self) -> None:
        """Resume a paused session. Raises `SessionPaused` if the session does not resume by itself."""
        ...

    async def find_victim(self) -> str | None:
        """Return the name of the process that the kernel killed last for memory, if it is known."""
        ...
