"""nsinit as a service, and a daemon that was never root: who may connect, and what each restart leaves alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import SCRIPT, Daemon, create_patiently, running_daemon
from tests.e2e.test_privilege import children, denied, egress_processes_of, must_end, status_of, uid_of
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "sandkasten/cli/systemd/sandkasten-nsinit.service"

UNPRIVILEGED = """
import os, sys
sys.path.append({root!r})
from nsinit.tools.drop import drop_privilege
from sandkasten.host.account import find_account
account = find_account("auto")
drop_privilege(account.uid, account.gid, keep_reachable=[{root!r}, sys.prefix, sys.base_prefix, {data!r}])
os.execv({script!r}, [{script!r}, *sys.argv[1:]])
"""


def unit_capabilities() -> list[str]:
    """Return what the unit leaves the service, as setpriv(1) wants it."""
    lines = re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
    return [name.removeprefix("CAP_").lower() for line in lines for name in line.split()]


class Service:
    """A running `sandkasten nsinit`, with the capabilities of its unit and no more."""

    def __init__(self, data_dir: Path, path: Path) -> None:
        self.path = path
        held = int(status_of("self")["CapBnd"], 16)
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
        names = [name for name in unit_capabilities() if _number(name) <= last and held >> _number(name) & 1]
        kept = ",".join(["-all", *(f"+{name}" for name in names)])
        command = ["setpriv", "--no-new-privs", "--bounding-set", kept, "--inh-caps", kept]
        command += [str(SCRIPT), "nsinit", "--data-dir", str(data_dir), "--listen", str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "listening on" in self.process.stdout.readline()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(patience(30))
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def _number(name: str) -> int:
    done = subprocess.run(["setpriv", "--list-caps"], capture_output=True, text=True, check=True)
    return done.stdout.split().index(name)


@contextlib.contextmanager
def running_service(data_dir: Path, path: Path) -> Iterator[Service]:
    service = Service(data_dir, path)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()


@contextlib.contextmanager
def running_unprivileged(data_dir: Path, path: Path) -> Iterator[Daemon]:
    """A daemon that is started as the daemon's user: root was gone before its first line ran."""
    code = UNPRIVILEGED.format(root=str(ROOT), data=str(data_dir), script=str(SCRIPT))
    launcher = [sys.executable, "-c", code]
    with running_daemon(data_dir, launcher=launcher, SANDKASTEN_NSINIT_SOCKET=str(path)) as daemon:
        yield daemon


@pytest.fixture
def path(data_dir: Path) -> Iterator[Path]:
    """A socket in a directory of root's that all may enter, as below `/run`."""
    directory = data_dir.with_name(f"{data_dir.name}-socket")
    directory.mkdir(mode=0o755)
    yield directory / "nsinit.sock"
    (directory / "nsinit.sock").unlink(missing_ok=True)
    directory.rmdir()


def test_restarts_of_either_leave_sessions_running(data_dir: Path, path: Path) -> None:
    """Sessions run on when the service restarts under a daemon that goes on, and when the daemon is killed and its
    successor connects.
    """
    with (
        running_service(data_dir, path) as first,
        running_unprivileged(data_dir, path) as daemon,
        daemon.client() as client,
    ):
        session = client.post("/v1/sessions", json={}).json()["id"]
        assert run(client, session, "kept=1; echo $kept") == "1\n"
        assert status_of(daemon.process.pid)["CapBnd"] == f"{0:016x}"
        assert first.stop() == 0
        assert run(client, session, "echo $((kept += 1))") == "2\n"
        with running_service(data_dir, path) as second:
            create_patiently(client)
            assert run(client, session, "echo $((kept += 1))") == "3\n"
            daemon.process.kill()
            daemon.process.wait()
            with running_unprivileged(data_dir, path) as successor, successor.client() as again:
                assert run(again, session, "echo $((kept += 1))") == "4\n"
                assert successor.stop() == 0
            assert second.stop() == 0
    assert list((data_dir / "sessions").iterdir()) == []


def run(client: httpx.Client, session: str, command: str) -> str:
    answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": command})
    return str(answer.json()["output"])


def test_a_killed_service_leaves_the_daemon_its_nsinit(data_dir: Path, path: Path) -> None:
    """After kill -9 of the service's launcher the daemon's nsinit goes on; the next launcher serves the next daemon."""
    with (
        running_service(data_dir, path) as first,
        running_daemon(data_dir, SANDKASTEN_NSINIT_SOCKET=str(path)) as daemon,
        daemon.client() as client,
    ):
        assert client.post("/v1/sessions", json={}).status_code == 201
        assert uid_of(daemon) > 0
        (nsinit,) = children(first.process.pid)
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        assert client.post("/v1/sessions", json={}).status_code == 201
        with running_service(data_dir, path), must_end(nsinit):
            os.kill(nsinit, signal.SIGKILL)
            create_patiently(client)
            assert daemon.stop() == 0
    assert list((data_dir / "sessions").iterdir()) == []


def test_its_launcher_starts_the_egress_process(data_dir: Path, path: Path) -> None:
    """A session of a daemon that was never root has a way out. Its process is touched neither by a restart of the
    service nor by a killed daemon; after its end the launcher of the day starts another.
    """
    with (
        running_service(data_dir, path) as first,
        running_unprivileged(data_dir, path) as daemon,
        daemon.client() as client,
    ):
        session = client.post("/v1/sessions", json={"network": "open"}).json()["id"]
        assert denied(client, session) == ["10.0.0.1:80"]
        (egress,) = egress_processes_of(first.process.pid)
        assert status_of(egress)["CapPrm"] == f"{0:016x}"
        assert first.stop() == 0
        with running_service(data_dir, path) as second:
            create_patiently(client)
            assert denied(client, session) == ["10.0.0.1:80"]
            with must_end(egress):
                os.kill(egress, signal.SIGKILL)
            assert denied(client, session) == ["10.0.0.1:80"]
            follower = egress_processes_of(second.process.pid)
            daemon.process.kill()
            daemon.process.wait()
            with running_unprivileged(data_dir, path) as successor, successor.client() as again:
                assert denied(again, session) == ["10.0.0.1:80"]
                assert egress_processes_of(second.process.pid) == follower
                with must_end(*follower):
                    assert successor.stop() == 0
