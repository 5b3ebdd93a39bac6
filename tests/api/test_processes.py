"""Background processes: start, look, logs, input, waiting, the end; and ports."""

from __future__ import annotations

import functools

import httpx
import pytest
import trio

from runner.wire import protocol
from sandkasten.model import Stream
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.fakes.runner import Script, ScriptedRun
from tests.waiting import until

MERGED = {"streams": "merged"}


async def start(running: RunningTree, client: httpx.AsyncClient, script: Script) -> tuple[str, str, ScriptedRun]:
    """Start one scripted process; return the session's URL, the process's, and its run."""
    url = await make_session(running, client)
    running.tree.scripts["serve"] = script
    answer = await client.post(f"{url}/processes", json={"cmd": "serve", "process_id": "p-1"})
    assert answer.status_code == 201
    return url, f"{url}/processes/p-1", running.tree.runs[-1]


async def is_followed(running: RunningTree, url: str) -> bool:
    """Whether a request waits for something in the session."""
    return await running.activities(url.rpartition("/")[2]) > 0


async def is_left_alone(running: RunningTree, url: str) -> bool:
    return not await is_followed(running, url)


async def test_a_process_is_started_with_all_that_was_said() -> None:
    """The answer shows the process as it is, running."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["srv -p 80"] = Script(hold=trio.Event())
        body = {
            "argv": ["srv", "-p", "80"],
            "process_id": "p-1",
            "cwd": "/tmp",
            "env": {"A": "1"},
            "user": "app",
            "tty": {"cols": 100, "rows": 30},
            "keep_alive": True,
        }
        answer = await client.post(f"{url}/processes", json=body)
        seen = answer.json()
        wanted = {
            "process_id": "p-1",
            "exec_id": "p-1",
            "kind": "process",
            "state": "running",
            "command": "srv -p 80",
            "pid": 42,
            "keep_alive": True,
            "tty": {"cols": 100, "rows": 30},
        }
        assert answer.status_code == 201
        assert seen | wanted == seen
        request = running.tree.runs[0].request
        assert isinstance(request, protocol.RunProgram)
        assert (request.argv, request.cwd, request.user) == (("srv", "-p", "80"), "/tmp", "app")
        assert (request.env["A"], request.terminal) == ("1", protocol.TerminalSize(100, 30))
        assert (await client.get(f"{url}/processes/p-1")).json() == seen


async def test_a_process_has_the_pipes_that_were_asked_for() -> None:
    """One for each stream, unless the request or its session says otherwise."""
    async with running_front() as running, running.client() as client:
        for of_session, asked, is_merged in (({}, {}, False), ({}, MERGED, True), (MERGED, {}, True)):
            session_id = (await client.post("/v1/sessions", json=of_session)).json()["id"]
            answer = await client.post(f"/v1/sessions/{session_id}/processes", json={"cmd": "serve"} | asked)
            assert (answer.status_code, running.tree.runs[-1].request.merged) == (201, is_merged)


async def test_a_repeated_start_attaches() -> None:
    """With the same body; with another one it is 409."""
    async with running_front() as running, running.client() as client:
        url, _, _ = await start(running, client, Script(hold=trio.Event()))
        body = {"cmd": "serve", "process_id": "p-1"}
        assert (await client.post(f"{url}/processes", json=body)).json()["process_id"] == "p-1"
        answer = await client.post(f"{url}/processes", json=body | {"keep_alive": True})
        assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT")
        assert len(running.tree.runs) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "cmd"),
        ({"cmd": "a", "argv": ["a"]}, "cmd"),
        ({"argv": []}, "argv"),
        ({"argv": "a"}, "argv"),
        ({"cmd": 5}, "cmd"),
        ({"cmd": "a", "process_id": "a b"}, "process_id"),
        ({"cmd": "a", "process_id": ""}, "process_id"),
        ({"cmd": "a", "user": "a b"}, "user"),
        ({"cmd": "a", "cwd": ""}, "cwd"),
        ({"cmd": "a", "env": "A=1"}, "env"),
        ({"cmd": "a", "tty": {"cols": 80}}, "tty.rows"),
        ({"cmd": "a", "keep_alive": "yes"}, "keep_alive"),
    ],
)
async def test_a_bad_process_is_refused_by_name(body: dict[str, object], field: str) -> None:
    """No process is started."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/processes", json=body)
        assert (answer.status_code, list(answer.json()["details"])) == (400, [field])
        assert running.tree.runs == []


async def test_only_processes_are_in_the_list_and_beneath_it() -> None:
    """A command has the same kind of id and is none."""
    async with running_front() as running, running.client() as client:
        url, _, run = await start(running, client, Script(hold=trio.Event()))
        await client.post(f"{url}/exec", json={"cmd": "a", "exec_id": "e-1"})

        async def listed(query: str) -> list[str]:
            return [each["process_id"] for each in (await client.get(f"{url}/processes{query}")).json()["processes"]]

        assert await listed("") == await listed("?state=running") == ["p-1"]
        assert await listed("?state=ended") == []
        for method, rest, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("GET", "/logs", None),
            ("GET", "/logs?follow=true", None),
            ("POST", "/stdin", {"text": "x"}),
            ("POST", "/signal", {"signal": "INT"}),
            ("POST", "/resize", {"cols": 1, "rows": 1}),
            ("POST", "/kill", {}),
            ("POST", "/wait", {"for": "exit"}),
        ):
            answer = await client.request(method, f"{url}/processes/e-1{rest}", json=body)
            assert (answer.status_code, answer.json()["error_code"]) == (404, "EXEC_NOT_FOUND"), rest
        assert run.reply is None


async def test_logs_are_read_by_offset() -> None:
    """As the output of any run."""
    async with running_front() as running, running.client() as client:
        script = Script([(Stream.STDOUT, b"out\n"), (Stream.STDERR, b"err\n")], hold=trio.Event())
        _, process, _ = await start(running, client, script)
        part = (await client.get(f"{process}/logs?stream=stderr&offset=1&limit=100")).json()
        assert (part["text"], part["next_offset"], part["is_final"]) == ("rr\n", 4, False)


async def test_logs_are_followed_as_events() -> None:
    """From the beginning or a position on, one stream alone if one likes; leaving ends nothing."""
    async with running_front() as running, running.client() as client:
        script = Script([(Stream.STDOUT, b"out\n"), (Stream.STDERR, b"err\n")], hold=trio.Event())
        url, process, run = await start(running, client, script)
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("GET", f"{process}/logs?follow=true"))
            head = await read_until(connection, b'"stream":"stderr"}\n\n')
            assert b"content-type: text/event-stream" in head
            assert b'{"chunk":"out\\n",' in head
        await until(functools.partial(is_left_alone, running, url))
        assert run.reply is None
        run.write(Stream.STDOUT, b"more\n")
        run.finish()
        after = await client.get(f"{process}/logs?follow=true&after=1&stream=stdout&encoding=base64")
        assert b'"chunk":"bW9yZQo="' in after.content
        assert after.content.count(b"event: chunk") == 1
        assert b"event: done" in after.content
        refused = await client.get(f"{process}/logs?follow=true&offset=3")
        assert (refused.status_code, list(refused.json()["details"])) == (400, ["offset"])


async def test_input_signals_and_sizes_reach_a_process() -> None:
    """The input of a process is open from the start."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["top"] = Script(echo=True, ignores=frozenset({2}))
        body = {"cmd": "top", "process_id": "p-1", "tty": {"cols": 80, "rows": 24}}
        await client.post(f"{url}/processes", json=body)
        (run,) = running.tree.runs
        process = f"{url}/processes/p-1"
        for action, request in (
            ("stdin", {"text": "q"}),
            ("signal", {"signal": "INT"}),
            ("resize", {"cols": 90, "rows": 25}),
        ):
            answer = await client.post(f"{process}/{action}", json=request)
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
        assert (bytes(run.stdin), run.signals, run.sizes[-1]) == (b"q", [2], protocol.TerminalSize(90, 25))


@pytest.mark.parametrize("how", ["kill", "delete"])
async def test_a_process_is_killed_at_once(how: str) -> None:
    """By either route; the answer shows its end, and another time the same."""
    async with running_front() as running, running.client() as client:
        _, process, run = await start(running, client, Script(hold=trio.Event()))
        for _ in range(2):
            answer = await (client.post(f"{process}/kill") if how == "kill" else client.delete(process))
            assert (answer.status_code, answer.json()["end"]["cause"]) == (200, "cancelled")
        assert run.was_killed_now


async def test_waiting_for_the_end() -> None:
    """A wait is answered when the end comes or when its time is over."""
    async with running_front() as running, running.client() as client:
        end = trio.Event()
        _, process, _ = await start(running, client, Script(hold=end, exit_code=4))
        answer = await client.post(f"{process}/wait", json={"for": "exit", "timeout_ms": 1})
        assert (answer.status_code, answer.json()["happened"], answer.json()["process"]["state"]) == (
            200,
            False,
            "running",
        )
        end.set()
        answer = await client.post(f"{process}/wait", json={"for": "exit"})
        assert (answer.json()["happened"], answer.json()["process"]["end"]["exit_code"]) == (True, 4)


async def test_waiting_for_a_port_and_the_list_of_ports() -> None:
    """One that opens while somebody waits."""
    async with running_front() as running, running.client() as client:
        url, process, run = await start(running, client, Script(hold=trio.Event()))
        assert (await client.get(f"{url}/ports")).json() == {"ports": []}
        answers: list[httpx.Response] = []

        async def wait() -> None:
            answers.append(await client.post(f"{process}/wait", json={"port": 8080}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until(functools.partial(is_followed, running, url))
            running.tree.runner.set_ports(8080)
        assert answers[0].json()["happened"] is True
        assert (await client.get(f"{url}/ports")).json() == {"ports": [{"port": 8080, "address": "0.0.0.0"}]}
        running.tree.runner.set_ports()
        run.finish()
        assert (await client.post(f"{process}/wait", json={"port": 8080})).json()["happened"] is False


async def test_waiting_for_a_line() -> None:
    """The awaited line is told, whatever bytes it has."""
    async with running_front() as running, running.client() as client:
        script = Script([(Stream.STDOUT, b"booting\nready \xff on 80\n")], hold=trio.Event())
        _, process, _ = await start(running, client, script)
        answer = (await client.post(f"{process}/wait", json={"pattern": r"ready .* on \d+"})).json()
        assert (answer["happened"], answer["line"]) == (True, "ready \ufffd on 80")
        answer = (await client.post(f"{process}/wait", json={"pattern": "never", "timeout_ms": 1})).json()
        assert answer["happened"] is False
        assert "line" not in answer


async def test_a_client_that_leaves_is_not_waited_for() -> None:
    """The process goes on."""
    async with running_front() as running, running.client() as client:
        url, process, run = await start(running, client, Script(hold=trio.Event()))
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("POST", f"{process}/wait", body=b'{"for": "exit"}'))
            await until(functools.partial(is_followed, running, url))
        await until(functools.partial(is_left_alone, running, url))
        assert run.reply is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "for"),
        ({"for": "exit", "port": 80}, "for"),
        ({"port": 80, "pattern": "x"}, "for"),
        ({"for": "port"}, "for"),
        ({"for": True}, "for"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "80"}, "port"),
        ({"pattern": ""}, "pattern"),
        ({"pattern": "("}, "pattern"),
        ({"pattern": "x" * 1001}, "pattern"),
        ({"pattern": ["x"]}, "pattern"),
        ({"for": "exit", "timeout_ms": -1}, "timeout_ms"),
        ({"for": "exit", "timeout_ms": "5"}, "timeout_ms"),
    ],
)
async def test_a_bad_condition_is_refused_by_name(body: dict[str, object], field: str) -> None:
    """Nothing is waited for."""
    async with running_front() as running, running.client() as client:
        _, process, _ = await start(running, client, Script(hold=trio.Event()))
        answer = await client.post(f"{process}/wait", json=body)
        assert (answer.status_code, list(answer.json()["details"])) == (400, [field])
