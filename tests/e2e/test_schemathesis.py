"""Requests that schemathesis makes of the description, to a daemon with a session and a workspace that things are in.

Every answer must be described (status, media type, headers, body, error code), and none may be 500. Each operation gets
`EXAMPLES` requests: valid ones, of which most are for things that are there, and broken ones. Seeds are fixed, so what
is found is found again, and more is looked for on demand:

    EXAMPLES=500 OPERATION=session_fs make test ARGS=tests/e2e/test_schemathesis.py
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.api.described import DOCUMENT
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

EXAMPLES = int(os.environ.get("EXAMPLES", "8"))
ONLY = os.environ.get("OPERATION", "")
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
PATHS = (
    *("f", "d", "d/f", "link", "loop", "fifo", ".", "new", "new/er", "f/x", "n" * 300, "/workspace", "/workspace/f"),
    *("/proc/self/mem", "/etc/passwd", "/etc/hosts", "/tmp", "/tmp/t", "/dev/shm", "/dev/null"),
)
COMMANDS = ("true", "cat f", "echo out; echo err >&2; exit 3", "sleep 9", "kill -9 $$", "exec true", "cd d; export A=1")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("path", "from", "to"), st.sampled_from(PATHS)),
    "paths": st.lists(st.sampled_from(PATHS), min_size=1, max_size=3),
    "cmd": st.sampled_from(COMMANDS),
    "mode": st.sampled_from(("644", "0755")),
    "user": st.sampled_from(("root", "1000", "nobody")),
    "image": st.sampled_from(("host", "nowhere")),
    "workspace_id": st.sampled_from(("ws", "other")),
}
"""Values of things that are there, or nearly, by the names of fields."""

HINDRANCES = frozenset({"cwd", "argv", "filesystem", "seccomp", "root_inside", "limits", "env"})
"""Fields with which a request for something that is there seldom gets far."""

_CONTENT = {"text": st.text(), "content_base64": st.sampled_from(("", "YQ=="))}
_COMMAND = {"cmd": FIELDS["cmd"], "argv": st.sampled_from((["true"], ["cat", "/proc/self/maps"], ["nothing"]))}
ALTERNATIVES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ExecRequest": _COMMAND,
    "ProcessRequest": _COMMAND,
    "WriteRequest": _CONTENT,
    "StdinRequest": _CONTENT,
    "WaitRequest": {"for": st.just("exit"), "port": st.just(80), "pattern": st.just("out")},
    "SignalRequest": {"signal": st.sampled_from(("TERM", 9, 10))},
}
"""Fields of which one is needed, by the classes of bodies."""


def _archive() -> bytes:
    """Return a tar archive with a file, a directory, a link, and a device, which is skipped."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        kinds = {"t": tarfile.REGTYPE, "t.d": tarfile.DIRTYPE, "t.l": tarfile.SYMTYPE, "n": tarfile.CHRTYPE}
        for name, kind in kinds.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "t" if kind == tarfile.SYMTYPE else ""
            archive.addfile(member)
    return made.getvalue()


ARCHIVE = _archive()
TAGS = sorted({each["tags"][0] for path in DOCUMENT["paths"].values() for each in path.values()})


@cache
def operations() -> dict[str, Any]:
    """Return what schemathesis makes of the description, by the ids of operations. Its import takes a second of
    computing, which other lanes need not spend."""
    import schemathesis

    schema: Any = schemathesis.openapi.from_dict(DOCUMENT)
    return {each.ok().definition.raw["operationId"]: each.ok() for each in schema.get_all_operations()}


@attrs.define
class World:
    """A daemon's things: `ids` by the names of open segments, of sessions and of workspaces."""

    client: httpx.Client
    sender: requests.Session
    ids: dict[str, dict[str, str]] = attrs.field(factory=dict)
    count: int = 0

    def mend(self) -> None:
        """Make anew what the requests before have ended."""
        self.client.post("/v1/node/undrain")
        session = self.ids.get("sessions", {}).get("id")
        for each in self.client.get("/v1/sessions").json():
            if each["id"] != session or each["status"] != "running":
                self.client.delete(f"/v1/sessions/{each['id']}")
                session = session if each["id"] != session else None
        if session is None or not self.client.post(f"/v1/sessions/{session}/exec", json={"cmd": "true"}).is_success:
            session = self.client.post("/v1/sessions", json={"image": None}).json()["id"]
        self.client.put("/v1/workspaces/ws")
        self.count += 1
        top, process = f"/v1/sessions/{session}", f"p{self.count}"
        upload = self._fill("sessions", top)
        self.ids["sessions"] = {"id": session, "exec_id": process, "name": "s", "upload_id": upload}
        self.ids["workspaces"] = {"id": "ws", "upload_id": self._fill("workspaces", "/v1/workspaces/ws")}
        self.client.post(f"{top}/shells", json={"name": "s"})
        self.client.post(f"{top}/processes", json={"cmd": "cat", "process_id": process})
        self.client.post(f"{top}/exec", json={"cmd": "mkfifo fifo; ln -s f link; ln -s loop loop"})

    def _fill(self, kind: str, top: str) -> str:
        """Make files, and return the id of an upload."""
        for path in ("f", "d/f"):
            self.client.put(f"{top}/fs/file", params={"path": path}, content=b"one\ntwo\n")
        upload = self.ids.get(kind, {}).get("upload_id", "none")
        if self.client.get(f"{top}/fs/uploads/{upload}").is_success:
            return upload
        return str(self.client.post(f"{top}/fs/uploads", json={"path": "up"}).json().get("upload_id", "none"))

    def send(self, case: Any) -> Any:
        """Send a request (of a body of any type), and return the answer as schemathesis checks it. Only JSON is read
        whole: a stream may have no end."""
        from schemathesis.core.transport import Response

        asked = case.as_transport_kwargs(base_url=str(self.client.base_url))
        asked["headers"]["Authorization"] = f"Bearer {KEY}"
        with self.sender.request(**asked, stream=True, timeout=patience(30)) as answer:
            if not answer.headers.get("content-type", "").startswith("application/json"):
                answer._content = b""
                answer.raw.close()
            return Response.from_requests(answer, verify=False)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that waits for nothing for long."""
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        running_daemon(Path(directory), SANDKASTEN_MAX_EXEC_TIMEOUT_MS="200") as daemon,
    ):
        with daemon.client() as client:
            client.get("/v1/secrets").raise_for_status()  # starts the broker, which is no test's, nor is the way out
            made = client.post("/v1/sessions", json={"network": "open"}).raise_for_status().json()
            client.delete(f"/v1/sessions/{made['id']}").raise_for_status()
        yield daemon


@pytest.fixture
def world(client: httpx.Client) -> Iterator[World]:
    """The daemon with its things; `client` ends its sessions."""
    with requests.Session() as sender:
        yield World(client, sender)
        for each in client.get("/v1/workspaces").json()["workspaces"]:
            client.delete(f"/v1/workspaces/{each['id']}?force=true")


def aim(case: Any, ids: dict[str, str], data: st.DataObject) -> None:
    """Let a request (of a body of any type) be for what is there."""
    case.path_parameters |= {name: ids[name] for name in case.path_parameters if name in ids}
    if case.operation.path.endswith(("archive", "import")) and isinstance(case.body, bytes):
        case.body = data.draw(st.sampled_from((ARCHIVE, ARCHIVE[:700], case.body)))
    body = case.body if isinstance(case.body, dict) else {}
    for fields in (case.query, body):
        for name in list(fields):
            if name in FIELDS and fields[name] is not None:
                fields[name] = data.draw(FIELDS[name])
            elif name in HINDRANCES:
                del fields[name]
    for each in body.get("edits") or ():
        each["path"] = data.draw(FIELDS["path"])
        each.pop("if_match", None)
    described = case.operation.definition.raw.get("requestBody", {}).get("content", {}).get("application/json")
    component = "" if described is None else described["schema"].get("$ref", "").rpartition("/")[2]
    if group := ALTERNATIVES.get(component):
        for name in group:
            body.pop(name, None)
        chosen = data.draw(st.sampled_from(sorted(group)))
        body[chosen] = data.draw(group[chosen])


@pytest.mark.parametrize("tag", TAGS)
def test_every_answer_is_described(world: World, tag: str) -> None:
    """Any request gets an answer that is described and not 500."""
    found = []
    world.mend()
    for name, operation in operations().items():
        if operation.definition.raw["tags"] == [tag] and ONLY in name:
            try:
                ask(world, operation)
            except Exception as fault:  # noqa: BLE001 - the others are tried as well
                found.append(f"{name}: {fault}\n{' '.join(getattr(fault, '__notes__', ()))}")
            if operation.method != "get":
                world.mend()
    assert found == [], "\n\n".join(found)


def ask(world: World, operation: Any) -> None:  # of a type without a public name
    """Send the examples of one operation. Raises what schemathesis finds, and AssertionError for 500."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    ids = world.ids["workspaces" if operation.path.startswith("/v1/workspaces") else "sessions"]
    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    broken = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

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
        is_valid = data.draw(st.integers(0, 2)) < 2
        case = data.draw(valid if is_valid else broken)
        if is_valid and data.draw(st.integers(0, 3)) < 3:
            aim(case, ids, data)
        answer = world.send(case)
        assert answer.status_code != 500, case.as_curl_command()
        if operation.path != "/mcp":  # whose protocol has errors of its own
            case.validate_response(answer, checks=[getattr(checks, each) for each in CHECKS])

    answers_are_described()
