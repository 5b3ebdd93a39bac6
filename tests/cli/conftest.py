"""The real `sandkasten` command: forked from a seed and run to its end, or executed on a pseudo-terminal where a test
plays the person; and one daemon for each file of tests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.archives import lent_data_dir
from tests.e2e import seed
from tests.e2e.daemon import SCRIPT, Daemon, running_daemon
from tests.waiting import patience

_WAIT_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def seeded(command_seed: None) -> None:
    """Start daemons and verbs from seeds."""


@attrs.frozen
class Command:
    """The command in an environment of its own, that finds the daemon of one data directory."""

    environment: Mapping[str, str]
    cwd: Path

    @classmethod
    def of(cls, home: Path, data_dir: Path | None = None, /, **variables: str) -> Command:
        """Return the command for a person whose home is `home`, and nothing of this process's settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SANDKASTEN_", "XDG_"))}
        kept |= {"HOME": str(home), "TERM": "xterm-256color"} | variables
        kept.pop("NO_COLOR", None)
        if data_dir is not None:
            kept["SANDKASTEN_DATA_DIR"] = str(data_dir)
        return cls(kept, home)

    def run(self, *arguments: str | Path, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        """Run a verb to its end, with a text as its standard input."""
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = seed.completed(*arguments, given=given, timeout_s=patience(60), env=self.environment, cwd=self.cwd)
        out, err = (each.decode("utf-8", "surrogateescape") for each in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def out(self, *arguments: str | Path, stdin: str = "") -> str:
        """Return what a verb prints, which must succeed and complain of nothing."""
        done = self.run(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Return the one JSON object that a verb prints."""
        (found,) = self.lines(*arguments)
        return found

    def lines(self, *arguments: str) -> list[Any]:
        """Return the JSON objects that a verb prints, one a line."""
        words = arguments.index("--") if "--" in arguments else len(arguments)
        printed = self.out(*arguments[:words], "--json", *arguments[words:])
        return [json.loads(line) for line in printed.splitlines()]

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a verb with pipes; it is killed if it outlives the block."""
        pipe = subprocess.PIPE
        with seed.Command(
            arguments, env=self.environment, cwd=self.cwd, stdin=pipe, stdout=pipe, stderr=pipe
        ) as process:
            try:
                yield process
                process.wait(patience(_WAIT_S))
            finally:
                process.kill()

    @contextlib.contextmanager
    def terminal(self, *arguments: str, cols: int = 80, rows: int = 24) -> Iterator[Terminal]:
        """Start a verb on a terminal; it is killed if it outlives the block."""
        master, slave = pty.openpty()
        try:
            _set_size(slave, cols, rows)
            process = subprocess.Popen(
                [SCRIPT, *arguments],
                env=self.environment,
                cwd=self.cwd,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
            screen = Terminal(process, master, slave)
            try:
                yield screen
            finally:
                process.kill()
                process.wait()
                screen.close()
        finally:
            for fd in (master, slave):
                with contextlib.suppress(OSError):
                    os.close(fd)


def _set_size(fd: int, cols: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class Terminal:
    """A terminal with the command on it. `seen` is all that was drawn and read."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process = process
        self.seen = b""
        self._master, self._slave = master, slave
        self._before = termios.tcgetattr(slave)

    def type(self, text: str | bytes) -> None:
        """Press keys."""
        os.write(self._master, text.encode() if isinstance(text, str) else text)

    def type_some(self, keys: bytes, timeout_s: float) -> bool:
        """Press keys; return whether the terminal has taken them within the time."""
        return bool(select.select([], [self._master], [], timeout_s)[1]) and os.write(self._master, keys) == len(keys)

    def wait_for(self, pattern: str, *, after: int = 0) -> re.Match[bytes]:
        """Read the screen until it matches, behind its first `after` bytes."""
        deadline = time.monotonic() + patience(_WAIT_S)
        while (found := re.search(pattern.encode(), self.seen[after:])) is None:
            assert time.monotonic() < deadline, self.seen
            if not self.read(0.2) and self.process.poll() is not None and not self.read(0.2):
                found = re.search(pattern.encode(), self.seen[after:])
                assert found is not None, self.seen
                break
        return found

    def read(self, timeout_s: float) -> bytes:
        """Read what was drawn since."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return b""
        try:
            data = os.read(self._master, 65536)
        except OSError:
            data = b""
        self.seen += data
        return data

    def resize(self, cols: int, rows: int) -> None:
        """Change the window; the kernel sends SIGWINCH."""
        _set_size(self._slave, cols, rows)

    @property
    def is_raw(self) -> bool:
        """Whether the keyboard's bytes come unchanged and without echo."""
        return not termios.tcgetattr(self._slave)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    @property
    def is_restored(self) -> bool:
        """Whether the settings are those from before the command."""
        return bool(termios.tcgetattr(self._slave) == self._before)

    def wait_raw(self, *, is_raw: bool = True) -> None:
        """Wait until the command has made the terminal raw, or given it back."""
        deadline = time.monotonic() + patience(_WAIT_S)
        while self.is_raw != is_raw:
            assert time.monotonic() < deadline, self.seen
            assert self.process.poll() is None or not is_raw, self.seen
            self.read(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return the exit status of the command, reading what it draws until then."""
        deadline = time.monotonic() + patience(_WAIT_S)
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self.read(0.02)
        while self.read(0.0):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Hang up."""
        for fd in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(fd)


_PREVIEWS = {"SANDKASTEN_PREVIEW_LISTEN": "127.0.0.1:0", "SANDKASTEN_PREVIEW_PUBLISH": "127.0.0.1"}


@pytest.fixture(scope="module")
def daemon(images: Path) -> Iterator[Daemon]:
    """A daemon with a key of its own making, in its data directory."""
    with lent_data_dir(images) as directory, running_daemon(directory, SANDKASTEN_API_KEY="", **_PREVIEWS) as daemon:
        daemon.wait_url()
        yield daemon


@pytest.fixture(scope="module")
def command(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command of a person with an empty home, that finds the daemon by its data directory."""
    return Command.of(tmp_path_factory.mktemp("home"), daemon.data_dir)


@pytest.fixture
def api(daemon: Daemon) -> Iterator[httpx.Client]:
    """HTTP to the same daemon, for what a test needs beforehand; every session is gone afterwards."""
    headers = {"Authorization": f"Bearer {(daemon.data_dir / 'api-key').read_text().strip()}"}
    with httpx.Client(base_url=daemon.wait_url(), headers=headers, timeout=patience(60.0)) as client:
        yield client
        for each in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{each['id']}")


@pytest.fixture
def session(api: httpx.Client) -> str:
    """The id of a session with a label."""
    return str(api.post("/v1/sessions", json={"labels": {"kind": "shared"}}).json()["id"])
