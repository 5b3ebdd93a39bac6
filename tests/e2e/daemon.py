"""Starts a daemon through its console script and talks to it; for tests that speak HTTP only."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from tests.api.described import assert_described
from tests.e2e.seed import SCRIPT as SCRIPT
from tests.e2e.seed import Command
from tests.waiting import patience

KEY = "test-key-0123456789"
REFUSED_CALL = re.compile("system[_ ]call[_ ]refused")
"""The event that a filter of a part of ours lacks a call."""
START_S = 30.0
STOP_S = 30.0


class Daemon:
    """A running daemon. `log` collects its standard error."""

    def __init__(self, process: subprocess.Popen[str], data_dir: Path) -> None:
        self.process, self.data_dir = process, data_dir
        self.printed: list[str] = []
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=_collect, args=(process.stdout, self.printed), daemon=True),
            threading.Thread(target=_collect, args=(process.stderr, self.log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_url(self) -> str:
        """Return the base URL it printed."""
        line = self._wait_line(self.printed, r"listening on (http://[\w.:\[\]]+)")
        return line[1]

    def wait_printed(self, pattern: str) -> str:
        """Wait until a printed line matches, and return the line."""
        return self._wait_line(self.printed, pattern).string

    def wait_log(self, pattern: str) -> None:
        """Wait until a line of the log matches."""
        self._wait_line(self.log, pattern)

    def _wait_line(self, lines: list[str], pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + patience(START_S)
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            for line in list(lines):
                if match := re.search(pattern, line):
                    return match
            if has_ended:
                break
            threading.Event().wait(0.02)
        raise AssertionError(f"no line matches {pattern}:\n" + "\n".join([*self.printed, *self.log]))

    def client(self, **options: object) -> httpx.Client:
        """Return a client whose answers must be described in `/openapi.json`."""
        return httpx.Client(
            base_url=self.wait_url(),
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=patience(60.0),
            event_hooks={"response": [assert_described]},
        )

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(patience(STOP_S))
        for reader in self._readers:
            reader.join(patience(STOP_S))
        return status

    def close(self) -> None:
        """Stop the daemon if it still runs; a daemon that does not stop is killed, which is a failure of the test."""
        try:
            if self.process.poll() is None:
                self.stop(signal.SIGINT)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            self.process.wait()
            raise AssertionError("it did not stop:\n" + "\n".join(self.log)) from error
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        refused = [line for line in self.log if REFUSED_CALL.search(line)]
        assert not refused, "\n".join(refused)


def create_patiently(client: httpx.Client) -> str:
    """Create a session and return its id. A create that meets the death of nsinit is refused, and says that it may be
    tried again."""
    deadline = time.monotonic() + patience(START_S)
    while (answer := client.post("/v1/sessions", json={})).status_code == 503 and answer.json()["retryable"]:
        assert time.monotonic() < deadline, answer.text
        threading.Event().wait(0.05)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _collect(pipe: IO[str] | None, lines: list[str]) -> None:
    with contextlib.suppress(ValueError):  # the pipe was closed meanwhile: a process that outlived the daemon held it
        for line in pipe or ():
            lines.append(line.rstrip("\n"))


@contextlib.contextmanager
def running_daemon(
    data_dir: Path, *arguments: str, launcher: Sequence[str] = (), **environment: str
) -> Iterator[Daemon]:
    """Start `sandkasten serve` on a free port, by the words of `launcher` instead of a seed; it is stopped afterwards
    if it still runs."""
    variables = {**os.environ, "SANDKASTEN_API_KEY": KEY, "SANDKASTEN_SERVER_POOL_SANDBOXES": "0", **environment}
    words = ["serve", "--listen", "127.0.0.1:0", "--data-dir", str(data_dir), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {"env": variables, "text": True, **pipes}
    process = subprocess.Popen([*launcher, *words], **options) if launcher else Command(words, **options)
    daemon = Daemon(process, data_dir)
    try:
        yield daemon
    finally:
        daemon.close()
