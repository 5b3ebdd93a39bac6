"""Streams over connections that are cut, fall silent or are held back, and under a clock that jumps: nothing is
missing, and nothing comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from sandkasten import errors
from sandkasten.sdk import Session, streams, transport, waiting
from tests.fakes.runner import Script
from tests.sdk.proxy import Cut
from tests.sdk.test_retries import HELLO, OUTPUT, behind_proxy, client_of, cut_everywhere
from tests.sdk.test_retries import no_long_waits as no_long_waits  # for this file, too
from tests.waiting import patience

Read = Callable[[Session], Awaitable[None]]
RUNS = 4


async def _run(box: Session) -> None:
    chunks = [chunk async for chunk in box.exec_stream("hello")]
    assert "".join(chunk.output for chunk in chunks) == OUTPUT
    assert chunks[-1].done


async def _journal(box: Session) -> None:
    async with box.watch_events(cursor="0") as events:
        found = [await anext(events) for _ in range(1 + 2 * RUNS)]
    assert [each.type for each in found] == ["session.created"] + ["exec.started", "exec.ended"] * RUNS
    assert [each.cursor for each in found] == sorted({each.cursor for each in found})


async def _watch(box: Session) -> None:
    seen: list[str] = []
    with trio.fail_after(patience(20)):
        async with box.files.watch() as changes:
            while seen[-1:] != ["remove"]:
                found = (await anext(changes)).type  # what came before a connection was lost comes again
                seen = [found] if found == "ready" else [*seen, found]
    assert seen == ["ready", "rename", "overflow", "remove"]


async def _prepare(box: Session) -> None:
    """Let as many events happen as are read."""
    for _ in range(RUNS):
        await box.exec("hello")


STREAMS = pytest.mark.parametrize(
    ("read", "websockets"),
    [(_run, True), (_run, False), (_journal, False), (_watch, False)],
    ids=["websocket", "events", "journal", "watch"],
)


@pytest.mark.parametrize("read", [_journal, _watch])
async def test_events_go_on_where_their_connection_was_cut(read: Read) -> None:
    """Of the journal each comes once, in order."""
    async with behind_proxy() as (_running, proxy, session):
        async with client_of(proxy) as client:
            await _prepare(client.session(session))
        await cut_everywhere(proxy, lambda client: read(client.session(session)), step=31)


@STREAMS
async def test_a_stream_goes_on_where_its_connection_fell_silent(
    read: Read, websockets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-open connection is left after a time without a byte; the server sends pings more often than that."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.2)
    monkeypatch.setattr(streams, "SILENCE_S", 0.2)
    monkeypatch.setattr(streams, "FIRST_S", 0.2)
    async with behind_proxy() as (running, proxy, session):
        proxy.refuses_websockets = not websockets
        async with client_of(proxy) as client:
            await _prepare(client.session(session))
            begun = len(running.tree.runs)
            requested, answered = proxy.requested, proxy.answered
            await read(client.session(session))
            cuts = [Cut(proxy.requested - requested - 60, of_request=True, is_silent=True)]  # a `ping` comes last
            cuts += [Cut(proxy.answered - answered - left, of_request=False, is_silent=True) for left in (40, 150, 300)]
        for cut in cuts:
            proxy.cuts = [cut]
            with trio.fail_after(patience(20)):
                async with client_of(proxy) as client:
                    await read(client.session(session))
        assert proxy.connections > 2 * len(cuts)
        assert len(running.tree.runs) - begun in (0, len(cuts) + 1)


async def test_streams_pass_a_proxy_that_holds_answers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nothing came in time, parts are asked for: output and events come while the command runs."""
    monkeypatch.setattr(streams, "FIRST_S", patience(0.3))
    monkeypatch.setattr(streams, "WAIT_S", 1)
    async with behind_proxy() as (running, proxy, session):
        proxy.refuses_websockets = proxy.buffers = True
        held = trio.Event()
        running.tree.scripts["hello"] = Script(HELLO.outputs, hold=held)
        async with client_of(proxy) as client:
            box = client.session(session)
            with trio.fail_after(patience(20)):
                text = ""
                async for chunk in box.exec_stream("hello"):
                    text += chunk.output
                    if text == OUTPUT:
                        held.set()
                assert text == OUTPUT
                asked = len(proxy.requests)
                async with box.watch_events(cursor="0") as events:
                    assert [(await anext(events)).type for _ in range(3)] == [
                        "session.created",
                        "exec.started",
                        "exec.ended",
                    ]
            assert len(running.tree.runs) == 1
            assert len(proxy.requests) - asked <= 2  # in parts from the first request on


@pytest.mark.parametrize("read", [_run, _journal])
async def test_a_proxy_that_holds_parts_back_too_is_named(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ends soon is followed as ever; a stream that stays is an error, and its command is cancelled."""
    monkeypatch.setattr(streams, "FIRST_S", patience(1))
    monkeypatch.setattr(streams, "WAIT_S", 999)  # as of a server that knows of no parts
    async with behind_proxy() as (running, proxy, session):
        proxy.refuses_websockets = True
        async with client_of(proxy) as client:
            box = client.session(session)
            await _prepare(box)
            proxy.buffers = True
            await _run(box)
        monkeypatch.setattr(streams, "FIRST_S", patience(0.4))
        monkeypatch.setattr(streams, "SILENCE_S", patience(0.6))
        running.tree.scripts["hello"] = Script((), hold=trio.Event())
        async with client_of(proxy) as client:
            client._transport.timeout = patience(0.3)
            box = client.session(session)
            with trio.fail_after(patience()), pytest.raises(errors.ConnectionFailed, match="holds the answer back"):
                await (_more_journal(box) if read is _journal else read(box))
        if read is _run:
            assert running.tree.runs[-1].cancelled.is_set()


async def _more_journal(box: Session) -> None:
    async with box.watch_events(types=["session.expired"]) as events:
        await anext(events)


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
@STREAMS
async def test_a_clock_that_jumps_changes_nothing(
    read: Read, websockets: bool, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a day in either direction, while a call is repeated and while a stream is taken up again."""
    clock, sleep = time.time, waiting.sleep
    jumps = 0

    async def jump(seconds: float) -> None:
        nonlocal jumps
        jumps += 1
        monkeypatch.setattr(time, "time", lambda: clock() + jump_s * (jumps % 2))
        await sleep(seconds)

    async with behind_proxy() as (_running, proxy, session):
        proxy.refuses_websockets = not websockets
        async with client_of(proxy) as client:
            await _prepare(client.session(session))
        monkeypatch.setattr(waiting, "sleep", jump)
        for at in (100, 400, 700):
            proxy.cuts = [Cut(at, of_request=False), Cut(at + 50, of_request=False)]
            with trio.fail_after(patience()):
                async with client_of(proxy) as client:
                    await read(client.session(session))
                    await client.session(session).info()
        assert jumps >= 3
