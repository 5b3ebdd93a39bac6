"""The messages of a session's actor: those of its life, and those of the work in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from sandkasten.actors.core import Ask, Tell
from sandkasten.actors.runs.ports import Ports
from sandkasten.actors.runs.run import Run, RunClaim
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
    WarmProcess,
)
from sandkasten.model.network import Preview, PreviewSpec

# Life -----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Claim(Ask[Session]):
    """Make the member of a pool, which this actor runs, the session of a client; answered when it is. `changes` are
    fields of the session.

    Raises:
        StoreFailed: the claim could not be recorded.
        InvalidRequest: PID 1 refused the environment.
        Conflict: a port can't be published.
        SandkastenError: the member is dead, or does not answer in time. It ends after each of these errors.
    """

    changes: Mapping[str, Any]
    env: Mapping[str, str] = attrs.field(repr=False)
    spec_digest: str
    idempotency_key: str | None
    publish: Sequence[PreviewSpec] = ()


@attrs.frozen
class WarmUp(Ask[None]):
    """Have a process run in the idle member of a pool, or find the one that an earlier daemon began; answered when the
    process is ready. Raises `SandboxError`: the process does not become ready, so the member is of no use."""

    process: WarmProcess


@attrs.frozen
class Freeze(Ask[None]):
    """Freeze the idle member of a pool; a claim thaws it."""


@attrs.frozen
class Stats(Ask[SessionStats]):
    pass


@attrs.frozen
class Update(Ask[Session]):
    patch: SessionPatch


@attrs.frozen
class OpenPreview(Ask[Preview]):
    """Open a preview, in place of one of the same port."""

    spec: PreviewSpec


@attrs.frozen
class ClosePreview(Ask[None]):
    """Close a preview. Raises `PreviewNotFound`."""

    port: int


@attrs.frozen
class PauseSession(Ask[Session]):
    """Freeze the session, or change the options of a pause."""

    spec: PauseSpec


@attrs.frozen
class HoldStill(Ask[Session]):
    """Freeze the session for `span_s` seconds, in which no request thaws it, not even a resume. 0 ends the hold. A
    session that was paused before the hold, or is paused during the hold, stays paused."""

    span_s: float


@attrs.frozen
class ResumeSession(Ask[Session]):
    """Thaw the session; answered when it runs."""


@attrs.frozen
class Wake(Ask[Session]):
    """Thaw the session for a request that needs its processes. Raises `SessionPaused`."""


@attrs.frozen
class Destroy(Ask[Session]):
    """End the session; answered with its final state."""

    reason: str = "destroyed by request"


@attrs.frozen
class Expire(Ask[None]):
    """Check the lease, which may have run out."""


@attrs.frozen
class Died(Tell):
    """Report that PID 1 is dead, or broke the protocol."""

    reason: str


# Work -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class OpenRun(Ask[None]):
    """Begin the claimed run, or give the claim the run that has the same id; answered when the run is queued."""

    claim: RunClaim


@attrs.frozen
class RunToEnd(Ask[ExecEnd]):
    """Begin the claimed run as `OpenRun` does; answered with the run's end, or with `Joined` if another run has the id.
    Posted with the event `ended` of the claim's run."""

    claim: RunClaim


@attrs.frozen
class FindRun(Ask[Run]):
    """Find a run. `to_act`: the request will need the processes, so the session must be awake."""

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
    """Kill the processes that an ended program left in its run cgroup."""

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


class Activity:
    """A use of the session, which the asker ends: a file transfer, or a follower.

    The asker creates the activity, sends it in a message and calls `end` in any case. The message may still wait in the
    mailbox by then; `begin` undoes the use at once in that case.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._on_end: Callable[[], None] | None = None

    def begin(self, on_end: Callable[[], None]) -> None:
        """Register `on_end`, to be called once when the activity ends, or at once if it has ended already."""
        if self._is_over:
            on_end()
        else:
            self._on_end = on_end

    def end(self) -> None:
        self._is_over = True
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


@attrs.frozen
class Borrow(Ask[RunnerLink]):
    """Return the link to PID 1 for a file transfer, which is counted until `activity` ends. A pause waits for
    transfers; a `lasting` one, such as a watch of files, is counted as a follower, and no pause waits for it."""

    activity: Activity
    lasting: bool = False


@attrs.frozen
class Attend(Ask[None]):
    """Count a follower of the session until `activity` ends. The session does not become idle meanwhile."""

    activity: Activity


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
Life = (
    Claim
    | WarmUp
    | Freeze
    | Stats
    | Update
    | OpenPreview
    | ClosePreview
    | PauseSession
    | ResumeSession
    | HoldStill
    | Wake
    | Destroy
    | Expire
    | Died
)


def is_read(message: Work) -> bool:
    """Whether the daemon can serve the message without a process of the session, which may be frozen."""
    return isinstance(message, ListRuns | ListShells | Attend) or (isinstance(message, FindRun) and not message.to_act)


def is_act(message: Work) -> bool:
    """Whether the message acts on the session at once and then is over: it renews the lease."""
    return isinstance(message, FindRun | SignalRun | KillRest | ResizeRun | OpenShell | CloseShell)
