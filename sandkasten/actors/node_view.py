"""Assembles what `Supervisor.system()` and `.node()` answer, from the configuration, the machine and nsinit's word.

Owns no state. What it reads itself comes from `counters/node.py`, in a worker thread.

Assembles what `Supervisor.metrics()` answers: what the tree counted, and what can be seen of it at that moment.

Owns no state and asks nobody who could make it wait: mailboxes, queues and the spool are looked at from outside, since
metrics are wanted most when somebody does not answer. What it reads of the machine comes from
`counters/node.py`, in a worker thread.
"""

from __future__ import annotations

import functools
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import trio
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from nsinit.wire import protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.budget import promisable
from sandkasten.config import Config
from sandkasten.counters import node
from sandkasten.counters.metrics import Metrics, gauge
from sandkasten.counters.node import read_node
from sandkasten.host.protections import Situation, protections, with_needs
from sandkasten.images.catalog import Catalog
from sandkasten.journal.ring import Journal
from sandkasten.model import LIMIT_BOUNDS, Session, Status
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.node import Amounts, Machine, NodeCapacity, System
from sandkasten.output.spool import Spool


def describe_system(config: Config, machine: Machine, ready: protocol.Ready) -> System:
    """Return the installation as it is in force. Blocking: the first call reads the package's version."""
    features = {**ready.features, "disk": ready.disk, "disk_refused": ready.disk_refused}
    return System(
        version=package_version(),
        python=platform.python_version(),
        kernel=platform.release(),
        architecture=platform.machine(),
        cgroup_mode=ready.cgroup_mode,
        features=features,
        defaults=defaults_in_force(config),
        limits=limits_in_force(config),
        protections=protections(Situation(config, machine, features, os.geteuid())),
        machine=with_needs(config, machine),
    )


@functools.cache
def package_version() -> str:
    """Return what is installed. Blocking the first time."""
    return version("sandkasten-runtime")


def defaults_in_force(config: Config) -> dict[str, Any]:  # JSON values
    """Return what a session or a command gets when its creator says nothing, under the names of the HTTP API."""
    defaults = config.defaults
    return {
        "image": config.default_image,
        "ttl_seconds": config.session_ttl_seconds,
        "max_lifetime_seconds": config.maximum.max_lifetime_seconds,
        "limits": attrs.asdict(defaults.limits),
        "network_mode": defaults.network_mode,
        "readonly_rootfs": defaults.readonly_rootfs,
        "shell": defaults.shell_prefer,
        "timeout_ms": defaults.max_exec_timeout_ms,
    }


def limits_in_force(config: Config) -> dict[str, Any]:  # JSON values
    """Return the bounds of what may be asked for."""
    bounds: dict[str, Any] = {name: {"min": low, "max": high} for name, (low, high) in LIMIT_BOUNDS.items()}
    names = ("max_sessions", "max_command_bytes", "max_upload_bytes", "max_read_bytes", "output_cap_bytes")
    return (
        bounds
        | {
            "timeout_ms": {
                "min": 1,
                "max": None if config.runs.allow_unlimited else config.defaults.max_exec_timeout_ms,
            },
            "idle_timeout_seconds": {"min": 1, "max": config.maximum.idle_timeout_seconds},
            "max_lifetime_seconds": {"min": 1, "max": config.maximum.max_lifetime_seconds},
        }
        | {name: getattr(config.server, name) for name in names}
    )


@attrs.frozen
class NodeFacts:
    """What only the tree knows. `committed` counts creates that were admitted, too."""

    status: str
    sessions: Sequence[Session]
    max_sessions: int
    committed: Amounts
    vessels: int
    queued: int
    cgroup_dirs: Mapping[str, str]


async def describe_capacity(config: Config, catalog: Catalog, facts: NodeFacts) -> NodeCapacity:
    """Return what the node can take now; a fraction of a millisecond in a worker thread."""
    return await trio.to_thread.run_sync(_read, config, catalog, facts)


def _read(config: Config, catalog: Catalog, facts: NodeFacts) -> NodeCapacity:
    dirs = facts.cgroup_dirs
    bounds = node.read_bounds(dirs)
    totals = node.read_totals(config.data_dir, bounds, max_sessions=facts.max_sessions)
    return NodeCapacity(
        status=facts.status,
        totals=totals,
        budget=promisable(config.admission, totals),
        committed=facts.committed,
        used=node.read_used(config.data_dir, dirs, sessions=len(facts.sessions)),
        free=node.read_free(config.data_dir, bounds),
        images=tuple(image.name for image in catalog.images()),
        sessions=dict(Counter(session.status.value for session in facts.sessions)),
        vessels=facts.vessels,
        queued=facts.queued,
    )


_AT_ONCE = 100
"""Sessions that are looked at before other tasks get a turn."""

_LOOKS = {
    "creates_queued": "Creates that wait for a builder.",
    "vessels": "Sandboxes made ahead that are ready.",
    "draining": "1 while no new sessions are taken.",
    "sessions_max": "How many sessions there may be.",
    "sessions_committed_memory_bytes": "What live sessions may use together.",
    "sessions_committed_cpu": "The same in cores.",
}
"""What the part that makes sessions lets be looked at, and its help."""


@attrs.frozen
class Observed:
    """What is looked at. `parts` are the actors there is one of; `cgroup_dirs` is empty as long as it is unknown."""

    metrics: Metrics
    directory: SessionDirectory
    journal: Journal
    spool: Spool
    parts: Sequence[Ref]
    zygote: Ref
    data_dir: Path
    cgroup_dirs: Mapping[str, str]
    node_id: str


async def measure(seen: Observed, *, limiter: trio.CapacityLimiter) -> Sequence[Metric]:
    """Return all numbers there are."""
    statuses: Counter[Status] = Counter()
    for start, entry in enumerate(seen.directory):
        if start % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
        statuses[entry.session.status] += 1
    slow = await trio.to_thread.run_sync(_read_or_none, seen, limiter=limiter)
    return [*_of_tree(seen, statuses), *_of_storage(seen), *slow]


def _read_or_none(seen: Observed) -> list[Metric]:
    info = GaugeMetricFamily("sandkasten_build_info", "What this is; always 1.", labels=["node", "version"])
    info.add_metric([seen.node_id, package_version()], 1)
    return [
        info,
        *seen.metrics.read(),
        *read_node(seen.data_dir, seen.cgroup_dirs),
    ]


def _of_tree(seen: Observed, statuses: Mapping[Status, int]) -> list[Metric]:
    entries = list(seen.directory)
    queues = list(seen.metrics.queues)
    running = sum(each.running for each in queues)
    waiting = [entry.ref.waiting for entry in entries]
    restarts = max(seen.zygote.incarnation - 1, 0)
    return [
        gauge(
            "sandkasten_sessions",
            "Sessions as they are now.",
            {status.value: float(statuses.get(status, 0)) for status in sorted(LIVE)},
            "status",
        ),
        gauge(
            "sandkasten_runs",
            "Runs as they are now; queued: they wait for their shell.",
            {"running": running, "queued": sum(each.queued for each in queues)},
            "state",
        ),
        gauge(
            "sandkasten_mailbox_messages",
            "Messages that wait for an actor; session: of all of them together.",
            {**{ref.name: float(ref.waiting) for ref in seen.parts}, "session": sum(waiting)},
            "actor",
        ),
        GaugeMetricFamily(
            "sandkasten_session_mailbox_messages_max", "Messages in the fullest one.", max(waiting, default=0)
        ),
        gauge(
            "sandkasten_part_up",
            "Whether an actor runs.",
            {ref.name: float(ref.is_alive) for ref in seen.parts},
            "actor",
        ),
        *(GaugeMetricFamily(f"sandkasten_{name}", _LOOKS[name], look()) for name, look in seen.metrics.looks.items()),
        GaugeMetricFamily(
            "sandkasten_trio_tasks", "Tasks of the event loop.", trio.lowlevel.current_statistics().tasks_living
        ),
        CounterMetricFamily("sandkasten_nsinit_restarts", "How often nsinit was started again.", restarts),
    ]


def _of_storage(seen: Observed) -> list[Metric]:
    spool, journal = seen.spool, seen.journal
    return [
        gauge(
            "sandkasten_spool_bytes",
            "Output of runs that is kept.",
            {"memory": spool.memory_bytes_used, "disk": spool.disk_bytes_used},
            "place",
        ),
        CounterMetricFamily("sandkasten_spool_lost_bytes", "Output that the disk did not take.", spool.lost_bytes),
        GaugeMetricFamily("sandkasten_journal_rows", "Events in the database.", journal.rows),
        GaugeMetricFamily(
            "sandkasten_journal_unwritten", "Events that are not in the database yet.", journal.unwritten_count
        ),
        GaugeMetricFamily("sandkasten_event_readers", "Readers of events.", journal.readers),
        GaugeMetricFamily(
            "sandkasten_unwritten_records", "Sessions whose end was refused.", len(seen.directory.unwritten)
        ),
    ]
