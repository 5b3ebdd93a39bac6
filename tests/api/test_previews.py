"""Previews over HTTP: what is shown, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sandkasten.config import PreviewSettings
from sandkasten.model import EventType, SessionSpec
from sandkasten.model.network import MAX_PREVIEWS
from tests.api.harness import running_front


@pytest.mark.parametrize(
    ("domain", "url"),
    [(None, "http://8000-{}.localhost:"), ("p.example.org", "https://8000-{}.p.example.org/")],
)
async def test_a_preview_is_opened_listed_and_closed(domain: str | None, url: str) -> None:
    """Only the answer to the opening has the token; another opening has another one, and an event tells of each."""
    async with running_front(preview=PreviewSettings("127.0.0.1:0", domain)) as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        path = f"/v1/sessions/{session_id}/previews"
        opened = await client.post(path, json={"port": 8000, "ttl_seconds": 60})
        first, second = opened.json(), (await client.post(path, json={"port": 8000, "keep_alive": True})).json()
        assert opened.status_code == 201
        assert first["url"].startswith(url.format(session_id))
        assert datetime.fromisoformat(first["expires_at"]) <= datetime.now(UTC) + timedelta(seconds=60)
        assert first["token"] != second["token"]
        public = (await client.post(path, json={"port": 9, "access": "public"})).json()
        assert (public["token"], public["access"]) == (None, "public")
        listed = (await client.get(path)).json()["previews"]
        assert listed == [{name: each[name] for name in listed[0]} for each in (second, public)]
        assert "token" not in listed[0]
        assert (await client.delete(f"{path}/8000")).json() == {"ok": True}
        assert [each["port"] for each in (await client.get(path)).json()["previews"]] == [9]
        recent = running.supervisor._journal.recent(session_id, limit=9)[::-1]
        assert [each.type for each in recent if "preview" in each.type.value] == [
            *[EventType.PREVIEW_OPENED] * 3,
            EventType.PREVIEW_CLOSED,
        ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"port": -1},
        {"port": 0, "access": "local"},
        {"port": 65536},
        {"port": "8000"},
        {"port": 1, "ttl_seconds": 86401},
        {"port": 1, "access": "x"},
    ],
)
async def test_a_preview_that_is_none_is_refused(body: dict[str, Any]) -> None:
    """A port, a time or an access out of range is 400."""
    async with running_front(preview=PreviewSettings("127.0.0.1:0")) as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        refused = await client.post(f"/v1/sessions/{session_id}/previews", json=body)
        assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")


async def test_previews_of_a_session_are_bounded() -> None:
    """One too many is refused; one in place of another is not."""
    async with running_front(preview=PreviewSettings("127.0.0.1:0")) as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        path = f"/v1/sessions/{session_id}/previews"
        for port in range(1, MAX_PREVIEWS + 1):
            assert (await client.post(path, json={"port": port})).status_code == 201
        assert (await client.post(path, json={"port": 99})).status_code == 503
        assert (await client.post(path, json={"port": 1})).status_code == 201


async def test_previews_that_are_off_name_their_setting() -> None:
    """A request is 501 then, whatever the port; a port that can't be one has no preview to close."""
    async with running_front() as running, running.client() as client:
        session_id = (await running.supervisor.create(SessionSpec())).id
        path = f"/v1/sessions/{session_id}/previews"
        refused = await client.post(path, json={"port": 8000})
        assert (refused.status_code, refused.json()["error_code"]) == (501, "PREVIEWS_OFF")
        assert refused.json()["details"] == {"setting": "preview.listen"}
        for port in ("8000", "x", "99999999", "-1"):
            assert (await client.delete(f"{path}/{port}")).status_code == 404
