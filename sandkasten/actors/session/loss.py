"""What it means to whoever asked that a session was lost under their request: the one place that decides it.

All that talks to PID 1 of a session, or to nsinit about it, meets its death in a way of its own: a connection that
breaks, a cgroup that is not there. Whatever it was, the answer is that the session has ended. Owns no state; what a
death means to the session itself is for its actor to say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.session.watch import SandboxWatch
from sandkasten.model import Session, Status
from sandkasten.model.errors import (
    ActorGone,
    ExecEnded,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    Unavailable,
)
from sandkasten.model.lifecycle import END_REASONS, ENDED, WHOLE, Event, ended_error, next_status

INIT_ENDED = "its init process ended"

_NEWS_S = 10.0
"""How long after a lost connection the news of PID 1's death, or of the daemon's stop, may take. PID 1 is dead when all
of its namespace is (pid_namespaces(7)): on a busy machine that is seconds after its descriptors were closed."""

_Hidden = SandboxError | Unavailable | ExecEnded
"""What a request may be refused with because the session is dying under it. All else is its own fault."""


class Losable(Protocol):
    """A session's actor as this sees it."""

    @property
    def session(self) -> Session: ...

    def gone(self) -> SandkastenError: ...

    def distrust(self, error: RunnerProtocolError) -> None: ...


async def judge(error: SandkastenError, of: Losable, watch: SandboxWatch) -> SandkastenError:
    """Return what to answer instead of `error`, which came of work in that session; waits a while for the news. Without
    any, whoever asks again will hear it."""
    if isinstance(error, RunnerProtocolError):
        of.distrust(error)
    if isinstance(error, RunnerLost):
        with trio.move_on_after(_NEWS_S):
            await watch.news.wait()
    is_over = watch.news.is_set() or of.session.status not in WHOLE
    if is_over and isinstance(error, _Hidden):
        return of.gone()
    if isinstance(error, RunnerLost):
        return ActorGone(f"{error}, and what became of it is not known yet", session_id=of.session.id)
    return error


def last_word(session: Session, *, has_died: bool) -> SandkastenError | None:
    """Return what is said of a session that has ended, or is about to; None of one that lives."""
    if session.status in ENDED or session.status is Status.DESTROYING:
        return ended_error(session)
    if not has_died or session.status not in WHOLE:
        return None
    dying = next_status(session.status, Event.DIED)  # as its actor will have it in a moment
    return ended_error(attrs.evolve(session, status=dying, reason=INIT_ENDED, end_reason=END_REASONS[Event.DIED]))


@asynccontextmanager
async def judged(ref: Ref) -> AsyncIterator[None]:
    """Work done with what that actor lent, in the caller's own task: errors are judged as the actor judges its own."""
    failure: SandkastenError | None = None
    try:
        yield
    except SandkastenError as error:
        failure = error
    if failure is not None:
        told = await ref.judge(failure)
        if told is failure:
            raise failure
        raise told from failure
