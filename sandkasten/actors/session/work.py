"""What is done in a session: its runs, shells, terminals, ports and file transfers. Serves the `Work` messages.

Belongs to the session's actor, which decides whether the session may work at all, and runs in its nursery.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVarTuple, assert_never

import trio

from sandkasten.actors.core import DEFERRED, Deferred
from sandkasten.actors.runs.adoption import RunAdoption
from sandkasten.actors.runs.persistence import Keep
from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Hold, Joined
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.runs.terminals import Terminals
from sandkasten.actors.session.messages import (
    Attend,
    Borrow,
    CloseShell,
    FindRun,
    KillRest,
    ListRuns,
    ListShells,
    OpenRun,
    OpenShell,
    OpenTerminal,
    ResizeRun,
    RunToEnd,
    SignalRun,
    WatchPorts,
    Work,
)
from sandkasten.links.runner import RunnerLink
from sandkasten.model.errors import Capacity
from sandkasten.output.store import SessionOutput

Ts = TypeVarTuple("Ts")

_MAX_LOANS = 32
"""File transfers of one session at a time; see `runs.MAX_ACTIVE`."""

_MAX_ATTENDANTS = 1024


class WorkHost(SessionServices, Protocol):
    """A session as its work sees it."""

    def defer(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Deferred: ...


class SessionWork:
    """See the module's docstring."""

    def __init__(self, host: WorkHost, runs: Runs, *, output: SessionOutput, keep: Keep) -> None:
        self._host = host
        self._output = output
        self._loans = self._attendants = 0
        self._returned = trio.Event()
        self.runs = runs
        self.ports = Ports(host)
        self._terminals = Terminals(host, self.runs)
        self.adoption = RunAdoption(host, self.runs, keep, output, on_terminal=self._terminals.adopt)

    def handle(self, message: Work) -> Any:  # each message names its answer
        match message:
            case OpenRun(hold):
                return self._open_run(hold)
            case RunToEnd(hold):
                return self._run_to_end(hold)
            case FindRun(exec_id, _):
                return self.runs.find(exec_id)
            case ListRuns():
                return self.runs.infos()
            case SignalRun(exec_id, number):
                return self._host.defer(self.runs.signal, self.runs.find(exec_id), number)
            case KillRest(exec_id):
                return self._host.defer(self.runs.kill_rest, self.runs.find(exec_id))
            case ResizeRun(exec_id, size):
                return self._host.defer(self.runs.resize, self.runs.find(exec_id), size)
            case OpenShell(spec):
                self.runs.accounts.note_company()
                return self._host.defer(self.runs.shells.open, spec)
            case ListShells():
                return self.runs.shells.infos()
            case CloseShell(name):
                return self._host.defer(self._close_shell, name)
            case OpenTerminal(spec):
                self.ports.ensure_watched()
                return self._terminals.join(spec)
            case WatchPorts():
                self.ports.ensure_watched()
                return self.ports
            case Borrow(done):
                return self._lend(done)
            case Attend(done):
                return self._attend(done)
            case _:
                assert_never(message)

    async def wait_transferred(self, timeout_s: float) -> bool:
        """Wait until no file is being transferred; False if that takes longer."""
        with trio.move_on_after(timeout_s):
            while self._loans:
                await self._returned.wait()
        return self._loans == 0

    @property
    def kept_bytes(self) -> int:
        """What the output of the session's runs costs, in memory or on disk."""
        return self._output.bytes_used

    async def close(self, *, has_ended: bool) -> None:
        """The session's actor ends. Nothing is kept of an ended session; of another one what the next daemon needs."""
        self._terminals.close()
        if has_ended:
            await self._output.destroy()
            return
        try:
            await self.runs.persistence.write(is_last=True)
        finally:
            self._output.close()

    async def _close_shell(self, name: str) -> None:
        self._terminals.close_view(await self.runs.shells.close(name))

    def _open_run(self, hold: Hold) -> None:
        self.ports.ensure_watched()
        self.runs.admit(hold)

    def _run_to_end(self, hold: Hold) -> Deferred:
        wish = hold.run
        self._open_run(hold)
        if hold.run is not wish:
            raise Joined("another run has this id")
        return DEFERRED

    def _lend(self, done: trio.Event) -> RunnerLink:
        if self._loans >= _MAX_LOANS:
            raise Capacity("too many files of this session are being transferred", limit=_MAX_LOANS)
        self._loans += 1
        self.runs.accounts.note_company()
        self._host.begin_activity()
        self._host.start_task(self._await_return, done)
        return self._host.link

    def _attend(self, done: trio.Event) -> None:
        if self._attendants >= _MAX_ATTENDANTS:
            raise Capacity("too many follow this session", limit=_MAX_ATTENDANTS)
        self._attendants += 1
        self._host.begin_activity()
        self._host.start_task(self._await_leave, done)

    async def _await_leave(self, done: trio.Event) -> None:
        await done.wait()
        self._attendants -= 1
        self._host.end_activity()

    async def _await_return(self, done: trio.Event) -> None:
        await done.wait()
        self._loans -= 1
        self._returned.set()
        self._returned = trio.Event()
        self._host.end_activity()
