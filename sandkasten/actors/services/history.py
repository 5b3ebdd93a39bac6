"""The use of each session over time: processor time and memory, read every few seconds and kept for an hour.

One task reads the counters of all sessions, from the files of their cgroups and off every other path: neither the
sessions' actors nor nsinit are asked. What is kept is bounded for each session, and goes with the session. A daemon
that was started again begins anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Describe, ask_patiently
from sandkasten.counters.cgroup import UNKNOWN, CgroupStats
from sandkasten.model import UsageSample

PERIOD_S = 15.0
KEPT = 240
"""Samples of one session: an hour of them is 6 KB."""

_FIELDS = 3


class UsageHistory:
    """See the module's docstring. `run` is a child of the tree."""

    def __init__(self, directory: SessionDirectory, nsinit: Ref) -> None:
        self._directory, self._nsinit = directory, nsinit
        self._kept: dict[str, array[int]] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read for ever."""
        task_status.started()
        dirs = (await ask_patiently(self._nsinit, Describe())).cgroup_dirs
        while True:
            await self._read_all(dirs)
            await trio.sleep(PERIOD_S)

    async def _read_all(self, dirs: Mapping[str, str]) -> None:
        live = self._directory.ids()
        for gone in self._kept.keys() - set(live):
            del self._kept[gone]
        for session_id in live:
            self._read(session_id, dirs)
            await trio.lowlevel.checkpoint()  # a session's reading takes some 50 µs

    def _read(self, session_id: str, dirs: Mapping[str, str]) -> None:
        stats = CgroupStats(dirs, session_id)
        try:
            use = stats.read_use()
        finally:
            stats.close()
        if use == (UNKNOWN, UNKNOWN):  # it is being made, or has ended just now
            return
        kept = self._kept.setdefault(session_id, array("q"))
        kept.extend((round(datetime.now(UTC).timestamp() * 1000), *use))
        del kept[: -KEPT * _FIELDS]

    def samples(self, session_id: str, start: float, end: float) -> Sequence[UsageSample]:
        """Return the samples of a session between two times, in Unix seconds and in order."""
        kept = self._kept.get(session_id, array("q"))
        return [
            UsageSample(datetime.fromtimestamp(at_ms / 1000, UTC), _known(cpu_usec), _known(memory_bytes))
            for at_ms, cpu_usec, memory_bytes in zip(*(kept[field::_FIELDS] for field in range(_FIELDS)), strict=True)
            if start <= at_ms / 1000 <= end
        ]


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value
