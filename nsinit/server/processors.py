"""The processors of each session's programs: as many as its limit fills, those with the fewest sessions first.

A limit of the cgroup is time, and says nothing about how many processors a program sees. So the programs are bound to
that many: what counts them (`nproc`, pools of threads, garbage collectors) then finds a number that fits. A binding is
inherited, and no protection: a program may bind itself to others. Sources: sched_setaffinity(2), sched(7).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

from nsinit.cgroup.session import SessionCgroup
from nsinit.scheduler import Wait
from nsinit.wire.protocol import Limits

_ROUNDS = 3
"""Looks at a session's threads: some may be born of unbound ones during the look before."""
_AT_ONCE = 64
"""Processes bound before other jobs have a turn."""


@dataclass(slots=True)
class Processors:
    """The processors of this machine that nsinit may use, and the sessions on each."""

    usable: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    _of: dict[str, frozenset[int]] = field(default_factory=dict)
    _sessions: Counter[int] = field(default_factory=Counter)

    def take(self, session_id: str, limits: Limits) -> frozenset[int]:
        """Return the processors for a session with these limits: those it has, if their number fits."""
        count = min(len(self.usable), -(-limits.cpu_quota_us // limits.cpu_period_us))
        present = self.of(session_id)
        if len(present) != count:
            self.forget(session_id)
            fewest = sorted(self.usable, key=lambda number: (number not in present, self._sessions[number], number))
            self.note(session_id, frozenset(fewest[:count]))
        return self._of[session_id]

    def of(self, session_id: str) -> frozenset[int]:
        """Return the processors of a session; none for one that was given none."""
        return self._of.get(session_id, frozenset())

    def note(self, session_id: str, processors: frozenset[int]) -> None:
        """Count a session that has these processors."""
        self.forget(session_id)
        self._of[session_id] = processors
        self._sessions.update(processors)

    def forget(self, session_id: str) -> None:
        """Count a session no more."""
        self._sessions.subtract(self._of.pop(session_id, ()))


def bind(pid: int, processors: frozenset[int]) -> None:
    """Bind one thread to processors; one that has ended is fine."""
    try:
        os.sched_setaffinity(pid, processors)
    except ProcessLookupError:
        pass


def bind_all(cgroup: SessionCgroup, processors: frozenset[int]) -> Generator[Wait, bool, None]:
    """Bind every thread of a session, also those that chose others for themselves."""
    bound: set[int] = set()
    for _ in range(_ROUNDS):
        found = {pid: _threads(pid) - bound for pid in cgroup.processes()}
        for number, threads in enumerate(found.values(), 1):
            for thread in threads:
                bind(thread, processors)
            bound |= threads
            if number % _AT_ONCE == 0:
                yield Wait(timeout_s=0)
        if not any(found.values()):
            return


def _threads(pid: int) -> set[int]:
    try:
        return set(map(int, os.listdir(f"/proc/{pid}/task")))
    except (FileNotFoundError, ProcessLookupError):
        return set()
