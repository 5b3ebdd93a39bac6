"""A session that stands still: it computes nothing, keeps everything, and goes on when it is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Self

import attrs
import pytest
import trio

from sandkasten.actors.session import pausing
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, Maximum
from sandkasten.errors import Conflict, SessionExpired, SessionPaused
from sandkasten.model import (
    FOREVER_S,
    AtEnd,
    Cause,
    EventType,
    ExecSpec,
    ExecState,
    PauseSpec,
    SessionPatch,
    SessionSpec,
    ShellSpec,
    Status,
    TerminalSize,
    TerminalSpec,
)
from tests.waiting import patience, until

STAYS = PauseSpec(auto_resume=False)
COUNT = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.001; done"


@pytest.fixture
async def session_id(supervisor: LocalSupervisor) -> str:
    return (await supervisor.create(SessionSpec())).id


async def _cpu(supervisor: LocalSupervisor, session_id: str) -> int:
    return (await supervisor.stats(session_id)).cpu_usage_usec or 0


async def _rests(supervisor: LocalSupervisor, session_id: str) -> int:
    """Wait until the session has used no processor for a tenth of a second; return what it has used. The kernel counts
    the last time of a process when another one takes its processor, which can be after the freeze."""
    used: int

    async def rests() -> bool:
        nonlocal used
        used = await _cpu(supervisor, session_id)
        await trio.sleep(0.1)
        return await _cpu(supervisor, session_id) - used < 1000

    await until(rests)
    return used


async def test_a_paused_session_uses_no_processor_and_goes_on_where_it_was(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A busy session that is paused uses no processor, and its stats can be read. Pausing twice and resuming twice
    change nothing.
    """
    await supervisor.exec(session_id, ExecSpec(f"x=kept; {COUNT} &"))
    for _ in range(2):
        paused = await supervisor.pause(session_id, STAYS)
        assert (paused.status, paused.pause and paused.pause.auto_resume) == (Status.PAUSED, False)
        await _rests(supervisor, session_id)
        assert (await supervisor.pause(session_id, STAYS)).pause == paused.pause
        resumed = await supervisor.resume(session_id)
        assert (resumed.status, resumed.pause) == (Status.RUNNING, None)
        assert await supervisor.resume(session_id) == resumed
        result = await supervisor.exec(
            session_id, ExecSpec("echo $x; a=$(cat /tmp/n); sleep 0.1; test $a != $(cat /tmp/n)")
        )
        assert (result.stdout, result.end.exit_code) == (b"kept\n", 0)


async def test_any_request_that_needs_it_resumes_it(supervisor: LocalSupervisor, session_id: str) -> None:
    """Commands, files, shells, terminals, variables, signals, cancels and input resume a paused session; requests that
    only read do not.
    """
    await supervisor.open_shell(session_id, ShellSpec("s"))
    cat = ExecSpec("cat", shell="s", stdin_open=True, exec_id="cat", stateless=None)

    async def is_paused_again() -> None:
        assert (await supervisor.get(session_id)).status is Status.RUNNING
        await supervisor.pause(session_id)

    async with supervisor.open_exec(session_id, cat) as reader:
        await supervisor.pause(session_id)
        await supervisor.execs(session_id)
        await supervisor.get_exec(session_id, "cat")
        await supervisor.shells(session_id)
        await supervisor.stats(session_id)
        await supervisor.read_output(session_id, "cat")
        await supervisor.update(session_id, SessionPatch(labels={"a": "b"}))
        assert (await supervisor.get(session_id)).status is Status.PAUSED
        assert (await supervisor.exec(session_id, ExecSpec("echo a"))).stdout == b"a\n"
        await is_paused_again()
        async with supervisor.files(session_id).open_write("f") as writer:
            await writer.send(b"content")
            await writer.commit()
        await is_paused_again()
        async with supervisor.files(session_id).open_read("f", max_bytes=100) as file:
            assert b"".join([each async for each in file]) == b"content"
        await is_paused_again()
        await supervisor.update(session_id, SessionPatch(env={"A": "b"}))
        await is_paused_again()
        await reader.send_stdin(b"line\n")
        assert (await anext(aiter(reader))).data == b"line\n"
        await is_paused_again()
        await supervisor.send_stdin(session_id, "cat", b"more\n")
        await is_paused_again()
        await supervisor.signal_exec(session_id, "cat", 10)
        assert (await reader.wait_end()).signal == 10
        await is_paused_again()
        async with supervisor.open_terminal(session_id, TerminalSpec()) as viewer:
            await is_paused_again()
            await viewer.send(b"echo 1$((1))1\n")
            seen = b""
            async for piece in viewer:
                seen += piece
                if b"111" in seen:
                    break
        await is_paused_again()
        await supervisor.cancel_exec(session_id, viewer.terminal_id)
        assert (await supervisor.get(session_id)).status is Status.RUNNING


async def test_one_that_is_to_stay_paused_refuses_requests(supervisor: LocalSupervisor, session_id: str) -> None:
    """A session that is to stay paused refuses requests with a clear error until it is resumed; the way of its pause
    can be changed meanwhile.
    """
    await supervisor.pause(session_id, STAYS)
    with pytest.raises(SessionPaused):
        await supervisor.exec(session_id, ExecSpec("true"))
    with pytest.raises(SessionPaused):
        async with supervisor.files(session_id).open_read("f", max_bytes=1):
            pass
    assert (await supervisor.get(session_id)).status is Status.PAUSED
    await supervisor.pause(session_id)
    assert (await supervisor.exec(session_id, ExecSpec("echo a"))).stdout == b"a\n"


async def test_time_limits_stand_still_as_well(supervisor: LocalSupervisor, session_id: str) -> None:
    """A command that was paused for longer than its time limit still has the rest of it; later time limits hold."""
    limited = ExecSpec("echo begun; sleep 0.8; echo done", timeout_ms=3000, stateless=True)
    async with supervisor.open_exec(session_id, limited) as reader:
        output = aiter(reader)
        assert (await anext(output)).data == b"begun\n"
        await supervisor.pause(session_id, STAYS)
        await trio.sleep(3.2)
        await supervisor.resume(session_id)
        assert [each.data async for each in output] == [b"done\n"]
        assert (await reader.wait_end()).cause is Cause.EXITED
        assert (await supervisor.exec(session_id, ExecSpec("sleep 60", timeout_ms=100))).end.cause is Cause.TIMED_OUT


@pytest.mark.parametrize("jump", [timedelta(days=1), timedelta(days=-1)])
async def test_a_clock_that_is_set_in_a_pause_moves_no_time_limit(
    supervisor: LocalSupervisor, session_id: str, monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    """A clock that is set by a day during a pause leaves a command exactly the rest of its time limit."""

    class Set(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + jump

    limited = ExecSpec("echo begun; sleep 60", timeout_ms=1500, stateless=True)
    async with supervisor.open_exec(session_id, limited) as reader:
        assert (await anext(aiter(reader))).data == b"begun\n"
        await supervisor.pause(session_id, STAYS)
        monkeypatch.setattr(pausing, "datetime", Set)
        await trio.sleep(1.6)
        await supervisor.resume(session_id)
        resumed_at = trio.current_time()
        with trio.fail_after(patience()):
            assert (await reader.wait_end()).cause is Cause.TIMED_OUT
        assert trio.current_time() - resumed_at > 0.5


async def test_a_caller_that_leaves_ends_its_command_and_not_the_pause(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A caller that leaves ends its run and not the pause; the run's process ends once the session is resumed."""
    async with supervisor.open_exec(session_id, ExecSpec("sleep 1000", exec_id="left")):
        await supervisor.pause(session_id, STAYS)
    assert (await supervisor.get(session_id)).status is Status.PAUSED
    await supervisor.resume(session_id)

    async def has_ended() -> bool:
        return (await supervisor.get_exec(session_id, "left")).state is ExecState.ENDED

    await until(has_ended)
    assert (await supervisor.exec(session_id, ExecSpec("pgrep -c sleep"))).stdout == b"0\n"


async def test_the_lease_goes_on_or_stops_as_asked(supervisor: LocalSupervisor) -> None:
    """A running command in a paused session does not hold its lease off; a stopped lease has all its time after the
    resume.
    """
    mortal = await supervisor.create(SessionSpec(ttl_s=1))
    stopped = await supervisor.create(SessionSpec(ttl_s=1))
    async with supervisor.open_exec(mortal.id, ExecSpec("sleep 1000")) as reader:
        reader.detach()
        await supervisor.pause(mortal.id)
        await supervisor.pause(stopped.id, PauseSpec(stop_lease=True))
        assert (await supervisor.wait_ended(mortal.id)).status is Status.EXPIRED
    await trio.sleep(0.3)
    found = await supervisor.get(stopped.id)
    assert found.status is Status.PAUSED
    assert found.expires_at is not None
    assert timedelta(seconds=0.9) < found.expires_at - datetime.now(UTC) <= timedelta(seconds=1)
    assert (await supervisor.exec(stopped.id, ExecSpec("echo a"))).stdout == b"a\n"
    assert (await supervisor.wait_ended(stopped.id)).status is Status.EXPIRED


async def test_the_end_of_its_whole_life_comes_in_a_pause_as_well(supervisor: LocalSupervisor) -> None:
    """A session's maximum lifetime ends it during a pause, too, even one that stops the lease."""
    session = await supervisor.create(SessionSpec(max_lifetime_s=1))
    paused = await supervisor.pause(session.id, PauseSpec(stop_lease=True))
    assert paused.expires_at is not None
    assert paused.expires_at - session.created_at < timedelta(seconds=1.01)
    assert (await supervisor.wait_ended(session.id)).status is Status.EXPIRED


async def test_a_session_may_be_paused_at_its_end(
    supervisor: LocalSupervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A session that asked for that is paused and has no end any more. It goes on with what it had when it is used.
    A transfer that does not end puts that off, but not for ever."""
    for name, value in {"_TRANSFER_S": 0.01, "_AGAIN_S": 0.01, "_DELAYS": 2}.items():
        monkeypatch.setattr(pausing, name, value)
    session = await supervisor.create(SessionSpec(max_lifetime_s=1, at_end=AtEnd.PAUSE))
    await supervisor.exec(session.id, ExecSpec(f"x=kept; {COUNT} & echo 1 >f"))
    async with supervisor.files(session.id).open_read("f", max_bytes=100):
        await _wait_paused(supervisor, session.id)
    assert sum(record.message == "not_paused_at_end" for record in caplog.records) == 2
    found = await supervisor.get(session.id)
    assert (found.status, found.max_lifetime_s) == (Status.PAUSED, FOREVER_S)
    assert found.pause is not None
    assert found.pause.stop_lease
    assert (await supervisor.exec(session.id, ExecSpec("echo $x"))).stdout == b"kept\n"


async def test_a_session_that_is_paused_at_its_end_stays_so(supervisor: LocalSupervisor) -> None:
    """With the options of its pause, and without an end from then on."""
    session = await supervisor.create(SessionSpec(max_lifetime_s=1, at_end=AtEnd.PAUSE))
    await supervisor.pause(session.id, PauseSpec(auto_resume=False))

    async def has_no_end() -> bool:
        return (await supervisor.get(session.id)).max_lifetime_s == FOREVER_S

    await until(has_no_end)
    found = await supervisor.get(session.id)
    assert (found.status, found.pause is not None and found.pause.auto_resume) == (Status.PAUSED, False)
    await supervisor.resume(session.id)
    assert (await supervisor.exec(session.id, ExecSpec("echo here"))).stdout == b"here\n"


async def test_the_operators_longest_lifetime_ends_a_session_paused_at_its_end(config: Config) -> None:
    """A pause in place of an end is no way around the operator's bound."""
    bounded = attrs.evolve(config, maximum=Maximum(max_lifetime_seconds=2))
    async with open_supervisor(bounded) as supervisor:
        session = await supervisor.create(SessionSpec(max_lifetime_s=1, at_end=AtEnd.PAUSE))
        await _wait_paused(supervisor, session.id)
        assert (await supervisor.get(session.id)).max_lifetime_s == 2
        assert (await supervisor.wait_ended(session.id)).status is Status.EXPIRED


async def _wait_paused(supervisor: LocalSupervisor, session_id: str) -> None:
    with trio.fail_after(patience()):
        async with supervisor.events(session_id=session_id, after="0") as events:
            async for event in events:
                if event.type is EventType.SESSION_PAUSED:
                    return


async def test_a_pause_survives_the_daemon(config: Config) -> None:
    """The next daemon finds the session paused, in the same way; after a resume shell, command and lease go on."""
    keeping = attrs.evolve(config, sessions_on_stop="keep")
    async with open_supervisor(keeping) as supervisor:
        session = await supervisor.create(SessionSpec(ttl_s=30))
        await supervisor.exec(session.id, ExecSpec(f"x=kept; {COUNT} &"))
        paused = await supervisor.pause(session.id, PauseSpec(auto_resume=False, stop_lease=True))
        before = await _rests(supervisor, session.id)
    async with open_supervisor(config) as supervisor:
        found = await supervisor.get(session.id)
        assert (found.status, found.pause) == (Status.PAUSED, paused.pause)
        assert await _cpu(supervisor, session.id) - before < 2000
        with pytest.raises(SessionPaused):
            await supervisor.exec(session.id, ExecSpec("true"))
        await supervisor.resume(session.id)
        assert (await supervisor.exec(session.id, ExecSpec("echo $x"))).stdout == b"kept\n"


async def test_a_paused_session_can_be_destroyed_and_its_death_is_seen(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A paused session is destroyed without being resumed; a later pause or resume is told that it has ended."""
    await supervisor.pause(session_id, STAYS)
    assert (await supervisor.destroy(session_id)).status is Status.DESTROYED
    for act in (supervisor.pause, supervisor.resume):
        with pytest.raises(SessionExpired):
            await act(session_id)


async def test_no_pause_in_the_middle_of_a_file(supervisor: LocalSupervisor, session_id: str) -> None:
    """A session is not paused while a file is transferred: the client of the transfer would wait in vain."""
    async with supervisor.files(session_id).open_write("f") as writer:
        await writer.send(b"half")
        with pytest.raises(Conflict):
            await supervisor.pause(session_id)
        await writer.commit()
    assert (await supervisor.pause(session_id)).status is Status.PAUSED


async def test_pause_and_resume_are_events(supervisor: LocalSupervisor, session_id: str) -> None:
    """A pause is one event and a resume is one, however often each is asked for."""
    async with supervisor.events(session_id=session_id) as events:
        for _ in range(2):
            await supervisor.pause(session_id)
        for _ in range(2):
            await supervisor.resume(session_id)
        await supervisor.destroy(session_id)
        kinds = []
        async for event in events:
            kinds.append(event.type)
            if event.type is EventType.SESSION_DESTROYED:
                break
    assert kinds[-3:] == [EventType.SESSION_PAUSED, EventType.SESSION_RESUMED, EventType.SESSION_DESTROYED]
    assert kinds.count(EventType.SESSION_PAUSED) == 1


async def test_a_viewer_that_takes_over_wakes_the_session(supervisor: LocalSupervisor, session_id: str) -> None:
    """A viewer that takes a shell over, or changes the size, resumes the session."""
    async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
        await supervisor.pause(session_id)
        with trio.fail_after(patience(10)):
            await viewer.take_over()
        assert (await supervisor.get(session_id)).status is Status.RUNNING
        await supervisor.pause(session_id)
        await viewer.resize(TerminalSize(100, 30))
        assert (await supervisor.get(session_id)).status is Status.RUNNING
        await supervisor.pause(session_id, STAYS)
        with pytest.raises(SessionPaused):
            await viewer.resize(TerminalSize(80, 24))
