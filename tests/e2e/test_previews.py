"""A preview of a daemon that gave root away: the gateway comes from its launcher, as a user of its own."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx

from egress.protocol import GATEWAY_ID
from tests.e2e.daemon import create_patiently, running_daemon
from tests.e2e.test_privilege import NOTHING, children, status_of
from tests.waiting import patience

SERVE = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "8000"]


def test_a_gateway_of_the_launcher_serves_previews(data_dir: Path) -> None:
    """The gateway has no capability and takes no program; a client reaches the server inside with the link alone."""
    with running_daemon(data_dir, SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0") as daemon, daemon.client() as client:
        session = f"/v1/sessions/{create_patiently(client)}"
        started = client.post(f"{session}/processes", json={"argv": SERVE}).raise_for_status().json()
        waited = {"port": 8000, "timeout_ms": round(patience(30_000))}
        client.post(
            f"{session}/processes/{started['exec_id']}/wait", json=waited, timeout=patience(60)
        ).raise_for_status()
        opened = client.post(f"{session}/previews", json={"port": 8000}).raise_for_status().json()
        name = urlsplit(opened["url"]).netloc
        with httpx.Client(
            base_url=f"http://127.0.0.1:{urlsplit(opened['url']).port}", headers={"Host": name}
        ) as browser:
            assert browser.get("/").status_code == 401
            linked = browser.get(f"/?_sandkasten_token={opened['token']}", timeout=patience(30))
            assert (linked.status_code, linked.headers["location"]) == (303, opened["url"])
            cookie = linked.headers["set-cookie"].partition(";")[0]
            assert "Directory listing" in browser.get("/", headers={"Cookie": cookie}, timeout=patience(30)).text
        (launcher,) = children(daemon.process.pid)
        (gateway,) = [pid for pid in children(launcher) if status_of(pid)["Uid"].split()[0] == str(GATEWAY_ID)]
        status = status_of(gateway)
        assert {status[each] for each in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {NOTHING}
        assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")
