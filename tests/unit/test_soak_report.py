"""When a soak has failed: by what was lost, by what was left, and by tasks that pile up."""

from __future__ import annotations

import pytest

from bench.soak.run import Tasks


@pytest.mark.parametrize(
    ("tasks", "growth"),
    [(Tasks(27, 27, 27), 0), (Tasks(27, 26, 25), -1), (Tasks(27, 28, 27), 1), (Tasks(27, 27, 29), 2)],
)
def test_tasks_have_grown_when_either_daemon_has_more_than_the_first_at_its_start(tasks: Tasks, growth: int) -> None:
    """The one that did the cycles, and the one that comes last."""
    assert tasks.growth == growth
