"""Pulls and jobs over HTTP: what is answered, streamed and refused."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
import trio

from sandkasten import errors
from sandkasten.config import ImagesSettings
from sandkasten.images.registry.documents import Platform
from sandkasten.sdk import SandboxClient
from tests.actors.test_jobs import silent
from tests.api.harness import KEY, running_front
from tests.archives import docker_saved, tar_of
from tests.registry import Said, digest_of, serving


async def events_of(client: httpx.AsyncClient, job_id: str) -> list[dict[str, Any]]:
    """Return the events of a job up to its end."""
    found = []
    async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    return found


async def test_a_pull_is_begun_followed_listed_and_cancelled() -> None:
    """The answer is there before the registry's; the stream ends with the job, and tells the last state of one that
    has ended."""
    async with serving() as registry, running_front() as running, running.client() as client:
        body = {"reference": registry.reference(), "auth": {"username": "me", "password": "hunter2-x"}}
        begun = await client.post("/v1/images/pull", json=body, headers={"idempotency-key": "k"})
        assert begun.status_code == 202
        job_id = begun.json()["job_id"]
        told = await events_of(client, job_id)
        assert told[-1]["state"] == "failed"
        assert told[-1]["error"]["error_code"] == "REGISTRY_REFUSED"
        assert told[-1]["error"]["details"] == {"status": 404, "codes": ["MANIFEST_UNKNOWN"]}
        assert (
            await client.post("/v1/images/pull", json=body, headers={"idempotency-key": "k"})
        ).json() == begun.json()
        other = await client.post("/v1/images/pull", json=body | {"name": "z"}, headers={"idempotency-key": "k"})
        assert (other.status_code, other.json()["error_code"]) == (409, "CONFLICT")

        asked = silent(registry)
        second = (await client.post("/v1/images/pull", json=body)).json()["job_id"]
        await asked.wait()
        assert (await client.get(f"/v1/jobs/{second}")).json()["state"] == "running"
        ended = (await client.delete(f"/v1/jobs/{second}")).json()
        assert (ended["state"], ended["error"]) == ("cancelled", None)
        assert [each["state"] for each in await events_of(client, second)] == ["cancelled"]
        listed = await client.get("/v1/jobs", params={"limit": 10})
        assert [each["id"] for each in listed.json()["jobs"]] == [second, job_id]
        assert "hunter2" not in listed.text + begun.text + json.dumps(told)


async def test_the_events_of_a_pull_tell_its_progress_four_times_a_second_at_most() -> None:
    """By layers: the bytes that came, all of them, and the phase."""
    piece, size = b"x" * (1 << 20), 1 << 30
    async with serving() as registry, running_front() as running, running.client() as client:
        digest = digest_of(piece)
        config = {"os": "linux", "architecture": Platform.own().architecture, "rootfs": {"diff_ids": [digest]}}
        blob = {"digest": digest, "size": size}
        registry.push_manifest(registry.add(json.dumps(config).encode()), [blob], "latest")
        drip = Said(200, piece, endless=True, pause_s=0.02)
        registry.answer = lambda asked: drip if digest in asked.path else None
        begun = (await client.post("/v1/images/pull", json={"reference": registry.reference()})).json()["job_id"]
        rows: list[dict[str, Any]] = []
        began, took_s = trio.current_time(), 0.0
        async with client.stream("GET", f"/v1/jobs/{begun}/events") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    rows += json.loads(line.removeprefix("data: "))["progress"]
                    if not took_s and sum(row["done_bytes"] > 0 for row in rows) == 4:
                        took_s = trio.current_time() - began
                        await client.delete(f"/v1/jobs/{begun}")
        assert took_s > 3 * 0.25 - 0.05
        assert {(row["layer"], row["total_bytes"]) for row in rows} == {(digest, size)}
        came = [row["done_bytes"] for row in rows]
        assert (came, rows[-1]["phase"]) == (sorted(came), "downloading")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "INVALID_REQUEST"),
        ({"reference": "https://x/y"}, "INVALID_REFERENCE"),
        ({"reference": "x", "name": "../y"}, "INVALID_REQUEST"),
        ({"reference": "x", "platform": "amd64"}, "INVALID_REQUEST"),
        ({"reference": "x", "auth": {"username": "me"}}, "INVALID_REQUEST"),
        ({"reference": "quay.io/" + "x" * 65}, "INVALID_REFERENCE"),
    ],
)
async def test_a_pull_that_cannot_be_is_refused(body: dict[str, Any], code: str) -> None:
    """With 400, and no job of it; so is a job that is not there, with 404."""
    async with running_front() as running, running.client() as client:
        refused = await client.post("/v1/images/pull", json=body)
        assert (refused.status_code, refused.json()["error_code"]) == (400, code)
        assert (await client.get("/v1/jobs")).json() == {"jobs": []}
        for method, path in (("GET", "x"), ("DELETE", "0" * 24), ("GET", "0" * 24 + "/events")):
            missing = await client.request(method, f"/v1/jobs/{path}")
            assert (missing.status_code, missing.json()["error_code"]) == (404, "JOB_NOT_FOUND")


async def test_an_archive_is_taken_whole_before_its_job_begins() -> None:
    """By the client of Python, too. The body is the archive; one that is too large is refused, and one that lies is the
    job's failure."""
    liar = tar_of([*docker_saved({"a:1": [b"layer"]})[1:]])
    async with running_front(images=ImagesSettings(max_pull_mb=1)) as running, running.client() as client:
        query = {"name": "x", "ref": "a:1"}
        begun = await client.post("/v1/images/import", params=query, content=liar)
        assert begun.status_code == 202
        job = (await events_of(client, begun.json()["job_id"]))[-1]
        assert (job["kind"], job["state"], job["reference"]) == ("import", "failed", "a:1")
        assert (job["error"]["error_code"], job["digest"]) == ("INVALID_IMAGE", None)
        assert "has no file" in job["error"]["message"]
        async with SandboxClient(base_url=running.url, api_key=KEY) as sdk:
            sent = await sdk.import_image(io.BytesIO(liar), "y", progress=lambda *_: None)
            assert (sent.kind, sent.name) == ("import", "y")
            with pytest.raises(errors.TooLarge):
                await sdk.import_image(bytes((1 << 20) + 1), "z")
        for bad in ({}, {"name": "../x"}, {"name": "x", "platform": "amd64"}):
            refused = await client.post("/v1/images/import", params=bad, content=liar)
            assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")
        assert len((await client.get("/v1/jobs")).json()["jobs"]) == 2
