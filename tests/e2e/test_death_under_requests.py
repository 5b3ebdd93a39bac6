"""PID 1 of a session is killed while its clients wait: what each of them hears, over HTTP and over WebSockets."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
import trio
import trio.testing

from tests.api.ws_client import output_of
from tests.e2e.daemon import KEY, Daemon
from tests.e2e.test_websocket import connected
from tests.kernel.processes import init_pids
from tests.waiting import patience, until

MANY_BYTES = 1 << 20
BOUNDARY = "0123456789"


@pytest.fixture
def session(client: httpx.Client) -> str:
    return str(client.post("/v1/sessions", json={}).json()["id"])


@pytest.fixture
def init_pid(daemon: Daemon, session: str) -> int:
    """The PID 1 of the only session there is."""
    (pid,) = init_pids(daemon.process.pid)
    return pid


async def test_every_request_under_way_is_answered_410(daemon: Daemon, session: str, init_pid: int) -> None:
    """Reads, writes and uploads of files, commands and changes under way get one status, one code and one reason. A
    body that had begun is cut off, so that no client takes it for whole.
    """
    outcomes: dict[str, object] = {}
    uploading = trio.Event()

    async def half() -> AsyncIterator[bytes]:
        disposition = 'Content-Disposition: form-data; name="file"; filename="half"'
        path = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="path"\r\n\r\n/workspace\r\n'
        yield f"{path}--{BOUNDARY}\r\n{disposition}\r\n\r\n".encode() + b"x" * MANY_BYTES
        await uploading.wait()
        yield b"x" * MANY_BYTES + f"\r\n--{BOUNDARY}--\r\n".encode()

    headers = {"Authorization": f"Bearer {KEY}"}
    form = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    base_url = f"{daemon.wait_url()}/v1/sessions/{session}"
    async with (
        httpx.AsyncClient(base_url=base_url, headers=headers, timeout=patience(60)) as http,
        trio.open_nursery() as nursery,
    ):
        await http.post("/exec", json={"cmd": "truncate -s 1T big"})
        process = (await http.post("/processes", json={"argv": ["sleep", "1000"]})).json()["exec_id"]

        async def ask(name: str, request: Callable[[], Awaitable[httpx.Response]]) -> None:
            answer = await request()
            body = answer.json()
            outcomes[name] = (answer.status_code, body["error_code"], body["details"]["reason"])

        async def read_on() -> None:
            async with http.stream("GET", "/fs/file", params={"path": "big"}) as answer:
                assert answer.status_code == 200
                os.kill(init_pid, signal.SIGSTOP)
                pieces = answer.aiter_raw()
                await uploading.wait()
                with pytest.raises(httpx.RemoteProtocolError):
                    await _drain(pieces)
                outcomes["read on"] = "cut off"

        async def is_stopped() -> bool:
            return " T " in await trio.Path(f"/proc/{init_pid}/stat").read_text()

        nursery.start_soon(read_on)
        await until(is_stopped)
        requests: dict[str, Callable[[], Awaitable[httpx.Response]]] = {
            "read": lambda: http.get("/fs/read", params={"path": "/etc/passwd"}),
            "write": lambda: http.post("/fs/write", json={"path": "a", "text": "x"}),
            "upload": lambda: http.post("/fs/upload", content=half(), headers=form),
            "exec": lambda: http.post("/exec", json={"argv": ["true"]}),
            "stream": lambda: http.post("/exec/stream", json={"argv": ["true"]}),
            "process": lambda: http.post("/processes", json={"argv": ["true"]}),
            "shell": lambda: http.post("/shells", json={"name": "other"}),
            "signal": lambda: http.post(f"/execs/{process}/signal", json={"signal": "USR1"}),
        }
        for name, request in requests.items():
            nursery.start_soon(ask, name, request)
        await trio.testing.wait_all_tasks_blocked(0.3)
        assert outcomes == {}
        os.kill(init_pid, signal.SIGKILL)
        uploading.set()
    told = dict.fromkeys(requests, (410, "SESSION_EXPIRED", "its init process ended"))
    assert outcomes == {**told, "read on": "cut off"}


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


async def test_connections_hear_the_end_and_are_closed(daemon: Daemon, session: str, init_pid: int) -> None:
    """Begun commands end as `sandbox_died`, queued ones as SESSION_EXPIRED; then commands' and terminals' connections
    are closed.
    """
    async with (
        connected(daemon, session) as runs,
        connected(daemon, session, "terminal") as terminal,
        connected(daemon, session, "terminal", "?shell=default") as view,
    ):
        await runs.say("start", id=1, cmd="echo on; sleep 1000")
        heard = await runs.hear_until("started")
        while output_of(heard) != b"on\n":
            heard.append(await runs.hear())
        os.kill(init_pid, signal.SIGSTOP)
        await runs.say("start", id=2, argv=["true"])
        await runs.say("ping")
        await runs.hear_until("pong")
        os.kill(init_pid, signal.SIGKILL)
        ends: dict[int, object] = {}
        while len(ends) < 2:
            message = await runs.hear()
            assert isinstance(message, dict)
            ends[message["id"]] = message.get("cause") or message["error_code"]
        assert ends == {1: "sandbox_died", 2: "SESSION_EXPIRED"}
        for each in (terminal, view):
            said = ""
            while '"exit"' not in said:
                piece = await each.connection.get_message()
                said = piece if isinstance(piece, str) else ""
            assert json.loads(said)["cause"] == "sandbox_died"
        assert [(await each.hear_close())[0] for each in (runs, terminal, view)] == [4410, 1000, 1000]
