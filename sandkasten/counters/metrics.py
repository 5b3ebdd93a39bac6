"""What the tree counts while it works: one object for each tree, handed to whoever has something to count.

Owns the instruments and their names, decides nothing and keeps nothing of a session: no label has an id, a path or a
name that a client chose. What can be looked at when somebody asks (queues, memory) is not counted here, see
`actors/node_view.py`. Names after Prometheus, "Metric and label naming": base units, `_total` is appended on the way
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakSet

import trio

from sandkasten.model import EventType
from sandkasten.model.measures import SHORT_SECONDS, Counter, Family, Histogram

_ENDINGS = {
    EventType.SESSION_DESTROYED: "destroyed",
    EventType.SESSION_EXPIRED: "expired",
    EventType.SESSION_CRASHED: "crashed",
    EventType.SESSION_LOST: "lost",
}
_PHASES = ("queue", "store", "workspace", "build", "runner")
"""The phases of a create that follow each other; their steps are in the answer's `Server-Timing`."""

UNKNOWN = "unknown"
_PULSE_S = 0.5


class HasQueues(Protocol):
    """The runs of one session, as far as their number goes."""

    @property
    def running(self) -> int: ...

    @property
    def queued(self) -> int: ...


class Metrics:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.creates = Histogram("sandkasten_create_seconds", "How long creating a session took.", "outcome")
        self.create_phases = Histogram("sandkasten_create_phase_seconds", "Where that time went.", "phase")
        self.teardowns = Histogram("sandkasten_teardown_seconds", "How long taking down a sandbox took.")
        self.sessions_created = Counter("sandkasten_sessions_created", "Sessions that came to run.", "source")
        self.sessions_ended = Counter("sandkasten_sessions_ended", "Sessions that ended.", "status", "reason")
        self.runs_ended = Counter("sandkasten_runs_ended", "Commands, processes and terminals.", "kind", "cause")
        self.runs = Histogram("sandkasten_run_seconds", "From the start of a run to its end.", "kind")
        self.run_waits = Histogram("sandkasten_run_wait_seconds", "From the request to the start of a run.", "kind")
        self.first_outputs = Histogram(
            "sandkasten_run_first_output_seconds", "From the start of a run to its first output.", "kind"
        )
        self.oom_kills = Counter("sandkasten_oom_kills", "Times that the kernel killed in sessions for memory.")
        self.events = Counter("sandkasten_events", "Events told in the journal.", "type")
        self.store_commits = Histogram(
            "sandkasten_store_commit_seconds", "How long a group commit took.", bounds=SHORT_SECONDS
        )
        self.store_jobs = Counter("sandkasten_store_jobs", "Reads and writes of the database.", "outcome")
        self.loop_lag = Histogram(
            "sandkasten_event_loop_lag_seconds", "How late the event loop was, twice a second.", bounds=SHORT_SECONDS
        )
        self.sweeps = Counter("sandkasten_sweeps", "Searches for what no session owns.", "outcome")
        self.swept = Counter("sandkasten_swept", "What such searches adopted, finished or removed.")
        self.looks: dict[str, Callable[[], float]] = {}
        """Numbers that are looked at when somebody asks, by name; see `look_at`."""
        self.queues: WeakSet[HasQueues] = WeakSet()
        """The runs of each live session, for who counts what waits."""

    def note_event(self, type: EventType, data: Mapping[str, object]) -> None:
        """Count what the journal was told."""
        self.events.add(type.value)
        if type is EventType.SESSION_CREATED:
            self.sessions_created.add(str(data.get("acquire_source")))
        elif type is EventType.OOM:
            self.oom_kills.add()
        elif (status := _ENDINGS.get(type)) is not None:
            self.sessions_ended.add(status, str(data.get("end_reason", UNKNOWN)))

    def note_create(self, outcome: str, took_s: float, timings_ms: Mapping[str, float]) -> None:
        """Count a create: `ok` or the code of its error, and what its phases took."""
        self.creates.observe(took_s, outcome)
        for phase in _PHASES:
            if phase in timings_ms:
                self.create_phases.observe(timings_ms[phase] / 1000, phase)

    def note_run(
        self, kind: str, cause: str, *, waited_s: float | None, ran_s: float | None, first_output_s: float | None
    ) -> None:
        """Count a run that has ended; None for what did not happen."""
        self.runs_ended.add(kind, cause)
        if waited_s is not None:
            self.run_waits.observe(waited_s, kind)
        if ran_s is not None:
            self.runs.observe(ran_s, kind)
        if first_output_s is not None:
            self.first_outputs.observe(first_output_s, kind)

    def note_commit(self, took_s: float, *, done: int, failed: int) -> None:
        """Count a group commit and the jobs in it."""
        self.store_commits.observe(took_s)
        self.store_jobs.add("ok", by=done)
        self.store_jobs.add("failed", by=failed)

    def look_at(self, **looks: Callable[[], float]) -> None:
        """Let numbers be looked at, in place of what was looked at under those names before."""
        self.looks |= looks

    def read(self) -> list[Family]:
        """Return all that was counted."""
        return [each.read() for each in vars(self).values() if isinstance(each, Counter | Histogram)]


async def watch_loop(metrics: Metrics, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Measure for ever how late the event loop comes back to a task that slept."""
    task_status.started()
    while True:
        due = trio.current_time() + _PULSE_S
        await trio.sleep_until(due)
        metrics.loop_lag.observe(max(trio.current_time() - due, 0.0))
