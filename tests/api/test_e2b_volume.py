"""Much, late and cut-off input to E2B's API, over the daemon's tree with scripted sandboxes: bounds, and what stays."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio

from sandkasten.api.e2b import process
from sandkasten.api.e2b.connect import HEAD, ending, envelope
from sandkasten.app import _front_settings
from sandkasten.config import Config
from sandkasten.config.values import E2bSettings
from tests.api.harness import read_to_end
from tests.api.test_e2b import Front, e2b_front, inside
from tests.fakes.runner import Script
from tests.waiting import patience

_START, _FEED = "/process.Process/Start", "/process.Process/StreamInput"
_MIB = 1024 * 1024
_AT_ONCE = 40
_COMMANDS = 1000


def messages(stream: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the flags and the content of each message of an answer."""
    while stream:
        flags, size = HEAD.unpack_from(stream)
        yield flags, json.loads(stream[HEAD.size : HEAD.size + size])
        stream = stream[HEAD.size + size :]


def streams(sandbox_id: str) -> dict[str, str]:
    return inside(sandbox_id) | {"Content-Type": "application/connect+json"}


def command(name: str) -> bytes:
    return envelope({"process": {"cmd": "run", "args": [name]}, "stdin": False})


def spelled(path: str, head: dict[str, str], body: bytes) -> bytes:
    """Return the bytes of a request."""
    head = head | {"Content-Length": str(len(body)), "Host": "localhost"}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_thousand_commands_on_one_sandbox_end_and_leave_nothing() -> None:
    """Each is answered from its start to its end, and none goes on. An HTTP library would take most of the time."""
    async with e2b_front() as front, front.client() as client:
        sandbox_id = await front.make()
        ended = 0

        async def run() -> None:
            nonlocal ended
            async with await front.running.connect() as stream:
                for _ in range(_COMMANDS // _AT_ONCE):
                    await stream.send_all(spelled(_START, streams(sandbox_id), command("1")))
                    answer = b""
                    while not answer.endswith(b"\r\n0\r\n\r\n"):
                        answer += await stream.receive_some(65536)
                    assert answer.index(b'"start"') < answer.index(b'"exitCode":0') < answer.index(ending())
                    ended += 1

        with trio.fail_after(patience(60)):
            async with trio.open_nursery() as nursery:
                for _ in range(_AT_ONCE):
                    nursery.start_soon(run)
        assert ended == _COMMANDS
        listed = await client.post("/process.Process/List", headers=inside(sandbox_id), json={})
        assert listed.json() == {"processes": []}


async def test_a_message_that_announces_much_is_refused_before_it_comes() -> None:
    """64 MiB in one envelope, or in one unary call, are over the bound: the error comes without reading them."""
    async with e2b_front() as front, front.client() as client:
        sandbox_id = await front.make()
        for content in (HEAD.pack(0, 64 * _MIB) + b"{", command("1")[:3]):
            answer = await client.post(_START, headers=streams(sandbox_id), content=content)
            ((flags, last),) = messages(answer.content)
            assert flags == 2
            assert last["error"]["code"] == ("resource_exhausted" if len(content) > 3 else "invalid_argument")
        head = inside(sandbox_id) | {"Content-Length": str(64 * _MIB), "Host": "localhost"}
        async with await front.running.connect() as stream:
            lines = ["POST /process.Process/List HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            assert b'"resource_exhausted"' in await read_to_end(stream)


async def test_json_may_come_in_chunks() -> None:
    """JavaScript's client sends it so, to the control API and to a sandbox."""

    async def chunks(value: object) -> AsyncIterator[bytes]:
        for byte in json.dumps(value).encode():
            yield bytes([byte])

    async with e2b_front() as front, front.client() as client:
        sandbox_id = await front.make()
        path = f"/sandboxes/{sandbox_id}/timeout"
        head = {"Content-Type": "application/json"}
        assert (await client.post(path, headers=head, content=chunks({"timeout": 50}))).status_code == 204
        found = await client.post("/process.Process/List", headers=inside(sandbox_id), content=chunks({}))
        assert found.json() == {"processes": []}


async def test_input_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not read has its clients told in time, be it a stream of input or one message."""
    monkeypatch.setattr(process, "INPUT_S", 0.2)
    async with e2b_front() as front, front.client() as client:
        sandbox_id = await front.make()
        front.tree.scripts["run deaf"] = Script(reads=trio.Event(), hold=trio.Event())
        deaf = await start_in_background(front, sandbox_id)
        data = base64.b64encode(b"x" * _MIB).decode()
        start, piece = {"start": {"process": {"tag": "t"}}}, {"data": {"input": {"stdin": data}}}
        content = b"".join([envelope(start), *(envelope(piece) for _ in range(8)), ending()])
        answer = await client.post(_FEED, headers=streams(sandbox_id), content=content)
        ((flags, last),) = messages(answer.content)
        assert (flags, last["error"]["code"]) == (2, "deadline_exceeded")
        one = {"process": {"tag": "t"}, "input": {"stdin": data}}
        late = await client.post("/process.Process/SendInput", headers=inside(sandbox_id), json=one)
        await deaf.aclose()
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")


async def test_a_command_whose_sandbox_is_killed_under_it_breaks_off() -> None:
    """No last message says that it has ended by itself."""
    async with e2b_front() as front, front.client() as client:
        sandbox_id = await front.make()
        front.tree.scripts["run deaf"] = Script(hold=trio.Event())
        async with await start_in_background(front, sandbox_id) as stream:
            assert (await client.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
            rest = await read_to_end(stream)
        assert b"end" not in rest
        assert not rest.endswith(b"0\r\n\r\n")


async def start_in_background(front: Front, sandbox_id: str) -> trio.SocketStream:
    """Start a command with the tag `t` and return the connection that follows it."""
    body = envelope({"process": {"cmd": "run", "args": ["deaf"]}, "tag": "t", "stdin": True})
    stream = await front.running.connect()
    await stream.send_all(spelled(_START, streams(sandbox_id), body))
    received = b""
    while b'"start"' not in received:
        received += await stream.receive_some(65536)
    return stream


def test_connections_are_kept_for_as_long_as_e2bs_clients_use_them_again() -> None:
    """Clients do for 300 s, and do not repeat what they sent on one that was closed meanwhile."""
    kept_s = [_front_settings(Config(e2b=E2bSettings(enabled=is_on))).keep_alive_timeout_s for is_on in (True, False)]
    assert kept_s == [310.0, 75.0]
