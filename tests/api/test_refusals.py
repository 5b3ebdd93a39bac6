"""Clients without a valid key cost little and are told little, and no client with one waits for them."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from sandkasten.api.http.auth import AT_ONCE, LOG_EVERY_S, PAUSE_S, PER_S, RefusalThrottle
from sandkasten.api.routes import SESSIONS
from tests.api.harness import read_until, request_bytes, running_front
from tests.api.keys import READ
from tests.waiting import patience


async def test_many_refusals_wait_and_few_do_not(autojump_clock: trio.testing.MockClock) -> None:
    """A burst is answered at once, and then a number a second; each of the others takes its pause."""
    refusals = RefusalThrottle()
    began = trio.current_time()
    for _ in range(AT_ONCE):
        await refusals.note(None)
    assert trio.current_time() == began
    await refusals.note(None)
    assert trio.current_time() == began + PAUSE_S
    await trio.sleep(AT_ONCE / PER_S)
    await refusals.note(None)
    assert trio.current_time() == pytest.approx(began + PAUSE_S + AT_ONCE / PER_S)


async def test_the_log_has_a_count_now_and_then(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The first at once, and after a while how many there were since."""
    refusals = RefusalThrottle()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            await refusals.note(("192.0.2.7", 1))
        await trio.sleep(LOG_EVERY_S)
        await refusals.note(("192.0.2.8", 1))
    told = [(record.__dict__["count"], record.__dict__["last_peer"]) for record in caplog.records]
    assert told == [(1, "192.0.2.7"), (40, "192.0.2.8")]


async def test_a_crowd_without_a_key_holds_up_nobody_with_one(caplog: pytest.LogCaptureFixture) -> None:
    """While refusals wait, keys of both kinds are answered; the crowd leaves a line or two, without what it sent."""
    async with running_front() as running:
        running.ring.replace([READ.key])
        wrong = request_bytes("GET", SESSIONS, headers={"Authorization": "Bearer sk_0123456789ab_guessed"})
        with caplog.at_level(logging.INFO):
            async with await running.connect() as crowd, await running.connect() as waiting:
                for _ in range(AT_ONCE):
                    await crowd.send_all(wrong)
                    await read_until(crowd, b"UNAUTHORIZED")
                await waiting.send_all(wrong)
                for options in ({"token": READ.token}, {}):
                    async with running.client(**options) as client:
                        assert (await client.get(SESSIONS)).status_code == 200
                with trio.fail_after(patience()):
                    await read_until(waiting, b"UNAUTHORIZED")
        lines = [record for record in caplog.records if record.name.startswith("sandkasten")]
        assert [record.message for record in lines if record.message != "request"] == ["auth_failed"]
        assert len([record for record in lines if record.message == "request"]) <= 2
        assert "guessed" not in caplog.text
