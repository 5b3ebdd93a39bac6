"""The documentation tells the truth: its Python runs, its shell lines run, and both print what is written there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.goals import GOALS
from sandkasten.api.http.errors import STATUS
from sandkasten.api.http.routing import RouteKind
from sandkasten.api.routes import TABLE
from sandkasten.cli.main import make_parser
from sandkasten.config import MIB, Config
from sandkasten.config.files import load_config
from tests.e2e.daemon import SCRIPT, running_daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
WINDOWS = ROOT / "config/windows/sandkasten-wsl.ps1"
CONFIG = Config()
TRIED_ELSEWHERE = {
    ("README.md", "python"): "tests/sdk/test_usage.py",
    ("docs/sdk.md", "python"): "tests/sdk/test_usage.py",
    ("docs/agents.md", "python"): "tests/adapters run docs/examples, whose lines these are",
    ("docs/operations.md", "console"): "tests/contract/test_operations_docs.py",
    ("docs/operations.md", "sh"): "tests/e2e/test_operations.py restores a backup with them",
    ("docs/images.md", "sh"): "tests/e2e/test_pulls.py, with a registry; tests/kernel/test_recipes.py, with packages; "
    "tests/cli/test_builds.py",
    ("docs/images.md", "dockerfile"): "tests/cli/test_builds.py builds it",
    ("docs/quickstart.md", "sh"): "tests/e2e/test_make.py: `make run`",
    ("docs/deployment.md", "nginx"): "tests/e2e/test_proxies.py",
    ("docs/deployment.md", "caddyfile"): "tests/e2e/test_proxies.py",
    ("docs/architecture.md", "mermaid"): "tests/contract/test_written_docs.py draws it",
}
NOT_TRIED = {
    ("README.md", "sh"): "needs Claude Code and a model; tests/mcp speaks the protocol, tests/adapters run the example",
    ("docs/mcp.md", "sh"): "needs Claude Code; tests/mcp/test_set_up.py connects with what the line says",
    ("docs/systemd.md", "sh"): "needs a machine that systemd runs; its units are tried",
    ("docs/wsl2.md", "powershell"): "needs Windows",
    ("docs/websocket.md", "js"): "needs xterm.js; tests/api/test_terminal_raw.py speaks the protocol",
}
API = (ROOT / "docs/api.md").read_text()
WORKSPACES = (ROOT / "docs/workspaces.md").read_text()
_BLOCK = re.compile(r"^```(\w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"\{\w+\}")

pytestmark = pytest.mark.usefixtures("command_seed")
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


def _pages(kind: str) -> list[str]:
    """Return the pages that have blocks of a kind."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    having = [page for page in pages if kind in {each for each, _ in _blocks(page.read_text())}]
    return [name for page in having if ((name := str(page.relative_to(ROOT))), kind) not in TRIED_ELSEWHERE]


@needs_root
@pytest.mark.parametrize("page", _pages("console"))
def test_the_lines_of_a_page_work_as_a_user_would_paste_them(data_dir: Path, tmp_path: Path, page: str) -> None:
    """All console blocks of a page, one after the other, in one shell: each `$` line is run, and what it prints has the
    shape of the lines below it. The command is at hand, with the data directory of the daemon and an empty home."""
    block = "".join(text for kind, text in _blocks((ROOT / page).read_text()) if kind == "console")
    _check_console(block, data_dir, tmp_path, has_tables=page == "docs/cli.md")


@needs_root
@pytest.mark.parametrize("page", _pages("python"))
def test_the_programs_of_a_page_run_and_print_what_is_shown(data_dir: Path, page: str) -> None:
    """Each Python program, and the block behind it."""
    blocks = _blocks((ROOT / page).read_text())
    for place in (place for place, (kind, _) in enumerate(blocks) if kind == "python"):
        _check_program(blocks[place][1], blocks[place + 1][1], data_dir)


def _check_program(program: str, shown: str, data_dir: Path) -> None:
    command = [sys.executable, "-c", program, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.stdout == shown, done.stderr


def test_the_lines_for_linux_in_the_script_for_windows_are_bash() -> None:
    """bash takes each as PowerShell hands it over, and none has double quotes, which Windows PowerShell drops."""
    found = re.findall(r"Invoke-Linux (['\"])(.*)\1$", WINDOWS.read_text(), re.MULTILINE)
    stops = [each.strip() for each in WINDOWS.read_text().splitlines() if "--terminate" in each]
    assert [each for each in stops if not each.startswith("if ")] == []  # nobody's programs end at a second `ensure`
    assert len(found) > 8
    for quote, text in found:
        line = text.replace("''", "'") if quote == "'" else re.sub(r"\$\{?\w+\}?", "x", text)
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr, '"' in line) == (0, "", False), line


def test_what_is_installed_to_serve_has_the_extras_of_the_server() -> None:
    """Each `pip install` behind which services are installed, or `serve` is begun."""
    texts = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md")), WINDOWS.read_text()]
    commands = [each for text in texts for each in text.split("pip install ")[1:]]
    serving = [each for each in commands if re.search("/sandkasten (install-service|serve)", each)]
    assert len(serving) == 2
    assert [each for each in serving if "[server,mcp]" not in each.splitlines()[0]] == []


@pytest.mark.parametrize("page", _pages("yaml"))
def test_the_settings_of_a_page_are_taken(tmp_path: Path, page: str) -> None:
    """Each block of YAML is a configuration, but for Prometheus' own."""
    for kind, text in _blocks((ROOT / page).read_text()):
        if kind == "yaml" and "scrape_configs" not in text:
            path = tmp_path / "sandkasten.yaml"
            path.write_text(text)
            assert load_config(path, environ={}) != Config()


def test_every_block_of_code_is_tried_or_known_not_to_be() -> None:
    """A page's shell lines are in console blocks, which are run. The others are few, and why is told here."""
    found = {
        (str(page.relative_to(ROOT)), kind)
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for kind, _ in _blocks(page.read_text())
    }
    tried = {(page, kind) for kind in ("console", "python", "yaml") for page in _pages(kind)}
    assert {each for each in found - tried if each[1] not in ("", "json")} == set(TRIED_ELSEWHERE) | set(NOT_TRIED)


def test_the_commands_that_pages_name_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Each `sandkasten ...` in the text has a subcommand and options that there are, if not all that it needs."""
    named: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named |= {" ".join(line.split()) for line in re.findall(r"`sandkasten\s+([a-z-][^`…|]*)`", page.read_text())}
    blocks = "".join(text for kind, text in _blocks((ROOT / "docs/images.md").read_text()) if kind == "sh")
    shown = re.findall(r"\bsandkasten ([a-z-][^#|\n]*)", blocks)
    assert min(len(named), len(shown)) > 10
    for line in shown:
        words = shlex.split(line.partition(" -- ")[0])
        make_parser(words[0]).parse_args(words)
    for line in named:
        try:
            words = shlex.split(line.partition(" -- ")[0])
            make_parser(words[0]).parse_args(words)
        except SystemExit:
            assert re.search("invalid choice|unrecognized", capsys.readouterr().err) is None, line


def _table_shape(text: str) -> str:
    """Replace what differs in tables as well: beginnings of ids, spans, sizes, and how wide columns are."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "<id>", text)
    text = re.sub(r"\b\d+[smhd]( \d+[smhd])?\b", "<span>", text)
    text = re.sub(r"\b[\d.]+ (?:[KM]i)?B\b", "<size>", text)
    return re.sub(r" {2,}", "  ", _shape(text))


def _check_console(block: str, data_dir: Path, home: Path, *, has_tables: bool) -> None:
    """Run the `$` lines against a daemon; what they print must have the shape of the other lines."""
    if "setpriv" in block and not all(path.stat().st_mode & 1 for path in (SCRIPT.parent, *SCRIPT.parent.parents)):
        pytest.skip("other users can't reach this checkout")
    shape = _table_shape if has_tables else _shape
    environment = {
        "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_CONFIG_HOME": "",
        "XDG_STATE_HOME": "",
        "SANDKASTEN_DATA_DIR": str(data_dir),
        "SANDKASTEN_API_KEY": "",
    }
    unix = data_dir / "sandkasten.sock"
    commands: list[str] = []
    shown: list[str] = []
    for line in block.splitlines():
        (commands if line.startswith("$ ") else shown).append(line.removeprefix("$ "))
    with running_daemon(data_dir, "--listen", f"unix:{unix}", SANDKASTEN_API_KEY="") as daemon:
        places = {".sandkasten/": f"{data_dir}/", "/run/sandkasten/sandkasten.sock": str(unix)}
        script = "\n".join(commands).replace("127.0.0.1:8080", daemon.wait_url().removeprefix("http://"))
        for written, here in places.items():
            script = script.replace(written, here)
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=data_dir,
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
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert named <= targets
    assert {"run", "test", "bench"} <= named


def test_the_readme_quotes_the_goals_of_the_last_report() -> None:
    """Rows word for word, how many goals are met, and the report's name."""
    report = max((ROOT / "docs/benchmarks").glob("20*.md"))
    goals = report.read_text().partition("## Goals")[2].partition("\n## ")[0].strip().splitlines()
    quoted = README.partition("<!-- goals: begin -->")[2].partition("<!-- goals: end -->")[0].strip().splitlines()
    assert f"docs/benchmarks/{report.name}" in README
    assert quoted[:2] == goals[:2]
    assert set(quoted) <= set(goals)
    met = sum(line.endswith("| met |") for line in goals)
    assert f"{met} of {len(goals) - 2} goals are met" in re.sub(r"\s+", " ", README)


def test_each_goal_that_the_last_report_calls_missed_has_its_reasons() -> None:
    """Below a heading of its name, in the order of the goals. A goal that is met at times may have one, too."""
    report = max((ROOT / "docs/benchmarks").glob("20*.md")).read_text()
    missed = {line.split(" | ")[0].removeprefix("| ") for line in report.splitlines() if line.endswith("| missed |")}
    page = (ROOT / "docs/benchmarks/README.md").read_text()
    reasons = page.partition("## Goals that are missed\n")[2].partition("\n## ")[0]
    parts = {name: text for name, _, text in (part.partition("\n") for part in reasons.split("\n### ")[1:])}
    assert missed <= parts.keys()
    assert [*parts] == [goal.name for goal in GOALS if goal.name in parts]
    for text in parts.values():
        assert "- **Figure**: " in text
        assert "- **Where" in text


@pytest.mark.parametrize(
    ("page", "sentence", "value", "told"),
    [
        ("concepts", "120 s unless asked otherwise", CONFIG.defaults.max_exec_timeout_ms, 120_000),
        ("concepts", "idle timeout (half an hour unless set)", CONFIG.session_ttl_seconds, 1800),
        ("concepts", "maximum lifetime (none unless set)", CONFIG.maximum.max_lifetime_seconds, None),
        ("concepts", "record stays for a week", CONFIG.records.keep_seconds, 7 * 86_400),
        ("concepts", "15 minutes after its end", CONFIG.runs.keep_seconds, 900),
        ("troubleshooting", "512 by default", CONFIG.defaults.mem_limit_mb, 512),
        ("troubleshooting", "timeout of half an hour", CONFIG.session_ttl_seconds, 1800),
        ("troubleshooting", "120 s unless asked otherwise", CONFIG.defaults.max_exec_timeout_ms, 120_000),
        ("api", "for 15 minutes (`runs.keep_seconds`)", CONFIG.runs.keep_seconds, 900),
        ("api", "64 MiB (`runs.keep_mb`)", CONFIG.runs.keep_mb, 64),
        ("api", "`runs.max_exec_ids` (a million)", CONFIG.runs.max_exec_ids, 1_000_000),
        ("api", "above 5 MiB (`server.output_cap_bytes`)", CONFIG.server.output_cap_bytes, 5 * MIB),
        ("api", "`server.max_json_bytes` (16 MiB)", CONFIG.server.max_json_bytes, 16 * MIB),
        ("events", "newest 100 000 events (`events.keep`", CONFIG.events.keep, 100_000),
    ],
)
def test_the_defaults_that_pages_tell_are_those_of_the_settings(
    page: str, sentence: str, value: object, told: object
) -> None:
    """Where a page outside of the reference tells a default, it is the one of the class."""
    assert sentence in " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert value == told


def test_what_counts_as_proof_leaves_no_test_out() -> None:
    """`make test` leaves out the tests of the emulated machine and the campaigns, and no others; `make vm` and `make
    campaigns` run these, and `.ci/run` all three."""
    campaigns = _run_by("campaigns")
    assert {f"--ignore={each}" for each in ("tests/vm", *campaigns)} == set(_run_by("test"))
    assert [each for each in campaigns if not (ROOT / each).is_file()] == []
    assert "pytest -s tests/vm $(ARGS)" in (ROOT / "Makefile").read_text()
    *_, proof = (ROOT / ".ci/run").read_text().splitlines()
    assert {"test", "campaigns", "vm"} <= set(proof.split())


def _run_by(target: str) -> list[str]:
    """Return the arguments of pytest in the lanes of a target."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ARGS", "LANES", "MAKEFLAGS")}
    command = ["make", "--dry-run", "--assume-old=as-root", target]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    (arguments,) = re.findall(r"tests\.twice \d+ (.+)", printed)
    return str(arguments).split()


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
