"""Starts a daemon through its console script and talks to it; for tests that speak HTTP only."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx

KEY = "test-key-0123456789"
SCRIPT = Path(sys.executable).parent / "sandkasten"
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
        deadline = START_S / 0.02
        while deadline > 0:
            for line in list(self.printed):
                match = re.search(r"http://[\w.:\[\]]+", line)
                if match and "curl" not in line:
                    return match[0]
            if self.process.poll() is not None:
                break
            threading.Event().wait(0.02)
            deadline -= 1
        raise AssertionError("the daemon did not start:\n" + "\n".join([*self.printed, *self.log]))

    def client(self, **options: object) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.wait_url(), headers=headers, timeout=60.0)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(STOP_S)
        for reader in self._readers:
            reader.join(STOP_S)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGINT)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _collect(pipe: IO[str] | None, lines: list[str]) -> None:
    for line in pipe or ():
        lines.append(line.rstrip("\n"))


@contextlib.contextmanager
def running_daemon(data_dir: Path, *arguments: str, **environment: str) -> Iterator[Daemon]:
    """Start `sandkasten serve` on a free port; it is stopped afterwards if it still runs."""
    variables = {**os.environ, "SANDKASTEN_API_KEY": KEY, "SANDKASTEN_SERVER_VESSELS": "0", **environment}
    command = [str(SCRIPT), "serve", "--listen", "127.0.0.1:0", "--data-dir", str(data_dir), *arguments]
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    daemon = Daemon(process, data_dir)
    try:
        yield daemon
    finally:
        daemon.close()
