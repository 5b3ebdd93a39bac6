"""A run and those who come and go: retries that attach, clients that leave, streams that go on where they were cut."""

from __future__ import annotations

from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.testing

from sandkasten.actors.session import watch
from sandkasten.config import RunsSettings
from sandkasten.model import OnDisconnect, Stream
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.api.test_stream import Event, EventReader, text_of
from tests.fakes.runner import Script
from tests.waiting import patience


async def events_of(answer: httpx.Response) -> list[Event]:
    """Return all events of a stream."""
    return [event async for event in EventReader(answer)]


async def leave_after(running: RunningTree, path: str, body: bytes, mark: bytes) -> None:
    """Send a request, read up to `mark`, and go away."""
    connection = await running.connect()
    await connection.send_all(request_bytes("POST", path, body=body))
    await read_until(connection, mark)
    await connection.aclose()


async def crowd_out(running: RunningTree, client: httpx.AsyncClient, url: str) -> None:
    """Run a command whose output takes the room of all output that is kept, with a `keep_mb` of at most 4."""
    running.tree.scripts["crowd"] = Script([(Stream.STDOUT, bytes(60_000))], repeat=80)
    assert (await client.post(f"{url}/exec", json={"cmd": "crowd"})).status_code == 200


@pytest.mark.parametrize("first_ended", [False, True])
async def test_the_same_id_and_body_attach_and_nothing_runs_twice(first_ended: bool) -> None:
    """To a run that goes on or has ended; both clients get all of its output."""
    end = trio.Event()
    body = {"cmd": "cmd", "exec_id": "e-1", "env": {"A": "1"}, "timeout_ms": 900}
    answers: list[httpx.Response] = []
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"once\n")], exit_code=3, hold=end)

        async def post() -> None:
            answers.append(await client.post(f"{url}/exec", json=body))

        if first_ended:
            end.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post)
            await running.tree.run_opened.wait()
            nursery.start_soon(post)
            await trio.testing.wait_all_tasks_blocked(0.01)
            end.set()
        assert len(running.tree.runs) == 1
        assert [(answer.status_code, answer.json()["output"], answer.json()["exit_code"]) for answer in answers] == [
            (200, "once\n", 3)
        ] * 2


@pytest.mark.parametrize("route", ["exec", "exec/stream"])
async def test_an_id_that_the_server_made_joins_its_run_and_never_begins_one(route: str) -> None:
    """The answer names it, and a client may repeat the call with it; when the run is not kept any more it is 410."""
    async with running_front(runs=RunsSettings(keep_mb=1)) as running, running.client() as client:
        url = await make_session(running, client)
        first = await client.post(f"{url}/{route}", json={"cmd": "a"})
        made = running.tree.runs[0].exec_id
        assert made in first.text
        again = await client.post(f"{url}/{route}", json={"cmd": "a", "exec_id": made})
        assert (again.status_code, len(running.tree.runs)) == (200, 1)
        await crowd_out(running, client, url)
        for exec_id in (made, "run-0123456789abcdef"):
            gone = await client.post(f"{url}/{route}", json={"cmd": "a", "exec_id": exec_id})
            assert (gone.status_code, gone.json()["error_code"]) == (410, "EXEC_GONE")
        assert [run.request.command for run in running.tree.runs] == ["a", "crowd"]


@pytest.mark.parametrize(
    "other",
    [
        {"cmd": "b"},
        {"timeout_ms": 5},
        {"cwd": "/tmp"},
        {"env": {"A": "2"}},
        {"stdin": ""},
        {"mode": "stateless"},
    ],
)
async def test_the_same_id_with_another_body_is_409(other: dict[str, object]) -> None:
    """Blocking and streamed; what only concerns the answer may differ."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        body = {"cmd": "a", "exec_id": "e-1"}
        assert (await client.post(f"{url}/exec", json=body)).status_code == 200
        for route in ("exec", "exec/stream"):
            answer = await client.post(f"{url}/{route}", json=body | other)
            assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT")
            same = body | {"raw_output": True, "on_timeout": "result", "on_disconnect": "detach"}
            assert (await client.post(f"{url}/{route}", json=same)).status_code == 200
        assert len(running.tree.runs) == 1


async def test_a_run_that_is_not_kept_any_more_is_410() -> None:
    """A run that is not kept is not run again, whichever client asks."""
    async with running_front(runs=RunsSettings(keep_mb=1)) as running, running.client() as client:
        url = await make_session(running, client)
        body = {"cmd": "a", "exec_id": "e-1"}
        await client.post(f"{url}/exec", json=body)
        await crowd_out(running, client, url)
        answers = [
            await client.post(f"{url}/exec", json=body),
            await client.post(f"{url}/exec/stream", json=body),
            await client.get(f"{url}/execs/e-1"),
            await client.get(f"{url}/execs/e-1/output"),
            await client.get(f"{url}/execs/e-1/stream"),
        ]
        assert [(answer.status_code, answer.json()["error_code"]) for answer in answers] == [(410, "EXEC_GONE")] * 5
        assert [run.request.command for run in running.tree.runs] == ["a", "crowd"]


@pytest.mark.parametrize(
    ("route", "asked", "wanted"),
    [
        ("exec", {}, OnDisconnect.CANCEL),
        ("exec", {"on_disconnect": "cancel"}, OnDisconnect.CANCEL),
        ("exec", {"on_disconnect": "detach"}, OnDisconnect.DETACH),
        ("exec/stream", {}, OnDisconnect.DETACH),
        ("exec/stream", {"exec_id": None}, OnDisconnect.CANCEL),
        ("exec/stream", {"exec_id": None, "on_disconnect": "detach"}, OnDisconnect.DETACH),
        ("exec/stream", {"on_disconnect": "cancel"}, OnDisconnect.CANCEL),
        ("exec/stream", {"on_disconnect": "detach"}, OnDisconnect.DETACH),
    ],
)
async def test_a_client_that_leaves_cancels_or_detaches(
    route: str, asked: dict[str, str | None], wanted: OnDisconnect
) -> None:
    """The request, or else the route, decides between cancelling and detaching; a stream whose client gave no id is
    cancelled. A detached run's end and output can be read later.
    """
    end = trio.Event()
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"done\n")], hold=end)
        connection = await running.connect()
        body = httpx.Request("POST", "http://x", json={"cmd": "cmd", "exec_id": "e-1"} | asked).content
        await connection.send_all(request_bytes("POST", f"{url}/{route}", body=body))
        await running.tree.run_opened.wait()
        (run,) = running.tree.runs
        with trio.fail_after(patience()):
            while not run.pieces_taken:
                await run.changed.wait()
        await connection.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        end.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        exec_id = run.exec_id
        seen = (await client.get(f"{url}/execs/{exec_id}")).json()
        assert run.cancelled.is_set() is (wanted is OnDisconnect.CANCEL)
        assert (seen["state"], seen["end"]["cause"]) == (
            "ended",
            "cancelled" if wanted is OnDisconnect.CANCEL else "exited",
        )
        assert (await client.get(f"{url}/execs/{exec_id}/output")).json()["text"] == "done\n"


async def test_one_who_attached_never_ends_the_run_by_leaving() -> None:
    """A run belongs to the client that began it: no option of an attached client makes its leaving end the run."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        end = trio.Event()
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"on\n")], hold=end)
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "cmd", "exec_id": "e-1"}) as answer:
            events = EventReader(answer)
            assert (await anext(events)).name == "chunk"
            body = b'{"cmd": "cmd", "exec_id": "e-1", "on_disconnect": "cancel"}'
            await leave_after(running, f"{url}/exec/stream", body, b"event: chunk")
            (run,) = running.tree.runs
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not run.cancelled.is_set()
            end.set()
            assert [event.name async for event in events] == ["done"]


async def resume(client: httpx.AsyncClient, url: str, how: str, position: str, **body: Any) -> list[Event]:  # JSON
    """Go on with the run `e-1` behind a position, in one of the ways there are."""
    headers = {"Last-Event-ID": position}
    if how == "post":
        request = client.stream("POST", f"{url}/exec/stream", json={"exec_id": "e-1"} | body, headers=headers)
    elif how == "get":
        request = client.stream("GET", f"{url}/execs/e-1/stream", headers=headers)
    else:
        request = client.stream("GET", f"{url}/execs/e-1/stream?after={position}")
    async with request as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["x-exec-id"] == "e-1"
        return await events_of(answer)


@pytest.mark.parametrize("how", ["post", "get", "query"])
async def test_a_stream_goes_on_exactly_where_it_was_cut(how: str) -> None:
    """After each of its events, though a character, a line end and a colour lie across pieces."""
    pieces = [b"one\r", b"\ntwo\xc3", b"\xa9\x1b[3", b"1mthree\x1b[0m", b"x" * 9000, b"\r", b"end\xff"]
    script = Script([(Stream.STDERR if index == 5 else Stream.STDOUT, piece) for index, piece in enumerate(pieces)])
    async with running_front(coalesce_ms=0) as running, running.client() as client:
        running.tree.scripts["cmd"] = script
        url = await make_session(running, client)
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "cmd", "exec_id": "e-1"}) as answer:
            assert answer.headers["x-exec-id"] == "e-1"
            events = await events_of(answer)
        whole = {kind: text_of(events, kind) for kind in Stream}
        assert whole[Stream.STDOUT] == f"one\ntwoéthree{'x' * 9000}end\ufffd"
        for count in range(1, len(events)):
            rest = await resume(client, url, how, str(events[count - 1].position), cmd="cmd")
            for kind in Stream:
                assert text_of(events[:count], kind) + text_of(rest, kind) == whole[kind]
            assert (rest[-1].name, rest[-1].data) == ("done", events[-1].data)
        assert len(running.tree.runs) == 1


async def test_a_client_can_go_on_while_the_run_does() -> None:
    """A client that comes back gets the output written meanwhile, then the output that comes."""
    end = trio.Event()
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"one")], hold=end)
        body = b'{"cmd": "cmd", "exec_id": "e-1"}'
        await leave_after(running, f"{url}/exec/stream", body, b"id: 1\n")
        (run,) = running.tree.runs
        run.write(Stream.STDOUT, b"two")
        async with client.stream("GET", f"{url}/execs/e-1/stream", headers={"Last-Event-ID": "1"}) as answer:
            events = EventReader(answer)
            assert (await anext(events)).data["chunk"] == "two"
            run.write(Stream.STDOUT, b"three")
            end.set()
            assert [event.data.get("chunk") async for event in events] == ["three", None]


async def test_a_stream_without_an_id_is_told_the_one_it_got() -> None:
    """The answer's `X-Exec-Id` header has the id that the server made, so that the client can go on with the stream,
    too.
    """
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/exec/stream", json={"cmd": "a"})
        seen = await client.get(f"{url}/execs/{answer.headers['x-exec-id']}")
        assert (seen.status_code, seen.json()["command"]) == (200, "a")


async def test_resuming_never_runs_a_command() -> None:
    """One that is not known is 404, one without an id is refused."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        headers = {"Last-Event-ID": "3"}
        unknown = await client.post(f"{url}/exec/stream", json={"cmd": "a", "exec_id": "e-9"}, headers=headers)
        assert (unknown.status_code, unknown.json()["error_code"]) == (404, "EXEC_NOT_FOUND")
        nameless = await client.post(f"{url}/exec/stream", json={"cmd": "a"}, headers=headers)
        assert (nameless.status_code, list(nameless.json()["details"])) == (400, ["exec_id"])
        assert running.tree.runs == []


@pytest.mark.parametrize("position", ["x", "-1", "1.5", "1~0~", "9" * 20])
async def test_a_bad_position_is_refused(position: str) -> None:
    """By name, in the header and in the query."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/exec", json={"cmd": "a", "exec_id": "e-1"})
        answers = [
            await client.get(f"{url}/execs/e-1/stream", headers={"Last-Event-ID": position}),
            await client.post(
                f"{url}/exec/stream", json={"cmd": "a", "exec_id": "e-1"}, headers={"Last-Event-ID": position}
            ),
            await client.get(f"{url}/execs/e-1/stream", params={"after": position}),
        ]
        assert [(answer.status_code, list(answer.json()["details"])) for answer in answers] == [
            (400, ["last_event_id"]),
            (400, ["last_event_id"]),
            (400, ["after"]),
        ]


async def test_output_that_is_not_kept_is_410_before_and_an_error_event_after_the_start() -> None:
    """With where what is kept begins. It goes while a client is far behind in the output of a run that has ended."""
    async with running_front(runs=RunsSettings(keep_mb=4)) as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"x" * 60_000)], repeat=80)
        await client.post(f"{url}/exec", json={"cmd": "cmd", "exec_id": "e-1"})
        first = (await client.get(f"{url}/execs/e-1")).json()["first_sequence"]
        gone = await client.get(f"{url}/execs/e-1/stream", headers={"Last-Event-ID": str(first - 2)})
        assert (gone.status_code, gone.json()["error_code"], gone.json()["details"]) == (
            410,
            "EXEC_GONE",
            {"first_sequence": first},
        )
        async with await running.connect(receive_buffer=4096) as connection:
            await connection.send_all(request_bytes("GET", f"{url}/execs/e-1/stream?after={first - 1}"))
            received = await read_until(connection, b"event: chunk")
            await crowd_out(running, client, url)
            received += await read_until(connection, b"0\r\n\r\n")
        assert received.count(b"event: error") == 1
        assert b'"error_code":"EXEC_GONE"' in received.rpartition(b"event: error")[2]


@pytest.mark.parametrize(
    ("failing", "chunks", "code"),
    [
        (Script(loses_connection=True), ["a"], "CAPACITY"),
        (Script(breaks_protocol=True), ["a", "\r"], "INTERNAL_ERROR"),
    ],
)
async def test_what_is_held_back_is_told_only_when_nothing_can_follow(
    failing: Script, chunks: list[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error that may pass a client comes back with a position that has it."""
    monkeypatch.setattr(watch, "_NEWS_S", 0.01)
    end = trio.Event()
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["cmd"] = attrs.evolve(failing, outputs=[(Stream.STDOUT, b"a\r")], hold=end)
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "cmd"}) as answer:
            end.set()
            events = await events_of(answer)
        assert [event.data["chunk"] for event in events[:-1]] == chunks
        assert (events[0].position, events[-1].name, events[-1].data["error_code"]) == (
            "1~0d~",
            "error",
            code,
        )


async def test_a_client_that_does_not_read_is_cut_off_and_can_come_back() -> None:
    """The command waits for a connected client that does not read, and goes on as soon as that client is cut off."""
    async with running_front(write_timeout_s=0.3) as running:
        async with running.client() as client:
            url = await make_session(running, client)
        running.tree.scripts["cmd"] = Script([(Stream.STDOUT, b"x" * 60_000)], repeat=300)
        async with await running.connect(receive_buffer=4096) as connection:
            body = b'{"cmd": "cmd", "exec_id": "e-1"}'
            await connection.send_all(request_bytes("POST", f"{url}/exec/stream", body=body))
            await running.tree.run_opened.wait()
            (run,) = running.tree.runs
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert 0 < run.pieces_taken < 200
            with trio.fail_after(patience()):
                await run.ended.wait()
        async with running.client() as client:
            await trio.testing.wait_all_tasks_blocked(0.01)
            seen = (await client.get(f"{url}/execs/e-1")).json()
            assert (seen["state"], seen["end"]["cause"], seen["stdout_bytes"]) == ("ended", "exited", 18_000_000)
            async with client.stream("GET", f"{url}/execs/e-1/stream?after=299") as answer:
                events = await events_of(answer)
            assert (len(text_of(events)), events[-1].name) == (60_000, "done")
