"""A secret and the installation that keeps it: whoever looks for the value finds it with the broker alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from egress.protocol import BROKER_ID
from tests.e2e.daemon import Daemon, running_daemon
from tests.e2e.test_privilege import NOTHING, status_of

VALUE = "sk-live-0b1e6a9cd74f4285"
SECRET = {"name": "key", "value": VALUE, "hosts": ["api.example"]}
SESSION = {
    "network": {"mode": "allow", "allow": ["api.example"], "secrets": ["key"]},
    "env": {"TOKEN": {"secret": "key"}, "OTHER": "as it is"},
}


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield from descendants(child)


def has_in_memory(pid: int, text: bytes) -> bool:
    """Search all that a process has mapped and may write."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()  # type: ignore[union-attr]
            if not rights.startswith("rw"):
                continue
            try:
                memory.seek(int(first, 16))
                if text in memory.read(int(last, 16) - int(first, 16)):
                    return True
            except (OSError, OverflowError):
                continue  # memory of a device
    return False


def broker_of(daemon: Daemon) -> int:
    """Return the broker of a daemon."""
    (found,) = (pid for pid in descendants(daemon.process.pid) if status_of(pid)["Uid"].split()[0] == str(BROKER_ID))
    return found


def test_the_value_is_with_the_broker_alone(data_dir: Path) -> None:
    """Nothing of it is in the session, in a process's memory, arguments or environment, in a log, in the database,
    which has the events, or in another file. The daemon is one that was started later: memory that was freed may hold
    what passed through it."""
    with running_daemon(data_dir) as first, first.client() as client:
        assert client.post("/v1/secrets", json=SECRET).raise_for_status().status_code == 201
        bad = client.post("/v1/secrets", json=SECRET | {"hosts": ["192.0.2.1"]})
        assert (bad.status_code, VALUE in bad.text) == (400, False)
        bad = client.post("/v1/secrets", json=SECRET | {"value": f"{VALUE}\n"})
        assert (bad.status_code, VALUE in bad.text) == (400, False)
        session_id = client.post("/v1/sessions", json=SESSION).raise_for_status().json()["id"]
        listed = client.get("/v1/secrets").raise_for_status()
        assert listed.json()["secrets"] == [{"name": "key", "hosts": ["api.example"], "placeholder": None}]
        assert first.stop(signal.SIGTERM) == 0
        said = "".join([*first.log, *first.printed])
    assert VALUE not in said
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        session = f"/v1/sessions/{session_id}"
        run = client.post(f"{session}/exec", json={"cmd": "env"}).raise_for_status().json()
        environment = dict(line.split("=", 1) for line in run["output"].splitlines() if "=" in line)
        assert environment["OTHER"] == "as it is"
        assert len(environment["TOKEN"]) == 40
        assert VALUE not in run["output"]
        assert client.get("/v1/secrets").raise_for_status().json() == listed.json()
        broker = broker_of(daemon)
        assert status_of(broker)["CapEff"] == NOTHING
        assert has_in_memory(broker, VALUE.encode()), "the search finds what is there"
        everybody = set(descendants(daemon.process.pid)) | set(inside_of(session_id))
        assert len(everybody) > 6
        for pid in everybody - {broker}:
            assert not has_in_memory(pid, VALUE.encode()), Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in everybody:
            for name in ("cmdline", "environ"):
                assert VALUE.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert VALUE not in "".join(daemon.log)
        assert found_in(data_dir) == [data_dir / "broker" / "secrets.json"]
        client.delete(session).raise_for_status()
        client.delete("/v1/secrets/key").raise_for_status()
        assert client.delete("/v1/secrets/key").json()["error_code"] == "SECRET_NOT_FOUND"
    assert found_in(data_dir) == []


def inside_of(session_id: str) -> Iterator[int]:
    """Yield the processes of a session, by their cgroups."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                if session_id in (directory / "cgroup").read_text():
                    yield int(directory.name)
            except OSError:
                continue  # ended meanwhile


def found_in(directory: Path) -> list[Path]:
    """Return the files that have the value in them."""
    files = (Path(root, name) for root, _, names in os.walk(directory) for name in names)
    return [path for path in files if path.is_file() and not path.is_symlink() and VALUE.encode() in written(path)]


def written(path: Path) -> bytes:
    """Return what is in a file, without its holes (lseek(2), SEEK_DATA): a workspace's disk is nearly all of them."""
    found, end = [], 0
    with open(path, "rb", buffering=0) as file, contextlib.suppress(OSError):  # ENXIO: no data behind `end`
        while True:
            begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            found.append(os.pread(file.fileno(), end - begin, begin))
    return b"".join(found)
