"""Keys over HTTP: their list with rights and usage, the answers when a quota is full, and the key that made a
session.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NoReturn

import pytest

from sandkasten.api.routes import SESSIONS
from sandkasten.errors import QuotaExceeded
from sandkasten.model import SessionSpec
from sandkasten.model.keys import Access, Quota
from tests.api.harness import running_front
from tests.api.keys import ADMIN, CONFINED, issue
from tests.api.ws_client import talk


async def test_administrators_see_the_keys_and_no_secret() -> None:
    """The configured key first; quota, usage and last use of each; nothing of a digest."""
    limited = issue(Access.READ, quota=Quota(sessions=3), expires_at=datetime(2100, 1, 1, tzinfo=UTC))
    async with running_front() as running:
        running.ring.replace([ADMIN.key, CONFINED.key, limited.key])
        async with running.client(token=ADMIN.token) as client:
            answer = await client.get("/v1/keys")
        keys = answer.json()["keys"]
        assert [each["id"] for each in keys] == ["configured", ADMIN.key.id, CONFINED.key.id, limited.key.id]
        assert keys[1]["last_used_at"] is not None
        assert keys[2]["label"] == {"name": "team", "value": "a"}
        assert (keys[3]["access"], keys[3]["expires_at"]) == ("read", "2100-01-01T00:00:00.000Z")
        assert (keys[3]["quota"]["sessions"], keys[3]["quota"]["cpu"]) == (3, None)
        assert keys[3]["usage"] == {"sessions": 0, "cpu": 0.0, "memory_mb": 0, "disk_mb": 0, "execs": 0}
        assert "digest" not in answer.text
        assert limited.key.digest.hex() not in answer.text


async def test_a_refusal_says_what_is_wrong_with_the_key() -> None:
    """No key, an unsuitable header, an expired key; a revoked one looks like one that never was."""
    over = issue(Access.WRITE, expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    revoked, never = issue(Access.WRITE), issue(Access.WRITE)
    async with running_front() as running:
        running.ring.replace([over.key, revoked.key])
        running.ring.replace([over.key])

        async def told(**headers: str) -> str:
            async with running.client() as client:
                del client.headers["authorization"]
                answer = await client.get(SESSIONS, headers=headers)
                error = answer.json()
                assert (answer.status_code, error["error_code"]) == (401, "UNAUTHORIZED")
                return str(error["message"])

        assert (await told()).startswith("no API key: send it")
        assert "not sent as one" in await told(authorization="Basic abc")
        assert "expired" in await told(authorization=f"Bearer {over.token}")
        unknown = {await told(authorization=f"Bearer {each.token}") for each in (revoked, never)}
        assert unknown == {"no such API key: it was never made, or it has been revoked"}


async def test_a_key_that_asks_too_often_is_429_and_others_are_served() -> None:
    """With what to wait for; a WebSocket is a request as well."""
    limited = issue(Access.WRITE, quota=Quota(requests_per_second=2))
    async with running_front() as running:
        running.ring.replace([limited.key])
        async with running.client(token=limited.token) as client, running.client() as configured:
            statuses = [(await client.get(SESSIONS)).status_code for _ in range(12)]
            assert statuses[:2] == [200, 200]
            answer = await client.get(SESSIONS)
            while answer.status_code == 200:
                answer = await client.get(SESSIONS)
            error = answer.json()
            assert (answer.status_code, error["error_code"], error["retryable"]) == (429, "QUOTA_EXCEEDED", True)
            assert error["details"] == {"quota": "requests_per_second", "total": 2}
            assert answer.headers["retry-after"] == "1"
            assert (await configured.get(SESSIONS)).status_code == 200
        none = issue(Access.READ, quota=Quota(requests_per_second=0))
        running.ring.replace([none.key])
        async with talk(running, "/v1/events", key=None) as listener:
            await listener.say("auth", key=none.token)
            assert (await listener.hear_close())[0] == 4429


async def test_a_full_quota_reaches_the_client_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, code, details and when to ask again."""

    async def refuse(_spec: SessionSpec) -> NoReturn:
        raise QuotaExceeded("full", retry_after_s=5, quota="sessions", used=2, total=2)

    async with running_front() as running, running.client() as client:
        monkeypatch.setattr(running.supervisor, "create", refuse)
        answer = await client.post(SESSIONS)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert answer.json()["details"] == {"quota": "sessions", "used": 2, "total": 2}


async def test_a_session_says_which_key_made_it() -> None:
    """By its public id."""
    async with running_front() as running:
        running.ring.replace([CONFINED.key])
        async with running.client(token=CONFINED.token) as client, running.client() as configured:
            assert (await client.post(SESSIONS)).json()["key_id"] == CONFINED.key.id
            assert (await configured.post(SESSIONS)).json()["key_id"] == "configured"
