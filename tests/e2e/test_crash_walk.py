"""At whatever step a process ends, the next start leaves no session half made and nothing that no session owns."""

from __future__ import annotations

from tests.e2e.crashwalk import SHORT, walk, walked_points


def test_a_crash_in_each_phase_is_made_good_by_the_next_start() -> None:
    """A crash at one point of each phase and process is made good by the next start; `make crashwalk` visits all
    points.
    """
    assert walk(SHORT) == []


def test_the_short_walk_visits_points_that_exist() -> None:
    """The points of the short walk are names of existing crash points."""
    assert set(SHORT) <= set(walked_points())
