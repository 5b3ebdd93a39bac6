"""State of an actor is its own: nobody assigns an attribute of another object, and messages are frozen values."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandkasten.actors
from sandkasten.actors.core import Ask, Tell
from sandkasten.actors.runs.run import Run, RunRequest
from sandkasten.model import ExecSpec

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "sandkasten" / "actors").rglob("*.py"))
MAX_RUN_ATTRIBUTES = 20

FOREIGN = {
    ("session/lease.py", "self._scope.deadline"),  # trio's way to move the deadline of a scope
    ("supervision.py", "self._scope.shield"),  # trio's way to shield a scope
    ("runs/waiting.py", "options.max_mem"),  # RE2 takes its options as attributes
    ("runs/waiting.py", "options.log_errors"),
    ("services/store.py", "failure.__cause__"),  # as `raise … from` does, for an error that is returned
}
"""Assignments that a library's interface asks for."""


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield every attribute that is assigned, augmented or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def test_nobody_assigns_attributes_of_another_object() -> None:
    """A reader of a class sees all places where its state changes."""
    directory = ROOT / "sandkasten" / "actors"
    found = {
        (str(path.relative_to(directory)), ast.unparse(target))
        for path in MODULES
        for target in assigned(ast.parse(path.read_text()))
        if not is_own(target)
    }
    assert found == FOREIGN


def messages() -> list[type[object]]:
    """Return every class of a message to an actor, whatever was imported first."""
    for module in pkgutil.walk_packages(sandkasten.actors.__path__, "sandkasten.actors."):
        importlib.import_module(module.name)
    found = [each for each in subclasses(Ask) + subclasses(Tell) if is_defined(each)]
    ours = [each for each in found if each.__module__.startswith("sandkasten.")]  # and none of a test
    return sorted(ours, key=lambda each: (each.__module__, each.__name__))


def is_defined(message: type[object]) -> bool:
    """Whether its module has it; attrs makes a class with slots of one without, which may still be there."""
    return getattr(sys.modules[message.__module__], message.__name__) is message


def subclasses(base: type[object]) -> list[type[object]]:
    direct = base.__subclasses__()
    return direct + [each for child in direct for each in subclasses(child)]


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.__name__)
def test_messages_are_frozen(message: type[object]) -> None:
    """A message is a value: neither side can change it under the other."""
    assert "__attrs_attrs__" in vars(message)  # of its own: an undecorated subclass has a __dict__
    assert message.__setattr__ is not object.__setattr__


async def test_a_run_has_few_attributes() -> None:
    """State and nothing else: what others count or keep of a run they keep themselves."""
    run = Run(RunRequest(ExecSpec("true"), timeout_ms=None))
    assert len(vars(run)) <= MAX_RUN_ATTRIBUTES
