"""API keys of a real daemon: made, used, revoked with the command line, across restarts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from sandkasten.host.paths import DataPaths
from tests.e2e.daemon import Daemon, running_daemon
from tests.e2e.seed import completed
from tests.waiting import patience

REVOKED_WITHIN_S = 2.0


def key(data_dir: Path, *arguments: str) -> str:
    """Run `sandkasten key` and return what it prints."""
    done = completed("key", *arguments, "--data-dir", data_dir, timeout_s=patience(30), text=True)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


def client_of(daemon: Daemon, token: str) -> httpx.Client:
    return httpx.Client(
        base_url=daemon.wait_url(), headers={"Authorization": f"Bearer {token}"}, timeout=patience(30.0)
    )


def wait_status(client: httpx.Client, status: int) -> float:
    """Ask until the answer has that status; return how long that took."""
    began = time.monotonic()
    while client.get("/v1/sessions").status_code != status:
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_key_lives_from_the_command_line_to_its_revocation(data_dir: Path) -> None:
    """A key made before the first start or while the daemon runs survives a restart; a revoked key ends at once, with
    its open streams. The daemon's user can read the file of keys and not write it.
    """
    early = key(data_dir, "create", "--name", "early")
    with running_daemon(data_dir) as daemon, client_of(daemon, early) as client:
        assert client.get("/v1/sessions").json() == []
        late = key(data_dir, "create", "--name", "late", "--label", "team=a")
        with client_of(daemon, late) as other:
            assert wait_status(other, 200) < patience(REVOKED_WITHIN_S)
            assert other.get("/v1/node").json()["error_code"] == "FORBIDDEN"
        found = DataPaths(data_dir).keys.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, data_dir.stat().st_gid, 0o640)
        assert found.st_gid != 0
        log = daemon.log
    assert not [line for line in log if early in line or late in line]
    with running_daemon(data_dir) as daemon, client_of(daemon, early) as client, client_of(daemon, late) as other:
        with client.stream("GET", "/v1/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": ping"
            began = time.monotonic()
            key(data_dir, "revoke", "early")
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
            assert time.monotonic() - began < patience(REVOKED_WITHIN_S + 2)  # the command's own start included
        assert client.get("/v1/sessions").status_code == 401
        assert other.get("/v1/sessions").json() == []
        with daemon.client() as configured:
            assert configured.get("/v1/sessions").status_code == 200
