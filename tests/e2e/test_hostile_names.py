"""Every field and every segment of a URL that names something, given names that climb: refused, and nothing touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests import canary
from tests.e2e.daemon import Daemon

CLIMBERS = ("../outside", "../../outside", "..", ".", "/etc/passwd", "a/../../outside", "a\0b", "outside\n", "x" * 5000)
MORE = ("", "%2e%2e", "~root", "$(id)", "é", "\u202e", "-rf", "*", "a b")

URLS = (
    *("GET {}", "PATCH {}", "DELETE {}", "GET {}/stats", "POST {}/exec", "GET {}/execs", "GET {}/events"),
    *("POST {}/shells", "POST {}/processes", "GET {}/ports", "GET {}/fs/read?path=a", "POST {}/fs/write"),
    *("GET SESSION/execs/{}", "GET SESSION/execs/{}/output", "POST SESSION/execs/{}/cancel"),
    *("GET SESSION/processes/{}", "GET SESSION/processes/{}/logs", "DELETE SESSION/processes/{}"),
    *("DELETE SESSION/shells/{}", "POST SESSION/processes/{}/kill"),
)

FIELDS: dict[str, tuple[str, str, dict[str, object]]] = {
    "image": ("", "image", {}),
    "workspace": ("", "workspace_id", {}),
    "shell of a session": ("", "shell", {}),
    "shell of a command": ("/SESSION/exec", "shell", {"cmd": "true"}),
    "user of a command": ("/SESSION/exec", "user", {"cmd": "true", "mode": "stateless"}),
    "new shell": ("/SESSION/shells", "name", {}),
}


@pytest.fixture(scope="module")
def outside(daemon: Daemon) -> Iterator[Path]:
    """A tree beside the directories of sessions, images and workspaces."""
    with canary.untouched(daemon.data_dir / "outside") as root:
        yield root


@pytest.fixture
def session(client: httpx.Client, outside: Path) -> str:
    identifier = client.post("/v1/sessions", json={}).json()["id"]
    assert isinstance(identifier, str)
    return identifier


def _refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    assert answer.json()["error_code"], answer.text[:300]
    assert "kept" not in answer.text


def _directories(root: Path) -> dict[str, list[str]]:
    return {name: sorted(os.listdir(root / name)) for name in ("images", "workspaces", "sessions", "run")}


def test_no_segment_of_a_url_leads_elsewhere(daemon: Daemon, client: httpx.Client, session: str, outside: Path) -> None:
    """A hostile name in the place of any id, on every route, is refused typed; no directory is made or removed."""
    before = _directories(daemon.data_dir)
    for url in URLS:
        method, path = url.replace("SESSION", session).split(" ", 1)
        for name in (*CLIMBERS, *(each for each in MORE if each)):
            segment = quote(name, safe="").replace(".", "%2e")
            body = {"cmd": "true", "path": "a", "text": "", "name": "n"} if method == "POST" else None
            _refused(client.request(method, f"/v1/sessions/{path.format(segment)}", json=body))
    assert _directories(daemon.data_dir) == before
    assert client.get(f"/v1/sessions/{session}").json()["status"] == "running"


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_that_names_something_leads_elsewhere(
    daemon: Daemon, client: httpx.Client, session: str, outside: Path, field: str
) -> None:
    """A hostile name in any field is refused with the name of the field or the kind of thing; nothing is made."""
    url, name, rest = FIELDS[field]
    before = _directories(daemon.data_dir)
    for value in (*CLIMBERS, *MORE, str(outside), f"../../../..{outside}"):
        _refused(client.post(f"/v1/sessions{url.replace('SESSION', session)}", json={**rest, name: value}))
    assert _directories(daemon.data_dir) == before
    answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo fine"}).json()
    assert answer["output"] == "fine\n"


def test_no_path_of_a_file_leads_out_of_the_session(client: httpx.Client, session: str, outside: Path) -> None:
    """A file's path leads out of the session neither by climbing, nor by the host's own path, through PID 1's root, or
    through a link that the session made.
    """
    link = f"ln -s {outside} /workspace/link; ln -s / /workspace/root; ln -s /proc/1/root /workspace/init"
    client.post(f"/v1/sessions/{session}/exec", json={"cmd": link})
    climbing = "../" * 12 + str(outside).lstrip("/")
    starts = (climbing, str(outside), f"/proc/1/root{outside}", "link", f"root{outside}", f"init{outside}")
    paths = [f"{start}/{end}" for start in starts for end in ("etc/passwd", "root/key", "new")]
    for path in paths:
        _refused(client.get(f"/v1/sessions/{session}/fs/read", params={"path": path}))
    for path in paths:  # the session has a directory for such names of its own: `/tmp`, say
        written = client.post(f"/v1/sessions/{session}/fs/write", json={"path": path, "text": "overwritten"})
        assert written.status_code < 500, written.text
        assert not (outside / "new").exists()


NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "-0.0", "1e308", "9" * 400, "18446744073709551616"),
    *('"1"', "[]", "{}", "true"),
)


@pytest.mark.parametrize("field", ["cpu", "memory_mb", "pids", "disk_mb"])
def test_a_limit_that_is_no_limit_is_refused(client: httpx.Client, session: str, field: str) -> None:
    """A value that is no limit, sent as raw bytes, is refused at create and at change; the session keeps its limits."""
    headers = {"Content-Type": "application/json"}
    before = client.get(f"/v1/sessions/{session}").json()["limits"]
    for number in NUMBERS:
        body = f'{{"limits": {{"{field}": {number}}}}}'
        _refused(client.post("/v1/sessions", content=body, headers=headers))
        _refused(client.patch(f"/v1/sessions/{session}", content=body, headers=headers))
    assert client.get(f"/v1/sessions/{session}").json()["limits"] == before
