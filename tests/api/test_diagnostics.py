"""The diagnosis of a session over HTTP: its parts as they are, and of those that can't be had why."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from errno import EIO
from typing import Any

from nsinit.wire.protocol import AskDisk, Failed
from sandkasten.api.http.json import encode_json, to_plain
from sandkasten.model import SessionSpec
from tests.api.harness import running_front


async def test_each_part_is_told_or_says_why_not() -> None:
    """Beside the session itself, as everywhere."""
    async with running_front() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        path = f"/v1/sessions/{session.id}"
        answer = await client.get(f"{path}/diagnostics")
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        assert found["time"].endswith("Z")
        assert found["session"] == (await client.get(path)).json()
        assert (found["runner"]["answers"], found["lease"]["activities"]) == (True, 0)
        running.tree.nsinit.refusals[AskDisk] = Failed(0, "disk", "", EIO, "the disk does not answer")
        found = (await client.get(f"{path}/diagnostics")).json()
        assert found["runner"]["answers"] is True
        assert "the disk does not answer" in found["disk"]["unavailable"]
        assert (await client.get("/v1/sessions/0123456789abcdef01234567/diagnostics")).status_code == 404


def test_whatever_a_part_holds_becomes_json() -> None:
    """Times as text, tuples as arrays, surrogates replaced, however deep."""
    moment = datetime(2026, 1, 5, 12, tzinfo=UTC)
    given = {"a": (moment, {"b": [None, 1.5, "\ud800x"]})}
    wanted = {"a": ["2026-01-05T12:00:00.000Z", {"b": [None, 1.5, "\ufffdx"]}]}
    assert json.loads(encode_json(to_plain(given))) == wanted
