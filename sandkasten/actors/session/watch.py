"""The watch over one sandbox: the death of its PID 1, the processes in it that the kernel killed for memory, and the
translation of a death into errors.

`SandboxWatch` owns the descriptors that came with the sandbox and reports; the session's actor decides what ends.

`translate_death` is the one place that decides which error a request gets whose session was lost under it. A request
meets the death of a sandbox in its own way: a connection that breaks, a cgroup that is not there. The answer in all
cases is that the session has ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import attrs
import trio

from nsinit.wire.protocol import FindOomKills, OomKills
from sandkasten.actors.core import Ref
from sandkasten.actors.services.nsinit import Sandbox, call, recent_name
from sandkasten.counters.cgroup import CgroupStats
from sandkasten.errors import (
    ActorGone,
    ExecEnded,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
    Unavailable,
)
from sandkasten.links.fds import OomEvent, wait_ended
from sandkasten.model import Session, Status
from sandkasten.model.lifecycle import END_REASONS, ENDED, STANDING, WHOLE, Trigger, ended_error, next_status

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIND_KILLS_S = 2.0
"""Deadline for nsinit to find the name of a killed process."""

_SAME_DEATH_S = 2.0
"""A PID 1 that dies this soon after the kernel killed for memory in its sandbox may have died of that kill."""

_OOM_NEWS_S = 2.0
_OOM_PAUSE_S = 0.005
_OOM_REST_S = 0.5
"""The pause between two reports of kills in one sandbox."""


class SandboxWatch:
    """The watch over one sandbox. `has_died` is set when PID 1 has died, `news` also when the watch is closed."""

    def __init__(self, session_id: str, nsinit: Ref, stats: CgroupStats) -> None:
        self.has_died, self.news = trio.Event(), trio.Event()
        self._session_id = session_id
        self._nsinit = nsinit
        self._stats = stats
        self._sandbox: Sandbox | None = None
        self._oom: OomEvent | None = None
        self._kills = 0
        self._killed_at = self._died_at = -math.inf

    def hold(self, sandbox: Sandbox) -> None:
        """Own the descriptors of the sandbox from now on."""
        self._sandbox = sandbox
        self._kills = self._stats.read_oom_kills()
        if sandbox.oom_fd is not None:
            self._oom = OomEvent(sandbox.oom_kind, sandbox.oom_fd)

    def close(self) -> None:
        self.news.set()
        if self._sandbox is not None:
            self._sandbox.pidfd.close()
        if self._oom is not None:
            self._oom.close()

    async def watch_init(self, on_death: Callable[[], Awaitable[None]]) -> None:
        """Wait for the death of PID 1, and call `on_death`."""
        assert self._sandbox is not None
        await wait_ended(self._sandbox.pidfd)
        self._died_at = trio.current_time()
        self.has_died.set()
        self.news.set()
        await on_death()

    async def ran_out_of_memory(self, oom_kills: int) -> bool:
        """Whether the kernel killed PID 1 for memory. `oom_kills` is the number of kills in the sandbox, counted after
        PID 1's death. A kill long before the death does not count, since PID 1 survived it. The kernel's log names the
        processes that the other kills hit. Where the log does not name each of them (before Linux 5.5, when there are
        many), the last kill is taken to have hit PID 1."""
        is_recent = self._died_at - self._killed_at < _SAME_DEATH_S
        is_new = oom_kills > max(self._kills, 0)
        if not self.has_died.is_set() or not (is_new or (oom_kills > 0 and is_recent)):
            return False
        told = await self._find_kills()
        if self._sandbox is None or told is None:
            return True
        return self._sandbox.identity.pid in told.pids or told.kills < oom_kills

    async def watch_memory(self, on_kill: Callable[[int, str | None], None]) -> None:
        """Call `on_kill` after each kill for memory, with the kills so far and the name of the last process."""
        while self._oom is not None:
            await self._oom.wait()  # the removal of a v1 cgroup is signalled as well
            kills = await self._await_kill(self._kills)
            if kills > self._kills:
                self._kills, self._killed_at = kills, trio.current_time()
                log.warning("oom", extra={"session_id": self._session_id, "oom_kills": kills})
                on_kill(kills, await self.find_victim())
                await trio.sleep(_OOM_REST_S)

    async def find_victim(self) -> str | None:
        """Return the name of the process that the kernel killed last for memory, if it is known."""
        kills = await self._find_kills()
        return None if kills is None else recent_name(kills)

    async def _find_kills(self) -> OomKills | None:
        try:
            with trio.move_on_after(_FIND_KILLS_S):
                return await self._nsinit.ask(call(FindOomKills, self._session_id))
        except SandkastenError as error:
            log.info("victim_unknown", extra={"session_id": self._session_id, "error": str(error)})
        return None

    async def _await_kill(self, known: int) -> int:
        """Return the kills so far. v1 notifies when memory is out, a moment before the kernel counts the kill."""
        give_up_at = trio.current_time() + _OOM_NEWS_S
        while (kills := self._stats.read_oom_kills()) <= known and trio.current_time() < give_up_at:  # noqa: ASYNC110
            await trio.sleep(_OOM_PAUSE_S)
        return kills


INIT_ENDED = "its init process ended"

_NEWS_S = 10.0
"""Longest time between a lost connection and the notice of PID 1's death, or of the daemon's stop. PID 1 is dead only
when all of its namespace is (pid_namespaces(7)): on a busy machine that is seconds after its descriptors were closed.
"""

_Hidden = SandboxError | Unavailable | ExecEnded
"""The errors of a request that may come of the session's death. Any other error is the request's own."""


class WatchedSession(Protocol):
    """A session's actor, as `translate_death` needs it."""

    @property
    def session(self) -> Session: ...

    def gone(self) -> SandkastenError: ...

    def distrust(self, error: RunnerProtocolError) -> None: ...

    def doubt(self) -> None: ...


async def translate_death(error: SandkastenError, of: WatchedSession, watch: SandboxWatch) -> SandkastenError:
    """Return the error to answer instead of `error`, which came of work in the session `of`. After a lost connection,
    wait some seconds for the death of PID 1. If it is not noticed by then, a repeated request will get the answer."""
    if isinstance(error, RunnerProtocolError):
        of.distrust(error)
    if isinstance(error, RunnerLost):
        with trio.move_on_after(_NEWS_S):
            await watch.news.wait()
    is_over = watch.news.is_set() or of.session.status not in STANDING
    if is_over and isinstance(error, _Hidden):
        return of.gone()
    if isinstance(error, RunnerLost):
        of.doubt()
        return ActorGone(f"{error}, and what became of it is not known yet", session_id=of.session.id)
    return error


def end_error(session: Session, *, has_died: bool) -> SandkastenError | None:
    """Return the error of a request to a session that has ended or is about to; None if the session lives."""
    if session.status in ENDED or session.status is Status.DESTROYING:
        return ended_error(session)
    if not has_died or session.status not in WHOLE:
        return None
    dying = next_status(session.status, Trigger.DIED)  # the status that its actor is about to set
    return ended_error(attrs.evolve(session, status=dying, reason=INIT_ENDED, end_reason=END_REASONS[Trigger.DIED]))


@asynccontextmanager
async def translating_death(ref: Ref) -> AsyncIterator[None]:
    """Translate the errors of work that the caller does itself with a resource which the actor at `ref` lent."""
    failure: SandkastenError | None = None
    try:
        yield
    except SandkastenError as error:
        failure = error
    if failure is not None:
        told = await ref.translate(failure)
        if told is failure:
            raise failure
        raise told from failure
