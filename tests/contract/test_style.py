"""Types, lint, format and trio rules as tests, so that one command tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from functools import cache as once
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sandkasten", "nsinit", "runner", "egress", "tests", "bench", "docs")
MAX_LINES = 800
FEW_LINES = 60
SLIVERS = {"sandkasten": 11, "nsinit": 5, "runner": 2, "egress": 0, "tests": 49, "bench": 3}
"""Ceilings, by package, of files with fewer lines than `FEW_LINES`; they may only be lowered."""

DOMAINS = ("sandkasten", "nsinit", "runner", "egress")
CLIENT = "sandkasten/sdk"
"""The clients' part of `sandkasten` is a domain by itself."""

TWIN = ROOT / "sandkasten/sync"
"""The blocking client, which is made from the asynchronous one and has its names."""

CLIENT_NAMES = {
    *(
        "EgressEntry",
        "EgressPage",
        "Event",
        "Events",
        "ExecResult",
        "FileInfo",
        "SecretInfo",
        "FileStream",
        "Files",
        "NetworkInfo",
        "Preview",
        "NodeInfo",
        "Output",
        "Port",
        "Run",
        "Session",
    ),
    *("SessionStats", "ShellInfo", "Terminal", "Waited", "Workspace"),
}
"""Class names of the clients for what a class of that name is in the server."""

SIGNPOSTS = {f"sandkasten/{name}.py" for name in ("client", "session", "types", "exceptions")}
"""Modules of the published client that give names of other modules on."""

SHARED_NAMES = {
    "CloseShell": "the actor's message, and the request to PID 1 that it becomes",
    "Crash": "a crash point; nsinit imports nothing of the daemon",
    "EgressEntry": "a line of the log: as the process that carries tells it, and as a client reads it",
    "FileRules": "the paths of a session: the model's, and those sent to PID 1",
    "InvalidRule": "a text that is no rule: what a reader of rules finds, and the error that the client gets",
    "Leftover": "a thing of no session: nsinit's finding, and the planner's reading of it",
    "Limits": "a session's limits: in a caller's units, and in the kernel's",
    "ListRuns": "the actor's message, and the request to PID 1 that it becomes",
    "OpenShell": "the actor's message, and the request to PID 1 that it becomes",
    "Ports": "the open ports of a session: read by PID 1, told of by the daemon",
    "ProtocolError": "bytes that are no message of a contract; the way out imports no codec of the others",
    "Resize": "a terminal's new size: from a client, and to PID 1",
    "Run": "a run: the daemon's part, and PID 1's",
    "Sessions": "all sessions: the daemon's part, and nsinit's",
    "Shell": "a persistent shell: the daemon's part, and PID 1's",
    "ShellInfo": "a persistent shell: the model's, and PID 1's answer",
    "Shells": "the persistent shells of a session: the daemon's part, and PID 1's",
    "TerminalSize": "a terminal's size: the model's, and PID 1's",
    "Workspaces": "all workspaces: the daemon's part, and nsinit's",
}
"""Class names that two trust domains have for one idea, and the idea."""

ASYNC_RULES = tuple(
    f"ASYNC{number}"
    for number in (
        *(102, 103, 104, 111, 112, 118, 119, 120, 121, 122, 123),
        *(200, 211, 212, 231, 232, 400, 900),
    )
)
"""Rules of flake8-async that ruff does not have; ruff checks the others of the same numbers, much faster."""

SCOPES = re.compile(r"nursery|CancelScope|move_on|fail_a")

UNSAFE = "async def wait(task):\n    try:\n        pass\n    finally:\n        await task()\n"
"""Code that breaks ASYNC102."""


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def check(*command: str) -> None:
    """Run a tool of this environment; its findings are the failure."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command[:2])}\n{done.stdout[-20_000:]}{done.stderr[-2_000:]}", pytrace=False)


def test_types_are_strict() -> None:
    """mypy --strict has nothing to say."""
    check("mypy")


def test_lint_is_clean() -> None:
    """ruff's rules hold, those for trio included."""
    check("ruff", "check", "--no-cache", *FOLDERS)


def test_format_is_that_of_ruff() -> None:
    """No diff is about layout."""
    check("ruff", "format", "--no-cache", "--check", *FOLDERS)


def async_findings(path: str, text: str) -> list[str]:
    """Return what flake8-async says of a module by the rules that need no concrete syntax tree."""
    from flake8_async.runner import Flake8AsyncRunner  # half a second, which other lanes need not spend

    return [f"{path}:{each}" for each in Flake8AsyncRunner.run(ast.parse(text), async_options())]


@once
def async_options() -> Any:
    from flake8_async import Plugin

    parser = ArgumentParser()
    Plugin.add_options(parser)
    Plugin.parse_options(parser.parse_args(["--enable", ",".join(ASYNC_RULES)]))
    return Plugin._options


def test_async_code_follows_the_trio_rules(cache: pytest.Cache) -> None:
    """No swallowed cancellation, no yield in a nursery, no unshielded clean-up, no blocking call. Modules as they were
    when nothing was found are not looked at again, by the same version of the rules."""
    texts = {str(path): path.read_text() for path in sources() if path.is_relative_to(ROOT / "sandkasten")}
    asynchronous = {path: text for path, text in texts.items() if re.search(r"^import trio", text, re.MULTILINE)}
    assert asynchronous
    assert async_findings("unsafe", f"import trio\n{UNSAFE}") != []
    rules_of = f"{version('flake8-async')} {ASYNC_RULES}"
    digests = {path: sha256(f"{rules_of}\n{text}".encode()).hexdigest() for path, text in asynchronous.items()}
    clean = set(cache.get("sandkasten/trio-rules", []))
    changed = {path: text for path, text in asynchronous.items() if digests[path] not in clean}
    assert [each for path, text in changed.items() for each in async_findings(path, text)] == []
    # Rules that flake8-async needs a concrete syntax tree for, which takes ten times as long.
    rules: dict[str, Callable[[str], object]] = {
        "ASYNC101": yields_beside_a_scope,
        "ASYNC300": re.compile(r"\basyncio\b").search,
    }
    for rule, may_break in rules.items():
        suspects = [path for path, text in changed.items() if may_break(text)]
        if suspects:
            check("flake8-async", "--enable", rule, *suspects)
    cache.set("sandkasten/trio-rules", sorted(digests.values()))
    assert yields_beside_a_scope("async def rows():\n    async with trio.open_nursery():\n        yield 1\n")


def yields_beside_a_scope(text: str) -> bool:
    """Return whether a generator that is no context manager has a nursery or a cancel scope."""
    for node in ast.walk(ast.parse(text)) if SCOPES.search(text) and "yield" in text else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            source = ast.unparse(node)
            if "contextmanager" not in source.partition("def ")[0] and "yield" in source and SCOPES.search(source):
                return True
    return False


def test_files_stay_readable() -> None:
    """No file outgrows what a person takes in at once."""
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


@pytest.mark.parametrize("folder", SLIVERS)
def test_few_files_are_slivers(folder: str) -> None:
    """A concept stands in one file; a package's `__init__` is a signpost and does not count."""
    sizes = {
        path: len(path.read_text().splitlines())
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder and not path.is_relative_to(TWIN)
    }
    slivers = [
        path
        for path, size in sizes.items()
        if 0 < size < FEW_LINES and path.name != "__init__.py" and str(path.relative_to(ROOT)) not in SIGNPOSTS
    ]
    print(*slivers, sep="\n")
    assert len(slivers) <= SLIVERS[folder]


def test_every_module_says_what_it_owns() -> None:
    """Each file that has code opens with a docstring."""
    silent = [
        str(path.relative_to(ROOT)) for path in sources() if (text := path.read_text()) and not text.startswith('"""')
    ]
    assert silent == []


def test_class_names_have_one_home() -> None:
    """A name means one thing: two domains share one only for one idea, and no domain has a name twice."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        domain = path.relative_to(ROOT).parts[0]
        if path.is_relative_to(ROOT / CLIENT):
            domain = CLIENT
        if domain in (*DOMAINS, CLIENT) and not path.is_relative_to(TWIN):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(domain)
    assert {name: each for name, each in homes.items() if len(each) > len(set(each))} == {}
    shared = {name for name, each in homes.items() if len(each) > 1}
    assert {name for name in shared if CLIENT in homes[name]} == CLIENT_NAMES
    assert sorted(name for name in shared if len(set(homes[name]) - {CLIENT}) > 1) == sorted(SHARED_NAMES)


def test_nothing_is_left_for_later() -> None:
    """Open points are issues, not comments."""
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    found = [str(path.relative_to(ROOT)) for path in sources() if marks.search(path.read_text())]
    assert found == []
