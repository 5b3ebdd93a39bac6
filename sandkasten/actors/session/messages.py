"""What a session actor can be asked and told."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from sandkasten.actors.core import Ask, Tell
from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Hold, Run
from sandkasten.actors.runs.terminals import Viewer
from sandkasten.links.runner import RunnerLink
from sandkasten.model import (
    ExecEnd,
    ExecInfo,
    PauseSpec,
    Session,
    SessionPatch,
    SessionStats,
    ShellInfo,
    ShellSpec,
    TerminalSize,
    TerminalSpec,
)

# Life -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Stats(Ask[SessionStats]):
    pass


@attrs.frozen
class Update(Ask[Session]):
    patch: SessionPatch


@attrs.frozen
class PauseSession(Ask[Session]):
    """Let it stand still; of one that does already, change how."""

    spec: PauseSpec


@attrs.frozen
class ResumeSession(Ask[Session]):
    """Let it go on; answered when it does."""


@attrs.frozen
class Wake(Ask[None]):
    """Somebody needs its processes: let it go on if it may. Raises `SessionPaused`."""


@attrs.frozen
class Destroy(Ask[Session]):
    """End the session; answers its final state."""

    reason: str = "destroyed by request"


@attrs.frozen
class Expire(Ask[None]):
    """The lease may have run out."""


@attrs.frozen
class Died(Tell):
    """PID 1 is gone, or can't be trusted any more."""

    reason: str


# Work -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class OpenRun(Ask[None]):
    """Begin the run of a hold, or let it hold the one that has its id; answered when it is queued."""

    hold: Hold


@attrs.frozen
class RunToEnd(Ask[ExecEnd]):
    """As `OpenRun`, answered with the run's end, or `Joined`. To be posted with the `ended` of the hold's run."""

    hold: Hold


@attrs.frozen
class FindRun(Ask[Run]):
    """`to_act`: something is to be done to it, for which its session has to be awake."""

    exec_id: str
    to_act: bool = False


@attrs.frozen
class ListRuns(Ask[Sequence[ExecInfo]]):
    pass


@attrs.frozen
class SignalRun(Ask[None]):
    exec_id: str
    number: int


@attrs.frozen
class KillRest(Ask[None]):
    """Kill what an ended run left behind in its cgroup."""

    exec_id: str


@attrs.frozen
class ResizeRun(Ask[None]):
    exec_id: str
    size: TerminalSize


@attrs.frozen
class OpenShell(Ask[ShellInfo]):
    spec: ShellSpec


@attrs.frozen
class ListShells(Ask[Sequence[ShellInfo]]):
    pass


@attrs.frozen
class CloseShell(Ask[None]):
    name: str


@attrs.frozen
class OpenTerminal(Ask[Viewer]):
    """Join a terminal, or open one; the asker closes the viewer."""

    spec: TerminalSpec


@attrs.frozen
class WatchPorts(Ask[Ports]):
    """Return the session's ports, watched from now on."""


@attrs.frozen
class Borrow(Ask[RunnerLink]):
    """Use the runner link for a file. Counts as activity until the asker sets `done`, which it does in any case."""

    done: trio.Event


@attrs.frozen
class Attend(Ask[None]):
    """Somebody follows what goes on here. Counts as activity until the asker sets `done`, which it does in any case."""

    done: trio.Event


Work = (
    OpenRun
    | RunToEnd
    | FindRun
    | ListRuns
    | SignalRun
    | KillRest
    | ResizeRun
    | OpenShell
    | ListShells
    | CloseShell
    | OpenTerminal
    | WatchPorts
    | Borrow
    | Attend
)
Life = Stats | Update | PauseSession | ResumeSession | Wake | Destroy | Expire | Died


def is_read(message: Work) -> bool:
    """Whether it is served from what the daemon knows, and the sandbox may stand still."""
    return isinstance(message, ListRuns | ListShells | Attend) or (isinstance(message, FindRun) and not message.to_act)


def is_act(message: Work) -> bool:
    """Whether something is done to the session by it and then over: activity of a moment."""
    return isinstance(message, FindRun | SignalRun | KillRest | ResizeRun | OpenShell | CloseShell)
