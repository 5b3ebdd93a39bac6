"""Events as an event stream, from a real journal: bytes, cursors, filters, silence, clients that do not read."""

from __future__ import annotations

import json

import pytest

from sandkasten.journal.fields import MAX_DATA_BYTES
from sandkasten.journal.ring import MAX_READERS
from sandkasten.model import EventType
from tests.api.event_front import Blocks, running_front
from tests.api.harness import read_until, request_bytes
from tests.waiting import until


async def test_the_answer_begins_at_once_with_a_cursor() -> None:
    """Although nothing happens; and a client may come back with that cursor."""
    async with running_front() as front:
        async with front.follow() as stream:
            assert b"content-type: text/event-stream" in stream.head
            assert b"cache-control: no-cache" in stream.head
            assert await stream.next() == f": ping\nid: {front.journal.head}\n\n".encode()
            cursor = front.journal.head
        front.emit(1)
        async with front.follow(headers={"Last-Event-ID": cursor}) as stream:
            assert [event["data"] for event in await stream.events(1)] == [{"port": 1, "address": "::"}]


async def test_an_event_is_spelled_exactly() -> None:
    """Id, name, one line of ASCII JSON, an empty line; all in one write."""
    async with running_front() as front, front.follow() as stream:
        await stream.next()
        front.journal.emit(EventType.OOM, "a" * 24, victim="pythön\u2028\x85\n\r", oom_kills=1)
        block = await stream.next()
        cursor = front.journal.head
        (told,), _ = front.journal.page(cursor[:-1] + "0", None, limit=1)
        moment = told.time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{told.time.microsecond // 1000:03d}Z"
        assert block.decode("ascii") == (
            f"id: {cursor}\nevent: oom\n"
            f'data: {{"cursor":"{cursor}","time":"{moment}","type":"oom","session_id":"{"a" * 24}",'
            '"data":{"victim":"pyth\\u00f6n\\u2028\\u0085\\n\\r","oom_kills":1}}\n\n'
        )


@pytest.mark.parametrize("victim", ["x" * (MAX_DATA_BYTES - 13), "\U0001f600" * 9000], ids=["longest", "wide"])
async def test_no_event_is_larger_than_4_kib(victim: str) -> None:
    """The longest data, the longest type, the longest id of a session."""
    async with running_front() as front, front.follow() as stream:
        await stream.next()
        front.journal.emit(EventType.PROCESS_EXITED, "a" * 32, victim=victim)
        block = await stream.next()
        assert 1000 < len(block) <= 4096
        assert block.isascii()


async def test_each_event_comes_when_it_happens() -> None:
    """Of all sessions, or of one."""
    async with running_front() as front:
        one, other = await front.session(), await front.session()
        async with front.follow() as everything, front.follow(session_id=one) as mine:
            await everything.next()
            await mine.next()
            for number, session_id in enumerate((other, one, other, one)):
                front.emit(number, session_id=session_id)
                assert [each["session_id"] for each in await everything.events(1)] == [session_id]
            assert [each["data"]["port"] for each in await mine.events(2)] == [1, 3]


async def test_only_the_types_that_are_asked_for_come() -> None:
    """With commas between them."""
    async with running_front() as front, front.follow("?types=oom,exec.ended") as stream:
        for kind in EventType:
            front.journal.emit(kind, "a" * 24)
        assert [each["type"] for each in await stream.events(2)] == ["exec.ended", "oom"]


async def test_the_history_of_an_ended_session_is_readable() -> None:
    """From its beginning, with the cursor 0."""
    async with running_front() as front:
        session_id = await front.session()
        front.emit(1, session_id=session_id)
        await front.running.supervisor.destroy(session_id)
        async with front.follow("?cursor=0", session_id=session_id) as stream:
            types = [each["type"] for each in await stream.events(3)]
        assert types == ["session.created", "port.opened", "session.destroyed"]


async def test_a_client_reads_on_behind_its_last_event() -> None:
    """The `Last-Event-ID` that a browser sends by itself wins over the query with which the stream was opened."""
    async with running_front() as front:
        front.emit(*range(10))
        async with front.follow("?cursor=0") as stream:
            cursors = [each["cursor"] for each in await stream.events(10)]
        async with front.follow(f"?cursor={cursors[2]}") as stream:
            assert [each["cursor"] for each in await stream.events(7)] == cursors[3:]
        async with front.follow(f"?cursor={cursors[2]}", headers={"Last-Event-ID": cursors[6]}) as stream:
            assert [each["cursor"] for each in await stream.events(3)] == cursors[7:]


async def test_silence_is_filled_with_pings_that_move_the_cursor() -> None:
    """A plain comment while nothing at all happens; with an id when the journal went on with other events."""
    async with running_front(ping_interval_s=0.05) as front, front.follow("?types=oom") as stream:
        await stream.next()
        assert await stream.next() == b": ping\n\n"
        front.emit(1, 2, 3)
        block = await stream.next()
        while block == b": ping\n\n":
            block = await stream.next()
        assert block == f": ping\nid: {front.journal.head}\n\n".encode()
        assert await stream.next() == b": ping\n\n"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("cursor=", "cursor"),
        ("cursor=1", "cursor"),
        ("cursor=%00", "cursor"),
        ("cursor=%F0%9F%98%80", "cursor"),
        (f"cursor={'f' * 12}-{'f' * 12}", "cursor"),
        (f"cursor={'0' * 5000}", "cursor"),
        ("types=", "types"),
        ("types=oom,", "types"),
        ("types=Oom", "types"),
        ("types=oom;exec.ended", "types"),
        ("cursor=%FF", "query"),
    ],
)
async def test_a_bad_query_is_refused_by_name(query: str, field: str) -> None:
    """Before anything is read, as ordinary errors."""
    async with running_front() as front, front.running.client() as client:
        session_id = await front.session()
        for url in ("/v1/events", f"/v1/sessions/{session_id}/events"):
            answer = await client.get(f"{url}?{query}")
            assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")
            assert field in answer.json()["details"]
        assert front.journal.readers == 0


async def test_who_may_not_or_asks_wrongly_gets_no_stream() -> None:
    """No key, no such session, another method, too many readers."""
    async with running_front() as front, front.running.client() as client:
        session_id = await front.session()
        for url in ("/v1/events", f"/v1/sessions/{session_id}/events"):
            assert (await client.get(url, headers={"Authorization": "Bearer wrong"})).status_code == 401
            refused = await client.post(url, json={})
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await client.get(f"/v1/sessions/{'0' * 24}/events")).json()["error_code"] == "SESSION_NOT_FOUND"
        for _ in range(MAX_READERS):
            front.journal.listen(None)
        full = await client.get("/v1/events")
        assert (full.status_code, full.json()["error_code"]) == (503, "CAPACITY")


async def test_a_cursor_that_is_gone_is_said_with_the_oldest() -> None:
    """From the oldest cursor the client can go on."""
    async with running_front(memory_events=16, kept=20) as front, front.running.client() as client:
        first = front.journal.head
        for start in range(0, 100, 10):
            front.emit(*range(start, start + 10))
            await front.flush()
        answer = await client.get("/v1/events", params={"cursor": first})
        assert (answer.status_code, answer.json()["error_code"]) == (410, "CURSOR_GONE")
        async with front.follow(f"?cursor={answer.json()['details']['oldest_cursor']}") as stream:
            assert [each["data"]["port"] for each in await stream.events(20)] == list(range(80, 100))


async def test_a_client_that_leaves_frees_its_place() -> None:
    """Without anything being sent to it."""
    async with running_front() as front:
        async with front.follow() as stream:
            await stream.next()
            assert front.journal.readers == 1
        await until(front.no_reader_is_left)


async def test_a_client_that_does_not_read_stops_nobody() -> None:
    """The others get everything; the write deadline ends it and frees its place."""
    async with running_front(memory_events=64, write_timeout_s=0.5) as front:
        connection = await front.running.connect(receive_buffer=4096)
        async with connection, front.follow() as quick:
            await connection.send_all(request_bytes("GET", "/v1/events"))
            await read_until(connection, b"id: ")
            for number in range(4000):
                front.journal.emit(EventType.OOM, "a" * 24, victim="x" * 1000, oom_kills=number)
                assert (await quick.events(1))[0]["data"]["oom_kills"] == number

            async def one_is_left() -> bool:
                return front.journal.readers == 1

            await until(one_is_left)


async def test_a_client_that_falls_behind_all_that_is_kept_is_told() -> None:
    """In the stream: what came before is in order and whole, then one error, then the end."""
    async with running_front(memory_events=32, kept=50) as front:
        connection = await front.running.connect(receive_buffer=4096)
        async with connection:
            await connection.send_all(request_bytes("GET", "/v1/events"))
            head, _, rest = (await read_until(connection, b"id: ")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            for start in range(0, 9000, 20):
                for number in range(start, start + 20):
                    front.journal.emit(EventType.OOM, "a" * 24, victim="x" * 1000, oom_kills=number)
                await front.flush()
            stream = Blocks(connection, head, rest)
            await stream.next()
            seen = 0
            while (fields := await stream.fields())["event"] != "error":
                assert json.loads(fields["data"])["data"]["oom_kills"] == seen
                seen += 1
            error = json.loads(fields["data"])
            assert (error["error_code"], error["error"]) == ("CURSOR_GONE", error["message"])
            assert error["details"]["oldest_cursor"] == front.journal.floor
            assert await stream.next() == b""
            assert 0 < seen < 8950


async def test_a_stop_of_the_server_ends_streams_in_time() -> None:
    """Event streams would otherwise go on for ever."""
    async with running_front(graceful_timeout_s=0.1) as front:
        async with front.follow() as stream, front.websocket() as connection:
            await stream.next()
            await connection.get_message()
            assert await front.running.stop() < 2
        assert front.journal.readers == 0
