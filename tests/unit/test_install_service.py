"""`sandkasten install-service`: what it puts where, that a second call changes nothing, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sandkasten.cli import service
from sandkasten.cli.main import main

FILES = {
    "etc/sandkasten/sandkasten.yaml",
    "etc/sysusers.d/sandkasten.conf",
    "etc/systemd/system/sandkasten-nsinit.service",
    "etc/systemd/system/sandkasten-sandboxes.service",
    "etc/systemd/system/sandkasten.service",
}


def _there(top: Path) -> dict[str, str]:
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def _install(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main(["install-service", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _in_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is where the daemon's unit lets the daemon see it."""
    monkeypatch.setattr(sys, "executable", "/opt/place/bin/python")


def test_units_account_and_configuration_are_put_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is named; the units start this installation's program; whatever the umask, all may read them."""
    before = os.umask(0o077)
    try:
        lines = _install(capsys, "--destdir", tmp_path)
    finally:
        os.umask(before)
    there = _there(tmp_path)
    assert there.keys() == FILES
    assert sorted(lines) == sorted(f"written: {tmp_path / name}" for name in FILES)
    assert "ExecStart=/opt/place/bin/sandkasten serve " in there["etc/systemd/system/sandkasten.service"]
    assert service.PROGRAM not in "".join(there.values())
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in FILES} == {0o644}


def test_a_second_call_changes_nothing_and_a_changed_unit_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings of the operator stay; a missing one is named, and units are ours."""
    _install(capsys, "--destdir", tmp_path)
    first = _there(tmp_path)
    assert {line.split(":")[0] for line in _install(capsys, "--destdir", tmp_path)} == {"unchanged"}
    assert _there(tmp_path) == first
    unit, config = tmp_path / "etc/systemd/system/sandkasten.service", tmp_path / service.CONFIG
    unit.write_text("[Unit]\n")
    config.write_text("server:\n  max_sessions: 7\n")
    lines = _install(capsys, "--destdir", tmp_path)
    assert f"replaced: {unit}" in lines
    assert f"add to {config}: {service.SOCKET}" in lines
    assert (unit.read_text(), config.read_text()) == (
        first[str(unit.relative_to(tmp_path))],
        "server:\n  max_sessions: 7\n",
    )


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines say what would be done."""
    lines = _install(capsys, "--destdir", tmp_path, "--dry-run")
    assert sorted(lines) == sorted(f"would be written: {tmp_path / name}" for name in FILES)
    assert _there(tmp_path) == {}
    assert "not run: systemctl daemon-reload" in _install(capsys, "--dry-run")


@pytest.mark.parametrize(
    ("euid", "program", "said"),
    [(1000, "/opt/place/bin/python", "belong to root"), (0, "/home/ada/.venv/bin/python", "hides /home/ada")],
)
def test_what_could_not_work_is_refused(
    euid: int, program: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without root, or with a program that the daemon's unit hides; nothing is written."""
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(sys, "executable", program)
    assert main(["install-service"]) == 1
    assert said in capsys.readouterr().err
