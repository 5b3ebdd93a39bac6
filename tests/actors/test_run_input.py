"""Senders of input to a run: how many clients may send at the same time, and which ones."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from sandkasten.actors.runs.run import MAX_STDIN_SENDERS, Run, RunRequest
from sandkasten.errors import Capacity, ExecEnded, RunnerLost
from sandkasten.model import ExecSpec


async def test_senders_over_the_limit_are_refused_while_the_others_wait() -> None:
    """Each holds what it sends; one that is refused may come again, and the end of the run frees all."""
    run = Run(RunRequest(ExecSpec(command="cat", stdin_open=True), timeout_ms=1000))
    refused: list[type[Exception]] = []

    async def send() -> None:
        with pytest.raises(ExecEnded):
            await run.input.queue(b"x", close=False)
        refused.append(ExecEnded)

    async with trio.open_nursery() as nursery:
        for _ in range(MAX_STDIN_SENDERS):
            nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Capacity) as caught:
            await run.input.queue(b"x", close=False)
        assert caught.value.details == {"max_senders": MAX_STDIN_SENDERS}
        run.fail(RunnerLost("gone"))
    assert len(refused) == MAX_STDIN_SENDERS
    with pytest.raises(ExecEnded):
        await run.input.queue(b"x", close=False)


async def test_a_sender_that_leaves_makes_room() -> None:
    """A cancelled request doesn't count any more."""
    run = Run(RunRequest(ExecSpec(command="cat", stdin_open=True), timeout_ms=1000))
    for _ in range(MAX_STDIN_SENDERS + 1):
        with trio.move_on_after(0) as scope:
            await run.input.queue(b"x", close=False)
        assert scope.cancelled_caught
