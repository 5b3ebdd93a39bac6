"""Event streams of a command: pings while no event is shown, and a last event that is small whatever happens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sandkasten.api.http.sse import MAX_EVENT_BYTES
from sandkasten.model import Cause, ExecSpec, OnDisconnect, Stream
from tests.api.harness import RunningFake, read_until, request_bytes, running_fake
from tests.api.test_exec import make_session
from tests.fakes.supervisor import Script

FOREVER = 10**9
HIDDEN = {
    "the other stream": (Script([(Stream.STDERR, b"tick\n")], repeat=FOREVER), "stream=stdout"),
    "nothing but escapes": (Script([(Stream.STDOUT, b"\x1b[0m")], repeat=FOREVER), ""),
}


async def begin(running: RunningFake, client: httpx.AsyncClient, script: Script) -> str:
    """Let a command run with the id `e`; return the URL of its stream."""
    url = await make_session(running, client)
    running.supervisor.scripts["a"] = script
    spec = ExecSpec(command="a", exec_id="e")
    async with running.supervisor.open_exec(url.rpartition("/")[2], spec, on_disconnect=OnDisconnect.DETACH):
        pass
    return f"{url}/execs/e/stream"


@pytest.mark.parametrize(("script", "query"), HIDDEN.values(), ids=HIDDEN.keys())
async def test_pings_come_although_output_does_that_is_not_shown(script: Script, query: str) -> None:
    """Silence is what the client hears, not what the run does."""
    async with running_fake(ping_interval_s=0.05) as running, running.client() as client:
        url = await begin(running, client, script)
        async with await running.connect() as stream:
            await stream.send_all(request_bytes("GET", f"{url}?{query}"))
            received = await read_until(stream, b"\r\n\r\n")
            while received.count(b": ping\n\n") < 2:
                received += await read_until(stream, b": ping\n\n")
            assert b"event:" not in received


async def test_no_ping_comes_between_events_that_follow_each_other() -> None:
    """Each write puts the next one off."""
    async with running_fake(ping_interval_s=30.0) as running, running.client() as client:
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
@pytest.mark.parametrize("cause", [Cause.EXITED, Cause.TIMED_OUT])
async def test_the_last_event_is_small_wherever_the_shell_is(cwd: str, cause: Cause) -> None:
    """The shell's directory is cut and marked as cut in the last event; the run's own page has all of it."""
    exec_id = '"' * 128
    async with running_fake() as running, running.client() as client:
        url = await make_session(running, client)
        running.supervisor.scripts["a"] = Script(cwd=cwd, cause=cause, victim="\x01" * 15)
        answer = await client.post(f"{url}/exec/stream", json={"cmd": "a", "exec_id": exec_id, "timeout_ms": 1000})
        last = answer.content.removesuffix(b"\n\n").rpartition(b"\n\n")[2] + b"\n\n"
        assert len(last) <= MAX_EVENT_BYTES
        end = ending(last, cause)
        whole = (await client.get(f"{url}/execs/{'%22' * 128}")).json()["end"]["cwd"]
        assert whole == cwd.replace("\udcff", "\ufffd")
        assert end["cwd_truncated"] is True
        assert whole.startswith(end["cwd"])
        assert len(json.dumps(end["cwd"])) > 2048 - 12


async def test_a_short_directory_is_not_cut() -> None:
    """Nothing is said about the length."""
    async with running_fake() as running, running.client() as client:
        url = await begin(running, client, Script(cwd="/" + "é" * 300))
        end = ending((await client.get(url)).content, Cause.EXITED)
        assert end["cwd"] == "/" + "é" * 300
        assert "cwd_truncated" not in end


def ending(event: bytes, cause: Cause) -> dict[str, Any]:  # JSON values
    """Return how the run ended by its last event."""
    value: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return value if cause is Cause.EXITED else dict(value["details"])
