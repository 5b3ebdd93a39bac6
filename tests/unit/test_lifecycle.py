"""The state table, against an oracle and by random walks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.model import Status
from sandkasten.model.lifecycle import ENDED, IN_KERNEL, LIVE, USABLE, IllegalTransition, Trigger, next_status

_STARTS_AN_END = (Trigger.DESTROY, Trigger.EXPIRE, Trigger.DIED, Trigger.BUILD_FAILED)


@given(st.lists(st.sampled_from(list(Trigger)), max_size=30))
def test_no_walk_leaves_a_final_state_or_skips_the_teardown(events: list[Trigger]) -> None:
    """A session ends only out of `destroying`, or as `lost`; once ended it stays so."""
    status, cause = Status.CREATING, None
    for event in events:
        before = status
        try:
            status = next_status(status, event, cause=cause)
        except IllegalTransition:
            continue
        if status is Status.DESTROYING and before is not Status.DESTROYING:
            cause = event
        assert before not in ENDED
        if status in ENDED:
            assert before is Status.DESTROYING or status is Status.LOST


@pytest.mark.parametrize(
    ("cause", "final"),
    [
        (Trigger.DESTROY, Status.DESTROYED),
        (Trigger.EXPIRE, Status.EXPIRED),
        (Trigger.DIED, Status.CRASHED),
        (Trigger.BUILD_FAILED, Status.CRASHED),
    ],
)
def test_the_first_cause_names_the_final_state(cause: Trigger, final: Status) -> None:
    """The event that began the destruction decides the final state."""
    assert next_status(Status.DESTROYING, Trigger.TORN_DOWN, cause=cause) is final


def test_every_live_state_can_be_destroyed_and_no_ended_one_can() -> None:
    """`DELETE` always has an answer; ended sessions never come back."""
    for status in LIVE:
        assert next_status(status, Trigger.DESTROY) is Status.DESTROYING
    for status in ENDED:
        for event in Trigger:
            with pytest.raises(IllegalTransition):
                next_status(status, event, cause=Trigger.DESTROY)


def test_only_running_sessions_serve() -> None:
    """Paused and half-built ones don't."""
    usable = {status for status in Status if status in USABLE}
    assert usable == {Status.RUNNING}
    assert set(Status) == IN_KERNEL | ENDED
    assert {Status.POOL_IDLE} == IN_KERNEL - LIVE
