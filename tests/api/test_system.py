"""Reports of the installation and the node about themselves, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from sandkasten.actors import tree
from sandkasten.config import Maximum, PoolSettings, PoolSize, RunsSettings
from sandkasten.model import SessionSpec
from sandkasten.model.node import PROTECTIONS
from tests.api.harness import running_front
from tests.api.test_exec import make_session
from tests.waiting import until


async def test_the_installation_is_described() -> None:
    """Versions, defaults, bounds, every protection by name, and the checks behind them."""
    async with running_front() as running, running.client() as client:
        answer = await client.get("/v1/system")
        found = answer.json()
    assert answer.status_code == 200
    assert (found["cgroup_mode"], found["features"]["disk"]) == ("v2", "project")
    assert found["features"]["way_out"] is False  # a scripted tree has no egress process
    assert found["limits"]["network_mode"] == {"max": "open"}
    limits = {name: value for name, value in found["defaults"]["limits"].items() if value is not None}
    assert limits == {
        "cpu": 1.0,
        "memory_mb": 512,
        "pids": 256,
        "disk_mb": 2048,
        "disk_inodes": 200_000,
    }
    assert found["limits"]["pids"] == {"min": 8, "max": 4 * 2**20}
    assert [each["name"] for each in found["protections"]] == list(PROTECTIONS)
    assert {each["state"] for each in found["protections"]} <= {"on", "degraded", "missing", "off", "unknown"}
    (clone3,) = (each for each in found["checks"] if each["id"] == "clone3")
    assert clone3 == {
        "id": "clone3",
        "title": "clone3",
        "verdict": "works",
        "seen": "as a test says",
        "protection": "namespaces",
        "required": True,
        "consequence": "",
        "fix": "",
    }
    assert found["examined_at"].endswith("Z")


async def test_the_bounds_that_are_told_are_those_in_force() -> None:
    """Requests at the bound are taken, and those one above it refused."""
    maximum, runs = Maximum(idle_timeout_seconds=7200), RunsSettings(max_exec_ids=5)
    async with running_front(maximum=maximum, runs=runs) as running, running.client() as client:
        limits = (await client.get("/v1/system")).json()["limits"]
        ttl_s, body_bytes = limits["ttl_seconds"]["max"], limits["max_request_bytes"]
        assert (ttl_s, limits["max_import_mb"], limits["max_exec_ids"], limits["max_watches"]) == (
            7200,
            10 * 1024,
            5,
            8,
        )
        url = await make_session(running, client)

        async def post(path: str, /, **body: Any) -> int:  # JSON
            return (await client.post(path, json=body)).status_code

        async def search(most: int) -> int:
            return await post(f"{url}/fs/search", pattern="x", max_matches=most)

        async def edit(count: int) -> int:
            edits = [{"op": "create", "path": f"{count}-{each}", "text": ""} for each in range(count)]
            return await post(f"{url}/fs/edit", edits=edits)

        async def send(size: int) -> int:
            start, end = b'{"cmd": "a", "exec_id": "', b'"}'
            return (await client.post(f"{url}/exec", content=start + b"a" * (size - 27) + end)).status_code

        assert [await post("/v1/sessions", ttl_seconds=each) for each in (ttl_s, ttl_s + 1)] == [201, 400]
        assert [await send(each) for each in (body_bytes, body_bytes + 1)] == [400, 413]
        assert [await search(limits["max_matches"] + more) for more in (0, 1)] == [200, 400]
        assert [await edit(limits["max_edits"] + more) for more in (0, 1)] == [200, 400]
        shells = [await post(f"{url}/shells", name=f"s{each}") for each in range(limits["max_shells"])]
        assert shells == [201] * (limits["max_shells"] - 1) + [503]
        uploads = [await post(f"{url}/fs/uploads", path=f"u{each}") for each in range(limits["max_uploads"] + 1)]
        assert uploads == [201] * limits["max_uploads"] + [503]


async def test_the_node_adds_up_what_its_sessions_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed is the sum over live sessions; an amount that is not known is null, never 0."""
    async with running_front() as running, running.client() as client:
        for _ in range(2):
            await running.supervisor.create(SessionSpec())
        ended = await running.supervisor.create(SessionSpec())
        await running.supervisor.destroy(ended.id)
        found = (await client.get("/v1/node")).json()
        monkeypatch.setattr(tree, "_MIN_FREE_RATIO", 1.0)
        later = (await client.get("/v1/node")).json()
    assert (found["id"], found["status"], later["status"]) == (running.supervisor.node_id, "ready", "not_ready")
    assert found["capacity"]["committed"] == {
        "sessions": 2,
        "cpu": 2.0,
        "memory_bytes": 2 * 512 * 2**20,
        "pids": 512,
        "disk_bytes": 2 * 2048 * 2**20,
    }
    assert found["capacity"]["used"]["cpu"] is None
    assert found["sessions"] == {"running": 2}
    assert found["images"] == ["host"]


async def test_a_session_pool_is_seen_by_its_operator_and_its_members_by_nobody() -> None:
    """Members are in no list but that of their status. A create says where its session came from."""
    pool = PoolSettings(enabled=True, images={"python": PoolSize(1, 3)})
    async with running_front(pool=pool) as running, running.client() as client:

        async def is_ready() -> bool:
            return bool((await client.get("/v1/pools")).json()[0]["ready"])

        await until(is_ready)
        for query, count in (("", 0), ("?status=all", 0), ("?status=pool_idle", 1)):
            listed = (await client.get(f"/v1/sessions{query}")).json()
            assert len(listed) == count
        (member,) = listed
        path = f"/v1/sessions/{member['id']}"
        for method, url in (("GET", path), ("DELETE", path), ("GET", f"{path}/diagnostics"), ("GET", f"{path}/events")):
            answer = await client.request(method, url)
            assert (answer.status_code, answer.json()["error_code"]) == (404, "SESSION_NOT_FOUND")
        made = await client.post("/v1/sessions", json={"image": "python", "ttl_seconds": 60, "env": {"A": "1"}})
        assert (made.status_code, made.json()["id"], made.json()["acquire_source"]) == (201, member["id"], "pool")
        assert made.headers["server-timing"].startswith("pool;dur=")
        cold = (await client.post("/v1/sessions", json={"user": "root"})).json()
        assert (cold["acquire_source"], cold["acquire_detail"]) == ("cold", "pool_mismatch")
        (found,) = (await client.get("/v1/pools")).json()
        assert {name: found[name] for name in ("image", "size", "max", "claims", "misses")} == {
            "image": "python",
            "size": 1,
            "max": 3,
            "claims": 1,
            "misses": {"pool_mismatch": 1},
        }
        text = (await client.get("/metrics")).text
    for line in (
        'sandkasten_pool_claims_total{image="python"} 1.0',
        'sandkasten_pool_misses_total{image="python",reason="pool_mismatch"} 1.0',
        "sandkasten_pool_members ",
    ):
        assert f"\n{line}" in text


async def test_a_drained_node_refuses_creates_and_says_that_they_may_be_repeated() -> None:
    """Both requests answer the node as it is then, and may be repeated."""
    async with running_front() as running, running.client() as client:
        for _ in range(2):
            drained = await client.post("/v1/node/drain")
            assert (drained.status_code, drained.json()["status"]) == (200, "draining")
        refused = await client.post("/v1/sessions", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert (refused.json()["error_code"], refused.json()["retryable"]) == ("CAPACITY", True)
        assert (await client.post("/v1/node/undrain")).json()["status"] == "ready"
        assert (await client.post("/v1/sessions", json={})).status_code == 201
