"""OpenAI Agents SDK, LangChain deepagents and inspect-ai: a program of scenarios each, and the example of the docs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.adapters.conftest import EXAMPLES, PROGRAMS, Ran, results, scenarios
from tests.adapters.scripted import scripted

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("command_seed")]
FRAMEWORKS = ("openai_agents.py", "deep_agents.py", "inspect_eval.py")


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> Callable[[str], dict[str, Any]]:
    """Run a program, once for all tests, when the first of its scenarios is asked for."""
    return cache(lambda program: results(run(PROGRAMS / program)))


@pytest.mark.parametrize(("program", "name"), [(each, name) for each in FRAMEWORKS for name in scenarios(each)])
def test_scenario(ran: Callable[[str], dict[str, Any]], program: str, name: str) -> None:
    """The docstring of the scenario is the claim."""
    trouble = ran(program)[name]["trouble"]
    assert trouble is None, trouble


def test_the_example_for_the_openai_agents_sdk(run: Callable[..., Ran]) -> None:
    """docs/examples/openai_agents.py, as it is: only the model's address is another."""
    with scripted(("exec_command", {"cmd": "wc -w <notes.txt"}), "It has three words.") as model:
        assert run(EXAMPLES / "openai_agents.py", **model.environment).stdout == "It has three words.\n"
        assert model.texts()[0].endswith("Output:\n3\n")


def test_the_example_for_deepagents(run: Callable[..., Ran]) -> None:
    """docs/examples/deep_agents.py likewise."""
    write = ("write_file", {"file_path": "/workspace/primes.py", "content": "print(2, 3, 5)\n"})
    with scripted(write, ("execute", {"command": "python3 primes.py"}), "They are 2, 3 and 5.") as model:
        assert run(EXAMPLES / "deep_agents.py", **model.environment).stdout == "They are 2, 3 and 5.\n"
        assert "2 3 5" in model.texts()[1]


def test_the_example_for_inspect(run: Callable[..., Ran]) -> None:
    """docs/examples/inspect_task.py with the scripted model that it has."""
    printed = run(EXAMPLES / "inspect_task.py").stdout
    assert "['3\\n']" in printed
    assert "value=1.0" in printed
