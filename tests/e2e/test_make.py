"""The two commands of the README as they are typed: `make run` and `make test`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
NOBODY = 65_534


def start(data_dir: Path) -> Daemon:
    """`make run` on a free port, in an environment that is taken as it is; a terminal's Ctrl-C reaches its group."""
    command = ["make", "--no-print-directory", "-o", ".venv/.installed", "run", f"DATA={data_dir}"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SANDKASTEN_", "MAKE"))}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "ARGS=--listen 127.0.0.1:0"],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        process_group=0,
    )
    return Daemon(process, data_dir)


def in_another_terminal(data_dir: Path, directory: Path) -> str:
    """Return what a command in a sandbox prints that is typed in a checkout where `make run` serves."""
    if not (directory / ".sandkasten").exists():
        (directory / ".sandkasten").symlink_to(data_dir)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SANDKASTEN_")}
    done = subprocess.run(
        [ROOT / ".venv/bin/sandkasten", "run", "--", "python3", "-c", "print(42)"],
        cwd=directory,
        env=variables | {"HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    return done.stdout or done.stderr


def interrupt(daemon: Daemon) -> None:
    os.killpg(daemon.process.pid, signal.SIGINT)
    daemon.process.wait(patience(30))
    daemon.close()


@pytest.mark.skipif(not (ROOT / ".venv/bin/sandkasten").exists(), reason="needs the environment that make makes")
def test_make_run_serves_twice_in_a_row(data_dir: Path, tmp_path: Path) -> None:
    """The second start finds image, configuration and key of the first; the printed line works, another says how
    to get an image, and the command line finds the daemon; Ctrl-C leaves none."""
    kept = []
    for _ in range(2):
        daemon = start(data_dir)
        try:
            daemon.wait_url()
            line = daemon.wait_printed(r"^\s*curl")
            daemon.wait_printed("sandkasten image build --recipe python")
            done = subprocess.run(
                ["bash", "-c", line.strip()], capture_output=True, text=True, timeout=patience(30), check=False
            )
            assert json.loads(done.stdout)["status"] == "running", done.stderr
            assert in_another_terminal(data_dir, tmp_path) == "42\n"
        finally:
            interrupt(daemon)
        assert list((data_dir / "sessions").iterdir()) == []
        kept.append([(data_dir / name).read_text() for name in ("api-key", "sandkasten.yaml", "images/host/meta.json")])
    assert kept[0] == kept[1]


@pytest.mark.skipif(not (ROOT / ".venv/bin/sandkasten").exists(), reason="needs the environment that make makes")
def test_make_install_makes_all_that_a_run_needs_and_starts_nothing(data_dir: Path) -> None:
    """Image, configuration and key are there; a second time they stay what they are."""
    command = ["make", "--no-print-directory", "-o", ".venv/.installed", "install", f"DATA={data_dir}"]
    said = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said[0] == said[1]
    for name in ("sandkasten.yaml", "api-key"):
        assert str(data_dir / name) in said[0]
        assert (data_dir / name).stat().st_mode & 0o777 == 0o600
    assert (data_dir / "images/host/meta.json").exists()
    assert not (data_dir / "sandkasten.db").exists()


@pytest.mark.parametrize("target", ["install", "run", "test"])
def test_who_is_not_root_gets_one_sentence(tmp_path: Path, target: str) -> None:
    """`make run` without root installs and makes nothing; one sentence says what to do."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for directory in (tmp_path, *tmp_path.parents):
        if not (mode := directory.stat().st_mode) & 0o001:
            directory.chmod(mode | 0o001)
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", str(tmp_path / "Makefile"), target],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PATH": os.environ["PATH"]},
    )
    (line,) = done.stderr.splitlines()
    assert "needs root: run `sudo make`, or be root in a virtual machine" in line
    assert (done.returncode, done.stdout) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
