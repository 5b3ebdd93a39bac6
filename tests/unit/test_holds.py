"""Holds on workspaces: the order in which they were begun decides, by one table of uses."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from sandkasten.actors.workspaces.holds import HAVING, Hold, Holds, Use
from tests.waiting import patience

SESSIONS = (Use.SHARED, Use.EXCLUSIVE)
CHANGES = (Use.MAKE, Use.GROW, Use.CLAIM)


def _is_refused(holds: Holds, hold: Hold) -> bool:
    return hold.use.refuses(holds.before(hold))


@pytest.mark.parametrize("use", Use)
def test_nothing_is_refused_alone(use: Use) -> None:
    """Holds on other workspaces don't count."""
    holds = Holds()
    for other in Use:
        holds.begin(Hold("other", other))
    assert not _is_refused(holds, holds.begin(Hold("ws", use)))


@pytest.mark.parametrize("first", SESSIONS)
@pytest.mark.parametrize("second", SESSIONS)
def test_sessions_share_unless_one_of_them_does_not(first: Use, second: Use) -> None:
    """The one that came first has it, the other is refused."""
    holds = Holds()
    winner, loser = holds.begin(Hold("ws", first)), holds.begin(Hold("ws", second))
    assert not _is_refused(holds, winner)
    assert _is_refused(holds, loser) is (Use.EXCLUSIVE in (first, second))


@pytest.mark.parametrize("use", Use)
def test_a_claim_keeps_everything_new_away_and_waits_for_what_is_there(use: Use) -> None:
    """Sessions and file access that began before it go on; changes under way refuse it."""
    holds = Holds()
    before, claim, after = (holds.begin(Hold("ws", each)) for each in (use, Use.CLAIM, use))
    assert _is_refused(holds, claim) is (use in CHANGES)
    assert _is_refused(holds, after)
    assert holds.count("ws", HAVING) == (2 if use in HAVING else 0)
    holds.end(claim)
    holds.end(before)
    assert not _is_refused(holds, after)


async def test_the_steps_of_a_claim_are_taken_in_the_order_in_which_they_were_asked_for() -> None:
    """The order holds whichever task runs first; a step that is cancelled lets the next one go."""
    claim, taken = Hold("ws", Use.CLAIM), list[int]()

    async def step(number: int) -> None:
        taken.append(number)
        if number == 1:
            await trio.sleep_forever()

    turns = [claim.next_turn() for _ in range(3)]
    with trio.fail_after(patience(10)):
        async with trio.open_nursery() as nursery:
            for number in (2, 0):
                nursery.start_soon(turns[number].take, partial(step, number))
            with trio.move_on_after(0.01):
                await turns[1].take(partial(step, 1))
    assert taken == [0, 1, 2]
