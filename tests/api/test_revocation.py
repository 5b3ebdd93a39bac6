"""A key that ends, ends what is under way with it, over every kind of connection, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import attrs
import trio

from sandkasten.api.routes import SESSIONS
from sandkasten.model import SessionSpec
from tests.api.harness import RunningTree, read_to_end, read_until, request_bytes, running_front
from tests.api.keys import CONFINED, READ, WRITE, Issued
from tests.api.ws_client import exec_talk, started, talk
from tests.fakes.runner import Script
from tests.waiting import patience, until


async def make_session(running: RunningTree) -> str:
    running.ring.replace([READ.key, WRITE.key, CONFINED.key])
    return (await running.supervisor.create(SessionSpec())).id


async def is_running(running: RunningTree) -> bool:
    return bool(running.tree.runs) and running.tree.runs[0].started.is_set()


def head_of(issued: Issued) -> dict[str, str]:
    return {"Authorization": f"Bearer {issued.token}"}


async def test_a_request_after_the_end_is_401() -> None:
    """From the moment on; the other keys and the configured one go on."""
    async with running_front() as running, running.client(token=WRITE.token) as client:
        await make_session(running)
        assert (await client.get(SESSIONS)).status_code == 200
        running.ring.replace([READ.key])
        answer = await client.get(SESSIONS)
        assert (answer.status_code, answer.json()["error_code"]) == (401, "UNAUTHORIZED")
        async with running.client(token=READ.token) as other, running.client() as configured:
            assert (await other.get(SESSIONS)).status_code == (await configured.get(SESSIONS)).status_code == 200


async def test_a_command_that_is_waited_for_is_401_and_cancelled() -> None:
    """As if its caller had left; the session goes on for others."""
    async with running_front() as running:
        session_id = await make_session(running)
        running.tree.scripts["wait"] = Script(hold=trio.Event())
        request = request_bytes("POST", f"{SESSIONS}/{session_id}/exec", headers=head_of(WRITE), body=b'{"cmd":"wait"}')
        async with await running.connect() as stream:
            await stream.send_all(request)
            await until(lambda: is_running(running))
            running.ring.replace([READ.key])
            assert b" 401 " in await read_until(stream, b"revoked")
        with trio.fail_after(patience()):
            await running.tree.runs[0].cancelled.wait()
        async with running.client() as client:
            assert (await client.get(f"{SESSIONS}/{session_id}")).json()["status"] == "running"


async def test_an_event_stream_ends_unfinished() -> None:
    """The connection of a revoked key is closed in the middle of the stream: the body has no last chunk."""
    async with running_front() as running:
        await make_session(running)
        async with await running.connect() as mine, await running.connect() as other:
            for stream, issued in ((mine, READ), (other, WRITE)):
                await stream.send_all(request_bytes("GET", "/v1/events", headers=head_of(issued)))
                await read_until(stream, b": ping")
            running.ring.replace([WRITE.key])
            assert not (await read_to_end(mine)).endswith(b"0\r\n\r\n")
            await running.supervisor.create(SessionSpec())
            await read_until(other, b"session.created")


async def test_a_websocket_is_told_and_closed() -> None:
    """With 4401, whether the key came in the header or in the first message; its commands are cancelled."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id, key=WRITE.token) as client:
            run = await started(running, client, on_disconnect="cancel")
            async with talk(running, f"{SESSIONS}/{session_id}/terminal/ws", key=None) as other:
                await other.say("auth", key=CONFINED.token)
                assert (await other.hear_close())[0] == 4404
            async with talk(running, "/v1/events", key=None) as listener:
                await listener.say("auth", key=READ.token)
                await listener.hear_text("cursor")
                running.ring.replace([])
                assert (await listener.hear_close())[0] == 4401
            assert (await client.hear_close())[0] == 4401
        with trio.fail_after(patience()):
            await run.cancelled.wait()


async def test_a_key_that_expires_while_it_is_used_ends_as_well() -> None:
    """At the next look at the clock, without anybody's request."""
    async with running_front() as running:
        await make_session(running)
        soon = datetime.now(UTC) + timedelta(seconds=patience(0.5))
        running.ring.replace([attrs.evolve(READ.key, expires_at=soon)])
        async with talk(running, "/v1/events", key=READ.token) as listener:
            await listener.hear_text("cursor")
            running.ring.end_uses()
            assert not listener.connection.closed
            await trio.sleep((soon - datetime.now(UTC)).total_seconds() + 0.01)
            running.ring.end_uses()
            assert (await listener.hear_close())[0] == 4401
