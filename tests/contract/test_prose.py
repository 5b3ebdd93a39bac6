"""The mechanical part of the prose rule: how docstrings begin, and that the files they name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sandkasten", "nsinit", "runner", "egress", "tests", "bench", "docs")

_PERSONAL = "it|its|he|him|his|she|her|they|them|their"
_FIRST = re.compile(
    rf"(?:{_PERSONAL}|this|that|these|those|who|whom|whose|whoever|what|whatever|which|whichever|how"
    r"|and|so|or|but|nor|yet)\b",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"\w+ (?:(?:that|what|whether|if|when|where|why|how|as|until|while) )?(?:it|he|him|she|they|them)\b", re.IGNORECASE
)
"""A verb or a conjunction, and then a pronoun: no noun stands before."""
_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.py)`")
_SKIPPED = {".git", ".venv", ".venv-agents", ".venv-e2b", ".venv-e2b-newest", ".sandkasten", "__pycache__"} | {
    f".{name}" for name in ("mypy_cache", "ruff_cache", "pytest_cache", "hypothesis")
}


@cache
def docstrings(package: str) -> tuple[tuple[str, str], ...]:
    """Return the place and the text of every docstring, those below assignments included."""
    return tuple(_docstrings(package))


def _docstrings(package: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield f"{path.relative_to(ROOT)}:{statement.lineno}", text.strip()


def is_offence(text: str) -> bool:
    """Tell whether a docstring begins with a pronoun or a conjunction, or is one line on a pronoun without a noun."""
    return bool(_FIRST.match(text) or ("\n" not in text and _BARE.match(text)))


@cache
def files() -> frozenset[str]:
    """Return every tail of the path of every Python file here: for a/b.py both itself and b.py."""
    places = (place for place in ROOT.iterdir() if place.name not in _SKIPPED)  # an environment has 10^5 files
    paths = [path.relative_to(ROOT) for place in places for path in (place, *place.rglob("*")) if path.suffix == ".py"]
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


@pytest.mark.parametrize(
    "text", ["It ends.", "Those who wait.", "Whether it runs.", "Say that they end.", "Stop it.", "And no other."]
)
def test_an_offence_is_found(text: str) -> None:
    """The check would find what it is for."""
    assert is_offence(text)


@pytest.mark.parametrize(
    "text", ["Item of a list.", "Orders and answers.", "Whether a run ends.", "Requests in flight; it counts them."]
)
def test_a_noun_is_no_pronoun(text: str) -> None:
    """The check finds no fault with nouns and verbs."""
    assert not is_offence(text)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_noun_or_a_verb(package: str) -> None:
    """A reader need not guess who is meant."""
    assert [f"{place}: {text.splitlines()[0]}" for place, text in docstrings(package) if is_offence(text)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_named_files_exist(package: str) -> None:
    """A file that was moved is named by its present name."""
    if package == "docs":
        pages = (*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"))
        texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in pages if path.name != "CHANGELOG.md"]
    else:
        texts = [*docstrings(package)]
    assert [f"{place}: {name}" for place, text in texts for name in _FILE.findall(text) if name not in files()] == []
