"""The tables of a run's states: whole, without dead ends, and true to what a client was promised, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from runner.shell.lifecycle import (
    COMMAND,
    COMMAND_IMPOSSIBLE,
    EXIT_CANCELLED,
    EXIT_TIMED_OUT,
    PROGRAM,
    PROGRAM_IMPOSSIBLE,
    Action,
    ImpossibleEvent,
    Lifecycle,
    Notice,
    Pairs,
    RunOutcome,
    State,
    Table,
)


@dataclass(frozen=True)
class Kind:
    """A table, the pairs that cannot happen, and which of its states and actions it has."""

    table: Table
    impossible: Pairs
    states: frozenset[State]

    def next_states(self, state: State) -> set[State]:
        return {after for (before, _), (after, _) in self.table.items() if before is state}


KINDS = [
    pytest.param(Kind(COMMAND, COMMAND_IMPOSSIBLE, frozenset(State) - {State.REAPING}), id="command"),
    pytest.param(
        Kind(PROGRAM, PROGRAM_IMPOSSIBLE, frozenset(State) - {State.TAKEN_BACK, State.ENDED}),
        id="program",
    ),
]
EXITED = RunOutcome(7, None, "exited")
LAST_STEPS = (Notice.BEGIN, Notice.FORCE, Notice.DONE, Notice.CLEAR, Notice.READY, Notice.DRAINED)
"""Events that every run meets at last, in this order, as far as they can happen."""


def reachable(kind: Kind, first: State) -> set[State]:
    found, new = {first}, [first]
    while new:
        new = [state for before in new for state in kind.next_states(before) if state not in found]
        found.update(new)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_in_the_table_or_declared_impossible(kind: Kind) -> None:
    """No state is silent about an event, and none says two things."""
    assert set(kind.table) | kind.impossible == {(state, event) for state in kind.states for event in Notice}
    assert set(kind.table) & kind.impossible == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_reached_and_leads_to_the_end(kind: Kind) -> None:
    """From `QUEUED` to each state, and from each to `OVER`, which nothing leaves."""
    assert reachable(kind, State.QUEUED) == kind.states
    assert all(State.OVER in reachable(kind, state) for state in kind.states)
    assert kind.next_states(State.OVER) == {State.OVER}


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_command_that_was_taken_back_goes_back(kind: Kind) -> None:
    """Every other step to another state is one forwards, so that a run ends after so many steps."""
    order = list(State)
    back = {
        (before, after)
        for (before, _), (after, _) in kind.table.items()
        if order.index(after) < order.index(before) and before is not State.OVER
    }
    assert back <= {(State.TAKEN_BACK, State.RUNNING)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_is_answered_once(kind: Kind) -> None:
    """The one step into `OVER` answers or fails, and no other step does."""
    for (before, _), (after, action) in kind.table.items():
        is_last = after is State.OVER and before is not State.OVER
        assert is_last == (action in (Action.ANSWER, Action.FAIL))


def test_every_action_has_its_place() -> None:
    """No action is left that no table asks for."""
    assert {action for table in (COMMAND, PROGRAM) for _, action in table.values()} == set(Action)


@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_event_changes_nothing(kind: Kind) -> None:
    """An error of PID 1's own is raised where it happens, and the run can still be answered."""
    for state, event in kind.impossible:
        life = Lifecycle(kind.table)
        life.state = state
        with pytest.raises(ImpossibleEvent):
            life.take(event)
        assert life.state is state


@dataclass(frozen=True)
class Told:
    """One piece of news."""

    event: Notice
    outcome: RunOutcome = EXITED


NEWS = st.lists(
    st.one_of(
        st.sampled_from(Notice).map(Told),
        st.builds(Told, st.just(Notice.DONE), st.builds(RunOutcome, st.integers(0, 255), st.none(), st.just("exited"))),
    ),
    max_size=30,
)


def tell(life: Lifecycle, news: Told, cause: str) -> Action | None:
    """Tell what happened, if it can happen."""
    try:
        match news.event:
            case Notice.DONE:
                return life.done(news.outcome)
            case Notice.FORCE:
                return life.force("timed_out" if cause == "timed_out" else "cancelled")
            case Notice.CLOSED:
                return life.close()
            case event:
                return life.take(event)
    except ImpossibleEvent:
        return None


@pytest.mark.parametrize("kind", KINDS)
@given(news=NEWS, cause=st.sampled_from(["cancelled", "timed_out"]))
def test_any_order_of_news_ends_in_one_true_answer(kind: Kind, news: list[Told], cause: str) -> None:
    """In any order of events a run starts at most once anew for each time it was taken back, its streams are
    finished before its answer, and the answer tells the force that ended it or else the first report of its end."""
    life = Lifecycle(kind.table)
    actions: list[Action] = []
    reported: RunOutcome | None = None
    forced = closed = False
    for told in (*news, *(Told(event) for event in LAST_STEPS)):
        before = life.state
        action = tell(life, told, cause)
        if action is None:
            assert (before, told.event) in kind.impossible
            continue
        actions.append(action)
        if told.event is Notice.DONE and reported is None:
            reported = told.outcome
        forced = forced or (told.event is Notice.FORCE and action not in (Action.NOTHING, Action.HURRY))
        closed = closed or (told.event is Notice.CLOSED and reported is None)
        if life.state in (State.ENDED, State.DRAINING):
            check_outcome(life.outcome, reported, forced=forced, closed=closed, cause=cause)
    assert life.state is State.OVER
    assert actions.count(Action.ANSWER) + actions.count(Action.FAIL) == 1
    assert actions.count(Action.START) <= 1
    assert actions.count(Action.START_AGAIN) <= actions.count(Action.TAKE_BACK)
    assert actions.count(Action.END) <= 1
    if Action.ANSWER in actions and Action.START in actions:
        assert actions.index(Action.END) < actions.index(Action.ANSWER)


def check_outcome(outcome: RunOutcome, reported: RunOutcome | None, *, forced: bool, closed: bool, cause: str) -> None:
    if forced:
        code = EXIT_TIMED_OUT if cause == "timed_out" else EXIT_CANCELLED
        assert (outcome.exit_code, outcome.signal, outcome.cause) == (code, None, cause)
    elif closed:
        assert (outcome.exit_code, outcome.cause) == (EXIT_CANCELLED, "cancelled")
    else:
        assert outcome == reported
