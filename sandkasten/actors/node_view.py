"""The node as it is seen from outside: answers of `Supervisor.system()`, `node()` and `metrics()`, and the watchdog.

Owns no state. Metrics ask no actor that could make them wait: mailboxes, queues and the output store are read from
outside, since metrics are wanted most when an actor does not answer. Facts about the machine come from
`counters/node.py`, in a worker thread.

The watchdog of the service manager gets a sign of life only while the event loop turns and the store, nsinit and the
sessions actor answer. A daemon that lives and can't work is started again, and sandboxes are adopted. A full disk is no
reason: a new start would find it as full.
"""

from __future__ import annotations

import functools
import logging
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
from runner.wire.protocol import MAX_EDITS, MAX_MATCHES, MAX_SHELLS, MAX_WATCHES
from sandkasten.actors.core import Ref, by_turns
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.budget import promisable
from sandkasten.admission.plan import bounds_in_force
from sandkasten.config import Config
from sandkasten.counters import node
from sandkasten.counters.metrics import Metrics, gauge
from sandkasten.counters.node import read_node
from sandkasten.host.notify import Notifier
from sandkasten.host.protections import Situation, protections, with_needs
from sandkasten.images.catalog import Catalog
from sandkasten.journal.ring import Journal
from sandkasten.model import MAX_TTL_S, Session, Status
from sandkasten.model.lifecycle import LIVE
from sandkasten.model.node import Amounts, Machine, NodeCapacity, System
from sandkasten.model.workspace import MAX_UPLOADS
from sandkasten.output.store import OutputStore
from sandkasten.supervisor import Supervisor

log = logging.getLogger(__name__)

_VITAL = ("store", "nsinit", "sessions")
"""Checks of readiness without which the watchdog gets no sign of life."""


def describe_system(config: Config, machine: Machine, ready: protocol.Ready, *, has_egress: bool) -> System:
    """Return the installation as it is in force; `has_egress`: an egress process can be started. Blocking: the first
    call reads the package's version."""
    features = {
        **ready.features,
        "disk": ready.disk,
        "disk_refused": ready.disk_refused,
        "way_out": has_egress,
        "steering": machine.steers,
        "bridge": config.may_bridge and machine.bridges,
    }
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
    """Return the version of the installed package. Blocking the first time."""
    return version("sandkasten-runtime")


def defaults_in_force(config: Config) -> dict[str, Any]:  # JSON values
    """Return the defaults of sessions and commands, under the names of the HTTP API."""
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
    """Return the bounds of requests, as this server enforces them."""
    in_force = bounds_in_force(config.maximum, config.disk)
    bounds: dict[str, Any] = {name: {"min": low, "max": high} for name, (low, high) in in_force.items()}
    names = ["max_sessions", "max_connections", "max_command_bytes", "max_json_bytes"]
    names += ["max_upload_bytes", "max_read_bytes", "output_cap_bytes"]
    return (
        bounds
        | {
            "timeout_ms": {
                "min": 1,
                "max": None if config.runs.allow_unlimited else config.defaults.max_exec_timeout_ms,
            },
            "ttl_seconds": {"min": 1, "max": min(MAX_TTL_S, config.maximum.idle_timeout_seconds or MAX_TTL_S)},
            "network_mode": {"max": config.egress_in_force.max_mode},
            "idle_timeout_seconds": {"min": 1, "max": config.maximum.idle_timeout_seconds},
            "max_lifetime_seconds": {"min": 1, "max": config.maximum.max_lifetime_seconds},
        }
        | {name: getattr(config.server, name) for name in names}
        | {
            "max_import_mb": config.workspace.max_import_mb,
            "max_exec_ids": config.runs.max_exec_ids,
            "max_shells": MAX_SHELLS,
            "max_uploads": MAX_UPLOADS,
            "max_watches": MAX_WATCHES,
            "max_edits": MAX_EDITS,
            "max_matches": MAX_MATCHES,
        }
    )


@attrs.frozen
class NodeFacts:
    """The facts about the node that only the tree has. `committed` includes creates under way; `pooled` is the
    number of pool sandboxes."""

    status: str
    sessions: Sequence[Session]
    max_sessions: int
    committed: Amounts
    pooled: int
    queued: int
    cgroup_dirs: Mapping[str, str]


async def describe_capacity(config: Config, catalog: Catalog, facts: NodeFacts) -> NodeCapacity:
    """Return the capacity of the node. Takes a fraction of a millisecond in a worker thread."""
    return await trio.to_thread.run_sync(_read, config, catalog, facts)


def _read(config: Config, catalog: Catalog, facts: NodeFacts) -> NodeCapacity:
    dirs = facts.cgroup_dirs
    bounds = node.read_bounds(dirs)
    totals = node.read_totals(config.data_dir, bounds, max_sessions=facts.max_sessions)
    return NodeCapacity(
        status=facts.status,
        totals=totals,
        budget=promisable(config.admission, totals, facts.max_sessions, config.defaults.limits),
        committed=facts.committed,
        used=node.read_used(config.data_dir, dirs, sessions=len(facts.sessions)),
        free=node.read_free(config.data_dir, bounds),
        images=tuple(image.name for image in catalog.shown()),
        sessions=dict(Counter(session.status.value for session in facts.sessions)),
        pool_sandboxes=facts.pooled,
        queued=facts.queued,
    )


_LOOKS = {
    "creates_queued": "Creates that wait for a builder.",
    "pool_sandboxes": "Sandboxes made ahead that are ready.",
    "pool_members": "Whole sessions made ahead that are ready.",
    "draining": "1 while no new sessions are taken.",
    "sessions_max": "How many sessions there may be.",
    "sessions_committed_memory_bytes": "What live sessions may use together.",
    "sessions_committed_cpu": "The same in cores.",
}
"""The numbers that the sessions actor gives the metrics, with their help."""


@attrs.frozen
class MetricSources:
    """The sources of the metrics. `parts` are the actors of which there is one; `cgroup_dirs` is empty as long as it
    is unknown."""

    metrics: Metrics
    directory: SessionDirectory
    journal: Journal
    output: OutputStore
    parts: Sequence[Ref]
    nsinit: Ref
    data_dir: Path
    cgroup_dirs: Mapping[str, str]
    node_id: str


async def measure(seen: MetricSources, *, limiter: trio.CapacityLimiter) -> Sequence[Metric]:
    """Return the metrics of a scrape. The reads of files take a worker thread."""
    sessions = await by_turns(lambda entry: (entry.session.status, entry.ref.waiting), seen.directory)
    queues = await by_turns(lambda queue: (queue.running, queue.queued), list(seen.metrics.queues))
    slow = await trio.to_thread.run_sync(_read_or_none, seen, limiter=limiter)
    return [*_of_tree(seen, sessions, queues), *_of_storage(seen), *slow]


def _read_or_none(seen: MetricSources) -> list[Metric]:
    info = GaugeMetricFamily("sandkasten_build_info", "What this is; always 1.", labels=["node", "version"])
    info.add_metric([seen.node_id, package_version()], 1)
    return [
        info,
        *seen.metrics.read(),
        *read_node(seen.data_dir, seen.cgroup_dirs),
    ]


def _of_tree(
    seen: MetricSources, sessions: Sequence[tuple[Status, int]], queues: Sequence[tuple[int, int]]
) -> list[Metric]:
    """Return what is counted in the tree. `sessions`: status and waiting messages of each; `queues`: runs that have
    begun and that wait."""
    statuses, waiting = Counter(status for status, _ in sessions), [messages for _, messages in sessions]
    restarts = max(seen.nsinit.incarnation - 1, 0)
    return [
        gauge(
            "sandkasten_sessions",
            "Sessions as they are now.",
            {status.value: float(statuses[status]) for status in sorted(LIVE)},
            "status",
        ),
        gauge(
            "sandkasten_runs",
            "Runs as they are now; queued: they wait for their shell.",
            {"running": sum(running for running, _ in queues), "queued": sum(queued for _, queued in queues)},
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


def _of_storage(seen: MetricSources) -> list[Metric]:
    output, journal = seen.output, seen.journal
    return [
        gauge(
            "sandkasten_spool_bytes",
            "Output of runs that is kept.",
            {"memory": output.memory_bytes_used, "disk": output.disk_bytes_used},
            "place",
        ),
        CounterMetricFamily("sandkasten_spool_lost_bytes", "Output that the disk did not take.", output.lost_bytes),
        GaugeMetricFamily("sandkasten_journal_rows", "Events in the database.", journal.rows),
        GaugeMetricFamily(
            "sandkasten_journal_unwritten", "Events that are not in the database yet.", journal.unwritten_count
        ),
        GaugeMetricFamily("sandkasten_event_readers", "Readers of events.", journal.readers),
        GaugeMetricFamily(
            "sandkasten_unwritten_records", "Sessions whose end was refused.", len(seen.directory.unwritten)
        ),
    ]


async def keep_beating(supervisor: Supervisor, notifier: Notifier) -> None:
    """Give signs of life for ever; without a watchdog, sleep."""
    if notifier.beat_s is None:
        await trio.sleep_forever()
    while True:
        await _beat(supervisor, notifier)
        await trio.sleep(notifier.beat_s)


async def _beat(supervisor: Supervisor, notifier: Notifier) -> None:
    checks = (await supervisor.readiness()).checks
    ill = {name: checks[name] for name in _VITAL if checks.get(name, "ok") != "ok"}
    if ill:
        log.error("watchdog_not_told", extra={"checks": ill})
        notifier.say("; ".join(f"{name}: {what}" for name, what in ill.items()))
        return
    found = await supervisor.capacity()
    notifier.alive(f"{found.status}, {sum(found.sessions.values())} sessions")
