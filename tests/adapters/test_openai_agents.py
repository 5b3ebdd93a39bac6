"""OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.adapters.conftest import Ran, outcomes, scenarios

pytestmark = pytest.mark.e2e
PROGRAM = "openai_agents.py"


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> Iterator[dict[str, Any]]:
    yield from outcomes(run, PROGRAM)


@pytest.mark.parametrize("name", scenarios(PROGRAM))
def test_scenario(ran: dict[str, Any], name: str) -> None:
    """The docstring of the scenario is the claim."""
    assert ran[name]["trouble"] is None, ran[name]["trouble"]
