"""The session routes: shapes, statuses, and what reaches the supervisor."""

from __future__ import annotations

import gc
import re

import attrs
import pytest
import trio

from sandkasten.actors import tree
from sandkasten.api.http.errors import json_answer, json_list_answer
from sandkasten.api.resources.sessions import SessionBody, server_timing
from sandkasten.model import Limits, SessionSpec, SessionStats
from tests.api.harness import Steps, running_front

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")


async def test_a_created_session_has_the_published_shape() -> None:
    """201, times in UTC with Z, no null workspace, and the phases in `Server-Timing`."""
    async with running_front() as running, running.client() as client:
        answer = await client.post("/v1/sessions", json={"image": "python", "ttl_seconds": 60})
        session = answer.json()
        assert answer.status_code == 201
        assert session | {"status": "running", "cwd": "/workspace", "image": "python", "ttl_seconds": 60} == session
        assert session["acquire_source"] in ("pool", "cold")
        assert all(RFC_3339.match(session[name]) for name in ("created_at", "expires_at", "last_activity"))
        assert "workspace_id" not in session
        assert "reason" not in session
        phases = re.findall(r"([^;]+);dur=\d+\.\d{3}(?:, |\Z)", answer.headers["server-timing"])
        assert phases == ["queue", "store", "build", "build.clone", "runner"]
        assert (await running.supervisor.get(session["id"])).key_id == "configured"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"unknown": 1}'])
async def test_a_create_needs_nothing(body: bytes) -> None:
    """No body, an empty object, unknown fields."""
    async with running_front() as running, running.client() as client:
        answer = await client.post("/v1/sessions", content=body)
        assert answer.status_code == 201
        made, plain = await running.supervisor.get(answer.json()["id"]), await running.supervisor.create(SessionSpec())
        assert (made.limits, made.ttl_s, made.options) == (plain.limits, plain.ttl_s, plain.options)


async def test_a_create_with_an_idempotency_key_is_done_once() -> None:
    """Header or field."""
    async with running_front() as running, running.client() as client:
        answers = [
            await client.post("/v1/sessions", headers={"Idempotency-Key": "k-1"}),
            await client.post("/v1/sessions", json={"idempotency_key": "k-1"}),
            await client.post("/v1/sessions", headers={"Idempotency-Key": "k-2"}),
        ]
        first, second, third = (answer.json()["id"] for answer in answers)
        assert first == second != third


async def test_partial_limits_are_filled_from_the_configured_defaults() -> None:
    """Not from the model's."""
    async with running_front(default_limits=Limits(pids=77)) as running, running.client() as client:
        session = (await client.post("/v1/sessions", json={"limits": {"cpu": 0.5}})).json()
        assert (session["limits"]["cpu"], session["limits"]["pids"]) == (0.5, 77)
        (plan,) = running.tree.nsinit.plans
        assert (plan.limits.cpu_quota_us, plan.limits.pids) == (50_000, 77)


async def test_the_list_is_a_raw_array_of_live_sessions_newest_first() -> None:
    """With `status` and `limit`; `all` has the ended ones, too."""
    async with running_front() as running, running.client() as client:
        ids = [(await client.post("/v1/sessions")).json()["id"] for _ in range(3)]
        await running.tree.nsinit.kill(ids[1])
        await running.supervisor.wait_ended(ids[1])

        async def listed(query: str) -> list[str]:
            return [session["id"] for session in (await client.get(f"/v1/sessions{query}")).json()]

        assert await listed("") == [ids[2], ids[0]]
        assert await listed("?status=all") == ids[::-1]
        assert await listed("?status=crashed") == [ids[1]]
        assert await listed("?status=running&limit=1") == [ids[2]]


async def test_an_expired_session_is_410_with_why_it_ended() -> None:
    """On every route that needs it alive; looking at it is still an answer, and says the same."""
    async with running_front() as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec(ttl_s=0.01))).id
        reason = (await running.supervisor.wait_ended(session_id)).reason
        why = {"status": "expired", "reason": reason, "end_reason": "idle"}
        url = f"/v1/sessions/{session_id}"
        for answer in (
            await client.post(f"{url}/exec", json={"cmd": "true"}),
            await client.post(f"{url}/exec/stream", json={"cmd": "true"}),
            await client.patch(url, json={"idle_timeout_seconds": 60}),
            await client.post(f"{url}/fs/write", json={"path": "a", "text": ""}),
            await client.get(f"{url}/stats"),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == (410, "SESSION_EXPIRED")
            assert answer.json()["details"] == why
        found = (await client.get(url)).json()
        assert found | why == found


async def test_a_session_without_end_says_null() -> None:
    """Only one that asked for it: the published clients take `expires_at` as it comes."""
    async with running_front() as running, running.client() as client:
        usual = (await client.post("/v1/sessions")).json()
        assert None not in (usual["expires_at"], usual["ttl_seconds"], usual["idle_timeout_seconds"])
        body = {"idle_timeout_seconds": None, "max_lifetime_seconds": None}
        endless = (await client.post("/v1/sessions", json=body)).json()
        nothing = ("expires_at", "ttl_seconds", "idle_timeout_seconds", "max_lifetime_seconds")
        assert [endless[name] for name in nothing] == [None] * len(nothing)


async def test_the_list_goes_on_behind_its_cursor() -> None:
    """The header names it for as long as there is more; what is made meanwhile is not on later pages."""
    async with running_front() as running, running.client() as client:
        ids = [(await client.post("/v1/sessions")).json()["id"] for _ in range(5)]
        seen, cursor = [], ""
        while True:
            answer = await client.get(f"/v1/sessions?limit=2{cursor and '&cursor='}{cursor}")
            seen += [session["id"] for session in answer.json()]
            cursor = answer.headers.get("x-next-cursor", "")
            if not cursor:
                break
            await client.post("/v1/sessions")
        assert seen == ids[::-1]


async def test_the_list_is_of_sessions_with_all_labels() -> None:
    """By name and value, or by name alone; an empty value is one, and the first `=` ends the name."""
    async with running_front() as running, running.client() as client:
        labels: list[dict[str, str]] = [{"team": "a", "user": "x=y"}, {"team": "b", "user": ""}, {"team": "a"}, {}]
        ids = [(await client.post("/v1/sessions", json={"labels": each})).json()["id"] for each in labels]

        async def listed(query: str) -> list[int]:
            found = (await client.get(f"/v1/sessions?{query}")).json()
            return sorted(ids.index(session["id"]) for session in found)

        assert await listed("label=team") == [0, 1, 2]
        assert await listed("label=team%3Da") == [0, 2]
        assert await listed("label=team=a&label=user") == [0]
        assert await listed("label=user=") == [1]
        assert await listed("label=user=x%3Dy") == [0]
        assert await listed("label=nobody") == []
        await client.delete(f"/v1/sessions/{ids[2]}")
        assert await listed("label=team=a") == [0]
        assert await listed("label=team=a&status=all") == [0, 2]


@pytest.mark.parametrize(
    "query",
    [
        *("status=bogus", "status=", "limit=0", "limit=x", "limit=-1", "limit=99999", "limit=%ff"),
        *("label=", "label==a", "cursor=", "cursor=x"),
    ],
)
async def test_a_bad_list_query_is_400(query: str) -> None:
    """Ignoring a filter would list more than was asked for."""
    async with running_front() as running, running.client() as client:
        answer = await client.get(f"/v1/sessions?{query}")
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert answer.json()["details"]


async def test_an_ended_session_can_be_looked_at_and_nothing_else() -> None:
    """GET 200 with status and reason; exec, files, stats, patch 410 with both; DELETE 200 again."""
    async with running_front() as running, running.client() as client:
        url = f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}"
        for _ in range(2):
            answer = await client.delete(url)
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
        seen = (await client.get(url)).json()
        assert (seen["status"], seen["reason"]) == ("destroyed", "destroyed by request")
        answers = [
            await client.post(f"{url}/exec", json={"cmd": "a"}),
            await client.post(f"{url}/exec/stream", json={"cmd": "a"}),
            await client.post(f"{url}/fs/write", json={"path": "a", "text": ""}),
            await client.post(f"{url}/fs/upload", files={"file": b"x"}),
            await client.get(f"{url}/fs/read?path=a"),
            await client.get(f"{url}/stats"),
            await client.patch(url, json={"ttl_seconds": 5}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error_code"]) == (410, "SESSION_EXPIRED")
            assert answer.json()["details"] == {
                "status": "destroyed",
                "reason": "destroyed by request",
                "end_reason": "user",
            }


@pytest.mark.parametrize("session_id", ["0123456789abcdef", "nonsense", "..", "%00", "x" * 300, "0123456789ABCDEF"])
@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("PATCH", ""),
        ("GET", "/stats"),
        ("POST", "/exec"),
        ("POST", "/exec/stream"),
        ("GET", "/fs/read?path=a"),
        ("POST", "/fs/write"),
    ],
)
async def test_an_unknown_session_is_404(session_id: str, method: str, rest: str) -> None:
    """The answer is 404 in plain JSON on every route, whatever the id looks like."""
    async with running_front() as running, running.client() as client:
        body = {"path": "a", "text": ""} if "write" in rest else {"cmd": "a"} if method == "POST" else None
        answer = await client.request(method, f"/v1/sessions/{session_id}{rest}".replace("..", "%2e%2e"), json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "SESSION_NOT_FOUND")


async def test_a_patch_changes_what_it_names() -> None:
    """The ttl, the labels, and limits filled from the session's own."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions", json={"limits": {"cpu": 2}})).json()
        url = f"/v1/sessions/{session['id']}"
        answer = await client.patch(url, json={"ttl_seconds": 60})
        assert (answer.status_code, answer.json()) == (200, session | answer.json())
        assert (answer.json()["ttl_seconds"], answer.json()["limits"]) == (60, session["limits"])
        changed = (await client.patch(url, json={"limits": {"pids": 99}, "labels": {"a": "b"}})).json()
        assert changed["limits"] == session["limits"] | {"pids": 99}
        assert (changed["ttl_seconds"], changed["labels"]) == (60, {"a": "b"})
        assert (await client.patch(url, json={"ttl_seconds": "x"})).status_code == 400


async def test_a_counter_that_the_kernel_does_not_offer_is_null() -> None:
    """Never 0 and never -1, which a client could take for a reading; pressure is an object of objects."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions")).json()["id"]
        stats = (await client.get(f"/v1/sessions/{session}/stats")).json()
        known = {name: value for name, value in stats.items() if value is not None}
        assert known == {
            "memory_bytes": 1024,
            "memory_limit": 512 * 2**20,
            "memory_peak_bytes": 2048,
            "oom_kills": 0,
            "cpu_usage_usec": 99,
            "cpu_limit": 1.0,
            "cpu_periods": 1,
            "cpu_throttled": 0,
            "cpu_throttled_usec": 0,
            "pids": 2,
            "pids_limit": 256,
            "pids_refused": 0,
            "disk_bytes": 4096,
            "disk_inodes": 1,
            "memory_pressure": {"some": {"avg10": 0.5, "avg60": 0.1, "avg300": 0.0, "total_usec": 7}, "full": None},
            "spool_bytes": 0,
        }
        assert set(stats) == set(attrs.fields_dict(SessionStats))


async def test_readyz_is_503_until_every_check_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names the check that is not ok."""
    async with running_front() as running, running.client() as client:
        assert (await client.get("/readyz")).status_code == 200
        monkeypatch.setattr(tree, "_MIN_FREE_RATIO", 1.0)
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        checks = answer.json()["checks"]
        assert re.fullmatch(r"only [\d.]+% of the data directory's disk is free", checks.pop("disk"))
        assert set(checks.values()) == {"ok"}


def test_server_timing_names_are_tokens() -> None:
    """The header stays well-formed, whatever a phase is called."""
    assert server_timing({'a,b;"\r\n': 1.0}) == "a_b____;dur=1.000"


async def test_a_session_is_paused_and_resumed() -> None:
    """With or without a body; wrong types are refused, an unknown session is 404, an ended one 410."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions")).json()
        path = f"/v1/sessions/{session['id']}"
        plain = (await client.post(f"{path}/pause")).json()
        assert (plain["status"], plain["pause"]["auto_resume"], plain["pause"]["stop_lease"]) == ("paused", True, False)
        assert RFC_3339.match(plain["pause"]["since"])
        chosen = (await client.post(f"{path}/pause", json={"auto_resume": False, "stop_lease": True})).json()
        assert chosen["pause"] == plain["pause"] | {"auto_resume": False, "stop_lease": True}
        for body in ({"auto_resume": 1}, {"stop_lease": "yes"}):
            assert (await client.post(f"{path}/pause", json=body)).status_code == 400
        resumed = (await client.post(f"{path}/resume")).json()
        assert resumed["status"] == "running"
        assert "pause" not in resumed
        await client.delete(path)
        for act in ("pause", "resume"):
            assert (await client.post(f"{path}/{act}")).status_code == 410
            assert (await client.post(f"/v1/sessions/{'0' * 24}/{act}")).status_code == 404


async def test_a_list_of_a_thousand_sessions_is_made_in_slices() -> None:
    """No slice takes more than a small part of the whole; the answer is the same as in one piece."""
    async with running_front() as running:
        session = await running.supervisor.create(SessionSpec(labels={"a": "b"}))
    sessions = [attrs.evolve(session, id=f"{number:012x}") for number in range(1000)]
    steps = Steps()
    gc.disable()  # a full collection belongs to no step
    try:
        await trio.lowlevel.checkpoint()
        trio.lowlevel.add_instrument(steps)
        answer = await json_list_answer(SessionBody.of(each) for each in sessions)
        trio.lowlevel.remove_instrument(steps)
    finally:
        gc.enable()
    assert answer.body == json_answer([SessionBody.of(each) for each in sessions]).body
    assert steps.longest_s < steps.whole_s / 4
    assert (await json_list_answer(())).body == b"[]"
