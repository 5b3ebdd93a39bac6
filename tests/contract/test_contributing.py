"""The worked examples of CONTRIBUTING.md and docs/agents.md are lines of the code they are said to be from."""

from __future__ import annotations

import itertools
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/agents.md"))
EXAMPLES = re.findall(r"<!-- from (\S+) -->\n\s*```python\n(.*?)\n\s*```\n", PAGES, re.DOTALL)


def lines_of(text: str) -> str:
    """Return the lines without their common indentation, and without that of their place."""
    return "\n".join(line.strip() for line in textwrap.dedent(text).splitlines())


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
def test_an_example_is_what_the_code_says(path: str, example: str) -> None:
    """Lines of an example are lines of the file that the page names."""
    assert lines_of(example) in lines_of((ROOT / path).read_text())


def test_every_example_for_a_framework_is_on_the_page() -> None:
    """docs/agents.md shows each file of docs/examples."""
    files = {f"docs/examples/{path.name}" for path in (ROOT / "docs/examples").glob("*.py")}
    assert {path for path, _ in EXAMPLES if path.startswith("docs/")} == files


def test_every_kind_of_change_has_an_example() -> None:
    """A setting, a route, a privileged request and a protection."""
    assert {path for path, _ in EXAMPLES} >= {
        "sandkasten/config/values.py",
        "sandkasten/api/resources/keys.py",
        "sandkasten/api/routes.py",
        "nsinit/wire/protocol.py",
        "nsinit/server/requests.py",
        "sandkasten/actors/session/pausing.py",
        "nsinit/tools/trials/processes.py",
        "sandkasten/host/checks.py",
    }


def test_every_dependency_has_its_reason() -> None:
    """The record of packages names each that `pyproject.toml` does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {match.group() for each in wanted if (match := re.match(r"[\w.-]+", each))}
    record = (ROOT / "docs" / "adr" / "0010-packages.md").read_text()
    rows = {
        name.strip() for row in re.findall(r"^\| (.*?) \|", record, re.MULTILINE) for name in re.split(r"[,;(]", row)
    }
    assert names - rows == set()
