"""The documentation tells the truth: its Python runs, its shell lines run, and both print what is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from sandkasten.api.http.errors import STATUS
from sandkasten.api.http.routing import RouteKind
from sandkasten.api.routes import TABLE
from tests.e2e.daemon import SCRIPT, running_daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()
WORKSPACES = (ROOT / "docs/workspaces.md").read_text()
_BLOCK = re.compile(r"^```(\w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"\{\w+\}")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def _blocks(text: str) -> list[tuple[str, str]]:
    return _BLOCK.findall(text)


def _shape(text: str) -> str:
    """Replace what differs from run to run: ids, times, durations, counters."""
    text = re.sub(r"\b[0-9a-f]{24}\b", "<id>", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "<id>", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>", text)
    text = re.sub(r'("(?:duration_ms|queued_ms|cpu_ms|peak_memory_bytes|written_bytes)":\s?)\d+', r"\1<n>", text)
    return re.sub(r'"timestamp":\s?\d+', '"timestamp":<n>', text).strip()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        yield Path(directory)


@needs_root
@pytest.mark.parametrize("number", range(2))
def test_the_library_examples_run_and_print_what_is_shown(data_dir: Path, number: int) -> None:
    """docs/library.md: each program, then its output."""
    blocks = [text for _, text in _blocks((ROOT / "docs/library.md").read_text())]
    assert len(blocks) == 4
    program, shown = blocks[2 * number : 2 * number + 2]
    command = [sys.executable, "-c", program, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.stdout == shown, done.stderr


@needs_root
def test_the_first_session_of_the_readme_works_line_by_line(data_dir: Path) -> None:
    """Each `$` line of the console block is run by one shell, as a new user would paste it."""
    block = next(text for kind, text in _blocks(README) if kind == "console")
    _check_console(block, data_dir)


@needs_root
def test_the_examples_of_the_api_work_line_by_line(data_dir: Path) -> None:
    """docs/api.md: all its console blocks, one after the other, in one shell."""
    _check_console("".join(text for kind, text in _blocks(API) if kind == "console"), data_dir)


@needs_root
def test_the_example_of_the_workspaces_works_line_by_line(data_dir: Path) -> None:
    """docs/workspaces.md likewise."""
    _check_console("".join(text for kind, text in _blocks(WORKSPACES) if kind == "console"), data_dir)


@needs_root
def test_the_examples_of_keys_work_line_by_line(data_dir: Path) -> None:
    """docs/keys.md: made, used, over a quota, revoked, in one shell with the command at hand."""
    text = (ROOT / "docs/keys.md").read_text()
    environment = {"PATH": f"{SCRIPT.parent}:{os.environ['PATH']}", "SANDKASTEN_DATA_DIR": str(data_dir)}
    _check_console("".join(block for kind, block in _blocks(text) if kind == "console"), data_dir, environment)


@needs_root
def test_the_examples_of_the_command_line_work_line_by_line(data_dir: Path, tmp_path: Path) -> None:
    """docs/cli.md: all its console blocks in one shell, that of a person with an empty home."""
    text = (ROOT / "docs/cli.md").read_text()
    environment = {
        "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": "",
        "XDG_STATE_HOME": "",
        "SANDKASTEN_DATA_DIR": str(data_dir),
        "SANDKASTEN_API_KEY": "",
    }
    block = "".join(block for kind, block in _blocks(text) if kind == "console")
    _check_console(block, data_dir, environment, shape=_table_shape)


def _table_shape(text: str) -> str:
    """Replace what differs in tables as well: beginnings of ids, spans, sizes, and how wide columns are."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "<id>", text)
    text = re.sub(r"\b\d+[smhd]( \d+[smhd])?\b", "<span>", text)
    text = re.sub(r"\b[\d.]+ (?:[KM]i)?B\b", "<size>", text)
    return re.sub(r" {2,}", "  ", _shape(text))


def _check_console(
    block: str,
    data_dir: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    shape: Callable[[str], str] = _shape,
) -> None:
    """Run the `$` lines against a daemon; what they print must have the shape of the other lines."""
    commands: list[str] = []
    shown: list[str] = []
    for line in block.splitlines():
        (commands if line.startswith("$ ") else shown).append(line.removeprefix("$ "))
    with running_daemon(data_dir, SANDKASTEN_API_KEY="") as daemon:
        url = daemon.wait_url()
        script = "\n".join(commands).replace(".sandkasten/api-key", str(data_dir / "api-key"))
        done = subprocess.run(
            ["bash", "-e", "-c", script.replace("http://127.0.0.1:8080", url)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout.replace("}{", "}\n{")) == shape("\n".join(shown)), done.stderr


def test_the_readme_names_make_targets_that_exist() -> None:
    """Every `make …` in the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert named <= targets
    assert {"run", "test", "bench"} <= named


def test_the_readme_quotes_the_goals_of_the_last_report() -> None:
    """Word for word, and names the report."""
    report = max((ROOT / "docs/benchmarks").glob("20*.md"))
    goals = report.read_text().partition("## Goals")[2].partition("\n## ")[0].strip()
    quoted = README.partition("<!-- goals: begin -->")[2].partition("<!-- goals: end -->")[0].strip()
    assert f"docs/benchmarks/{report.name}" in README
    assert quoted == goals


def test_what_counts_as_proof_leaves_no_test_out() -> None:
    """`make test` ignores the tests of the emulated machine and no others; `make vm` runs these, and `.ci/run` both."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^(test|vm):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    assert re.findall(r"--(?:ignore|deselect)\S*", makefile) == ["--ignore=tests/vm)"]
    assert "$(or $(ARGS),--ignore=tests/vm)" in recipes["test"]
    assert "pytest -s tests/vm $(ARGS)" in recipes["vm"]
    *_, proof = (ROOT / ".ci/run").read_text().splitlines()
    assert {"test", "vm"} <= set(proof.split())


def test_the_documented_error_codes_are_those_of_the_table() -> None:
    """docs/api.md lists every code with its status, and no other."""
    documented = set()
    for codes, status in re.findall(r"^\| (`[A-Z_`, ]+`) \| (\d{3}) \|", API, re.MULTILINE):
        documented |= {(code, int(status)) for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert documented == {(error.code, status) for error, status in STATUS.items()}


def test_the_documented_routes_are_those_that_there_are() -> None:
    """docs/api.md and docs/events.md name every route beneath a session with its method, and no other."""
    above = "/v1/sessions/{id}/"
    routes = {(method, path.removeprefix(above)) for method, path in _requests() if path.startswith(above)}
    text = API + (ROOT / "docs/events.md").read_text()
    found = re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (?:/v1/sessions/\{id\}|…)/([^`?\s]+)", text)
    documented = {(method, path) for method, path in found if not path.endswith("/ws")}
    assert {(method, _PARAMETER.sub("{}", path)) for method, path in documented} == {
        (method, _PARAMETER.sub("{}", path)) for method, path in routes
    }


def test_the_documented_routes_of_workspaces_are_those_that_there_are() -> None:
    """docs/workspaces.md names each with its method, and no other."""
    routes = {(method, path) for method, path in _requests() if path.startswith("/v1/workspaces")}
    found = re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/v1/workspaces[^`?\s]*)", WORKSPACES)
    documented = {(method, _PARAMETER.sub("{}", path)) for method, path in found}
    assert documented == {(method, _PARAMETER.sub("{}", path)) for method, path in routes}


def _requests() -> set[tuple[str, str]]:
    """Return the method and path of every route but WebSockets."""
    return {(route.method, route.path) for route in TABLE.routes if route.kind is not RouteKind.WEBSOCKET}


def test_links_between_documents_lead_somewhere() -> None:
    """No relative link is broken."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
