"""OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.adapters.conftest import EXAMPLES, PROGRAMS, Ran, results, scenarios
from tests.adapters.scripted import scripted

pytestmark = pytest.mark.e2e
PROGRAM = "openai_agents.py"


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> dict[str, Any]:
    """Run the program once for all tests of this file."""
    return results(run(PROGRAMS / PROGRAM))


@pytest.mark.parametrize("name", scenarios(PROGRAM))
def test_scenario(ran: dict[str, Any], name: str) -> None:
    """The docstring of the scenario is the claim."""
    assert ran[name]["trouble"] is None, ran[name]["trouble"]


def test_the_example(run: Callable[..., Ran]) -> None:
    """docs/examples/openai_agents.py, as it is: only the model's address is another."""
    with scripted(("exec_command", {"cmd": "wc -w <notes.txt"}), "It has three words.") as model:
        assert run(EXAMPLES / "openai_agents.py", **model.environment).stdout == "It has three words.\n"
        assert model.texts()[0].endswith("Output:\n3\n")
