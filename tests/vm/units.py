"""Claims of docs/systemd.md about the units, tried on a machine that systemd runs. Runs there, as root, in a service.

Prints a line for each claim that held. One that does not ends the run, since those behind it rest on it, with the
journal and a traceback.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import httpx
import pytest

from sandkasten.errors import SandkastenError
from sandkasten.sync import SandboxClient, Session

DAEMON, NSINIT, SANDBOXES = "sandkasten.service", "sandkasten-nsinit.service", "sandkasten-sandboxes.service"
PATIENCE_S = 600
SLOW_MACHINE = f"[Service]\nTimeoutStartSec={PATIENCE_S}\nWatchdogSec={PATIENCE_S}\n"
"""Drop-in for an emulated processor, which is slower than any deadline of the units expects."""

KEY = Path("/var/lib/sandkasten/api-key")
URL = "http://127.0.0.1:8080"
REQUEST_S = 60


def run(*command: str) -> str:
    """Run a command that must succeed, and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def state(unit: str, name: str) -> str:
    return run("systemctl", "show", "--value", "--property", name, unit).strip()


def until(is_so: Callable[[], object]) -> None:
    """Look every half second until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s; {DAEMON}: {state(DAEMON, 'StatusText')}"
        time.sleep(0.5)


def of_process(pid: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@attrs.define
class World:
    """The client, and the session that must live through everything that is done to the services."""

    client: SandboxClient = attrs.field(factory=lambda: SandboxClient(base_url=URL, api_key=""))
    session: Session | None = None

    def says(self, text: str) -> None:
        """Check that the session answers, in the shell that it always had."""
        assert self.session is not None
        assert self.session.exec("echo $KEPT").output == f"{text}\n"


def installed(_: World) -> None:
    for unit in (DAEMON, NSINIT):
        drop_in = Path("/etc/systemd/system", f"{unit}.d", "slow.conf")
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(SLOW_MACHINE)
    first = run("sandkasten", "install-service")
    assert "run: systemctl daemon-reload" in first, first
    again = run("sandkasten", "install-service")
    assert (first.count("written: "), again.count("unchanged: ")) == (5, 5), first + again
    assert pwd.getpwnam("sandkasten").pw_shell == "/usr/sbin/nologin"


def started(world: World) -> None:
    run("systemctl", "enable", "--now", "sandkasten-nsinit", "sandkasten")
    assert [state(unit, "ActiveState") for unit in (DAEMON, NSINIT, SANDBOXES)] == ["active"] * 3
    until(lambda: state(DAEMON, "StatusText") == "ready, 0 sessions")
    world.client = SandboxClient(base_url=URL, api_key=KEY.read_text().strip(), timeout=REQUEST_S)
    machine = Path("/var/lib/sandkasten/machine.json").stat()
    assert (machine.st_uid, KEY.stat().st_mode & 0o777) == (0, 0o600)


def confined(_: World) -> None:
    pid = state(DAEMON, "MainPID")
    account = pwd.getpwnam("sandkasten")
    assert of_process(pid, "Uid").split() == [str(account.pw_uid)] * 4
    assert [of_process(pid, name) for name in ("CapPrm", "CapBnd", "CapAmb")] == ["0" * 16] * 3
    assert (of_process(pid, "NoNewPrivs"), of_process(pid, "Seccomp")) == ("1", "2")
    assert int(of_process(pid, "Seccomp_filters")) >= 2  # the unit's, and the daemon's own


def session_runs(world: World) -> None:
    world.session = world.client.create_session(network={"mode": "allow", "allow": []})
    assert world.session.exec("export KEPT=here; cat /etc/hostname >/dev/null; id -u").output != "0\n"
    assert world.client.system().features["steering"] is True
    ask = "import socket; socket.getaddrinfo('denied.example', 80)"
    assert "[Errno -2]" in world.session.exec(f'python3 -c "{ask}" 2>&1').output  # EAI_NONAME: the way out has answered
    sandboxes = Path("/sys/fs/cgroup/system.slice", SANDBOXES)
    assert any(path.read_text().strip() for path in sandboxes.glob("*/**/cgroup.procs"))
    said = run("sandkasten", "run", "--", "sh", "-c", "echo $((6 * 7))")
    assert said.splitlines()[-1] == "42", said


def begins_anew(unit: str, *command: str) -> None:
    """End a unit's process, and wait until another serves. A start that took too long is tried again by systemd."""
    before = state(unit, "MainPID")
    subprocess.run(["systemctl", *command, unit], timeout=PATIENCE_S, check=False)
    until(lambda: state(unit, "ActiveState") == "active" and state(unit, "MainPID") not in ("0", before))


def survives_a_killed_daemon(world: World) -> None:
    begins_anew(DAEMON, "kill", "--signal=KILL")
    world.says("here")


def survives_a_restart_of_the_daemon(world: World) -> None:
    begins_anew(DAEMON, "restart")
    world.says("here")


def owners() -> dict[str, tuple[int, int, int]]:
    """Return owner, group and mode of all that is in the data directory."""
    found = (each for top in os.walk("/var/lib/sandkasten") for each in (top[0], *(f"{top[0]}/{n}" for n in top[2])))
    return {each: (at.st_uid, at.st_gid, at.st_mode) for each in found for at in [os.lstat(each)]}


def survives_a_restart_of_nsinit(world: World) -> None:
    before, owned = state(DAEMON, "MainPID"), owners()
    begins_anew(NSINIT, "restart")
    now = owners()
    assert {each: (was, now[each]) for each, was in owned.items() if now.get(each, was) != was} == {}
    world.says("here")
    assert world.session is not None
    assert world.session.exec("echo more > kept; cat kept").output == "more\n"
    with world.client.create_session() as other:
        assert other.exec("echo new").output == "new\n"
    assert state(DAEMON, "MainPID") == before


def survives_a_killed_nsinit(world: World) -> None:
    begins_anew(NSINIT, "kill", "--kill-whom=main", "--signal=KILL")
    world.says("here")
    begins_anew(DAEMON, "restart")
    world.says("here")


def sandboxes_end_with_their_unit(world: World) -> None:
    run("systemctl", "stop", SANDBOXES)
    assert state(NSINIT, "ActiveState") == "inactive"
    assert world.session is not None
    with pytest.raises(SandkastenError):
        world.session.exec("true")
    key = {"Authorization": f"Bearer {KEY.read_text().strip()}"}
    assert httpx.post(f"{URL}/v1/sessions", json={}, headers=key, timeout=PATIENCE_S).status_code == 503


def ends(_: World) -> None:
    run("systemctl", "stop", DAEMON)
    assert [state(DAEMON, name) for name in ("ActiveState", "Result")] == ["inactive", "success"]
    assert run("systemctl", "list-units", "--failed", "--plain", "--no-legend").strip() == ""


CLAIMS = (
    *(installed, started, confined, session_runs, survives_a_killed_daemon, survives_a_restart_of_the_daemon),
    *(survives_a_restart_of_nsinit, survives_a_killed_nsinit, sandboxes_end_with_their_unit, ends),
)


def main() -> None:
    world = World()
    for claim in CLAIMS:
        begun = time.monotonic()
        try:
            claim(world)
        finally:
            if sys.exc_info()[0] is not None:
                subprocess.run(["journalctl", "--no-pager", "--lines=60", "--unit=sandkasten*"], check=False)
        print(f"claim: {claim.__name__}: held after {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
