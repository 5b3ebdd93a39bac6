"""`sandkasten security` as a command: what it prints, and that the exit status tells a hold from none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import patience

KNOWN = [name for name in os.environ if name.startswith("SANDKASTEN_")]


def security(data_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a data directory of its own and nothing of the surroundings' settings."""
    command = [sys.executable, "-m", "sandkasten", "security", "--data-dir", str(data_dir), *arguments]
    env = {name: value for name, value in os.environ.items() if name not in KNOWN} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(120), env=env, cwd="/", check=False)


def test_what_holds_is_status_0_and_a_table(data_dir: Path) -> None:
    """Every line has its verdict, nothing is left in the data directory, and stderr names the installation alone."""
    done = security(data_dir, "--attack", "--user", "sandbox", "--only", "signals.", "--only", "kernel.filter")
    (named,) = done.stderr.splitlines()
    assert (done.returncode, f"data directory {data_dir}" in named) == (0, True)
    lines = done.stdout.splitlines()
    held = [line.split()[1] for line in lines if line.startswith("held ")]
    assert held == ["signals.kill-pid1", "signals.other-ways", "signals.owner", "kernel.filter"]
    assert lines[-1].startswith("4 attempts in ")
    assert lines[-1].endswith(" 4 held")
    assert os.listdir(data_dir) == ["images"]


def test_what_is_broken_is_status_1_and_says_what_was_seen(data_dir: Path) -> None:
    """Without the system call filter, io_uring is in reach, and the command says so in its table and as a finding."""
    done = security(data_dir, "--attack", "--user", "sandbox", "--only", "kernel.filter", SANDKASTEN_SECCOMP="off")
    assert done.returncode == 1
    assert any(line.startswith("BROKEN") and line.split()[1] == "kernel.filter" for line in done.stdout.splitlines())
    assert "high    seccomp.off" in done.stdout


def test_a_grave_finding_alone_is_status_1_and_json_has_it_all(data_dir: Path) -> None:
    """Without `--attack` no session is made; each finding has severity, why and fix."""
    done = security(data_dir, "--json", SANDKASTEN_LISTEN="0.0.0.0:8080")
    assert done.returncode == 1
    shown = json.loads(done.stdout)
    assert shown["attempts"] == []
    (found,) = [each for each in shown["findings"] if each["severity"] == "high"]
    assert found["id"] == "listen.plain-http"
    assert all(each["why"] and each["fix"] for each in shown["findings"])
    assert os.listdir(data_dir) == ["images"]
