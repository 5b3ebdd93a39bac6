"""What is installed and in force (`/v1/system`) and what this node has and uses (`/v1/node`), as JSON.

Whether the daemon lives (public) and whether it can serve (not public: it says what is broken).

`GET /metrics`: what the tree and the front count, for Prometheus, as text or OpenMetrics.

The text is made by `prometheus_client`, in a worker thread, from values that were taken before; its global registry is
not used, since a process may have several supervisors. The `process_*` numbers are its own reading of /proc.

Sources: Prometheus, "Exposition formats" (0.0.4); OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.log import rfc3339
from sandkasten.model.node import Machine, NodeInfo, System

_AMOUNTS = ("totals", "budget", "committed", "used", "free")


async def system(exchange: Exchange) -> Answer:
    """GET /v1/system"""
    return json_answer(system_view(await exchange.supervisor.system()))


async def node(exchange: Exchange) -> Answer:
    """GET /v1/node"""
    return json_answer(node_view(await exchange.supervisor.node()))


async def drain(exchange: Exchange) -> Answer:
    """POST /v1/node/drain"""
    return json_answer(node_view(await exchange.supervisor.drain()))


async def undrain(exchange: Exchange) -> Answer:
    """POST /v1/node/undrain"""
    return json_answer(node_view(await exchange.supervisor.undrain()))


def system_view(found: System) -> dict[str, Any]:  # JSON values
    """Return the installation as clients see it."""
    plain = ("version", "python", "kernel", "architecture", "cgroup_mode")
    return {
        **{name: getattr(found, name) for name in plain},
        "features": dict(found.features),
        "defaults": dict(found.defaults),
        "limits": dict(found.limits),
        "protections": [attrs.asdict(each) for each in found.protections],
        **machine_view(found.machine),
    }


def machine_view(machine: Machine) -> dict[str, Any]:  # JSON values
    """Return an examination as `doctor --json` and `/v1/system` have it."""
    return {
        "examined_at": rfc3339(machine.examined_at),
        "facts": dict(machine.facts),
        "checks": [attrs.asdict(check) for check in machine.checks],
    }


def node_view(found: NodeInfo) -> dict[str, Any]:  # JSON values
    """Return a node as clients see it."""
    return {
        "id": found.id,
        "incarnation": found.incarnation,
        "status": found.status,
        "time": rfc3339(found.time),
        "started_at": rfc3339(found.started_at),
        "capacity": {name: attrs.asdict(getattr(found, name)) for name in _AMOUNTS},
        "images": list(found.images),
        "sessions": dict(found.sessions),
        "vessels": found.vessels,
        "queued": found.queued,
    }


async def healthz(_exchange: Exchange) -> Answer:
    """GET /healthz; the event loop turns and both halves of the front answer."""
    return json_answer({"status": "ok"})


async def readyz(exchange: Exchange) -> Answer:
    """GET /readyz; 503 until every check is ok."""
    readiness = await exchange.supervisor.readiness()
    view = {"ready": readiness.ready, "checks": dict(readiness.checks)}
    return json_answer(view, status=200 if readiness.ready else 503)


TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Page:
    """The families of one answer, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def metrics(exchange: Exchange) -> None:
    """GET /metrics"""
    families = await exchange.supervisor.metrics()
    is_openmetrics = "application/openmetrics-text" in (exchange.header(b"accept") or "").lower()

    def make_page() -> bytes:
        return render([*families, *exchange.metrics.read()], is_openmetrics)

    page = await trio.to_thread.run_sync(make_page, limiter=exchange.metrics.rendering)
    headers = (("content-type", OPENMETRICS if is_openmetrics else TEXT), ("content-length", str(len(page))))
    await exchange.start(200, headers)
    await exchange.finish(page if exchange.method != "HEAD" else b"")


def render(families: Iterable[Metric], is_openmetrics: bool) -> bytes:
    """Return the answer's body. Blocking: a few milliseconds."""
    registry = CollectorRegistry()
    registry.register(_Page(families))
    ProcessCollector(registry=registry)
    return openmetrics.generate_latest(registry) if is_openmetrics else generate_latest(registry)  # type: ignore[no-untyped-call]
