"""`GET /metrics`: what the tree and the front count, for Prometheus, as text or OpenMetrics.

The text is made by `prometheus_client`, in a worker thread, from values that were taken before; its global registry is
not used, since a process may have several supervisors. The `process_*` numbers are its own reading of /proc.

Sources: Prometheus, "Exposition formats" (0.0.4); OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from sandkasten.api.http.exchange import Exchange
from sandkasten.model.measures import Family

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Page:
    """The families of one answer, as a collector."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return [as_metric(family) for family in self._families]


async def metrics(exchange: Exchange) -> None:
    """GET /metrics"""
    families = [*await exchange.supervisor.metrics(), *exchange.metrics.read()]
    is_openmetrics = "application/openmetrics-text" in (exchange.header(b"accept") or "").lower()
    page = await trio.to_thread.run_sync(render, families, is_openmetrics, limiter=exchange.metrics.rendering)
    headers = (("content-type", OPENMETRICS if is_openmetrics else TEXT), ("content-length", str(len(page))))
    await exchange.start(200, headers)
    await exchange.finish(page if exchange.method != "HEAD" else b"")


def render(families: Sequence[Family], is_openmetrics: bool) -> bytes:
    """Return the answer's body. Blocking: a few milliseconds."""
    registry = CollectorRegistry()
    registry.register(_Page(families))
    ProcessCollector(registry=registry)
    return openmetrics.generate_latest(registry) if is_openmetrics else generate_latest(registry)  # type: ignore[no-untyped-call]


def as_metric(family: Family) -> Metric:
    """Return a family as the library knows it."""
    name, help, labels = family.name, family.help, family.label_names
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, help, labels=labels)
        ends = [*map(str, family.bounds), "+Inf"]
        for each in family.distributions:
            histogram.add_metric(each.labels, list(zip(ends, each.cumulative, strict=True)), each.total)
        return histogram
    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = made(name, help, labels=labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, sample.value)
    return metric
