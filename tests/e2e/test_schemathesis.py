"""Requests that schemathesis makes of the description, to a daemon with a session and a workspace that things are in.

Every answer must be described (status, media type, headers, body, error code), and none may be 500. Each operation gets
`EXAMPLES` requests: valid ones, of which half name things that are there, and broken ones. Seeds are fixed, so what is
found is found again, and more is looked for on demand:

    EXAMPLES=500 OPERATION=session_fs make test ARGS=tests/e2e/test_schemathesis.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

from tests.api.described import DOCUMENT
from tests.e2e.daemon import KEY
from tests.waiting import patience

EXAMPLES = int(os.environ.get("EXAMPLES", "6"))
ONLY = os.environ.get("OPERATION", "")
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
PATHS = ("f", "d", "d/f", "link", "fifo", ".", "new", "new/er", "f/x", "/workspace/f", "/proc/self/mem", "/etc/passwd")
COMMANDS = ("true", "cat f", "echo out; echo err >&2; exit 3", "sleep 9", "kill -9 $$", "exec true", "cd d; export A=1")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("path", "from", "to"), st.sampled_from(PATHS)),
    "paths": st.lists(st.sampled_from(PATHS), min_size=1, max_size=3),
    "cmd": st.sampled_from(COMMANDS),
    "image": st.sampled_from(("host", "nowhere")),
    "workspace_id": st.sampled_from(("ws", "other")),
}
"""Values of things that are there, or nearly, by the names of fields."""

HINDRANCES = frozenset({"user", "cwd", "argv", "filesystem", "seccomp", "root_inside", "limits", "env"})
"""Fields with which a request for something that is there seldom gets far."""

SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {each.ok().definition.raw["operationId"]: each.ok() for each in SCHEMA.get_all_operations()}


@attrs.define
class World:
    """A daemon's things: `ids` by the names of open segments, of sessions and of workspaces."""

    client: httpx.Client
    sender: requests.Session
    ids: dict[str, dict[str, str]] = attrs.field(factory=dict)

    def mend(self) -> None:
        """Make anew what the requests before have ended."""
        self.client.post("/v1/node/undrain")
        session = self.ids.get("sessions", {}).get("id")
        for each in self.client.get("/v1/sessions").json():
            if each["id"] != session or each["status"] != "running":
                self.client.delete(f"/v1/sessions/{each['id']}")
                session = session if each["id"] != session else None
        if session is None or self.client.get(f"/v1/sessions/{session}").json().get("status") != "running":
            session = self.client.post("/v1/sessions", json={"image": None}).json()["id"]
        self.client.put("/v1/workspaces/ws")
        self.ids = {"sessions": self._filled(f"/v1/sessions/{session}"), "workspaces": self._filled("/v1/workspaces/ws")}
        self.ids["sessions"] |= {"id": session, "exec_id": "p", "name": "s"}
        self.ids["workspaces"]["id"] = "ws"
        top = f"/v1/sessions/{session}"
        self.client.post(f"{top}/shells", json={"name": "s"})
        self.client.post(f"{top}/processes", json={"cmd": "cat", "process_id": "p"})
        self.client.post(f"{top}/exec", json={"argv": ["mkfifo", "fifo"]})

    def _filled(self, top: str) -> dict[str, str]:
        for path in ("f", "d/f"):
            self.client.put(f"{top}/fs/file", params={"path": path}, content=b"one\ntwo\n")
        made = self.client.post(f"{top}/fs/uploads", json={"path": "up"})
        return {"upload_id": made.json()["upload_id"]} if made.is_success else {"upload_id": "0" * 32}

    def send(self, case: Case) -> Response:
        """Send a request; of a stream only the head is waited for."""
        asked = case.as_transport_kwargs(base_url=str(self.client.base_url))
        asked["headers"]["Authorization"] = f"Bearer {KEY}"
        with self.sender.request(**asked, stream=True, timeout=patience(30)) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                answer._content = b""  # so that no more is waited for
                answer.raw.close()
            return Response.from_requests(answer, verify=False)


@pytest.fixture
def world(client: httpx.Client) -> Iterator[World]:
    """The shared daemon, which `client` cleans up."""
    with requests.Session() as sender:
        yield World(client, sender)
        for each in client.get("/v1/workspaces").json()["workspaces"]:
            client.delete(f"/v1/workspaces/{each['id']}?force=true")


def aim(case: Case, ids: dict[str, str], data: st.DataObject) -> None:
    """Let a request be for what is there."""
    case.path_parameters |= {name: ids[name] for name in case.path_parameters if name in ids}
    body = case.body if isinstance(case.body, dict) else {}
    for fields in (case.query, body):
        for name in list(fields):
            if name in FIELDS and fields[name] is not None:
                fields[name] = data.draw(FIELDS[name])
            elif name in HINDRANCES:
                del fields[name]


@pytest.mark.parametrize("tag", sorted({each.definition.raw["tags"][0] for each in OPERATIONS.values()}))
def test_every_answer_is_described(world: World, tag: str) -> None:
    """Whatever is asked, and 500 is no answer."""
    found = []
    for name, operation in OPERATIONS.items():
        if operation.definition.raw["tags"] == [tag] and ONLY in name:
            world.mend()
            try:
                ask(world, operation)
            except Exception as fault:  # noqa: BLE001 - the others are tried as well
                found.append(f"{name}: {fault}\n{' '.join(getattr(fault, '__notes__', ()))}")
    assert found == [], "\n\n".join(found)


def ask(world: World, operation: Any) -> None:  # of a type without a public name
    """Send the examples of one operation. Raises what schemathesis finds, and AssertionError for 500."""
    ids = world.ids["workspaces" if operation.path.startswith("/v1/workspaces") else "sessions"]
    modes = st.sampled_from((GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def answers_are_described(data: st.DataObject) -> None:
        mode = data.draw(modes)
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if mode is GenerationMode.POSITIVE and data.draw(st.booleans()):
            aim(case, ids, data)
        answer = world.send(case)
        assert answer.status_code != 500, case.as_curl_command()
        case.validate_response(answer, checks=CHECKS)

    answers_are_described()
