"""`sandkasten install-service`: puts systemd's units of this installation in place, and says what was done.

Writes the units, the account and, if there is none, the configuration; then has systemd make the account and read the
units. Starts and enables nothing. A second call changes nothing. With `--destdir` the files go below that directory and
systemd is not asked; with `--dry-run` nothing is written. Sources: systemd.unit(5), sysusers.d(5), sd_booted(3).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sandkasten.cli.common import Stop, printable_line
from sandkasten.config import ConfigError
from sandkasten.config.files import load_config

UNITS = Path(__file__).with_name("systemd")
PROGRAM = "/opt/sandkasten/.venv/bin/sandkasten"
"""The program in the units as they are shipped."""

CONFIG = Path("etc/sandkasten/sandkasten.yaml")
SOCKET = "nsinit_socket: /run/sandkasten/nsinit.sock"
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Directories that the daemon's unit hides from the daemon (`ProtectHome=`, `PrivateTmp=`)."""

_AFTERWARDS = (("systemd-sysusers",), ("systemctl", "daemon-reload"))
_PATIENCE_S = 60


def install_service(arguments: argparse.Namespace) -> int:
    """Install, and print a line for each file and command."""
    program = Path(sys.executable).with_name("sandkasten")
    if not arguments.dry_run and arguments.destdir is None and os.geteuid() != 0:
        raise Stop("units of the system belong to root: run this with sudo, or see --dry-run and --destdir")
    if arguments.destdir is None and any(program.is_relative_to(each) for each in _HIDDEN):
        raise Stop(
            f"the daemon's unit hides {program} from the daemon, as it does every home directory: "
            "install sandkasten in a directory such as /opt/sandkasten"
        )
    top = arguments.destdir or Path("/")
    for path, text in _files(program):
        _put(top / path, text, is_dry=arguments.dry_run)
    _look_at_config(top / CONFIG, is_dry=arguments.dry_run)
    if arguments.destdir is None:
        for command in _AFTERWARDS:
            _have_done(command, is_dry=arguments.dry_run)
        print("start both: systemctl enable --now sandkasten-nsinit sandkasten")
    return 0


def _files(program: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file's path below the root, and its text."""
    for unit in sorted(UNITS.glob("*.service")):
        yield Path("etc/systemd/system", unit.name), unit.read_text().replace(PROGRAM, str(program))
    yield Path("etc/sysusers.d/sandkasten.conf"), (UNITS / "sandkasten.sysusers").read_text()


def _put(path: Path, text: str, *, is_dry: bool) -> None:
    """Write a file whole, unless it has that text."""
    is_there = path.exists()
    if is_there and path.read_text(errors="replace") == text:
        _say("unchanged", path)
        return
    _say(f"{'would be ' if is_dry else ''}{'replaced' if is_there else 'written'}", path)
    if is_dry:
        return
    draft = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft.write_text(text)
        draft.chmod(0o644)
        draft.rename(path)
    except OSError as error:
        raise Stop(f"can't write {path}: {error.strerror}") from None


def _look_at_config(path: Path, *, is_dry: bool) -> None:
    """Write a configuration if there is none. The operator's own is never changed, only read."""
    if not path.exists():
        _put(path, f"# See docs/configuration.md for the settings.\n{SOCKET}\n", is_dry=is_dry)
        return
    try:
        is_complete = load_config(path, environ={}).nsinit_socket is not None
    except ConfigError as error:
        raise Stop(str(error)) from None
    _say("unchanged", path)
    if not is_complete:
        print(f"add to {printable_line(str(path))}: {SOCKET}")


def _have_done(command: tuple[str, ...], *, is_dry: bool) -> None:
    """Run one of systemd's commands, where systemd is the machine's init."""
    line = " ".join(command)
    if is_dry or not Path("/run/systemd/system").is_dir():
        print(f"not run: {line}" if is_dry else f"not run, as systemd does not run this machine: {line}")
        return
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Stop(f"{line}: {error}") from None
    if done.returncode:
        raise Stop(f"{line}: {printable_line(done.stderr.strip()) or f'exit status {done.returncode}'}")
    print(f"run: {line}")


def _say(what: str, path: Path) -> None:
    print(f"{what}: {printable_line(str(path))}")
