"""A stop by SIGTERM: requests in flight may end, no new command or session begins, and sessions run on for the next
start.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon, running_daemon
from tests.waiting import patience

PATIENCE_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again, for a while, at what another process changes."""
    pause = threading.Event()
    for _ in range(round(patience(PATIENCE_S) / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it never came to that")


def run(client: httpx.Client, session: str, command: str) -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/exec", json={"cmd": command})


def wait_running(client: httpx.Client, session: str) -> str:
    """Wait until a command of the session runs, and return its id."""
    running: list[str] = []

    def is_running() -> bool:
        execs = client.get(f"/v1/sessions/{session}/execs").json()["execs"]
        running.extend(each["exec_id"] for each in execs if each["state"] == "running")
        return bool(running)

    wait_until(is_running)
    return running[0]


def wait_stopping(daemon: Daemon) -> None:
    wait_until(lambda: any("stopping" in line for line in daemon.printed))


def test_sigterm_lets_commands_end_and_leaves_sessions_to_the_next_start(data_dir: Path) -> None:
    """During a stop the caller of a running command gets its answer; creates and new commands are refused as retryable;
    other requests are served. The next daemon has the session with its shell.
    """
    with running_daemon(data_dir) as first, first.client() as client, ThreadPoolExecutor() as threads:
        session = client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"]
        run(client, session, "kept=alive")
        waiting = threads.submit(run, client, session, "sleep 1000; echo finished")
        exec_id = wait_running(client, session)
        first.process.send_signal(signal.SIGTERM)
        wait_stopping(first)
        refused = [client.post("/v1/sessions", json={}), run(client, session, "echo never")]
        assert [(each.status_code, each.json()["retryable"]) for each in refused] == [(503, True)] * 2
        assert all(int(each.headers["retry-after"]) > 0 for each in refused)
        assert client.get("/v1/node").json()["status"] == "draining"
        client.post(f"/v1/sessions/{session}/execs/{exec_id}/signal", json={"signal": "TERM"}).raise_for_status()
        answer = waiting.result(patience(PATIENCE_S))
        assert answer.status_code == 200
        assert answer.json()["output"].endswith("finished\n")
        assert first.process.wait(patience(PATIENCE_S)) == 0
        assert "SIGTERM: stopping; sessions run on" in first.printed
    with running_daemon(data_dir) as second, second.client() as client:
        assert run(client, session, "echo $kept").json()["output"] == "alive\n"


def test_a_command_that_outlasts_the_deadline_is_answered_all_the_same(data_dir: Path) -> None:
    """A command that outlasts the deadline goes on without its caller, who gets a retryable 503."""
    environment = {"SANDKASTEN_SERVER_DRAIN_TIMEOUT_S": "0.3"}
    with running_daemon(data_dir, **environment) as first, first.client() as client, ThreadPoolExecutor() as threads:
        session = client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"]
        waiting = threads.submit(run, client, session, "echo begun; sleep 1000")
        wait_running(client, session)
        assert first.stop(signal.SIGTERM) == 0
        answer = waiting.result(patience(PATIENCE_S))
        assert (answer.status_code, answer.json()["retryable"]) == (503, True), answer.text
    with running_daemon(data_dir) as second, second.client() as client:
        assert client.get(f"/v1/sessions/{session}").json()["status"] == "running"


def test_a_second_signal_ends_it_at_once_and_sessions_run_on(data_dir: Path) -> None:
    """A second signal ends the daemon without waiting for any caller; the next daemon adopts the sessions."""
    with running_daemon(data_dir) as first, first.client() as client, ThreadPoolExecutor() as threads:
        session = client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"]
        waiting = threads.submit(run, client, session, "sleep 1000")
        wait_running(client, session)
        first.process.send_signal(signal.SIGTERM)
        wait_stopping(first)
        wait_until(lambda: client.get("/v1/node").json()["status"] == "draining")
        assert first.stop(signal.SIGTERM) == -signal.SIGTERM
        assert isinstance(waiting.exception(patience(PATIENCE_S)), httpx.HTTPError)
    with running_daemon(data_dir) as second, second.client() as client:
        assert client.get(f"/v1/sessions/{session}").json()["status"] == "running"


def test_a_stop_while_it_starts_ends_it_soon(data_dir: Path) -> None:
    """A daemon that is waiting for the nsinit service, which is not there, is stopped by a signal with status 0 and no
    error.
    """
    with running_daemon(data_dir, SANDKASTEN_NSINIT_SOCKET=str(data_dir / "no.sock")) as daemon:
        wait_until((data_dir / "sandkasten.db").exists)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(patience(PATIENCE_S)) == 0
        assert not any('"level": "error"' in line for line in daemon.log)
