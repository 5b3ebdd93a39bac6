"""inspect-ai."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.adapters.conftest import EXAMPLES, PROGRAMS, Ran, results, scenarios

pytestmark = pytest.mark.e2e
PROGRAM = "inspect_eval.py"


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> dict[str, Any]:
    """Run the program once for all tests of this file."""
    return results(run(PROGRAMS / PROGRAM))


@pytest.mark.parametrize("name", scenarios(PROGRAM))
def test_scenario(ran: dict[str, Any], name: str) -> None:
    """The docstring of the scenario is the claim."""
    assert ran[name]["trouble"] is None, ran[name]["trouble"]


def test_the_example(run: Callable[..., Ran]) -> None:
    """docs/examples/inspect_task.py with the scripted model that it has."""
    printed = run(EXAMPLES / "inspect_task.py").stdout
    assert "['3\\n']" in printed
    assert "value=1.0" in printed
