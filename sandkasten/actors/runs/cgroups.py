"""The run cgroups of one session: programs and named shells are born in them. Made by nsinit, handed to PID 1.

The run cgroup of an ended program may still hold processes that the program left running. The cgroup is removed when it
is empty, and with the session at the latest. The CPU time of all run cgroups is counted here, removed ones included.
"""

from __future__ import annotations

import logging
import re
import secrets

import trio

from nsinit.wire.protocol import RemoveRunCgroup
from sandkasten.actors.core import Ref
from sandkasten.actors.services.nsinit import RunCgroup, call, make_run_cgroup
from sandkasten.counters.cgroup import GroupStats
from sandkasten.errors import BuildFailed, Capacity, SandkastenError

log = logging.getLogger(__name__)

_NAME = re.compile(r"g[0-9a-f]{12}\Z")


class RunCgroups:
    """See the module's docstring. Names are never used twice."""

    def __init__(self, nsinit: Ref, session_id: str, stats: GroupStats) -> None:
        self._stats = stats
        self._live: set[str] = set()
        self._going: dict[str, int] = {}
        """The cgroups that are being removed, and the CPU time of each in µs at that moment."""
        self._gone_usec = 0
        self._nsinit = nsinit
        self._session_id = session_id
        self._released: dict[str, None] = {}
        self._tidying = trio.Lock()

    async def make(self) -> RunCgroup:
        """Return a new cgroup; the caller gives it to `release`.

        Raises:
            Capacity: the session has as many run cgroups as it may have.
            SandkastenError: nsinit is away.
        """
        name = f"g{secrets.token_hex(6)}"
        try:
            return await self._try_make(name)
        except BuildFailed:
            await self._tidy()  # programs that ended meanwhile make room
        try:
            return await self._try_make(name)
        except BuildFailed as error:
            raise Capacity("what earlier programs of this session left running is in the way") from error

    def recover(self) -> None:
        """Find the cgroups of a session that outlived its daemon."""
        self._live.update(self._stats.list())

    def known(self, name: str) -> str | None:
        """Return `name`, which comes from PID 1, if a cgroup has that name."""
        return name if _NAME.match(name) and name in self._live else None

    def read_cpu(self) -> int:
        """Return the CPU time in µs used in all run cgroups since the session was made or adopted."""
        usec = self._gone_usec + sum(self._going.values())
        for name in self._live:
            if name not in self._going:
                usec += max(0, self._stats.cpu_usec(name))
        return usec

    async def _try_make(self, name: str) -> RunCgroup:
        self._live.add(name)
        try:
            return await self._nsinit.ask(make_run_cgroup(self._session_id, name))
        except trio.Cancelled:
            self._released[name] = None  # made or not, no run will use it
            raise
        except SandkastenError:
            self._forget(name)
            raise

    def _forget(self, name: str) -> None:
        self._live.discard(name)
        self._stats.forget(name)

    def adopt(self, name: str) -> None:
        """Take over the cgroup of a run that an earlier daemon began; no more processes will be started in it."""
        self._released[name] = None

    def release(self, cgroup: RunCgroup) -> None:
        """Give a cgroup back; no more processes will be started in it."""
        cgroup.fd.close()
        self._released[cgroup.name] = None

    async def discard(self, name: str) -> None:
        """Remove a released cgroup, if it is empty."""
        if await self._remove(name, kill=False):
            self._released.pop(name, None)

    async def kill(self, name: str) -> None:
        """Kill every process in a cgroup and remove the cgroup."""
        self._released[name] = None
        if await self._remove(name, kill=True):
            self._released.pop(name, None)

    async def _tidy(self) -> None:
        async with self._tidying:
            for name in list(self._released):
                await self.discard(name)

    async def _remove(self, name: str, *, kill: bool) -> bool:
        self._going[name] = max(0, self._stats.cpu_usec(name))
        try:
            was_removed = await self._try_remove(name, kill=kill)
            if was_removed:
                self._forget(name)
                self._gone_usec += self._going.get(name, 0)
            return was_removed
        finally:
            self._going.pop(name, None)

    async def _try_remove(self, name: str, *, kill: bool) -> bool:
        try:
            await self._nsinit.ask(call(RemoveRunCgroup, self._session_id, name, kill))
        except BuildFailed:  # a process in it lives on
            return False
        except SandkastenError as error:
            log.warning("run_cgroup_not_removed", extra={"session_id": self._session_id, "error": str(error)})
            return False
        return True
