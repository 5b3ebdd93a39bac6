"""Keys, tokens and errors of E2B's API, over the daemon's tree with scripted sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
import trio

from sandkasten.actors.services import history
from sandkasten.actors.session.messages import HoldStill
from sandkasten.api.app import make_app
from sandkasten.api.e2b import sandboxes
from sandkasten.api.e2b.connect import HEAD, envelope
from sandkasten.api.e2b.context import AUTO_RESUME, TEMPLATE
from sandkasten.api.e2b.front import E2bFront
from sandkasten.api.e2b.sandboxes import Action, E2bTerms, access_token, sign
from sandkasten.model import SessionSpec, Status
from tests.api.harness import KEY, Running, make_settings, running_app, running_front
from tests.api.keys import CONFINED, CONFINED_READ, ISSUED, READ, WRITE
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.waiting import patience, until

_SEAL = b"s" * 32
_LIST = "/process.Process/List"


@attrs.frozen
class Front:
    """A front with E2B's API."""

    running: Running
    tree: ScriptedTree

    async def make(self, **fields: Any) -> str:  # Any: SessionSpec's fields
        """Return the id of a new sandbox."""
        labels = {TEMPLATE: "base", **fields.pop("labels", {})}
        return (await self.tree.supervisor.create(SessionSpec(labels=labels, **fields))).id

    def client(self, token: str | None = KEY) -> httpx.AsyncClient:
        """Return a client with a key as E2B's clients send it."""
        headers = {} if token is None else {"X-API-KEY": token}
        return httpx.AsyncClient(base_url=self.running.url, headers=headers, timeout=patience(), verify=False)


@asynccontextmanager
async def e2b_front() -> AsyncIterator[Front]:
    async with open_scripted() as tree:
        app = make_app(
            tree.supervisor,
            settings=make_settings(),
            shares=tree.supervisor.shares,
            e2b=E2bFront(E2bTerms(key=_SEAL)),
        )
        tree.supervisor.shares.ring.replace([each.key for each in ISSUED])
        async with running_app(app) as running:
            yield Front(running, tree)


def inside(sandbox_id: str, token: str | None = None, **headers: str) -> dict[str, str]:
    """Return the headers of a request to a sandbox."""
    token = access_token(_SEAL, sandbox_id) if token is None else token
    return {"E2b-Sandbox-Id": sandbox_id, "X-Access-Token": token, "Content-Type": "application/json", **headers}


async def test_keys_are_ours_and_reach_what_they_reach() -> None:
    """A key is needed and must be in force; one that may only read changes nothing, and one with a label sees nothing
    else. A refusal is JSON with its status."""
    async with e2b_front() as front:
        ours = await front.make(labels={"team": "a"})
        others = await front.make()
        for token in (None, "sk_wrong", ""):
            async with front.client(token) as client:
                answer = await client.get("/v2/sandboxes")
                assert (answer.status_code, answer.json()["code"]) == (401, 401)
        async with front.client(READ.token) as client:
            answer = await client.get(f"/sandboxes/{others}")
            assert (answer.status_code, "envdAccessToken" in answer.json()) == (200, False)
            assert (await client.delete(f"/sandboxes/{others}")).status_code == 403
            assert (await client.post("/v2/sandboxes", json={})).status_code == 403
        for token in (CONFINED.token, CONFINED_READ.token):
            async with front.client(token) as client:
                assert [each["sandboxID"] for each in (await client.get("/v2/sandboxes")).json()] == [ours]
                for path in ("", "/metrics"):
                    assert (await client.get(f"/sandboxes/{others}{path}")).status_code == 404
                assert (await client.post(f"/sandboxes/{others}/timeout", json={"timeout": 1})).status_code in (
                    403,
                    404,
                )
        async with front.client(WRITE.token) as client:
            assert (await client.post(f"/sandboxes/{others}/timeout", json={"timeout": 10})).status_code == 204
            assert "envdAccessToken" in (await client.get(f"/sandboxes/{others}")).json()
            assert (await client.patch(f"/sandboxes/{others}")).status_code == 405


async def test_a_sandbox_takes_its_own_token_alone_while_its_key_is_in_force() -> None:
    """Neither another sandbox's token nor an API key opens it, and the end of the key is the end of the token."""
    async with e2b_front() as front:
        one, two = await front.make(key_id=WRITE.key.id), await front.make()
        async with front.client() as client:
            for token in ("", KEY, access_token(_SEAL, two)):
                answer = await client.post(_LIST, headers=inside(one, token), json={})
                assert (answer.status_code, answer.json()["code"]) == (401, 401)
            assert (await client.post(_LIST, headers=inside(one), json={})).json() == {"processes": []}
            front.tree.supervisor.shares.ring.replace([])
            assert (await client.post(_LIST, headers=inside(one), json={})).status_code == 401
            assert (await client.post(_LIST, headers=inside(two), json={})).status_code == 200


async def test_a_sandbox_that_is_gone_or_paused_answers_in_the_words_that_clients_look_for() -> None:
    """Also one that never was, and the health that clients ask for to be sure."""
    async with e2b_front() as front, front.client() as client:
        paused, ended = await front.make(), await front.make()
        assert (await client.get("/health", headers=inside(paused))).status_code == 204
        assert (await client.post(f"/sandboxes/{paused}/pause", json={})).status_code == 204
        assert (await client.post(f"/sandboxes/{paused}/pause", json={})).status_code == 409
        assert (await client.delete(f"/sandboxes/{ended}")).status_code == 204
        assert (await client.delete(f"/sandboxes/{ended}")).status_code == 404
        for sandbox_id in (paused, ended, "0" * 24, "no id"):
            for method, path in (("GET", "/health"), ("POST", _LIST), ("GET", "/files?path=x")):
                answer = await client.request(method, path, headers=inside(sandbox_id))
                assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
        resumed = await client.post(f"/v2/sandboxes/{paused}/connect", json={"timeout": 60})
        assert (resumed.status_code, resumed.json()["envdAccessToken"]) == (201, access_token(_SEAL, paused))
        assert (await client.get("/health", headers=inside(paused))).status_code == 204
        no_way = await client.get("/", headers=inside(paused, **{"E2b-Sandbox-Port": "8000"}))
        assert (no_way.status_code, "preview.listen" in no_way.json()["message"]) == (501, True)


async def test_a_sandbox_of_which_an_image_is_made_answers_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait, and are told to come again when that takes too long: it is not gone, nor is the copy ended."""
    async with e2b_front() as front, front.client() as client:
        for labels in ({}, {AUTO_RESUME: "true"}):
            sandbox_id = await front.make(labels=labels, max_lifetime_s=1000.0)
            entry = front.tree.supervisor._directory.get(sandbox_id)
            assert entry is not None
            await entry.ref.ask(HoldStill(1000.0))
            with monkeypatch.context() as patch:
                patch.setattr(sandboxes, "STILL_S", 0.1)
                for path, head in ((_LIST, inside(sandbox_id)), (f"/v2/sandboxes/{sandbox_id}/connect", {})):
                    refused = await client.post(path, headers=head, json={})
                    assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
            assert (await front.tree.supervisor.get(sandbox_id)).status is Status.PAUSED
            async with trio.open_nursery() as nursery:
                nursery.start_soon(entry.ref.ask, HoldStill(0))
                assert (await client.post(_LIST, headers=inside(sandbox_id), json={})).status_code == 200
            assert (await front.tree.supervisor.get(sandbox_id)).max_lifetime_s == 1000.0


async def test_calls_that_make_no_sense_are_refused_as_the_protocol_says() -> None:
    """Other codecs, two types, compression, unknown methods, deadlines and messages; errors of a stream are its end."""
    async with e2b_front() as front, front.client() as client:
        head = inside(await front.make())
        types = [("Content-Type", "application/json"), ("Content-Type", "application/proto")]
        plain = [item for item in head.items() if item[0] != "Content-Type"]
        for headers in ([*plain, types[1]], [*plain, *types]):
            assert (await client.post(_LIST, headers=headers, content=b"{}")).status_code == 415
        for more, body, code in (
            ({"Content-Encoding": "gzip"}, b"{}", "unimplemented"),
            ({"Connect-Timeout-Ms": "soon"}, b"{}", "invalid_argument"),
            ({}, b"[]", "invalid_argument"),
            ({}, b"{", "invalid_argument"),
            ({}, b'{"a": [' + b"[]," * 200_000 + b"[]]}", "invalid_argument"),
        ):
            answer = await client.post(_LIST, headers=head | more, content=body)
            assert answer.json()["code"] == code
        missing = await client.post("/process.Process/Fly", headers=head, content=b"{}")
        assert (missing.status_code, missing.json()["code"]) == (404, 404)
        streams = head | {"Content-Type": "application/connect+json"}
        for body in (b"", envelope({}), envelope({}) * 2, HEAD.pack(0, 50) + b"{}", HEAD.pack(0, 2**31)):
            answer = await client.post("/process.Process/Start", headers=streams, content=body)
            flags, size = HEAD.unpack_from(answer.content)
            error = json.loads(answer.content[HEAD.size :])["error"]["code"]
            assert (answer.status_code, flags, size) == (200, 2, len(answer.content) - HEAD.size)
            assert error in ("invalid_argument", "resource_exhausted")


async def test_a_signed_url_opens_what_was_signed_until_its_end() -> None:
    """A wrong signature, one of another action, and one whose end is over or is no number are all refused alike."""
    async with e2b_front() as front, front.client(None) as client:
        token = access_token(_SEAL, await front.make())
        refused: list[tuple[Action, str | None]] = [("read", "1"), ("read", "soon"), ("write", None), ("read", "")]
        for action, expiration in refused:
            query = {"path": "a b", "signature": sign("a b", action, "", token, expiration)}
            if expiration is not None:
                query["signature_expiration"] = expiration
            assert (await client.get("/files", params=query)).status_code == 401
        for query in ({}, {"path": "a b", "signature": "v1_x"}):
            assert (await client.get("/files", params=query)).status_code == 401


async def test_lists_come_in_pages_and_bad_fields_are_named() -> None:
    """Each sandbox comes once; states and templates choose; what can't be read is 400 with the field's name."""
    async with e2b_front() as front, front.client() as client:
        made = [await front.make() for _ in range(5)]
        await front.tree.supervisor.create(SessionSpec())  # of our own API
        seen, token = [], ""
        while True:
            answer = await client.get("/v2/sandboxes", params={"limit": 2, "nextToken": token})
            seen += [each["sandboxID"] for each in answer.json()]
            if (token := answer.headers.get("x-next-token", "")) == "":
                break
        assert sorted(seen) == sorted(made)
        assert (await client.get("/v2/sandboxes", params={"state": "paused"})).json() == []
        assert (await client.get("/v2/sandboxes", params={"template": "other"})).json() == []
        for query in ({"limit": "0"}, {"nextToken": "x"}, {"startedAfter": "x"}):
            answer = await client.get("/v2/sandboxes", params=query)
            assert (answer.status_code, next(iter(query)) in answer.json()["message"]) == (400, True)
        for body in ({"timeout": -1}, {"timeout": "x"}, {"metadata": {"a": 1}}, {"envVars": {"a b": "c"}}):
            assert (await client.post("/v2/sandboxes", json=body)).status_code == 400
        for path in (f"/sandboxes/{made[0]}/snapshots", f"/sandboxes/{made[0]}/fork", "/v3/templates", "/volumes"):
            assert (await client.post(path, json={})).status_code == 501


async def test_what_a_sandbox_used_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come in order and within bounds, in our own API and in E2B's; the share of the processors is that between
    two samples. They go with the session, and a time that is none is refused."""
    monkeypatch.setattr(history, "PERIOD_S", 0.01)
    monkeypatch.setattr(history, "KEPT", 4)
    async with e2b_front() as front, front.client() as client, front.running.client() as ours:
        sandbox_id = await front.make()
        usage, metrics = f"/v1/sessions/{sandbox_id}/usage", f"/sandboxes/{sandbox_id}/metrics"

        async def is_seen() -> bool:
            return any(each["cpu_usage_usec"] == used for each in (await ours.get(usage)).json())

        for used in range(10):
            front.tree.nsinit.count(sandbox_id, {"memory.current": f"{4096 * used}", "cpu.stat": f"usage_usec {used}"})
            await until(is_seen)
        kept = (await ours.get(usage)).json()
        assert (len(kept), kept[-1]["memory_bytes"]) == (4, 9 * 4096)
        assert kept == sorted(kept, key=lambda each: each["time"])
        found = (await client.get(metrics)).json()
        assert (len(found), [each["memUsed"] for each in found[-2:]]) == (5, [9 * 4096] * 2)
        assert all(0 <= each["cpuUsedPct"] <= 100 for each in found)
        now = (await client.get("/metrics", headers=inside(sandbox_id))).json()
        assert (now["mem_used"], now["cpu_count"]) == (9 * 4096, 1)
        for reader, path, count in ((ours, usage, 4), (client, metrics, 5)):
            assert (await reader.get(path, params={"end": 1000})).json() == []
            assert len((await reader.get(path, params={"start": 1000, "end": 2**40})).json()) == count
            assert (await reader.get(path, params={"start": "x"})).status_code == 400
        await client.delete(f"/sandboxes/{sandbox_id}")
        assert (await ours.get(usage)).status_code == 410

        async def is_gone() -> bool:
            return not front.tree.supervisor._history._kept

        await until(is_gone)


async def test_without_the_setting_nothing_of_it_is_there() -> None:
    """The paths are unknown, and the headers mean nothing."""
    async with running_front() as running, running.client() as client:
        for path in ("/v2/sandboxes", "/health"):
            assert (await client.get(path, headers=inside("0" * 24))).status_code == 404


@pytest.mark.parametrize("path", ["/healthz", "/v1/sessions"])
async def test_our_own_api_is_as_it_was(path: str) -> None:
    """A path of ours is ours where E2B's API is served, too, with errors in our form."""
    async with e2b_front() as front, front.running.client() as client:
        assert (await client.get(path)).status_code == 200
        assert "error_code" in (await client.get("/v1/sessions/none")).json()
