"""The daemon after it gave root away: what it is, what whoever has its id can do, and what dies with whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from egress.protocol import EGRESS_ID, GATEWAY_ID
from nsinit.kernel.capabilities import NSINIT_CAPABILITIES, START_CAPABILITIES
from nsinit.spawn import CHANNEL_FD
from nsinit.tools.launcher import OWN_CAPABILITIES
from tests.e2e.daemon import Daemon, create_patiently, running_daemon
from tests.waiting import patience

NOTHING = f"{0:016x}"


def status_of(pid: int | str) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def uid_of(daemon: Daemon) -> int:
    return int(status_of(daemon.process.pid)["Uid"].split()[0])


_SYS_PIDFD_GETFD = 438


def helpers(daemon: Daemon) -> tuple[int, int]:
    """Return the pids of the launcher and of nsinit, which is the launcher's first child."""
    (launcher,) = children(daemon.process.pid)
    return launcher, children(launcher)[0]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def must_end(*pids: int) -> Iterator[None]:
    """Fail unless these processes have ended a little after the block."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], patience(20))[0]
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def try_as(uid: int, code: str) -> str:
    """Run Python code as a process with the daemon's id and nothing else; return what it prints."""
    command = [sys.executable, "-I", "-S", "-c", code]
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs a python3 that every user can reach")
    command[0] = "/usr/bin/python3"
    done = subprocess.run(
        command,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_thread_of_the_daemon_is_without_privilege(daemon: Daemon, client: httpx.Client) -> None:
    """Another user, no group, no capability in any set, none to be gained, and memory that nobody may look at."""
    assert client.post("/v1/sessions", json={}).status_code == 201
    pid = daemon.process.pid
    threads = [status_of(f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")]
    for status in threads:
        assert len(set(status["Uid"].split())) == len(set(status["Gid"].split())) == 1
        assert int(status["Uid"].split()[0]) > 0 < int(status["Gid"].split()[0])
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {NOTHING}
        assert (status["Groups"], status["NoNewPrivs"]) == ("", "1")
    assert len(threads) > 1
    assert Path(f"/proc/{pid}/mem").stat().st_uid == 0  # so it is when a process is not dumpable


REACH = """
import os, signal, socket
def say(name, function, *arguments):
    try:
        print(name, "done", function(*arguments))
    except OSError as error:
        print(name, error.strerror)
data, daemon, launcher, nsinit, session = {data!r}, {daemon}, {launcher}, {nsinit}, {session!r}
say("read shadow", open, "/etc/shadow")
say("write image", open, data + "/images/host/rootfs/etc/passwd", "a")
say("write description", open, data + "/images/host/meta.json", "a")
say("new image", os.mkdir, data + "/images/mine")
for name in ("images", "sessions", "workspaces", "run", "trash", "stage"):
    say("rename " + name, os.rename, data + "/" + name, data + "/mine")
for name in ("sessions", "workspaces", "trash", "stage", "run"):
    say("list " + name, os.listdir, data + "/" + name)
say("replace socket", os.unlink, data + "/run/" + session + "/r.sock")
say("new socket", os.mkdir, data + "/run/" + session + "/x")
say("kill launcher", os.kill, launcher, 0)
say("kill nsinit", os.kill, nsinit, 0)
say("read memory", open, "/proc/%d/mem" % daemon, "rb")
say("read environment", open, "/proc/%d/environ" % daemon, "rb")
say("setuid", os.setuid, 0)
"""


def test_the_launcher_has_what_a_start_takes_and_uses_hardly_any_of_it(daemon: Daemon) -> None:
    """The launcher and nsinit gain nothing by a program that they execute; the launcher has no capability that nsinit
    does not start with, and uses two for the removal of sockets."""
    launcher, nsinit = helpers(daemon)
    status = {pid: status_of(pid) for pid in (launcher, nsinit)}
    assert [each["NoNewPrivs"] for each in status.values()] == ["1", "1"]
    held = {name: int(status[launcher][f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    assert held == {
        "Inh": 0,
        "Prm": held["Prm"] & START_CAPABILITIES,
        "Eff": held["Prm"] & OWN_CAPABILITIES,
        "Bnd": held["Bnd"] & START_CAPABILITIES,
        "Amb": 0,
    }
    assert int(status[nsinit]["CapPrm"], 16) == held["Prm"] & NSINIT_CAPABILITIES


def test_who_has_the_daemons_id_has_neither_the_machine_nor_the_sessions_files(
    daemon: Daemon, client: httpx.Client
) -> None:
    """Shadow, images, session files, sockets, the launcher, nsinit and the daemon's own memory: each is refused."""
    session = client.post("/v1/sessions", json={}).json()["id"]
    launcher, nsinit = helpers(daemon)
    names = {"data": str(daemon.data_dir), "daemon": daemon.process.pid, "launcher": launcher, "nsinit": nsinit}
    answers = try_as(uid_of(daemon), REACH.format(**names, session=session)).splitlines()
    assert len(answers) == 22
    assert [line for line in answers if "Permission denied" not in line and "not permitted" not in line] == []


def test_a_killed_nsinit_is_replaced_without_root(data_dir: Path) -> None:
    """Sessions don't notice, and new ones are made by its successor."""
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        launcher, nsinit = helpers(daemon)
        os.kill(nsinit, signal.SIGKILL)
        assert client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo on"}).json()["output"] == "on\n"
        create_patiently(client)
        assert helpers(daemon)[0] == launcher
        assert helpers(daemon)[1] != nsinit
        assert daemon.stop() == 0


def test_a_killed_nsinit_is_missed_though_its_connection_is_held(data_dir: Path) -> None:
    """The daemon sees the death of nsinit although another process, such as one just forked, still holds the connection
    open.
    """
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        assert client.post("/v1/sessions", json={}).status_code == 201
        _launcher, nsinit = helpers(daemon)
        held = take_fd(nsinit, CHANNEL_FD)
        os.kill(nsinit, signal.SIGKILL)
        create_patiently(client)
        os.close(held)
        assert daemon.stop() == 0


def take_fd(pid: int, fd: int) -> int:
    """Return a duplicate of another process's descriptor. pidfd_getfd(2)."""
    pidfd = os.pidfd_open(pid)
    taken = ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert taken >= 0, os.strerror(ctypes.get_errno())
    return int(taken)


def test_with_a_killed_daemon_launcher_and_nsinit_go_and_sessions_stay(data_dir: Path) -> None:
    """No process with privilege outlives a killed daemon; the next one, as little privileged, serves the sessions."""
    with running_daemon(data_dir) as first, first.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        with must_end(*helpers(first)):
            first.process.kill()
            first.process.wait()
    with running_daemon(data_dir) as second, second.client() as client:
        answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo on"}).json()
        assert answer["output"] == "on\n"
        assert uid_of(second) > 0
        assert second.stop() == 0


def test_the_egress_process_outlives_a_killed_daemon_while_a_session_does(data_dir: Path) -> None:
    """The next daemon, whose launcher has not started it, goes on with it; it ends with the last session."""
    with running_daemon(data_dir) as first, first.client() as client:
        session = client.post("/v1/sessions", json={"network": "open"}).json()["id"]
        (launcher, nsinit), (egress,) = helpers(first), egress_processes_of(helpers(first)[0])
        with must_end(launcher, nsinit):
            first.process.kill()
            first.process.wait()
    with running_daemon(data_dir) as second, second.client() as client:
        assert denied(client, session) == ["10.0.0.1:80"]
        assert egress_processes_of(helpers(second)[0]) == []
        with must_end(egress):
            assert second.stop() == 0


def denied(client: httpx.Client, session: str) -> list[str]:
    """Return where a session's command was refused to connect to, of an address that no session may reach."""
    command = "exec 3<>/dev/tcp/10.0.0.1/80 && read -t 5 -u 3"  # looks connected until the first byte is waited for
    deadline = time.monotonic() + patience()
    while True:
        answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": f"bash -c '{command}'"})
        assert answer.status_code == 200, answer.text
        found = [f"{each['host']}:{each['port']}" for each in answer.json().get("egress_denied", ())]
        if found or time.monotonic() > deadline:  # a daemon that has just started may be told only after the run
            return found


def egress_processes_of(pid: int) -> list[int]:
    return [each for each in children(pid) if status_of(each)["Uid"].split()[0] == str(EGRESS_ID)]


def test_a_killed_launcher_is_missed_only_when_nsinit_ends(data_dir: Path) -> None:
    """A killed launcher is logged and sessions go on; when nsinit ends as well the daemon gives up, and the next one
    finds all.
    """
    with running_daemon(data_dir) as first, first.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        launcher, nsinit = helpers(first)
        os.kill(launcher, signal.SIGKILL)
        first.wait_log("launcher_lost")
        other = client.post("/v1/sessions", json={})
        assert other.status_code == 201
        os.kill(nsinit, signal.SIGKILL)
        assert first.process.wait(patience(30)) == 1
        assert any("launcher of the fork server is gone" in line for line in first.log if not line.startswith("{"))
    with running_daemon(data_dir) as second, second.client() as client:
        assert client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo on"}).json()["output"] == "on\n"
        assert second.stop() == 0


def test_a_stop_without_launcher_leaves_nothing(data_dir: Path) -> None:
    """nsinit ends with its connection, also when its launcher is dead."""
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        client.post("/v1/sessions", json={})
        launcher, nsinit = helpers(daemon)
        os.kill(launcher, signal.SIGKILL)
        daemon.wait_log("launcher_lost")
        with must_end(nsinit):
            assert daemon.stop() == 0
    assert list((data_dir / "sessions").iterdir()) == []


def test_a_data_directory_of_root_is_handed_over_and_back(data_dir: Path) -> None:
    """A session made by a daemon that was root is adopted by one that is not, and the other way round."""
    session = ""
    for user in ("root", "auto", "root"):
        with running_daemon(data_dir, SANDKASTEN_USER=user) as daemon, daemon.client() as client:
            session = session or client.post("/v1/sessions", json={}).json()["id"]
            answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "x=$((x + 1)); echo $x"})
            assert (uid_of(daemon) == 0) is (user == "root")
            daemon.process.kill()
            daemon.process.wait()
            owners = {(data_dir / name).stat().st_uid for name in ("sandkasten.db", "lock", "node-id")}
            assert owners == {0 if user == "root" else int(owners.copy().pop())}
    assert answer.json()["output"] == "3\n"
    with running_daemon(data_dir) as last:
        last.wait_url()
        assert last.stop() == 0


@pytest.mark.parametrize("how", ["link", "hard link"])
def test_a_planted_link_is_not_handed_over(data_dir: Path, tmp_path: Path, how: str) -> None:
    """Root gives its files in the data directory to the daemon's user, and not the targets of links among them."""
    secret = data_dir.with_name(f"{data_dir.name}-secret")
    secret.write_text("x")
    (data_dir / "node-id").symlink_to(secret) if how == "link" else os.link(secret, data_dir / "node-id")
    try:
        with running_daemon(data_dir) as daemon:
            assert daemon.process.wait(patience(30)) == 1
        assert secret.stat().st_uid == 0
        assert any("node-id" in line for line in daemon.log)
    finally:
        secret.unlink()


def test_a_low_port_and_a_unix_socket_in_a_directory_of_root_are_served(data_dir: Path, tmp_path: Path) -> None:
    """Addresses are bound before root is given up; the socket's file is removed though the daemon itself could not."""
    path = tmp_path / "api.sock"
    with socket.socket() as probe:
        port = next(port for port in range(1023, 900, -1) if _is_free(port))
        assert probe.fileno() >= 0
    addresses = ("--listen", f"127.0.0.1:{port}", "--listen", f"unix:{path}")
    with running_daemon(data_dir, *addresses) as daemon:
        daemon.wait_log("supervisor_started")
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/healthz").status_code == 200
        assert uid_of(daemon) > 0
        assert daemon.stop() == 0
    assert not path.exists()


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_data_directory_behind_a_private_one_works_and_shows_no_neighbour(data_dir: Path) -> None:
    """With a data directory in `/root` or a private home the daemon sees that directory and nothing beside it."""
    data_dir.chmod(0o700)
    (data_dir / "neighbour").write_text("private")
    inner = data_dir / "deeper" / "data"
    with running_daemon(inner) as daemon, daemon.client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        assert client.post(f"/v1/sessions/{session}/exec", json={"cmd": "echo on"}).json()["output"] == "on\n"
        assert sorted(os.listdir(f"/proc/{daemon.process.pid}/root{data_dir}")) == ["deeper"]
        assert uid_of(daemon) > 0
        assert daemon.stop() == 0
    assert sorted(os.listdir(data_dir)) == ["deeper", "images", "neighbour"]


SERVE = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "8000"]


def test_a_gateway_of_the_launcher_serves_previews(data_dir: Path) -> None:
    """The gateway has no capability; a client reaches the server inside with the link alone."""
    with running_daemon(data_dir, SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0") as daemon, daemon.client() as client:
        session = f"/v1/sessions/{create_patiently(client)}"
        started = client.post(f"{session}/processes", json={"argv": SERVE}).raise_for_status().json()
        waited = {"port": 8000, "timeout_ms": round(patience(30_000))}
        client.post(
            f"{session}/processes/{started['exec_id']}/wait", json=waited, timeout=patience(60)
        ).raise_for_status()
        opened = client.post(f"{session}/previews", json={"port": 8000}).raise_for_status().json()
        name = urlsplit(opened["url"]).netloc
        with httpx.Client(
            base_url=f"http://127.0.0.1:{urlsplit(opened['url']).port}", headers={"Host": name}
        ) as browser:
            assert browser.get("/").status_code == 401
            linked = browser.get(f"/?_sandkasten_token={opened['token']}", timeout=patience(30))
            assert (linked.status_code, linked.headers["location"]) == (303, opened["url"])
            cookie = linked.headers["set-cookie"].partition(";")[0]
            assert "Directory listing" in browser.get("/", headers={"Cookie": cookie}, timeout=patience(30)).text
        (launcher,) = children(daemon.process.pid)
        (gateway,) = [pid for pid in children(launcher) if status_of(pid)["Uid"].split()[0] == str(GATEWAY_ID)]
        status = status_of(gateway)
        assert {status[each] for each in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {NOTHING}
        assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")
