"""`sandkasten serve` where it can't serve: one sentence, no traceback. What works is in `test_daemon_life.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.daemon import KEY, SCRIPT, Daemon, running_daemon
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
    assert "SANDKASTEN_SECCOMP" in refusal(data_dir / "new", SANDKASTEN_SECOMP="off")
    assert not (data_dir / "new").exists()


def test_a_start_tells_what_weakens_it() -> None:
    """An address that other machines reach, here of a network of its own, and a data directory in memory."""
    launcher = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', str(SCRIPT))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sandkasten-test-") as memory,
        running_daemon(Path(memory), "--listen", "0.0.0.0:0", launcher=launcher) as daemon,
    ):
        daemon.wait_url()
        told = [line for line in daemon.printed if line.startswith("note: ")]
    assert [line for line in told if "listen: 0.0.0.0:0 is plain HTTP that other machines can reach" in line]
    assert [line for line in told if memory in line and "tmpfs" in line]


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


@pytest.mark.parametrize("broken", ["/dev/full", "a reader that left"])
def test_a_daemon_that_can_tell_nobody_its_address_serves_and_stops(data_dir: Path, broken: str) -> None:
    """Standard output on a full device, or into `head -1`: the log has the lines, and SIGTERM ends the daemon."""
    path = data_dir / "api.sock"
    if broken == "/dev/full":
        out = os.open(broken, os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    command = [str(SCRIPT), "serve", "--listen", f"unix:{path}", "--data-dir", str(data_dir)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(out)
    try:
        end = time.monotonic() + patience(EXIT_S)
        while not (answer := ask_health(path)):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert answer.startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=patience(EXIT_S))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in told.splitlines()].count("stdout_lost") == 1


def ask_health(path: Path) -> bytes:
    """Return the answer of `/healthz`, or nothing while nobody listens."""
    with socket.socket(socket.AF_UNIX) as client, suppress(FileNotFoundError, ConnectionRefusedError):
        client.connect(str(path))
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return client.recv(65536)
    return b""
