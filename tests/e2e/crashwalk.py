"""Walks the crash points: at each of them a process ends, the daemon is killed, and the next start is held to account.

`visit` starts a daemon that has one point armed, makes a session, runs a command and a program in it and ends it; then
the daemon is killed. The next one, without a point, must end up with no session half made or half ended, nothing on
disk or in the kernel that no session owns, and one more thing: a session that lives through the whole walk, shell state
and all. A daemon is a fork of this process, which has imported everything and looked at the machine once; the rest of
it is what `sandkasten serve` runs as root. `python -m tests.e2e.crashwalk` walks all points.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
import httpx
import trio

from nsinit.sandbox.crash_points import all_points
from sandkasten import app, log
from sandkasten.actors.node import session_pools
from sandkasten.api import app as _front  # noqa: F401 - imported before the fork
from sandkasten.config import Config, FaultSettings, PoolSettings, PoolSize, ServerSettings, WorkspaceSettings
from sandkasten.config.seccomp import load_filters
from sandkasten.crash import Point
from sandkasten.host import examine
from sandkasten.host.data_dir import locked
from sandkasten.model.node import Machine
from tests.e2e.crashwalk_workspaces import CHECK, EXPECTED, KEPT, PREFIXES, WorkspaceTour
from tests.e2e.daemon import KEY, SCRIPT
from tests.ground import Ground
from tests.waiting import patience

SHORT = (
    "cgroup_maker.cgroup_limits",
    "builder.create.overlay_root",
    "runner.exec.started",
    "daemon.create.running_recorded",
    "daemon.claim.handed_over",
    "nsinit.destroy.killed",
    "nsinit.volume.enlarged",
    "nsinit.workspace.exchanged",
    "runner.files.placed",
    "import.unpacked",
    "image.commit.packed",
)
"""One for each phase and for each process."""

_PATIENCE_S = 30.0
_PAUSE_S = 0.02
_NETWORK = {"network": {"mode": "allow", "allow": ["never.example"]}}
"""Sessions of the walk have a way out. The process that serves it outlives the daemon that is killed."""
_NEED_POOL_SANDBOX = ("nsinit.create.limits", "cgroup_maker.raise_limits")
"""Points that are reached only with a pool sandbox made with other limits than the session wants."""
_OF_PULLS = "image.pull."
"""Points that need a registry: test_pulls.py has one, and visits them."""
_OF_COMMITS = "image.commit."
_BELOW = "below"
"""The image of a session that is committed."""
_OF_IMAGES = ("nsinit.layer.", "nsinit.image.")
"""Points of an nsinit that works for the command line."""
_NEED_SESSION_POOL = "daemon.claim."
"""Points that are reached only with a session pool. The daemon after the crash has none."""


def walked_points() -> Sequence[str]:
    """Return every point there is."""
    own = (point.value for point in Point if not point.startswith(_OF_PULLS))
    return (*all_points(), *own)


class Daemon:
    """A forked daemon. `url` is None when it died before it served."""

    def __init__(self, config: Config, machine: Machine, log_path: Path) -> None:
        self._log_path = log_path
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_daemon(config, machine, write_fd, log_path)
        os.close(write_fd)
        self.status: int | None = None
        with open(read_fd, "rb") as pipe:
            ready = select.select([pipe], [], [], patience(_PATIENCE_S))[0]
            url = os.read(pipe.fileno(), 100).decode() if ready else ""
        self.url = url or None

    def client(self) -> httpx.Client:
        assert self.url is not None, f"it did not start:\n{self.log}"
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=patience(60.0))

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def has_died(self) -> bool:
        """Tell whether the daemon died of the SIGKILL that it sends itself at its crash point."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status == -signal.SIGKILL

    def end(self) -> None:
        """End the daemon as an operator does, and wait for it."""
        os.kill(self.pid, signal.SIGTERM)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Kill the daemon as a crash would. Its nsinit ends when it notices, and the next daemon waits for that."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL


def _be_daemon(config: Config, machine: Machine, url_fd: int, log_path: Path) -> NoReturn:
    """Serve in the forked process until it is killed."""
    try:
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(log_fd, fd)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        log.configure("info")
        session_pools.FREEZE_AFTER_S = 0.1

        def started(addresses: Sequence[str]) -> None:
            os.write(url_fd, addresses[0].encode())
            os.close(url_fd)

        order = app.StopOrder(ends_sessions=False)
        with locked(config.data_dir):
            trio.run(partial(app.serve, config, machine, load_filters(config.security), order=order, started=started))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        os._exit(1)


class Walk:
    """A data directory with one session that must live through everything."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.tar = data_dir.with_name(f"{data_dir.name}.tar")
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        self._machine = examine.examine(data_dir)
        self._config = Config(
            data_dir=data_dir,
            listen=("127.0.0.1:0",),
            api_key=KEY,
            sessions_on_stop="keep",
            workspace=WorkspaceSettings(default_quota_mb=0),  # the tour has workspaces of both kinds
        )
        self.kept = ""
        self.workspaces = WorkspaceTour(data_dir)
        self.alive: set[str] = set()
        """Sessions that the client was told of and did not end."""
        self.unsure: set[str] = set()
        """Sessions whose end the client asked for without hearing of it."""
        self.untold = 0
        """Sessions that the client asked for without hearing of them: there may be one, whole, or none."""
        self.refusals: set[int] = set()
        """HTTP statuses of creates that were refused because a process died; 503 alone is allowed."""

    def begin(self) -> None:
        """Make the session that is kept."""
        with tarfile.open(self.tar, "w") as archive:
            archive.add(shutil.which("busybox") or "/bin/true", "bin/sh")
            for name in ("etc", "usr"):
                member = tarfile.TarInfo(name)
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
        with self.daemon() as daemon, daemon.client() as client:
            self.workspaces.begin(client)
            wanted = {"ttl_seconds": 3600, "workspace_id": KEPT, **_NETWORK}
            self.kept = client.post("/v1/sessions", json=wanted).json()["id"]
            assert run(client, self.kept, "n=kept") == ""

    @contextlib.contextmanager
    def daemon(self, at: str = "", *, pool_sandboxes: int = 0, members: int = 0) -> Iterator[Daemon]:
        """Run a daemon, and kill it."""
        testing = FaultSettings(crash_points=bool(at), crash_at=at)
        config = attrs.evolve(
            self._config,
            testing=testing,
            server=ServerSettings(pool_sandboxes=pool_sandboxes),
            pool=PoolSettings(enabled=members > 0, images={"python": PoolSize(members)}),
        )
        daemon = Daemon(config, self._machine, self.log)
        try:
            yield daemon
        finally:
            daemon.kill()

    def visit(self, point: str) -> None:
        """Let a process end at the point, and hold the next start to account. Raises `AssertionError`."""
        if point.startswith(("import.", *_OF_IMAGES)):
            self._import(point)
        elif point.startswith(_OF_COMMITS):
            self._image("", "import", "--name", _BELOW, "--tar", str(self.tar))
            with self.daemon(point) as daemon:
                session = self._commit(daemon, point)
                until(daemon.has_died, "the daemon came to the point")
            with self.daemon() as after, after.client() as client:
                assert "commit" not in [each["name"] for each in client.get("/v1/images").json()["images"]]
                assert client.post("/v1/images/prune", json={"older_than_s": 0}).json()["layers"] == 1
                made = client.post(f"/v1/sessions/{session}/commit", json={"name": "commit"})
                assert made.status_code == 201, made.text
        elif point.startswith(_NEED_SESSION_POOL):
            for env, seen in (({"SECRET": "x"}, "x\n"), ({}, "\n")):
                with self.daemon(point, members=2) as daemon:
                    self._claim(daemon, {"env": env, "idempotency_key": f"{point}:{len(env)}"}, seen)
        else:
            with self.daemon(point, pool_sandboxes=int(point in _NEED_POOL_SANDBOX)) as daemon:
                if point.startswith(PREFIXES):
                    was_noticed = self._disturb_workspaces(daemon)
                else:
                    was_noticed = self._disturb(daemon, needs_pool_sandbox=point in _NEED_POOL_SANDBOX)
                if point.startswith("daemon."):
                    until(daemon.has_died, "the daemon came to the point")
                elif not was_noticed:
                    until(lambda: "crash_point" in daemon.log, "a process came to the point")
                assert self.refusals <= {503}, self.refusals
        with self.daemon() as daemon, daemon.client() as client:
            self.account(client)

    def _commit(self, daemon: Daemon, point: str) -> str:
        """Commit a session at whose point the daemon dies; return its id."""
        with daemon.client() as client:
            session = str(client.post("/v1/sessions", json={"image": _BELOW, "ttl_seconds": 600}).json()["id"])
            self.alive.add(session)
            assert run(client, session, "echo x 2> /dev/null > /etc/new; echo made") == "made\n", point
            with contextlib.suppress(httpx.TransportError):
                client.post(f"/v1/sessions/{session}/commit", json={"name": "commit"})
        return session

    def _image(self, point: str, action: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "SANDKASTEN_CRASH_POINTS": "true", "SANDKASTEN_CRASH_AT": point}
        command = [str(SCRIPT), "image", action, "--data-dir", str(self.data_dir), *words]
        return subprocess.run(command, env=environment, capture_output=True, timeout=patience(60), check=False)

    def _import(self, point: str) -> None:
        name = point.replace(".", "-")
        for words in (["import", "--name", name, "--tar", str(self.tar)], ["rm", name]):
            done = self._image(point, *words)
            if done.returncode:
                break
        if point.startswith(_OF_IMAGES):  # the command line lives, and tells
            assert b"the fork server died during work on the image" in done.stderr, done.stderr
        else:
            assert done.returncode == -signal.SIGKILL, done.stderr

    def _claim(self, daemon: Daemon, wanted: dict[str, Any], output: str) -> None:
        """Claim a frozen member of a pool, and die at it. A repeated create with the key gets the session that the dead
        daemon made of the member, or another one with the same variables and way out. Nobody else gets these."""
        wanted |= {"ttl_seconds": 600, **_NETWORK}
        with daemon.client() as client:
            until(lambda: client.get("/v1/pools").json()[0]["frozen"] == 2, "the pool is full, and frozen")
            with contextlib.suppress(httpx.TransportError):
                client.post("/v1/sessions", json=wanted)
        until(daemon.has_died, "the daemon came to the point")
        with self.daemon(members=2) as after, after.client() as client:
            for request, seen, mode in ((wanted, output, "allow"), *[({}, "\n", "none")] * 3):
                made = client.post("/v1/sessions", json=request)
                assert made.status_code == 201, made.text
                session = made.json()["id"]
                self.alive.add(session)
                assert run(client, session, "echo $SECRET") == seen
                url = f"/v1/sessions/{session}/network"  # it tells of no network before a way out is served
                until(lambda url=url, mode=mode: client.get(url).json().get("mode") == mode, "it has its network")

    def _disturb(self, daemon: Daemon, *, needs_pool_sandbox: bool) -> bool:
        """Make, use and end a session; return whether anything of it went otherwise than it should."""
        try:
            with daemon.client() as client:
                if needs_pool_sandbox:
                    until(lambda: client.get("/v1/node").json()["pool_sandboxes"] > 0, "there is a pool sandbox")
                self.untold = 1
                wanted = {"ttl_seconds": 600, "limits": {"pids": 99}, "workspace_id": KEPT, **_NETWORK}
                made = client.post("/v1/sessions", json=wanted)
                self.untold = 0
                if made.status_code != 201:
                    self.refusals.add(made.status_code)
                    return True
                session = made.json()["id"]
                self.alive.add(session)
                command = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo a"})
                program = client.post(f"/v1/sessions/{session}/exec", json={"argv": ["/bin/echo", "b"]})
                self.alive.discard(session)
                self.unsure.add(session)
                ended = client.delete(f"/v1/sessions/{session}")
                if ended.status_code == 200:
                    self.unsure.discard(session)
                results = [each.json() for each in (command, program) if each.status_code == 200]
                outputs = [each.get("output") for each in results]
                return outputs != ["a\n", "b\n"] or ended.status_code != 200
        except (httpx.TransportError, AssertionError):
            return True

    def _disturb_workspaces(self, daemon: Daemon) -> bool:
        try:
            with daemon.client() as client:
                return self.workspaces.disturb(client)
        except (httpx.TransportError, AssertionError):
            return True

    def account(self, client: httpx.Client) -> None:
        """Check that the next start has made everything good."""
        self.workspaces.account(client)
        unfinished = {"pool_idle", "creating", "destroying"}
        until(lambda: self._rows(unfinished) == set(), "no session is half made or half ended")
        until(lambda: self._owned() == self._live(client), f"only sessions own anything: {self._owned()}")
        live = self._live(client)
        known = {self.kept} | self.alive
        assert known <= live, f"lost: {known - live}"
        assert len(live - known - self.unsure) <= self.untold, f"nobody asked for one of {live - known}"
        assert self._rows({"running"}) == live
        assert run(client, self.kept, "echo $n") == "kept\n"
        assert run(client, self.kept, CHECK) == EXPECTED
        for session in live - {self.kept}:
            assert run(client, session, "echo alive") == "alive\n"
            assert client.delete(f"/v1/sessions/{session}").status_code == 200
        self.alive.clear()
        self.unsure.clear()
        self.untold = 0
        until(lambda: self._owned() == {self.kept}, "what was ended is gone")
        until(lambda: client.get(f"/v1/sessions/{self.kept}/network").status_code == 200, "its way out is served")
        images = os.listdir(self.data_dir / "images")
        assert not [name for name in images if name.startswith(".new-")], images
        layers = os.listdir(self.data_dir / "layers")
        assert not [name for name in layers if name.startswith("+new-")], layers

    def finish(self) -> None:
        """End the last session; nothing may be left at all."""
        with self.daemon() as daemon, daemon.client() as client:
            self.account(client)
            assert client.delete(f"/v1/sessions/{self.kept}").status_code == 200
            until(lambda: self._owned() == set(), "the last session is gone")
            daemon.end()  # and with it the process that carries, which a killed daemon leaves
        left = {name: os.listdir(self.data_dir / name) for name in ("sessions", "run", "trash")}
        assert left == {"sessions": [], "run": [], "trash": []}
        assert self._cgroups() == set()

    def clear(self) -> None:
        """Remove what the walk made for itself."""
        for path in (self.tar, self.log):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def _live(self, client: httpx.Client) -> set[str]:
        return {each["id"] for each in client.get("/v1/sessions").json()}

    def _owned(self) -> set[str]:
        """Return the names that anything on disk or in the kernel has; the trash must be empty."""
        owned = set(os.listdir(self.data_dir / "sessions")) | set(os.listdir(self.data_dir / "run")) | self._cgroups()
        return owned | {f"trash: {name}" for name in os.listdir(self.data_dir / "trash")}

    def _cgroups(self) -> set[str]:
        node = (self.data_dir / "node-id").read_text().strip()
        groups = [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/sandkasten-{node[:8]}")]
        names: set[str] = set()
        for group in groups:
            with contextlib.suppress(FileNotFoundError):  # the last nsinit has just removed it
                names |= {each.name for each in group.iterdir() if each.is_dir()}
        return names - {"daemon"}

    def _rows(self, states: set[str]) -> set[str]:
        """Return the ids that the database has in one of these states."""
        with contextlib.closing(sqlite3.connect(self.data_dir / "sandkasten.db")) as database:
            return {name for name, status in database.execute("SELECT id, status FROM sessions") if status in states}


def run(client: httpx.Client, session: str, command: str) -> Any:
    """Run a command; return its output."""
    return client.post(f"/v1/sessions/{session}/exec", json={"cmd": command}).json().get("output")


def until(condition: Any, what: str) -> None:
    """Wait for what the daemon does after its start, which nothing announces."""
    deadline = time.monotonic() + patience(_PATIENCE_S)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(_PAUSE_S)


def walk(points: Sequence[str]) -> list[str]:
    """Visit points on one data directory; return what went wrong, one line each."""
    failures = []
    tour = Walk(Path(tempfile.mkdtemp(prefix="sandkasten-test-")))
    try:
        tour.begin()
        for point in points:
            began = time.monotonic()
            try:
                tour.visit(point)
                print(f"{point:<40} ok  {time.monotonic() - began:5.1f} s", flush=True)
            except AssertionError as failure:
                failures.append(f"{point}: {failure}")
                print(f"{point:<40} FAILED {failure}", flush=True)
        tour.finish()
    finally:
        tour.clear()
    return failures


if __name__ == "__main__":
    ground = Ground.claim()
    wanted = sys.argv[1:] or walked_points()
    began_at = time.monotonic()
    try:
        problems = walk(wanted)
    finally:
        ground.release()
    print(f"{len(wanted)} crash points, {len(problems)} failures, {time.monotonic() - began_at:.0f} s")
    sys.exit(1 if problems else 0)
