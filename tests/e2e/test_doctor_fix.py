"""`sandkasten doctor` about what is left over: shown beside a daemon and without one, mended by `--fix`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests import leaks
from tests.e2e.crashwalk import until
from tests.e2e.daemon import SCRIPT, Daemon, running_daemon
from tests.e2e.seed import completed
from tests.ground import Ground
from tests.waiting import patience

UNKNOWN, HALF = "e" * 24, "d" * 24


def doctor(data_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `sandkasten doctor` as a person at another terminal would."""
    return completed("doctor", "--data-dir", data_dir, *options, timeout_s=patience(120), text=True)


def leftovers(data_dir: Path) -> dict[str, Any]:
    """Return what `doctor` shows of them."""
    done = doctor(data_dir, "--json")
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)["leftovers"]
    return shown


def fix(data_dir: Path) -> tuple[int, dict[str, Any]]:
    """Run `doctor --fix`; return the exit status and the report."""
    done = doctor(data_dir, "--fix", "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def named(entries: Sequence[dict[str, str]]) -> set[tuple[str, str]]:
    return {(each["kind"], each["name"]) for each in entries}


def kill_with_helpers(daemon: Daemon) -> None:
    """Kill the daemon, its launcher and its nsinit at once, so that none of them cleans up."""
    launchers = leaks.children(daemon.process.pid)
    for pid in [
        daemon.process.pid,
        *launchers,
        *(child for launcher in launchers for child in leaks.children(launcher)),
    ]:
        os.kill(pid, signal.SIGKILL)
    daemon.process.wait()


def make_session(client: httpx.Client) -> str:
    """Make a session whose shell knows something."""
    session: str = client.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"]
    assert run(client, session, "kept=yes") == ""
    return session


def run(client: httpx.Client, session: str, command: str) -> str:
    output: str = client.post(f"/v1/sessions/{session}/exec", json={"cmd": command}).json()["output"]
    return output


def tree_of(path: Path) -> set[tuple[str, int]]:
    """Return every path below with its inode, but for what is in sessions' own files."""
    return {(entry.path, entry.inode()) for top in (path, *path.iterdir()) if top.is_dir() for entry in os.scandir(top)}


@contextlib.contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """Attach a loop device to a file of no session; detach it afterwards if that is still its file."""
    with image.open("wb") as file:
        file.truncate(1 << 20)
    device = subprocess.check_output(["losetup", "--find", "--show", str(image)], text=True).strip()
    number = device.removeprefix("/dev/loop")
    backing = Path(f"/sys/block/loop{number}/loop/backing_file")
    try:
        yield f"{number} {image}"
    finally:
        if backing.exists() and backing.read_text().strip().startswith(str(image.parent.parent)):
            subprocess.run(["losetup", "--detach", device], check=True)


def inits() -> set[int]:
    """Return the pid of PID 1 of each sandbox that runs."""
    return {pid for pid, name in leaks.descendants(os.getpid()) if name == "sandkasten-init"}


def cgroup_of(ground: Ground, session: str) -> Path:
    """Return the directory that a session's cgroup is in, in one hierarchy."""
    tops = (*ground.cgroups, Path("/sys/fs/cgroup"))  # in pure v2 they may be beneath the root
    return next(path.parent for top in tops for path in top.rglob(session))


def test_what_a_crash_of_everything_left_is_shown_then_removed_and_the_session_goes_on(
    data_dir: Path, ground: Ground
) -> None:
    """Daemon, launcher and nsinit are killed, and leftovers without an owner are planted: `doctor` shows each and
    changes nothing. `--fix` removes them, records a session whose PID 1 died as ended, and keeps the others with their
    shells, which the next daemon serves.
    """
    assert shutil.which("losetup") is not None
    with running_daemon(data_dir) as first, first.client() as client:
        kept, other, dead = make_session(client), make_session(client), make_session(client)
        kill_with_helpers(first)
    for pid in (cgroup_of(ground, dead) / dead / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):  # the process went with its PID 1
            os.kill(int(pid), signal.SIGKILL)
    (data_dir / "sessions" / UNKNOWN).mkdir()
    (data_dir / "sessions" / "foreign").mkdir()
    (data_dir / "spool" / f"{UNKNOWN}.00000001.runs").write_text("x")
    (data_dir / "sessions" / HALF).mkdir()
    cgroup = cgroup_of(ground, kept) / "foreign"
    cgroup.mkdir()
    until(lambda: len(inits()) == 2, "PID 1 of one session is gone")
    alive = inits()
    with loop_device(data_dir / "sessions" / HALF / "1-1.ext4") as loop:
        planted = {
            ("session", UNKNOWN),
            ("session", HALF),
            ("session_directory", "foreign"),
            ("spool_file", f"{UNKNOWN}.00000001.runs"),
            ("cgroup", "foreign"),
            ("loop", loop),
        }
        before = tree_of(data_dir)
        shown = leftovers(data_dir)
        assert tree_of(data_dir) == before
        assert (shown["daemon_runs"], set(shown["live"])) == (False, {kept, other})
        assert [each["session_id"] for each in shown["unfinished"]] == [dead]
        assert named(shown["left"]) == planted
        status, said = fix(data_dir)
        assert (status, said["remains"], said["unfinished"]) == (0, [], []), said
        assert named(said["found"]) == named(said["removed"]) == planted
        assert set(said["adopted"]) == {kept, other}
        assert [(each["session_id"], each["status"]) for each in said["ended"]] == [(dead, "lost")]
    assert not cgroup.exists()
    assert set(os.listdir(data_dir / "sessions")) == {kept, other}
    assert inits() == alive
    with running_daemon(data_dir) as second, second.client() as client:
        assert [run(client, each, "echo $kept") for each in (kept, other)] == ["yes\n", "yes\n"]


def test_a_daemon_at_work_is_left_alone_and_its_things_are_no_leftovers(data_dir: Path) -> None:
    """Pool sandboxes, live sessions and their output are the running daemon's and no leftovers; things without an owner
    are shown all the same; `--fix` is refused with a sentence.
    """
    with running_daemon(data_dir, SANDKASTEN_SERVER_POOL_SANDBOXES="1") as daemon, daemon.client() as client:
        session = make_session(client)
        until(lambda: client.get("/v1/node").json()["pool_sandboxes"] == 1, "there is a pool sandbox")
        (data_dir / "run" / "foreign").mkdir()
        shown = leftovers(data_dir)
        assert (shown["daemon_runs"], named(shown["left"])) == (True, {("run_directory", "foreign")})
        refused = doctor(data_dir, "--fix")
        assert (refused.returncode, refused.stdout) == (1, "")
        _named, sentence = refused.stderr.splitlines()
        assert sentence.startswith(f"sandkasten: another daemon uses {data_dir}: ")
        assert run(client, session, "echo $kept") == "yes\n"
        daemon.stop(signal.SIGINT)


def test_sessions_of_a_daemon_that_was_started_elsewhere_are_found_and_kept(
    data_dir: Path, ground: Ground, tmp_path: Path
) -> None:
    """A service has its own cgroup, a terminal another: `--fix` from the terminal neither loses nor ends the service's
    sessions. A mount made by hand is reported and stays.
    """
    homes = [top / "service" for top in ground.made] or [Path("/sys/fs/cgroup") / f"service-{os.getpid()}"]
    for home in homes:
        home.mkdir()
    join = f'for home in {" ".join(map(str, homes))}; do echo $$ > $home/cgroup.procs; done; exec "$@"'
    launcher = ("sh", "-c", join, "sh", str(SCRIPT))
    point = data_dir / "sessions" / "by-hand"
    try:
        with running_daemon(data_dir, launcher=launcher) as first, first.client() as client:
            session = make_session(client)
            assert first.stop(signal.SIGTERM) == 0
        assert leftovers(data_dir)["live"] == [session]
        point.mkdir()
        (tmp_path / "behind").write_text("kept")
        subprocess.run(["mount", "--bind", tmp_path, point], check=True)
        try:
            done = doctor(data_dir, "--fix")
            lines = done.stdout.splitlines()
            assert f"adopted   session           {session}: runs on" in lines
            assert any(line.split()[:3] == ["found", "mount", f"{point}:"] for line in lines)
            assert any(line.split()[:3] == ["remains", "mount", f"{point}:"] for line in lines)
            assert done.returncode == 1, done.stdout
        finally:
            subprocess.run(["umount", point], check=True)
        assert (tmp_path / "behind").read_text() == "kept"
        with running_daemon(data_dir, launcher=launcher) as second, second.client() as client:
            assert run(client, session, "echo $kept") == "yes\n"
    finally:
        for home in homes:
            home.rmdir()
