"""The documentation tells the truth: its Python runs, its shell lines run, and both print what is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkasten.api.errors import STATUS
from tests.e2e.daemon import running_daemon

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
_BLOCK = re.compile(r"^```(\w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def _blocks(text: str) -> list[tuple[str, str]]:
    return _BLOCK.findall(text)


def _shape(text: str) -> str:
    """Replace what differs from run to run: ids, times, durations, counters."""
    text = re.sub(r"\b[0-9a-f]{24}\b", "<id>", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "<id>", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>", text)
    text = re.sub(r'("(?:duration_ms|cpu_ms|peak_memory_bytes)":\s?)\d+', r"\1<n>", text)
    return re.sub(r'"timestamp":\s?\d+', '"timestamp":<n>', text).strip()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


@needs_root
def test_the_library_example_runs_and_prints_what_is_shown(data_dir: Path) -> None:
    """docs/library.md: the program, then its output."""
    (_, program), (_, shown) = _blocks((ROOT / "docs/library.md").read_text())
    command = [sys.executable, "-c", program, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == shown, done.stderr


@needs_root
def test_the_first_session_of_the_readme_works_line_by_line(data_dir: Path) -> None:
    """Each `$` line of the console block is run by one shell, as a new user would paste it."""
    block = next(text for kind, text in _blocks(README) if kind == "console")
    commands: list[str] = []
    shown: list[str] = []
    for line in block.splitlines():
        (commands if line.startswith("$ ") else shown).append(line.removeprefix("$ "))
    with running_daemon(data_dir, SANDKASTEN_API_KEY="") as daemon:
        url = daemon.wait_url()
        script = "\n".join(commands).replace(".sandkasten/api-key", str(data_dir / "api-key"))
        done = subprocess.run(
            ["bash", "-e", "-c", script.replace("http://127.0.0.1:8080", url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert _shape(done.stdout.replace("}{", "}\n{")) == _shape("\n".join(shown)), done.stderr


def test_the_readme_names_make_targets_that_exist() -> None:
    """Every `make …` in the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert named <= targets
    assert {"run", "test", "bench"} <= named


def test_the_documented_error_codes_are_those_of_the_table() -> None:
    """docs/api.md lists every code with its status, and no other."""
    text = (ROOT / "docs/api.md").read_text()
    documented = set()
    for codes, status in re.findall(r"^\| (`[A-Z_`, ]+`) \| (\d{3}) \|", text, re.MULTILINE):
        documented |= {(code, int(status)) for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert documented == {(error.code, status) for error, status in STATUS.items()}


def test_links_between_documents_lead_somewhere() -> None:
    """No relative link is broken."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
