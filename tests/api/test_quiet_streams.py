"""Event streams of a command: pings while no event is shown, and a last event that is small whatever happens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio

from nsinit.wire.protocol import OomKills
from runner.wire.protocol import Cause
from sandkasten.api.http.sse import MAX_EVENT_BYTES
from sandkasten.model import ExecSpec, OnDisconnect, Stream
from tests.api.harness import RunningTree, read_until, request_bytes, running_front
from tests.api.test_exec import make_session
from tests.fakes.runner import Script

FOREVER = 10**9
HIDDEN = {
    "the other stream": (Script([(Stream.STDERR, b"tick\n")], repeat=FOREVER), "stream=stdout"),
    "nothing but escapes": (Script([(Stream.STDOUT, b"\x1b[0m")], repeat=FOREVER), ""),
}


async def begin(running: RunningTree, client: httpx.AsyncClient, script: Script) -> str:
    """Let a command run with the id `e`; return the URL of its stream."""
    url = await make_session(running, client)
    running.tree.scripts["a"] = script
    spec = ExecSpec(command="a", exec_id="e")
    async with running.supervisor.open_exec(url.rpartition("/")[2], spec, on_disconnect=OnDisconnect.DETACH):
        pass
    return f"{url}/execs/e/stream"


@pytest.mark.parametrize(("script", "query"), HIDDEN.values(), ids=HIDDEN.keys())
async def test_pings_come_although_output_does_that_is_not_shown(script: Script, query: str) -> None:
    """Silence is what the client hears, not what the run does."""
    async with running_front(ping_interval_s=0.05) as running, running.client() as client:
        url = await begin(running, client, script)
        async with await running.connect() as stream:
            await stream.send_all(request_bytes("GET", f"{url}?{query}"))
            received = await read_until(stream, b"\r\n\r\n")
            while received.count(b": ping\n\n") < 2:
                received += await read_until(stream, b": ping\n\n")
            assert b"event:" not in received


async def test_no_ping_comes_between_events_that_follow_each_other() -> None:
    """Each write puts the next one off."""
    async with running_front(ping_interval_s=30.0) as running, running.client() as client:
        url = await begin(running, client, Script([(Stream.STDOUT, b"x")] * 20))
        assert b"ping" not in (await client.get(url)).content


DIRECTORIES = {
    "long ASCII": "/" + "d" * 4095,
    "two bytes": "/" + "é" * 2047,
    "outside the BMP": "/" + "\U0001f600" * 1023,
    "control characters": "/" + "\x01" * 4095,
    "quotes": "/" + '"' * 4095,
    "lone surrogates": "/" + "\udcff" * 4095,
}


@pytest.mark.parametrize("cwd", DIRECTORIES.values(), ids=DIRECTORIES.keys())
@pytest.mark.parametrize("timed_out", [False, True])
async def test_the_last_event_is_small_wherever_the_shell_is(cwd: str, *, timed_out: bool) -> None:
    """The shell's directory is cut and marked as cut in the last event, also of a run that was killed for memory; the
    run's own page has all of it.
    """
    killed = trio.Event()
    exec_id = '"' * 128
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        cause: Cause = "timed_out" if timed_out else "signalled"
        running.tree.scripts["a"] = Script(cwd=cwd, cause=cause, exit_code=137, hold=killed)
        running.tree.nsinit.oom_kills = OomKills(0, "\x01" * 15)
        body = {"cmd": "a", "exec_id": exec_id, "timeout_ms": 1000}
        async with client.stream("POST", f"{url}/exec/stream", json=body) as answer:
            running.tree.nsinit.count(url.rpartition("/")[2], {"memory.events": "oom_kill 1"})
            killed.set()
            content = await answer.aread()
        last = content.removesuffix(b"\n\n").rpartition(b"\n\n")[2] + b"\n\n"
        assert len(last) <= MAX_EVENT_BYTES
        end = ending(last, is_error=timed_out)
        whole = (await client.get(f"{url}/execs/{'%22' * 128}")).json()["end"]["cwd"]
        assert whole == cwd.replace("\udcff", "\ufffd")
        assert (end["cwd_truncated"], end.get("victim")) == (True, None if timed_out else "\x01" * 15)
        assert whole.startswith(end["cwd"])
        assert len(json.dumps(end["cwd"])) > 2048 - 12


async def test_a_short_directory_is_not_cut() -> None:
    """Nothing is said about the length."""
    async with running_front() as running, running.client() as client:
        url = await begin(running, client, Script(cwd="/" + "é" * 300))
        end = ending((await client.get(url)).content)
        assert end["cwd"] == "/" + "é" * 300
        assert "cwd_truncated" not in end


def ending(event: bytes, *, is_error: bool = False) -> dict[str, Any]:  # JSON values
    """Return how the run ended by its last event."""
    value: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return dict(value["details"]) if is_error else value
