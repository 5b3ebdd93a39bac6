"""At whatever step a process ends, the next start leaves no session half made and nothing that no session owns."""

from __future__ import annotations

from tests.e2e.crashwalk import SHORT, walk, walked_points


def test_a_crash_in_each_phase_is_made_good_by_the_next_start() -> None:
    """One point of each phase and process; `make crashwalk` visits all of them."""
    assert walk(SHORT) == []


def test_the_short_walk_visits_points_that_exist() -> None:
    """A point that was renamed is renamed there, too."""
    assert set(SHORT) <= set(walked_points())
