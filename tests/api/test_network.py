"""The network of a session over HTTP: what is shown, changed and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from sandkasten import errors
from sandkasten.actors.session import changing
from sandkasten.api.http.sse import MAX_EVENT_BYTES, event, short_end
from sandkasten.api.resources.run_output import EndBody
from sandkasten.config import Defaults, EgressSettings
from sandkasten.model import Cause, EventType, ExecEnd, SessionSpec, Usage
from sandkasten.model.keys import Access
from sandkasten.model.network import MAX_DENIALS, EgressDenial, NetworkMode
from sandkasten.sdk import SandboxClient
from tests.api.harness import KEY, running_front
from tests.api.keys import issue

NO_LIMITS = dict.fromkeys(("connections", "bytes_up", "bytes_down", "mbit_up", "mbit_down"))
NONE = {"mode": "none", "allow": [], "deny": [], "limits": NO_LIMITS, "log": "all", "proxy_env": False, "secrets": []}
NO_COUNTS = dict.fromkeys(
    ("connections_open", "connections", "denied", "bytes_up", "bytes_down", "dns_queries", "dns_denied"), 0
)


@pytest.mark.parametrize("network", [{}, {"network": "none"}, {"network": {"mode": "none", "allow": []}}])
async def test_a_session_shows_its_network(network: dict[str, Any]) -> None:
    """The published request is one of those for none. Its counters are 0 and its log is empty."""
    async with running_front() as running, running.client() as client:
        made = await client.post("/v1/sessions", json=network)
        assert (made.status_code, made.json()["network"]) == (201, {**NONE, "revision": 1})
        url = f"/v1/sessions/{made.json()['id']}"
        assert (await client.get(f"{url}/network")).json() == {**NONE, "revision": 1, "counters": NO_COUNTS}
        log = (await client.get(f"{url}/egress?verdict=denied&host=a.example&limit=5")).json()
        assert (log["entries"], log["dropped"]) == ([], 0)
        assert (await client.get(f"{url}/egress", params={"after": log["cursor"]})).json() == log


async def test_a_change_replaces_the_network_whole() -> None:
    """The revision counts, an event tells, and a change of an older revision changes nothing at all."""
    async with running_front() as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        url = f"/v1/sessions/{session_id}"
        wanted = {"mode": "none", "log": "denied", "limits": {"bytes_up": 7}, "proxy_env": True}
        changed = (await client.patch(url, json={"network": wanted, "if_revision": 1})).json()["network"]
        shown = {"log": "denied", "limits": NO_LIMITS | {"bytes_up": 7}, "proxy_env": True}
        assert changed == NONE | shown | {"revision": 2}
        stale = await client.patch(url, json={"network": "none", "if_revision": 1, "labels": {"a": "b"}})
        assert (stale.status_code, stale.json()["error_code"]) == (409, "CONFLICT")
        assert stale.json()["details"] == {"revision": 2}
        found = (await client.get(url)).json()
        assert (found["network"], found["labels"]) == (changed, {})
        assert (await client.patch(url, json={"network": "none"})).json()["network"] == NONE | {"revision": 3}
        for body in ({"network": {"log": "all"}}, {"network": {"mode": "none", "allow": ["a.example"]}}):
            assert (await client.patch(url, json=body)).status_code == 400
        recent = running.supervisor._journal.recent(session_id, limit=9)[::-1]
        events = [each for each in recent if each.type is EventType.NETWORK_CHANGED]
        told = [{name: each.data[name] for name in ("mode", "revision")} for each in events]
        assert told == [{"mode": "none", "revision": 2}, {"mode": "none", "revision": 3}]


@pytest.mark.parametrize(
    ("network", "code", "details"),
    [
        ({"mode": "none", "allow": ["a.example"]}, "INVALID_REQUEST", {"network.allow"}),
        ({"allow": ["a.example"]}, "INVALID_REQUEST", {"network.allow"}),
        ({"mode": "allow", "allow": ["*"]}, "INVALID_RULE", {"rule"}),
        ({"mode": "allow", "allow": ["@python", "@nobody"]}, "INVALID_RULE", {"rule"}),
        ("open", "INVALID_REQUEST", {"network.mode"}),
        ({"mode": "ask"}, "INVALID_REQUEST", {"network.mode"}),
        ("bridge", "INVALID_REQUEST", {"network.mode"}),
        ({"mode": "proxy"}, "INVALID_REQUEST", {"network.mode"}),
    ],
)
async def test_a_network_that_can_t_be_is_400(network: object, code: str, details: set[str]) -> None:
    """In a create as in a change; nothing is made and nothing changes."""
    async with running_front(egress=EgressSettings(max_mode="allow")) as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        for answer in (
            await client.post("/v1/sessions", json={"network": network}),
            await client.patch(f"/v1/sessions/{session_id}", json={"network": network, "labels": {"a": "b"}}),
        ):
            if network == {"allow": ["a.example"]} and answer.request.method == "PATCH":
                details = {"network.mode"}  # a change names the mode
            assert (answer.status_code, answer.json()["error_code"]) == (400, code)
            assert answer.json()["details"].keys() == details
        assert [(each.id, each.labels) for each in await running.supervisor.list()] == [(session_id, {})]


async def test_a_way_out_is_refused_where_no_process_carries_it() -> None:
    """A create and a change are 503 with advice when to try again; the mode that a request leaves out is the
    configured one."""
    settings: dict[str, Any] = {"defaults": Defaults(network_mode="allow"), "default_network": "allow"}
    async with running_front(**settings) as running, running.client() as client:
        url = f"/v1/sessions/{(await client.post('/v1/sessions', json={'network': 'none'})).json()['id']}"
        for answer in (
            await client.post("/v1/sessions"),
            await client.post("/v1/sessions", json={"network": {"allow": ["@python"]}}),
            await client.patch(url, json={"network": {"mode": "open"}}),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == (503, "EGRESS_UNAVAILABLE"), answer.text
            assert answer.json()["retryable"]
            assert int(answer.headers["retry-after"]) > 0
        assert (await client.get(url)).json()["network"] == NONE | {"revision": 1}


def test_the_end_of_a_run_has_what_was_refused() -> None:
    """Nothing is said where nothing was refused; an event has those that fit."""
    end = ExecEnd("e", 0, None, Cause.EXITED, "/" + "\x01" * 4000, 5, None, False, Usage())
    assert EndBody.of(end).egress_denied is None
    denials = [EgressDenial(f"{number}.{'x' * 250}", 443, "unknown_address", 2**40) for number in range(MAX_DENIALS)]
    plain = [{"host": each.host, "port": 443, "reason": each.reason, "count": each.count} for each in denials]
    shown = short_end({"cwd": end.cwd, "exec_id": '"' * 128, "egress_denied": plain})
    assert shown["egress_denied"] == plain[:1]
    assert len(event("done", shown)) < MAX_EVENT_BYTES - 1000
    few = [*plain[:1], {"host": "a.example", "port": None, "reason": "not_allowed", "count": 1}]
    assert short_end({"cwd": "/", "egress_denied": few})["egress_denied"] == few


async def test_a_key_may_not_ask_beyond_its_own_mode() -> None:
    """Neither in a create nor in a change, also where the server's own default is beyond it; within it nothing is
    refused for the key's sake."""
    narrow = issue(Access.WRITE, max_network=NetworkMode.NONE)
    async with running_front(default_network=NetworkMode.ALLOW) as running:
        running.ring.replace([narrow.key])
        session_id = (await running.supervisor.create(SessionSpec())).id
        async with running.client(token=narrow.token) as client:
            for body in ({"network": "open"}, {"network": {"allow": ["a.example"]}}, {}):
                answer = await client.post("/v1/sessions", json=body)
                assert (answer.status_code, answer.json()["error_code"]) == (403, "FORBIDDEN"), body
                assert answer.json()["details"]["has"] == "none"
            url = f"/v1/sessions/{session_id}"
            answer = await client.patch(url, json={"network": {"mode": "allow", "allow": ["a.example"]}})
            assert (answer.status_code, answer.json()["details"]) == (403, {"needs": "allow", "has": "none"})
            assert (await client.patch(url, json={"network": "none"})).status_code == 200
            assert (await client.post("/v1/sessions", json={"network": "none"})).status_code == 201


async def test_rules_come_to_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the network changes, and of several who add a rule at once none takes away another's."""

    async def put_nothing(*_arguments: Any) -> None:
        await trio.lowlevel.checkpoint()  # no way out is opened here: the claim is about requests

    monkeypatch.setattr(changing, "put_network", put_nothing)
    async with running_front() as running, SandboxClient(base_url=running.url, api_key=KEY) as client:
        session = await client.create_session()
        limits = {"connections": 5, "bytes_up": 7, "bytes_down": None, "mbit_up": 2, "mbit_down": None}
        network = {"mode": "ask", "limits": limits, "log": "denied", "proxy_env": True, "secrets": []}
        await session.update(network={**network, "allow": ["a.example"], "deny": ["b.example"]})
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(lambda rule: session.add_rules(allow=[rule]), f"n{number}.example")
        info = await session.add_rules(allow=["a.example"], deny=["c.example:22"])
        allowed = info.network.pop("allow")
        assert info.network == {**network, "deny": ["b.example", "c.example:22"], "revision": 8}
        assert (allowed[0], sorted(allowed)) == ("a.example", ["a.example", *(f"n{each}.example" for each in range(5))])
        with pytest.raises(errors.InvalidRule):
            await session.add_rules(allow=["*"])


async def test_a_create_with_published_ports_is_read_strictly() -> None:
    """A port that is none is named by its field, ports that can't be had together are refused, and a node that
    publishes none says which setting is missing."""
    async with running_front() as running, running.client() as client:
        bad: Sequence[object] = ([{"port": 0}], [5432], [{"port": 1, "host_port": 65536}], [{}])
        for wrong in bad:
            answer = await client.post("/v1/sessions", json={"publish": wrong})
            assert (answer.status_code, list(answer.json()["details"])) == (400, ["publish"]), wrong
        twice = await client.post("/v1/sessions", json={"publish": [{"port": 1}, {"port": 1}]})
        assert (twice.status_code, list(twice.json()["details"])) == (400, ["publish"])
        refused = await client.post("/v1/sessions", json={"publish": [{"port": 5432}]})
        assert (refused.status_code, refused.json()["error_code"]) == (501, "PREVIEWS_OFF")
        assert (await client.post("/v1/sessions", json={"publish": []})).json()["published"] == []
