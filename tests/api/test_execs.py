"""Runs as a resource: lists, views, and what reaches into a run."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from nsinit.wire.protocol import OomKills
from runner.wire import protocol
from sandkasten.config import Defaults, RunsSettings
from sandkasten.model import Stream
from tests.api.harness import RunningTree, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.api.test_sessions import RFC_3339
from tests.fakes.runner import Script, ScriptedRun

USAGE = {"cpu_ms": 5, "peak_memory_bytes": 4096, "written_bytes": 7}


async def start(
    running: RunningTree, client: httpx.AsyncClient, script: Script, **body: Any
) -> tuple[str, ScriptedRun]:  # JSON
    """Start one scripted run that is detached; return the session's URL and the run."""
    running.tree.scripts["cmd"] = script
    url = await make_session(running, client)
    request = {"cmd": "cmd", "exec_id": "e-1"} | body
    async with client.stream("POST", f"{url}/exec/stream", json=request) as answer:
        assert answer.status_code == 200
    await trio.testing.wait_all_tasks_blocked(0.01)
    return url, running.tree.runs[-1]


async def test_a_run_is_shown_as_it_is() -> None:
    """A run is shown while it goes on, and with its end afterwards."""
    end = trio.Event()
    script = Script(
        [(Stream.STDOUT, b"one\n"), (Stream.STDERR, b"bad \xff\n")],
        hold=end,
        exit_code=137,
        cause="signalled",
        signal=9,
        written_bytes=7,
    )
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, script)
        seen = (await client.get(f"{url}/execs/e-1")).json()
        times = {name: seen.pop(name) for name in ("created_at", "started_at")}
        assert all(RFC_3339.match(time) for time in times.values())
        assert re.fullmatch("[0-9a-f]{32}", seen.pop("trace_id"))
        assert seen == {
            "exec_id": "e-1",
            "kind": "command",
            "state": "running",
            "command": "cmd",
            "shell": "default",
            "stdout_bytes": 4,
            "stderr_bytes": 6,
            "first_sequence": 1,
            "last_sequence": 2,
            "last_line": "bad \ufffd",
        }
        running.tree.nsinit.oom_kills = OomKills(0, "hog\udcff")
        counters = {"cpu.stat": "usage_usec 5099", "memory.peak": "4096", "memory.events": "oom_kill 1"}
        running.tree.nsinit.count(url.rpartition("/")[2], counters)
        end.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        seen = (await client.get(f"{url}/execs/e-1")).json()
        assert seen["state"] == "ended"
        assert RFC_3339.match(seen["ended_at"])
        assert seen["end"].pop("queued_ms") >= 0
        assert seen["end"] == {
            "exit_code": 137,
            "signal": 9,
            "cwd": "/workspace",
            "duration_ms": 7,
            "exec_id": "e-1",
            "cause": "oom",
            "victim": "hog\ufffd",
            "timed_out": False,
            "timeout_ms": 120_000,
            "shell_restarted": False,
            "usage": USAGE,
        }


async def test_runs_are_listed_oldest_first_and_can_be_picked() -> None:
    """By kind, by state, and the latest ones."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(hold=trio.Event()))
        await client.post(f"{url}/exec", json={"argv": ["true"], "exec_id": "e-2"})
        await client.post(f"{url}/processes", json={"cmd": "cmd", "process_id": "p-1"})

        async def listed(query: str) -> list[str]:
            answer = await client.get(f"{url}/execs{query}")
            return [run["exec_id"] for run in answer.json()["execs"]]

        assert await listed("") == ["e-1", "e-2", "p-1"]
        assert await listed("?kind=command") == ["e-1", "e-2"]
        assert await listed("?kind=process&state=running") == ["p-1"]
        assert await listed("?state=ended") == ["e-2"]
        assert await listed("?state=queued") == []
        assert await listed("?limit=2") == ["e-2", "p-1"]


@pytest.mark.parametrize(
    ("rest", "field"),
    [
        ("execs?kind=shell", "kind"),
        ("execs?kind=", "kind"),
        ("execs?state=dead", "state"),
        ("execs?limit=0", "limit"),
        ("execs?limit=10001", "limit"),
        ("execs/e-1/output?offset=-1", "offset"),
        ("execs/e-1/output?offset=x", "offset"),
        ("execs/e-1/output?offset=99999999999999999999", "offset"),
        ("execs/e-1/output?limit=0", "limit"),
        ("execs/e-1/output?limit=4194305", "limit"),
        ("execs/e-1/output?limit=1.5", "limit"),
        ("execs/e-1/output?stream=stdin", "stream"),
        ("execs/e-1/output?encoding=latin-1", "encoding"),
        ("execs/e-1/stream?encoding=utf-16", "encoding"),
        ("execs/e-1/stream?raw_output=1", "raw_output"),
        ("execs/e-1/stream?stream=both", "stream"),
        ("execs/e-1/stream?on_timeout=x", "on_timeout"),
        ("processes?state=x", "state"),
        ("processes/e-1/logs?follow=yes", "follow"),
    ],
)
async def test_a_bad_query_is_refused_by_name(rest: str, field: str) -> None:
    """Never ignored."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/processes", json={"cmd": "a", "process_id": "e-1"})
        answer = await client.get(f"{url}/{rest}")
        assert (answer.status_code, list(answer.json()["details"])) == (400, [field])


@pytest.mark.parametrize(
    ("signal", "number"),
    [("INT", 2), ("SIGINT", 2), (2, 2), ("KILL", 9), ("SIGUSR1", 10), ("STOP", 19), (64, 64), ("SIGRTMIN", 34)],
)
async def test_a_signal_has_a_name_or_a_number(signal: object, number: int) -> None:
    """A signal given by name or by number reaches the run."""
    script = Script(hold=trio.Event(), ignores=frozenset(range(1, 65)))
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, script)
        answer = await client.post(f"{url}/execs/e-1/signal", json={"signal": signal})
        assert (answer.status_code, answer.json(), run.signals) == (200, {"ok": True}, [number])


async def test_cancel_answers_with_the_end() -> None:
    """At once if it said so; on an ended run it changes nothing, and a body is not needed."""
    async with running_front() as running, running.client() as client:
        for body in (None, {"now": True}, {"now": False}):
            url, run = await start(running, client, Script(hold=trio.Event()))
            answer = await client.post(f"{url}/execs/e-1/cancel", json=body)
            assert (answer.status_code, answer.json()["state"], answer.json()["end"]["cause"]) == (
                200,
                "ended",
                "cancelled",
            )
            assert run.was_killed_now is bool(body and body["now"])
            assert (await client.post(f"{url}/execs/e-1/cancel", content=b"")).json() == answer.json()


async def test_input_reaches_a_run_byte_by_byte() -> None:
    """Text, base64, and the end."""
    data = bytes(range(256))
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, Script(echo=True), stdin=True)
        for body in (
            {"text": "é\0"},
            {"content_base64": base64.b64encode(data).decode()},
            {"text": ""},
            {"close": True},
        ):
            answer = await client.post(f"{url}/execs/e-1/stdin", json=body)
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert bytes(run.stdin) == "é\0".encode() + data
        assert (await client.get(f"{url}/execs/e-1")).json()["state"] == "ended"


async def test_input_waits_for_a_run_that_does_not_read() -> None:
    """A client that leaves meanwhile is not waited for. The next client's input follows the part that was taken."""
    lost = b"l" * 2**20
    reads = trio.Event()
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, Script(echo=True, reads=reads), stdin=True)
        path = f"{url}/execs/e-1/stdin"
        async with await running.connect() as connection:
            await connection.send_all(request_bytes("POST", path, body=b'{"text": "%b"}' % lost))
            await trio.testing.wait_all_tasks_blocked(0.01)
        await trio.testing.wait_all_tasks_blocked(0.01)
        reads.set()
        assert (await client.post(path, json={"text": "kept", "close": True})).status_code == 200
        await run.ended.wait()
        assert bytes(run.stdin).strip(b"l") == b"kept"
        assert len(run.stdin) < len(lost)


async def test_a_terminal_is_resized() -> None:
    """The run shows the new size of its terminal."""
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, Script(hold=trio.Event()), tty={"cols": 80, "rows": 24})
        assert run.sizes == [protocol.TerminalSize(80, 24)]
        answer = await client.post(f"{url}/execs/e-1/resize", json={"cols": 120, "rows": 40})
        assert (answer.status_code, answer.json()) == (200, {"ok": True})
        assert (await client.get(f"{url}/execs/e-1")).json()["tty"] == {"cols": 120, "rows": 40}


@pytest.mark.parametrize(
    ("action", "body", "field"),
    [
        ("signal", {}, "signal"),
        ("signal", {"signal": "BOGUS"}, "signal"),
        ("signal", {"signal": "int"}, "signal"),
        ("signal", {"signal": "SIG_DFL"}, "signal"),
        ("signal", {"signal": ""}, "signal"),
        ("signal", {"signal": 0}, "signal"),
        ("signal", {"signal": 65}, "signal"),
        ("signal", {"signal": -9}, "signal"),
        ("signal", {"signal": True}, "signal"),
        ("signal", {"signal": 2.0}, "signal"),
        ("signal", {"signal": ["INT"]}, "signal"),
        ("signal", {"signal": None}, "signal"),
        ("cancel", {"now": "yes"}, "now"),
        ("cancel", {"now": 1}, "now"),
        ("stdin", {}, "text"),
        ("stdin", {"close": False}, "text"),
        ("stdin", {"text": 5}, "text"),
        ("stdin", {"content_base64": "!"}, "content_base64"),
        ("stdin", {"text": "", "content_base64": ""}, "text"),
        ("stdin", {"text": "", "close": "now"}, "close"),
        ("resize", {"cols": 80}, "rows"),
        ("resize", {"cols": 0, "rows": 24}, "cols"),
        ("resize", {"cols": 80, "rows": 1001}, "rows"),
        ("resize", {"cols": "80", "rows": 24}, "cols"),
    ],
)
async def test_a_bad_request_to_a_run_is_refused_by_name(action: str, body: dict[str, object], field: str) -> None:
    """The run knows nothing of such a request."""
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, Script(echo=True), stdin=True)
        answer = await client.post(f"{url}/execs/e-1/{action}", json=body)
        assert (answer.status_code, list(answer.json()["details"])) == (400, [field])
        assert (run.signals, bytes(run.stdin), run.is_stdin_open, run.reply) == ([], b"", True, None)


@pytest.mark.parametrize(
    ("action", "body", "status", "code"),
    [
        ("signal", {"signal": "INT"}, 409, "EXEC_ENDED"),
        ("stdin", {"text": "x"}, 409, "EXEC_ENDED"),
        ("stdin", {"close": True}, 409, "EXEC_ENDED"),
        ("resize", {"cols": 80, "rows": 24}, 409, "EXEC_ENDED"),
        ("cancel", {}, 200, None),
    ],
)
async def test_an_ended_run_takes_nothing_any_more(
    action: str, body: dict[str, object], status: int, code: str | None
) -> None:
    """An ended run takes no input, signal or size, but a cancel as often as one likes."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(), stdin=True)
        answer = await client.post(f"{url}/execs/e-1/{action}", json=body)
        assert (answer.status_code, answer.json().get("error_code")) == (status, code)


async def test_a_run_without_input_or_terminal_says_so() -> None:
    """As a bad request."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(hold=trio.Event()))
        for action, body in (("stdin", {"text": "x"}), ("resize", {"cols": 80, "rows": 24})):
            answer = await client.post(f"{url}/execs/e-1/{action}", json=body)
            assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("method", "rest", "body"),
    [
        ("GET", "", None),
        ("GET", "/output", None),
        ("GET", "/stream", None),
        ("POST", "/signal", {"signal": 2}),
        ("POST", "/cancel", {}),
        ("POST", "/stdin", {"close": True}),
        ("POST", "/resize", {"cols": 1, "rows": 1}),
    ],
)
async def test_a_run_that_never_was_is_404(method: str, rest: str, body: dict[str, object] | None) -> None:
    """Also one of another session; and all of them are 410 with the session."""
    async with running_front() as running, running.client() as client:
        await start(running, client, Script())
        url = await make_session(running, client)
        answer = await client.request(method, f"{url}/execs/e-1{rest}", json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "EXEC_NOT_FOUND")
        await client.delete(url)
        answer = await client.request(method, f"{url}/execs/e-1{rest}", json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (410, "SESSION_EXPIRED")


async def test_a_time_limit_above_the_maximum_is_cut_and_told() -> None:
    """In the answer, in the last event of a stream, and to PID 1."""
    at_most = {"max_exec_timeout_ms": 7000, "defaults": Defaults(max_exec_timeout_ms=7000)}
    async with running_front(**at_most) as running, running.client() as client:
        url = await make_session(running, client)
        for asked_ms, given_ms in ((10**9, 7000), (7001, 7000), (6999, 6999), (0, 7000)):
            answer = await client.post(f"{url}/exec", json={"cmd": "a", "timeout_ms": asked_ms})
            assert (answer.status_code, answer.json()["timeout_ms"]) == (200, given_ms)
            assert running.tree.runs[-1].request.timeout_ms == given_ms
            streamed = await client.post(f"{url}/exec/stream", json={"cmd": "a", "timeout_ms": asked_ms})
            assert f'"timeout_ms":{given_ms},' in streamed.text


async def test_an_exec_without_a_limit_in_time_is_had_where_the_operator_allows() -> None:
    """Then its answer says null; elsewhere the field is refused by name."""
    allowed = {"allow_unlimited_exec": True, "runs": RunsSettings(allow_unlimited=True)}
    async with running_front(**allowed) as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/exec", json={"cmd": "a", "timeout_ms": None})
        assert (answer.status_code, answer.json()["timeout_ms"]) == (200, None)
        assert running.tree.runs[-1].request.timeout_ms is None
        assert (await client.post(f"{url}/exec", json={"cmd": "a"})).json()["timeout_ms"] == 120_000
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        for route in ("exec", "exec/stream"):
            answer = await client.post(f"{url}/{route}", json={"cmd": "a", "timeout_ms": None})
            assert (answer.status_code, list(answer.json()["details"])) == (400, ["timeout_ms"])


async def test_a_program_reaches_the_sandbox() -> None:
    """Beside the shells, with its own user."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        body = {"argv": ["id", "-u"], "user": "app", "cwd": "/tmp", "env": {"A": "1"}, "exec_id": "e-1"}
        assert (await client.post(f"{url}/exec", json=body)).status_code == 200
        request = running.tree.runs[0].request
        assert isinstance(request, protocol.RunProgram)
        wanted = protocol.RunProgram(
            argv=("id", "-u"), user="app", cwd="/tmp", env={"A": "1"}, exec_id="e-1", timeout_ms=120_000
        )
        assert request == replace(wanted, group=request.group, ticket=request.ticket)
        assert "shell" not in (await client.get(f"{url}/execs/e-1")).json()
