"""`GET /metrics`: well formed whatever is in it, bounded whatever clients do, and not public."""

from __future__ import annotations

import httpx
import pytest
import trio_websocket
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sandkasten.api.resources.node import OPENMETRICS, TEXT, render
from sandkasten.counters.metrics import Series, collect, gauge
from sandkasten.model import SessionSpec
from tests.api.harness import KEY, parse_answer, read_until, request_bytes, running_fake, send_and_read
from tests.waiting import until

REQUESTS = "sandkasten_http_request_seconds"


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def parse_openmetrics(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def series(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a name by the values of their labels, sorted by the names of those."""
    samples = [sample for family in parse_text(text) for sample in family.samples if sample.name == name]
    return {tuple(value for _, value in sorted(each.labels.items())): each.value for each in samples}


async def scrape(client: httpx.AsyncClient, **headers: str) -> str:
    answer = await client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return answer.text


async def test_it_is_text_unless_openmetrics_is_asked_for() -> None:
    """Both parse, and both have the numbers of the tree, of the front and of the process."""
    async with running_fake() as running, running.client() as client:
        running.supervisor.families = [gauge("sandkasten_x", "Help.", {"a": 1.5}, "what")]
        plain = await client.get("/metrics")
        assert plain.headers["content-type"] == TEXT
        asked = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        openmetrics = await client.get("/metrics", headers=asked)
        assert openmetrics.headers["content-type"] == OPENMETRICS
        assert openmetrics.text.endswith("# EOF\n")
        wanted = {"sandkasten_x", REQUESTS, "process_cpu_seconds", "process_open_fds", "process_resident_memory_bytes"}
        assert wanted <= {family.name for family in parse_text(plain.text)}
        assert wanted <= {family.name for family in parse_openmetrics(openmetrics.text)}
        assert series(plain.text, "sandkasten_x") == {("a",): 1.5}


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain; version=9x", "application/openmetrics-text; version=\xff"])
async def test_no_accept_header_is_an_error(accept: str) -> None:
    """An `Accept` header that is not understood gets one of the two formats, and nothing of it is in the answer."""
    async with running_fake() as running:
        data = request_bytes("GET", "/metrics", headers={"Accept": accept})
        status, fields, _ = parse_answer(await send_and_read(running, data))
        assert (status, fields["content-type"] in (TEXT, OPENMETRICS)) == (200, True)


async def test_it_needs_the_key() -> None:
    """Numbers say how busy somebody is."""
    async with running_fake() as running:
        status, _, body = parse_answer(
            await send_and_read(running, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        )
        assert (status, b"sandkasten_" in body) == (401, False)


async def test_head_has_no_body() -> None:
    """The head of the answer to GET (RFC 9110 §9.3.2)."""
    async with running_fake() as running, running.client() as client:
        answer = await client.head("/metrics")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


async def test_requests_are_counted_by_route_and_never_by_path() -> None:
    """Ids, made-up paths and made-up methods add no series."""
    async with running_fake() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        for path in ("/nowhere/1", "/nowhere/2", f"/v1/sessions/{session.id}", f"/v1/sessions/{session.id}/execs/abc"):
            await client.get(path)
        for method in ("BREW", "WHEN", "DELETE"):
            await client.request(method, "/v1/sessions")
        found = series(await scrape(client), f"{REQUESTS}_count")
        assert found == {
            ("GET", "none", "4xx"): 2,
            ("GET", "/v1/sessions/{id}", "2xx"): 1,
            ("GET", "/v1/sessions/{id}/execs/{exec_id}", "4xx"): 1,
            ("other", "none", "4xx"): 2,
            ("DELETE", "none", "4xx"): 1,
        }
        assert session.id not in await scrape(client)


async def test_a_refused_key_is_counted_without_a_route() -> None:
    """Nobody learns of a route by being refused, nor fills the table."""
    async with running_fake() as running, running.client() as client:
        await client.get("/v1/sessions", headers={"Authorization": "Bearer wrong"})
        assert series(await scrape(client), f"{REQUESTS}_count") == {("GET", "none", "4xx"): 1}


async def test_what_is_going_on_is_counted_while_it_does() -> None:
    """A request counts as being served during itself."""
    async with running_fake() as running, running.client() as client:
        for _ in range(2):
            assert series(await scrape(client), "sandkasten_http_requests") == {(): 1}


async def test_websockets_are_counted_while_they_are_open_and_by_their_end() -> None:
    """By route and by what the close code means; one that is refused is none."""
    async with running_fake() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        url = f"{running.url.replace('http', 'ws', 1)}/v1/sessions/{session.id}/events"
        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        route = "/v1/sessions/{id}/events"
        async with trio_websocket.open_websocket_url(url, extra_headers=headers) as connection:
            await connection.get_message()
            assert series(await scrape(client), "sandkasten_websockets") == {(route,): 1}
        refused = UPGRADE | {"Authorization": "Bearer wrong"}
        data = request_bytes("GET", f"/v1/sessions/{session.id}/events", headers=refused)
        async with await running.connect() as stream:
            await stream.send_all(data)
            assert (await read_until(stream, b"\r\n")).startswith(b"HTTP/1.1 401 ")

        async def is_over() -> bool:
            return len(series(await scrape(client), "sandkasten_websockets_ended_total")) == 2

        await until(is_over)
        text = await scrape(client)
        assert series(text, "sandkasten_websockets") == {(route,): 0}
        assert series(text, "sandkasten_websockets_ended_total") == {("http_4xx", route): 1, ("normal", route): 1}


@given(st.text(max_size=20), st.text(max_size=20).filter(lambda text: not text.startswith("\ufeff")))
def test_whatever_a_label_holds_the_page_parses_and_says_it(first: str, second: str) -> None:
    """Quotes, newlines, braces: the library escapes them."""
    registry = CollectorRegistry()
    counter = Series(Counter("sandkasten_c", 'He"lp\nmore', ("label",), registry=registry))
    histogram = Series(Histogram("sandkasten_h", "Help", ("label",), registry=registry))
    for text in {first, second}:
        counter(text).inc()
        histogram(text).observe(1.0)
    families = [*collect(registry), gauge("sandkasten_g", "", {first: 3}, "label")]
    page = render(families, False).decode()
    assert series(page, "sandkasten_c_total") == {(text,): 1 for text in {first, second}}
    assert series(page, "sandkasten_h_count") == {(text,): 1 for text in {first, second}}
    assert parse_openmetrics(render(families, True).decode())
