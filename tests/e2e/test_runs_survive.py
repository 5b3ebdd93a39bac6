"""Runs outlive their daemon: killed at any moment, the next one knows every id, its output and its end."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.daemon import Daemon, running_daemon
from tests.waiting import patience

FLOOD_BYTES = 6_000_000
WAIT = "until [ -e go ]; do sleep 0.02; done"


class Api:
    """One session of a daemon, over HTTP."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self.client = client
        self.path = f"/v1/sessions/{session}"
        self._threads: list[threading.Thread] = []

    def exec(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.client.post(f"{self.path}/exec", json=body)
        found: dict[str, Any] = answer.json()
        return found

    def begin(self, exec_id: str, cmd: str, **more: Any) -> None:
        """Begin a command that goes on without its caller."""
        body = {"cmd": cmd, "exec_id": exec_id, **more}
        with self.client.stream("POST", f"{self.path}/exec/stream", json=body) as answer:
            assert answer.status_code == 200, answer.read()

    def wait_for(self, body: dict[str, Any]) -> None:
        """Have a thread wait for a command's end, as long as the daemon lives."""

        def wait() -> None:
            with contextlib.suppress(httpx.HTTPError):
                self.exec(body)

        thread = threading.Thread(target=wait)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(patience())

    def run(self, exec_id: str) -> dict[str, Any]:
        answer = self.client.get(f"{self.path}/execs/{exec_id}")
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, exec_id: str) -> dict[str, Any]:
        """Wait for a run's end and return it."""
        wait_until(lambda: self.run(exec_id)["state"] == "ended", exec_id)
        end: dict[str, Any] = self.run(exec_id)["end"]
        return end

    def output(self, exec_id: str, **query: Any) -> bytes:
        """Return all of a run's output."""
        found, at = b"", 0
        while True:
            url = f"{self.path}/execs/{exec_id}/output"
            answer = self.client.get(url, params={"offset": at, "encoding": "base64", **query})
            assert answer.status_code == 200, answer.text
            part = answer.json()
            found += base64.b64decode(part["content_base64"])
            if part["next_offset"] == at:
                return found
            at = part["next_offset"]


@contextlib.contextmanager
def daemon_with(data_dir: Path, session: str | None = None) -> Iterator[tuple[Daemon, Api]]:
    """A daemon and a session of it: a new one, or that of an earlier daemon."""
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        yield daemon, Api(client, session or client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"])


def kill(daemon: Daemon) -> None:
    daemon.process.kill()
    daemon.process.wait()


def wait_until(claim: Any, what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + patience()
    while not claim():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.02)


def is_running(argument: str) -> bool:
    """Tell whether some process has that argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def test_every_run_is_found_after_a_kill(data_dir: Path) -> None:
    """Streaming, blocking, queued and unread runs, a process, and output larger than a pipe: each is found as it really
    went on.
    """
    mark = f"0.7{os.getpid()}"
    with daemon_with(data_dir) as (first, api):
        api.client.post(f"{api.path}/shells", json={"name": "two"})
        api.client.post(f"{api.path}/shells", json={"name": "three"})
        assert api.exec({"cmd": "echo read; exit 3", "exec_id": "ended"})["exit_code"] == 3
        api.begin("stream", f"echo x >>count; echo one; echo two >&2; {WAIT}; echo three; exit 4")
        api.begin("unread", "echo unread; exit 6", shell="three")
        wait_until(lambda: api.run("unread")["state"] == "ended", "unread")
        api.wait_for({"cmd": "echo y >>count", "exec_id": "queued", "on_disconnect": "detach"})
        api.wait_for({"cmd": "echo begun; sleep 1000", "exec_id": "blocking", "shell": "two"})
        body = {"argv": ["sh", "-c", "echo up; read line; echo got $line"], "process_id": "proc"}
        assert api.client.post(f"{api.path}/processes", json=body).status_code == 201
        wait_until(lambda: api.output("stream") == b"one\ntwo\n", "stream")
        wait_until(lambda: api.output("blocking") == b"begun\n", "blocking")
        wait_until(lambda: api.run("queued")["state"] == "queued", "queued")
        flood = f"sleep {mark}; head -c {FLOOD_BYTES} /dev/zero | tr '\\0' x; exit 7"
        api.begin("flood", flood, mode="stateless")
        api.begin("meanwhile", f"sleep {mark}; echo late; exit 5", shell="three")
        kill(first)
        api.join()
    session = api.path.rpartition("/")[2]
    wait_until(lambda: not is_running(mark), "both slept enough")
    with daemon_with(data_dir, session) as (second, api):
        assert api.ended("meanwhile")["exit_code"] == 5
        assert api.output("meanwhile") == b"late\n"
        assert api.ended("flood")["exit_code"] == 7
        assert api.output("flood") == b"x" * FLOOD_BYTES
        assert (api.ended("ended")["exit_code"], api.output("ended")) == (3, b"read\n")
        assert (api.ended("unread")["exit_code"], api.output("unread")) == (6, b"unread\n")
        assert api.ended("queued")["cause"] == "daemon_restarted"
        assert (api.ended("blocking")["cause"], api.output("blocking")) == ("daemon_restarted", b"begun\n")
        assert api.run("stream")["state"] == "running"
        kill(second)
    with daemon_with(data_dir, session) as (third, api):
        answer = api.client.post(f"{api.path}/execs/proc/stdin", json={"text": "line\n"})
        assert answer.json() == {"ok": True}
        assert (api.ended("proc")["exit_code"], api.output("proc")) == (0, b"up\ngot line\n")
        again = {"cmd": "echo read; exit 3", "exec_id": "ended"}
        assert (api.exec(again)["output"], api.exec(again)["exit_code"]) == ("read\n", 3)
        assert api.exec({"cmd": "echo other", "exec_id": "ended"})["error_code"] == "CONFLICT"
        assert api.run("blocking")["end"]["cause"] == "daemon_restarted"
        api.exec({"argv": ["touch", "go"]})
        script = f"echo x >>count; echo one; echo two >&2; {WAIT}; echo three; exit 4"
        whole = api.exec({"cmd": script, "exec_id": "stream", "output_fields": ["stdout", "stderr"]})
        assert (whole["exit_code"], whole["stdout"], whole["stderr"]) == (4, "one\nthree\n", "two\n")
        assert api.exec({"cmd": "cat count"})["output"] == "x\n"
        assert api.client.delete(api.path).json() == {"ok": True}
        wait_until(lambda: not list((data_dir / "spool").iterdir()), "nothing of the runs is left")
        assert third.stop() == 0
