"""Metrics of the front: requests by route, method and status class, their durations, and WebSockets.

A series names the template of a route, never a path, so that clients can't add series; all paths without a route share
one. Owns the instruments; `resources/node.py` spells them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from sandkasten import log
from sandkasten.counters.metrics import SECONDS, Series, collect

NOWHERE = "none"
"""Stands in place of a route, for paths and methods without one."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD = "other"
_CONCURRENT = 2


class FrontMetrics:
    """Durations and counts of the requests and WebSockets that one HTTP front serves."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Series(
            Histogram(
                "sandkasten_http_request_seconds",
                "From a request's head to the end of its answer, streams included.",
                ("method", "route", "status"),
                registry=own,
                buckets=SECONDS,
            )
        )
        self._websockets_ended = Series(
            Counter("sandkasten_websockets_ended", "WebSockets by how they ended.", ("route", "end"), registry=own)
        )
        self._serving = 0
        requests_now = Gauge("sandkasten_http_requests", "Requests that are being served.", registry=own)
        requests_now.set_function(lambda: self._serving)
        self._websockets_now = Series(
            Gauge("sandkasten_websockets", "WebSockets that are open.", ("route",), registry=own)
        )
        self.rendering = trio.CapacityLimiter(_CONCURRENT)
        """Bounds the worker threads that render pages."""

    def begin_request(self) -> None:
        """Count a request that is being served, until `end_request`."""
        self._serving += 1

    def end_request(self) -> None:
        self._serving -= 1

    def note_request(self, method: str, route: str | None, status: int, took_s: float) -> None:
        """Count a request that was answered; with status 0 the client left before."""
        status_class = f"{status // 100}xx" if status else "left"
        known = method if method in _METHODS else _OTHER_METHOD
        self._requests(known, route or NOWHERE, status_class).observe(took_s)

    @contextmanager
    def websocket(self, route: str) -> Iterator[None]:
        """Count a WebSocket that is open, or is about to be."""
        self._websockets_now(route).inc()
        try:
            yield
        finally:
            self._websockets_now(route).dec()

    def note_websocket(self, route: str | None, status: int, code: int) -> None:
        """Count a WebSocket that ended with a close code, or was refused with a status."""
        self._websockets_ended(route or NOWHERE, _code_class(status, code)).inc()

    def read(self) -> Sequence[Metric]:
        """Return all that was counted. Any thread may ask."""
        dropped = CounterMetricFamily("sandkasten_log_lines_dropped", "Log lines dropped.", log.dropped_lines())
        return [*collect(self._registry), dropped]


def _code_class(status: int, code: int) -> str:
    """Return the class of a close code, from a closed set: peers choose codes freely (RFC 6455 §7.4.2)."""
    if status != 101:
        return f"http_{status // 100}xx"
    if code in (1000, 1001, 1005):
        return "normal"
    if 4000 <= code < 5000:
        return f"{code // 100 % 10}xx"
    return "error" if code in (1002, 1003, 1007, 1008, 1009, 1011) else "lost"
