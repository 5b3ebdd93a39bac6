"""The node: whether it lives and can serve, what is installed and in force, what it has and uses, its metrics.

`/healthz` alone is public: the other answers say what is broken. The text of `/metrics` is made by `prometheus_client`
in a worker thread from values taken before. Its global registry is not used, since a process may have several
supervisors; the `process_*` numbers are its own reading of /proc.

Sources: Prometheus, "Exposition formats" (0.0.4); OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import attrs
import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.http.settings import ApiSettings
from sandkasten.model.node import Amounts, Check, NodeInfo, Protection, System

# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen
class HealthBody(Body):
    """The event loop turns, and both halves of the front answer."""

    status: Literal["ok"] = "ok"


@attrs.frozen
class ReadinessBody(Body):
    """Readiness of the node to serve. Each check maps to `ok` or to a sentence."""

    ready: bool
    checks: Mapping[str, str]


@attrs.frozen(kw_only=True)
class SystemBody(Body):
    """The installation: versions, the kernel, defaults and bounds, protections in force and the checks behind them."""

    version: str
    python: str
    kernel: str
    architecture: str
    cgroup_mode: str
    features: Mapping[str, Any]
    defaults: Mapping[str, Any]
    limits: Mapping[str, Any]
    protections: Sequence[Protection]
    examined_at: datetime
    facts: Mapping[str, Any]
    checks: Sequence[Check]

    @classmethod
    def of(cls, system: System, settings: ApiSettings) -> SystemBody:
        """Return the installation as clients see it."""
        machine, limits = system.machine, {**system.limits, "max_request_bytes": settings.max_request_bytes}
        return cls.take(
            system, limits=limits, examined_at=machine.examined_at, facts=machine.facts, checks=machine.checks
        )


@attrs.frozen
class CapacityBody(Body):
    """Amounts that sessions share: what there is, may be promised, is promised, is used, and is left."""

    totals: Amounts
    budget: Amounts
    committed: Amounts
    used: Amounts
    free: Amounts


@attrs.frozen(kw_only=True)
class NodeBody(Body):
    """The node at one moment. `pool_sandboxes` counts sandboxes made ahead, `queued` the creates that wait."""

    id: str
    incarnation: int
    status: str
    time: datetime
    started_at: datetime
    capacity: CapacityBody
    images: Sequence[str]
    sessions: Mapping[str, int]
    pool_sandboxes: int
    queued: int

    @classmethod
    def of(cls, node: NodeInfo) -> NodeBody:
        """Return the node as clients see it."""
        return cls.take(node, capacity=CapacityBody.take(node))


# Handlers -------------------------------------------------------------------------------------------------------------


async def healthz(_exchange: Exchange) -> Answer:
    """Tell that the daemon lives."""
    return json_answer(HealthBody())


async def readyz(exchange: Exchange) -> Answer:
    """Tell whether the node can serve; 503 until every check is ok."""
    readiness = await exchange.supervisor.readiness()
    return json_answer(ReadinessBody.take(readiness), status=200 if readiness.ready else 503)


async def system(exchange: Exchange) -> Answer:
    """Read versions, defaults, bounds and protections of the installation."""
    return json_answer(SystemBody.of(await exchange.supervisor.system(), exchange.settings))


async def node(exchange: Exchange) -> Answer:
    """Read the node's capacity and use."""
    return json_answer(NodeBody.of(await exchange.supervisor.node()))


async def drain(exchange: Exchange) -> Answer:
    """Take no new sessions."""
    return json_answer(NodeBody.of(await exchange.supervisor.drain()))


async def undrain(exchange: Exchange) -> Answer:
    """Take new sessions again."""
    return json_answer(NodeBody.of(await exchange.supervisor.undrain()))


async def pools(exchange: Exchange) -> Answer:
    """List the session pools."""
    return json_answer(await exchange.supervisor.pools())


# Metrics --------------------------------------------------------------------------------------------------------------

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Page:
    """A collector of the families of one answer."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def metrics(exchange: Exchange) -> None:
    """Read all metrics, for Prometheus."""
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
