"""The leak check itself: it sees whatever a test may leave, on its own ground, and nothing of anybody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import patience

ROOT = Path(__file__).parents[2]

LEAVE_ALL = """
import os, subprocess, sys, tempfile
from pathlib import Path
from tests import leaks
from tests.ground import Ground

ground = Ground.claim()
before = leaks.Snapshot.take(ground)
print("nothing:", before.difference())
directory = Path(tempfile.mkdtemp(prefix="other-"))
(ground.cgroups[0] / "sandkasten-left/session").mkdir(parents=True)
subprocess.run(["mount", "-t", "tmpfs", "left", directory], check=True)
descriptor = os.open("/dev/zero", os.O_RDONLY)
subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"], check=True)
for each in before.difference():
    print("left:", each)
print("ready", flush=True)
sys.stdin.readline()
leaks.clean_up(before)
print("afterwards:", sorted(each.split(":")[0] for each in before.difference()))
ground.release()
print("gone:", not ground.directory.exists(), not any(each.exists() for each in ground.made))
"""


def test_what_is_left_is_found_by_who_left_it_and_by_nobody_else() -> None:
    """A mount, cgroups, a process without a parent, a descriptor, a directory; this test's own check sees none."""
    command = [sys.executable, "-c", LEAVE_ALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "ready\n"))
        mounts = Path("/proc/self/mountinfo").read_text()
        output, _ = process.communicate("\n", timeout=patience(60))
    assert lines[0] == "nothing: []\n"
    kinds = [line.split()[1] for line in lines[1:]]
    assert kinds == ["mount:", "cgroup:", "cgroup:", "process:", "descriptor:", "directory:"]
    assert "sandkasten-left/session" in "".join(lines)
    assert "left" not in [line.split(" - ")[1].split()[1] for line in mounts.splitlines()]
    assert output.splitlines() == ["afterwards: ['descriptor', 'directory', 'mount']", "gone: True True"]
    assert process.returncode == 0
