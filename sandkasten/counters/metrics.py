"""The numbers that the tree counts while it works, as instruments of prometheus_client in a registry of their own.

One `Metrics` belongs to one tree, and is handed to every part that has something to count; the library's global
registry is not used, since a process may have several supervisors. No label has an id, a path or a name that a client
chose, and `Series` bounds an instrument should a caller be wrong about that. Numbers that can be looked at when a
scraper asks (queues, memory) are not counted here, see `actors/node_view.py`.

Sources: Prometheus, "Metric types" and "Metric and label naming": base units; counters get `_total` on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar, cast
from weakref import WeakSet

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from egress.protocol import EgressTotals
from sandkasten.model import EventType

MAX_SERIES = 500
OVERFLOW = "other"

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Upper bounds of buckets, for times from half a millisecond to two minutes."""

SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Upper bounds of buckets, for times of a few milliseconds."""

UNKNOWN = "unknown"
_ENDINGS = {
    EventType.SESSION_DESTROYED: "destroyed",
    EventType.SESSION_EXPIRED: "expired",
    EventType.SESSION_CRASHED: "crashed",
    EventType.SESSION_LOST: "lost",
}
_PHASES = ("queue", "pool", "store", "workspace", "build", "runner")
"""The phases of a create that follow each other; their steps are in the answer's `Server-Timing`."""

_PULSE_S = 0.5


T = TypeVar("T", bound=Counter | Gauge | Histogram)


class Series(Generic[T]):
    """One instrument by the values of its labels: at most `MAX_SERIES` of them, further ones are counted together.

    The children are kept here, since the library's own look-up of one takes a lock and a multiple of the time.
    """

    def __init__(self, instrument: T) -> None:
        self._instrument = instrument
        self._children: dict[tuple[str, ...], T] = {}

    def __call__(self, *labels: str) -> T:
        """Return the child to count in; `labels` in the order of their names. Raises `ValueError` for a wrong count."""
        child = self._children.get(labels)
        if child is None:
            if len(self._children) >= MAX_SERIES:
                labels = (OVERFLOW,) * len(labels)
            child = self._children[labels] = cast(T, self._instrument.labels(*labels))
        return child


def collect(registry: CollectorRegistry) -> list[Metric]:
    """Return the counts so far, without the times at which each series began. Callable from any thread."""
    found = list(registry.collect())
    for metric in found:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return found


def gauge(name: str, help: str, values: Mapping[str, float | None], label: str) -> Metric:
    """Return present values, by the value of their one label; unknown (None) values are left out."""
    family = GaugeMetricFamily(name, help, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


class HasQueues(Protocol):
    """The runs of one session, as far as their number goes."""

    @property
    def running(self) -> int: ...

    @property
    def queued(self) -> int: ...


class Metrics:
    """The instruments of one tree. Written to by the event loop alone."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"sandkasten_{name}", help, labels, registry=own)

        def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"sandkasten_{name}", help, labels, registry=own, buckets=buckets)

        self.creates = Series(histogram("create_seconds", "How long creating a session took.", "outcome"))
        self.create_phases = Series(histogram("create_phase_seconds", "Where that time went.", "phase"))
        self.teardowns = histogram("teardown_seconds", "How long taking down a sandbox took.")
        self.sessions_created = Series(counter("sessions_created", "Sessions that came to run.", "source"))
        self.pool_claims = Series(counter("pool_claims", "Sessions made of a member of a pool.", "image"))
        self.pool_misses = Series(counter("pool_misses", "Creates that a pool had no member for.", "image", "reason"))
        self.pool_refills = Series(counter("pool_refills", "Members of pools that were made.", "image", "outcome"))
        self.sessions_ended = Series(counter("sessions_ended", "Sessions that ended.", "status", "reason"))
        self.runs_ended = Series(counter("runs_ended", "Commands, processes and terminals.", "kind", "cause"))
        self.runs = Series(histogram("run_seconds", "From the start of a run to its end.", "kind"))
        self.run_waits = Series(histogram("run_wait_seconds", "From the request to the start of a run.", "kind"))
        self.first_outputs = Series(
            histogram("run_first_output_seconds", "From the start of a run to its first output.", "kind")
        )
        self.oom_kills = counter("oom_kills", "Times that the kernel killed in sessions for memory.")
        self.events = Series(counter("events", "Events told in the journal.", "type"))
        self.store_commits = histogram("store_commit_seconds", "How long a group commit took.", buckets=SHORT_SECONDS)
        self.store_jobs = Series(counter("store_jobs", "Reads and writes of the database.", "outcome"))
        self.loop_lag = histogram(
            "event_loop_lag_seconds", "How late the event loop was, twice a second.", buckets=SHORT_SECONDS
        )
        self.sweeps = Series(counter("sweeps", "Searches for what no session owns.", "outcome"))
        self.swept = counter("swept", "What such searches adopted, finished or removed.")
        self.egress_connections = Series(counter("egress_connections", "Connections of ways out.", "verdict"))
        self.egress_open = Gauge("sandkasten_egress_connections_open", "Those that are open.", registry=own)
        self.egress_bytes = Series(counter("egress_bytes", "Bytes that ways out carried.", "direction"))
        self.egress_questions = Series(counter("egress_dns_questions", "Questions of sessions for names.", "verdict"))
        self.egress_dials = histogram("egress_dial_seconds", "From the first look-up to a connected server.")
        self.egress_pauses = counter("egress_pauses", "Times that connections waited for descriptors.")
        self.egress_dropped = counter("egress_entries_dropped", "Log entries of ways out that were lost.")
        self.egress_restarts = counter("egress_restarts", "Times that the egress process was started again.")
        self.looks: dict[str, Callable[[], float]] = {}
        """Numbers that are looked at when a scraper asks, by name; see `look_at`."""
        self.queues: WeakSet[HasQueues] = WeakSet()
        """The runs of each live session, to count those that wait."""

    def note_event(self, type: EventType, data: Mapping[str, object]) -> None:
        """Count an event of the journal."""
        self.events(type).inc()
        if type is EventType.SESSION_CREATED:
            self.sessions_created(str(data.get("acquire_source"))).inc()
        elif type is EventType.OOM:
            self.oom_kills.inc()
        elif (status := _ENDINGS.get(type)) is not None:
            self.sessions_ended(status, str(data.get("end_reason", UNKNOWN))).inc()

    def note_create(self, outcome: str, took_s: float, timings_ms: Mapping[str, float]) -> None:
        """Count a create: `ok` or the code of its error, and the times of its phases."""
        self.creates(outcome).observe(took_s)
        for phase in _PHASES:
            if phase in timings_ms:
                self.create_phases(phase).observe(timings_ms[phase] / 1000)

    def note_run(
        self, kind: str, cause: str, *, waited_s: float | None, ran_s: float | None, first_output_s: float | None
    ) -> None:
        """Count a run that has ended; None for a time of an event that did not happen."""
        self.runs_ended(kind, cause).inc()
        if waited_s is not None:
            self.run_waits(kind).observe(waited_s)
        if ran_s is not None:
            self.runs(kind).observe(ran_s)
        if first_output_s is not None:
            self.first_outputs(kind).observe(first_output_s)

    def note_egress(self, before: EgressTotals, after: EgressTotals) -> None:
        """Count what an egress process did between two of its totals."""
        self.egress_open.set(after.connections_open)
        for child, name in (
            (self.egress_connections("allowed"), "allowed"),
            (self.egress_connections("denied"), "denied"),
            (self.egress_bytes("up"), "bytes_up"),
            (self.egress_bytes("down"), "bytes_down"),
            (self.egress_questions("allowed"), "dns_allowed"),
            (self.egress_questions("denied"), "dns_denied"),
            (self.egress_pauses, "pauses"),
        ):
            child.inc(max(0, getattr(after, name) - getattr(before, name)))  # foreign numbers, which may shrink

    def note_commit(self, took_s: float, *, done: int, failed: int) -> None:
        """Count a group commit and the jobs in it."""
        self.store_commits.observe(took_s)
        self.store_jobs("ok").inc(done)
        self.store_jobs("failed").inc(failed)

    def look_at(self, **looks: Callable[[], float]) -> None:
        """Have numbers looked at under these names, in place of earlier ones of the same name."""
        self.looks |= looks

    def read(self) -> list[Metric]:
        """Return all counts. Callable from any thread."""
        return collect(self._registry)


async def watch_loop(metrics: Metrics, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Measure for ever how late the event loop comes back to a task that slept."""
    task_status.started()
    while True:
        due = trio.current_time() + _PULSE_S
        await trio.sleep_until(due)
        metrics.loop_lag.observe(max(trio.current_time() - due, 0.0))
