"""Errors after which a caller may try again."""

from __future__ import annotations

import errno

import pytest

from sandkasten.links.nsinit import is_passing


@pytest.mark.parametrize(
    ("stage", "number", "retryable"),
    [
        ("builder", 0, True),
        ("cgroup maker", 0, True),
        ("deadline", errno.ETIMEDOUT, True),
        ("session", errno.EEXIST, True),
        ("session", errno.EACCES, False),
        ("disk", errno.EEXIST, False),
        ("image", errno.ENOENT, False),
    ],
)
def test_a_build_may_be_tried_again_where_a_process_died_and_not_the_plan_was_at_fault(
    stage: str, number: int, retryable: bool
) -> None:
    """An id that is taken is one that a lost nsinit had prepared; the next create has another."""
    assert is_passing(stage, number) is retryable
