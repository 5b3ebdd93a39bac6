"""Parts of the documentation are written by scripts, from the code: the picture of the packages, the settings, the
reference of the routes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/configuration.md")


def check(script: Path, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, "--check"], cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["docs/picture.py", "docs/settings.py", "docs/reference.py"])
def test_what_a_script_writes_is_what_stands_there(script: str) -> None:
    """A further run would change nothing. Packages that import each other in a circle can't be drawn, and a setting
    without a sentence is refused."""
    done = check(ROOT / script)
    assert done.returncode == 0, f"run python {script}\n{done.stderr}"


def test_a_setting_without_a_sentence_and_a_stale_bound_are_found(tmp_path: Path) -> None:
    """Beside a page that lacks one sentence and has another bound than the class."""
    for name in ("docs/settings.py", "docs/configuration.md", "config/sandkasten.example.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    text = (ROOT / PAGE).read_text()
    shorter = re.sub(r"^(\| `events.keep`.* \|) .* \|$", r"\1  |", text, flags=re.MULTILINE)
    (tmp_path / PAGE).write_text(shorter.replace("| 1 to 86400 |", "| 1 to 86401 |"))
    done = check(tmp_path / "docs/settings.py", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "events.keep: no sentence",
        "docs/configuration.md: not as written",
        "config/sandkasten.example.yaml: not as written",
    ]
