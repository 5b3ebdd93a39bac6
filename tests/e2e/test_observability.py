"""Views of a working daemon for its operator: its numbers, its log and the diagnosis of a session."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import Daemon

DOCUMENT = (Path(__file__).parents[2] / "docs/observability.md").read_text()
NAMES = re.compile(r"^\| `((?:sandkasten|process)_\w+)` \|", re.MULTILINE)


class Numbers:
    """One scrape: samples by name and by the values of their labels."""

    def __init__(self, client: httpx.Client) -> None:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        self.text = answer.text
        self.families = list(text_string_to_metric_families(answer.text))
        self._samples = {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __getitem__(self, key: tuple[str, ...]) -> float:
        return self._samples.get((f"sandkasten_{key[0]}", *key[1:]), 0.0)


def test_the_numbers_are_those_of_what_was_done(client: httpx.Client) -> None:
    """One session, three commands of which one fails, and one end are each counted once, under the right name and
    labels.
    """
    before = Numbers(client)
    session = client.post("/v1/sessions", json={}).json()
    path = f"/v1/sessions/{session['id']}"
    for command in ("echo one", "exit 3", "sleep 60"):
        client.post(f"{path}/exec", json={"cmd": command, "timeout_ms": 300, "on_timeout": "result"})
    during = Numbers(client)
    client.delete(path)
    after = Numbers(client)

    def rise(*key: str, over: tuple[Numbers, Numbers] = (before, after)) -> float:
        return over[1][key] - over[0][key]

    assert rise("create_seconds_count", "ok") == rise("sessions_created_total", "cold") == 1
    assert rise("create_phase_seconds_count", "build") == 1
    assert rise("runs_ended_total", "exited", "command") == 2
    assert rise("runs_ended_total", "timed_out", "command") == 1
    assert rise("run_first_output_seconds_count", "command") == 1
    assert 0.1 < rise("run_seconds_sum", "command") < 30
    assert rise("sessions_ended_total", "user", "destroyed") == rise("teardown_seconds_count") == 1
    assert rise("sessions", "running", over=(before, during)) == 1
    assert rise("sessions", "running") == 0
    assert rise("http_request_seconds_count", "POST", "/v1/sessions/{id}/exec", "2xx") == 3
    assert rise("store_commit_seconds_count") >= 2
    assert during["sessions_memory_bytes",] > 0
    assert during["sessions_cpu_seconds_total",] > 0
    assert during["part_up", "nsinit"] == 1
    assert session["id"] not in after.text


def test_every_number_is_documented_and_every_documented_one_is_there(client: httpx.Client) -> None:
    """docs/observability.md has a row for each family of this daemon, and for no other."""
    client.delete(f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}")
    found = {family.name for family in Numbers(client).families}
    documented = {name.removesuffix("_total") for name in NAMES.findall(DOCUMENT)}
    assert {name.removesuffix("_total") for name in found} == documented


def test_the_event_loop_is_watched(client: httpx.Client) -> None:
    """Observations of the event loop's lag come without any request."""
    first = Numbers(client)["event_loop_lag_seconds_count",]
    with httpx.Client(base_url=client.base_url, headers=client.headers) as other:
        session = other.post("/v1/sessions", json={}).json()["id"]
        other.post(f"/v1/sessions/{session}/exec", json={"cmd": "sleep 1.1"})
    assert Numbers(client)["event_loop_lag_seconds_count",] >= first + 2


def test_a_log_line_says_for_whom_and_none_says_what(client: httpx.Client, daemon: Daemon) -> None:
    """Lines and events of each part that a request went through have its trace. None has the command, its input, output
    or variables, or the key.
    """
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "the-request"}
    secrets = [f"hush-{part}-4711" for part in ("session", "command", "variable", "input", "output")]
    session = client.post("/v1/sessions", json={"env": {"A": secrets[0]}}, headers=headers).json()
    path = f"/v1/sessions/{session['id']}"
    run = {
        "cmd": f": {secrets[1]}; cat; printf hush-%s-4711 output",
        "env": {"B": secrets[2]},
        "stdin": secrets[3],
        "exec_id": "mine",
    }
    assert client.post(f"{path}/exec", json=run, headers=headers).json()["output"] == secrets[3] + secrets[4]
    assert client.get(f"{path}/execs/mine").json()["trace_id"] == trace
    client.delete(path, headers=headers)
    daemon.wait_log('"event": "session_ended".*' + trace)
    daemon.wait_log(r'the-request.*"method": "DELETE"')
    text = "\n".join(daemon.log)
    lines = [json.loads(line) for line in daemon.log]
    ended = next(line for line in lines if line["event"] == "session_ended" and line["session_id"] == session["id"])
    assert (ended["trace_id"], ended["request_id"]) == (trace, "the-request")
    for secret in (*secrets, client.headers["authorization"].removeprefix("Bearer ")):
        assert secret not in text


@pytest.mark.parametrize("key", ["time", "level", "event", "logger"])
def test_every_line_of_the_log_is_an_object_with(daemon: Daemon, key: str) -> None:
    """Log lines of nsinit and of the libraries are JSON objects with these keys as well."""
    assert daemon.log
    assert all(key in json.loads(line) for line in daemon.log)
