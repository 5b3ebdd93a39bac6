"""What a session's actor offers to what works in it: runs, shells, terminals, ports. Declarations only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, TypeVarTuple

import trio

from sandkasten.links.runner import RunnerLink
from sandkasten.model import Cause, EventType
from sandkasten.model.errors import RunnerProtocolError, SandkastenError

A = TypeVar("A")
Ts = TypeVarTuple("Ts")


class SessionServices(Protocol):
    """What a session offers to what works in it."""

    @property
    def session_id(self) -> str: ...

    @property
    def cwd(self) -> str: ...

    @property
    def link(self) -> RunnerLink: ...

    @property
    def has_died(self) -> trio.Event: ...

    @property
    def cause_of_stop(self) -> Cause:
        """Why a run that is still there when the session's actor ends has ended."""
        ...

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Run `work` beside the mailbox, unless the session is ending."""
        ...

    def check_run(self) -> None:
        """Raises `QuotaExceeded` when the API key that made the session runs all that it may."""
        ...

    def begin_activity(self) -> None: ...

    def end_activity(self) -> None: ...

    def emit(self, event: EventType, **data: object) -> None: ...

    def distrust(self, error: RunnerProtocolError) -> None:
        """PID 1 broke the contract: the session ends."""
        ...

    async def ask_runner(self, request: object, answer: type[A], *, fd: int | None = None) -> A:
        """Make a request of PID 1 that is answered at once. Raises what it was refused with."""
        ...

    def note_cwd(self, cwd: str) -> None:
        """The default shell is in that directory now."""
        ...

    async def translate(self, error: SandkastenError) -> SandkastenError:
        """Return the error of a request that failed with `error`, perhaps because the session has ended."""
        ...

    async def wake(self) -> None:
        """Make a paused session go on, if it may. Raises `SessionPaused`."""
        ...

    async def find_victim(self) -> str | None:
        """Return the name of the process that was killed for memory last."""
        ...
