"""Blocking commands over HTTP: the result's shape, texts, timeouts, and clients that leave."""

from __future__ import annotations

import base64
import functools
import json
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.testing

from runner.wire import protocol
from sandkasten.config import ServerSettings
from sandkasten.model import Stream
from tests.api.harness import Running, RunningTree, read_to_end, request_bytes, running_front
from tests.fakes.runner import Script
from tests.waiting import patience, until


async def make_session(running: Running, client: httpx.AsyncClient) -> str:
    """Return a new session's URL."""
    return f"/v1/sessions/{(await client.post('/v1/sessions')).json()['id']}"


async def run(running: RunningTree, client: httpx.AsyncClient, script: Script, **body: Any) -> httpx.Response:  # JSON
    """Run one scripted command."""
    running.tree.scripts["cmd"] = script
    return await client.post(f"{await make_session(running, client)}/exec", json={"cmd": "cmd"} | body)


async def test_a_result_has_the_published_and_the_new_fields() -> None:
    """A failing command is an answer, not an error."""
    cap = 4096
    script = Script([(Stream.STDOUT, b"42\r\n"), (Stream.STDERR, b"x" * cap + b"oops\n")], exit_code=3)
    async with (
        running_front(server=ServerSettings(pool_sandboxes=0, output_cap_bytes=cap)) as running,
        running.client() as client,
    ):
        answer = await run(
            running, client, script, exec_id="e-1", timeout_ms=500, output_fields=["output", "stdout", "stderr"]
        )
        result = answer.json()
        assert result.pop("queued_ms") >= 0
        assert (answer.status_code, result) == (
            200,
            {
                "exit_code": 3,
                "cwd": "/workspace",
                "output": "42\n" + "x" * (cap // 2 - 4) + "\n… 9 bytes left out …\n" + "x" * (cap // 2 - 5) + "oops\n",
                "stdout": "42\n",
                "stderr": "x" * (cap // 2) + "\n… 5 bytes left out …\n" + "x" * (cap // 2 - 5) + "oops\n",
                "truncated": True,
                "bytes_total": cap + 9,
                "bytes_omitted": 9,
                "duration_ms": 7,
                "exec_id": "e-1",
                "cause": "exited",
                "timed_out": False,
                "timeout_ms": 500,
                "shell_restarted": False,
                "usage": {"cpu_ms": 0, "peak_memory_bytes": 1024, "written_bytes": -1},
            },
        )


async def test_output_comes_once_unless_asked_otherwise() -> None:
    """The published field alone, or those that were asked for, in whatever number; also in the error of a timeout."""
    script = Script([(Stream.STDOUT, b"o\n"), (Stream.STDERR, b"e\n")])
    async with running_front() as running, running.client() as client:
        fields = {"output": "o\ne\n", "stdout": "o\n", "stderr": "e\n"}
        for asked in (["output"], ["stderr", "stdout"], []):
            answer = (await run(running, client, script, output_fields=asked)).json()
            assert {name: answer.get(name) for name in fields} == {
                name: text if name in asked else None for name, text in fields.items()
            }
        assert (await run(running, client, script)).json().keys() & fields.keys() == {"output"}
        late = attrs.evolve(script, exit_code=124, cause="timed_out")
        assert (await run(running, client, late)).json()["details"].keys() & fields.keys() == {"output"}
        for wrong in ("output", ["outputs"], ["stdout", "stdout"], [1]):
            answer = await run(running, client, script, output_fields=wrong)
            assert (answer.status_code, list(answer.json()["details"])) == (400, ["output_fields"])


async def test_who_reads_one_output_gets_it_in_order() -> None:
    """One pipe is for clients that read `output` alone, unless the request or its session says otherwise."""
    async with running_front() as running, running.client() as client:
        for options, body, is_merged in (
            ({}, {}, True),
            ({}, {"output_fields": ["output", "stderr"]}, False),
            ({}, {"streams": "separate"}, False),
            ({"streams": "separate"}, {}, False),
            ({"streams": "separate"}, {"streams": "merged"}, True),
            ({"streams": "merged"}, {"output_fields": ["stdout"], "argv": ["true"], "cmd": None}, True),
        ):
            session = (await client.post("/v1/sessions", json=options)).json()
            assert session["streams"] == options.get("streams")
            await client.post(f"/v1/sessions/{session['id']}/exec", json={"cmd": "cmd"} | body)
            assert running.tree.runs[-1].request.merged is is_merged


async def has_runs(running: RunningTree, count: int) -> bool:
    """Whether the session was asked for so many runs."""
    return len(running.tree.runs) == count


@pytest.mark.parametrize("route", ["exec", "exec/stream"])
async def test_a_wait_and_one_pipe_are_asked_of_the_session(route: str) -> None:
    """By a command behind another one of its shell."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["long"] = Script(hold=trio.Event())
        body = {"cmd": "next", "queue_timeout_ms": 4321, "streams": "merged", "output_fields": ["stdout"]}
        async with await running.connect() as first, await running.connect() as second:
            await first.send_all(request_bytes("POST", f"{url}/exec/stream", body=b'{"cmd": "long"}'))
            await until(functools.partial(has_runs, running, 1))
            await second.send_all(request_bytes("POST", f"{url}/{route}", body=json.dumps(body).encode()))
            await until(functools.partial(has_runs, running, 2))
        requests = [run.request for run in running.tree.runs]
        assert [(each.queue_timeout_ms, each.merged) for each in requests if isinstance(each, protocol.Exec)] == [
            (None, False),
            (4321, True),
        ]


async def test_text_says_where_lines_are_left_out() -> None:
    """Whole lines stand at either side, and the size is that of all that is missing; exact bytes have no such line."""
    lines = b"".join(b"line %06d\n" % number for number in range(200_000))
    script = Script([(Stream.STDOUT, lines)])
    async with (
        running_front(server=ServerSettings(pool_sandboxes=0, output_cap_bytes=8195)) as running,
        running.client() as client,
    ):
        answer = (await run(running, client, script)).json()
        begin, end = answer["output"].split("… 2.4 MB left out …\n")
        assert lines.decode().startswith(begin)
        assert lines.decode().endswith(end)
        assert (begin[-12:], end[:5]) == ("line 000340\n", "line ")
        exact = (await run(running, client, script, encoding="base64")).json()
        assert len(base64.b64decode(exact["output"])) == 8195 == exact["bytes_total"] - exact["bytes_omitted"]


async def test_a_signal_is_told() -> None:
    """The field is there only if there was one."""
    async with running_front() as running, running.client() as client:
        answer = await run(running, client, Script(exit_code=137, cause="signalled", signal=9))
        assert answer.json() | {"exit_code": 137, "cause": "signalled", "signal": 9} == answer.json()


async def test_output_is_text_unless_asked_otherwise() -> None:
    """Clean text, raw text, or exact bytes."""
    data = b"\x1b[31mred\x1b[0m\r\n\xff"
    script = Script([(Stream.STDOUT, data)])
    async with running_front() as running, running.client() as client:
        assert (await run(running, client, script)).json()["output"] == "red\n\ufffd"
        raw = await run(running, client, script, raw_output=True)
        assert raw.json()["output"] == "\x1b[31mred\x1b[0m\r\n\ufffd"
        every = ["output", "stdout", "stderr"]
        exact = (await run(running, client, script, encoding="base64", output_fields=every)).json()
        assert base64.b64decode(exact["output"]) == base64.b64decode(exact["stdout"]) == data
        assert (exact["stderr"], exact["encoding"]) == ("", "base64")


async def test_large_output_is_cleaned_like_small_output() -> None:
    """Sequences across the internal slices vanish all the same."""
    data = b"ab\x1b[31mc\r\n" * 50_000
    async with running_front() as running, running.client() as client:
        answer = await run(running, client, Script([(Stream.STDOUT, data)]))
        assert answer.json()["output"] == "abc\n" * 50_000


async def test_a_directory_that_is_not_unicode_is_answered() -> None:
    """A surrogate-escaped cwd must not break the answer."""
    async with running_front() as running, running.client() as client:
        answer = await run(running, client, Script(cwd="/workspace/\udcff"))
        assert answer.json()["cwd"] == "/workspace/\ufffd"


async def test_a_timeout_is_504_with_the_partial_result() -> None:
    """The output so far, and where the shell is."""
    script = Script([(Stream.STDOUT, b"so far\n")], exit_code=137, cause="timed_out")
    async with running_front() as running, running.client() as client:
        answer = await run(running, client, script, timeout_ms=50, exec_id="e-2")
        error = answer.json()
        assert (answer.status_code, error["error_code"], error["retryable"]) == (504, "COMMAND_TIMEOUT", False)
        wanted = {"output": "so far\n", "exec_id": "e-2", "duration_ms": 7, "cwd": "/workspace", "timeout_ms": 50}
        assert error["details"] | wanted == error["details"]


async def test_a_timeout_can_be_a_result() -> None:
    """`on_timeout: result` is what timeout(1) would exit with."""
    script = Script([(Stream.STDOUT, b"so far\n")], exit_code=137, cause="timed_out")
    async with running_front() as running, running.client() as client:
        answer = await run(running, client, script, on_timeout="result")
        wanted = {"timed_out": True, "exit_code": 124, "cause": "timed_out", "output": "so far\n"}
        assert answer.status_code == 200
        assert answer.json() | wanted == answer.json()


async def test_a_command_over_a_mebibyte_is_413_and_one_of_it_runs() -> None:
    """With both sizes and advice."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        assert (await client.post(f"{url}/exec", json={"cmd": "é" * 2**19})).status_code == 200
        assert running.tree.runs[0].request.command == "é" * 2**19
        answer = await client.post(f"{url}/exec", json={"cmd": "a" * (2**20 + 1)})
        assert (answer.status_code, answer.json()["error_code"]) == (413, "TOO_LARGE")
        assert set(answer.json()["details"]) == {"cmd_bytes", "max_cmd_bytes", "recommendation"}


async def test_a_busy_shell_is_409_with_what_keeps_it_busy() -> None:
    """The details name the run at the head of the queue, its age and last line, and the length of the queue."""
    async with (
        running_front(server=ServerSettings(pool_sandboxes=0, shell_queue_length=1)) as running,
        running.client() as client,
    ):
        url = await make_session(running, client)
        running.tree.scripts["long"] = Script([(Stream.STDOUT, b"so far\nbuilding\n")], hold=trio.Event())
        async with client.stream("POST", f"{url}/exec/stream", json={"cmd": "long", "exec_id": "e-1"}):
            await trio.testing.wait_all_tasks_blocked(0.01)
        answer = await client.post(f"{url}/exec", json={"cmd": "a"})
        assert (answer.status_code, answer.json()["error_code"], answer.json()["retryable"]) == (
            409,
            "SHELL_BUSY",
            True,
        )
        details = answer.json()["details"]
        assert 0 <= details.pop("age_ms") < 1000 * patience()
        assert details == {"exec_id": "e-1", "last_line": "building", "queue_length": 1}


async def test_a_client_that_leaves_cancels_its_command() -> None:
    """By closing, and the next request is served."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        running.tree.scripts["wait"] = Script(hold=trio.Event())
        stream = await running.connect()
        await stream.send_all(request_bytes("POST", f"{url}/exec", body=b'{"cmd": "wait"}'))
        await running.tree.run_opened.wait()
        await stream.aclose()
        with trio.fail_after(patience()):
            await running.tree.runs[0].cancelled.wait()
        assert (await client.post(f"{url}/exec", json={"cmd": "a"})).status_code == 200


async def test_a_long_command_is_not_cut_by_any_http_timeout() -> None:
    """An idle connection beside it is closed by the keep-alive timeout; the command goes on and is answered."""
    release = trio.Event()
    async with running_front(keep_alive_timeout_s=0.15, read_timeout_s=0.1, write_timeout_s=0.1) as running:
        async with running.client() as client:
            url = await make_session(running, client)
        running.tree.scripts["wait"] = Script(hold=release)
        async with await running.connect() as stream:
            await stream.send_all(
                request_bytes("POST", f"{url}/exec", headers={"Connection": "close"}, body=b'{"cmd": "wait"}')
            )
            await running.tree.run_opened.wait()
            for _ in range(2):
                async with await running.connect() as idle:
                    await read_to_end(idle)
            release.set()
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 200")


async def test_a_stop_cancels_running_commands() -> None:
    """Within the graceful timeout, although nobody left."""
    async with running_front(graceful_timeout_s=0.1) as running:
        async with running.client() as client:
            url = await make_session(running, client)
        running.tree.scripts["wait"] = Script(hold=trio.Event())
        async with await running.connect() as stream:
            await stream.send_all(request_bytes("POST", f"{url}/exec", body=b'{"cmd": "wait"}'))
            await running.tree.run_opened.wait()
            assert await running.stop() < 1
            assert running.tree.runs[0].cancelled.is_set()
