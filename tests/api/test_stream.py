"""Streamed commands: events as the published client reads them, pings, pressure, endings, and clients that leave."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.testing

from sandkasten.actors.runs.run import RunReader
from sandkasten.actors.session import watch
from sandkasten.config import ServerSettings
from sandkasten.model import Stream
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.fakes.runner import Script
from tests.waiting import patience

CANCELLED_WHEN_LEFT = b'{"cmd": "cmd", "on_disconnect": "cancel"}'


@attrs.frozen
class Event:
    name: str
    data: dict[str, Any]  # JSON values
    position: str | None


class EventReader:
    """Read events line by line, with the line reader that published clients use."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()
        self._name = ""
        self._position: str | None = None

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> Event:
        async for line in self._lines:
            if line.startswith("event: "):
                self._name, self._position = line.removeprefix("event: "), None
            elif line.startswith("id: "):
                self._position = line.removeprefix("id: ")
            elif line.startswith("data: "):
                return Event(self._name, json.loads(line.removeprefix("data: ")), self._position)
            else:
                assert line == "" or line.startswith(":"), line
        raise StopAsyncIteration


async def stream(running: RunningTree, client: httpx.AsyncClient, script: Script, **body: Any) -> list[Event]:  # JSON
    """Run one scripted command to its end."""
    running.tree.scripts["cmd"] = script
    url = await make_session(running, client)
    async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "cmd"} | body) as answer:
        assert answer.status_code == 200
        return [event async for event in EventReader(answer)]


def text_of(events: list[Event], kind: str | None = None) -> str:
    """Return the chunks' text, of one stream or of both."""
    chunks = [event.data for event in events if event.name == "chunk"]
    return "".join(chunk["chunk"] for chunk in chunks if kind in (None, chunk["stream"]))


async def test_a_stream_is_chunks_and_one_done() -> None:
    """With the published fields, the headers that keep proxies from buffering, and ids that count pieces."""
    script = Script([(Stream.STDOUT, b"a\r\n"), (Stream.STDERR, b"b\n"), (Stream.STDOUT, b"\x1b[1mc")], exit_code=5)
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, script)
        assert (text_of(events), text_of(events, "stderr")) == ("a\nb\nc", "b\n")
        assert [event.position for event in events] == ["1", "2", "3", None]
        assert all(event.data["timestamp"] > 1_600_000_000_000 for event in events[:-1])
        done = events[-1]
        wanted = {"exit_code": 5, "cwd": "/workspace", "duration_ms": 7, "cause": "exited", "timed_out": False}
        assert done.name == "done"
        assert done.data | wanted == done.data


async def test_the_stream_has_the_headers_of_one() -> None:
    """Event stream, not cached, not buffered, with a request id."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/exec/stream", json={"cmd": "a"})
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "x-request-id" in answer.headers


async def test_every_write_is_one_small_event() -> None:
    """Read as HTTP chunks: each has exactly one event, whole, of at most 4 KiB."""
    script = Script([(Stream.STDOUT, "é\u2028\x85\U0001f600".encode() * 5000)])
    async with running_front() as running:
        running.tree.scripts["cmd"] = script
        async with running.client() as client:
            url = await make_session(running, client)
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=b'{"cmd": "cmd"}'))
            received = (await read_until(connection, b"\r\n0\r\n\r\n")).partition(b"\r\n\r\n")[2]
    pieces = []
    while received != b"0\r\n\r\n":
        size, _, rest = received.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        received = rest[int(size, 16) + 2 :]
    assert len(pieces) > 10
    for piece in pieces:
        assert len(piece) <= 4096
        assert piece.isascii()
        assert piece.startswith(b"event: ")
        assert piece.endswith(b"\n\n")
        assert piece.count(b"\n\n") == 1


async def test_characters_and_sequences_cut_between_pieces_stay_whole() -> None:
    """Per stream, with the other one in between."""
    script = Script(
        [
            (Stream.STDOUT, b"\xc3"),
            (Stream.STDERR, b"\x1b["),
            (Stream.STDOUT, b"\xa9\r"),
            (Stream.STDERR, b"31mx\xff"),
            (Stream.STDOUT, b"\nend\xc3"),
        ]
    )
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, script)
        assert text_of(events, "stdout") == "é\nend\ufffd"
        assert text_of(events, "stderr") == "x\ufffd"


async def test_no_position_comes_twice() -> None:
    """Positions with output held back on both streams differ, too."""
    script = Script([(Stream.STDOUT, b"a\xc3"), (Stream.STDERR, b"b\xff\xe2")])
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, script)
        assert [(event.data["chunk"], event.position) for event in events[:-1]] == [
            ("a", "1~c3~"),
            ("b\ufffd", "2~c3~e2"),
            ("\ufffd", "2~c3~e2.1.0"),
            ("\ufffd", "2~c3~e2.1.1"),
        ]


async def test_base64_chunks_are_exact_bytes() -> None:
    """Each one decodable alone."""
    data = bytes(range(256)) * 40
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, Script([(Stream.STDOUT, data)]), encoding="base64")
        chunks = [base64.b64decode(event.data["chunk"]) for event in events[:-1]]
        assert b"".join(chunks) == data
        assert len(chunks) > 1


async def test_raw_output_keeps_sequences() -> None:
    """As in the blocking route."""
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, Script([(Stream.STDOUT, b"\x1b[1ma\r\n")]), raw_output=True)
        assert text_of(events) == "\x1b[1ma\r\n"


async def test_the_first_output_comes_before_the_command_ends() -> None:
    """The head comes before the first output."""
    first, last = trio.Event(), trio.Event()
    async with running_front() as running, running.client() as client:
        running.tree.scripts["quiet"] = Script(hold=first)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"first")], hold=last)
        url = await make_session(running, client)
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "quiet"}) as answer:
            assert answer.status_code == 200
            first.set()
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "cmd"}) as answer:
            events = EventReader(answer)
            assert (await anext(events)).data["chunk"] == "first"
            last.set()
            assert (await anext(events)).name == "done"
            assert [event async for event in events] == []


async def test_many_small_pieces_are_gathered() -> None:
    """A program that writes single bytes does not become one event per byte."""
    script = Script([(Stream.STDOUT, b"x")], repeat=2000)
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, script)
        assert text_of(events) == "x" * 2000
        assert len(events) < 500


async def test_silence_is_filled_with_pings() -> None:
    """Comments that no parser sees, while the command runs and while it waits for its turn."""
    turn, end = trio.Event(), trio.Event()
    async with running_front(ping_interval_s=0.05) as running:
        running.tree.scripts["cmd"] = Script(turn=turn, hold=end)
        async with running.client() as client:
            url = await make_session(running, client)
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=b'{"cmd": "cmd"}'))
            head = await read_until(connection, b": ping\n\n")
            assert head.startswith(b"HTTP/1.1 200")
            turn.set()
            await read_until(connection, b": ping\n\n")
            end.set()
            assert b"event: done" in await read_until(connection, b"0\r\n\r\n")


async def test_what_fails_before_the_command_starts_is_plain_json() -> None:
    """Validation, a busy shell, a command too long."""
    async with (
        running_front(max_command_bytes=10, server=ServerSettings(pool_sandboxes=0, shell_queue_length=1)) as running,
        running.client() as client,
    ):
        url = await make_session(running, client)
        running.tree.scripts["hold"] = Script(hold=trio.Event())
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "hold", "exec_id": "hold"}):
            pass
        for body, status in (({}, 400), ({"cmd": "busy"}, 409), ({"cmd": "a" * 11}, 413)):
            answer = await client.post(f"{url}/exec/stream", json=body)
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")


async def test_what_fails_afterwards_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the output that came first, with the code, both spellings of the message, and the request id."""
    monkeypatch.setattr(watch, "_NEWS_S", 0.01)
    script = Script([(Stream.STDOUT, b"some")], loses_connection=True)
    async with running_front() as running, running.client() as client:
        events = await stream(running, client, script)
        assert [event.name for event in events] == ["chunk", "error"]
        error = events[-1].data
        message = "the sandbox closed the connection, and what became of it is not known yet"
        assert (error["error_code"], error["error"], error["message"]) == ("CAPACITY", message, message)
        assert error["details"] == {"session_id": (await running.supervisor.list())[0].id}
        assert error["request_id"]


async def test_a_timeout_is_an_error_event_or_a_result() -> None:
    """As the client asked."""
    script = Script([(Stream.STDOUT, b"so far")], cause="timed_out", exit_code=137)
    async with running_front() as running, running.client() as client:
        error = (await stream(running, client, script))[-1]
        assert (error.name, error.data["error_code"]) == ("error", "COMMAND_TIMEOUT")
        done = (await stream(running, client, script, on_timeout="result"))[-1]
        assert (done.name, done.data["timed_out"], done.data["exit_code"]) == ("done", True, 124)


async def test_a_bug_in_the_middle_ends_the_stream_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not take half of a stream for all of it."""

    async def wait_end(reader: RunReader) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(RunReader, "wait_end", wait_end)
    async with running_front() as running:
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"some")])
        async with running.client() as client:
            url = await make_session(running, client)
            try:
                await client.post(f"{url}/exec/stream", json={"cmd": "cmd"})
            except httpx.RemoteProtocolError:
                pass
            else:
                raise AssertionError("the stream looked complete")
        assert await running.is_alive()


async def test_a_client_that_leaves_cancels_its_command(caplog: pytest.LogCaptureFixture) -> None:
    """A client that asked for it cancels its command by leaving: in the middle of the output, in silence, and in the
    queue. Its leaving is logged as no error.
    """
    never = trio.Event()
    endless = Script([(Stream.STDOUT, bytes(60_000))], repeat=10**9)
    async with running_front() as running:
        async with running.client() as client:
            url = await make_session(running, client)
        for script in (endless, Script(hold=never), Script(turn=never)):
            running.tree.scripts["cmd"] = script
            running.tree.run_opened = trio.Event()
            connection = await running.connect()
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=CANCELLED_WHEN_LEFT))
            await running.tree.run_opened.wait()
            await connection.aclose()
            with trio.fail_after(patience()):
                await running.tree.runs[-1].cancelled.wait()
        assert await running.is_alive()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_slow_reader_stops_the_command_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Output taken from the command while nobody reads is bounded; the write deadline then ends the command."""
    endless = Script([(Stream.STDOUT, b"x" * 60_000)], repeat=10**9)
    async with running_front(write_timeout_s=0.4) as running:
        async with running.client() as client:
            url = await make_session(running, client)
        running.tree.scripts["cmd"] = endless
        async with await running.connect(receive_buffer=4096) as connection:
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=CANCELLED_WHEN_LEFT))
            await running.tree.run_opened.wait()
            run = running.tree.runs[0]
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert run.pieces_taken < 200
            assert await running.is_alive()
            with trio.fail_after(patience()):
                await run.cancelled.wait()
            assert run.pieces_taken < 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_stop_ends_streams_in_time() -> None:
    """A stream that would go on for ever is ended with its command."""
    async with running_front(graceful_timeout_s=0.1) as running, running.client() as client:
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"x")], hold=trio.Event())
        url = await make_session(running, client)
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=CANCELLED_WHEN_LEFT))
            await read_until(connection, b"event: chunk")
            assert await running.stop() < 1
        assert running.tree.runs[0].cancelled.is_set()
