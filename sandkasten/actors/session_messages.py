"""What a session actor can be asked and told."""

from __future__ import annotations

import attrs
import trio

from sandkasten.actors.actor import Ask
from sandkasten.actors.exec_run import ExecRun
from sandkasten.model import ExecEnd, Session, SessionPatch, SessionStats
from sandkasten.runtime.runner_link import RunnerLink


@attrs.frozen
class OpenExec(Ask[None]):
    """Run a command; answered when the shell has taken it."""

    run: ExecRun


@attrs.frozen
class RunExec(Ask[ExecEnd]):
    """Run a command whose output is collected; answered with its end."""

    run: ExecRun


@attrs.frozen
class Borrow(Ask[RunnerLink]):
    """Use the runner link for a file. Counts as activity until the asker sets `done`, which it does in any case."""

    done: trio.Event


@attrs.frozen
class Stats(Ask[SessionStats]):
    pass


@attrs.frozen
class Update(Ask[Session]):
    patch: SessionPatch


@attrs.frozen
class Destroy(Ask[Session]):
    """End the session; answers its final state."""


@attrs.frozen
class Expire(Ask[None]):
    """The lease may have run out."""


@attrs.frozen
class Died:
    """PID 1 is gone, or can't be trusted any more."""

    reason: str


Message = OpenExec | RunExec | Borrow | Stats | Update | Destroy | Expire | Died
