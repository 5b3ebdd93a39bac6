"""LangChain deepagents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.adapters.conftest import EXAMPLES, PROGRAMS, Ran, results, scenarios
from tests.adapters.scripted import scripted

pytestmark = pytest.mark.e2e
PROGRAM = "deep_agents.py"


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> dict[str, Any]:
    """Run the program once for all tests of this file."""
    return results(run(PROGRAMS / PROGRAM))


@pytest.mark.parametrize("name", scenarios(PROGRAM))
def test_scenario(ran: dict[str, Any], name: str) -> None:
    """The docstring of the scenario is the claim."""
    assert ran[name]["trouble"] is None, ran[name]["trouble"]


def test_the_example(run: Callable[..., Ran]) -> None:
    """docs/examples/deep_agents.py, as it is: only the model's address is another."""
    write = ("write_file", {"file_path": "/workspace/primes.py", "content": "print(2, 3, 5)\n"})
    with scripted(write, ("execute", {"command": "python3 primes.py"}), "They are 2, 3 and 5.") as model:
        assert run(EXAMPLES / "deep_agents.py", **model.environment).stdout == "They are 2, 3 and 5.\n"
        assert "2 3 5" in model.texts()[1]
