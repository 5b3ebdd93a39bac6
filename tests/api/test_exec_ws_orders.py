"""Orders to runs over a WebSocket: signals, sizes, cancellations, and what becomes of those that come late."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from runner.wire.protocol import TerminalSize
from sandkasten.api.websocket import channel as ws_orders
from sandkasten.api.websocket import exec
from sandkasten.model import Stream
from tests.api.harness import running_front
from tests.api.ws_client import (
    Chunk,
    exec_talk,
    is_quiet,
    last,
    output_of,
    started,
)
from tests.fakes.runner import Script
from tests.waiting import patience, until


@pytest.mark.parametrize("name", ["INT", "SIGINT", 2])
async def test_a_signal_reaches_the_run(name: str | int) -> None:
    """By name or number."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        await client.say("signal", id=1, signal=name)
        end = await client.hear_text("exit")
    assert (run.signals, end["cause"], end["signal"]) == ([signal.SIGINT], "signalled", 2)


@pytest.mark.parametrize("now", [None, False, True])
async def test_a_run_is_cancelled_and_its_exit_says_so(now: bool | None) -> None:
    """`now` skips asking it."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        await client.say("cancel", id=1, **({} if now is None else {"now": now}))
        assert (await client.hear_text("exit"))["cause"] == "cancelled"
    assert run.was_killed_now is bool(now)


@pytest.mark.parametrize(
    ("kind", "fields", "cause"),
    [("cancel", {"now": True}, "cancelled"), ("signal", {"signal": "KILL"}, "signalled")],
)
async def test_a_cancellation_that_takes_its_time_holds_up_no_order(
    kind: str, fields: dict[str, object], cause: str
) -> None:
    """A run that ignores the polite way can be killed meanwhile, and resized."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["wait"] = Script(hold=trio.Event(), is_tough=True)
        run = await started(running, client, tty={"cols": 80, "rows": 24})
        await client.say("cancel", id=1)
        await client.say("resize", id=1, cols=100, rows=30)

        async def is_resized() -> bool:
            return run.sizes[-1] == TerminalSize(100, 30)

        await until(is_resized)
        assert run.reply is None
        await client.say(kind, id=1, **fields)
        assert (await client.hear_text("exit"))["cause"] == cause


async def test_a_run_that_was_cancelled_by_a_client_without_credit_ends() -> None:
    """Output without credit is dropped and counted; a client that joins the run again can have that output."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client, credit=60)
        for _ in range(4):
            run.write(Stream.STDOUT, bytes(50))
        heard = [await client.hear(), await client.hear()]
        assert [len(each.data) for each in heard if isinstance(each, Chunk)] == [50, 10]
        await client.say("cancel", id=1)
        end = await client.hear_text("exit")
        assert (end["cause"], end["seq"], end["stdout_bytes"]) == ("cancelled", 1, 200)
        assert end["omitted_bytes"] == 140
        await client.say("attach", id=1, exec_id=run.exec_id, after=end["seq"])
        rest = await client.hear_until("exit", 1)
        assert len(output_of(rest)) == 150
        assert "omitted_bytes" not in last(rest)


async def test_a_run_that_was_cancelled_sends_what_there_is_credit_for() -> None:
    """Whole, with its exit behind it."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        run.write(Stream.STDOUT, b"all of it")
        await client.say("cancel", id=1)
        heard = await client.hear_until("exit")
        assert (output_of(heard), last(heard)["seq"]) == (b"all of it", 1)
        assert "omitted_bytes" not in last(heard)


async def test_what_was_ordered_before_a_detach_is_done() -> None:
    """`detached` comes behind it."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["tough"] = Script(hold=trio.Event(), ignores=frozenset({1}))
        await client.say("start", id=1, cmd="tough")
        await client.hear_text("started")
        for _ in range(5):
            await client.say("signal", id=1, signal=1)
        await client.say("detach", id=1)
        await client.hear_text("detached")
        assert running.tree.runs[0].signals == [1] * 5


async def test_an_order_that_outlives_its_channel_is_heard_of_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of the order is not told to the next run on that number."""
    monkeypatch.setattr(ws_orders, "LAST_ORDERS_S", 0.05)
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["wait"] = Script(hold=trio.Event(), is_tough=True)
        run = await started(running, client)
        await client.say("cancel", id=1)
        await client.say("detach", id=1)
        await client.hear_text("detached")
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(20):
            await client.say("attach", id=1, exec_id=run.exec_id)
            await client.hear_text("started")
            await client.say("cancel", id=1)
            await client.say("detach", id=1)
            await client.hear_text("detached")
        assert trio.lowlevel.current_statistics().tasks_living <= tasks + exec.MAX_WAITING
        await started(running, client)
        assert await is_quiet(client)


async def test_a_run_that_waits_for_its_turn_can_be_cancelled() -> None:
    """Even if the order comes in the same breath as the start."""
    async with running_front() as running, exec_talk(running) as client:
        turn = trio.Event()
        running.tree.scripts["queued"] = Script(turn=turn, hold=trio.Event())
        await client.say("start", id=1, cmd="queued")
        await client.say("cancel", id=1)
        with trio.fail_after(patience()):
            await running.tree.run_opened.wait()
            await running.tree.runs[0].cancelled.wait()
        turn.set()
        assert (await client.hear_until("exit", 1))[-1]["cause"] == "cancelled"  # type: ignore[index]  # it is text


async def test_a_terminal_is_resized() -> None:
    """A run with a terminal has one stream and a size; one without refuses it and goes on."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client, tty={"cols": 80, "rows": 24})
        await client.say("resize", id=1, cols=120, rows=50)
        other = await started(running, client, 2)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert run.sizes == [TerminalSize(80, 24), TerminalSize(120, 50)]
        await client.say("resize", id=2, cols=1, rows=1)
        error = await client.hear_text("error")
        assert (error["id"], error["final"], error["refused"]) == (2, False, "resize")
        other.finish()
        await client.hear_text("exit")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("signal", {"signal": 1}),
        ("cancel", {}),
        ("resize", {"cols": 1, "rows": 1}),
        ("close_stdin", {}),
        ("detach", {}),
    ],
)
async def test_an_order_to_nobody_is_refused(kind: str, fields: dict[str, int]) -> None:
    """An order may cross the exit on its way: the order is refused and nothing else happens."""
    async with running_front() as running, exec_talk(running) as client:
        await client.say(kind, id=5, **fields)
        error = await client.hear_text("error")
        assert (error["error_code"], error["id"], error["refused"]) == ("EXEC_NOT_FOUND", 5, kind)
        assert error["final"] is False
        await client.feed(5, b"late input")
        await client.say("credit", id=5, bytes=1)
        assert await is_quiet(client)


async def test_a_refusal_says_what_came_before_it() -> None:
    """The refusal's `seq` is the last whole piece that was sent on its channel, 0 where nothing runs. A piece that
    comes in parts counts with its last part. After an attach `seq` begins with `after`.
    """
    async with running_front() as running, exec_talk(running) as client:

        async def refused_at(channel: int, kind: str = "resize", **fields: object) -> int:
            await client.say(kind, id=channel, **({"cols": 1, "rows": 1} if kind == "resize" else fields))
            error = (await client.hear_until("error", channel))[-1]
            assert isinstance(error, dict)
            assert (error["final"], error["refused"]) == (False, kind)
            return int(error["seq"])

        run = await started(running, client, credit=12, exec_id="mine")
        assert await refused_at(1) == 0
        for number in (1, 2, 3):
            run.write(Stream.STDOUT, b"12345")
            if number < 3:
                assert isinstance(await client.hear(), Chunk)
        assert await refused_at(1) == 2
        await client.say("credit", id=1, bytes=100)
        chunk = await client.hear()
        assert isinstance(chunk, Chunk)
        assert (chunk.sequence, chunk.more) == (3, False)
        assert await refused_at(1) == 3
        assert await refused_at(1, "start", cmd="x") == 3
        await client.say("attach", id=2, exec_id="mine", after=2)
        await client.hear_text("started")
        assert isinstance(await client.hear(), Chunk)
        assert await refused_at(2) == 3
        assert await refused_at(9) == 0


async def test_a_flood_of_orders_is_bounded() -> None:
    """Orders over the limit are refused; the run takes the others."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["tough"] = Script(hold=trio.Event(), ignores=frozenset({1}))
        await client.say("start", id=1, cmd="tough")
        await client.hear_text("started")
        run = running.tree.runs[0]
        for _ in range(100):
            await client.say("signal", id=1, signal=1)
        answered = 0

        async def all_are_answered() -> bool:
            return len(run.signals) + answered == 100

        while not await is_quiet(client):
            answered += 1
        await until(all_are_answered)
