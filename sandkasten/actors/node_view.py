"""Assembles what `Supervisor.system()` and `.node()` answer, from the configuration, the machine and nsinit's word.

Owns no state. What it reads itself comes from `counters/node.py`, in a worker thread.
"""

from __future__ import annotations

import functools
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.admission.budget import promisable
from sandkasten.config import Config
from sandkasten.counters import node
from sandkasten.host.protections import Situation, protections, with_needs
from sandkasten.images.catalog import Catalog
from sandkasten.model import LIMIT_BOUNDS, Session
from sandkasten.model.node import Amounts, Machine, NodeCapacity, System


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
