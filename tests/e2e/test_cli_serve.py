"""`sandkasten serve` where it can't serve: one sentence, no traceback. What works is in `test_daemon_life.py`."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

EXIT_S = 30


def refusal(data_dir: Path, *arguments: str, **environment: str) -> str:
    """Start a daemon that must refuse, and return the one line for people that it leaves on stderr."""
    with running_daemon(data_dir, *arguments, **environment) as daemon:
        assert daemon.process.wait(patience(EXIT_S)) == 1
    assert not any(line.startswith("listening") for line in daemon.printed)
    (line,) = [line for line in daemon.log if not line.startswith("{")]
    return line


def test_a_port_in_use_is_one_sentence(data_dir: Path) -> None:
    """A port in use ends the start; the message names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert place in refusal(data_dir, "--listen", place)


def test_a_misspelt_variable_is_one_sentence(data_dir: Path) -> None:
    """A misspelt variable ends the start before anything is made; the message names the nearest known variable."""
    assert "SANDKASTEN_SECCOMP" in refusal(data_dir, SANDKASTEN_SECOMP="off")
    assert list(data_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_stops_it_in_good_order(data_dir: Path, number: signal.Signals) -> None:
    """Each stop signal, that of a closed terminal included, ends the daemon with status 0 and without a sandbox
    left.
    """
    options = ["--stop-sessions"] if number is signal.SIGTERM else []
    with running_daemon(data_dir, *options) as daemon, daemon.client() as client:
        assert client.post("/v1/sessions").status_code == 201
        assert daemon.stop(number) == 0
        assert f"{number.name}: stopping; sessions are ended" in daemon.printed
    assert list((data_dir / "sessions").iterdir()) == []


def secrets_told(daemon: Daemon, key: str) -> list[str]:
    process = Path(f"/proc/{daemon.process.pid}")
    places = {name: (process / name).read_text(errors="replace") for name in ("cmdline", "environ")}
    places["stdout"], places["stderr"] = "\n".join(daemon.printed), "\n".join(daemon.log)
    return [name for name, text in places.items() if key in text]


def test_a_made_key_is_told_nowhere(data_dir: Path) -> None:
    """A key that the start made is neither in the output, nor in the log, the arguments or the environment of the
    process.
    """
    with running_daemon(data_dir, SANDKASTEN_API_KEY="") as daemon:
        daemon.wait_url()
        assert secrets_told(daemon, (data_dir / "api-key").read_text().strip()) == []


def test_logs_are_json_lines(data_dir: Path) -> None:
    """From start to stop every line on stderr is one object with a level."""
    with running_daemon(data_dir) as daemon:
        daemon.wait_url()
        assert daemon.stop() == 0
    assert {json.loads(line)["level"] for line in daemon.log} == {"info"}
    assert not any(KEY in line for line in daemon.log)
