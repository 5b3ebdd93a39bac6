"""Every way in which a run, a channel or a connection of an exec WebSocket ends, and coming back."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from sandkasten import errors
from sandkasten.api.websocket import exec
from sandkasten.api.websocket.exec_messages import HEADER, MORE
from sandkasten.config import RunsSettings
from sandkasten.model import ExecKind, ProcessSpec, Stream
from tests.api.harness import running_front
from tests.api.ws_client import (
    Chunk,
    client_frame,
    close_code,
    exec_talk,
    handshake,
    is_quiet,
    last,
    make_session,
    output_of,
    started,
)
from tests.fakes.runner import Script
from tests.waiting import patience

KIB = 1024
PIECE = 64 * KIB


# Leaving and coming back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "is_cancelled"),
    [
        ({}, True),
        ({"exec_id": "mine"}, False),
        ({"on_disconnect": "detach"}, False),
        ({"exec_id": "mine", "on_disconnect": "cancel"}, True),
    ],
)
@pytest.mark.parametrize("is_queued", [False, True])
async def test_a_client_that_leaves_takes_only_what_it_said_with_it(
    fields: dict[str, str], *, is_cancelled: bool, is_queued: bool
) -> None:
    """Runs go on that have an id of the client's or were to be detached; all others are cancelled, waiting or not."""
    async with running_front() as running:
        turn = trio.Event()
        running.tree.scripts["wait"] = Script(turn=turn if is_queued else None, hold=trio.Event())
        async with exec_talk(running) as client:
            await client.say("start", id=1, cmd="wait", **fields)
            with trio.fail_after(patience()):
                await running.tree.run_opened.wait()
            if not is_queued:
                await client.hear_text("started")
        run = running.tree.runs[0]
        if is_cancelled:
            with trio.fail_after(patience()):
                await run.cancelled.wait()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert run.cancelled.is_set() is is_cancelled


async def test_a_run_is_left_to_itself() -> None:
    """Also one that was to be cancelled when its client leaves; its number is free then."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id) as client:
            run = await started(running, client, on_disconnect="cancel")
            run.write(Stream.STDOUT, b"so far")
            assert await client.hear() == Chunk(1, 1, 1, b"so far")
            await client.say("detach", id=1)
            assert await client.hear_text("detached") == {"type": "detached", "id": 1, "seq": 1}
            await client.run(1, "x")
        async with exec_talk(running, session_id) as client:
            await client.say("attach", id=1, exec_id=run.exec_id, after=1)
            assert (await client.hear_text("started"))["attached"] is True
            run.finish()
            await client.hear_text("exit")
    assert not run.cancelled.is_set()


async def test_a_stream_is_resumed_exactly_where_it_broke() -> None:
    """Only a piece whose last part came counts; what follows it is sent again, whole."""
    data = [bytes([number]) * 50_000 for number in range(1, 9)]
    async with running_front() as running:
        session_id = await make_session(running)
        running.tree.scripts["data"] = Script([(Stream.STDOUT, each) for each in data], hold=trio.Event())
        async with exec_talk(running, session_id) as client:
            await client.say("start", id=1, cmd="data", exec_id="run", credit=110_000)
            heard = await client.hear_until("started")
            while len(output_of(heard)) < 110_000:
                heard.append(await client.hear())
        whole = [each for each in heard if isinstance(each, Chunk)]
        after = max(each.sequence for each in whole if not each.more)
        assert after == 2
        running.tree.scripts["data"].hold.set()  # type: ignore[union-attr]  # it was given one
        async with exec_talk(running, session_id) as client:
            await client.say("attach", id=9, exec_id="run", after=after)
            rest = await client.hear_until("exit", 9)
    assert rest[0] == {"type": "started", "id": 9, "seq": 2, "exec_id": "run", "attached": True}
    assert b"".join(each.data for each in whole if each.sequence <= after) + output_of(rest) == b"".join(data)
    assert last(rest)["seq"] == 8


async def test_a_repeated_start_joins_the_run() -> None:
    """From its first output on; another command of the same id is a conflict."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["x"] = Script([(Stream.STDOUT, b"once")])
        await client.run(1, "x", exec_id="same")
        again = await client.run(1, "x", exec_id="same")
        assert (again[0], output_of(again)) == (
            {"type": "started", "id": 1, "seq": 0, "exec_id": "same", "attached": True},
            b"once",
        )
        await client.say("start", id=1, cmd="y", exec_id="same")
        assert (await client.hear_text("error"))["error_code"] == "CONFLICT"
    assert len(running.tree.runs) == 1


async def test_a_run_that_is_joined_behind_its_end_says_where_that_is() -> None:
    """A number that the run has not come to yet is not believed."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        run.write(Stream.STDOUT, b"one")
        await client.say("attach", id=2, exec_id=run.exec_id, after=1000)
        assert last(await client.hear_until("started", 2))["seq"] == 1
        run.write(Stream.STDOUT, b"two")
        run.finish()
        heard = await client.hear_until("exit", 2)
        assert [each for each in heard if isinstance(each, Chunk) and each.channel == 2] == [Chunk(2, 1, 2, b"two")]
        assert last(heard)["seq"] == 2


@pytest.mark.parametrize(
    ("method", "kind", "fields"),
    [("open_exec", "start", {"cmd": "x"}), ("attach_exec", "attach", {"exec_id": "run"})],
)
async def test_what_is_refused_before_a_run_is_there_is_an_answer(
    method: str, kind: str, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor may say no at once; the channel ends before it began, and the connection goes on."""

    def refuse(*_: object, **__: object) -> None:
        raise errors.TooLarge("that is too much")

    async with running_front() as running, exec_talk(running) as client:
        monkeypatch.setattr(running.supervisor, method, refuse)
        await client.say(kind, id=1, **fields)
        error = await client.hear_text("error")
        assert (error["error_code"], error["id"], error["final"], error["refused"]) == ("TOO_LARGE", 1, True, kind)
        assert await is_quiet(client)


async def test_any_kind_of_run_can_be_joined() -> None:
    """A background process, for example; what was not kept is gone."""
    async with running_front(runs=RunsSettings(keep_mb=1)) as running:
        session_id = await make_session(running)
        running.tree.scripts["server"] = Script(hold=trio.Event())
        info = await running.supervisor.start_process(session_id, ProcessSpec(command="server"))
        run = running.tree.runs[0]
        run.write(Stream.STDOUT, b"log")
        async with exec_talk(running, session_id) as client:
            await client.say("attach", id=1, exec_id=info.exec_id)
            await client.hear_until("started")
            await client.say("attach", id=2, exec_id="unknown")
            assert last(await client.hear_until("error", 2))["error_code"] == "EXEC_NOT_FOUND"
            await client.say("detach", id=1)
            await client.hear_until("detached")
            run.write(Stream.STDOUT, bytes(2 * KIB * KIB))
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.say("attach", id=2, exec_id=info.exec_id)
            assert last(await client.hear_until("error", 2))["error_code"] == "EXEC_GONE"
        assert info.kind is ExecKind.PROCESS


# Ends -------------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_session_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel gets the exit of its run, or an error if output without credit is before it; the connection 4410."""
    monkeypatch.setattr(exec, "END_S", 0.05)
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id) as client, exec_talk(running) as other:
            await started(running, client, 1)
            (await started(running, client, 2, credit=0)).write(Stream.STDOUT, b"no credit")
            await trio.testing.wait_all_tasks_blocked(0.01)
            await running.supervisor.destroy(session_id)
            end, error = await client.hear_text("exit"), await client.hear_text("error")
            assert (end["id"], end["cause"]) == (1, "sandbox_died")
            assert (error["id"], error["error_code"], error["final"]) == (2, "SESSION_EXPIRED", True)
            assert (await client.hear_close())[0] == 4410
            assert await is_quiet(other)


async def test_the_end_of_an_idle_session_closes_its_connections() -> None:
    """Nobody has to ask to be told."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id) as client:
            await running.supervisor.destroy(session_id)
            assert await client.hear_close() == (4410, "the session has ended")


@pytest.mark.parametrize(
    "message",
    ["", "{", "[]", "7", '{"type":"none"}', '{"type":"start","cmd":"x"}', b"", b"short", HEADER.pack(0, 0, 0)],
)
async def test_a_message_that_names_no_channel_closes_the_connection(message: str | bytes) -> None:
    """4400 with a reason; what ran is left as always."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        await client.connection.send_message(message)
        code, reason = await client.hear_close()
        assert code == 4400
        assert reason
        assert not run.cancelled.is_set()


async def test_why_a_connection_is_closed_names_the_field() -> None:
    """Nothing else is said about a message that names no channel."""
    async with running_front() as running, exec_talk(running) as client:
        await client.say("start", id=0, cmd="x")
        assert await client.hear_close() == (
            4400,
            "the request has bad fields: id must be between 1 and 2147483648",
        )


@pytest.mark.parametrize(
    "message",
    [
        '{"type":"none","id":1}',
        '{"type":"signal","id":1,"signal":"NO"}',
        '{"type":"credit","id":1,"bytes":-1}',
        '{"type":"start","id":1,"cmd":"x"}',
        '{"type":"start","id":1}',
        HEADER.pack(1, 1, 0) + b"x",
        HEADER.pack(1, MORE, 0) + b"x",
        HEADER.pack(1, 0, 9) + b"x",
    ],
)
async def test_a_malformed_message_to_a_channel_leaves_its_run_alone(message: str | bytes) -> None:
    """A malformed message is answered on the channel, and the answer is not the channel's end."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        await client.connection.send_message(message)
        error = await client.hear_text("error")
        assert (error["id"], error["final"]) == (1, False)
        run.finish()
        await client.hear_text("exit")


async def test_a_client_that_asks_and_does_not_listen_is_told_to_leave() -> None:
    """Answers that nobody reads are bounded; so is what a connection can hold."""
    async with running_front() as running, await running.connect(receive_buffer=4096) as stream:
        await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/exec/ws"))
        ping = client_frame(1, json.dumps({"type": "ping", "data": "x" * 256}).encode())
        with trio.fail_after(patience()):
            await stream.send_all(ping * 40_000)
        assert await close_code(stream) == 4429
        assert await running.is_alive()
