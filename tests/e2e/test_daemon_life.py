"""The daemon as a process: what it prints, how it stops, and what is left after each kind of end."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from importlib import resources
from pathlib import Path

import httpx
import pytest

from tests import leaks
from tests.e2e import seed
from tests.e2e.daemon import KEY, SCRIPT, running_daemon
from tests.waiting import patience


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--stop-sessions",))], ids=["ctrl-c", "told-to"]
)
def test_a_stop_ends_sessions_and_leaves_nothing(
    data_dir: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    """No process, cgroup, mount or session file outlives a Ctrl-C (the leak check looks at the rest)."""
    with running_daemon(data_dir, *options) as daemon, daemon.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        client.post(f"/v1/sessions/{session}/exec", json={"cmd": "sleep 1000 & disown"})
        assert daemon.stop(number) == 0
    for name in ("sessions", "run", "trash"):
        assert list((data_dir / name).iterdir()) == []


def test_the_printed_curl_line_works_when_pasted(data_dir: Path) -> None:
    """A new user's first request, by a shell, with the key that was made on the first start."""
    with running_daemon(data_dir, SANDKASTEN_API_KEY="") as daemon:
        daemon.wait_url()
        key_file = data_dir / "api-key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        line = daemon.wait_printed(r"^\s*curl")
        assert key_file.read_text().strip() not in "\n".join(daemon.printed + daemon.log)
        done = subprocess.run(
            ["bash", "-c", line.strip()], capture_output=True, text=True, timeout=patience(30), check=False
        )
        assert '"status"' in done.stdout, done.stderr


def test_sessions_survive_a_killed_daemon_and_the_next_one_serves_them(data_dir: Path) -> None:
    """After kill -9 of the daemon the sandbox runs on, the next daemon has it with its shell state, and its stop leaves
    nothing.
    """
    with running_daemon(data_dir) as first, first.client() as client:
        session = client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"]
        client.post(f"/v1/sessions/{session}/exec", json={"cmd": "kept=alive; cd /tmp"})
        first.process.kill()
        first.process.wait()
    with running_daemon(data_dir) as second, second.client() as client:
        assert client.get(f"/v1/sessions/{session}").json()["status"] == "running"
        answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo $kept; pwd"}).json()
        assert answer["output"] == "alive\n/tmp\n"
        assert client.delete(f"/v1/sessions/{session}").json() == {"ok": True}
        assert second.stop() == 0


def test_a_session_whose_processes_died_with_the_machine_is_lost_and_cleaned_up(data_dir: Path) -> None:
    """After a reboot the record remains, the kernel has nothing; its files go and the state says so."""
    with running_daemon(data_dir) as first, first.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        first.process.kill()
        first.process.wait()
    for pid, name in leaks.descendants(os.getpid()):
        if name != seed.NAME:
            with contextlib.suppress(ProcessLookupError):  # the process went with its PID 1
                os.kill(pid, signal.SIGKILL)
    with running_daemon(data_dir) as second, second.client() as client:
        assert client.get(f"/v1/sessions/{session}").json()["status"] == "lost"
        second.stop()
    assert list((data_dir / "sessions").iterdir()) == []


def test_ignored_signals_of_the_daemon_are_not_handed_down(data_dir: Path) -> None:
    """Started by nohup or with `&`, a daemon ignores SIGHUP, SIGINT and SIGQUIT; commands must not."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        executed = running_daemon(data_dir, "--stop-sessions", launcher=[str(SCRIPT)])
        with executed as daemon, daemon.client() as client:
            session = client.post("/v1/sessions", json={}).json()["id"]
            body = {"cmd": "grep -E '^Sig(Blk|Ign)' /proc/self/status"}
            output = client.post(f"/v1/sessions/{session}/exec", json=body).json()["output"]
            daemon.stop(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert output == "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"


def test_a_unix_socket_serves_beside_tcp_and_is_private(data_dir: Path) -> None:
    """The Unix socket has mode 0600 and is gone after the stop."""
    path = data_dir / "api.sock"
    with running_daemon(data_dir, "--listen", f"unix:{path}") as daemon:
        daemon.wait_url()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/healthz").status_code == 200
            answer = client.get("/v1/sessions", headers={"Authorization": f"Bearer {KEY}"})
            assert answer.json() == []
        daemon.stop()
    assert not path.exists()


def test_a_second_daemon_on_the_same_data_is_refused_with_a_sentence(data_dir: Path) -> None:
    """One line that says what is wrong, and exit status 1."""
    with running_daemon(data_dir) as first:
        first.wait_url()
        with running_daemon(data_dir) as second:
            assert second.process.wait(patience(30)) == 1
            assert any("another daemon" in line for line in second.log)


def test_a_pytest_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The guardian ends what a killed test run started: daemon, fork server, sandboxes, cgroups, directories."""
    script = tmp_path / "run_and_die.py"
    script.write_text(
        "import os, signal, tempfile\n"
        "from pathlib import Path\n"
        "from tests.e2e.daemon import running_daemon\n"
        "with running_daemon(Path(tempfile.mkdtemp(prefix='sandkasten-test-'))) as daemon:\n"
        "    with daemon.client() as client:\n"
        "        print(client.post('/v1/sessions', json={}).json()['id'], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    python = sys.executable
    done = subprocess.run(
        [python, str(root / "tests/guardian.py"), python, str(script)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert len(done.stdout.strip()) == 24, done.stderr
    assert done.returncode == 128 + signal.SIGKILL


OLD_SESSION = (
    "INSERT INTO sessions (id, status, image, cwd, created_at, expires_at, last_activity, ended_at, ttl_s, limits, "
    "labels, options, acquire_source, reason, ending, epoch, incarnation, is_busy, spec_digest) "
    "VALUES (?, ?, 'python', '/workspace', 1000, 2800, 1000, ?, 1800, '{}', "
    """'{"by": "old"}', '{}', 'cold', ?, ?, 1, 1, 0, 'digest')"""
)


def test_a_daemon_serves_what_the_first_version_stored(data_dir: Path) -> None:
    """A database of schema 1, with one ended session and one that was running: any later daemon answers for both."""
    ended, running = "e" * 24, "a" * 24
    schema = resources.files("sandkasten.store").joinpath("migrations/0001.sql").read_text("utf-8")
    with contextlib.closing(sqlite3.connect(data_dir / "sandkasten.db", isolation_level=None)) as database:
        database.executescript(schema)
        database.execute("PRAGMA user_version=1")
        database.execute(OLD_SESSION, (ended, "destroyed", 2000, "destroyed by request", "destroy"))
        database.execute(OLD_SESSION, (running, "running", None, None, None))
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        found = {key: client.get(f"/v1/sessions/{key}").json() for key in (ended, running)}
        fresh = client.post("/v1/sessions", json={})
        assert fresh.status_code == 201
        assert daemon.stop() == 0
    assert {key: each["status"] for key, each in found.items()} == {ended: "destroyed", running: "lost"}
    assert all(each["labels"] == {"by": "old"} for each in found.values())
    assert {(each["network"]["mode"], each["network"]["revision"]) for each in found.values()} == {("none", 1)}
